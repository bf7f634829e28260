"""Decisions on values: Python reads numbers in a tensor (`if mask.all():`), which a fake tensor does not have.

The script of a run gives the outcome or, with `specialize=True`, the example inputs do; otherwise the branch stays open. For
each decision, the graph gets a runtime check.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
from typing import Any, TypeVar

import sympy
import torch

from fxopt.capture.data_dependence.branches import (
    MOST_ROUNDS,
    DataDependentBranch,
    DataDependentLoop,
    DataDependentText,
    DataDependentWhile,
    NumberBranch,
    Outcomes,
)
from fxopt.capture.data_dependence.example_run import ConstantRun, ExampleRun
from fxopt.capture.data_dependence.operator_checks import OperatorChecks
from fxopt.capture.data_dependence.python_state import FrameSnapshot, python_state
from fxopt.capture.data_dependence.source_statements import asserted_error, is_diagnostic, is_endless
from fxopt.capture.fakes.fake_mode import CaptureFakeMode
from fxopt.capture.fakes.shape_env import LEARNED
from fxopt.capture.nodes.call_targets import canonical
from fxopt.capture.nodes.graph_writer import GraphWriter
from fxopt.capture.nodes.source_location import describe_origin, model_frame
from fxopt.capture.runtime.checks import check_outcome, check_same_outcome
from fxopt.objects import tensors_in
from fxopt.torch_internals import version_of

# The methods and functions that return a Python value read from tensors, with its type.
READS: dict[str, type] = {
    **dict.fromkeys(("__bool__", "is_nonzero", "__contains__", "equal", "allclose"), bool),
    **dict.fromkeys(("__int__", "__index__"), int),
    "__float__": float,
    "__complex__": complex,
}
ARRAYS = {"numpy", "__array__"}

# The limit for a loop that would never end, because it repeats while the answer is the same.
_MOST_QUESTIONS_BY_LINE = 1000


Q = TypeVar("Q", bound=DataDependentBranch)


# The writes in the body of a branch, each with the index that selects the elements.
Body = list[tuple[torch.fx.Node, Any]]


@dataclasses.dataclass(frozen=True)
class BranchAtLine:
    """A branch whose outcome the script gives by line."""

    node: torch.fx.Node  # its check
    where: str
    answer: bool
    drawn: int  # how often random numbers were drawn before
    state: FrameSnapshot  # Python variables at the branch


@dataclasses.dataclass(eq=False)
class BranchDecisions:
    """The decisions on values in one run; `answers` is the script, and `example` decides the branches after it."""

    writer: GraphWriter
    fake_mode: CaptureFakeMode
    answers: Outcomes
    example: ExampleRun | None
    raising: dict[tuple[Any, str], bool]
    # Whether the value of a size is read if the size is the key of a dict; otherwise, hashing the size raises an error.
    reads_dict_keys: bool
    # Whether parameters and buffers decide by their current values.
    by_state: bool

    def __post_init__(self) -> None:
        self.sizes, self._shape_env = self.writer.sizes, self.fake_mode.shape_env
        self.constant = ConstantRun(self.writer, self.by_state)
        self._answered = 0
        self._known: dict[Any, Any] = {}
        # The outcomes of conditions on sizes that are decided already.
        self._supposed: dict[Any, bool] = {}
        self.calls = OperatorChecks(self.fake_mode, self.raising, self._settle)
        # The branches that the script decides by line, at each line.
        self.asked_at: dict[str, list[BranchAtLine]] = collections.defaultdict(list)
        self._asked_by_line = 0
        # The line of the loop over positions of a mask that is running, and its position.
        self.running: tuple[str, int] | None = None
        # Descriptions of the checks of decisions, one line each.
        self.checks: list[str] = []
        # The first open branch; even if the forward catches its error, the run must not return a graph.
        self.open: DataDependentBranch | None = None
        # The last text that was made of an unknown value, except for messages.
        self.text_question: DataDependentText | None = None

    @property
    def specialised(self) -> bool:
        """Tell whether the example inputs decide."""
        return self.example is not None

    @property
    def count(self) -> int:
        """The number of decisions so far."""
        return len(self.checks) + sum(map(len, self.asked_at.values()))

    def read(self, name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the Python value that `function`, one of `READS`, reads from tensors."""
        kind = READS[name]
        if len(args) == 1 and not kwargs and name != "__contains__":
            node = self.writer.argument(args[0])
        else:
            op, target, args, kwargs = canonical(function, args, kwargs)
            node = self.writer.create(op, target, *self.writer.arguments(name, args, kwargs), None)
        tensors = list(tensors_in((args, kwargs)))
        if any(t.is_inference() for t in tensors):
            return self._decide(node, kind)  # inference tensors do not count writes
        key = node, tuple(version_of(t) for t in tensors), kind
        if key not in self._known:
            self._known[key] = self._decide(node, kind)
        return self._known[key]

    def runs(self, place: torch.Tensor, position: int) -> bool:
        """Tell whether a loop runs at a position: as the script decides for its line, unless the model raises an error there."""
        node, line = self.writer.argument(place), self.writer.location()
        end, error = self.answers.ends.get(line, (None, ""))
        if end is not None and position >= end:
            self._check(node, False, error)
            return False
        answer = self._by_line(node, bool, counted=False)
        if answer is None:
            raise self._opened(node, bool, DataDependentLoop)
        self.running = (line, position) if answer else None
        return answer

    def text(self, name: str, tensor: torch.Tensor, specification: str = "") -> str:
        """Return the text that `__format__` or `__repr__` makes of a tensor; for a message, any text will do."""
        message = is_diagnostic(model_frame(sys._getframe(1)))
        number = name == "__format__" and not tensor.dim() and not tensor.is_complex()
        if self.specialised and number and not message:
            kind = bool if tensor.dtype == torch.bool else float if tensor.is_floating_point() else int
            return format(self.read(f"__{kind.__name__}__", None, (tensor,), {}), specification)
        self.note_text(tensor)
        return object.__format__(tensor, "")

    def note_text(self, value: Any) -> None:
        """Record that text is made of an unknown value, unless the text is a message."""
        if not is_diagnostic(model_frame(sys._getframe(1))):
            self.text_question = self._question(self.writer.argument(value), str, DataDependentText)

    def array(self, tensor: torch.Tensor) -> Any:
        """Return a tensor as a numpy array; the graph then checks all of its values."""
        node = self.writer.argument(tensor)
        if self.example is None:
            raise self._opened(node, torch.Tensor)
        value = self.example.read(node, lambda tensor: tensor.detach().clone())
        constant = self.writer.create("get_attr", self.writer.constant(value), (), {}, None)
        self._check(node, constant, "")
        return self.example.read(node, lambda tensor: tensor.detach().clone().numpy())

    def size(self, expression: Any) -> Any:
        """Return the value of a sympy expression of unbacked sizes; None if it cannot be determined."""
        if not all(map(self.sizes.has_source, expression.free_symbols)):
            return None
        if expression in self._supposed:
            return sympy.sympify(self._supposed[expression])
        yes_or_no = not isinstance(expression, sympy.Expr)
        if yes_or_no:
            self.calls.ask(expression)
        integers = all(symbol.is_integer for symbol in expression.free_symbols)
        kind = bool if yes_or_no else int if integers else float
        node = self._node(expression, kind)
        if not isinstance(node, torch.fx.Node):
            return sympy.sympify(node)
        by_line = self._by_line(node, kind)
        if by_line is not None:
            self._suppose(expression, by_line)
            self._exclude_empty(expression)
            return sympy.sympify(by_line)
        answer = self._decide(node, kind, NumberBranch)
        if yes_or_no:  # each layer may ask it again
            self._suppose(expression, answer)
        self._learn(expression if yes_or_no else sympy.Eq(expression, answer), not yes_or_no or answer)
        return sympy.sympify(answer)

    def _node(self, expression: Any, kind: type) -> Any:
        """Return the node that computes a sympy expression of sizes; a Python number if the expression is constant."""
        return self.sizes.node(self._shape_env.symbolic(expression, kind))

    def _settle(self, question: Any, answer: bool, otherwise: str) -> None:
        """Settle a condition on sizes, with a check; for the other outcome, a call raises the error `otherwise`."""
        self._check(self._node(question, bool), answer, otherwise)
        self._suppose(question, answer)
        self._learn(question, answer)

    def _learn(self, expression: Any, answer: bool) -> None:
        """Tell the ShapeEnv the outcome of a condition on integers, which the graph checks."""
        fact = expression if answer else sympy.Not(expression)
        if isinstance(fact, sympy.Rel) and all(symbol.is_integer for symbol in fact.free_symbols):
            self._shape_env.assume(fact, LEARNED)

    def _suppose(self, expression: Any, answer: bool) -> None:
        """Store the outcome of a condition on sizes."""
        self._supposed |= {expression: answer, sympy.Not(expression): not answer}

    def _exclude_empty(self, expression: Any) -> None:
        """Exclude a size of 0, which needs further decisions, if a condition separates 0 and 1 from all other sizes.

        The ShapeEnv learns nothing else from an outcome by line, because the graph is also valid for the other outcome.
        """
        size = _size_compared_with_one(expression)
        if size is not None:
            not_empty = self._node(sympy.Ge(size, 1), bool)
            if isinstance(not_empty, torch.fx.Node):
                self.writer.assume(not_empty, "that a size is not 0")
                for fact in (sympy.Ge(size, 1), sympy.Gt(size, 0), sympy.Ne(size, 0)):
                    self._shape_env.assume(fact, LEARNED)

    def _by_line(self, node: torch.fx.Node, kind: type, counted: bool = True) -> bool | None:
        """Return the script's outcome for this line, if any, and write a check that all branches of the line have the same."""
        line = self.writer.location()
        answers = self.answers.at_lines.get(line)
        if answers is None or kind is not bool:
            return None
        self._asked_by_line += counted
        if self._asked_by_line > _MOST_QUESTIONS_BY_LINE:
            raise self._opened(node, kind)
        where, earlier = self.writer.where(), self.asked_at[line]
        if len(earlier) >= MOST_ROUNDS and is_endless(model_frame(sys._getframe(1))):
            raise self._opened(node, kind)
        answer = answers[len(earlier) % 2]
        check = self.writer.call(check_same_outcome, node, None, where)
        earlier.append(
            BranchAtLine(check, where, answer, self.fake_mode.drawn, python_state(sys._getframe(1)))
        )
        return answer

    def _decide(
        self, node: torch.fx.Node, kind: type, of: type[DataDependentBranch] = DataDependentBranch
    ) -> Any:
        if self.constant.knows(node, kind):  # no decision
            answer = self.constant.read(node, kind)
            if self.constant.is_shared():
                self._check(node, answer, "")
            return answer
        if kind is bool and (error := asserted_error(model_frame(sys._getframe(1)))):
            self._check(node, True, error)
            return True
        by_line = self._by_line(node, kind)
        if by_line is not None:
            return by_line
        if self._answered < len(self.answers.settled) and kind is bool:
            settled = self.answers.settled[self._answered]
            self._answered += 1
            settled.asked = True
            self._check(node, settled.answer, settled.otherwise)
            return settled.answer
        if self.example is None:
            raise self._opened(node, kind, of)
        answer = self.example.read(node, kind)
        self._check(node, answer, "")
        return answer

    def _check(self, node: torch.fx.Node, decided: Any, otherwise: str) -> None:
        where = self.writer.where()
        self.checks.append(f"the forward decides {decided} on a value: {where}")
        self.writer.call(check_outcome, node, decided, where, otherwise)

    def _opened(
        self, node: torch.fx.Node, kind: type, of: type[DataDependentBranch] = DataDependentBranch
    ) -> DataDependentBranch:
        repeats = kind is bool and is_endless(model_frame(sys._getframe(1)))
        question = self._question(node, kind, DataDependentWhile if repeats else of)
        self.open = self.open or question
        return question

    def _question(self, node: torch.fx.Node, kind: type, question: type[Q]) -> Q:
        act = (
            "makes a numpy array of a tensor, whose values are unknown at capture"
            if kind is torch.Tensor
            else "decides on the value of a tensor, which is unknown at capture"
        )
        return question(
            f"the forward {act}. {self.writer.where()} The value is "
            f"{describe_origin(node)}. Capture with specialize=True, which decides by the example inputs "
            "and adds a check to the graph; or compute with `torch.where`, pass the decision as an argument, "
            "or make the module a leaf (leaf_modules=...).",
            kind,
            self.writer.where(),
            self.writer.location(),
            self.constant.would_know(node, kind),
        )


def _size_compared_with_one(expression: Any) -> sympy.Expr | None:
    """Return the size in a relation with one answer at 0 and 1, and the other answer at all other sizes; else None."""
    if not isinstance(expression, sympy.Rel) or not all(s.is_integer for s in expression.free_symbols):
        return None
    constant, terms = sympy.expand(expression.lhs - expression.rhs).as_coeff_Add()
    factor, size = terms.primitive()
    if size.could_extract_minus_sign():
        factor, size = -factor, -size
    if any(count < 0 for count in size.as_coefficients_dict().values()):
        return None  # a difference may be negative
    answers = [bool(expression.func(constant + factor * few, 0)) for few in range(4)]
    return size if answers[0] == answers[1] != answers[2] == answers[3] else None
