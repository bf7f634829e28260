"""The metrics of accuracy, one a file: the file `cosine.py` holds the function `cosine`, and is found by itself.

A metric takes the floating tensors of two outputs by path, both in float64 and of the same shapes, and gives
a number: `metric(reference, candidate)`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping

from torch import Tensor

Metric = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], float]


def available() -> dict[str, Metric]:
    """Every metric of this package, by name.

    Example:
        >>> import torch
        >>> available()["max_abs_error"]({"logits": torch.ones(2)}, {"logits": torch.tensor([1.0, 1.5])})
        0.5
    """
    return {
        info.name: getattr(importlib.import_module(f"{__name__}.{info.name}"), info.name)
        for info in pkgutil.iter_modules(__path__)
    }
