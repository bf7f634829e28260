"""Weights and activations in bfloat16 or float16, with chosen modules kept in float32."""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_any, tree_map

from fxopt import effects, graph
from fxopt.errors import PassError, UndoError
from fxopt.rewrite import Change, Refusal, ReversibleRewrite, leave_trace, traces


@dataclasses.dataclass(frozen=True)
class ChangePrecision(ReversibleRewrite["Plan"]):
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
        index = graph.GraphIndex(graph_module)
        refusal = _graph_obstacle(index)
        if refusal:
            yield refusal
            return
        kept = self._kept(index)
        yield from (Refusal(node, reason) for node, reason in kept.items() if node.op == "call_module")
        plan = _Planner(index, self.dtype, kept).plan()
        if isinstance(plan, Refusal):
            yield plan
        elif plan.nodes:
            yield _tie_obstacle(index, plan) or plan

    def apply(self, graph_module: GraphModule, site: Plan) -> Change:
        """Replace layers and parameters, then cast where the plan says so."""
        modules = {path: graph_module.get_submodule(path) for path in (*site.layers, *site.owners)}
        parameters = {path: graph_module.get_parameter(path) for path in site.parameters}
        before = _tensors(modules, parameters)
        changing = _tensors({path: modules[path] for path in site.layers}, parameters)
        # What an owner holds beside the parameters that the graph reads is not changed: it is shared.
        lowered = before | {id(t): _like(t, saturate(t.detach(), self.dtype)) for t in _float32(changing)}
        kept = {key: _like(tensor, tensor.detach().clone()) for key, tensor in before.items()}
        data: dict[str, Any] = {
            "modules": _copies(modules, kept),
            "parameters": {path: kept[id(parameter)] for path, parameter in parameters.items()},
        }
        for path, copied in _copies(modules, lowered).items():
            leave_trace(copied, self, [modules[path]])
            graph.set_module(graph_module, path, copied)
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
                raise UndoError(f"{self!r} cannot be undone: {path} was replaced since")
        restored = _restored_tensors(graph_module, data, self.dtype)
        for path, original in _copies(data["modules"], restored).items():
            graph.set_module(graph_module, path, _with_flags(original, current[path]))
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

    def _kept(self, index: graph.GraphIndex) -> dict[Node, str]:
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
                reason = _layer_obstacle(index, module)
                if reason:
                    kept[node] = f"kept in float32: {reason}"
        for node in index.nodes:
            if node.op == "get_attr" and node not in kept:
                reason = _read_obstacle(index, str(node.target), kept)
                if reason:
                    kept[node] = f"kept in float32: {reason}"
        if unused:
            raise PassError(
                f"keep_float32 names {', '.join(sorted(unused))}, but the graph calls no such module and reads "
                "no such parameter; give a qualified name as in named_modules()"
            )
        return kept


@dataclasses.dataclass(frozen=True)
class Plan:
    """What changes, for the whole graph.

    Attributes:
        nodes: calls of the layers and reads of the parameters that change.
        layers: the qualified names of these layers.
        parameters: the qualified names of parameters that the graph reads directly, and of their ties.
        owners: the qualified names of modules that hold such parameters and are not the graph module's own.
        casts: the casts of operands.
        saturated: nodes with constants that are too large for the lower dtype.
        low: nodes whose value is in the lower dtype afterwards.
    """

    nodes: tuple[Node, ...]
    layers: tuple[str, ...]
    parameters: tuple[str, ...]
    owners: tuple[str, ...]
    casts: tuple[Cast, ...]
    saturated: tuple[Node, ...]
    low: tuple[Node, ...]

    @property
    def node(self) -> Node:
        return self.nodes[0]


@dataclasses.dataclass(frozen=True)
class Cast:
    """A cast of a value, to the lower dtype or back to float32 (`down` or not), and who takes its result."""

    value: Node
    down: bool
    users: list[Node]


