"""Settles conditions on unbacked sizes if an operator raises an error for one of the outcomes."""

from __future__ import annotations

import dataclasses
import dis
import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

import sympy
import torch

from fxopt.capture.fakes.fake_mode import CaptureFakeMode
from fxopt.capture.nodes.source_location import is_model_code, makes_calls
from fxopt.errors import error_text

T = TypeVar("T")


class AskedInCallError(Exception):
    """A call of torch decides on an unbacked size; the call is repeated once the condition is settled."""


def is_model_error(error: BaseException) -> bool:
    """Tell whether an exception comes from a `raise` or `assert` of the model, or from a check that it calls in torch."""
    if str(error).startswith("cannot reshape tensor of 0 elements into shape"):
        return True  # C++ code raises this also for real tensors: the size in place of -1 is ambiguous
    last: Any = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return False
    code = last.tb_frame.f_code
    inside_torch = os.path.relpath(code.co_filename, os.path.dirname(torch.__file__))
    checks = inside_torch == "__init__.py" or inside_torch.startswith(
        ("ao", "distributions", "nn", "functional.py")
    )
    raises = dis.opname[code.co_code[last.tb_lasti]] == "RAISE_VARARGS"
    return raises and (checks or is_model_code(code.co_filename))


@dataclasses.dataclass(eq=False)
class OperatorChecks:
    """Settles conditions on unbacked sizes inside a call of torch that raises an error for one of the outcomes.

    `raising` stores for each kind of condition whether a call raises, because a trial costs a few calls. `settle(condition,
    outcome, otherwise)` receives the required outcome, and the error for the other outcome.
    """

    fake_mode: CaptureFakeMode
    raising: dict[tuple[Any, str], bool]
    settle: Callable[[Any, bool, str], None]

    def __post_init__(self) -> None:
        # The running function, its first condition, and the conditions that it leaves open.
        self._function: Any = None
        self._asked: Any = None
        self._left_open: set[Any] = set()

    def ask(self, question: Any) -> None:
        """Raise AskedInCallError if a call is running that may raise an error for one of the outcomes."""
        if self._function is None or question in self._left_open:
            return
        if self.raising.get(_kind(self._function, question), True):
            self._asked = question
            raise AskedInCallError

    @makes_calls
    def result_of(self, call: functools.partial[T]) -> T:
        """Make a call and return its result."""
        self._left_open = set()
        shape_env = self.fake_mode.shape_env
        while True:
            known = set(shape_env.var_to_range)
            self._function, self._asked = call.func, None
            try:
                result = call()
            except Exception:  # torch may convert AskedInCallError to an error of its own
                if self._asked is None:
                    raise
            finally:
                self._function = None
            if self._asked is None:
                return result
            self._try(call, self._asked)
            shape_env.drop_unknown_symbols(known)

    def _try(self, call: functools.partial[Any], question: Any) -> None:
        """Make a call with both outcomes of a condition."""
        errors = {answer: _error(call, question, answer, self.fake_mode) for answer in (True, False)}
        raises = (errors[True] is None) != (errors[False] is None)
        self.raising.setdefault(_kind(call.func, question), raises)
        if raises:
            answer = errors[True] is None
            self.settle(question, answer, errors[not answer] or "")
        else:
            self._left_open.add(question)


def _kind(function: Any, question: Any) -> tuple[Any, str]:
    """Return the function and the condition with neutral names of sizes, so that the kind is the same for all sizes."""
    symbols = sorted(question.free_symbols, key=str)
    return function, str(question.xreplace({s: sympy.Symbol(f"n{i}") for i, s in enumerate(symbols)}))


def _error(call: Callable[[], Any], question: Any, answer: bool, fake_mode: CaptureFakeMode) -> str | None:
    """Return the model's error of a call with this outcome, unless it reads another condition first; without side effects."""
    shape_env = fake_mode.shape_env
    answers = {question: answer, sympy.Not(question): not answer}
    asked = False

    def decide(expression: Any) -> Any:
        nonlocal asked
        if expression in answers:
            return sympy.sympify(answers[expression])
        asked = True
        raise AskedInCallError

    outer, cached, drawn = shape_env.decide, fake_mode.cache_enabled, fake_mode.drawn
    shape_env.decide, fake_mode.cache_enabled = decide, False
    try:
        with shape_env.suppress_guards(), torch.no_grad():
            call()
    except Exception as error:
        return error_text(error) if is_model_error(error) and not asked else None
    finally:
        shape_env.decide, fake_mode.cache_enabled, fake_mode.drawn = outer, cached, drawn
    return None
