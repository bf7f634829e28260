"""The arguments of one call of a model."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.fx import GraphModule

from fxopt.outputs import mapped


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def copied(self) -> Inputs:
        """A copy: a forward may write into its inputs, as into a cache."""
        return Inputs(*mapped((self.args, dict(self.kwargs)), lambda tensor: tensor.detach().clone()))

    def call(self, function: Callable[..., Any]) -> Any:
        """Call a function with a copy."""
        copied = self.copied()
        return function(*copied.args, **copied.kwargs)

    def named(self, model: nn.Module) -> dict[str, Any]:
        """The arguments by the names of the forward's parameters; those of `**kwargs` by their own."""
        signature = inspect.signature(model.forward)
        bound = signature.bind(*self.args, **self.kwargs).arguments
        rest = [n for n, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD]
        found = {name: value for name, value in bound.items() if name not in rest}
        return {name: value for each in rest for name, value in bound.get(each, {}).items()} | found

    def bound(self, traced: GraphModule) -> list[Any]:
        """The values of the placeholders of a graph, in order."""
        bound = inspect.signature(traced.forward).bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        nodes = traced.graph.find_nodes(op="placeholder")
        return [bound.arguments[str(node.target).lstrip("*")] for node in nodes]
