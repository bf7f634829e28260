"""The passes, one in each file. A pass in a new file is found automatically."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import pkgutil
from collections.abc import Iterable
from typing import TypeGuard

from fxopt.errors import PassError
from fxopt.importing import imported, in_a_line
from fxopt.rewriting.transformation import Transformation

GROUP = "fxopt.passes"
"""The entry-point group in which other packages offer passes; an entry point has the name of its class."""


def available() -> dict[str, type[Transformation]]:
    """Find every pass of this package that can be made without arguments, by name, sorted.

    Example:
        >>> from fxopt.passes import available
        >>> available()["MergeLinears"]()
        MergeLinears()
    """
    found: dict[str, type[Transformation]] = {}
    for info in pkgutil.iter_modules(__path__, prefix=f"{__name__}."):
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            if _is_ready(value) and value.__module__ == info.name and not name.startswith("_"):
                found[name] = value
    return dict(sorted(found.items()))


def ready(paths: Iterable[str] = ()) -> dict[str, Transformation]:
    """Create all passes with their default options.

    These are the passes of this package, those that installed packages offer in the entry-point group `fxopt.passes`, and
    those of `paths`.

    Args:
        paths: qualified names of pass classes, such as `mypackage.passes.MyPass`.

    Returns:
        The passes by class name, sorted.

    Raises:
        PassError: if a class does not exist, requires arguments, raises, or has the name of another pass.

    Example:
        >>> from fxopt.passes import ready
        >>> passes = ready(["fxopt.passes.merge_linears.MergeLinears"])
        >>> passes["MergeLinears"]
        MergeLinears()
    """
    offered = [point.value.replace(":", ".") for point in importlib.metadata.entry_points(group=GROUP)]
    found = available()
    for path in (*offered, *paths):
        cls = _imported(path)
        if found.setdefault(cls.__name__, cls) is not cls:
            other = found[cls.__name__]
            raise PassError(f"{path}: {other.__module__} has a pass of the same name; give yours another")
    return {name: _made(found[name]) for name in sorted(found)}


def _made(cls: type[Transformation]) -> Transformation:
    try:
        return cls()
    except Exception as error:
        raise PassError(f"pass {cls.__name__}: its constructor raises {in_a_line(error)}") from error


def _imported(path: str) -> type[Transformation]:
    module_name, _, name = path.rpartition(".")
    try:
        cls = getattr(imported(module_name or path, PassError), name, None)
    except PassError as error:
        raise PassError(f"pass {path}: {error}") from error
    if not _is_ready(cls):
        what = f"no class {name!r}" if cls is None else f"{name!r}, which is no pass that takes no arguments"
        raise PassError(f"pass {path}: {module_name} has {what}")
    return cls


def _is_ready(cls: object) -> TypeGuard[type[Transformation]]:
    if not isinstance(cls, type) or not issubclass(cls, Transformation) or inspect.isabstract(cls):
        return False
    parameters = inspect.signature(cls).parameters.values()
    return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
