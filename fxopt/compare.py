"""Compares outputs: their structure, and how far their numbers are apart.

`pairs` pairs the tensors of two outputs, and raises `Unlike` if the outputs differ in more than numbers. Three functions
measure a difference: relative to the largest value of the tensor (`compare`) or of the row (`row_error`), or by the norm of
the tensor (`norm_error`). All three compute in float64. Two NaNs are equal, and a difference that is NaN counts as infinite.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import operator
import re
import types
import zlib
from typing import Any

import torch
from torch import Tensor

from fxopt.outputs import BITS, entries, leaves, plain, same_bits, strides_of, tensors, walked


class Unlike(AssertionError):
    """Two values differ in structure, shape, dtype, layout, device, or in a value that is not a tensor.

    Attributes:
        expected: description of the expected value.
        actual: description of the actual value.
    """

    def __init__(self, place: str, expected: str, actual: str, text: str = "") -> None:
        super().__init__(text or f"{place}: expected {expected}, got {actual}")
        self.expected, self.actual = expected, actual


@dataclasses.dataclass(frozen=True)
class Difference:
    """The result of `compare`.

    Attributes:
        tensors: how many tensors were compared.
        values: how many numbers these tensors contain.
        max_abs: the largest absolute difference.
        max_rel: the largest difference of a tensor, relative to the largest value of that tensor. Fill values at masked
            places, such as -1e30, are compared separately.
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
        dtypes: whether tensors must have the same dtype, and whether `torch.dtype` values in the outputs must be equal.
        strides: whether tensors must have the same strides.
        path: what the outputs are called in `where` and in messages.
        nan_anywhere: whether places that are NaN or infinite in one tensor are ignored, if both tensors have such values.

    Returns:
        The largest differences. Values that are NaN or infinite in both, at the same place, are equal.

    Raises:
        AssertionError: the type of a container, a key, shape, dtype, device or a non-tensor value differs, or the outputs
            contain no tensor with values.

    Example:
        >>> import torch
        >>> compare({"a": torch.ones(2)}, {"a": torch.tensor([1.0, 1.5])}).max_abs
        0.5
    """
    both = pairs(expected, actual, path, dtypes=dtypes, strides=strides)
    values = sum(left.numel() for _, left, _ in both)
    if not values:
        raise AssertionError(f"the {path or 'output'}s hold no tensor with values, so nothing was compared")
    errors = [(place, *tensor_error(left, right, nan_anywhere)) for place, left, right in both]
    where, _, max_rel = max(errors, key=operator.itemgetter(2))
    return Difference(len(both), values, max(absolute for _, absolute, _ in errors), max_rel, where)


def pairs(
    expected: object,
    actual: object,
    path: str = "output",
    *,
    dtypes: bool = True,
    strides: bool = False,
    floats: bool = True,
) -> list[tuple[str, Tensor, Tensor]]:
    """Pair the tensors of two outputs, with their paths; without `floats`, numbers of type float may differ.

    Raises:
        Unlike: the outputs differ in more than the numbers of these tensors.
    """
    sides = [list(walked(value, path)) for value in (expected, actual)]
    for (place, left), (_, right) in zip(*sides, strict=False):
        if type(left) is not type(right) and not (entries(left) is None and entries(right) is None):
            raise Unlike(place, _a(left), _a(right))
    left_paths, right_paths = ([place for place, _ in side] for side in sides)
    if left_paths != right_paths:
        what = first_difference(left_paths, right_paths)
        raise Unlike(
            path, _a(expected), f"another structure: {what}", f"the outputs differ in structure: {what}"
        )
    found = list[tuple[str, Tensor, Tensor]]()
    for (place, left), (_, right) in zip(*sides, strict=True):
        rounded = not floats and isinstance(left, float) and isinstance(right, float)
        if isinstance(left, Tensor) and isinstance(right, Tensor):
            found.append((place, left, right))
            one, other = _forms(left, right, dtypes, strides)
        elif entries(left) is not None or rounded or same(left, right):
            continue
        else:
            one, other = text_of(left), text_of(right)
            if not dtypes and isinstance(left, torch.dtype) and isinstance(right, torch.dtype):
                continue
        if one != other:
            raise Unlike(place, one, other)
    return found


def unlike(expected: object, actual: object, *, strides: bool = False, floats: bool = False) -> str:
    """Describe how two outputs differ apart from their floating tensors; empty if they agree.

    Numbers of type float are compared only with `floats`.
    """
    try:
        both = pairs(expected, actual, strides=strides, floats=floats)
    except Unlike as error:
        return str(error)
    counted = (each for each in both if not rounds(each[1]))
    return next((f"{place}: other numbers" for place, *two in counted if not same_bits(*two)), "")


def unchanged(left: object, right: object) -> bool:
    """Return True if two values have the same structure, and the same bits in every tensor."""
    try:
        return all(same_bits(one, other) for _, one, other in pairs(left, right))
    except Unlike:
        return False


def same(left: object, right: object) -> bool:
    """Tell whether two values without tensors agree; objects that compare by identity agree if their types do."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    by_identity = type(left).__eq__ is object.__eq__
    if by_identity or isinstance(left, types.MethodType):  # methods compare by the identity of their object
        return not isinstance(left, _NEVER_COPIED)
    try:
        return bool(left == right or (left != left and right != right))
    except Exception:  # an `__eq__` that raises, or that returns an array
        one, other = (re.sub("0x[0-9a-f]+", "", repr(each)) for each in (left, right))
        return one == other


