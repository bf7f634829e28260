"""The errors of fxopt. Each message says what is wrong, where, and what to do."""

from __future__ import annotations

import re
import signal
import sys
import traceback
import warnings
from typing import ClassVar

_OURS = re.compile(r"(fxopt|torch)\b")


class FxoptError(Exception):
    """Base of every error that fxopt raises on purpose. The text ends with the notes, if there are any."""

    # One for each private name that fxopt needs and this torch lacks: that may be the cause of any refusal.
    notes: ClassVar[list[str]] = []

    def __str__(self) -> str:
        text = super().__str__()
        return " ".join([text, *(f"[{note}]" for note in self.notes if note not in text)])


class TraceError(FxoptError):
    """The forward of a model cannot be captured as a graph without changing its meaning."""


class GuardError(FxoptError):
    """A captured graph was called with an input, or in a mode, that it was not proved for."""


class PassError(FxoptError):
    """A pass cannot do what it was asked to; the graph is as it was before."""


class UndoError(PassError):
    """A rewrite cannot be undone exactly, for example because its record is gone."""


def error_text(error: BaseException) -> str:
    """The class of an error, and its message."""
    return f"{type(error).__name__}: {error}"


def of_signal_handler(error: BaseException | None) -> BaseException | None:
    """The one among an error and its causes that a handler of a signal raised, such as that of a time limit; None if there is none."""
    handlers = map(signal.getsignal, signal.valid_signals())
    codes = {getattr(handler, "__code__", None) for handler in handlers} - {None}
    while error is not None:
        if any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__)):
            return error
        error = error.__cause__ or error.__context__
    return None


def warn(text: str, category: type[Warning]) -> None:
    """Warn at the line of the caller, behind all frames of fxopt, torch, and the code that these generate."""
    level = 1
    while (frame := sys._getframe(level)).f_back and _OURS.match(frame.f_globals.get("__name__", "fxopt")):
        level += 1
    warnings.warn(text, category, stacklevel=level + 1)


class FallbackWarning(UserWarning):
    """An optimized module falls back to eager, or to float32; `print(fast.report)` lists the reasons."""


class VerificationWarning(UserWarning):
    """A site did not compute what it had computed before, when both were run, and was taken back."""


class UnverifiedWarning(UserWarning):
    """A site could not be run by itself, so that nothing is known of it but what its pass proved."""


class SaveError(FxoptError):
    """A graph module cannot be saved; what was in the folder is there as before."""


class LoadError(FxoptError):
    """A folder holds no graph module that can be loaded: a file is missing, damaged, newer, or names what is refused."""
