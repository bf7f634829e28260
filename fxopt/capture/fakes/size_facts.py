"""All that a ShapeEnv knows of some sizes: two runs that know the same of them give a call the same result."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import Any

Facts = tuple[frozenset[Any], set[Any]]


class SizeFacts:
    """The facts of one ShapeEnv, sorted anew whenever more is known."""

    def __init__(self, shape_env: Any) -> None:
        # It has this object, and is freed with its last size.
        self._shape_env: Any = weakref.proxy(shape_env)
        self._facts: dict[Any, Facts] = {}
        self._state: Any = None

    def about(self, symbols: Collection[Any]) -> Facts:
        """All that is known of some symbols and of those to which that relates them, and these symbols."""
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
