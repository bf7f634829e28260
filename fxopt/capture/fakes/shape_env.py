"""A ShapeEnv that does not specialise sizes of 0 and 1, and keeps the model's line for each guard.

torch's operators ask whether a size is 1 (to broadcast, to choose strides), though mostly the answer changes nothing that anybody
can see. So the operator is run once more with that size set to 1 (`agrees_at_one`): when its output has the shape and strides
that the general run predicts, there is no guard. Where the model's own Python asked, the whole forward is captured again.
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

# The message of a runtime assertion that need not be written, because a check stands where it was learned.
LEARNED = "learned"


class Rounded(sympy.Function):
    """A float that Python rounds before it goes on: `(n * 0.29) * 100` is not `n * 29.0`, which sympy makes of it."""

    is_real = True
    _torch_handler_name = "identity"

    @classmethod
    def eval(cls, value: Any) -> Any:
        return value if value.is_number else None


def forget_shape_envs() -> None:
    """Empty the caches in which torch keeps ShapeEnvs, some for good, with all lines and fake tensors that they know."""
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
        # The first condition on unbacked sizes that nobody decided; a forward may catch the error.
        self.failure: GuardOnDataDependentSymNode | None = None
        # Numbers of calls that were made anew.
        self.dropped: set[Any] = set()
        # How many conditions on unbacked sizes there were.
        self._open_questions = 0
        self._origins: list[str] = []
        self._relaxed: list[tuple[Any, str]] = []
        self._questions: dict[Any, bool] | None = None
        self.facts = SizeFacts(self)

    def create_symbol(self, val: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(source, "prop", None) in (TensorProperty.STORAGE_OFFSET, TensorProperty.STRIDE):
            # Where an input lies in its memory is no size; strides that sizes give are none of these.
            return sympy.Integer(val)
        symbol = super().create_symbol(val, source, *args, **kwargs)
        if getattr(source, "prop", None) is TensorProperty.SIZE and symbol.is_Symbol and val != 0:
            # The guard of the inputs refuses a size of 0, and an example has none.
            self._update_var_to_range(symbol, ValueRanges(1, int_oo))
        return symbol

    def conditions(self) -> list[tuple[Any, str]]:
        """List what was assumed so far: sympy conditions, each with the line of the model that needs it."""
        guards = [(guard.expr, origin) for guard, origin in zip(self.guards, self._origins, strict=True)]
        return self._relaxed + guards

    @contextlib.contextmanager
    def in_operator(self) -> Iterator[dict[Any, bool]]:
        """Collect the conditions on sizes of 1 that are met in the block; each must then go to `settle_at_one` or to `guard`."""
        outer, self._questions = self._questions, {}
        try:
            yield self._questions
        finally:
            self._questions = outer

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(orig_expr, sympy.Ne) and orig_expr.rhs.is_Boolean:  # torch 2.14 subtracts the sides
            orig_expr = orig_expr.lhs ^ orig_expr.rhs
        for rounded in orig_expr.atoms(Rounded) if isinstance(orig_expr, sympy.Basic) else ():
            # No guard can say this of other sizes.
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
            and not free_unbacked_symbols(orig_expr)  # no size of an input
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
            self._version_counter += 1  # torch would go on with what it could not tell before
        return answer

    @property
    def state(self) -> tuple[int, ...]:
        """A value that changes when more is known of sizes, or a condition was met that only data or `settle_at_one` can decide."""
        open_at_one = len(self._questions or ())
        return self._version_counter, len(self.var_to_range), self._open_questions, open_at_one

    def _update_var_to_range(self, *args: Any, **kwargs: Any) -> None:
        super()._update_var_to_range(*args, **kwargs)
        self._version_counter += 1

    def drop_new(self, known: Collection[Any]) -> None:
        """Drop what was assumed of numbers besides the `known` ones: the call that has made them is made anew."""
        new = {symbol for symbol in self.var_to_range if symbol not in known}
        for symbol in new:
            self.deferred_runtime_asserts.pop(symbol, None)  # it is the newest number in each of these
        self.dropped |= new

    def assume(self, condition: Any, origin: str) -> None:
        """Take a condition on unbacked sizes as true; the graph will check it, unless `origin` is LEARNED."""
        self.guard_or_defer_runtime_assert(condition, origin)

    def symbolic(self, expression: Any, kind: type) -> Any:
        """The number that a sympy expression stands for, as Python sees it."""
        if kind is bool:
            return self.create_symboolnode(expression)
        create = self.create_symintnode if kind is int else self.create_symfloatnode
        return create(expression, hint=None)

    def guard(self, questions: dict[Any, bool]) -> None:
        """Put guards for collected conditions after all."""
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
    """A relation about one size where that is 1; None where it means nothing, as `(128*s) % (s//4) == 0`, or a size is negative."""
    try:
        return relation.xreplace(dict.fromkeys(relation.free_symbols, sympy.Integer(1)))
    except (ZeroDivisionError, AssertionError, ValueError):  # the last of `math.log`
        return None


def _excludes_one_size(guard: Any, symbol: sympy.Symbol) -> bool:
    """Tell whether a guard that is false at 1 is true everywhere else, as `s != 1` and `64*s != 64` are."""
    return isinstance(guard, sympy.Ne) and sympy.diff(guard.lhs - guard.rhs, symbol).is_number is True
