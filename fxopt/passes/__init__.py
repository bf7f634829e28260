"""The passes, one a file. A new file is found by itself: nothing else has to change."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import TypeGuard

from fxopt.rewriting.transformation import Transformation


def available() -> dict[str, type[Transformation]]:
    """Every pass of this package that can be made without arguments, by name, sorted.

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


def _is_ready(cls: object) -> TypeGuard[type[Transformation]]:
    if not isinstance(cls, type) or not issubclass(cls, Transformation) or inspect.isabstract(cls):
        return False
    parameters = inspect.signature(cls).parameters.values()
    return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
