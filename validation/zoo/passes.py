"""The passes that pipelines may name: those installed, and what a zoo file adds by its path."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import fxopt.passes
from fxopt.errors import PassError
from fxopt.rewriting.transformation import Transformation

from . import yaml_file


def passes_of(zoo: Path, paths: Iterable[str] = ()) -> dict[str, Transformation]:
    """Every pass that a zoo file may name, by its name: those installed, those at `paths`, and its own.

    What else may be wrong with the file, `load_zoo` tells.

    Raises:
        ZooError: where the file cannot be read, or its passes cannot be made.
        PassError: where one of `paths` is no pass.
    """
    data, paths = yaml_file.read(zoo), list(paths)
    found = fxopt.passes.ready(paths)
    mistakes: list[tuple[tuple[Any, ...], str]] = []
    for where, said in _said(data):
        try:
            if isinstance(said, str) and "." in said:
                found |= fxopt.passes.ready([*paths, said])
                paths.append(said)
            elif said not in found:
                known = (
                    f"there are {', '.join(sorted(found))}, and yours by its path, mypackage.passes.MyPass"
                )
                raise PassError(f"no such pass: {said!r}; {known}")
        except PassError as error:
            mistakes.append((where, str(error)))
    if mistakes:
        raise yaml_file.mistakes(zoo, data, mistakes)
    return dict(sorted(found.items()))


def name_of(said: str) -> str:
    """The name of a pass as a zoo file says it."""
    return said.rpartition(".")[2]


def _said(data: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every mention of a pass in a zoo file, and its place; what is no list of texts, the schema refuses."""
    data = data if isinstance(data, dict) else {}
    pipelines = data.get("pipelines")
    lists: dict[tuple[str, ...], Any] = {("passes",): data.get("passes")}
    if isinstance(pipelines, dict):
        lists |= {("pipelines", name): passes for name, passes in pipelines.items()}
    for where, passes in lists.items():
        for index, said in enumerate(passes if isinstance(passes, list) else ()):
            if isinstance(said, str):
                yield (*where, index), said
