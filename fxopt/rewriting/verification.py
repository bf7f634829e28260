"""Translation validation: both pieces of a rewritten site run on random inputs, and must give the same.

No run of the model is needed: the log of the rewriter knows which nodes a site had before and which it has now, and
the metadata of the nodes around it knows the shapes and dtypes of what flows in.
"""

from __future__ import annotations

import copy
import dataclasses
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._pytree import tree_flatten, tree_map

from fxopt import graph
from fxopt.errors import PassError
from fxopt.rewriting.edits import Edit, NodeEdit, NodeState, Redirect, Reference, Swap
from fxopt.submodules import attribute, prefixes, sharing_copy

Verify = bool | tuple[Any, ...]
"""True to verify, or example inputs of the graph module, for shapes and dtypes that its nodes do not have."""

RTOL = 1e-9
"""How well both pieces agree in float64, relative to the largest value of a row, where no weights were rounded."""


class Verifier:
    """Compares the pieces of rewritten sites of one graph module.

    Attributes:
        unverified: why sites could not be run, by the name of one of their nodes.
    """

    def __init__(self, graph_module: GraphModule, verify: Verify, preserves_computation: bool) -> None:
        if not isinstance(verify, bool | tuple):
            raise TypeError(f"verify is a {type(verify).__name__}; give True, or a tuple of example inputs")
        self.unverified: dict[str, str] = {}
        self._graph_module, self._preserves = graph_module, preserves_computation
        self._values = _described(graph_module, verify) if isinstance(verify, tuple) else {}
        self._nodes: dict[str, Node] = {}
        self._readers: dict[str, list[Node]] = {}
        self.enter(graph_module.graph.nodes)

    def difference(self, edits: Sequence[Edit], made: Mapping[str, Node]) -> str | None:
        """Compare a site before and after its changes.

        Args:
            edits: all changes of the site, with the objects that were swapped.
            made: the nodes that were created, by name.

        Returns:
            How they differ; None where they agree, or where the site cannot be run.
        """
        self.enter(made[e.name] for e in edits if isinstance(e, NodeEdit) and e.before is None)
        try:
            piece = _Piece(self._nodes, self._readers, edits)
            reason = self._compared(piece)
            wider = reason and _Piece(self._nodes, self._readers, edits, wide=True)
            # What took the place of a value may be computed elsewhere, of the same inputs.
            return self._compared(wider) if wider and {*wider.after} != {*piece.after} else reason
        except _CannotRun as error:
            self.unverified[graph.place(error.node) if error.node else ""] = str(error)
            return None

    def enter(self, nodes: Iterable[Node]) -> None:
        """Take note of nodes that the graph has now."""
        for node in nodes:
            self._nodes[node.name] = node
            if node.op in ("call_module", "get_attr"):
                for prefix in prefixes(str(node.target)):
                    self._readers.setdefault(prefix, []).append(node)

    def _compared(self, piece: _Piece) -> str | None:
        inputs = {name: self._input(self._nodes[name]) for name in piece.inputs}
        dtype = torch.float64 if self._preserves else None
        try:
            truth = self._run(piece, False, inputs, dtype)
        except _CannotRun:
            raise
        except Exception as error:  # random inputs may not be what a function takes
            raise _CannotRun(
                f"it cannot be run on random inputs ({type(error).__name__}: {error})"
            ) from error
        try:
            result = self._run(piece, True, inputs, dtype)
        except Exception as error:
            return f"it raises {type(error).__name__} where it did not: {error}"
        reason, where, distance = _distance(truth, result, piece.labels, dtypes=self._preserves)
        if reason or not self._preserves or distance <= RTOL:
            return reason
        limit = RTOL
        if piece.rounds:
            own = self._run(piece, False, inputs, None)
            limit = 2 * _distance(truth, own, piece.labels, dtypes=False)[2] + 16 * _epsilon(own)
        if distance <= limit:
            return None
        return f"{where} differs by {distance:.2g} of the largest value in its row; the limit is {limit:.2g}"

    def _input(self, node: Node) -> Any:
        """Random values of the shape and dtype of a node's, large, small and zero among them."""
        if node.op == "get_attr":
            return attribute(self._graph_module, str(node.target))
        value = self._values.get(node.name, graph.value_of(node))
        if value is None:
            raise _CannotRun(
                "its shape is unknown: trace with fxopt.trace, run torch.fx.passes.fake_tensor_prop.FakeTensorProp, "
                "or give example inputs as verify=(x, ...)",
                node,
            )
        return tree_map(lambda leaf: _random(leaf, zlib.crc32(node.name.encode())), value)

    def _run(
        self, piece: _Piece, after: bool, inputs: Mapping[str, Any], dtype: torch.dtype | None
    ) -> list[Any]:
        """Run one of the two pieces; returns what others read of it, and the inputs, which it may have written into."""
        values = {name: tree_map(lambda leaf: _cast(leaf, dtype), value) for name, value in inputs.items()}
        swapped, states = (piece.put, piece.after) if after else (piece.taken, piece.before)

        def found(value: Any) -> Any:
            return values[value.name] if type(value) is Reference else value

        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            for name, state in states.items():
                args, kwargs = map_aggregate(state.args, found), map_aggregate(state.kwargs, found)
                if state.op == "call_function":
                    values[name] = state.target(*args, **kwargs)
                elif state.op == "call_method":
                    values[name] = getattr(args[0], state.target)(*args[1:], **kwargs)
                elif state.op == "output":
                    values[name] = args[0]
                else:
                    module = _cast(_standing(self._graph_module, state.target, swapped), dtype)
                    values[name] = module(*args, **kwargs) if state.op == "call_module" else module
        return [values[pair[after]] for pair in piece.outputs] + [values[name] for name in piece.inputs]


