"""The properties that a forward reads and that become guards: strides, gradients, dtypes, global modes."""

from __future__ import annotations

from typing import Any

import torch

from fxopt.capture.nodes.graph_writer import GraphWriter
from fxopt.objects import tensors_in

_LAYOUT_QUERIES = {"stride", "is_contiguous", "is_non_overlapping_and_dense", "storage_offset"}
GRAD_QUERIES = {"requires_grad", "grad_fn", "is_leaf"}
_KINDS = {
    **dict.fromkeys(_LAYOUT_QUERIES, "layout"),
    **dict.fromkeys(GRAD_QUERIES, "gradients"),
    "data_ptr": "memory",
}
_NO_DTYPE_QUERIES = {
    *("size", "shape", "dim", "ndim", "device", "numel", "nelement", "__len__", "is_cuda", "layout"),
    *_LAYOUT_QUERIES,
}
_DTYPE_QUERIES = {"element_size", "itemsize", "nbytes", "type"}


class PropertyReads:
    """The properties that one forward has read, with their values, which the graph assumes, and the first place of each read."""

    def __init__(self, writer: GraphWriter) -> None:
        self._writer = writer
        # The first place where the forward read strides (layout), addresses (memory), and whether a tensor requires
        # gradients.
        self.read_at: dict[str, str] = {}
        self._grad_enabled = torch.is_grad_enabled()
        # The place where the forward first read each dtype, and below each global mode, with its value.
        self.dtypes_read_at: dict[torch.dtype, str] = {}
        # The dtypes of all tensors in queries whose answer may depend on the dtype, as `is_floating_point()`.
        self.dtypes_asked: set[torch.dtype] = set()
        self.modes_read: dict[str, tuple[bool, str]] = {}

    def note(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Record a call whose result is not a tensor, if it reads such a property."""
        if name in _KINDS:
            self.read_at.setdefault(_KINDS[name], self._writer.location())
        if name in GRAD_QUERIES:
            self.modes_read.setdefault("grad", (self._grad_enabled, self.read_at["gradients"]))
        if name not in _NO_DTYPE_QUERIES:
            self.dtypes_asked |= {tensor.dtype for tensor in tensors_in(args)}
        if isinstance(result, torch.dtype):
            self.dtypes_read_at.setdefault(result, self._writer.location())
        elif name in _DTYPE_QUERIES:
            self.note_dtype(args[0])

    def note_dtype(self, tensor: torch.Tensor) -> None:
        """Record that the forward relies on the dtype of a tensor."""
        self.dtypes_read_at.setdefault(tensor.dtype, self._writer.location())

    def note_gradients(self) -> None:
        """Record that the forward relies on which inputs require gradients."""
        self.read_at.setdefault("gradients", self._writer.location())

    def note_mode(self, mode: str, answer: bool) -> None:
        """Record where the forward relied on a global mode: `grad`, `autocast` or `inference_mode`."""
        self.modes_read.setdefault(mode, (answer, self._writer.location()))

    def answers(self) -> Any:
        """The properties that were read, with their values, to compare with another run."""
        return "layout" in self.read_at, self.dtypes_read_at.keys(), self._modes()

    def cover(self, other: PropertyReads) -> bool:
        """Tell whether a graph that is valid for only these values is valid for the values of `other`."""
        return (
            self.read_at.keys() >= other.read_at.keys()
            and self.dtypes_asked >= other.dtypes_asked
            and self.dtypes_read_at.keys() >= other.dtypes_read_at.keys()
            and self._modes().items() >= other._modes().items()
        )

    def _modes(self) -> dict[str, bool]:
        """The answer for each global mode that was read."""
        return {mode: answer for mode, (answer, _) in self.modes_read.items()}
