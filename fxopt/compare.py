"""Compares outputs: their structure, and how far their numbers are apart.

`pairs` holds two outputs side by side, and raises `Unlike` where they differ in more than numbers. Three measures say how
large a difference is: relative to the largest value of the tensor (`compare`) or of the row (`row_error`), or as a vector
(`norm_error`). All of them count in float64, NaN is NaN, and a difference that is no number is infinite.
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
    """Two values differ in structure, shape, dtype, layout, device, or in what is no tensor.

    Attributes:
        expected: what was expected at the place, in words.
        actual: what is there.
    """

    def __init__(self, place: str, expected: str, actual: str, text: str = "") -> None:
        super().__init__(text or f"{place}: expected {expected}, got {actual}")
        self.expected, self.actual = expected, actual


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
    """The tensors of two outputs, side by side, with their paths; without `floats`, numbers of type float may differ.

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
    """How two outputs differ in more than the floating numbers of tensors, and in numbers of type float where `floats` says so."""
    try:
        both = pairs(expected, actual, strides=strides, floats=floats)
    except Unlike as error:
        return str(error)
    counted = (each for each in both if not rounds(each[1]))
    return next((f"{place}: other numbers" for place, *two in counted if not same_bits(*two)), "")


def unchanged(left: object, right: object) -> bool:
    """True where two values have the same structure, and the same bits in every tensor."""
    try:
        return all(same_bits(one, other) for _, one, other in pairs(left, right))
    except Unlike:
        return False


def same(left: object, right: object) -> bool:
    """Tell whether two values without tensors agree; of objects whose equality means nothing, only the type."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    by_identity = type(left).__eq__ is object.__eq__
    if by_identity or isinstance(left, types.MethodType):  # which goes by that of its object
        return not isinstance(left, _NEVER_COPIED)
    try:
        return bool(left == right or (left != left and right != right))
    except Exception:  # whatever an `__eq__` raises, or an array of truths
        one, other = (re.sub("0x[0-9a-f]+", "", repr(each)) for each in (left, right))
        return one == other


_NEVER_COPIED = (types.FunctionType, type, enum.Enum, torch.dtype, torch.layout, torch.memory_format)
"""Objects that are themselves alone, also in a deep copy."""


def first_difference(before: Any, after: Any) -> str:
    """The first of two sequences of lines or entries that differs, in words."""
    if isinstance(before, str):
        before, after = before.splitlines(), after.splitlines()
    for old, new in zip(before, after, strict=False):
        if old != new:
            return f"{old!r} became {new!r}"
    longer, word = (before, "is gone") if len(before) > len(after) else (after, "is new")
    return f"{longer[min(len(before), len(after))]!r} {word}"


def tensor_error(expected: Tensor, actual: Tensor, nan_anywhere: bool = False) -> tuple[float, float]:
    """The largest difference of two tensors, and that by the largest number of the expected one."""
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
    """The largest difference, relative to the largest value of its row, which counts as `least` at least.

    A row is the last dimension. In an image with fewer than 8 columns, and where a row has one number, it is several dimensions.

    Args:
        expected: the values that are right.
        actual: values of the same structure.
        least: what the largest value of a row is at least.
        own: further values of the same structure; a place where these overflow does not count.
    """
    errors = [0.0]
    sides = [tensors(expected), tensors(actual), tensors(actual if own is None else own)]
    for left, right, third in zip(*sides, strict=True):
        if not left.numel() or same_bits(left, right):
            continue
        values, gap = _gap(left, right)
        if own is not None:
            gap = gap.where(_numbers(third).isfinite(), 0.0)
        size = values.abs().nan_to_num(0, 0)
        fewest = _ROW if size.ndim < 4 else _ROW_OF_IMAGE
        dims = next((n for n in range(1, size.ndim) if size.shape[-n:].numel() >= fewest), size.ndim)
        rows = size.amax([*range(-dims, 0)], keepdim=True) if size.ndim else size
        errors.append(float((gap / torch.where(rows > 0, rows, size.max()).clamp(min=least)).max()))
    return max(errors)


def norm_error(expected: object, actual: object, integers: bool = False) -> float:
    """The largest distance of two tensors of two outputs, as vectors, by the norm of the expected one; infinite for other shapes.

    Integers and booleans count where that is asked for.
    """
    return max(norm_errors(expected, actual, integers), default=0.0)


def norm_errors(expected: object, actual: object, integers: bool = False) -> list[float]:
    """The distance of each two tensors at one place, as `norm_error` measures it."""
    return [_norm_error(*both) for both in _vectors(expected, actual, integers)]


def cosine_similarity(expected: object, actual: object) -> float:
    """The least cosine between two floating tensors of two outputs, as long vectors."""
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
    """The largest distance of two numbers of like outputs, in units in the last place; 0 only if the same bits.

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
    """Tell whether a tensor holds floating or complex numbers."""
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
    """The first property in which two tensors differ, of each in words; two equal texts where there is none."""
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
    """The numbers of a tensor in float64, integers and booleans as well: exact up to 2**53, and one rule for all."""
    numbers = plain(tensor.detach())
    return (torch.view_as_real(numbers.resolve_conj()) if numbers.is_complex() else numbers).double().cpu()


def _gap(expected: Tensor, actual: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers that are right, and how far others are from them."""
    left, right = _numbers(expected), _numbers(actual)
    equal = (left == right) | (left.isnan() & right.isnan())
    return left, torch.where(equal, 0.0, (left - right).abs()).nan_to_num(math.inf, math.inf)


FILL = 1e6
"""A number of this size, and as many times larger than all others, stands in places that a mask hides."""


def _parts(values: Tensor, others: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Numbers with those at the same places; what fills masked places, beside which no error would be seen, apart."""
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
    """The tensors of two outputs at the same places, those that round or all, and numbers of type float, as of `item()`."""
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
    # Of numbers on the two sides of zero the whole way: one after the other, because int64 could not hold the sum.
    across = left.abs().double() + right.abs().double()
    apart = torch.where((left < 0) == (right < 0), (left - right).abs().double(), across)
    # Zeros of unlike sign are not the same bits.
    return max(1.0, float(apart.max())) if apart.numel() else 1.0


def _steps_from_zero(values: Tensor) -> Tensor:
    bits = values.detach().cpu().contiguous().view(BITS[values.element_size()]).long()
    lowest = -(2 ** (8 * values.element_size() - 1))
    return torch.where(bits < 0, lowest - bits, bits)
