"""The largest error of a value."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def max_abs_error(reference: Mapping[str, Tensor], candidate: Mapping[str, Tensor]) -> float:
    """The largest absolute difference of two values.

    Example:
        >>> import torch
        >>> max_abs_error({"a": torch.zeros(3)}, {"a": torch.tensor([0.0, -2.0, 1.0])})
        2.0
    """
    return max(float((tensor - candidate[path]).abs().max()) for path, tensor in reference.items())
