"""Modules of users, imported by their names."""

from __future__ import annotations

import importlib
import traceback
from types import ModuleType


def imported(name: str, failure: type[Exception]) -> ModuleType:
    """Import the module of this name; whatever its code raises becomes a `failure` in one sentence, with the line.

    Example:
        >>> imported("operator", ValueError).add(1, 2)
        3
    """
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # the boundary to the code of users, which may raise anything
        lines = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
        own = [line for line in lines if "importlib" not in line and not line.startswith(__file__)]
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise failure(f"{name} cannot be imported: {text}{f', at {own[-1]}' if own else ''}") from error