class _Planner:
    """Follows the lower precision from the layers through the graph."""

    def __init__(self, index: graph.GraphIndex, dtype: torch.dtype, kept: Mapping[Node, str]) -> None:
        self.index = index
        self.dtype = dtype
        self.kept = kept
        self.low: dict[Node, None] = {}
        self.casts: list[tuple[Node, Node, bool]] = []
        self.saturated: list[Node] = []
        self.changed: dict[Node, None] = {}

    def plan(self) -> Plan | Refusal:
        """The plan, or why there is none."""
        for node in self.index.nodes:
            self._visit(node)
        for user, value, _ in self.casts:
            if not isinstance(graph.value_of(value), Tensor):
                return Refusal(user, f"{value.name}, which would have to be cast, holds several tensors")
            if self._write_is_lost(user, value):
                return Refusal(user, f"it may write into {value.name}, which would have to be cast for it")
        names = [self.index.names(self.index.module(n)) for n in self.changed if n.op == "call_module"]
        layers = dict.fromkeys(name for module_names in names for name in module_names)
        parameters = {str(node.target): None for node in self.changed if node.op == "get_attr"}
        for node in self.changed:
            parameters |= dict.fromkeys(_unused_names(self.index, node, [*layers, *parameters]))
        for node in self.kept:
            if _inside(str(node.target), [*layers, *parameters]):
                return Refusal(node, f"{node.target} stays in float32, but a layer that uses it does not")
        owners = {graph.split_path(path)[0]: None for path in parameters}
        return Plan(
            tuple(self.changed),
            tuple(layers),
            tuple(parameters),
            tuple(o for o in owners if not _inside(o, layers) and not self.index.is_container(o)),
            tuple(self._shared_casts()),
            tuple(self.saturated),
            tuple(self.low),
        )

    def _shared_casts(self) -> list[Cast]:
        """One cast for several users, where the value and the mode (`no_grad`) stay what they are."""
        casts: list[Cast] = []
        last: dict[tuple[Node, bool], Cast] = {}
        for user, value, down in self.casts:
            cast = last.get((value, down))
            written = self.index.written(value)
            if cast is None or written or self.index.write_between(cast.users[0], user):
                cast = last[value, down] = Cast(value, down, [])
                casts.append(cast)
            cast.users.append(user)
        return casts

    def _write_is_lost(self, user: Node, value: Node) -> bool:
        """Whether `user` may write into a value of which it would get a copy, and something sees the value."""
        written = self.index.written_by(user)
        if value not in (user.all_input_nodes if written is None else written):
            return False
        position = self.index.position
        aliases = (n for n in self.index.nodes[: position[user]] if self.index.may_alias(n, value))
        return any(
            alias.op in ("placeholder", "get_attr") or any(position[n] > position[user] for n in alias.users)
            for alias in aliases
        )

    def _visit(self, node: Node) -> None:
        operands = [value for value in node.all_input_nodes if _is_float32(value)]
        if self._is_changed(node):
            self.changed[node] = None
            self._lower(node, operands)
        elif node.op == "get_attr" or node.op == "placeholder":
            return
        elif self._needs_float32(node):
            self.casts.extend((node, value, False) for value in operands if value in self.low)
        elif self.index.writes(node) and operands:
            targets = self.index.written_by(node) or operands
            down = all(value in self.low for value in targets if value in operands)
            self.casts.extend((node, value, down) for value in operands if (value in self.low) != down)
            if down:
                self._set_low(node)
        elif any(value in self.low for value in operands) and not _asks_for_float32(node):
            self._lower(node, operands)

    def _lower(self, node: Node, operands: list[Node]) -> None:
        self.casts.extend((node, value, True) for value in operands if value not in self.low)
        self._set_low(node)

    def _set_low(self, node: Node) -> None:
        if _is_float32(node):
            self.low[node] = None
        if node.op != "call_module" and any(True for _ in _too_large(node, self.dtype)):
            self.saturated.append(node)

    def _is_changed(self, node: Node) -> bool:
        if node in self.kept:
            return False
        if node.op == "get_attr":
            return _is_float32(node) and isinstance(
                graph.attribute(self.index.graph_module, str(node.target)), nn.Parameter
            )
        if node.op != "call_module":
            return False
        return any(p.dtype == torch.float32 for p in self.index.module(node).parameters())

    def _needs_float32(self, node: Node) -> bool:
        if node.op == "output" or node in self.kept:
            return True
        if node.op == "call_module":
            return not effects.is_torch_module(self.index.module(node))
        if any(_holds(value, lambda t: t.is_complex()) for value in (node, *node.all_input_nodes)):
            return True
        if node.op != "call_function":
            return False
        name = getattr(node.target, "__name__", "")
        return not effects.is_torch_function(node.target) or (
            name.startswith(("fft_", "linalg_")) and name not in ("linalg_norm", "linalg_vector_norm")
        )


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


