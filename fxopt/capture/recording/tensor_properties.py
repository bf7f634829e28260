"""Reads of and assignments to properties of tensors that are more than a read: `data`, `grad`, `requires_grad`."""

from __future__ import annotations

import operator
from typing import Any

import torch

from fxopt.capture.recording.recorder import Recorder
from fxopt.capture.recording.torch_call import Call
from fxopt.capture.runtime.checks import check_value
from fxopt.errors import TraceError


def data(recorder: Recorder, call: Call) -> torch.Tensor:
    """`tensor.data`: the same memory, which counts its writes by itself, so that what is known of one would not be forgotten."""
    detached: torch.Tensor = call.args[0].detach()
    recorder.record(call.function, call.args, call.kwargs, detached)
    recorder.data_of[id(detached)] = detached, call.args[0]
    return detached


def assigned_data(recorder: Recorder, call: Call) -> Any:
    """`tensor.data *= 2` writes into the memory, and then assigns what is there."""
    tensor, value = call.args
    return None if recorder.data_of.get(id(value), (None, None))[1] is tensor else NotImplemented


def assigned_requires_grad(recorder: Recorder, call: Call) -> Any:
    """`tensor.requires_grad = flag` of what is no tensor of the model."""
    tensor, flag = call.args
    if recorder.shell.real(tensor)[0]:
        return NotImplemented
    recorder.call(torch.Tensor.requires_grad_, (tensor, flag), {})
    return None


def gradient(recorder: Recorder, call: Call) -> None:
    """`tensor.grad`, which a graph takes to be None, and checks."""
    tensor, writer = call.args[0], recorder.writer
    _, real = recorder.shell.real(tensor)
    if real is not None and real.is_leaf and real.grad is not None:
        raise TraceError(f"the forward reads a gradient, which a graph cannot hold. {writer.where()}")
    if tensor.is_leaf:
        gradient = writer.create("call_function", getattr, (writer.argument(tensor), "grad"), {}, None)
        is_none = writer.create("call_function", operator.is_, (gradient, None), {}, None)
        message = f"the graph assumes that a gradient is None. {writer.where()}"
        writer.create("call_function", check_value, (is_none, message), {}, None)
