"""The metrics of accuracy: of the floating tensors of two outputs by path, both in float64 and of the same shapes, a number."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Output = Mapping[str, Tensor]


def agreement(reference: Output, candidate: Output) -> float:
    """The share of positions whose largest value along the last axis is at the same place: the predicted class or token.

    Of an output with tensors called logits only these count; a model without a head has none, and its features stand in for them.

    Example:
        >>> agreement({"logits": torch.eye(2)}, {"logits": torch.tensor([[2.0, 1.0], [2.0, 1.0]])})
        0.5
    """
    vectors = [path for path, tensor in reference.items() if tensor.ndim and tensor.shape[-1] > 1]
    chosen = [path for path in vectors if "logits" in path] or vectors
    if not chosen:
        raise AssertionError("the outputs hold no vectors, so there are no predictions to compare")
    same = [(reference[path].argmax(-1) == candidate[path].argmax(-1)).flatten() for path in chosen]
    return float(torch.cat(same).double().mean())


def cosine(reference: Output, candidate: Output) -> float:
    """The smallest cosine, over the tensors, as long vectors; 1 of two zero vectors, 0 of a zero vector and another.

    Example:
        >>> cosine({"a": torch.tensor([3.0, 4.0])}, {"a": torch.tensor([4.0, 3.0])})
        0.96
    """

    def one(left: Tensor, right: Tensor) -> float:
        norms = float(left.norm() * right.norm())
        if norms == 0:
            return float(bool(left.eq(right).all()))
        return float(left.flatten() @ right.flatten()) / norms

    return min(one(tensor, candidate[path]) for path, tensor in reference.items())


def relative_error(reference: Output, candidate: Output) -> float:
    """The largest, over the tensors, of the norm of the difference divided by the norm of the reference.

    Example:
        >>> relative_error({"a": torch.tensor([0.0, 4.0])}, {"a": torch.tensor([3.0, 4.0])})
        0.75
    """

    def one(left: Tensor, right: Tensor) -> float:
        difference, length = float((left - right).norm()), float(left.norm())
        return difference / length if length else (0.0 if difference == 0 else float("inf"))

    return max(one(tensor, candidate[path]) for path, tensor in reference.items())


METRICS = {metric.__name__: metric for metric in (agreement, cosine, relative_error)}
