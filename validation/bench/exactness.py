"""How far the outputs of an engine are from those of the model in float64."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .nested import cast, tensors
from .workloads import Workload


@dataclasses.dataclass(frozen=True)
class Exactness:
    """The worst output of each kind.

    Attributes:
        error: Largest difference to float64, relative to the largest value of the output.
        difference: Largest difference to eager float32.
        cosine: Similarity to float64.
    """

    error: float
    difference: float
    cosine: float


def in_float64(workload: Workload) -> list[Tensor]:
    """The outputs of a copy of the model in float64."""
    with torch.no_grad():
        return tensors(copy.deepcopy(workload.model).double()(**cast(workload.inputs, torch.float64)))


def exactness(outputs: Sequence[Tensor], eager: Sequence[Tensor], exact: Sequence[Tensor]) -> Exactness:
    """Compares outputs one by one.

    Raises `ValueError` when they are not of the same number and shapes.
    """
    shapes, expected = ([tuple(output.shape) for output in values] for values in (outputs, exact))
    if shapes != expected:
        raise ValueError(f"it gives outputs of shapes {shapes}, the model {expected}")
    error, difference, cosine = 0.0, 0.0, 1.0
    for mine, theirs, reference in zip(outputs, eager, exact, strict=True):
        if not reference.numel():
            continue
        value = mine.double()
        if not value.isfinite().all():
            return Exactness(math.inf, math.inf, math.nan)
        largest = float(reference.abs().max()) or 1.0
        error = max(error, float((value - reference).abs().max()) / largest)
        difference = max(difference, float((value - theirs.double()).abs().max()))
        both = torch.nn.functional.cosine_similarity(value.flatten(), reference.double().flatten(), dim=0)
        cosine = min(cosine, float(both))
    return Exactness(error, difference, cosine)
