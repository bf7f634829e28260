"""The facts that a ShapeEnv knows about sizes: if two runs know the same facts, a call has the same result in both."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import Any

Facts = tuple[frozenset[Any], set[Any]]


class SizeFacts:
    """The facts of one ShapeEnv, grouped again whenever the ShapeEnv learns more."""

    def __init__(self, shape_env: Any) -> None:
        # A weak reference: the ShapeEnv holds this object, and must be freed with its last size.
        self._shape_env: Any = weakref.proxy(shape_env)
        self._facts: dict[Any, Facts] = {}
        self._state: Any = None

    def about(self, symbols: Collection[Any]) -> Facts:
        """All facts about some symbols and the symbols related to them, and the set of all these symbols."""
        if self._state != self._shape_env.state:
            self._state, self._facts = self._shape_env.state, _by_symbol(self._all())
        related = [self._facts.get(symbol, (frozenset(), {symbol})) for symbol in symbols]
        return frozenset(facts for facts, _ in related), set().union(*(about for _, about in related))

    def _all(self) -> Iterator[tuple[Any, set[Any]]]:
        env = self._shape_env
        for symbol, bounds in env.var_to_range.items():
            hint, size_like = env.backed_var_to_val.get(symbol), symbol in env.size_like
            yield (symbol, bounds.lower, bounds.upper, hint, size_like), {symbol}
        for symbol, expression in env.replacements.items():
            yield (symbol, expression), {symbol} | expression.free_symbols
        for expression in env.divisible:
            yield expression, expression.free_symbols
        for condition, answer in env.axioms.items():
            yield (condition, answer), condition.free_symbols


def _by_symbol(facts: Iterable[tuple[Any, set[Any]]]) -> dict[Any, Facts]:
    """For each symbol, all facts about it and its related symbols, and the set of these symbols."""
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
