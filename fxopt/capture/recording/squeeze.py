"""`squeeze` and `unbind` where sizes are free.

To torch, as it is told to leave sizes of 0 and 1 free, a size that it cannot tell to be 1 is not 1, without a guard:
`squeeze` then keeps dimensions that a run would remove, and so does `unbind` of a product of sizes, which squeezes its
parts. Here each such size becomes a guard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fxopt.capture.fakes.dynamic_shapes import is_backed


def squeeze_with_guard(
    call: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
    is_known: Callable[[Any], bool],
    input: torch.Tensor,
    *dims: Any,
    dim: Any = None,
) -> torch.Tensor | None:
    """Squeeze by other calls; None where torch gives the same, now that there is a guard.

    `is_known` says whether it can be told of a size if it is 1.
    """
    named = _named(input, dims, dim)
    ones = [d for d in named if is_known(input.shape[d]) and input.shape[d] == 1]
    if not ones:
        return None
    for one in reversed(ones):
        input = call(torch.Tensor.select, (input, one, 0), {})
    rest = tuple(d - sum(one < d for one in ones) for d in named if d not in ones)
    return call(torch.Tensor.squeeze, (input, rest), {}) if rest else input


def assumed_kept(input: torch.Tensor, *dims: Any, dim: Any = None) -> Iterator[Any]:
    """List what torch takes for granted of unbacked sizes where it squeezes them."""
    for d in _named(input, dims, dim):
        size = input.shape[d]
        if isinstance(size, torch.SymInt) and free_unbacked_symbols(size):
            yield sympy.Ne(size.node.expr, 1)


def unbind_with_guard(input: torch.Tensor, dim: int = 0) -> tuple[torch.Tensor, ...] | None:
    """Unbind along a dimension whose size is free; None along any other one."""
    size = input.shape[dim]
    return tuple(input.select(dim, index) for index in range(int(size))) if is_backed(size) else None


def _named(input: torch.Tensor, dims: tuple[Any, ...], dim: Any) -> list[int]:
    """The dimensions that a call of `squeeze` is about."""
    given = dim if dim is not None else dims[0] if len(dims) == 1 else dims or range(input.dim())
    listed = given if isinstance(given, (tuple, list, range)) else (given,)
    return sorted({d % input.dim() for d in listed}) if input.dim() else []
