"""What does not reach a `TorchFunctionMode` by itself, made to: for one capture, in one thread.

`torch.inference_mode`, `sdpa_kernel` and `torch.autograd.Function` report to no mode. Their entry points are
replaced while a capture runs, under a lock; calls from any other thread go straight to the originals.
The compiling and exporting states of torch are set for the same time, as `torch.export` does: models that
branch on them then take the branch that needs no data.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.autograd.function
import torch.nn.attention

from fxopt.capture import modes
from fxopt.capture.recorder import Recorder
from fxopt.errors import TraceError

lock = threading.RLock()


@contextlib.contextmanager
def intercepted(recorder: Recorder) -> Iterator[None]:
    """Report to `recorder` what this thread does inside the block."""
    thread = threading.get_ident()

    def active() -> bool:
        return threading.get_ident() == thread and recorder.recording

    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(torch.compiler, "_is_compiling_flag", True))
        stack.enter_context(_replaced(torch.compiler, "_is_exporting_flag", True))
        _inference_mode(stack, recorder, active)
        _sdpa_kernel(stack, recorder, active)
        _autograd_function(stack, recorder, active)
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _inference_mode(stack: contextlib.ExitStack, recorder: Recorder, active: Any) -> None:
    enter: Any = torch.inference_mode.__enter__
    leave: Any = torch.inference_mode.__exit__

    def __enter__(self: Any) -> None:
        enter(self)
        if active():
            recorder.enter(self, modes.enter_inference_mode, self.mode)

    def __exit__(self: Any, *error: Any) -> None:
        leave(self, *error)
        if active():
            recorder.leave(self)

    stack.enter_context(_replaced(torch.inference_mode, "__enter__", __enter__))
    stack.enter_context(_replaced(torch.inference_mode, "__exit__", __exit__))


def _sdpa_kernel(stack: contextlib.ExitStack, recorder: Recorder, active: Any) -> None:
    switch: Any = torch.nn.attention._sdpa_kernel

    def _sdpa_kernel(backends: Any, set_priority: bool = False) -> None:
        switch(backends, set_priority)
        if active():
            # Called twice from the frame of one context manager: to enter and to leave.
            block = sys._getframe(1)
            if recorder.entered(block):
                recorder.leave(block)
            else:
                recorder.enter(block, modes.enter_sdpa_kernel, [b.name for b in backends], set_priority)

    stack.enter_context(_replaced(torch.nn.attention, "_sdpa_kernel", _sdpa_kernel))


def _autograd_function(stack: contextlib.ExitStack, recorder: Recorder, active: Any) -> None:
    function = torch.autograd.function.Function
    original: Any = function.__dict__["apply"]
    is_setup_context_defined: Any = torch.autograd.function._is_setup_context_defined

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        bound = original.__get__(None, cls)
        return (
            recorder.call_autograd_function(cls, bound, args, kwargs) if active() else bound(*args, **kwargs)
        )

    def first_call_of_the_original(setup_context: Any) -> bool:
        # Reached while recording only when the original was bound before the capture began.
        if active():
            cls = sys._getframe(1).f_locals["cls"]
            raise TraceError(
                f"the autograd.Function {cls.__qualname__} is called through a reference to its `apply` that was "
                f"taken before the capture, where it cannot be seen. Write `{cls.__qualname__}.apply(...)` in the "
                f"forward. {recorder.where()}"
            )
        return bool(is_setup_context_defined(setup_context))

    stack.enter_context(_replaced(function, "apply", classmethod(apply)))
    stack.enter_context(
        _replaced(torch.autograd.function, "_is_setup_context_defined", first_call_of_the_original)
    )
