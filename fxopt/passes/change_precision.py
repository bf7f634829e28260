"""Converts weights and activations to bfloat16 or float16; chosen modules stay in float32."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from fxopt import graph
from fxopt.errors import PassError
from fxopt.graph_index import GraphIndex
from fxopt.obstacles.precision_plan import Cast, Plan, Planner, graph_obstacle, obstacle
from fxopt.operators import Fact, facts_of, name_of
from fxopt.rewriting.explanation import Refusal
from fxopt.rewriting.rewrite import ReversibleRewrite
from fxopt.rewriting.rewriter import Rewriter
from fxopt.rewriting.weights import Left, copied
from fxopt.submodules import find, tensors_of, with_values


@dataclasses.dataclass(frozen=True)
class ChangePrecision(ReversibleRewrite[Plan]):
    """Runs the layers of `torch.nn`, and the operations on their outputs, in a lower precision.

    Layers with float32 weights are replaced by copies in the lower dtype. A float32 value is cast where it is combined with
    one of lower precision; the cast saturates, so that no finite number becomes infinite. Inputs and outputs of the graph
    keep their dtypes, and so do values that the model computes in an explicit dtype. Complex numbers, `torch.linalg`,
    `torch.fft`, and modules and functions that are not torch's own get float32 inputs.

    The record keeps a copy of the float32 weights, so undo restores them bit for bit. Weights that were changed in the
    meantime are cast to float32.

    Args:
        dtype: `torch.bfloat16` or `torch.float16`.
        keep_float32: modules and parameters to keep in float32: qualified names, with `*` as in a shell, which include
            everything below, or types of modules.

    Example:
        >>> import fxopt, torch
        >>> traced = fxopt.trace(torch.nn.Sequential(torch.nn.Linear(2, 2)), (torch.ones(1, 2),))
        >>> changed = ChangePrecision(torch.bfloat16)(traced)
        >>> changed.get_submodule("0").weight.dtype, changed(torch.ones(1, 2)).dtype
        (torch.bfloat16, torch.float32)
    """

    tolerance = 0.1

    dtype: torch.dtype = torch.bfloat16
    keep_float32: tuple[str | type[nn.Module], ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"dtype is {self.dtype!r}; give torch.bfloat16 or torch.float16")
        if isinstance(self.keep_float32, str | type):
            raise TypeError(f"keep_float32 is {self.keep_float32!r}; give a sequence of names and types")
        object.__setattr__(self, "keep_float32", tuple(self.keep_float32))

    def match(self, graph_module: GraphModule) -> Iterator[Plan | Refusal]:
        """Yield one plan for the whole graph, and a refusal for each layer that is kept in float32."""
        if self.get_transformed_nodes(graph_module):
            return
        index = GraphIndex(graph_module)
        refusal = graph_obstacle(index)
        if refusal:
            yield refusal
            return
        kept = self._kept(index)
        yield from (Refusal(node, reason) for node, reason in kept.items() if node.op == "call_module")
        plan = Planner(index, kept).plan()
        if plan is not None:
            yield plan

    def apply(self, rewriter: Rewriter, site: Plan) -> tuple[Node, ...]:
        """Replace layers and parameters, then insert the casts of the plan."""
        paths = (*site.layers, *site.owners, *site.parameters)
        replaced = {path: find(rewriter.graph_module, path) for path in paths}
        memo = {id(tensor): tensor for _, tensor in tensors_of(replaced)}
        # An owner also contains tensors that the graph does not read: these are shared, not converted.
        changing = {path: value for path, value in replaced.items() if path not in site.owners}
        for _, tensor in tensors_of(changing):
            if tensor.dtype == torch.float32:
                memo[id(tensor)] = with_values(tensor, saturate(tensor.detach(), self.dtype))
        restore = functools.partial(_raised, copied(replaced), self.dtype)
        rewriter.swap(copied(replaced, memo), restore=restore)
        for cast in site.casts:
            _insert(rewriter, cast, self.dtype)
        for node in site.low:
            val = graph.recast(graph.value_of(node), torch.float32, self.dtype)
            rewriter.set(node, val=val, **_saturated(node, self.dtype))
        return site.nodes

    def _kept(self, index: GraphIndex) -> dict[Node, str]:
        """The calls of modules, and reads of parameters, that stay in float32, each with the reason."""
        unused = names = {name for name in self.keep_float32 if isinstance(name, str)}
        types = tuple(kind for kind in self.keep_float32 if isinstance(kind, type))
        kept: dict[Node, str] = {}
        calls, reads = ([n for n in index.nodes if n.op == op] for op in ("call_module", "get_attr"))
        for node in (*calls, *reads):
            module = index.called(node)
            paths = [str(node.target)] if module is None else index.names(module)
            matching = {name for name in names if _below(paths, name)}
            unused = unused - matching
            reason = obstacle(index, node, kept)
            if matching or isinstance(module, types):
                kept[node] = "keep_float32 names it"
            elif reason:
                kept[node] = f"kept in float32: {reason}"
        if unused:
            raise PassError(
                f"keep_float32 names {', '.join(sorted(unused))}, but the graph calls no such module and reads "
                "no such parameter; give a qualified name as in named_modules()"
            )
        return kept


def saturate(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast `value` to `dtype`; finite numbers that are too large become the largest finite number of `dtype`.

    Example:
        >>> import torch
        >>> saturate(torch.tensor([1e30, float("inf")]), torch.float16)
        tensor([65504.,    inf], dtype=torch.float16)
    """
    largest = torch.finfo(dtype).max
    if largest >= torch.finfo(value.dtype).max:
        return value.to(dtype)
    return torch.where(value.isinf(), value, value.clamp(-largest, largest)).to(dtype)