def _graph_obstacle(index: graph.GraphIndex) -> Refusal | None:
    for node in index.nodes:
        container = node.op == "output" or isinstance(node.target, type)
        if not container and graph.value_of(node) is None and node.users and not node.is_impure():
            return Refusal(
                node, "its dtype is unknown: the graph has no metadata (trace it with fxopt.trace)"
            )
        if _holds(node, lambda t: t.dtype in (torch.float16, torch.bfloat16)):
            return Refusal(node, f"the graph already works in {graph.dtype_of(node)}")
        if "autocast" in getattr(node.target, "__name__", ""):
            return Refusal(node, "the graph chooses dtypes itself, in an autocast block")
        if node.op == "get_attr" and isinstance(
            graph.attribute(index.graph_module, str(node.target)), nn.Parameter
        ):
            writer = index.written(node)
            if writer:
                return Refusal(writer, f"it may write into the parameter {node.target}")
    return None


def _layer_obstacle(index: graph.GraphIndex, module: nn.Module) -> str | None:
    if not effects.is_torch_module(module):
        return f"{type(module).__name__} is not a layer of torch.nn"
    return index.obstacle_in_place(module)


def _read_obstacle(index: graph.GraphIndex, path: str, kept: Mapping[Node, str]) -> str | None:
    """Why a parameter that the graph reads directly cannot be changed; `None` if it can."""
    owner, _ = graph.split_path(path)
    for node in index.nodes:
        if node.op == "call_module" and _inside(path, [str(node.target)]):
            return f"{node.name}, which is kept in float32, uses it as well" if node in kept else None
    return None if index.is_container(owner) else index.obstacle_in_place(index.modules[owner])


def _unused_names(index: graph.GraphIndex, node: Node, inside: list[str]) -> Iterator[str]:
    """Further names of the parameters that `node` uses, by which nothing in the graph uses them."""
    for name, other in index.sharing(node):
        path = f"{node.target}.{name}" if node.op == "call_module" else str(node.target)
        same = graph.attribute(index.graph_module, path) is graph.attribute(index.graph_module, other)
        parameter = isinstance(graph.attribute(index.graph_module, other), nn.Parameter)
        free = not _inside(other, inside) and not index.uses(other) and not _read_obstacle(index, other, {})
        if same and parameter and free:
            yield other


def _tie_obstacle(index: graph.GraphIndex, plan: Plan) -> Refusal | None:
    """A tensor that is shared by what changes and what does not."""
    inside = [*plan.layers, *plan.parameters]
    for node in plan.nodes:
        for path, other in index.sharing(node):
            if not _inside(other, inside):
                return Refusal(node, f"its {path} shares memory with {other}, which stays in float32")
    return None


def _is_float32(node: Node) -> bool:
    return _holds(node, lambda tensor: tensor.dtype == torch.float32)


def _holds(node: Node, condition: Callable[[Tensor], bool]) -> bool:
    """Whether the value of `node` is, or contains, a tensor with a property."""
    value = graph.value_of(node)
    return bool(tree_any(lambda leaf: isinstance(leaf, Tensor) and condition(leaf), value))


def _asks_for_float32(node: Node) -> bool:
    """Whether a call names float32 itself: `x.float()`, `softmax(x, dtype=torch.float32)`."""
    return torch.float32 in (*node.args, *node.kwargs.values()) or node.target == "float"


def _inside(path: str, names: Iterable[str]) -> bool:
    """Whether a qualified name is one of `names`, or below one."""
    return any(f"{path}.".startswith(f"{name}.") for name in names)


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
    return _like(now, moved if unchanged else now.detach().to(torch.float32))


def _like(tensor: Tensor, values: Tensor) -> Tensor:
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


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
        node.meta = {k: user.meta[k] for k in ("nn_module_stack", "stack_trace") if k in user.meta}
        node.meta["val"] = graph.value_of(value).to(dtype if cast.down else torch.float32)
        for other in cast.users:
            other.replace_input_with(value, node)
        yield node


def _described(node: Node, dtype: torch.dtype) -> Any:
    def lower(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.dtype == torch.float32 else leaf

    return tree_map(lower, graph.value_of(node))


def _too_large(node: Node, dtype: torch.dtype) -> Iterator[float]:
    largest = torch.finfo(dtype).max
    for value in (*node.args, *node.kwargs.values()):
        if isinstance(value, float) and math.isfinite(value) and abs(value) > largest:
            yield value


def _saturate_scalars(node: Node, dtype: torch.dtype) -> tuple[dict[int, float], dict[str, float]]:
    """Bring constants into the range of `dtype`, and return the old ones by place."""
    large, largest = set(_too_large(node, dtype)), torch.finfo(dtype).max
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
    owner, name = graph.split_path(path)
    graph_module.get_submodule(owner)._parameters[name] = parameter
