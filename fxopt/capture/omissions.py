"""What a forward does after one answer to a question on a value, and leaves out after the other.

`for expert in hit.nonzero():` and `if mask.any():` lead to writes at some places of a tensor, of which there are none
where the answer is the other one. A graph that always does it then holds for both answers. What has to be shown: that
two captures differ by nothing else, that nothing later uses what is left out, and that it writes only where an index or
a mask says. The graph checks that these are empty whenever the forward would have left it out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fxopt.capture import modes
from fxopt.capture.agreement import covers, holds_for
from fxopt.capture.checks import MASKS, check_alike, check_decision, check_nothing_written, check_value
from fxopt.capture.comparison import calls_of, is_call
from fxopt.capture.decisions import Body
from fxopt.capture.forward import Capture
from fxopt.capture.writer import storage_of, tensors_in
from fxopt.effects import written_by, written_parameters

# The functions that write at some places of their first argument, with the position and the name of the index.
_INDEXED = {
    **dict.fromkeys(("index_add_", "index_copy_", "index_fill_", "index_reduce_"), (2, "index")),
    **dict.fromkeys(("scatter_", "scatter_add_", "scatter_reduce_"), (2, "index")),
    **dict.fromkeys(("masked_fill_", "masked_scatter_"), (1, "mask")),
    "index_put_": (1, "indices"),
    "setitem": (1, ""),
}
_CHECKS = {check_alike, check_decision, check_nothing_written, check_value}
_MODES = {
    *(modes.set_grad_enabled, modes.enter_autocast, modes.enter_inference_mode, modes.enter_sdpa_kernel),
    modes.leave,
}


def leave_out(capture: Capture, other: Capture, line: str) -> bool:
    """Whether the graph of a capture holds for `other`, which leaves something out after questions at a line.

    It then has in `capture.left_out` what must be checked, unless that is known for the line already.
    """
    asked, of_other = capture.recorder.decisions.asked_at[line], other.recorder.decisions.asked_at[line]
    if len(asked) != len(of_other):
        return False
    mine = _parts(capture, [question.node for question in asked])
    its = _parts(other, [question.node for question in of_other])
    drawn = [[question.drawn for question in questions] for questions in (asked, of_other)]
    if len(mine[0]) != len(its[0]) or not asked:
        return holds_for(capture, other)
    if _differences(drawn[0], capture) != _differences(drawn[1], other):
        return False
    pairs = list(zip(mine[0], its[0], strict=True))
    bodies: list[list[torch.fx.Node]] = []
    for question, answer, calls, of_other_calls in zip(
        asked, (question.answer for question in of_other), mine[1:], its[1:], strict=True
    ):
        # What is left out comes first, after the question itself.
        more = len(calls) - len(of_other_calls)
        if more < 0 or (more and question.answer == answer):
            return False
        pairs += zip([calls[0], *calls[1 + more :]], of_other_calls, strict=True)
        bodies.append(calls[1 : 1 + more])
    if not any(bodies):
        return holds_for(capture, other)
    memory = _Memory(capture, bodies)
    written = [memory.written_by(number, body) for number, body in enumerate(bodies)]
    if not covers(capture, other, pairs, memory.aliases) or any(body is None for body in written):
        return False
    capture.left_out.setdefault(line, [body for body in written if body is not None])
    return True


def _differences(counts: Sequence[int], capture: Capture) -> list[int]:
    """How often random numbers were drawn after each question and before the next one."""
    return [
        after - before for before, after in zip(counts, [*counts[1:], capture.fake_mode.drawn], strict=True)
    ]


def _parts(capture: Capture, questions: Sequence[torch.fx.Node]) -> list[list[torch.fx.Node]]:
    """The calls before the first question, and from each question on."""
    parts: list[list[torch.fx.Node]] = [[]]
    for node in calls_of(capture.graph):
        if len(parts) <= len(questions) and node is questions[len(parts) - 1]:
            parts.append([])
        parts[-1].append(node)
    return parts


class _Memory:
    """What the bodies that may be left out use and write."""

    def __init__(self, capture: Capture, bodies: Sequence[Sequence[torch.fx.Node]]) -> None:
        self._model = capture.request.model
        # For nodes that write into memory that is not the body's own, the tensor whose value they give.
        self.aliases: dict[torch.fx.Node, torch.fx.Node] = {}
        self._body_of = {node: number for number, body in enumerate(bodies) for node in body}
        # To which bodies the values in a memory belong; None is the forward around them.
        self._owners: dict[int, set[int | None]] = {}
        for node in capture.graph.nodes:
            owners: set[int | None] = {*self._bodies(node)} or {None}
            for tensor in tensors_in(node.meta.get("val")):
                self._owners.setdefault(storage_of(tensor), set()).update(owners)

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
            module = self._model.get_submodule(str(node.target)) if node.op == "call_module" else None
            written = written_by(node, module)
            if written is None or (module is not None and list(written_parameters(module))):
                return None
            if all(self._belongs(value, number) for value in written):
                continue
            index = _index(node)
            if written != node.args[:1] or not _may_be_nowhere(index):
                return None
            writes.append((node, index))
            self.aliases[node] = written[0]
        return writes

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
        """Whether the memory of a value belongs to a body alone."""
        tensors = list(tensors_in(node.meta.get("val")))
        return bool(tensors) and all(self._owners[storage_of(tensor)] == {number} for tensor in tensors)

    def _switches_back(self, node: torch.fx.Node, number: int) -> bool:
        """Whether a node that enters or leaves a mode has its counterpart in the same body."""
        if isinstance(node.args[0], torch.fx.Node):
            return self._body_of.get(node.args[0]) == number
        return len(node.users) == 1 and all(
            user.target in _MODES and self._body_of.get(user) == number for user in node.users
        )


def _index(node: torch.fx.Node) -> Any:
    """The index or mask of a write, which says where in a tensor; None for other writes."""
    position, name = _INDEXED.get(getattr(node.target, "__name__", ""), (0, ""))
    if not position or node.kwargs.get("out") is not None:
        return None
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def _may_be_nowhere(index: Any) -> bool:
    """Whether an index may have no entries: only a run knows how many it has, or it is a mask."""
    for part in index if isinstance(index, (tuple, list)) else (index,):
        tensor = part.meta.get("val") if isinstance(part, torch.fx.Node) else None
        if isinstance(tensor, torch.Tensor) and (
            tensor.dtype in MASKS or free_unbacked_symbols(tensor.numel())
        ):
            return True
    return False
