"""The cosine of two outputs: 1 where they point the same way."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def cosine(reference: Mapping[str, Tensor], candidate: Mapping[str, Tensor]) -> float:
    """The smallest cosine, over the tensors, of the angle between reference and candidate as long vectors.

    Two zero vectors have the cosine 1, a zero vector and another 0.

    Example:
        >>> import torch
        >>> cosine({"a": torch.tensor([3.0, 4.0])}, {"a": torch.tensor([4.0, 3.0])})
        0.96
    """

    def one(left: Tensor, right: Tensor) -> float:
        norms = float(left.norm() * right.norm())
        if norms == 0:
            return float(bool(left.eq(right).all()))
        return float(left.flatten() @ right.flatten()) / norms

    return min(one(tensor, candidate[path]) for path, tensor in reference.items())
