"""Replaces activations that are written out as formulas by one call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from fxopt import graph
from fxopt.activations import ACTIVATIONS, Activation, is_close, on_grid
from fxopt.graph_index import GraphIndex
from fxopt.operators import hooks_of, name_of
from fxopt.rewriting.explanation import Refusal
from fxopt.rewriting.rewrite import ReversibleRewrite
from fxopt.rewriting.rewriter import Rewriter

_FUSED = ("gelu", "gelu_tanh", "hardswish", "mish", "silu")
_ARITHMETIC = (
    *("add", "sub", "rsub", "mul", "div", "truediv", "neg", "pow", "square", "exp", "erf"),
    *("tanh", "sigmoid", "softplus", "relu6", "hardtanh", "clamp"),
)
_LAYERS = (nn.Sigmoid, nn.Tanh, nn.ReLU6)
_MOST = 12  # largest number of nodes in a formula
_OTHER = 1e-3  # relative change of a number, to test whether the number matters


@dataclasses.dataclass(frozen=True)
class Formula:
    """An activation that is written out: the nodes `inside` compute its result `node` from its input `root`."""

    node: Node
    root: Node
    inside: tuple[Node, ...]
    activation: Activation


@dataclasses.dataclass(frozen=True)
class FuseActivations(ReversibleRewrite[Formula]):
    """Replaces an activation that a model writes out as a formula by one call; GPT-2 and ESM write out GELU.

    A formula of one value and numbers becomes GELU, SiLU, Mish or Hardswish if it has the same values and gradients on a grid
    in float64. A change of any of its numbers must change these. One call reads and writes the values once, and
    `FuseEpilogues` can fuse it into a packed layer before it.

    Sources: GELU: Hendrycks and Gimpel, 2016, arXiv:1606.08415, section 2. SiLU, as `x * sigmoid(x)`: Elfwing et al., 2017,
    arXiv:1702.03118.

    Example:
        >>> import torch, fxopt
        >>> from transformers.activations import NewGELUActivation
        >>> fused = FuseActivations()(fxopt.trace(NewGELUActivation(), (torch.ones(2),)))
        >>> print(*fused.graph.nodes)
        input_1 input_guard gelu output
    """

    preserves_computation = True

    def match(self, graph_module: GraphModule) -> Iterator[Formula | Refusal]:
        """Yield the formulas that are activations, starting at the end of the graph."""
        index, taken = GraphIndex(graph_module), set[Node]()
        for node in reversed(index.nodes):
            found = None if node in taken else _formula(index, node)
            if found is not None:
                reason = _obstacle(index, found)
                taken.update(() if reason else found.inside)
                yield Refusal(node, reason) if reason else found

    def apply(self, rewriter: Rewriter, site: Formula) -> Node:
        """Call the activation, and erase the formula."""
        function, options = site.activation.function, dict(site.activation.options)
        made = rewriter.create("call_function", function, (site.root,), options, before=site.node)
        rewriter.replace_uses(site.node, made)
        for node in site.inside:
            rewriter.erase(node)
        return made


def _formula(index: GraphIndex, node: Node) -> Formula | None:
    """The smallest formula that ends in a node and is an activation; None if there is none."""
    inside, border = list[Node](), {node}
    while len(inside) < _MOST:
        last = max(border)
        if not _is_step(index, last):
            return None
        inside.append(last)
        border = (border | {*last.all_input_nodes}) - {last}
        if len(border) == 1 and len(inside) > 1:
            (root,) = border
            activation = _activation(index, root, inside) if _is_alike(root, node) else None
            if activation is not None:
                return Formula(node, root, tuple(inside), activation)
        if not border:
            return None
    return None


def _is_step(index: GraphIndex, node: Node) -> bool:
    """Tell whether a node may be a step of a formula."""
    if node.op == "call_module":
        module = index.module(node)
        return type(module) in _LAYERS and len(node.args) == 1 and not hooks_of(module)
    return node.op in ("call_function", "call_method") and name_of(node) in _ARITHMETIC


def _is_alike(root: Node, node: Node) -> bool:
    """Tell whether two values are floating-point tensors of one dtype; the only tensor of a formula determines the shape."""
    dtypes = {getattr(graph.value_of(each), "dtype", None) for each in (root, node)}
    dtype = dtypes.pop()
    return not dtypes and isinstance(dtype, torch.dtype) and dtype.is_floating_point


def _activation(index: GraphIndex, root: Node, inside: Sequence[Node]) -> Activation | None:
    """The activation that a formula computes; None if it is not an activation."""
    seen = list[float]()  # the numbers of the formula

    def formula(change: int | None, grid: Tensor) -> Tensor:
        known = dict[Node, Any]({root: grid})
        seen.clear()

        def given(each: Any) -> Any:
            if isinstance(each, Node) or type(each) not in (int, float):
                return known.get(each, each)
            seen.append(each)
            return each + _OTHER * (each or 1) if len(seen) - 1 == change else each

        for node in reversed(inside):
            args, kwargs = map_aggregate((node.args, node.kwargs), given)
            known[node] = graph.called_with(node, index.called(node), args, kwargs)
        return cast(Tensor, known[inside[0]])

    try:
        own = on_grid(functools.partial(formula, None))
    except RuntimeError:  # a step writes into a value that its gradient needs
        return None
    found = next(
        (each for name, each in ACTIVATIONS.items() if name in _FUSED and is_close(own, on_grid(each))), None
    )
    matter = (not is_close(own, on_grid(functools.partial(formula, number))) for number in range(len(seen)))
    return found if found and all(matter) else None


def _obstacle(index: GraphIndex, found: Formula) -> str | None:
    """Return why a formula cannot be replaced by one call; None if it can."""
    inside = {*found.inside}
    for node in found.inside:
        if reason := index.removing_obstacle(node):
            return reason
        written = index.memory.written_by(node)
        if written is None or not inside.issuperset(written):
            return f"{node.name} writes into what is used elsewhere"
        if node is not found.node and (reason := graph.use_obstacle(node, inside)):
            return reason
        if reason := index.memory.write_between(node, found.node, found.root):
            return reason
    return None
