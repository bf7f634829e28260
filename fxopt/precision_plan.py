"""Which values of a graph run in a lower precision, and where they are cast: what ChangePrecision follows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.utils._pytree import tree_any

from fxopt import graph, operators
from fxopt.graph_index import GraphIndex
from fxopt.rewriting.explanation import Refusal
from fxopt.submodules import attribute, is_inside, split_path


def make_plan(index: GraphIndex, dtype: torch.dtype, kept: Mapping[Node, str]) -> Plan | Refusal | None:
    """The plan for a graph, or why there is none; `None` if nothing has to change.

    Args:
        index: the graph.
        dtype: the lower precision.
        kept: the calls of layers, and reads of parameters, that stay in float32, with the reason.
    """
    plan = _Planner(index, dtype, kept).plan()
    if isinstance(plan, Refusal):
        return plan
    return _tie_obstacle(index, plan) or plan if plan.nodes else None


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

    def __init__(self, index: GraphIndex, dtype: torch.dtype, kept: Mapping[Node, str]) -> None:
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
        inside = {*layers, *parameters}
        for node in self.changed:
            unused = dict.fromkeys(_unused_names(self.index, node, inside))
            parameters |= unused
            inside.update(unused)
        for node in self.kept:
            if is_inside(str(node.target), inside):
                return Refusal(node, f"{node.target} stays in float32, but a layer that uses it does not")
        owners = {split_path(path)[0]: None for path in parameters}
        return Plan(
            tuple(self.changed),
            tuple(layers),
            tuple(parameters),
            tuple(o for o in owners if not is_inside(o, layers) and not self.index.is_container(o)),
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
            written = self.index.memory.written(value)
            if cast is None or written or self.index.memory.write_between(cast.users[0], user):
                cast = last[value, down] = Cast(value, down, [])
                casts.append(cast)
            cast.users.append(user)
        return casts

    def _write_is_lost(self, user: Node, value: Node) -> bool:
        """Whether `user` may write into a value of which it would get a copy, and something sees the value."""
        written = self.index.memory.written_by(user)
        if value not in (user.all_input_nodes if written is None else written):
            return False
        position = self.index.position
        aliases = (n for n in self.index.nodes[: position[user]] if self.index.memory.may_alias(n, value))
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
        elif self.index.memory.writes(node) and operands:
            targets = self.index.memory.written_by(node) or operands
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
        if node.op != "call_module" and any(True for _ in too_large(node, self.dtype)):
            self.saturated.append(node)

    def _is_changed(self, node: Node) -> bool:
        if node in self.kept:
            return False
        if node.op == "get_attr":
            return _is_float32(node) and _is_parameter(self.index, str(node.target))
        if node.op != "call_module":
            return False
        return any(p.dtype == torch.float32 for p in self.index.module(node).parameters())

    def _needs_float32(self, node: Node) -> bool:
        if node.op == "output" or node in self.kept:
            return True
        if node.op == "call_module":
            return not operators.is_torch_module(self.index.module(node))
        if any(_holds(value, lambda t: t.is_complex()) for value in (node, *node.all_input_nodes)):
            return True
        if node.op != "call_function":
            return False
        name = graph.function_name(node)
        return not operators.is_torch_function(node.target) or (
            name.startswith(("fft_", "linalg_")) and name not in ("linalg_norm", "linalg_vector_norm")
        )


def graph_obstacle(index: GraphIndex) -> Refusal | None:
    """Why the precision of a graph cannot be changed as a whole; `None` if it can."""
    for node in index.nodes:
        container = node.op == "output" or isinstance(node.target, type)
        if not container and graph.value_of(node) is None and node.users and not node.is_impure():
            return Refusal(
                node, "its dtype is unknown: the graph has no metadata (trace it with fxopt.trace)"
            )
        if _holds(node, lambda t: t.dtype in (torch.float16, torch.bfloat16)):
            return Refusal(node, f"the graph already works in {graph.dtype_of(node)}")
        if "autocast" in graph.function_name(node):
            return Refusal(node, "the graph chooses dtypes itself, in an autocast block")
        if node.op == "get_attr" and _is_parameter(index, str(node.target)):
            writer = index.memory.written(node)
            if writer:
                return Refusal(writer, f"it may write into the parameter {node.target}")
    return None


def layer_obstacle(index: GraphIndex, module: nn.Module) -> str | None:
    """Why a layer cannot be replaced by a copy in the lower precision; `None` if it can."""
    if not operators.is_torch_module(module):
        return f"{type(module).__name__} is not a layer of torch.nn"
    return index.obstacle_in_place(module)


def read_obstacle(index: GraphIndex, path: str, kept: Mapping[Node, str]) -> str | None:
    """Why a parameter that the graph reads directly cannot be changed; `None` if it can."""
    owner, _ = split_path(path)
    node = index.first_call(path)
    if node is not None:
        return f"{node.name}, which is kept in float32, uses it as well" if node in kept else None
    return None if index.is_container(owner) else index.obstacle_in_place(index.modules[owner])


def _unused_names(index: GraphIndex, node: Node, inside: Collection[str]) -> Iterator[str]:
    """Further names of the parameters that `node` uses, by which nothing in the graph uses them."""
    for name, other in index.sharing(node):
        path = f"{node.target}.{name}" if node.op == "call_module" else str(node.target)
        same = attribute(index.graph_module, path) is attribute(index.graph_module, other)
        free = not is_inside(other, inside) and not index.uses(other) and not read_obstacle(index, other, {})
        if same and free and _is_parameter(index, other):
            yield other


def _tie_obstacle(index: GraphIndex, plan: Plan) -> Refusal | None:
    """A tensor that is shared by what changes and what does not."""
    inside = {*plan.layers, *plan.parameters}
    for node in plan.nodes:
        for path, other in index.sharing(node):
            if not is_inside(other, inside):
                return Refusal(node, f"its {path} shares memory with {other}, which stays in float32")
    return None


def _is_parameter(index: GraphIndex, path: str) -> bool:
    return isinstance(attribute(index.graph_module, path), nn.Parameter)


def _is_float32(node: Node) -> bool:
    return _holds(node, lambda tensor: tensor.dtype == torch.float32)


def _holds(node: Node, condition: Callable[[Tensor], bool]) -> bool:
    """Whether the value of `node` is, or contains, a tensor with a property."""
    value = graph.value_of(node)
    return bool(tree_any(lambda leaf: isinstance(leaf, Tensor) and condition(leaf), value))


def _asks_for_float32(node: Node) -> bool:
    """Whether a call names float32 itself: `x.float()`, `softmax(x, dtype=torch.float32)`."""
    return torch.float32 in (*node.args, *node.kwargs.values()) or node.target == "float"


def too_large(node: Node, dtype: torch.dtype) -> Iterator[float]:
    """The constants of a call that are finite, and not so in `dtype`."""
    largest = torch.finfo(dtype).max
    for value in (*node.args, *node.kwargs.values()):
        if isinstance(value, float) and math.isfinite(value) and abs(value) > largest:
            yield value
