"""How often two outputs predict the same."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def agreement(reference: Mapping[str, Tensor], candidate: Mapping[str, Tensor]) -> float:
    """The share of positions whose largest value along the last axis is at the same place.

    That is the predicted class or token. Of an output with tensors called logits only these count; a model
    without a head has none, and its features stand in for them.

    Example:
        >>> import torch
        >>> agreement({"logits": torch.eye(2)}, {"logits": torch.tensor([[2.0, 1.0], [2.0, 1.0]])})
        0.5
    """
    vectors = [path for path, tensor in reference.items() if tensor.ndim and tensor.shape[-1] > 1]
    chosen = [path for path in vectors if "logits" in path] or vectors
    if not chosen:
        raise AssertionError("the outputs hold no vectors, so there are no predictions to compare")
    same = [(reference[path].argmax(-1) == candidate[path].argmax(-1)).flatten() for path in chosen]
    return float(torch.cat(same).double().mean())