_NEVER_COPIED = (types.FunctionType, type, enum.Enum, torch.dtype, torch.layout, torch.memory_format)
"""Types whose objects are equal only to themselves: a deep copy returns the same object."""


def first_difference(before: Any, after: Any) -> str:
    """Describe the first line or entry in which two sequences differ."""
    if isinstance(before, str):
        before, after = before.splitlines(), after.splitlines()
    for old, new in zip(before, after, strict=False):
        if old != new:
            return f"{old!r} became {new!r}"
    longer, word = (before, "is gone") if len(before) > len(after) else (after, "is new")
    return f"{longer[min(len(before), len(after))]!r} {word}"


def tensor_error(expected: Tensor, actual: Tensor, nan_anywhere: bool = False) -> tuple[float, float]:
    """Return the largest difference of two tensors, absolute and relative to the largest value of `expected`."""
    if not expected.numel() or expected.is_meta:
        return 0.0, 0.0
    values, gap = _gap(expected, actual)
    if nan_anywhere:
        other = _numbers(actual)
        if all(kind(values).any() == kind(other).any() for kind in (torch.isnan, torch.isinf)):
            gap = gap.where(values.isfinite() & other.isfinite(), 0.0)
    absolute = float(gap.max())
    largest = [(float(each.max()), float(_finite(part).abs().max())) for part, each in _parts(values, gap)]
    return absolute, max(far / size if size else (math.inf if far else 0.0) for far, size in largest)


_ROW, _ROW_OF_IMAGE = 2, 8  # fewer numbers may all be small by chance


def row_error(expected: object, actual: object, least: float, own: object = None) -> float:
    """Return the largest difference relative to the largest value of its row, with `least` as the smallest divisor.

    A row is the last dimension. If that has only one entry, or fewer than 8 entries in a tensor of 4 or more dimensions, a
    row spans several dimensions.

    Args:
        expected: the values that are right.
        actual: values of the same structure.
        least: lower bound of the divisor.
        own: further values of the same structure; places where these overflow, and the expected values do not, are ignored.
    """
    errors = [0.0]
    sides = [tensors(expected), tensors(actual), tensors(actual if own is None else own)]
    for left, right, third in zip(*sides, strict=True):
        if not left.numel() or same_bits(left, right):
            continue
        values, gap = _gap(left, right)
        if own is not None:
            gap = gap.where(_numbers(third).isfinite() | ~values.isfinite(), 0.0)
        size = values.abs().nan_to_num(0, 0)
        fewest = _ROW if size.ndim < 4 else _ROW_OF_IMAGE
        dims = next((n for n in range(1, size.ndim) if size.shape[-n:].numel() >= fewest), size.ndim)
        rows = size.amax([*range(-dims, 0)], keepdim=True) if size.ndim else size
        errors.append(float((gap / torch.where(rows > 0, rows, size.max()).clamp(min=least)).max()))
    return max(errors)


def norm_error(expected: object, actual: object, integers: bool = False) -> float:
    """Return the largest norm of a difference of two tensors, relative to the norm of the expected one.

    The result is infinite if shapes differ. Integer and boolean tensors are compared only with `integers`.
    """
    return max(norm_errors(expected, actual, integers), default=0.0)


def norm_errors(expected: object, actual: object, integers: bool = False) -> list[float]:
    """Return the error of each pair of tensors, as `norm_error` measures it."""
    return [_norm_error(*both) for both in _vectors(expected, actual, integers)]


def cosine_similarity(expected: object, actual: object) -> float:
    """Return the smallest cosine similarity of two floating tensors of two outputs, flattened to vectors."""
    sides = []
    for left, right in (map(_numbers, both) for both in _vectors(expected, actual)):
        if (left.isnan() & ~right.isnan()).any():
            return 0.0
        finite = left.isfinite()
        sides += _parts(left[finite], right[finite]) if finite.any() else []
    vectors = ((left.flatten(), right.flatten()) for left, right in sides if left.norm() > 0)
    cosine = functools.partial(torch.nn.functional.cosine_similarity, dim=0)
    return min((float(cosine(*both)) for both in vectors), default=1.0)


def ulps(expected: object, actual: object) -> float:
    """Return the largest distance of two numbers in units in the last place; 0 only if all bits are equal.

    Example:
        >>> import torch
        >>> ulps(torch.tensor([1.0]), torch.tensor([1 + 2**-22]))
        2.0
    """
    return max((_ulps(*both) for both in zip(tensors(expected), tensors(actual), strict=True)), default=0.0)


def epsilon(value: object) -> float:
    """The unit of rounding of the narrowest dtype among the tensors of a value."""
    return max((torch.finfo(each.dtype).eps for each in tensors(value) if rounds(each)), default=0.0)


