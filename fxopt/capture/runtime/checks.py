"""Runtime checks, which are targets of nodes: of numbers that the graph computes, and of decisions on values."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.node import has_side_effect

from fxopt.capture.runtime.input_specs import same_value
from fxopt.errors import GuardError

# Indices of these dtypes are masks: they select where they are true.
MASKS = (torch.bool, torch.uint8)


@has_side_effect
def check_value(condition: bool, message: str) -> None:
    """Raise GuardError unless a condition on numbers that the graph computes is true."""
    if not condition:
        raise GuardError(f"a runtime check failed: {message}")


@has_side_effect
def check_outcome(value: Any, decided: Any, where: str, otherwise: str) -> None:
    """Raise GuardError unless `value` agrees with what was `decided` at capture: a bool, a number, or a whole tensor.

    `otherwise` is the error that the model itself raises for other values, or "".
    """
    if isinstance(value, torch.Tensor) and value.is_meta:
        return  # nothing is computed
    if isinstance(decided, torch.Tensor):
        if value.shape != decided.shape or not torch.allclose(value, decided, 0, 0, equal_nan=True):
            raise GuardError(
                f"the forward reads all values of a tensor, and they are not those of the capture. {where}"
            )
        return
    now = type(decided)(value)
    if not same_value(now, decided):
        raise GuardError(
            f"the model raises {otherwise}. {where}"
            if otherwise
            else f"the forward decides on a value: it was {decided} when the graph was captured, and is {now} now. {where} "
            "Capture again with inputs such as these."
        )


@has_side_effect
def check_same_outcome(value: Any, earlier: bool | None, where: str) -> bool | None:
    """Return `value` as a bool; raise GuardError if the branch before it at this line had another outcome."""
    if isinstance(value, torch.Tensor) and value.is_meta:
        return None  # nothing is computed
    if earlier is not None and bool(value) != earlier:
        raise GuardError(
            f"the forward decides on values at one line, and the decisions differ. {where} The graph is valid only "
            "for inputs with which all these decisions are the same. Capture with specialize=True and inputs such as "
            "these; or call the eager model."
        )
    return bool(value)


@has_side_effect
def check_no_write(value: Any, answer: bool, index: Any, where: str) -> None:
    """Raise GuardError if the model would skip a write, because `value` is not `answer`, and the write is not empty.

    `index` selects the elements of the write: none, if a tensor in it is empty or is a mask without a true entry.
    """
    if value is None:
        return  # nothing is computed
    parts = [
        part
        for part in (index if isinstance(index, (tuple, list)) else (index,))
        if isinstance(part, torch.Tensor)
    ]
    if any(part.numel() == 0 for part in parts) or bool(value) == answer:
        return
    if not any(part.dtype in MASKS and not part.any() for part in parts):
        raise GuardError(
            f"the forward decides on a value and skips a write that the graph would make. {where} Capture "
            "with specialize=True and inputs such as these."
        )


# The targets of nodes that check, and compute nothing.
CHECKS = {check_value, check_outcome, check_same_outcome, check_no_write}
