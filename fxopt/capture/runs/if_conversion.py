"""If-conversion: proves that the body of a data-dependent branch may run unconditionally.

`for expert in hit.nonzero():` and `if mask.any():` lead to writes at some places of a tensor, or to copies that differ at
some places, of which there are none where the answer is the other one. A graph that always does it then holds for both
answers. What has to be shown: that two captures differ by nothing else, that nothing later uses what is left out, Python's
variables among it, and that it writes only where an index or a mask says. The graph checks that these are empty whenever
the forward would have left it out.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fxopt.capture.data_dependence.branch_decisions import Body, BranchAtLine
from fxopt.capture.data_dependence.python_state import same_state
from fxopt.capture.nodes.comparison import Pairs, calls_of, is_call
from fxopt.capture.runs.equivalence import equivalent, subsumes
from fxopt.capture.runs.forward_run import ForwardRun
from fxopt.capture.runtime import modes
from fxopt.capture.runtime.checks import (
    MASKS,
    check_no_write,
    check_outcome,
    check_same_outcome,
    check_value,
)
from fxopt.effects import written_by, written_parameters
from fxopt.memory import storage_of
from fxopt.objects import tensors_in

# The functions that write at some places of their first argument, or of a copy, with the position and the name of the index.
_INDEXED = {
    **dict.fromkeys(("index_add_", "index_copy_", "index_fill_", "index_reduce_"), (2, "index")),
    **dict.fromkeys(("scatter_", "scatter_add_", "scatter_reduce_"), (2, "index")),
    **dict.fromkeys(("masked_fill_", "masked_scatter_", "masked_fill"), (1, "mask")),
    "index_put_": (1, "indices"),
    "setitem": (1, ""),
}
# What copies a tensor or gives it as it is, depending on its strides, dtype or device.
_MAY_COPY = {
    *(
        "contiguous",
        "reshape",
        "reshape_as",
        "flatten",
        "unflatten",
        "ravel",
        "view_as",
        "expand_as",
        "dropout",
    ),
    *("to", "type", "type_as", "float", "double", "half", "bfloat16", "int", "long", "bool", "cpu", "cuda"),
}
# What raises an error for a tensor without entries, unless it is told a dimension.
_NEEDS_ENTRIES = {"max", "min", "amax", "amin", "argmax", "argmin", "aminmax"}
# What gives finite gradients for finite values, besides views, copies and layers: gradients of zeros then stay zeros.
_SMOOTH = {
    *("add", "sub", "rsub", "mul", "neg", "matmul", "mm", "bmm", "linear", "baddbmm", "addmm", "einsum"),
    *("sum", "mean", "relu", "gelu", "silu", "sigmoid", "tanh", "softmax", "log_softmax", "layer_norm"),
    *("clamp", "round", "cat", "stack", "where", "masked_fill", "zero", "fill", "copy", "repeat", "item"),
    *("index_select", "gather", "getattr", "getitem", "select", "narrow", "chunk", "split", "unbind", "t"),
    *("view", "expand", "permute", "transpose", "squeeze", "unsqueeze", "swapaxes", "movedim", "clone"),
    "detach",
}
_CHECKS = {check_same_outcome, check_outcome, check_no_write, check_value}
_MODES = {
    *(modes.set_grad_enabled, modes.enter_autocast, modes.enter_inference_mode, modes.enter_sdpa_kernel),
    modes.leave,
}


def if_convert(capture: ForwardRun, other: ForwardRun, line: str) -> bool:
    """Tell whether the graph of a capture holds for `other`, which leaves something out after questions at a line.

    It then has in `capture.left_out` what must be checked, unless that is known for the line already.
    """
    asked, of_other = capture.recorder.decisions.asked_at[line], other.recorder.decisions.asked_at[line]
    if len(asked) != len(of_other):
        return False
    aligned = _aligned(calls_of(capture.graph), calls_of(other.graph), [question.node for question in asked])
    if aligned is None or not any(aligned[1]):
        return equivalent(capture, other)
    pairs, bodies = aligned
    answered = zip(asked, of_other, bodies, strict=True)
    if any(body and mine.answer == its.answer for mine, its, body in answered):
        return False
    both = list(zip(asked, of_other, strict=True))
    opposite = all(mine.answer != its.answer for mine, its in both)
    if opposite and not all(same_state(mine.state, its.state) for mine, its in both):
        return False  # Python counts what is left out, or keeps it for a later time
    if _draws(asked, capture) != _draws(of_other, other):
        return False
    memory = _BodyEffects(capture, bodies)
    written = [memory.written_by(number, body) for number, body in enumerate(bodies)]
    if not subsumes(capture, other, pairs, memory.aliases) or any(body is None for body in written):
        return False
    capture.left_out.setdefault(line, [body for body in written if body is not None])
    return True


def _aligned(
    calls: Sequence[torch.fx.Node], others: Sequence[torch.fx.Node], questions: Sequence[torch.fx.Node]
) -> tuple[Pairs, list[list[torch.fx.Node]]] | None:
    """The pairs of calls that come from the same lines, and for each question what comes after it in `calls` alone.

    None if `others` has more, or if something is left out before the first question.
    """
    pairs: list[tuple[torch.fx.Node, torch.fx.Node]] = []
    bodies: list[list[torch.fx.Node]] = []
    left = list(reversed(others))
    for node in calls:
        if left and _made_at(node) == _made_at(left[-1]):
            pairs.append((node, left.pop()))
        elif bodies:
            bodies[-1].append(node)
        else:
            return None
        if len(bodies) < len(questions) and node is questions[len(bodies)]:
            bodies.append([])
    return None if left else (pairs, bodies)


def _made_at(node: torch.fx.Node) -> tuple[Any, ...]:
    """What a node calls, and where in the model."""
    modules = list(node.meta.get("nn_module_stack", ()))
    return node.op, node.target, modules[-1:], node.meta.get("stack_trace")


def _draws(asked: Sequence[BranchAtLine], capture: ForwardRun) -> list[int]:
    """How often random numbers were drawn after each question and before the next one."""
    counts = [*(question.drawn for question in asked), capture.fake_mode.drawn]
    return [after - before for before, after in itertools.pairwise(counts)]


class _BodyEffects:
    """What the bodies that may be left out use and write."""

    def __init__(self, capture: ForwardRun, bodies: Sequence[Sequence[torch.fx.Node]]) -> None:
        self._capture = capture
        # For nodes that write into memory that is not the body's own, the tensor whose value they give.
        self.aliases: dict[torch.fx.Node, torch.fx.Node] = {}
        # For a copy, also of another shape, what it is a copy of.
        self._first: dict[torch.fx.Node, torch.fx.Node] = {}
        self._body_of = {node: number for number, body in enumerate(bodies) for node in body}
        # To which bodies the values in a memory belong; None is the forward around them.
        self._owners: dict[int, set[int | None]] = {}
        # For a memory that may be a copy, that of which it may be one.
        self._source: dict[int, int] = {}
        for node in capture.graph.nodes:
            owners: set[int | None] = {*self._bodies(node)} or {None}
            for tensor in tensors_in(node.meta.get("val")):
                source = next(
                    iter(tensors_in([value.meta.get("val") for value in node.all_input_nodes])), None
                )
                if (
                    _name(node) in _MAY_COPY
                    and source is not None
                    and storage_of(source) != storage_of(tensor)
                ):
                    self._source[storage_of(tensor)] = storage_of(source)
                self._owners.setdefault(self._memory(tensor), set()).update(owners)

    def written_by(self, number: int, body: Sequence[torch.fx.Node]) -> Body | None:
        """The writes of a body to what is not its own; None where they cannot be told, or it uses what another one made."""
        writes: Body = []
        for node in body:
            if any(other != number for source in node.all_input_nodes for other in self._bodies(source)):
                return None
            if node.target in _CHECKS:
                continue
            if node.target in _MODES:
                if not self._switches_back(node, number):
                    return None
                continue
            module = self._module(node)
            written = written_by(node, module)
            if written is None or (module is not None and list(written_parameters(module))):
                return None
            if module is None and not _is_harmless(node):
                return None
            if isinstance(module, torch.nn.RNNBase) and module.training and module.dropout:
                return None  # a fake run of it draws no random numbers
            if not written:
                writes += self._copied(node)
            if all(self._belongs(value, number) for value in written):
                continue
            index = _index(node)
            if written != node.args[:1] or not _may_be_nowhere(index):
                return None
            writes.append((node, index))
            self.aliases[node] = written[0]
        return writes

    def _copied(self, node: torch.fx.Node) -> Body:
        """Take note of a copy that differs where a mask is true, `masked_fill`, and of what only reshapes one."""
        source, made = node.args[0] if node.args else None, node.meta.get("val")
        if not isinstance(source, torch.fx.Node) or not isinstance(source.meta.get("val"), torch.Tensor):
            return []
        name = _name(node)
        mask = _index(node) if name == "masked_fill" else None
        if not isinstance(made, torch.Tensor) or (mask is None and name not in ("view", "reshape")):
            return []
        first = self._first[node] = self._first.get(source, source)
        of = first.meta["val"]
        if of.dtype == made.dtype and _shape(of) == _shape(made) and self._is_never_written(node, first):
            self.aliases[node] = first
        return [] if mask is None else [(node, mask)]

    def _module(self, node: torch.fx.Node) -> torch.nn.Module | None:
        model = self._capture.request.model
        return model.get_submodule(str(node.target)) if node.op == "call_module" else None

    def _is_never_written(self, *nodes: torch.fx.Node) -> bool:
        """Tell whether no call writes into the memory of these values; inputs may share theirs."""
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
        """The memory that any call of the graph may write into; a layer that writes into one tensor may into each."""
        written: set[int] = set()
        nodes = list(self._capture.graph.nodes)
        attributes = [node for node in nodes if node.op == "get_attr"]
        for node in nodes:
            module = self._module(node)
            values = () if node.target in _MODES | _CHECKS else written_by(node, module)
            of_layer = attributes if module is not None and list(written_parameters(module)) else ()
            for value in (*(node.all_input_nodes if values is None else values), *of_layer):
                written.update(map(self._memory, tensors_in(value.meta.get("val"))))
        return written

    def _memory(self, tensor: torch.Tensor) -> int:
        """The memory of a tensor; what may be a copy, by strides that nothing guards, counts as that of its source."""
        memory = storage_of(tensor)
        while memory in self._source:
            memory = self._source[memory]
        return memory

    def _bodies(self, node: torch.fx.Node) -> Iterator[int]:
        """The bodies that make what a node gives, or what it is a part or a size of."""
        if node in self.aliases:
            yield from self._bodies(self.aliases[node])
        elif node in self._body_of:
            yield self._body_of[node]
        elif not is_call(node):
            for source in node.all_input_nodes:
                yield from self._bodies(source)

    def _belongs(self, node: torch.fx.Node, number: int) -> bool:
        """Tell whether the memory of a value belongs to a body alone."""
        tensors = list(tensors_in(node.meta.get("val")))
        return bool(tensors) and all(self._owners[self._memory(tensor)] == {number} for tensor in tensors)

    def _switches_back(self, node: torch.fx.Node, number: int) -> bool:
        """Tell whether a node that enters or leaves a mode has its counterpart in the same body."""
        if isinstance(node.args[0], torch.fx.Node):
            return self._body_of.get(node.args[0]) == number
        user = next(iter(node.users), None)
        if len(node.users) != 1 or user is None or user.target not in _MODES:
            return False
        between = node.next
        while between is not user:
            if is_call(between) and self._body_of.get(between) != number:
                return False
            between = between.next
        return self._body_of.get(user) == number


def _shape(tensor: torch.Tensor) -> list[Any]:
    """The sizes of a tensor as they are known, to compare them without a question."""
    return [size.node.expr if isinstance(size, torch.SymInt) else size for size in tensor.shape]


def _name(node: torch.fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _is_harmless(node: torch.fx.Node) -> bool:
    """Tell whether a call runs on tensors without entries, and makes no NaN of gradients of zeros, as `sqrt` does at 0.

    The gradient of what has no entries adds nothing.
    """
    name, made = _name(node).removesuffix("_"), node.meta.get("val")
    sources = [source.meta.get("val") for source in node.all_input_nodes]
    whole = name in _NEEDS_ENTRIES and len(node.args) == 1 and not node.kwargs
    if whole and any(map(_may_be_empty, sources)):
        return False
    by_number = name in ("truediv", "div") and not isinstance(node.args[-1], torch.fx.Node)
    if by_number or name in _SMOOTH | _MAY_COPY or _name(node) in _INDEXED:
        return True
    numbers = ([t for t in tensors_in(value) if t.is_floating_point()] for value in (made, sources))
    return any(all(map(_may_be_empty, tensors)) for tensors in numbers)


def _may_be_empty(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and bool(free_unbacked_symbols(value.numel()))


def _index(node: torch.fx.Node) -> Any:
    """The index or mask of a write, which says where in a tensor; None for other writes."""
    position, name = _INDEXED.get(_name(node), (0, ""))
    if not position or node.kwargs.get("out") is not None:
        return None
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def _may_be_nowhere(index: Any) -> bool:
    """Tell whether an index may have no entries: only a run knows how many it has, or it is a mask."""
    for part in index if isinstance(index, (tuple, list)) else (index,):
        tensor = part.meta.get("val") if isinstance(part, torch.fx.Node) else None
        if isinstance(tensor, torch.Tensor) and (
            tensor.dtype in MASKS or free_unbacked_symbols(tensor.numel())
        ):
            return True
    return False
