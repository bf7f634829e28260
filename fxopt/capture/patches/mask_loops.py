"""Loops over the places where a mask is true, as in mixtures of experts: `for expert in hit.nonzero():`.

If the length of the mask is known, the loop visits every place and asks whether the mask is true there. This decision on a
value does not matter if the loop body writes nothing for a false mask.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

from fxopt.capture.data_dependence.branch_decisions import BranchDecisions
from fxopt.capture.nodes.graph_writer import GraphWriter
from fxopt.capture.patches.replaced import Patches
from fxopt.torch_internals import version_of

_PLACES: set[Any] = {"nonzero", "argwhere", torch.nonzero, torch.argwhere}


def patch_loops(patch: Patches, writer: GraphWriter, decisions: BranchDecisions) -> None:
    """Run loops over places at all places; a specialized graph runs them as often as the example does."""
    # The places of a mask of each length, one tensor each.
    places: dict[tuple[int, torch.device], list[torch.Tensor]] = {}

    @patch(torch.Tensor, "__iter__")
    def iterate(original: Any, self: torch.Tensor) -> Iterator[Any]:
        watched = not decisions.specialised and _is_loop(sys._getframe(2))
        length = _length(writer, self) if watched else None
        if length is None:
            yielded: Iterator[Any] = original(self)
            return yielded
        key = length, self.device
        if key not in places:
            places[key] = [torch.tensor([place], device=self.device) for place in range(length)]
        found = (self == torch.arange(length, device=self.device)).any(0)
        return _loop(decisions, found, places[key])


def _is_loop(frame: FrameType) -> bool:
    """Tell whether a frame starts a loop itself; `enumerate` and `zip` iterate in C, where a capture cannot follow."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] == "GET_ITER"


def _loop(
    decisions: BranchDecisions, found: torch.Tensor, places: list[torch.Tensor]
) -> Iterator[torch.Tensor]:
    """The places at which the loop runs."""
    for position, place in enumerate(places):
        if decisions.runs(found[position], position):
            yield place
    decisions.running = None


def _length(writer: GraphWriter, tensor: torch.Tensor) -> int | None:
    """The length of the mask that `nonzero` got to make this tensor; None if unknown, or if the tensor was written."""
    node = writer.argument(tensor)
    mask = node.args[0].meta.get("val") if node.target in _PLACES and node.args else None
    one_dimension = isinstance(mask, torch.Tensor) and mask.dim() == 1 and type(mask.shape[0]) is int
    unchanged = tensor.dim() == 2 and not version_of(tensor)
    return mask.shape[0] if one_dimension and unchanged and not isinstance(tensor.shape[0], int) else None
