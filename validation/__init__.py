"""The harness: proves and measures fxopt over a zoo of models."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

_OPERATORS = ("nms", "qnms")
_defined: list[Any] = []


def _define_missing_operators() -> None:
    """Declare the operators that torchvision registers fakes for, unless its compiled part defines them.

    The package index has torchvision for CUDA. Its compiled part does not load with torch for the CPU. Without the
    operators of this part, neither the models of torchvision nor transformers, which imports torchvision, can be imported.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or _defined:
        return
    import torch

    compiled = next(Path(spec.origin).parent.glob("_C*.so"), None)
    try:
        torch.ops.load_library(compiled)
    except (OSError, TypeError):  # built for another torch, or missing
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in _OPERATORS:
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _defined.append(library)  # the operators exist as long as the library


_define_missing_operators()
