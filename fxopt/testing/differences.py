"""How far two outputs are apart, every tensor of them, whatever containers they are in."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from fxopt.outputs import pairs, plain, same_bits
from fxopt.testing.bits import ulps_between


@dataclasses.dataclass(frozen=True)
class Difference:
    """The result of `compare`.

    Attributes:
        tensors: how many tensors were compared.
        values: how many numbers they hold.
        max_abs: the largest absolute difference.
        max_rel: the largest difference of a tensor, relative to the largest value of that tensor, without what fills the
            places that a mask hides, such as -1e30.
        where: the path of the tensor with the largest relative difference, such as `output.logits`.
    """

    tensors: int
    values: int
    max_abs: float
    max_rel: float
    where: str


def compare(
    expected: object,
    actual: object,
    dtypes: bool = True,
    *,
    strides: bool = False,
    path: str = "output",
    nan_anywhere: bool = False,
) -> Difference:
    """Compare every tensor of two outputs: nested tuples, lists, mappings, model outputs, caches.

    Args:
        expected: the output that is right.
        actual: the output to judge.
        dtypes: whether tensors must have the same dtype, and dtypes that an output names be the same.
        strides: whether tensors must be laid out alike in memory.
        path: what the outputs are called in `where` and in messages.
        nan_anywhere: whether a tensor with NaN or infinities may have anything in their places, as long as it has such, too.

    Returns:
        The largest differences. Values that are NaN or infinite in both, at the same place, are equal.

    Raises:
        AssertionError: the type of a container, a key, shape, dtype, device or a non-tensor value differs, or there is
            nothing to compare.

    Example:
        >>> import torch
        >>> compare({"a": torch.ones(2)}, {"a": torch.tensor([1.0, 1.5])}).max_abs
        0.5
    """
    tensors = values = 0
    max_abs = max_rel = 0.0
    where = ""
    for place, left, right in pairs(expected, actual, path):
        if not isinstance(left, Tensor) or not isinstance(right, Tensor):
            if not dtypes and isinstance(left, torch.dtype) and isinstance(right, torch.dtype):
                continue
            if type(left) is not type(right) or (left != right and not _both_nan(left, right)):
                raise AssertionError(f"{place}: expected {left!r}, got {right!r}")
            continue
        if left.shape != right.shape or (dtypes and left.dtype != right.dtype):
            raise AssertionError(
                f"{place}: expected {left.dtype} {list(left.shape)}, got {right.dtype} {list(right.shape)}"
            )
        if left.layout != right.layout or left.is_nested != right.is_nested:
            raise AssertionError(f"{place}: expected {_layout(left)}, got {_layout(right)}")
        if left.device != right.device:
            raise AssertionError(f"{place}: expected it on {left.device}, got it on {right.device}")
        if strides and (text := _other_strides(place, left, right)):
            raise AssertionError(text)
        absolute, relative = _distance(left, right, nan_anywhere)
        tensors, values = tensors + 1, values + left.numel()
        if not where or not relative <= max_rel:  # also true for NaN, which must not be lost
            max_rel, where = relative, place
        max_abs = absolute if not absolute <= max_abs else max_abs
    if not tensors or not values:
        raise AssertionError(f"the {path}s hold no tensor with values, so nothing was compared")
    return Difference(tensors, values, max_abs, max_rel, where)


def ulps(expected: object, actual: object) -> float:
    """The largest distance of two numbers of like outputs, in units in the last place; 0 only if the same bits.

    Example:
        >>> import torch
        >>> ulps(torch.tensor([1.0]), torch.tensor([1 + 2**-22]))
        2.0
    """
    found = pairs(expected, actual)
    return max(
        (ulps_between(a, b) for _, a, b in found if isinstance(a, Tensor) and isinstance(b, Tensor)),
        default=0.0,
    )


def unchanged(left: object, right: object) -> bool:
    """True where two values have the same structure, and the same bits in every tensor."""
    try:
        found = pairs(left, right)
    except AssertionError:
        return False
    return all(
        same_bits(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b or _both_nan(a, b)
        for _, a, b in found
    )


def _layout(tensor: Tensor) -> str:
    return "a nested tensor" if tensor.is_nested else f"the layout {tensor.layout}"


def _both_nan(left: object, right: object) -> bool:
    return isinstance(left, float) and isinstance(right, float) and math.isnan(left) and math.isnan(right)


def other_strides(expected: object, actual: object) -> str:
    """Where two outputs differ in structure, or are laid out differently in memory; empty where they are not."""
    try:
        found = pairs(expected, actual)
    except AssertionError as error:
        return str(error)
    texts = (_other_strides(*each) for each in found if all(isinstance(value, Tensor) for value in each[1:]))
    return next(filter(None, texts), "")


def _other_strides(place: str, left: Tensor, right: Tensor) -> str:
    if _strides(left) == _strides(right):
        return ""
    return (
        f"{place}: expected the strides {left.stride()}, got {right.stride()}; `view` takes one of them alone"
    )


def _strides(tensor: Tensor) -> list[int]:
    """The strides that count: those of dimensions with more than one entry."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _distance(expected: Tensor, actual: Tensor, nan_anywhere: bool) -> tuple[float, float]:
    if not expected.numel() or expected.is_meta:
        return 0.0, 0.0
    if expected.is_complex():
        expected, actual = (torch.view_as_real(t.resolve_conj()) for t in (expected, actual))
    # Also integers and booleans in float64: exact up to 2**53, and one rule for all.
    wide, other = (plain(each.detach()).double().cpu() for each in (expected, actual))
    same = (wide == other) | (wide.isnan() & other.isnan())
    if nan_anywhere and all(kind(wide).any() == kind(other).any() for kind in (torch.isnan, torch.isinf)):
        same |= ~(wide.isfinite() & other.isfinite())
    distance = torch.where(same, 0.0, (wide - other).abs())
    if distance.isnan().any() or distance.isinf().any():
        return float("inf"), float("inf")
    largest = _largest(wide, same)
    absolute = float(distance.max())
    return absolute, absolute / largest if largest else (0.0 if absolute == 0 else float("inf"))


FILL = 1e6
"""A number of this size, and as many times larger than all others, stands in places that a mask hides."""


def _largest(values: Tensor, same: Tensor) -> float:
    """The largest finite value; not one that fills masked places alike in both, beside which no error would be seen."""
    sizes = values.abs()[values.isfinite()]
    largest = float(sizes.max()) if sizes.numel() else 0.0
    others = sizes[sizes != largest]
    if largest >= FILL and others.numel() and bool(same[values.abs() == largest].all()):
        rest = float(others.max())
        return rest if 0 < rest < largest / FILL else largest
    return largest
