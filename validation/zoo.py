"""The zoo: `model_zoo.yaml` as checked data. A mistake in the file is one message with entry, field and line."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import pydantic
from pydantic import Field

from . import yaml_file
from .entry import Entry, ZooFile
from .passes import ZooError, name_of
from .zoo_mistakes import mistakes_in


def load_zoo(path: Path, passes: Collection[str]) -> list[Entry]:
    """The entries of the zoo file at `path`, checked against its schema, the code, and the names of passes.

    Raises `ZooError` when the file, or that of the recorded sites, cannot be read or says something wrong.
    """
    try:
        root, data = yaml_file.read(path)
    except yaml_file.YamlError as error:
        raise ZooError(str(error)) from error
    mistakes = list(yaml_file.repeated_keys(root))
    if not mistakes:
        try:
            file = ZooFile.model_validate(data)
        except pydantic.ValidationError as error:
            places = [e["loc"] for e in error.errors()]
            mistakes = [
                (e["loc"], e["msg"].removeprefix("Value error, "))
                for e in error.errors()
                # a list whose items are wrong is also too short for pydantic
                if not any(place != e["loc"] and place[: len(e["loc"])] == e["loc"] for place in places)
            ]
        else:
            mistakes = [*mistakes_in(file, passes)]
    if mistakes:
        raise ZooError("\n".join(yaml_file.message(path, root, where, what) for where, what in mistakes))
    order, recorded = dict.fromkeys([*file.order, *sorted(passes)]), recorded_sites(path)
    named = {name: tuple(map(name_of, said)) for name, said in file.pipelines.items()}
    return [
        entry.model_copy(
            update={
                "sites": {name: recorded.get(entry.name, {}).get(name) for name in order},
                "pipelines": named,
            }
        )
        for entry in file.models
    ]


def sites_file(zoo: Path) -> Path:
    """The file beside a zoo file that records how many sites each pass rewrites alone in each model."""
    return zoo.with_suffix(".sites.yaml")


def recorded_sites(zoo: Path) -> dict[str, dict[str, int]]:
    """The sites that are recorded for a zoo file, by model and pass; none where there is no such file."""
    form = pydantic.TypeAdapter(dict[str, dict[str, Annotated[int, Field(ge=0, strict=True)]]])
    try:
        return form.validate_python(yaml_file.read(file)[1]) if (file := sites_file(zoo)).exists() else {}
    except ValueError as error:
        text = f"not what `fxopt zoo sites` writes: delete it, and record anew ({error})"
        raise ZooError(f"{file}: {' '.join(text.split())}") from error
