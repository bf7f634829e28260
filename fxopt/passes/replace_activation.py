"""Replaces one activation function by another: by default, GELU by its tanh form."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from fxopt import graph
from fxopt.activations import ACTIVATIONS, Activation, as_module, same_activation
from fxopt.graph_index import GraphIndex
from fxopt.rewriting.explanation import Refusal
from fxopt.rewriting.rewrite import ReversibleRewrite
from fxopt.rewriting.rewriter import Rewriter
from fxopt.rewriting.weights import provenance
from fxopt.submodules import module_at


@dataclasses.dataclass(frozen=True)
class ActivationCalls:
    """All calls and names of an activation module, or one call of a function or method; `node` is the first call."""

    node: Node
    calls: tuple[Node, ...]
    paths: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class ReplaceActivation(ReversibleRewrite[ActivationCalls]):
    """Replaces an activation function wherever it is called: as a module, a function or a method.

    Args:
        source: the activation to replace: a name in `ACTIVATIONS`, or a type of module; modules of subclasses do
            not match.
        target: the new activation: a name, or a type of module that can be made without arguments.

    By default exact GELU becomes `0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`, which is faster and
    differs by less than 5e-4 in absolute value.

    Undo before you trace the graph again: a new trace contains only the new activation, which undo does not change.

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

    @property
    def tolerance(self) -> float | None:  # type: ignore[override]
        """1e-3 between the two forms of GELU; none between other activations, whose difference has no bound."""
        return 1e-3 if {self.source, self.target} == {"gelu", "gelu_tanh"} else None

    def match(self, graph_module: GraphModule) -> Iterator[ActivationCalls | Refusal]:
        """Yield the calls of the source activation; all calls of one module are one site."""
        index, source, signature = GraphIndex(graph_module), _activation(self.source), self.signature
        like = None if source.function is None else source.make()
        for node in index.calls_like(source.module):
            module = index.module(node)
            calls, reason = index.call_sites(module), index.inexact(node, source.module)
            if reason is None:
                made = signature in provenance(module)  # a replacement may have the type of the source
                if made or node is not calls[0] or (like and not same_activation(module, like)):
                    continue
                reason = index.obstacle_everywhere(module)
            paths = tuple(index.names(module))
            yield Refusal(node, reason) if reason else ActivationCalls(node, tuple(calls), paths)
        for node in index.nodes if like else ():
            if same_activation(as_module(node), like):
                writes = index.memory.writes(node)
                yield Refusal(node, "it writes into its input") if writes else ActivationCalls(node, (node,))

    def apply(self, rewriter: Rewriter, site: ActivationCalls) -> tuple[Node, ...]:
        """Replace the old activation by the new one."""
        graph_module, node, target = rewriter.graph_module, site.node, _activation(self.target)
        called: dict[str, Any] = {"op": "call_function", "target": target.function, "kwargs": target.options}
        if site.paths:
            old = module_at(graph_module, site.paths[0])
            new = graph.placed(target.make(), graph_module, node).train(old.training)
            rewriter.swap(dict.fromkeys(site.paths, new))
            called = {"kwargs": {}}
        elif target.function is None:
            new = graph.placed(target.make(), graph_module, node).train(graph_module.training)
            path = rewriter.add_module("", f"fxopt_activation_{node.name}", new)
            called = {"op": "call_module", "target": path, "kwargs": {}}
        for call in site.calls:  # the new activation may have another name for its input
            rewriter.set(call, args=tuple(call.all_input_nodes), **called)
        return site.calls


def _activation(choice: str | type[nn.Module]) -> Activation:
    """The activation of a name, or of a type of module; the latter has no function."""
    return ACTIVATIONS[choice] if isinstance(choice, str) else Activation(choice, None)
