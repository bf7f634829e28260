"""Rewrites calls that a graph cannot contain into equal calls that it can; among them `data`, `grad` and `requires_grad`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from fxopt.capture.capture_internals import istft as whole_istft
from fxopt.capture.fakes.dynamic_shapes import SymbolicNumber
from fxopt.capture.recording.indexing import MakesCall
from fxopt.capture.recording.recorder import Recorder
from fxopt.capture.recording.torch_call import Call
from fxopt.errors import TraceError

# torch accepts these types of Python as dtypes.
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}

_OPTIONS = ("dtype", "layout", "device", "pin_memory", "requires_grad")
# The output shape of each function that creates a tensor from numbers.
SHAPES: dict[str, Callable[..., tuple[Any, ...]]] = {
    **dict.fromkeys(("linspace", "logspace"), lambda start, end, steps, base=10.0: (steps,)),
    **dict.fromkeys(
        (f"{kind}_window" for kind in ("hann", "hamming", "blackman", "bartlett", "kaiser")),
        lambda window_length, *rest, **options: (window_length,),
    ),
    "fft_fftfreq": lambda n, d=1.0: (n,),
    "fft_rfftfreq": lambda n, d=1.0: (n // 2 + 1,),
    "tril_indices": lambda row, col, offset=0: (2, _below(row, col, offset)),
    "triu_indices": lambda row, col, offset=0: (2, row * col - _below(row, col, offset - 1)),
}


def with_torch_values(value: Any, call: MakesCall) -> Any:
    """An argument of a call, with dtypes in place of Python's types, and tensors in place of numpy's arrays."""
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


def affine_grid(call: MakesCall, theta: Any, size: Any, align_corners: bool | None = None) -> Any:
    """`affine_grid` of dynamic sizes: torch's Python code would test which size is the smallest."""
    if all(type(length) is int for length in size):
        return NotImplemented
    return call(torch.affine_grid_generator, (theta, list(size), bool(align_corners)), {})


def deep_copy(call: MakesCall, tensor: Any, memo: dict[int, Any]) -> Any:
    """`copy.deepcopy` of a tensor."""
    if id(tensor) not in memo:
        if tensor.requires_grad and not tensor.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol"
            )
        copied = call(torch.Tensor.clone, (tensor,), {})
        memo[id(tensor)] = _without_history(call, copied, tensor.requires_grad)
    return memo[id(tensor)]


def reduced(call: MakesCall, tensor: Any, _protocol: int) -> Any:
    """The function and arguments with which `copy.copy` makes another tensor in the same memory."""
    return _without_history, (call, tensor, tensor.requires_grad)


def _without_history(call: MakesCall, tensor: Any, requires_grad: bool) -> Any:
    made = call(torch.Tensor.detach, (tensor,), {})
    return call(torch.Tensor.requires_grad_, (made,), {}) if requires_grad else made


def one_hot(call: MakesCall, tensor: Any, num_classes: Any = -1) -> Any:
    """`one_hot` with a symbolic number of classes, or with the number that the largest index requires if none is given."""
    if type(num_classes) is int:
        if num_classes != -1:
            return NotImplemented
        num_classes = call(torch.Tensor.item, (call(torch.Tensor.max, (tensor,), {}),), {}) + 1
    zeros = call(
        torch.zeros, ((*tensor.shape, num_classes),), {"dtype": torch.int64, "device": tensor.device}
    )
    return call(torch.Tensor.scatter, (zeros, -1, call(torch.Tensor.unsqueeze, (tensor, -1), {}), 1), {})


def new_tensor(call: MakesCall, tensor: Any, data: Any, **options: Any) -> Any:
    """`tensor.new_tensor` of a numpy array."""
    if type(data).__name__ != "ndarray":
        return NotImplemented
    return call(torch.tensor, (data,), {"dtype": tensor.dtype, "device": tensor.device} | options)


def of_numbers(recorder: Recorder, call: Call) -> Any:
    """A tensor that torch creates from numbers only, in C++ that does not support symbolic numbers."""
    options = {key: value for key, value in call.kwargs.items() if key in _OPTIONS}
    named = {key: value for key, value in call.kwargs.items() if key not in options}
    numbers = (*call.args, *named.values())
    if call.kwargs.get("out") is not None or any(
        isinstance(number, (torch.Tensor, complex)) for number in numbers
    ):
        return NotImplemented
    if not any(isinstance(number, SymbolicNumber) for number in numbers):
        return NotImplemented
    if call.name.endswith("_indices"):
        options = {"dtype": torch.int64} | options
    made = torch.empty(SHAPES[call.name](*call.args, **named), **options)
    recorder.record(call, made)
    return made


def _below(rows: Any, columns: Any, offset: Any) -> Any:
    """The number of matrix elements that are not above a diagonal."""

    def triangle(side: Any) -> Any:
        side = torch.sym_max(side, 0)
        return side * (side + 1) // 2

    whole = triangle(rows + offset) - triangle(rows + offset - columns)
    return whole - triangle(offset) + triangle(offset - columns)


def istft(recorder: Recorder, call: Call) -> Any:
    """`istft` of a dynamic length: torch's Python code accepts one, its signature does not."""
    if not any(isinstance(number, SymbolicNumber) for number in (*call.args, *call.kwargs.values())):
        return NotImplemented
    made = whole_istft(*call.args, **call.kwargs)
    recorder.record(call, made)
    return made


def data(recorder: Recorder, call: Call) -> torch.Tensor:
    """`tensor.data`: it shares the memory but counts its own writes, so cached facts about the tensor would become stale."""
    detached: torch.Tensor = call.args[0].detach()
    recorder.record(call, detached)
    recorder.data_of[id(detached)] = detached, call.args[0]
    return detached


def assigned_data(recorder: Recorder, call: Call) -> Any:
    """`tensor.data *= 2` writes into the memory, and then assigns the same memory."""
    tensor, value = call.args
    return None if recorder.data_of.get(id(value), (None, None))[1] is tensor else NotImplemented


def assigned_requires_grad(recorder: Recorder, call: Call) -> Any:
    """`tensor.requires_grad = flag` for a tensor that is not the model's."""
    tensor, flag = call.args
    if recorder.shell.real(tensor)[0]:
        return NotImplemented
    recorder.call(torch.Tensor.requires_grad_, (tensor, flag), {})
    return None


def gradient(recorder: Recorder, call: Call) -> None:
    """`tensor.grad`, which a graph assumes to be None, with a runtime check."""
    tensor, writer = call.args[0], recorder.writer
    _, real = recorder.shell.real(tensor)
    if real is not None and real.is_leaf and real.grad is not None:
        raise TraceError(f"the forward reads a gradient, which a graph cannot hold. {writer.where()}")
    if tensor.is_leaf:
        gradient = writer.call(getattr, writer.argument(tensor), "grad")
        writer.assume(writer.call(operator.is_, gradient, None), "that a gradient is None")
