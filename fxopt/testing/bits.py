"""The bits of tensors: their checksum, and how many numbers lie between those of two."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from fxopt.outputs import BITS, plain, same_bits


def checksum(tensor: Tensor) -> int:
    """The CRC-32 of the bits of a tensor."""
    if tensor.is_meta or not tensor.numel():
        return 0
    raw = plain(tensor.detach()).resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return zlib.crc32(raw.view(torch.uint8).numpy().data)


def ulps_between(expected: Tensor, actual: Tensor) -> float:
    """The largest distance of two numbers of tensors, in units in the last place; 0 only if the same bits."""
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return float("inf")
    if same_bits(expected, actual):
        return 0.0
    expected, actual = plain(expected), plain(actual)
    if expected.is_complex():
        expected, actual = (torch.view_as_real(t.resolve_conj()) for t in (expected, actual))
    if not expected.is_floating_point() or (expected.isnan() != actual.isnan()).any():
        return float("inf")
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
