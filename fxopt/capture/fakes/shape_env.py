"""A ShapeEnv that does not specialize sizes of 0 and 1, and stores the model's line for each guard.

torch's operators ask whether a size is 1 (to broadcast, to choose strides), but the answer rarely changes the result. So
the operator runs once more with that size set to 1 (`agrees_at_one`). If its output has the shape and strides that the
general run predicts, no guard is added. If the model's own Python asked, the whole forward is captured again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import sympy

from fxopt.capture.capture_internals import (
    GuardOnDataDependentSymNode,
    ShapeEnv,
    TensorProperty,
    ValueRanges,
    free_unbacked_symbols,
    int_oo,
)
from fxopt.capture.fakes.size_facts import SizeFacts
from fxopt.capture.fakes.size_one_trials import agrees_at_one

# Message of a runtime assertion that is not written, because the graph has a runtime check for it already.
LEARNED = "learned"


class Rounded(sympy.Function):
    """A float that Python rounds before the next operation: sympy would turn `(n * 0.29) * 100` into `n * 29.0`."""

    is_real = True
    _torch_handler_name = "identity"

    @classmethod
    def eval(cls, value: Any) -> Any:
        return value if value.is_number else None


def forget_shape_envs() -> None:
    """Empty the caches in which torch keeps ShapeEnvs alive, with their source lines and fake tensors."""
    for method in vars(ShapeEnv).values():
        if clear := getattr(method, "cache_clear", None):
            clear()


class CaptureShapeEnv(ShapeEnv):
    """The sizes of one run: symbols, guards with their lines, and conditions on unbacked sizes, which `decide` answers."""

    def __init__(self) -> None:
        super().__init__(
            allow_scalar_outputs=True,
            allow_dynamic_output_shape_ops=True,
            specialize_zero_one=False,
            duck_shape=False,
        )
        self.location: Callable[[], str] = lambda: "the inputs"
        # Decides a condition on unbacked sizes; None when it cannot.
        self.decide: Callable[[Any], Any] = lambda expression: None
        # Error of the first undecided condition on unbacked sizes; a forward may catch this error.
        self.failure: GuardOnDataDependentSymNode | None = None
        # Symbols of calls that were made again.
        self.dropped: set[Any] = set()
        # Number of conditions on unbacked sizes so far.
        self._open_questions = 0
        self._origins: list[str] = []
        self._relaxed: list[tuple[Any, str]] = []
        self._questions: dict[Any, bool] | None = None
        self.facts = SizeFacts(self)

    def create_symbol(self, val: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(source, "prop", None) in (TensorProperty.STORAGE_OFFSET, TensorProperty.STRIDE):
            # The storage offset of an input is not a size, and neither is a stride that does not follow from sizes.
            return sympy.Integer(val)
        symbol = super().create_symbol(val, source, *args, **kwargs)
        if getattr(source, "prop", None) is TensorProperty.SIZE and symbol.is_Symbol and val != 0:
            # The input guard refuses a size of 0, and no example has one.
            self._update_var_to_range(symbol, ValueRanges(1, int_oo))
        return symbol

    def conditions(self) -> list[tuple[Any, str]]:
        """List what was assumed so far: sympy conditions, each with the line of the model that needs it."""
        guards = [(guard.expr, origin) for guard, origin in zip(self.guards, self._origins, strict=True)]
        return self._relaxed + guards

    @contextlib.contextmanager
    def in_operator(self) -> Iterator[dict[Any, bool]]:
        """Collect the conditions whose answer is different at size 1; pass each to `settle_at_one` or `guard` afterwards."""
        outer, self._questions = self._questions, {}
        try:
            yield self._questions
        finally:
            self._questions = outer

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(orig_expr, sympy.Ne) and orig_expr.rhs.is_Boolean:  # torch 2.14 subtracts the sides
            orig_expr = orig_expr.lhs ^ orig_expr.rhs
        for rounded in orig_expr.atoms(Rounded) if isinstance(orig_expr, sympy.Basic) else ():
            # No guard can express this for other sizes, so the sizes become static.
            if not free_unbacked_symbols(rounded) and self._maybe_evaluate_static(orig_expr) is None:
                for symbol in rounded.free_symbols:
                    self._evaluate(symbol)
        try:
            return self._evaluate(orig_expr, *args, **kwargs)
        except GuardOnDataDependentSymNode as error:
            self._open_questions += 1
            answer = self.decide(self.replace(orig_expr))
            if answer is None:
                self.failure = self.failure or error
                raise
            return answer

    def _evaluate(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        if (
            self._questions is not None
            and isinstance(orig_expr, sympy.Rel)
            and len(orig_expr.free_symbols) == 1
            and not free_unbacked_symbols(orig_expr)  # sizes of inputs only
            and not self._suppress_guards_tls()
        ):
            with self.suppress_guards():
                answer = super().evaluate_expr(orig_expr, *args, **kwargs)
            at_one = _at_one(orig_expr)
            if at_one in (sympy.true, sympy.false) and bool(answer) != bool(at_one):
                self._questions[orig_expr] = bool(answer)
                return answer
        answer = super().evaluate_expr(orig_expr, *args, **kwargs)
        while len(self._origins) < len(self.guards):
            self._origins.append(self.location())
            self._version_counter += 1  # otherwise torch would keep questions cached as unanswered
        return answer

    @property
    def state(self) -> tuple[int, ...]:
        """A value that changes with every new fact about sizes, and every condition left to data or `settle_at_one`."""
        open_at_one = len(self._questions or ())
        return self._version_counter, len(self.var_to_range), self._open_questions, open_at_one

    def _update_var_to_range(self, *args: Any, **kwargs: Any) -> None:
        super()._update_var_to_range(*args, **kwargs)
        self._version_counter += 1

    def drop_unknown_symbols(self, known: Collection[Any]) -> None:
        """Drop assumptions about numbers that are not `known`, because the call that made these numbers is repeated."""
        new = {symbol for symbol in self.var_to_range if symbol not in known}
        for symbol in new:
            self.deferred_runtime_asserts.pop(symbol, None)  # stored under the newest symbol
        self.dropped |= new

    def assume(self, condition: Any, origin: str) -> None:
        """Assume a condition on unbacked sizes; the graph will check it, unless `origin` is LEARNED."""
        self.guard_or_defer_runtime_assert(condition, origin)

    def symbolic(self, expression: Any, kind: type) -> Any:
        """The symbolic number of this `kind` (int, float or bool) for a sympy expression."""
        if kind is bool:
            return self.create_symboolnode(expression)
        create = self.create_symintnode if kind is int else self.create_symfloatnode
        return create(expression, hint=None)

    def guard(self, questions: dict[Any, bool]) -> None:
        """Add guards for collected conditions."""
        for question in questions:
            self.evaluate_expr(question)

    def settle_at_one(
        self, questions: dict[Any, bool], call: Callable[..., Any], args: Any, kwargs: Any, result: Any
    ) -> None:
        """Drop the conditions that `call(*args, **kwargs)` met, if its `result` at size 1 is as predicted."""
        verdicts: dict[sympy.Symbol, bool] = {}
        for question, answer in questions.items():
            (symbol,) = question.free_symbols
            if symbol not in verdicts:
                verdicts[symbol] = agrees_at_one(self, symbol, call, args, kwargs, result)
            if not verdicts[symbol]:
                self.guard({question: answer})
                continue
            assumed = question if answer else sympy.Not(question)
            if not _excludes_one_size(assumed, symbol):
                self._relaxed.append((sympy.Or(assumed, sympy.Eq(symbol, 1)), self.location()))


def _at_one(relation: Any) -> Any:
    """A relation about one size, evaluated at size 1; None if it is undefined there, as `(128*s) % (s//4) == 0`."""
    try:
        return relation.xreplace(dict.fromkeys(relation.free_symbols, sympy.Integer(1)))
    except (ZeroDivisionError, AssertionError, ValueError):  # ValueError comes from `math.log`
        return None


def _excludes_one_size(guard: Any, symbol: sympy.Symbol) -> bool:
    """Tell whether a guard that is false at 1 is true everywhere else, as `s != 1` and `64*s != 64` are."""
    return isinstance(guard, sympy.Ne) and sympy.diff(guard.lhs - guard.rhs, symbol).is_number is True
