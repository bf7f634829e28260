"""Plans for `ChangePrecision` which values of a graph run in a lower precision, and where they are cast."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.fx import Node

from fxopt import graph, operators
from fxopt.graph_index import GraphIndex
from fxopt.rewriting.explanation import Refusal
from fxopt.submodules import attribute, is_inside, split_path

# Functions and methods of torch without a kernel for bfloat16 or float16. Also `grad`: a gradient that a forward computes
# is that of the original tensor, not of a cast of it.
_NO_LOWER_KERNEL = {
    *("inverse", "pinverse", "det", "logdet", "slogdet", "cholesky", "cholesky_inverse", "cholesky_solve"),
    *("qr", "svd", "lu", "lu_solve", "triangular_solve", "matrix_power", "ormqr", "geqrf", "cdist", "pdist"),
    *(
        "quantile",
        "nanquantile",
        "ctc_loss",
        "multi_margin_loss",
        "multilabel_margin_loss",
        "grad",
        "avg_pool3d",
    ),
}
_LAYERS_WITHOUT = (nn.CTCLoss, nn.MultiMarginLoss, nn.MultiLabelMarginLoss, nn.AvgPool3d)


@dataclasses.dataclass(frozen=True)
class Plan:
    """All changes of a graph.

    Attributes:
        node: the first of `nodes`.
        nodes: all calls of layers and reads of parameters that change.
        layers: the qualified names of these layers.
        parameters: the qualified names of parameters that the graph reads directly, and of parameters tied to these.
        owners: the qualified names of modules that contain such parameters and may be shared with the model.
        casts: the casts of operands.
        low: nodes that compute in the lower dtype after the pass.
    """

    node: Node
    nodes: tuple[Node, ...]
    layers: tuple[str, ...]
    parameters: tuple[str, ...]
    owners: tuple[str, ...]
    casts: tuple[Cast, ...]
    low: tuple[Node, ...]


@dataclasses.dataclass(frozen=True)
class Cast:
    """A cast of a value to the lower dtype if `down`, otherwise to float32; `users` use its result."""

    value: Node
    down: bool
    users: list[Node]


class Planner:
    """Propagates the lower precision from the layers through the graph.

    Args:
        index: index of the graph.
        kept: the calls of layers, and reads of parameters, that stay in float32, each with the reason.
    """

    def __init__(self, index: GraphIndex, kept: Mapping[Node, str]) -> None:
        self.index = index
        self.kept = kept
        self.changed: dict[Node, None] = {}
        self.low: dict[Node, bool] = {}  # whether the value is in the lower dtype, or only its operands
        self.casts: list[tuple[Node, Node, bool]] = []

    def plan(self) -> Plan | Refusal | None:
        """Make the plan for the graph, or a refusal; `None` if nothing has to change."""
        for node in self.index.nodes:
            self._visit(node)
        if not self.changed:
            return None
        for user, value, _ in self.casts:
            if not isinstance(graph.value_of(value), Tensor):
                return Refusal(user, f"{value.name}, which would have to be cast, holds several tensors")
            if self._write_is_lost(user, value):
                return Refusal(user, f"it may write into {value.name}, which would have to be cast for it")
        called = [self.index.module(node) for node in self.changed if node.op == "call_module"]
        layers = dict.fromkeys(name for module in called for name in self.index.names(module))
        parameters = {str(node.target): None for node in self.changed if node.op == "get_attr"}
        inside = {*layers, *parameters}
        for node in self.kept:
            if is_inside(str(node.target), inside):
                return Refusal(node, f"{node.target} stays in float32, but a layer that uses it does not")
        for node in self.changed:
            for name, other in self.index.sharing(node):
                if is_inside(other, inside):
                    continue
                if not _is_unused_name(self.index, node, name, other):
                    return Refusal(node, f"its {name} shares memory with {other}, which stays in float32")
                parameters[other] = None
                inside.add(other)
        owners = {split_path(path)[0]: None for path in parameters}
        return Plan(
            next(iter(self.changed)),
            tuple(self.changed),
            tuple(layers),
            tuple(parameters),
            tuple(o for o in owners if not is_inside(o, layers) and not self.index._is_container(o)),
            tuple(self._shared_casts()),
            tuple(self.low),
        )

    def _shared_casts(self) -> list[Cast]:
        """Join casts of one value for several users, if neither the value nor a mode (`no_grad`) changes in between."""
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
        """Tell whether `user` would write into a copy of `value`, although a later node or the caller may read `value`."""
        written = self.index.memory.written_by(user)
        targets = user.all_input_nodes if written is None else written
        return value in targets and self.index.memory.is_seen_after(value, user)

    def _visit(self, node: Node) -> None:
        operands = [value for value in node.all_input_nodes if _is_float32(value)]
        if self._is_changed(node):
            self.changed[node] = None
            self._lower(node, operands)
        elif node.op == "get_attr" or node.op == "placeholder":
            return
        elif self._needs_float32(node):
            self._cast(node, operands, down=False)
        elif self.index.memory.writes(node) and operands:
            targets = self.index.memory.written_by(node) or operands
            if all(self.low.get(value) for value in targets if value in operands):
                self._lower(node, operands)
            else:
                self._cast(node, operands, down=False)
        elif any(self.low.get(value) for value in operands) and not _asks_for_float32(node):
            self._lower(node, operands)

    def _lower(self, node: Node, operands: list[Node]) -> None:
        self._cast(node, operands, down=True)
        self.low[node] = _is_float32(node)

    def _cast(self, node: Node, operands: list[Node], down: bool) -> None:
        self.casts.extend((node, value, down) for value in operands if self.low.get(value, False) != down)

    def _is_changed(self, node: Node) -> bool:
        if node in self.kept:
            return False
        if node.op == "get_attr":
            # A buffer changes with its layer, for example running statistics.
            path, holder = str(node.target), self.index._first_call(str(node.target))
            changes = _is_parameter(self.index, path) or (holder is not None and self._is_changed(holder))
            return _is_float32(node) and changes
        if node.op != "call_module":
            return False
        return _has_float32(self.index.module(node))

    def _needs_float32(self, node: Node) -> bool:
        if node.op == "output" or node in self.kept:
            return True
        # A value of several tensors cannot be cast after the call.
        if isinstance(graph.value_of(node), tuple | list) and any(map(self._needs_float32, node.users)):
            return True
        if node.op == "call_module":
            module = self.index.module(node)
            return not operators.is_torch_module(module) or isinstance(module, _LAYERS_WITHOUT)
        if any(graph.holds(value, _is_unusual) for value in (node, *node.all_input_nodes)):
            return True
        name = str(node.target) if node.op == "call_method" else graph.function_name(node)
        if name in _NO_LOWER_KERNEL or operators.reads_bits(node):
            return True
        return node.op == "call_function" and (
            not operators.is_known_function(node.target)
            or (name.startswith(("fft_", "linalg_")) and name not in ("linalg_norm", "linalg_vector_norm"))
        )


def graph_obstacle(index: GraphIndex) -> Refusal | None:
    """Return why the precision of a graph cannot be changed at all; `None` if it can."""
    for node in index.nodes:
        if graph.value_of(node) is None and not node.is_impure() and not _is_no_tensor(node):
            return Refusal(
                node, "its dtype is unknown: the graph has no metadata (trace it with fxopt.trace)"
            )
        if graph.holds(node, lambda t: t.dtype in (torch.float16, torch.bfloat16)):
            return Refusal(node, "the graph already works in float16 or bfloat16")
        if graph.turns_autocast_on(node):
            return Refusal(node, "the graph chooses dtypes itself, in an autocast block")
        if node.op == "get_attr" and _is_parameter(index, str(node.target)):
            writer = index.memory.written(node)
            if writer:
                return Refusal(writer, f"it may write into the parameter {node.target}")
    return None


def _is_no_tensor(node: Node) -> bool:
    """Tell whether a value without metadata is an object, such as a cache, of which nodes only read or set attributes."""
    reading = (getattr, operator.getitem)
    return operators.is_container(node.target) or all(
        user.target in reading or operators.is_container(user.target) for user in node.users
    )


def obstacle(index: GraphIndex, node: Node, kept: Mapping[Node, str]) -> str | None:
    """Return why a called layer, or a parameter that is read, must stay in float32; `None` if it need not.

    Args:
        index: index of the graph.
        node: a call of a module, or a read of a parameter.
        kept: the calls of layers that stay in float32, each with the reason.
    """
    if node.op == "get_attr":
        return _read_obstacle(index, str(node.target), kept)
    module = index.module(node)
    if not _has_float32(module):
        return None
    reason = index.obstacle_in_place(module)
    if reason is None and not operators.is_torch_module(module):
        reason = f"{type(module).__name__} is not a layer of torch.nn"
    return reason


def _read_obstacle(index: GraphIndex, path: str, kept: Mapping[Node, str]) -> str | None:
    owner, _ = split_path(path)
    node = index._first_call(path)
    if node is not None:
        return f"{node.name}, which is kept in float32, uses it as well" if node in kept else None
    return None if index._is_container(owner) else index.obstacle_in_place(index.modules[owner])


def _is_unused_name(index: GraphIndex, node: Node, name: str, other: str) -> bool:
    """Tell whether `other` is another name of a parameter that `node` uses, and no node uses this name."""
    path = f"{node.target}.{name}" if node.op == "call_module" else str(node.target)
    same = attribute(index.graph_module, path) is attribute(index.graph_module, other)
    used = {str(each.target) for each in index.nodes if each.op in ("call_module", "get_attr")}
    unused = same and _is_parameter(index, other) and not is_inside(other, used)
    return unused and not _read_obstacle(index, other, {})


def _is_parameter(index: GraphIndex, path: str) -> bool:
    """Tell whether the attribute at `path` is a parameter."""
    return isinstance(attribute(index.graph_module, path), nn.Parameter)


def _has_float32(module: nn.Module) -> bool:
    return any(parameter.dtype == torch.float32 for parameter in module.parameters())


def _is_unusual(tensor: Tensor) -> bool:
    """Tell whether a tensor is complex, or has a layout without strides."""
    return tensor.is_complex() or tensor.layout != torch.strided


def _is_float32(node: Node) -> bool:
    return graph.holds(node, lambda tensor: tensor.dtype == torch.float32)


def _asks_for_float32(node: Node) -> bool:
    """Tell whether a call names float32 explicitly: `x.float()`, `softmax(x, dtype=torch.float32)`."""
    return torch.float32 in (*node.args, *node.kwargs.values()) or node.target == "float"
