"""The arguments of one call of a model."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch.fx import GraphModule

from fxopt.outputs import mapped

Kind = tuple[int, tuple[str, ...]]
"""How many arguments a call gives by position, and the names of the others, in their order."""


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def kind(self) -> Kind:
        """The kind of the call."""
        return len(self.args), tuple(self.kwargs)

    def mappings(self) -> list[tuple[Any, dict[Any, Any]]]:
        """The inputs that are mappings but not dicts, such as `BatchEncoding`, each with a dict of its items."""
        values = (*self.args, *self.kwargs.values())
        return [(v, dict(v)) for v in values if isinstance(v, Mapping) and not isinstance(v, dict)]

    def replaced(self, pairs: list[tuple[Any, Any]]) -> Inputs:
        """The inputs with the second of each pair in the place of the first."""
        found = {id(old): new for old, new in pairs}
        args = tuple(found.get(id(each), each) for each in self.args)
        return Inputs(args, {name: found.get(id(each), each) for name, each in self.kwargs.items()})

    def copied(self) -> Inputs:
        """A copy: a forward may write into its inputs, as into a cache."""
        return Inputs(*mapped((self.args, dict(self.kwargs)), lambda tensor: tensor.detach().clone()))

    def call(self, function: Callable[..., Any]) -> Any:
        """Call a function with a copy."""
        copied = self.copied()
        return function(*copied.args, **copied.kwargs)

    def named(self, function: Callable[..., Any]) -> dict[str, Any]:
        """The arguments by the names of the function's parameters; those of `**kwargs` by their own."""
        signature = inspect.signature(function)
        named = signature.bind(*self.args, **self.kwargs).arguments
        rest = next((n for n, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD), "")
        others: dict[str, Any] = named.pop(rest, {})
        return named | others

    def bound(self, traced: GraphModule) -> list[Any]:
        """The values of the placeholders of a graph, in order."""
        bound = inspect.signature(traced.forward).bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        nodes = traced.graph.find_nodes(op="placeholder")
        return [bound.arguments[str(node.target).lstrip("*")] for node in nodes]


def written_back(value: Any, pairs: list[tuple[Any, dict[Any, Any]]]) -> Any:
    """Make a mapping hold what a call left in the dict that replaced it; returns the mapping if the call returned the dict."""
    for mapping, items in pairs:
        for key in [key for key in mapping if key not in items]:
            del mapping[key]
        for key, item in items.items():
            if mapping.get(key) is not item:
                mapping[key] = item
        value = mapping if value is items else value
    return value
