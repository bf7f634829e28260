"""Imports code of users, which may raise anything, and describes its errors in one line."""

from __future__ import annotations

import importlib
import traceback
from types import ModuleType


def imported(name: str, failure: type[Exception]) -> ModuleType:
    """Import the module of this name; any error of its code is raised as a `failure`.

    Example:
        >>> imported("operator", ValueError).add(1, 2)
        3
    """
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise failure(f"{name} cannot be imported: {in_a_line(error)}") from error


def in_a_line(error: BaseException) -> str:
    """Describe an error: its class, its text, and the last line of its traceback outside of the import machinery."""
    lines = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
    own = [line for line in lines if "importlib" not in line and not line.startswith(__file__)]
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return f"{text}, at {own[-1]}" if own else text
