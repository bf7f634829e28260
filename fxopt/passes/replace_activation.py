"""One activation function in the place of another: GELU in its tanh form, or any other pair."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, Node

from fxopt import graph, operators
from fxopt.graph_index import GraphIndex
from fxopt.rewriting.rewrite import Refusal, ReversibleRewrite
from fxopt.rewriting.rewriter import Rewriter
from fxopt.rewriting.weights import PROVENANCE, provenance


@dataclasses.dataclass(frozen=True)
class ActivationCalls:
    """All calls of an activation module with its names, or one call of a function or method; `node` is the first."""

    node: Node
    calls: tuple[Node, ...]
    paths: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ReplaceActivation(ReversibleRewrite[ActivationCalls]):
    """Replaces an activation function wherever it is called: as a module, a function or a method.

    Args:
        source: the activation to replace: a name out of `ACTIVATIONS`, or a type of module, which must be
            matched exactly.
        target: what takes its place: a name, or a type of module that can be made without arguments.

    By default exact GELU becomes `0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`, which is faster and
    differs by less than 5e-4 in absolute value.

    Undo it before the graph is traced again: a function in a new trace tells nothing of what it was, so that
    undoing there leaves it as it is.

    Source: Hendrycks and Gimpel, Gaussian Error Linear Units, 2016, arXiv:1606.08415.

    Example:
        >>> import torch
        >>> replace = ReplaceActivation("relu", "silu")
        >>> traced = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU()))
        >>> replace(traced).get_submodule("0")
        SiLU()
        >>> replace(traced, reverse=True).get_submodule("0")
        ReLU()
    """

    source: str | type[nn.Module] = "gelu"
    target: str | type[nn.Module] = "gelu_tanh"

    def __post_init__(self) -> None:
        for option in ("source", "target"):
            value = getattr(self, option)
            if isinstance(value, str) and value not in ACTIVATIONS:
                raise ValueError(f"{option} is {value!r}; known names are {', '.join(sorted(ACTIVATIONS))}")
            if not isinstance(value, str) and not (isinstance(value, type) and issubclass(value, nn.Module)):
                raise TypeError(f"{option} is {value!r}; give a name or a type of torch.nn.Module")
        if isinstance(self.target, type):
            try:
                inspect.signature(self.target).bind()
            except TypeError as error:
                raise TypeError(
                    f"target is {self.target.__name__}, which cannot be made without arguments ({error}); give a "
                    "type of module that can, such as a subclass that fixes them"
                ) from None
        if self.source == self.target:
            raise ValueError(f"source and target are both {self.source!r}, so there is nothing to replace")

    def match(self, graph_module: GraphModule) -> Iterator[ActivationCalls | Refusal]:
        """Yield the calls of the source activation; all calls of one module are one site."""
        index = GraphIndex(graph_module)
        kind, by_name = _activation(self.source).module, isinstance(self.source, str)
        wanted = _settings(_activation(self.source).make()) if by_name else None
        for node in index.nodes:
            called = node.op == "call_module"
            module = index.module(node) if called else _as_module(node) if by_name else None
            if not isinstance(module, kind) or self.signature in provenance(module):
                continue  # what this pass made may be of the source's type, too
            calls, paths = (index.call_sites(module), index.names(module)) if called else ([node], [])
            reason = index.inexact(node, kind) if called else None
            if reason is None and (node is not calls[0] or wanted not in (None, _settings(module))):
                continue
            if getattr(module, "inplace", False) or (not called and index.memory.writes(node)):
                reason = reason or "it writes into its input"
            elif called:
                reason = reason or index.obstacle_everywhere(module)
            yield Refusal(node, reason) if reason else ActivationCalls(node, tuple(calls), tuple(paths))

    def apply(self, rewriter: Rewriter, site: ActivationCalls) -> tuple[Node, ...]:
        """Put the new activation in the place of the old one."""
        graph_module, node, target = rewriter.graph_module, site.node, _activation(self.target)
        called: dict[str, Any] = {"op": "call_function", "target": target.function, "kwargs": target.options}
        if site.paths:
            old = graph_module.get_submodule(site.paths[0])
            rewriter.swap(dict.fromkeys(site.paths, self._new_module(graph_module, node, old.training)))
            called = {"kwargs": {}}
        elif target.function is None:
            new = self._new_module(graph_module, node, graph_module.training)
            path = rewriter.add_module("", f"fxopt_activation_{node.name}", new)
            called = {"op": "call_module", "target": path, "kwargs": {}}
        for call in site.calls:  # the new activation may have another name for its input
            rewriter.set(call, args=tuple(call.all_input_nodes), **called)
        return site.calls

    def _new_module(self, graph_module: GraphModule, node: Node, training: bool) -> nn.Module:
        """A module whose tensors are where those of the graph module are."""
        new = _activation(self.target).make()
        floating = (parameter for parameter in graph_module.parameters() if parameter.is_floating_point())
        first = next(floating, graph.value_of(node))
        if isinstance(first, torch.Tensor):
            dtype = graph.dtype_of(node) or first.dtype
            new = new.to(first.device, dtype if dtype.is_floating_point else None)
        return new.train(training)


@dataclasses.dataclass(frozen=True)
class Activation:
    """How an activation is spelled in a graph, and how it is made."""

    module: type[nn.Module]
    function: Callable[..., Any] | None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def make(self) -> nn.Module:
        """A new module."""
        return self.module(**self.options)


ACTIVATIONS: Mapping[str, Activation] = {
    "elu": Activation(nn.ELU, F.elu),
    "gelu": Activation(nn.GELU, F.gelu),
    "gelu_tanh": Activation(nn.GELU, F.gelu, {"approximate": "tanh"}),
    "hardsigmoid": Activation(nn.Hardsigmoid, F.hardsigmoid),
    "hardswish": Activation(nn.Hardswish, F.hardswish),
    "leaky_relu": Activation(nn.LeakyReLU, F.leaky_relu),
    "mish": Activation(nn.Mish, F.mish),
    "relu": Activation(nn.ReLU, F.relu),
    "relu6": Activation(nn.ReLU6, F.relu6),
    "selu": Activation(nn.SELU, F.selu),
    "sigmoid": Activation(nn.Sigmoid, torch.sigmoid),
    "silu": Activation(nn.SiLU, F.silu),
    "softplus": Activation(nn.Softplus, F.softplus),
    "tanh": Activation(nn.Tanh, torch.tanh),
}
"""The activations that `ReplaceActivation` knows by name, each with the default options of its module."""


def _activation(choice: str | type[nn.Module]) -> Activation:
    """The activation of a name, or of a type of module, for which there is no function."""
    return ACTIVATIONS[choice] if isinstance(choice, str) else Activation(choice, None)


def _as_module(node: Node) -> nn.Module | None:
    """The module that computes what a call of a function or method does; their options have the same order."""
    activation = ACTIVATIONS.get(operators.name_of(node))
    if activation is None or len(node.all_input_nodes) != 1:
        return None
    try:
        return activation.module(*node.args[1:], **{k: v for k, v in node.kwargs.items() if k != "input"})
    except TypeError:  # an option that only the function has
        return None


def _settings(module: nn.Module) -> dict[str, Any]:
    """What two activations of one type may differ in; a forward of its own is an obstacle, not a setting."""
    ignored = {"training", "inplace", "forward", PROVENANCE}
    return {k: v for k, v in vars(module).items() if not k.startswith("_") and k not in ignored}