class _CannotRun(Exception):
    def __init__(self, text: str, node: Node | None = None) -> None:
        super().__init__(text)
        self.node = node


class _Piece:
    """The nodes of a site before and after its changes.

    Attributes:
        before: the nodes that it had, in order, by name.
        after: the nodes that it has.
        taken: what stood at qualified names.
        put: what stands there now.
        outputs: for each use of its values by others, the node that gave the value, and the one that gives it now.
        inputs: the nodes outside whose values it takes.
    """

    def __init__(
        self,
        nodes: Mapping[str, Node],
        readers: Mapping[str, Sequence[Node]],
        edits: Sequence[Edit],
        wide: bool = False,
    ) -> None:
        swaps = [edit for edit in edits if isinstance(edit, Swap)]
        self.taken = {path: value for swap in reversed(swaps) for path, value in swap.before.items()}
        self.put = {path: value for swap in swaps for path, value in swap.after.items()}
        changed = [path for path in self.put if self.put[path] is not self.taken[path]]
        core = {edit.name for edit in edits if isinstance(edit, NodeEdit) and (edit.fields or edit.meta)}
        core |= {node.name for path in changed for node in readers.get(path, ()) if not node._erased}
        if wide:
            core |= {e.new for e in edits if isinstance(e, Redirect) and nodes[e.new].op != "placeholder"}
        users = {user for edit in edits if isinstance(edit, Redirect) for user in edit.users}
        present = [nodes[name] for name in core | users if name in nodes and not nodes[name]._erased]
        now = {node.name: NodeState.of(node) for node in sorted(present)}
        then, order = dict(now), list(now)
        for edit in reversed(edits):
            if isinstance(edit, Redirect):
                for user in edit.users:
                    then[user] = _renamed(then[user], edit.new, edit.old)
            elif isinstance(edit, NodeEdit) and edit.before is None:
                del then[edit.name]
                order.remove(edit.name)
            elif isinstance(edit, NodeEdit) and edit.before is not None and edit.fields:
                if edit.after is None:
                    order.insert(_position(order, edit.previous, nodes), edit.name)
                    then[edit.name] = edit.before
                then[edit.name] = dataclasses.replace(
                    then[edit.name], **{field: getattr(edit.before, field) for field in edit.fields}
                )
        self.before = {name: then[name] for name in order if name in core}
        self.after = {name: state for name, state in now.items() if name in core}
        self.outputs = sorted(self._uses(nodes, then, users - core))
        inside = [(self.before, state) for state in self.before.values()]
        inside += [(self.after, state) for state in self.after.values()]
        taken = {name for side, state in inside for name in state.references() if name not in side}
        taken |= {b for b, _ in self.outputs if b not in self.before}
        taken |= {a for _, a in self.outputs if a not in self.after}
        self.inputs = sorted(taken)
        self.labels = [pair[1] for pair in self.outputs] + self.inputs

    def _uses(
        self, nodes: Mapping[str, Node], then: Mapping[str, NodeState], redirected: set[str]
    ) -> set[tuple[str, str]]:
        others = {user for name in self.after for user in nodes[name].users if user.name not in self.after}
        pairs = set()
        for user in others | {nodes[name] for name in redirected}:
            now = NodeState.of(user)
            for old, new in zip(then.get(user.name, now).references(), now.references(), strict=True):
                if old in self.before or new in self.after or old != new:
                    pairs.add((old, new))
        return pairs

    @property
    def rounds(self) -> bool:
        """Whether weights that were rounded took the place of others, or a node names a dtype."""
        dtypes = [t.dtype for value in self.put.values() for t in _weights(value) if t.is_floating_point()]
        for state in self.after.values():
            map_aggregate(
                (state.args, state.kwargs), lambda v: dtypes.append(v) if isinstance(v, torch.dtype) else v
            )
        return any(dtype != torch.float64 for dtype in dtypes)


def _renamed(state: NodeState, old: str, new: str) -> NodeState:
    def renamed(value: Any) -> Any:
        return Reference(new) if type(value) is Reference and value.name == old else value

    args, kwargs = map_aggregate(state.args, renamed), map_aggregate(state.kwargs, renamed)
    return dataclasses.replace(state, args=args, kwargs=kwargs)


