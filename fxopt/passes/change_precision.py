"""Weights and activations in bfloat16 or float16, with chosen modules kept in float32."""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_map

from fxopt import graph
from fxopt.errors import PassError, UndoError
from fxopt.graph_index import GraphIndex
from fxopt.precision_plan import Plan, graph_obstacle, layer_obstacle, make_plan, read_obstacle, too_large
from fxopt.rewrite import Change, Refusal, ReversibleRewrite, leave_trace, traces
from fxopt.submodules import set_module, split_path, with_values


@dataclasses.dataclass(frozen=True)
class ChangePrecision(ReversibleRewrite[Plan]):
    """Runs the layers of `torch.nn`, and what follows from their outputs, in a lower precision.

    Layers with float32 weights are replaced by copies in the lower dtype. A value stays in float32 until it
    meets one of lower precision; there it is cast, saturating, so that no finite number becomes infinite.
    Inputs and outputs of the graph keep their dtypes, and so does what the model itself computes in an
    explicit dtype. Complex numbers, `torch.linalg`, `torch.fft` and foreign modules and functions get float32.

    The record keeps a copy of the float32 weights, at the cost of their memory, so that undoing gives them
    back bit for bit; those that were changed in the meantime are cast.

    Args:
        dtype: `torch.bfloat16` or `torch.float16`.
        keep_float32: modules and parameters to keep: qualified names, with `*` as in a shell (what is below
            a name is kept, too), or types of modules.

    Example:
        >>> import fxopt, torch
        >>> traced = fxopt.trace(torch.nn.Sequential(torch.nn.Linear(2, 2)), (torch.ones(1, 2),))
        >>> changed = ChangePrecision(torch.bfloat16)(traced)
        >>> changed.get_submodule("0").weight.dtype, changed(torch.ones(1, 2)).dtype
        (torch.bfloat16, torch.float32)
    """

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
        plan = make_plan(index, self.dtype, kept)
        if plan is not None:
            yield plan

    def apply(self, graph_module: GraphModule, site: Plan) -> Change:
        """Replace layers and parameters, then cast where the plan says so."""
        modules = {path: graph_module.get_submodule(path) for path in (*site.layers, *site.owners)}
        parameters = {path: graph_module.get_parameter(path) for path in site.parameters}
        before = _tensors(modules, parameters)
        changing = _tensors({path: modules[path] for path in site.layers}, parameters)
        # What an owner holds beside the parameters that the graph reads is not changed: it is shared.
        lowered = before | {
            id(t): with_values(t, saturate(t.detach(), self.dtype)) for t in _float32(changing)
        }
        kept = {key: with_values(tensor, tensor.detach().clone()) for key, tensor in before.items()}
        data: dict[str, Any] = {
            "modules": _copies(modules, kept),
            "parameters": {path: kept[id(parameter)] for path, parameter in parameters.items()},
        }
        for path, copied in _copies(modules, lowered).items():
            leave_trace(copied, self, [modules[path]])
            set_module(graph_module, path, copied)
        for path, parameter in parameters.items():
            _set_parameter(graph_module, path, lowered[id(parameter)])

        nodes = {f"layer {number}": node for number, node in enumerate(site.nodes)}
        for number, cast in enumerate(_insert_casts(graph_module, site, self.dtype)):
            nodes[f"cast {number}"] = cast
        data["scalars"] = scalars = {}
        for number, node in enumerate(site.saturated):
            nodes[f"saturated {number}"] = node
            scalars[f"saturated {number}"] = _saturate_scalars(node, self.dtype)
        for node in site.low:
            node.meta[_FLOAT32_VALUE] = graph.value_of(node)
            node.meta["val"] = _described(node, self.dtype)
        return Change(site.nodes, nodes, (*modules, *parameters), data)

    def revert(self, graph_module: GraphModule, nodes: dict[str, Node], data: Any) -> None:
        """Take the casts out and put the float32 weights back."""
        current = {path: graph_module.get_submodule(path) for path in data["modules"]}
        for path, original in data["modules"].items():
            if type(current[path]) is not type(original) or self.signature not in traces(current[path]):
                raise UndoError(
                    f"{self!r} cannot be undone: {path} was replaced since. Undo that change first, or take a "
                    "copy from before it"
                )
        restored = _restored_tensors(graph_module, data, self.dtype)
        for path, original in _copies(data["modules"], restored).items():
            set_module(graph_module, path, _with_flags(original, current[path]))
        for path, parameter in data["parameters"].items():
            _set_parameter(graph_module, path, restored[id(parameter)])
        for role, node in nodes.items():
            if role.startswith("cast"):
                node.replace_all_uses_with(node.all_input_nodes[0])
                graph_module.graph.erase_node(node)
            elif role.startswith("saturated"):
                _restore_scalars(node, data["scalars"][role])
        for node in graph_module.graph.nodes:
            if _FLOAT32_VALUE in node.meta:
                node.meta["val"] = node.meta.pop(_FLOAT32_VALUE)

    def _kept(self, index: GraphIndex) -> dict[Node, str]:
        """The calls of layers, and reads of parameters, that stay in float32, with the reason."""
        unused = {name for name in self.keep_float32 if isinstance(name, str)}
        types = tuple(kind for kind in self.keep_float32 if isinstance(kind, type))
        kept: dict[Node, str] = {}
        for node in index.nodes:
            if node.op not in ("call_module", "get_attr"):
                continue
            module = index.module(node) if node.op == "call_module" else None
            paths = [str(node.target)] if module is None else index.names(module)
            matching = {name for name in self.keep_float32 if isinstance(name, str) and _below(paths, name)}
            unused -= matching
            if matching or isinstance(module, types):
                kept[node] = "keep_float32 names it"
            elif module is not None and any(p.dtype == torch.float32 for p in module.parameters()):
                reason = layer_obstacle(index, module)
                if reason:
                    kept[node] = f"kept in float32: {reason}"
        for node in index.nodes:
            if node.op == "get_attr" and node not in kept:
                reason = read_obstacle(index, str(node.target), kept)
                if reason:
                    kept[node] = f"kept in float32: {reason}"
        if unused:
            raise PassError(
                f"keep_float32 names {', '.join(sorted(unused))}, but the graph calls no such module and reads "
                "no such parameter; give a qualified name as in named_modules()"
            )
        return kept


