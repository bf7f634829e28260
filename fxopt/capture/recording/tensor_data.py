"""Tensors that the forward creates from Python data: `torch.tensor([1, 2])` and similar calls."""

from __future__ import annotations

import functools
from typing import Any

import torch

from fxopt.capture.capture_internals import unset_fake_temporarily
from fxopt.capture.fakes.dynamic_shapes import SymbolicNumber
from fxopt.capture.nodes.source_location import makes_calls
from fxopt.capture.recording.idioms import with_torch_values
from fxopt.capture.recording.indexing import are_numbers
from fxopt.capture.recording.recorder import Recorder
from fxopt.capture.recording.torch_call import Call
from fxopt.memory import version_of

FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy)


@makes_calls
def make_from_data(recorder: Recorder, call: Call) -> Any:
    """`torch.tensor` and similar calls: a constant of the graph, or a stack if the data is tensors with one number each."""
    args, kwargs = call.args, torch_keywords(recorder, call)
    if not contains(args[0] if args else kwargs["data"], (torch.Tensor, *SymbolicNumber)):
        with unset_fake_temporarily():
            real = call.function(*args, **kwargs)
        return _fresh(recorder, real, call.function(*args, **kwargs))
    kind = _dtype_of(args[0]) if args and not kwargs.keys() - {"dtype", "device"} else None
    if kind is not None:
        return _of_sizes(recorder, args[0], kwargs | {"dtype": kwargs.get("dtype") or kind})
    if call.function is torch.tensor and args and are_numbers(args[0]) and not kwargs.get("requires_grad"):
        return _stack(recorder, args[0], kwargs)
    return Call(call.function, args, kwargs)


def _dtype_of(data: Any) -> torch.dtype | None:
    """The dtype that torch gives to nested sequences of Python or symbolic numbers; None for any other contents."""
    if isinstance(data, (list, tuple)):
        kinds = [kind for item in data if (kind := _dtype_of(item)) is not None]
        return functools.reduce(torch.promote_types, kinds, torch.bool) if len(kinds) == len(data) else None
    if isinstance(data, (bool, torch.SymBool)):
        return torch.bool
    if isinstance(data, (int, torch.SymInt)):
        return torch.int64
    return torch.get_default_dtype() if isinstance(data, (float, torch.SymFloat)) else None


def _of_sizes(recorder: Recorder, data: Any, options: dict[str, Any]) -> Any:
    """Create a tensor from numbers, some of them dynamic sizes, which torch would make static."""
    if isinstance(data, (list, tuple)):
        return recorder.call(torch.stack, ([_of_sizes(recorder, item, options) for item in data],), {})
    return recorder.call(torch.scalar_tensor, (data,), options)


def _stack(recorder: Recorder, numbers: Any, options: dict[str, Any]) -> Any:
    """`torch.tensor` of tensors with one number each: a copy of the numbers, without gradients."""
    stacked = recorder.call(torch.stack, (list(numbers),), {})
    if stacked.requires_grad:
        stacked = recorder.call(torch.Tensor.detach, (stacked,), {})
    options = {name: value for name, value in options.items() if value is not None}
    return recorder.call(torch.Tensor.to, (stacked,), options) if options else stacked


def make_legacy(recorder: Recorder, call: Call) -> Any:
    """`torch.IntTensor([1])` and similar calls, of which a mode only sees that torch makes a fake of a tensor."""
    real, mode = call.args[0], recorder.fake_mode
    if type(real) is not torch.Tensor:
        return Call(call.function, recorder.writer.faked(call.args), call.kwargs)
    with unset_fake_temporarily():
        before = real.clone()  # torch applies operations to a known number in place
    known = mode.may_turn_const(real)
    fake = mode.fake_tensor_converter.from_real_tensor(mode, real, make_constant=known)
    return _fresh(recorder, before, fake)


def _fresh(recorder: Recorder, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    """Record a tensor with known numbers, which each call of the graph creates again if it is written."""
    writer = recorder.writer
    node = writer.create("get_attr", writer.constant(real), (), {}, fake)
    writer.fresh.append((fake, version_of(fake), node))
    return fake


def torch_keywords(recorder: Recorder, call: Call) -> dict[str, Any]:
    return {key: with_torch_values(arg, recorder.call) for key, arg in call.kwargs.items()}


def contains(value: Any, types: Any) -> bool:
    """Tell whether nested sequences contain an instance of these types."""
    if isinstance(value, (list, tuple)):
        return any(contains(item, types) for item in value)
    return isinstance(value, types)