def rounds(tensor: Tensor) -> bool:
    """Tell whether a tensor contains floating or complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


def checksum(tensor: Tensor) -> int:
    """The CRC-32 of the bits of a tensor."""
    if tensor.is_meta or not tensor.numel():
        return 0
    raw = plain(tensor.detach()).resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return zlib.crc32(raw.view(torch.uint8).numpy().data)


def text_of(value: object) -> str:
    """A value in a message: of a tensor, its dtype and shape."""
    return f"{value.dtype} {[*value.shape]}" if isinstance(value, Tensor) else repr(value)


def _a(value: object) -> str:
    return (
        repr(value) if value is None or isinstance(value, int | float | str) else f"a {type(value).__name__}"
    )


def _forms(left: Tensor, right: Tensor, dtypes: bool, strides: bool) -> tuple[str, str]:
    """Describe, for both tensors, the first property in which they differ; two equal texts if they agree."""
    if left.shape != right.shape or (dtypes and left.dtype != right.dtype):
        return text_of(left), text_of(right)
    if left.layout != right.layout or left.is_nested != right.is_nested:
        return _layout(left), _layout(right)
    if left.device != right.device:
        return f"it on {left.device}", f"it on {right.device}"
    if strides and strides_of(left) != strides_of(right):
        return f"the strides {left.stride()}", f"{right.stride()}; `view` takes one of them alone"
    return "", ""


def _layout(tensor: Tensor) -> str:
    return "a nested tensor" if tensor.is_nested else f"the layout {tensor.layout}"


def _numbers(tensor: Tensor) -> Tensor:
    """The numbers of a tensor in float64, of integers and booleans, too, which are exact up to 2**53."""
    numbers = plain(tensor.detach())
    return (torch.view_as_real(numbers.resolve_conj()) if numbers.is_complex() else numbers).double().cpu()


def _gap(expected: Tensor, actual: Tensor) -> tuple[Tensor, Tensor]:
    """The expected numbers, and the absolute differences of the actual ones."""
    left, right = _numbers(expected), _numbers(actual)
    equal = (left == right) | (left.isnan() & right.isnan())
    return left, torch.where(equal, 0.0, (left - right).abs()).nan_to_num(math.inf, math.inf)


FILL = 1e6
"""A number that is at least this large, and this many times larger than all others, counts as the fill value of a mask."""


def _parts(values: Tensor, others: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Split values and the others at the same places into fill values of a mask and the rest.

    Relative to a fill value, no error of the rest would be visible.
    """
    sizes = _finite(values).abs()
    if sizes.max() < FILL:
        return [(values, others)]
    ordered = sizes[sizes > 0].unique()
    gaps = ordered[1:] / ordered[:-1]
    if not gaps.numel() or gaps.max() <= FILL or ordered[gaps.argmax() + 1] < FILL:
        return [(values, others)]
    filling = sizes >= ordered[gaps.argmax() + 1]
    return [(values[mask], others[mask]) for mask in (filling, ~filling)]


def _finite(values: Tensor) -> Tensor:
    return values.where(values.isfinite(), 0.0)


def _vectors(expected: object, actual: object, integers: bool = False) -> list[tuple[Tensor, Tensor]]:
    """Pair the tensors of two outputs, only floating ones without `integers`; a float, as of `item()`, counts as a tensor."""
    both = zip(leaves(expected), leaves(actual), strict=False)
    sides = (
        [torch.tensor(each, dtype=torch.float64) if isinstance(each, float) else each for _, each in pair]
        for pair in both
    )
    return [
        (left, right)
        for left, right in sides
        if isinstance(left, Tensor)
        and isinstance(right, Tensor)
        and (integers or rounds(left))
        and left.numel()
    ]


def _norm_error(expected: Tensor, actual: Tensor) -> float:
    if expected.shape != actual.shape:
        return math.inf
    parts = _parts(*_gap(expected, actual))
    return max(float(gap.norm()) / (float(_finite(values).norm()) or 1.0) for values, gap in parts)


def _ulps(expected: Tensor, actual: Tensor) -> float:
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return math.inf
    if same_bits(expected, actual):
        return 0.0
    expected, actual = plain(expected), plain(actual)
    if expected.is_complex():
        expected, actual = (torch.view_as_real(t.resolve_conj()) for t in (expected, actual))
    if not expected.is_floating_point() or (expected.isnan() != actual.isnan()).any():
        return math.inf
    left, right = (_steps_from_zero(t[~t.isnan()]) for t in (expected, actual))
    # For numbers of unlike sign, the distance is the sum, which int64 could not hold.
    across = left.abs().double() + right.abs().double()
    apart = torch.where((left < 0) == (right < 0), (left - right).abs().double(), across)
    # Zeros of unlike sign have distance 0, but not the same bits.
    return max(1.0, float(apart.max())) if apart.numel() else 1.0


def _steps_from_zero(values: Tensor) -> Tensor:
    bits = values.detach().cpu().contiguous().view(BITS[values.element_size()]).long()
    lowest = -(2 ** (8 * values.element_size() - 1))
    return torch.where(bits < 0, lowest - bits, bits)
