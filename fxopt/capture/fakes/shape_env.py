"""A ShapeEnv that settles guards against a size of 1 where one operator asks for them.

torch's operators ask whether a size is 1 (to broadcast, to choose strides) and so put a guard into the ShapeEnv,
though mostly the answer changes nothing that anybody can see. So the operator is run once more on the same inputs
with that size set to 1: when its output has the shape and strides that the general run predicts for 1, the graph
holds there as well. Where the model's own Python asked, the whole forward must be captured again instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import sympy
import torch
from torch._dynamo.source import TensorProperty
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv, free_unbacked_symbols
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

# The message of a runtime assertion that need not be written, because a check stands where it was learned.
LEARNED = "learned"


def forget_shape_envs() -> None:
    """Empty the caches in which torch keeps ShapeEnvs, some for good, with all lines and fake tensors that they know."""
    for method in vars(ShapeEnv).values():
        if clear := getattr(method, "cache_clear", None):
            clear()


class CaptureShapeEnv(ShapeEnv):
    """A ShapeEnv that leaves sizes of 0 and 1 free, and keeps the model's line for each guard."""

    def __init__(self) -> None:
        super().__init__(
            allow_scalar_outputs=True,
            allow_dynamic_output_shape_ops=True,
            specialize_zero_one=False,
            duck_shape=False,
        )
        self.location: Callable[[], str] = lambda: "the inputs"
        # Answers a question that only data can answer; None when it cannot.
        self.decide: Callable[[Any], Any] = lambda expression: None
        # The first question that only data could answer; a forward may catch the error.
        self.failure: GuardOnDataDependentSymNode | None = None
        # Numbers of calls that were made anew.
        self.dropped: set[Any] = set()
        # How many questions there were that only data can answer.
        self._open_questions = 0
        self._facts: dict[Any, tuple[frozenset[Any], set[Any]]] = {}
        self._facts_at: Any = None
        self._origins: list[str] = []
        self._relaxed: list[tuple[Any, str]] = []
        self._questions: dict[Any, bool] | None = None
        self._verdicts: dict[str, bool] = {}

    def create_symbol(self, val: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(source, "prop", None) is TensorProperty.STORAGE_OFFSET:
            return sympy.Integer(val)  # where an input starts in its memory is no size
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
        """Collect the questions about sizes of 1 that are asked in the block, instead of guarding on them.

        Each must then go to `settle_at_one` or to `guard`.
        """
        outer, self._questions = self._questions, {}
        try:
            yield self._questions
        finally:
            self._questions = outer

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
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
        """A value that changes when more is known of sizes, or a question was asked that only data or `settle_at_one` can answer."""
        open_at_one = len(self._questions or ())
        return self._version_counter, len(self.var_to_range), self._open_questions, open_at_one

    def facts(self, symbols: Collection[Any]) -> tuple[frozenset[Any], set[Any]]:
        """All that is known of some symbols and of those to which that relates them, and these symbols."""
        if self._facts_at != self.state:
            self._facts_at, self._facts = self.state, _by_symbol(self._all_facts())
        related = [self._facts.get(symbol, (frozenset(), {symbol})) for symbol in symbols]
        return frozenset(facts for facts, _ in related), set().union(*(about for _, about in related))

    def _all_facts(self) -> Iterator[tuple[Any, set[Any]]]:
        for symbol, bounds in self.var_to_range.items():
            hint, size_like = self.backed_var_to_val.get(symbol), symbol in self.size_like
            yield (symbol, bounds.lower, bounds.upper, hint, size_like), {symbol}
        for symbol, expression in self.replacements.items():
            yield (symbol, expression), {symbol} | expression.free_symbols
        for expression in self.divisible:
            yield expression, expression.free_symbols
        for condition, answer in self.axioms.items():
            yield (condition, answer), condition.free_symbols

    def _update_var_to_range(self, *args: Any, **kwargs: Any) -> None:
        super()._update_var_to_range(*args, **kwargs)
        self._version_counter += 1

    def learn(self, fact: Any) -> None:
        """Take a condition as true that the graph checks by itself."""
        self.guard_or_defer_runtime_assert(fact, LEARNED)

    def drop_new(self, known: Collection[Any]) -> None:
        """Drop what was assumed of numbers besides the `known` ones: the call that has made them is made anew."""
        new = {symbol for symbol in self.var_to_range if symbol not in known}
        for symbol in new:
            self.deferred_runtime_asserts.pop(symbol, None)  # it is the newest number in each of these
        self.dropped |= new

    def assume(self, condition: Any, origin: str) -> None:
        """Take a condition as true on numbers that only a run knows; the graph will check it."""
        self.guard_or_defer_runtime_assert(condition, origin)

    def symbolic(self, expression: Any, kind: type) -> Any:
        """The number that a sympy expression stands for, as Python sees it."""
        if kind is bool:
            return self.create_symboolnode(expression)
        if kind is int:
            return self.create_symintnode(expression, hint=None)
        return self.create_symfloatnode(expression, hint=None)

    def guard(self, questions: dict[Any, bool]) -> None:
        """Put guards for collected questions after all."""
        for question in questions:
            self.evaluate_expr(question)

    def settle_at_one(
        self, questions: dict[Any, bool], call: Callable[..., Any], args: Any, kwargs: Any, result: Any
    ) -> None:
        """Drop the questions that `call(*args, **kwargs)` asked, if its `result` at size 1 is as predicted."""
        verdicts: dict[sympy.Symbol, bool] = {}
        for question, answer in questions.items():
            (symbol,) = question.free_symbols
            if symbol not in verdicts:
                verdicts[symbol] = self._same_at_one(symbol, call, args, kwargs, result)
            if not verdicts[symbol]:
                self.guard({question: answer})
                continue
            assumed = question if answer else sympy.Not(question)
            if not _excludes_one_size(assumed, symbol):
                self._relaxed.append((sympy.Or(assumed, sympy.Eq(symbol, 1)), self.location()))

    def _same_at_one(
        self, symbol: sympy.Symbol, call: Callable[..., Any], args: Any, kwargs: Any, result: Any
    ) -> bool:
        one = {symbol: sympy.Integer(1)}
        # Layers of a model make the same calls on tensors of the same sizes, again and again.
        function = getattr(call, "__qualname__", ""), id(getattr(call, "__self__", call))
        key = repr((symbol, function, self._described(args, {}), self._described(list(kwargs.items()), {})))
        if key not in self._verdicts:
            # What only data can answer here is not the forward's question.
            decide, self.decide = self.decide, lambda expression: None
            failure = self.failure
            try:
                with torch.no_grad():
                    at_one = call(*self._substituted(args, one), **self._substituted(kwargs, one))
                self._verdicts[key] = self._described(result, one) == self._described(at_one, one)
            except Exception:
                # Not settled: the guard stays, or a capture of the whole forward decides.
                self._verdicts[key] = False
            finally:
                self.decide, self.failure = decide, failure
        return self._verdicts[key]

    def _substituted(self, value: Any, one: dict[Any, Any]) -> Any:
        """`value` with the symbol replaced by 1 in every tensor and size."""
        if isinstance(value, torch.SymInt):
            expression = self.replace(value.node.expr).xreplace(one)
            if expression.is_number:
                return int(expression)
            return self.create_symintnode(expression, hint=None)
        if isinstance(value, torch.Tensor):
            if not any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride())):
                return value
            shape, stride = self._substituted(tuple(value.shape), one), self._substituted(value.stride(), one)
            return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
        if isinstance(value, (tuple, list)) and type(value) in (tuple, list, torch.Size):
            return (list if type(value) is list else tuple)(self._substituted(item, one) for item in value)
        if type(value) is dict:
            return {key: self._substituted(item, one) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(*self._substituted((value.start, value.stop, value.step), one))
        return value

    def _described(self, value: Any, one: dict[Any, Any]) -> Any:
        """All that can be seen of a result: shapes and strides at size 1, types, and other values as they are."""

        def at_one(size: Any) -> Any:
            expression = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
            return self.replace(expression).xreplace(one)

        if isinstance(value, torch.Tensor):
            shape = [at_one(size) for size in value.shape]
            # The stride of a dimension of size 1 says nothing about where elements lie.
            stride = [at_one(s) if size != 1 else None for size, s in zip(shape, value.stride(), strict=True)]
            return shape, stride, value.dtype
        if isinstance(value, (tuple, list)):
            return [self._described(item, one) for item in value]
        if isinstance(value, torch.SymInt):
            return at_one(value)
        if dataclasses.is_dataclass(value) or isinstance(value, dict):
            return object()  # equal to nothing
        return value


def _by_symbol(facts: Iterable[tuple[Any, set[Any]]]) -> dict[Any, tuple[frozenset[Any], set[Any]]]:
    """For each symbol all facts about it and about the symbols to which they relate it, and these symbols."""
    groups: dict[Any, tuple[list[Any], set[Any]]] = {}
    for fact, about in facts:
        joined = {id(groups[symbol]): groups[symbol] for symbol in about if symbol in groups}.values()
        group = [fact], set(about)
        for its_facts, its_symbols in joined:
            group[0].extend(its_facts)
            group[1].update(its_symbols)
        groups.update(dict.fromkeys(group[1], group))
    made = {id(group): (frozenset(group[0]), group[1]) for group in groups.values()}
    return {symbol: made[id(group)] for symbol, group in groups.items()}


def _at_one(relation: Any) -> Any:
    """A relation about one size where that is 1; None where it means nothing, as `(128*s) % (s//4) == 0`."""
    try:
        return relation.xreplace(dict.fromkeys(relation.free_symbols, sympy.Integer(1)))
    except ZeroDivisionError:
        return None


def _excludes_one_size(guard: Any, symbol: sympy.Symbol) -> bool:
    """Tell whether a guard that is false at 1 is true everywhere else, as `s != 1` and `64*s != 64` are."""
    return isinstance(guard, sympy.Ne) and sympy.diff(guard.lhs - guard.rhs, symbol).is_number is True
