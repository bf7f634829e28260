"""The bits of tensors: whether two have the same, and how many numbers lie between theirs."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor


def same_bits(left: Tensor, right: Tensor) -> bool:
    """True where two tensors have the same shape, dtype and values, bit for bit."""
    if left.shape != right.shape or left.dtype != right.dtype or left.is_meta != right.is_meta:
        return False
    if left.is_meta or not left.numel():
        return True
    return torch.equal(*(bits_of(plain(t)).cpu() for t in (left, right)))


def plain(tensor: Tensor) -> Tensor:
    """The numbers of a tensor that lies in memory otherwise than by strides, or that torch does not compute with."""
    if tensor.is_nested:
        return torch.cat([each.flatten() for each in tensor.unbind()])
    if tensor.layout != torch.strided:
        return tensor.to_dense()
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor


def checksum(tensor: Tensor) -> int:
    """The CRC-32 of the bits of a tensor."""
    if tensor.is_meta or not tensor.numel():
        return 0
    raw = plain(tensor.detach()).resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return zlib.crc32(raw.view(torch.uint8).numpy().data)


def bits_of(tensor: Tensor) -> Tensor:
    """The bits of a tensor as integers, of the same shape; those of complex128 in a dimension more."""
    raw = tensor.detach().resolve_conj().resolve_neg()
    return (torch.view_as_real(raw) if raw.dtype == torch.complex128 else raw).view(_BITS[raw.element_size()])


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


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
    bits = values.detach().cpu().contiguous().view(_BITS[values.element_size()]).long()
    lowest = -(2 ** (8 * values.element_size() - 1))
    return torch.where(bits < 0, lowest - bits, bits)