def saturate(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast `value`, finite numbers to finite numbers: the largest ones of `dtype` where they are too large.

    Example:
        >>> import torch
        >>> saturate(torch.tensor([1e30, float("inf")]), torch.float16)
        tensor([65504.,    inf], dtype=torch.float16)
    """
    largest = torch.finfo(dtype).max
    if largest >= torch.finfo(value.dtype).max:
        return value.to(dtype)
    return torch.where(value.isinf(), value, value.clamp(-largest, largest)).to(dtype)


_FLOAT32_VALUE = "fxopt_float32_val"
"""The key of `node.meta` that keeps the description of a value before its dtype was changed."""


def _below(paths: list[str], pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(p, pattern) or fnmatch.fnmatchcase(p, f"{pattern}.*") for p in paths)


def _tensors(modules: Mapping[str, nn.Module], parameters: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """The tensors of modules, and further parameters, by id."""
    own = (t for module in modules.values() for t in (*module.parameters(), *module.buffers()))
    return {id(tensor): tensor for tensor in (*own, *parameters.values())}


def _float32(tensors: Mapping[int, Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors.values() if tensor.dtype == torch.float32]


def _restored_tensors(graph_module: GraphModule, data: Any, dtype: torch.dtype) -> dict[int, Tensor]:
    """For the id of each recorded tensor, what it is now: itself, or its changed successor in float32."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for path, original in data["modules"].items():
        current = graph_module.get_submodule(path)
        for registry in ("named_parameters", "named_buffers"):
            now = dict(getattr(current, registry)(remove_duplicate=False))
            before = getattr(original, registry)(remove_duplicate=False)
            pairs.extend((tensor, now[name]) for name, tensor in before)
    for path, parameter in data["parameters"].items():
        pairs.append((parameter, graph_module.get_parameter(path)))
    return {
        id(before): _restored(before, now, dtype) if before.dtype == torch.float32 else now
        for before, now in pairs
    }


def _restored(before: Tensor, now: Tensor, dtype: torch.dtype) -> Tensor:
    moved = before.detach().to(now.device)
    # `now` was in `dtype`, unless it is of an owner and was never changed; `.double()` may have come since.
    as_left = (saturate(moved, dtype).to(now.dtype), moved.to(now.dtype))
    unchanged = now.is_meta or any(torch.equal(values, now) for values in as_left)
    if unchanged and before.device == now.device and before.requires_grad == now.requires_grad:
        return before
    return with_values(now, moved if unchanged else now.detach().to(torch.float32))


def _copies(modules: Mapping[str, nn.Module], tensors: Mapping[int, Tensor]) -> dict[str, nn.Module]:
    """Copies of modules with other tensors in them; what was one module stays one."""
    memo: dict[int, Any] = dict(tensors)
    return {path: copy.deepcopy(module, memo) for path, module in modules.items()}


def _with_flags(module: nn.Module, like: nn.Module) -> nn.Module:
    for own, other in zip(module.modules(), like.modules(), strict=True):
        own.training = other.training
    return module


def _insert_casts(graph_module: GraphModule, plan: Plan, dtype: torch.dtype) -> Iterator[Node]:
    for cast in plan.casts:
        value, user = cast.value, cast.users[0]
        with graph_module.graph.inserting_before(user):
            node = (
                graph_module.graph.call_function(saturate, (value, dtype))
                if cast.down
                else graph_module.graph.call_method("to", (value, torch.float32))
            )
        node.meta = graph.origin_of(user)
        to = dtype if cast.down else torch.float32
        node.meta["val"] = torch.empty_like(graph.value_of(value), dtype=to)
        for other in cast.users:
            other.replace_input_with(value, node)
        yield node


def _described(node: Node, dtype: torch.dtype) -> Any:
    def lower(leaf: Any) -> Any:
        # Not `to`: autograd may forbid to read a view that was written into.
        is_float32 = isinstance(leaf, Tensor) and leaf.dtype == torch.float32
        return torch.empty_like(leaf, dtype=dtype) if is_float32 else leaf

    return tree_map(lower, graph.value_of(node))


def _saturate_scalars(node: Node, dtype: torch.dtype) -> tuple[dict[int, float], dict[str, float]]:
    """Bring constants into the range of `dtype`, and return the old ones by place."""
    large, largest = set(too_large(node, dtype)), torch.finfo(dtype).max
    args = {i: v for i, v in enumerate(node.args) if isinstance(v, float) and v in large}
    kwargs = {k: v for k, v in node.kwargs.items() if isinstance(v, float) and v in large}
    for index, value in args.items():
        node.update_arg(index, math.copysign(largest, value))
    for name, value in kwargs.items():
        node.update_kwarg(name, math.copysign(largest, value))
    return args, kwargs


def _restore_scalars(node: Node, before: tuple[dict[int, float], dict[str, float]]) -> None:
    for index, value in before[0].items():
        node.update_arg(index, value)
    for name, value in before[1].items():
        node.update_kwarg(name, value)


def _set_parameter(graph_module: GraphModule, path: str, parameter: Any) -> None:
    owner, name = split_path(path)
    graph_module.get_submodule(owner)._parameters[name] = parameter
