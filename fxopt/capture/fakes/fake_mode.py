"""The FakeTensorMode of a capture, with shortcuts for operators that torch runs slowly on dynamic sizes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxopt.capture import capture_internals as internals
from fxopt.capture.capture_internals import in_kernel_invocation_manager, is_contiguous_or_false
from fxopt.capture.fakes.shape_env import CaptureShapeEnv
from fxopt.errors import TraceError
from fxopt.torch_internals import FakeTensor, FakeTensorMode, schema_of

_ORDINARY = (
    "Take an ordinary tensor: one that is padded, with a mask, in the place of a nested one, for example."
)
# Operators whose output has the shape and dtype of the input.
_GIVE_SIZES_OF_INPUT = {
    internals.relu,
    internals.batch_norm,
}


@dataclasses.dataclass(frozen=True)
class Metadata:
    """The metadata of an output; `view_of` is the position of the input whose memory it shares."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any
    bytes: Any
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    view_of: int | None

    def resized(self, size: Callable[[Any], Any]) -> Metadata:
        """The metadata with `size(n)` in place of each number of elements or bytes."""
        shape, stride = tuple(map(size, self.shape)), tuple(map(size, self.stride))
        return dataclasses.replace(
            self, shape=shape, stride=stride, offset=size(self.offset), bytes=size(self.bytes)
        )


class CaptureFakeMode(FakeTensorMode):
    """A FakeTensorMode that makes tensors of known metadata cheaply."""

    shape_env: CaptureShapeEnv
    _viewing = False
    # Number of operators run so far that draw random numbers.
    drawn = 0
    # Called for each alias operator, because no other mode sees the alias that `torch.Tensor(tensor)` makes.
    make_alias: Callable[[torch.Tensor, Callable[[], torch.Tensor]], torch.Tensor] | None = None

    def from_tensor(self, tensor: Any, **options: Any) -> Any:
        kinds = {"nested": tensor.is_nested, "quantized": tensor.is_quantized, "mkldnn": tensor.is_mkldnn}
        for kind in (kind for kind, found in kinds.items() if found):
            raise TraceError(f"a {kind} tensor is used, which cannot be captured. {_ORDINARY}")
        return super().from_tensor(tensor, **options)

    def tensor(self, known: Metadata) -> torch.Tensor:
        """Create a fake tensor with its own memory."""
        with internals.DisableTorchDispatch():
            bare = internals.make_wrapper_subclass(
                _Bare,
                known.shape,
                strides=known.stride,
                storage_offset=known.offset,
                dtype=known.dtype,
                device=torch.device("meta"),
                storage_size=known.bytes,
            )
            made: torch.Tensor = FakeTensor(self, bare, known.device)
        return made

    def view(self, tensor: torch.Tensor, known: Metadata) -> torch.Tensor:
        """Create a view of `tensor`, which is a view for autograd as well."""
        self._viewing = True
        try:
            return tensor.as_strided(known.shape, known.stride, known.offset)
        finally:
            self._viewing = False

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._viewing and func is internals.as_strided:
            with in_kernel_invocation_manager(self):
                return FakeTensor(self, torch.as_strided(*args), args[0].fake_device)
        if func is internals.convolution and _are_contiguous(args[:2]):
            # torch would choose a kernel by batch and image size; here every kernel gives contiguous outputs.
            with in_kernel_invocation_manager(self):
                return FakeTensor(self, func(*args), args[0].fake_device)
        if func in _GIVE_SIZES_OF_INPUT and _are_contiguous(args[:1]):
            # torch would decompose these into a dozen operators, and compare all sizes for each of them.
            with in_kernel_invocation_manager(self):
                made = torch.empty_like(args[0], memory_format=torch.contiguous_format)
                output = FakeTensor(self, made, args[0].fake_device)
                if func is internals.relu:
                    return output
                rest = [FakeTensor(self, made.new_empty(0), args[0].fake_device) for _ in range(2)]
                return output, *rest
        if func is internals.ctc_loss:
            # torch sizes the buffer for the backward by the longest target; the forward never sees this buffer.
            loss = args[0].new_empty(args[0].shape[1])
            return loss, args[0].new_empty(args[0].shape[1], args[0].shape[0], 2 * args[1].shape[-1] + 1)
        if torch.Tag.nondeterministic_seeded in func.tags and _dropout(func, args, kwargs or {}) != 0.0:
            self.drawn += 1
        make = functools.partial(super().dispatch, func, types, args, kwargs)
        return self.make_alias(args[0], make) if func is internals.alias and self.make_alias else make()


def _dropout(func: Any, args: Any, kwargs: Any) -> float | None:
    """The dropout probability of an attention operator, which draws nothing if this is 0; None for other operators."""
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.name == "dropout_p":
            given = (
                args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            )
            return float(given)
    return None


def _are_contiguous(tensors: Sequence[Any]) -> bool:
    """Tell whether all tensors are fakes without known values, and contiguous at every size."""
    return all(
        isinstance(tensor, FakeTensor) and tensor.constant is None and is_contiguous_or_false(tensor)
        for tensor in tensors
    )


class _Bare(torch.Tensor):
    """The tensor inside a FakeTensor; only the size of its memory is known."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(func)
