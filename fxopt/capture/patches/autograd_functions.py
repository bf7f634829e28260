"""Custom `torch.autograd.Function`s: one node each, or the calls of their forward."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint as checkpointing

from fxopt.capture.capture_internals import GRADIENTS_OF_OPERATORS
from fxopt.capture.data_dependence.hidden_branches import result_for_all_outcomes
from fxopt.capture.patches.checkpoints import reentrant_checkpoint
from fxopt.capture.patches.replaced import Patches
from fxopt.capture.recording.recorder import Recorder
from fxopt.capture.recording.tensor_data import contains
from fxopt.capture.runtime import modes
from fxopt.graph import reached
from fxopt.memory import storage_of
from fxopt.objects import tensors_in
from fxopt.torch_internals import TorchDispatchMode, written_arguments

Function = torch.autograd.Function


def patch_apply(patch: Patches, recorder: Recorder) -> None:
    """Write one node for each call of `cls.apply` in the forward.

    A reference that was taken earlier, as in `double = Double.apply`, is torch's own method. Such a call is recorded at the
    forward of its class.
    """
    plain, thread = vars(Function)["apply"], threading.get_ident()

    @functools.wraps(Function.apply)
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if patch.active() and cls is checkpointing.CheckpointFunction:
            return reentrant_checkpoint(recorder, args[0], args[2:])
        if threading.get_ident() == thread and recorder.below:
            recorder.fail(
                f"the autograd.Function {cls.__qualname__} is called under a transform of torch.func, such as vmap, "
                "where a graph cannot keep its backward"
            )
        bound = plain.__get__(None, cls)
        if not patch.active():
            return bound(*args, **kwargs)
        return _call(recorder, cls, bound, args, kwargs)

    patch.set(Function, "apply", classmethod(apply))
    for cls in reached(Function.__subclasses__(), _subclasses):
        if cls.__module__ == GRADIENTS_OF_OPERATORS:  # always called as `cls.apply`
            continue
        if isinstance(vars(cls).get("forward"), staticmethod):
            _patch_forward(patch, cls, recorder)
        if "setup_context" in vars(cls):  # its forward may be inherited
            _patch_setup_context(patch, cls, recorder)


def _subclasses(cls: type) -> list[type]:
    return cls.__subclasses__()


def _patch_forward(patch: Patches, cls: Any, recorder: Recorder) -> None:
    forward = cls.forward

    @functools.wraps(forward)
    def seen(*args: Any, **kwargs: Any) -> Any:
        if not patch.active():
            return forward(*args, **kwargs)
        if contains([*args, *kwargs.values()], torch.nn.Module):
            recorder.fail(
                f"the autograd.Function {cls.__qualname__} is called with a module, through a reference to its `apply` that "
                f"was taken earlier. Call {cls.__qualname__}.apply"
            )
        context = args[: int(bool(args) and isinstance(args[0], torch.autograd.function.FunctionCtx))]
        called = cls
        if context:  # torch's context stores the class, which may inherit its forward
            called = getattr(type(context[0]), "_forward_cls", cls)
        elif heirs := [sub for sub in reached(cls.__subclasses__(), _subclasses) if sub.forward is seen]:
            recorder.fail(
                f"a forward of the autograd.Function {cls.__qualname__} is called through a reference to `apply` that was taken "
                f"earlier, and {heirs[0].__qualname__} has the same forward: call {heirs[0].__qualname__}.apply, or {cls.__qualname__}.apply"
            )
        call = functools.partial(forward, *context)
        result = _call(recorder, called, call, args[len(context) :], kwargs)
        _save_out_of_sight(recorder, result, *context)
        return result

    seen.original = forward  # type: ignore[attr-defined]
    patch.set(cls, "forward", staticmethod(seen))


def _patch_setup_context(patch: Patches, cls: Any, recorder: Recorder) -> None:
    set_up = cls.setup_context

    @functools.wraps(set_up)
    def seen(context: Any, inputs: Any, output: Any) -> None:
        if not patch.active():
            set_up(context, inputs, output)
            return
        with recorder.paused():
            set_up(context, inputs, output)
        _save_out_of_sight(recorder, output, context)

    patch.set(cls, "setup_context", staticmethod(seen))


def _save_out_of_sight(recorder: Recorder, result: Any, *contexts: Any) -> None:
    """Save detached tensors in place of outputs, because torch would copy outputs, and the copy would be recorded."""
    outputs = set(map(id, tensors_in(result)))
    for context in contexts:
        saved = getattr(context, "to_save", None) or ()
        with recorder.paused():
            others = [tensor.detach() if id(tensor) in outputs else tensor for tensor in saved]
        context.save_for_backward(*others)


def _call(recorder: Recorder, cls: type, apply: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Write one node for a `torch.autograd.Function`, which keeps its backward; with a module argument, record its forward."""
    if contains([*args, *kwargs.values()], torch.nn.Module):
        return _call_forward(recorder, cls, args, kwargs)
    writer = recorder.writer
    args, kwargs = writer.faked((args, kwargs))
    with recorder.paused(), _Writes() as writes:
        where = f"the autograd.Function {cls.__qualname__}"
        result = result_for_all_outcomes(recorder.shape_env, where, apply, *args, **kwargs)
    given = set(map(storage_of, tensors_in((args, kwargs))))
    node_args, node_kwargs = writer.arguments(f"{cls.__qualname__}.apply", args, kwargs)
    target = modes.ApplyFunction(cls, only_reads=given.isdisjoint(writes.written))
    writer.create("call_function", target, node_args, node_kwargs, result)
    return result


class _Writes(TorchDispatchMode):
    """Records the memory that calls write into."""

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int] = set()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.written.update(map(storage_of, tensors_in(written_arguments(operator, args, kwargs))))
        return operator(*args, **kwargs)


def _call_forward(recorder: Recorder, cls: Any, args: Any, kwargs: Any) -> Any:
    """Run the forward of a `torch.autograd.Function` without its backward."""
    if torch.is_grad_enabled():
        recorder.fail(
            f"the autograd.Function {cls.__qualname__} takes a module, and a graph cannot hold the gradients that it "
            "computes with it. Capture and run under torch.no_grad(), or make the module that calls it a leaf"
        )
    recorder.queries.note_mode("grad", False)
    forward = getattr(cls.forward, "original", cls.forward)
    if cls.setup_context is not torch.autograd.Function.setup_context:
        return forward(*args, **kwargs)
    context: Any = torch.autograd.function.FunctionCtx()
    context.needs_input_grad = tuple(isinstance(t, torch.Tensor) and t.requires_grad for t in args)
    return forward(context, *args, **kwargs)
