"""Calls that a graph cannot hold as they are, as equal calls that it can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# torch takes these types of Python for dtypes.
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}

# `call(function, args, kwargs)` makes a call and writes its node.
Caller = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def with_torch_values(value: Any, call: Caller) -> Any:
    """`value`, an argument of a call, with dtypes in the place of Python's types, and tensors in that of numpy's arrays."""
    if isinstance(value, type):
        return _DTYPES.get(value, value)
    if type(value).__module__ == "numpy" and type(value).__name__ == "ndarray":
        return call(torch.tensor, (value,), {})
    if type(value) in (tuple, list) and any(map(_is_replaced, value)):
        return type(value)(with_torch_values(item, call) for item in value)
    return value


def _is_replaced(value: Any) -> bool:
    kind = type(value)
    return kind.__name__ == "ndarray" or (isinstance(value, type) and value in _DTYPES)


def deep_copy(call: Caller, tensor: Any, memo: dict[int, Any]) -> Any:
    """`copy.deepcopy` of a tensor."""
    if id(tensor) not in memo:
        if tensor.requires_grad and not tensor.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol"
            )
        memo[id(tensor)] = _without_history(
            call, call(torch.Tensor.clone, (tensor,), {}), tensor.requires_grad
        )
    return memo[id(tensor)]


def reduced(call: Caller, tensor: Any, _protocol: int) -> Any:
    """How `copy.copy` makes another tensor in the same memory."""
    return _without_history, (call, tensor, tensor.requires_grad)


def _without_history(call: Caller, tensor: Any, requires_grad: bool) -> Any:
    made = call(torch.Tensor.detach, (tensor,), {})
    return call(torch.Tensor.requires_grad_, (made,), {}) if requires_grad else made


def one_hot(call: Caller, tensor: Any, num_classes: Any = -1) -> Any:
    """`one_hot` with as many classes as the largest index needs, where no number is given."""
    if type(num_classes) is not int or num_classes != -1:
        return NotImplemented
    largest = call(torch.Tensor.max, (tensor,), {})
    shape = (*tensor.shape, call(torch.Tensor.item, (largest,), {}) + 1)
    zeros = call(torch.zeros, (shape,), {"dtype": torch.int64, "device": tensor.device})
    return call(torch.Tensor.scatter, (zeros, -1, call(torch.Tensor.unsqueeze, (tensor, -1), {}), 1), {})


def new_tensor(call: Caller, tensor: Any, data: Any, **options: Any) -> Any:
    """`tensor.new_tensor` of a numpy array."""
    if type(data).__name__ != "ndarray":
        return NotImplemented
    return call(torch.tensor, (data,), {"dtype": tensor.dtype, "device": tensor.device} | options)