_FILLING = ("where", "fill", "full_like")


def _below(paths: list[str], pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(p, pattern) or fnmatch.fnmatchcase(p, f"{pattern}.*") for p in paths)


def _raised(
    kept: Mapping[str, Any], dtype: torch.dtype, now: Mapping[str, Any], left: Mapping[str, Left]
) -> dict[str, Any]:
    """Restore the float32 weights; weights that were changed in the lower precision are cast."""
    current = dict(tensors_of(now))
    lowered = {
        f"{path}.{name}" if name else path
        for path, module in left.items()
        for name, (_, left_as, *_) in module.tensors.items()
        if left_as == dtype
    }
    memo: dict[int, Any] = {
        id(tensor): _restored(tensor, current[name], dtype) if name in lowered else current[name]
        for name, tensor in tensors_of(kept)
    }
    return copied(kept, memo)


def _restored(before: Tensor, now: Tensor, dtype: torch.dtype) -> Tensor:
    moved = before.detach().to(now.device)
    # `now` was in `dtype` after the pass, but the user may have called `.double()`.
    unchanged = now.is_meta or torch.equal(saturate(moved, dtype).to(now.dtype), now)
    if unchanged and before.device == now.device and before.requires_grad == now.requires_grad:
        return with_values(before, moved.clone())
    return with_values(now, moved if unchanged else now.detach().to(torch.float32))


def _insert(rewriter: Rewriter, cast: Cast, dtype: torch.dtype) -> None:
    """Insert one cast before its first user, for all its users."""
    value, user = cast.value, cast.users[0]
    if cast.down:
        node = rewriter.create("call_function", saturate, (value, dtype), before=user)
    else:
        node = rewriter.create("call_method", "to", (value, torch.float32), before=user)
    for each in cast.users:
        rewriter.replace_input(each, value, node)


def _saturated(node: Node, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of a call with constants clamped to the range of `dtype`; empty if all are in range."""
    largest = torch.finfo(dtype).max
    # In other operators, integers are sizes, dimensions and indices.
    numbers = float | int if Fact.ELEMENTWISE in facts_of(node) or name_of(node) in _FILLING else float

    def saturated(value: Any) -> Any:
        large = isinstance(value, numbers) and math.isfinite(value) and abs(value) > largest
        return type(value)(math.copysign(largest, value)) if large else value

    args, kwargs = map_aggregate((node.args, node.kwargs), saturated)
    return {} if (args, kwargs) == (node.args, node.kwargs) else {"args": args, "kwargs": dict(kwargs)}
