"""The errors of fxopt. Each message says what is wrong, where, and what to do."""

from __future__ import annotations

import re
import signal
import sys
import traceback
import types
import warnings
from typing import Any, ClassVar

_OURS = re.compile(r"(fxopt|torch)\b")


class FxoptError(Exception):
    """Base of every error that fxopt raises on purpose. The text ends with the notes, if there are any."""

    # One note for each private name that fxopt needs and this torch lacks, because that may cause any of these errors.
    notes: ClassVar[list[str]] = []

    def __str__(self) -> str:
        text = super().__str__()
        return " ".join([text, *(f"[{note}]" for note in self.notes if note not in text)])


class TraceError(FxoptError):
    """The forward of a model cannot be captured as a graph without changing its meaning."""


class GuardError(FxoptError):
    """A captured graph was called with an input, or in a mode, for which it is not valid."""


class PassError(FxoptError):
    """A pass cannot do what it was asked to; the graph is unchanged."""


class UndoError(PassError):
    """A rewrite cannot be undone exactly, for example because its record is gone."""


FIRST_CALL = ". If only the first call does so, call the model once before the capture"
"""Advice in the text of a TraceError about state that a model may set up at its first call."""


def error_text(error: BaseException) -> str:
    """Return the class of an error, and its message."""
    return f"{type(error).__name__}: {error}"


def raise_of_signal(error: BaseException | None, known: BaseException | None) -> None:
    """Raise an error again if it, or one of its causes, was raised by a signal handler, such as that of a time limit.

    The handler must be a Python function, a partial of one or an object with a `__call__`, and still be installed.

    Args:
        error: the caught error.
        known: the value of `sys.exception()` before the call that failed; this error and its causes are ignored.
    """
    codes = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    seen = {id(known)}
    while error is not None and id(error) not in seen:
        if any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__)):
            raise error from error.__cause__
        seen.add(id(error))
        error = error.__cause__ or error.__context__


def _code_of(handler: Any) -> types.CodeType | None:
    function = getattr(handler, "func", handler)
    if not callable(function):  # such as SIG_DFL
        return None
    return getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)


def warn(text: str, category: type[Warning]) -> None:
    """Warn at the line of the caller: the first frame outside of fxopt, torch, and the code that these generate."""
    level = 1
    while (frame := sys._getframe(level)).f_back and _OURS.match(frame.f_globals.get("__name__", "fxopt")):
        level += 1
    warnings.warn(text, category, stacklevel=level + 1)


class FallbackWarning(UserWarning):
    """An optimized module falls back to eager, or to float32; `print(fast.report)` lists the reasons."""


class VerificationWarning(UserWarning):
    """A rewritten site did not compute the same outputs as the original, and was rolled back."""


class UnverifiedWarning(UserWarning):
    """A site could not be run separately, so its rewrite was not verified."""


class SaveError(FxoptError):
    """A graph module cannot be saved; the content of the folder is unchanged."""


class LoadError(FxoptError):
    """A folder cannot be loaded: a file is missing, damaged, of another format, or names code that is refused."""
