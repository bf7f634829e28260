"""Decisions on values: what Python asks of the numbers in a tensor, which no fake tensor can answer.

`if mask.all():` asks. There are three ways on. Where one side raises, the other is taken, and a check in the place of
the question raises in its stead. `specialize=True` takes the side that the example inputs decide for, with a check as
well. Otherwise the capture ends, with the line that asks.
"""

from __future__ import annotations

import dataclasses
import dis
import os
from collections.abc import Callable
from typing import Any, TypeVar

import sympy
import torch

from fxopt.capture.canonical import canonical
from fxopt.capture.example_run import ExampleRun
from fxopt.capture.guards import check_decision
from fxopt.capture.ones import CaptureShapeEnv
from fxopt.capture.places import is_model_code
from fxopt.capture.sizes import Sizes
from fxopt.capture.writer import GraphWriter, tensors_in
from fxopt.errors import TraceError

T = TypeVar("T")

# The methods that make a Python value of a tensor, and functions that return one, with its type.
READS: dict[str, type] = {
    **dict.fromkeys(("__bool__", "is_nonzero", "__contains__", "equal", "allclose"), bool),
    **dict.fromkeys(("__int__", "__index__"), int),
    "__float__": float,
    "__complex__": complex,
}
ARRAYS = {"numpy", "__array__"}

# Each question that is settled by looking at both sides costs two captures up to the next one.
_MOST_QUESTIONS = 50


class ValueQuestion(TraceError):
    """The forward decides on a value, at `where`, and nothing says how; `kind` is the type of the answer."""

    def __init__(self, message: str, kind: type, where: str) -> None:
        super().__init__(message)
        self.kind, self.where = kind, where


class TextQuestion(ValueQuestion):
    """The forward looks something up by a text that holds a value, as in `experts[f"expert_{number}"]`."""


Q = TypeVar("Q", bound=ValueQuestion)


@dataclasses.dataclass
class Settled:
    """The answer to a question, the error of the model to which the other one leads, and whether it was asked for."""

    answer: bool
    otherwise: str = ""
    asked: bool = False