def _position(order: Sequence[str], previous: str, nodes: Mapping[str, Node]) -> int:
    """Where in `order` a node belongs that stood behind `previous`."""
    if previous in order:
        return order.index(previous) + 1
    front = nodes.get(previous)
    alive = [(i, nodes[n]) for i, n in enumerate(order) if n in nodes and not nodes[n]._erased]
    return next((i for i, node in alive if front is not None and front < node), len(order) if front else 0)


def _standing(graph_module: GraphModule, path: str, swapped: Mapping[str, Any]) -> Any:
    """The module or tensor at `path`, where some were swapped."""
    for prefix in prefixes(path):
        if swapped.get(prefix) is not None:
            value = swapped[prefix]
            for name in path[len(prefix) + 1 :].split(".") if path != prefix else ():
                value = getattr(value, name)
            return value
    return attribute(graph_module, path)


def _weights(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    """A copy of a tensor or module, floating numbers in `dtype`."""
    if any(tensor.is_meta for tensor in _weights(value)):
        raise _CannotRun("its weights are on the meta device")
    memo: dict[int, Any] = {}
    for tensor in _weights(value):
        wide = tensor.detach().to(dtype if dtype and tensor.is_floating_point() else tensor.dtype)
        if isinstance(value, Tensor) or not isinstance(tensor, nn.Parameter):
            wide = wide.clone() if wide.data_ptr() == tensor.data_ptr() else wide
        memo[id(tensor)] = nn.Parameter(wide, False) if isinstance(tensor, nn.Parameter) else wide
    return copy.deepcopy(value, memo) if isinstance(value, Tensor | nn.Module) else value


def _random(value: Any, seed: int) -> Any:
    if isinstance(value, torch.SymInt):
        return _number(value)
    if not isinstance(value, Tensor):
        return value
    shape = [_number(size) for size in value.shape]
    generator = torch.Generator().manual_seed(seed)
    if not (value.is_floating_point() or value.is_complex()):
        return torch.randint(0, 2, shape, generator=generator).to(value.dtype).to(value.device)
    numbers = torch.randn(shape, generator=generator)
    scales = torch.tensor([1.0, 1.0, 1.0, 1.0, 30.0, 1 / 30, 0.0])
    if numbers.numel() > 1:  # or else nothing might flow
        numbers = numbers * scales[torch.randint(0, len(scales), shape, generator=generator)]
    return numbers.to(value.dtype).to(value.device)


def _number(size: Any) -> int:
    """A size; a free one is that of the example inputs, and 3 where only a run knows it."""
    if isinstance(size, int):
        return size
    return (
        int(size.node.hint)
        if size.node.has_hint()
        else int(size.node.expr.subs(dict.fromkeys(size.node.expr.free_symbols, 3)))
    )


def _distance(
    expected: Sequence[Any], actual: Sequence[Any], labels: Sequence[str], dtypes: bool = True
) -> tuple[str | None, str, float]:
    """Why two lists of values cannot be compared; else the node that differs most, and by how much."""
    worst, where = 0.0, ""
    for label, one, other in zip(labels, expected, actual, strict=True):
        (left, spec), (right, other_spec) = tree_flatten(one), tree_flatten(other)
        if spec != other_spec:
            return f"{label} is {other_spec}, it was {spec}", label, torch.inf
        for a, b in zip(left, right, strict=True):
            if not isinstance(a, Tensor) or not isinstance(b, Tensor):
                if type(a) is not type(b) or a != b:
                    return f"{label} is {b!r}, it was {a!r}", label, torch.inf
            elif a.shape != b.shape or (dtypes and a.dtype != b.dtype):
                return f"{label} is {b.dtype} {[*b.shape]}, it was {a.dtype} {[*a.shape]}", label, torch.inf
            elif (error := _relative(a, b)) > worst:
                worst, where = error, label
    return None, where, worst


def _relative(expected: Tensor, actual: Tensor) -> float:
    """The largest difference, relative to the largest value of its row."""
    if not expected.numel():
        return 0.0
    a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (expected, actual))
    a, b = a.double().cpu(), b.double().cpu()
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, 0.0, (a - b).abs()).nan_to_num(torch.inf, torch.inf)
    size = a.abs().nan_to_num(0, 0)
    rows = size.amax(-1, keepdim=True) if a.ndim else size
    return float((difference / torch.where(rows > 0, rows, size.max().clamp(min=1e-30))).max())


def _epsilon(values: Sequence[Any]) -> float:
    leaves = [leaf for leaf in tree_flatten(list(values))[0] if isinstance(leaf, Tensor)]
    return max((torch.finfo(leaf.dtype).eps for leaf in leaves if leaf.is_floating_point()), default=0.0)


def _described(graph_module: GraphModule, inputs: tuple[Any, ...]) -> dict[str, Any]:
    """Tensors without data for the value of each node, given example inputs."""
    described, mode = sharing_copy(graph_module), FakeTensorMode(allow_non_fake_inputs=True)
    try:
        FakeTensorProp(described, mode).propagate(*inputs)
    except Exception as error:  # whatever a graph raises on inputs that it does not take
        raise PassError(
            f"verify: the graph module does not take these example inputs ({type(error).__name__}: {error})"
        ) from error
    return {node.name: node.meta.get("val") for node in described.graph.nodes}
