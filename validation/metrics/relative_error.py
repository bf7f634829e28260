"""The error of a whole tensor, measured by its length."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def relative_error(reference: Mapping[str, Tensor], candidate: Mapping[str, Tensor]) -> float:
    """The largest, over the tensors, of the norm of the difference divided by the norm of the reference.

    Example:
        >>> import torch
        >>> relative_error({"a": torch.tensor([0.0, 4.0])}, {"a": torch.tensor([3.0, 4.0])})
        0.75
    """

    def one(left: Tensor, right: Tensor) -> float:
        difference, length = float((left - right).norm()), float(left.norm())
        return difference / length if length else (0.0 if difference == 0 else float("inf"))

    return max(one(tensor, candidate[path]) for path, tensor in reference.items())