class Decisions:
    """The decisions on values of one capture, in the order in which the forward asks.

    `settled` answers the first questions, and `example`, where there is one, the others. Most texts that hold a value are
    messages of errors, which ask nothing: what stands in them is decided only with `reads_texts`.
    """

    def __init__(
        self,
        writer: GraphWriter,
        sizes: Sizes,
        shape_env: CaptureShapeEnv,
        settled: tuple[Settled, ...] = (),
        example: ExampleRun | None = None,
        reads_texts: bool = False,
    ) -> None:
        self._writer, self._sizes, self._shape_env = writer, sizes, shape_env
        self._settled, self._example, self._reads_texts = settled, example, reads_texts
        self._known: dict[Any, Any] = {}
        # The checks, one line each.
        self.checks: list[str] = []
        # The first question without an answer; a forward may catch the error, but a graph must not come of it.
        self.open: ValueQuestion | None = None
        # The last text that was made of a value which is not known.
        self.text_question: TextQuestion | None = None

    def read(self, name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `function`, one of `READS`, gives on tensors."""
        kind = READS[name]
        if len(args) == 1 and not kwargs and name != "__contains__":
            node = self._writer.argument(args[0])
        else:
            op, target, args, kwargs = canonical(function, args, kwargs)
            node = self._writer.create(op, target, *self._writer.arguments(name, args, kwargs), None)
        tensors = list(tensors_in((args, kwargs)))
        if any(t.is_inference() for t in tensors):
            return self._decide(node, kind)  # they count no writes
        key = node, tuple(t._version for t in tensors), kind
        if key not in self._known:
            self._known[key] = self._decide(node, kind)
        return self._known[key]

    def text(self, tensor: torch.Tensor, specification: str) -> str:
        """What `format` gives for a tensor without dimensions."""
        kind = bool if tensor.dtype == torch.bool else float if tensor.is_floating_point() else int
        if self._reads_texts and not tensor.is_complex():
            return format(self.read(f"__{kind.__name__}__", None, (tensor,), {}), specification)
        self.text_question = self._question(self._writer.argument(tensor), str, TextQuestion)
        return object.__format__(tensor, "")

    def array(self, tensor: torch.Tensor) -> Any:
        """A tensor as a numpy array, all of whose values the graph then takes for granted."""
        node = self._writer.argument(tensor)
        if self._example is None:
            raise self._opened(node, torch.Tensor)
        value = self._example.read(node, lambda tensor: tensor.detach().clone())
        constant = self._writer.create("get_attr", self._writer.constant(value), (), {}, None)
        self._check(node, constant, "")
        return self._example.read(node, lambda tensor: tensor.detach().clone().numpy())

    def size(self, expression: Any) -> Any:
        """The value of a sympy expression of numbers that only a run knows; None if it cannot be told."""
        if not all(map(self._sizes.has_source, expression.free_symbols)):
            return None
        yes_or_no = not isinstance(expression, sympy.Expr)
        integers = all(symbol.is_integer for symbol in expression.free_symbols)
        kind = bool if yes_or_no else int if integers else float
        node = self._sizes.node(self._shape_env.symbolic(expression, kind))
        answer = self._decide(node, kind) if isinstance(node, torch.fx.Node) else node
        if integers:
            fact = (
                sympy.Eq(expression, answer)
                if not yes_or_no
                else expression
                if answer
                else sympy.Not(expression)
            )
            if isinstance(fact, sympy.Rel):
                self._shape_env.learn(fact)
        return sympy.sympify(answer)

    def _decide(self, node: torch.fx.Node, kind: type) -> Any:
        if len(self.checks) < len(self._settled) and kind is bool:
            settled = self._settled[len(self.checks)]
            settled.asked = True
            self._check(node, settled.answer, settled.otherwise)
            return settled.answer
        if self._example is None:
            raise self._opened(node, kind)
        answer = self._example.read(node, kind)
        self._check(node, answer, "")
        return answer

    def _check(self, node: torch.fx.Node, decided: Any, otherwise: str) -> None:
        where = self._writer.where()
        self.checks.append(f"{decided}: {where}")
        self._writer.create("call_function", check_decision, (node, decided, where, otherwise), {}, None)

    def _opened(self, node: torch.fx.Node, kind: type) -> ValueQuestion:
        question = self._question(node, kind, ValueQuestion)
        self.open = self.open or question
        return question

    def _question(self, node: torch.fx.Node, kind: type, question: type[Q]) -> Q:
        return question(
            f"the forward decides on the value of a tensor, which a graph cannot. {self._writer.where()} The value is "
            f"{self._writer.origin(node)}. Capture with specialize=True, which takes the decision that the example "
            "inputs give and checks it in the graph; or compute with `torch.where`, pass the decision as an argument, "
            "or make the module a leaf (leaf_modules=...).",
            kind,
            self._writer.where(),
        )


def settled_by_errors(capture: Callable[[tuple[Settled, ...]], T]) -> T:
    """What `capture` returns, with each question settled of which one side raises an error of the model's own.

    `capture(settled)` captures with answers to the first questions and raises ValueQuestion at the next one. Both
    sides are tried; a side counts as raising if the forward ends there with an error and asks nothing before.
    """
    settled: tuple[Settled, ...] = ()
    raising: dict[str, bool] = {}
    while True:
        try:
            return capture(settled)
        except ValueQuestion as question:
            if question.kind is not bool or len(settled) == _MOST_QUESTIONS:
                raise
            # What raised at this line before (in an earlier layer) is tried first.
            first = raising.get(question.where, False)
            errors = {
                answer: _error_of(capture, (*settled, Settled(answer))) for answer in (first, not first)
            }
            if (errors[True] is None) == (errors[False] is None):
                raise
            answer = errors[True] is None
            raising[question.where] = not answer
            settled = (*settled, Settled(answer, errors[not answer] or ""))


def _error_of(capture: Callable[[tuple[Settled, ...]], Any], settled: tuple[Settled, ...]) -> str | None:
    """The error of the model's own to which the last of these answers leads."""
    try:
        capture(settled)
    except ValueQuestion:
        return None
    except TraceError as failure:
        error = failure.__cause__
        if error is not None and settled[-1].asked and _is_raised(error):
            return f"{type(error).__name__}: {error}"
    return None


def _is_raised(error: BaseException) -> bool:
    """Whether an exception comes from a `raise` or `assert` of the model, or from a check that it calls in torch."""
    last: Any = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return False
    code = last.tb_frame.f_code
    inside_torch = os.path.relpath(code.co_filename, os.path.dirname(torch.__file__))
    checks = inside_torch == "__init__.py" or inside_torch.startswith(
        ("distributions", "nn", "functional.py")
    )
    raises = dis.opname[code.co_code[last.tb_lasti]] == "RAISE_VARARGS"
    return raises and (checks or is_model_code(code.co_filename))
