"""The passes that pipelines may name: those installed, and what a zoo file adds, by its path or with options."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pydantic
import torch

import fxopt.passes
from fxopt.errors import FxoptError, PassError
from fxopt.importing import imported
from fxopt.rewriting.transformation import Transformation

from . import yaml_file

FORM = "a pass is its name, its path (mypackage.passes.MyPass), or {pass: {option: value, ...}}"


class ZooError(FxoptError):
    """The zoo file is wrong: the message names file, line, entry and field, one line a mistake."""


def passes_of(zoo: Path, paths: Iterable[str] = ()) -> dict[str, Transformation]:
    """Every pass that a zoo file may name, by its name: those installed, those at `paths`, and its own.

    A pass with options is called by its class and these: `{ChangePrecision: {dtype: float16}}` makes the pass
    `ChangePrecision_dtype_float16`. What else may be wrong with the file, `load_zoo` tells.

    Raises:
        ZooError: where the file cannot be read, or its passes cannot be made.
        PassError: where one of `paths` is no pass.
    """
    try:
        root, data = yaml_file.read(zoo)
    except yaml_file.YamlError as error:
        raise ZooError(str(error)) from error
    paths, mistakes = list(paths), []
    found, said_of = fxopt.passes.ready(paths), dict[str, object]()
    for where, said in _said(data):
        try:
            if isinstance(said, str) and "." in said:
                found |= fxopt.passes.ready([*paths, said])
                paths.append(said)
            elif isinstance(said, str):
                _known(said, found)
            else:
                name, pass_ = _with_options(said, found)
                if name in found and said_of.get(name) != said:
                    raise _Mistake(f"another pass has the name {name!r}")
                found[name], said_of[name] = pass_, said
        except PassError as error:
            mistakes.append((where, str(error)))
        except _Mistake as error:
            mistakes.append(((*where, *error.where), str(error)))
    if mistakes:
        raise ZooError("\n".join(yaml_file.message(zoo, root, where, what) for where, what in mistakes))
    return dict(sorted(found.items()))


def name_of(said: object) -> str:
    """The name of a pass as a zoo file says it."""
    if isinstance(said, str):
        return said.rpartition(".")[2]
    ((path, options),) = typing.cast("Mapping[str, Mapping[str, Any]]", said).items()
    parts = [path.rpartition(".")[2], *(str(part) for option in options.items() for part in option)]
    return "_".join(re.sub(r"\W+", "_", part).strip("_") for part in parts)


class _Mistake(ValueError):
    def __init__(self, text: str, *where: str) -> None:
        super().__init__(text)
        self.where = where


def _said(data: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every mention of a pass in a zoo file, and its place; what is no list, the schema refuses."""
    data = data if isinstance(data, dict) else {}
    named = data.get("pipelines")
    lists: dict[tuple[Any, ...], Any] = {("passes",): data.get("passes")}
    lists |= {
        ("pipelines", name): passes for name, passes in (named if isinstance(named, dict) else {}).items()
    }
    for where, passes in lists.items():
        for index, said in enumerate(passes if isinstance(passes, list) else ()):
            yield (*where, index), said


def _known(name: str, passes: Mapping[str, Transformation]) -> Transformation:
    if name not in passes:
        known = ", ".join(sorted(passes))
        raise _Mistake(
            f"no such pass: {name!r}; there are {known}, and yours by its path, mypackage.passes.MyPass"
        )
    return passes[name]


def _with_options(said: Any, passes: Mapping[str, Transformation]) -> tuple[str, Transformation]:
    """A pass that is said as `{pass: {option: value}}`, and its name."""
    if not isinstance(said, dict) or len(said) != 1:
        raise _Mistake(FORM)
    ((path, options),) = said.items()
    if not isinstance(path, str) or not isinstance(options, dict) or not options:
        raise _Mistake(FORM)
    cls = _class(path) if "." in path else type(_known(path, passes))
    hints, values = _types(cls), {}
    for option, value in options.items():
        if option not in hints:
            raise _Mistake(
                f"{path} has no such option; it has {', '.join(hints) or 'none'}", path, str(option)
            )
        try:
            values[option] = _value(hints[option], value)
        except pydantic.ValidationError as error:
            text = error.errors()[0]["msg"]
            kind = inspect.formatannotation(hints[option])
            raise _Mistake(f"{value!r} is no {kind}: {text}", path, option) from error
    try:
        return name_of(said), cls(**values)
    except (TypeError, ValueError, PassError) as error:
        raise _Mistake(str(error), path) from error


def _class(path: str) -> type[Transformation]:
    module_name, _, name = path.rpartition(".")
    cls = getattr(imported(module_name, _Mistake), name, None)
    if not isinstance(cls, type) or not issubclass(cls, Transformation) or inspect.isabstract(cls):
        raise _Mistake(f"{path} is no pass")
    return cls


def _types(cls: type[Transformation]) -> dict[str, Any]:
    """The options of a pass, and their types."""
    try:
        hints = typing.get_type_hints(cls if dataclasses.is_dataclass(cls) else cls.__init__)
    except NameError:  # imported for type checkers alone: the pass itself refuses what it does not take
        hints = {}
    known = inspect.signature(cls).parameters.values()
    return {
        p.name: hints.get(p.name, Any) for p in known if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }


def _value(kind: Any, value: Any) -> Any:
    """A value of a file as an option takes it: `float16` for a dtype, a list for a tuple."""
    adapter = pydantic.TypeAdapter(kind, config=pydantic.ConfigDict(arbitrary_types_allowed=True))
    dtype = getattr(torch, value, None) if isinstance(value, str) else None
    if isinstance(dtype, torch.dtype):
        try:
            return adapter.validate_python(dtype)
        except pydantic.ValidationError:
            pass  # a word for something else
    return adapter.validate_python(value)
