"""Folds padding with zeros into the convolution after it."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from fxopt.errors import UndoError
from fxopt.packed_operators import padding_of, pads_zeros
from fxopt.rewriting.pattern import Pattern
from fxopt.submodules import with_parameters, with_values
from fxopt.torch_internals import parameters_of

_FEW = 4  # input channels of a group; up to this number, a larger kernel costs less than a copy of the image


@dataclasses.dataclass(frozen=True)
class FoldPadding(Pattern):
    """Folds zeros around an image into the padding of the `torch.nn.Conv2d` after them.

    Models with weights from TensorFlow, such as MobileNet, pad by a separate call, which copies the image. A convolution pads
    opposite sides alike. If the sides differ, the kernel is extended by rows or columns of zeros, unless it has many input
    channels. These zeros turn an infinity under them into NaN.

    Example:
        >>> import torch, fxopt
        >>> layers = torch.nn.Sequential(torch.nn.ZeroPad2d((0, 1, 0, 1)), torch.nn.Conv2d(3, 4, 3, stride=2))
        >>> FoldPadding()(fxopt.trace(layers, (torch.ones(1, 3, 8, 8),))).get_submodule("1")
        Conv2d(3, 4, kernel_size=(4, 4), stride=(2, 2), padding=(1, 1))
    """

    def pattern(self, x: Tensor, left: int, right: int, top: int, bottom: int, conv: nn.Conv2d) -> Any:
        """Pad with zeros, and convolve."""
        return conv(functional.pad(x, (left, right, top, bottom)))

    def replacement(self, x: Tensor, left: int, right: int, top: int, bottom: int, conv: Any) -> Any:
        """Convolve with more padding."""
        wide, high = max(left, right), max(top, bottom)
        padded = with_parameters(conv, parameters_of(conv))
        own = padding_of(conv) or [0, 0]
        padded.padding = (own[0] + high, own[1] + wide)
        if (left, top) != (right, bottom):
            grown = functional.pad(conv.weight, (wide - left, wide - right, high - top, high - bottom))
            padded.kernel_size = tuple(grown.shape[2:])
            padded.weight = with_values(conv.weight, grown)
        return padded(x)

    def inverse(self, new: Any, left: int, right: int, top: int, bottom: int) -> nn.Module:
        """Return the layer without the folded padding, with the current weights.

        Raises:
            UndoError: the zeros of a larger kernel were changed.
        """
        wide, high = max(left, right), max(top, bottom)
        inner = functional.pad(new.weight, (left - wide, right - wide, top - high, bottom - high))
        if inner.count_nonzero() != new.weight.count_nonzero():
            raise UndoError("the zeros that were added to its kernel have changed")
        old = with_parameters(new, parameters_of(new) | {"weight": with_values(new.weight, inner)})
        old.padding = (new.padding[0] - high, new.padding[1] - wide)
        old.kernel_size = tuple(inner.shape[2:])
        return old  # type: ignore[no-any-return]

    def refuses(self, x: Any, left: int, right: int, top: int, bottom: int, conv: Any) -> str | None:
        """Return why a convolution cannot pad this way, or would be slower."""
        if min(left, right, top, bottom) < 0:
            return "it crops"
        if not pads_zeros(conv):
            return "the convolution itself pads with other values, or opposite sides differently"
        if (left, top) == (right, bottom):
            return None
        if conv.dilation != (1, 1):
            return "opposite sides differ, and the kernel is dilated"
        if conv.in_channels // conv.groups > _FEW or conv.weight.device.type != "cpu":
            return "opposite sides differ, and a larger kernel would cost more than the padding"
        return None
