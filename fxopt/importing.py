"""The code of users, which may raise anything: modules imported by their names, and errors in a line."""

from __future__ import annotations

import importlib
import traceback
from types import ModuleType


def imported(name: str, failure: type[Exception]) -> ModuleType:
    """Import the module of this name; whatever its code raises becomes a `failure`.

    Example:
        >>> imported("operator", ValueError).add(1, 2)
        3
    """
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise failure(f"{name} cannot be imported: {in_a_line(error)}") from error


def in_a_line(error: BaseException) -> str:
    """The kind of an error, its text, and the line that raised it, but for those of the import itself."""
    lines = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
    own = [line for line in lines if "importlib" not in line and not line.startswith(__file__)]
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return f"{text}, at {own[-1]}" if own else text
