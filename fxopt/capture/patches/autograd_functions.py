"""Custom `torch.autograd.Function`s: one node each, or the calls of their forward."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any

import torch

from fxopt.capture.recording.recorder import Recorder
from fxopt.capture.recording.tensor_data import contains
from fxopt.capture.runtime import modes

_APPLY: Any = torch.autograd.function.Function.__dict__["apply"].__func__

# `apply` as torch defines it.
plain_apply = types.FunctionType(
    _APPLY.__code__, _APPLY.__globals__, _APPLY.__name__, _APPLY.__defaults__, _APPLY.__closure__
)
_current: list[Callable[..., Any]] = [plain_apply]


class _Calling:
    def apply(cls, *args, **kwargs):  # type: ignore[no-untyped-def]
        __class__  # type: ignore[name-defined] # noqa: B018 # code can be replaced only by code that closes over as many names
        from fxopt.capture.patches.autograd_functions import _current

        return _current[-1](cls, *args, **kwargs)


def replace_apply(stack: contextlib.ExitStack, apply: Callable[..., Any]) -> None:
    """Let `Function.apply` call `apply`, through references that were taken before as well (`double = Double.apply`)."""
    code = _APPLY.__code__
    _current.append(apply)
    stack.callback(_current.pop)
    _APPLY.__code__ = _Calling.apply.__code__
    stack.callback(setattr, _APPLY, "__code__", code)


def call_autograd_function(
    recorder: Recorder, cls: type, apply: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Run a `torch.autograd.Function` out of sight, and write one node, so that it keeps its backward; none can hold a module."""
    if contains([*args, *kwargs.values()], torch.nn.Module):
        return _call_forward(recorder, cls, args, kwargs)
    writer = recorder.writer
    args, kwargs = writer.faked(args), writer.faked(kwargs)
    with recorder.paused():
        result = apply(*args, **kwargs)
    node_args, node_kwargs = writer.arguments(f"{cls.__qualname__}.apply", args, kwargs)
    writer.create("call_function", modes.ApplyFunction(cls), node_args, node_kwargs, result)
    return result


def _call_forward(recorder: Recorder, cls: Any, args: Any, kwargs: Any) -> Any:
    """Run the forward of a `torch.autograd.Function` without its backward."""
    if torch.is_grad_enabled():
        recorder.fail(
            f"the autograd.Function {cls.__qualname__} takes a module, and a graph cannot hold the gradients that it "
            "computes with it. Capture and run under torch.no_grad(), or make the module that calls it a leaf"
        )
    recorder.queries.note_mode("grad", False)
    if cls.setup_context is not torch.autograd.Function.setup_context:
        return cls.forward(*args, **kwargs)
    context: Any = torch.autograd.function.FunctionCtx()
    context.needs_input_grad = tuple(isinstance(t, torch.Tensor) and t.requires_grad for t in args)
    return cls.forward(context, *args, **kwargs)
