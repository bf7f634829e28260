"""How well the values of two pieces agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxopt.torch_internals import pytree


def unlike(expected: Any, actual: Any, dtypes: bool) -> str | None:
    """Say how two values cannot be compared by their numbers."""
    (left, spec), (right, other_spec) = pytree.tree_flatten(expected), pytree.tree_flatten(actual)
    if spec != other_spec:
        return f"{other_spec}, it was {spec}"
    for a, b in zip(left, right, strict=True):
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            if type(a) is not type(b) or (isinstance(a, _PLAIN) and a != b and not (a != a and b != b)):
                return f"{text_of(b)}, it was {text_of(a)}"
        elif a.shape != b.shape or (dtypes and a.dtype != b.dtype):
            return f"{text_of(b)}, it was {text_of(a)}"
    return None


def text_of(value: Any) -> str:
    """A value in a message: of a tensor, its dtype and shape."""
    return f"{value.dtype} {[*value.shape]}" if isinstance(value, Tensor) else repr(value)


_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device)
"""Types that are compared by value; other objects may be equal without knowing it."""


def error_of(expected: Any, actual: Any, least: float, own: Any = None) -> float:
    """The largest difference, relative to the largest value of its row, where `own` is finite."""
    errors = [0.0]
    for a, b, finite in zip(
        *(_tensors(side) for side in (expected, actual, actual if own is None else own)), strict=True
    ):
        if not a.numel() or torch.equal(a, b):
            continue
        same = (a == b) | (a.isnan() & b.isnan()) | (~finite.isfinite() if own is not None else False)
        difference = torch.where(same, 0.0, (a - b).abs()).nan_to_num(torch.inf, torch.inf)
        size = a.abs().nan_to_num(0, 0)
        rows = size.amax(-1, keepdim=True) if a.ndim else size
        errors.append(float((difference / torch.where(rows > 0, rows, size.max()).clamp(min=least)).max()))
    return max(errors)


def distance(expected: Any, actual: Any) -> float:
    """The largest distance of two tensors, relative to the norm of the expected one."""
    pairs = zip(_tensors(expected), _tensors(actual), strict=True)
    return max((float((a - b).norm() / a.norm()) for a, b in pairs if not torch.equal(a, b)), default=0.0)


def _tensors(values: Any) -> list[Tensor]:
    tensors = (value for value in pytree.tree_leaves(values) if isinstance(value, Tensor))
    return [(torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).double().cpu() for t in tensors]


def epsilon(values: Sequence[Any]) -> float:
    """The rounding of the narrowest of their dtypes."""
    dtypes = {leaf.dtype for leaf in pytree.tree_leaves(list(values)) if isinstance(leaf, Tensor)}
    return max((torch.finfo(d).eps for d in dtypes if d.is_floating_point or d.is_complex), default=0.0)
