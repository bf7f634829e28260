"""Effects of the body of a data-dependent branch: what it uses and writes, and whether it may run unconditionally."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fxopt.capture.data_dependence.branch_decisions import Body
from fxopt.capture.fakes.dynamic_shapes import expression_of_size, is_unbacked
from fxopt.capture.nodes.comparison import is_call
from fxopt.capture.runs.run_result import RunResult, UnprovedError
from fxopt.capture.runtime import modes
from fxopt.capture.runtime.checks import CHECKS, MASKS
from fxopt.effects import written_by, written_parameters
from fxopt.graph import called_module, function_name
from fxopt.memory import storage_of
from fxopt.objects import set_attributes, set_items, tensors_in

# Functions that write some elements of their first argument or of its copy, with position and name of the index argument.
_INDEXED = {
    **dict.fromkeys(("index_add_", "index_copy_", "index_fill_", "index_reduce_"), (2, "index")),
    **dict.fromkeys(("scatter_", "scatter_add_", "scatter_reduce_"), (2, "index")),
    **dict.fromkeys(("masked_fill_", "masked_scatter_", "masked_fill"), (1, "mask")),
    "index_put_": (1, "indices"),
    "setitem": (1, ""),
}
# Functions that return a copy of a tensor or the tensor itself, depending on its strides, dtype or device.
_MAY_COPY = {
    *("contiguous", "reshape", "reshape_as", "flatten", "unflatten", "ravel", "view_as", "expand_as"),
    *("to", "type", "type_as", "float", "double", "half", "bfloat16", "int", "long", "bool", "cpu", "cuda"),
    "dropout",
}
# Functions that raise an error for an empty tensor, unless a dimension is given.
_NEEDS_ENTRIES = {"max", "min", "amax", "amin", "argmax", "argmin", "aminmax"}
# Functions whose gradients are finite for finite values, so that gradients of 0 stay 0; layers count as such, too.
_SMOOTH = {
    *("add", "sub", "rsub", "mul", "neg", "matmul", "mm", "bmm", "linear", "baddbmm", "addmm", "einsum"),
    *("sum", "mean", "relu", "gelu", "silu", "sigmoid", "tanh", "softmax", "log_softmax", "layer_norm"),
    *("clamp", "round", "cat", "stack", "where", "masked_fill", "zero", "fill", "copy", "repeat", "item"),
    *("index_select", "gather", "getattr", "getitem", "select", "narrow", "chunk", "split", "unbind", "t"),
    *("view", "expand", "permute", "transpose", "squeeze", "unsqueeze", "swapaxes", "movedim", "clone"),
    "detach",
}


class BodyEffects:
    """The nodes that bodies of branches use and write; the model may skip these bodies."""

    def __init__(self, capture: RunResult, bodies: Sequence[Sequence[torch.fx.Node]]) -> None:
        self._capture = capture
        # For each write into memory from outside, or masked copy, the node that has its value if the body is skipped.
        self.aliases: dict[torch.fx.Node, torch.fx.Node] = {}
        # For each copy, also of another shape, the node that it copies.
        self._first: dict[torch.fx.Node, torch.fx.Node] = {}
        self._body_of = {node: number for number, body in enumerate(bodies) for node in body}
        # For each memory, the bodies that own its values; None is the forward around the bodies.
        self._owners: dict[int, set[int | None]] = {}
        # For each memory that may be a copy, the memory of its source.
        self._source: dict[int, int] = {}
        for node in capture.graph.nodes:
            owners: set[int | None] = {*self._bodies(node)} or {None}
            given = tensors_in([value.meta.get("val") for value in node.all_input_nodes])
            source = next(map(storage_of, given), None) if function_name(node) in _MAY_COPY else None
            for tensor in tensors_in(node.meta.get("val")):
                if source is not None and source != storage_of(tensor):
                    self._source[storage_of(tensor)] = source
                self._owners.setdefault(self._memory(tensor), set()).update(owners)

    def written_by(self, number: int, body: Sequence[torch.fx.Node]) -> Body:
        """Return the writes of a body into memory from outside; UnprovedError if it must not run unconditionally."""
        writes: Body = []
        for node in body:
            if reason := self._refused(number, node):
                raise UnprovedError(f"the body of the branch {reason}, at {node.format_node()}")
            if node.target in CHECKS | modes.SWITCHES:
                continue
            written = written_by(node, self._module(node)) or ()
            if not written:
                writes += self._copied(node)
            if all(self._belongs(value, number) for value in written):
                continue
            index = _index(node)
            if written != node.args[:1] or not _may_be_nowhere(index):
                raise UnprovedError(
                    f"the body of the branch writes more than a mask selects, at {node.format_node()}"
                )
            writes.append((node, index))
            self.aliases[node] = written[0]
        return writes

    def _refused(self, number: int, node: torch.fx.Node) -> str | None:
        """Return the reason why a node must not run if the model would skip it; None if it may run."""
        if any(other != number for source in node.all_input_nodes for other in self._bodies(source)):
            return "uses what another one made"
        if node.target in CHECKS:
            return None
        if node.target in modes.SWITCHES:
            return None if self._switches_back(node, number) else "leaves a mode switched"
        if node.target in (set_attributes, set_items):
            return "changes an object"
        module = self._module(node)
        if written_by(node, module) is None or (module is not None and list(written_parameters(module))):
            return "writes where nobody can tell"
        if module is None and not _is_harmless(node):
            return "may raise an error, or give gradients that are not finite, on no elements"
        if isinstance(module, torch.nn.RNNBase) and module.training and module.dropout:
            return "draws random numbers"  # a run on fakes draws none
        return None

    def _copied(self, node: torch.fx.Node) -> Body:
        """Record a `masked_fill` or reshaped value as a copy of its source; return the write of a `masked_fill`."""
        source, made = node.args[0] if node.args else None, node.meta.get("val")
        if not isinstance(source, torch.fx.Node) or not isinstance(source.meta.get("val"), torch.Tensor):
            return []
        name = function_name(node)
        mask = _index(node) if name == "masked_fill" else None
        if not isinstance(made, torch.Tensor) or (mask is None and name not in ("view", "reshape")):
            return []
        first = self._first[node] = self._first.get(source, source)
        of = first.meta["val"]
        if of.dtype == made.dtype and _shape(of) == _shape(made) and self._is_never_written(node, first):
            self.aliases[node] = first
        return [] if mask is None else [(node, mask)]

    def _module(self, node: torch.fx.Node) -> torch.nn.Module | None:
        return called_module(self._capture.request.model, node)

    def _is_never_written(self, *nodes: torch.fx.Node) -> bool:
        """Tell whether no call writes into the memory of these values; inputs may share memory."""
        memory = {self._memory(tensor) for node in nodes for tensor in tensors_in(node.meta.get("val"))}
        if memory & self._inputs and self._written_at_all & self._inputs:
            return False
        return self._written_at_all.isdisjoint(memory)

    @functools.cached_property
    def _inputs(self) -> set[int]:
        inputs = (node.meta.get("val") for node in self._capture.graph.nodes if node.op == "placeholder")
        return {self._memory(tensor) for value in inputs for tensor in tensors_in(value)}

    @functools.cached_property
    def _written_at_all(self) -> set[int]:
        """The memory that any call of the graph may write into; a writing layer may write into every tensor of the model."""
        written: set[int] = set()
        nodes = list(self._capture.graph.nodes)
        attributes = [node for node in nodes if node.op == "get_attr"]
        for node in nodes:
            module = self._module(node)
            values = () if node.target in CHECKS | modes.SWITCHES else written_by(node, module)
            of_layer = attributes if module is not None and list(written_parameters(module)) else ()
            for value in (*(node.all_input_nodes if values is None else values), *of_layer):
                written.update(map(self._memory, tensors_in(value.meta.get("val"))))
        return written

    def _memory(self, tensor: torch.Tensor) -> int:
        """Return the memory of a tensor. A possible copy, which depends on strides without a guard, counts as its source."""
        memory = storage_of(tensor)
        while memory in self._source:
            memory = self._source[memory]
        return memory

    def _bodies(self, node: torch.fx.Node) -> Iterator[int]:
        """Yield the bodies that compute the value of a node, or the value of which it is a part or a size."""
        if node in self.aliases:
            yield from self._bodies(self.aliases[node])
        elif node in self._body_of:
            yield self._body_of[node]
        elif not is_call(node):
            for source in node.all_input_nodes:
                yield from self._bodies(source)

    def _belongs(self, node: torch.fx.Node, number: int) -> bool:
        """Tell whether the memory of a value belongs only to this body."""
        tensors = list(tensors_in(node.meta.get("val")))
        return bool(tensors) and all(self._owners[self._memory(tensor)] == {number} for tensor in tensors)

    def _switches_back(self, node: torch.fx.Node, number: int) -> bool:
        """Tell whether a node that enters or leaves a mode has its counterpart in the same body."""
        if isinstance(node.args[0], torch.fx.Node):
            return self._body_of.get(node.args[0]) == number
        user = next(iter(node.users), None)
        if len(node.users) != 1 or user is None or user.target not in modes.SWITCHES:
            return False
        between = node.next
        while between is not user:
            if is_call(between) and self._body_of.get(between) != number:
                return False
            between = between.next
        return self._body_of.get(user) == number


def _shape(tensor: torch.Tensor) -> list[Any]:
    """Return the sizes of a tensor as expressions, which can be compared without adding a guard."""
    return list(map(expression_of_size, tensor.shape))


def _is_harmless(node: torch.fx.Node) -> bool:
    """Tell whether a call accepts empty tensors, and does not turn gradients of 0 into NaN, as `sqrt` does at 0."""
    name, made = function_name(node).removesuffix("_"), node.meta.get("val")
    sources = [source.meta.get("val") for source in node.all_input_nodes]
    whole = name in _NEEDS_ENTRIES and len(node.args) == 1 and not node.kwargs
    if whole and any(map(_may_be_empty, sources)):
        return False
    by_number = name in ("truediv", "div") and not isinstance(node.args[-1], torch.fx.Node)
    if by_number or name in _SMOOTH | _MAY_COPY or function_name(node) in _INDEXED:
        return True
    numbers = ([t for t in tensors_in(value) if t.is_floating_point()] for value in (made, sources))
    return any(all(map(_may_be_empty, tensors)) for tensors in numbers)


def _may_be_empty(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_unbacked(value.numel())


def _index(node: torch.fx.Node) -> Any:
    """Return the index or mask that selects the elements of a write; None for other writes."""
    position, name = _INDEXED.get(function_name(node), (0, ""))
    if not position or node.kwargs.get("out") is not None:
        return None
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def _may_be_nowhere(index: Any) -> bool:
    """Tell whether an index may select no element: its size is unbacked, or it is a mask."""
    for part in index if isinstance(index, (tuple, list)) else (index,):
        tensor = part.meta.get("val") if isinstance(part, torch.fx.Node) else None
        if isinstance(tensor, torch.Tensor) and (tensor.dtype in MASKS or _may_be_empty(tensor)):
            return True
    return False
