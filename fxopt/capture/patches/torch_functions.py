"""The functions of torch that report to no `TorchFunctionMode`, or not all that they do."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._functorch.apis as functorch
import torch._functorch.eager_transforms as eager_transforms
import torch.autograd.function
import torch.autograd.graph
import torch.nn.attention
import torch.utils.checkpoint as checkpointing
from torch._subclasses.fake_tensor import FakeTensor

from fxopt.capture.fakes.call_cache import CallCache
from fxopt.capture.nodes.source_location import is_model_code
from fxopt.capture.patches.autograd_functions import call_autograd_function, plain_apply, replace_apply
from fxopt.capture.patches.replaced import replaced
from fxopt.capture.recording.mode_switches import ModeSwitches
from fxopt.capture.recording.property_reads import PropertyReads
from fxopt.capture.recording.recorder import Recorder
from fxopt.capture.runtime import modes

_MODES = {
    "is_grad_enabled": "grad",
    "is_autocast_enabled": "autocast",
    "is_inference_mode_enabled": "inference_mode",
}
# The functions of torch.func in which calls are made on wrapped tensors.
_TRANSFORMS = (
    (functorch, "vmap_impl"),
    (functorch, "_chunked_vmap"),
    (eager_transforms, "grad_and_value_impl"),
    (eager_transforms, "_jvp_with_argnums"),
)


def patch_torch(stack: contextlib.ExitStack, recorder: Recorder, active: Any) -> None:
    """Report to `recorder` what torch does not."""
    _inference_mode(stack, recorder.switches, active)
    _sdpa_kernel(stack, recorder.switches, recorder.memo, active)
    _autograd_function(stack, recorder, active)
    _transforms(stack, recorder.below_transforms, active)
    _checkpointing(stack, recorder.fail, active)
    _conversions(stack, active)
    _queries(stack, recorder.queries, active)
    _lists(stack, active)
    _attention(stack, active)
    _refusals(stack, recorder.fail, active)


def _inference_mode(stack: contextlib.ExitStack, switches: ModeSwitches, active: Any) -> None:
    enter: Any = torch.inference_mode.__enter__
    leave: Any = torch.inference_mode.__exit__

    def __enter__(self: Any) -> None:
        enter(self)
        if active():
            switches.enter(self, modes.enter_inference_mode, self.mode)

    def __exit__(self: Any, *error: Any) -> None:
        leave(self, *error)
        if active():
            switches.leave(self)

    stack.enter_context(replaced(torch.inference_mode, "__enter__", __enter__))
    stack.enter_context(replaced(torch.inference_mode, "__exit__", __exit__))


def _sdpa_kernel(stack: contextlib.ExitStack, switches: ModeSwitches, memo: CallCache, active: Any) -> None:
    switch: Any = torch.nn.attention._sdpa_kernel

    def _sdpa_kernel(backends: Any, set_priority: bool = False) -> None:
        switch(backends, set_priority)
        if active():
            memo.forget()  # which backend is chosen decides on the strides of what attention gives
            # Called twice from the frame of one context manager: to enter and to leave.
            block = sys._getframe(1)
            if switches.entered(block):
                switches.leave(block)
            else:
                switches.enter(block, modes.enter_sdpa_kernel, [b.name for b in backends], set_priority)

    stack.enter_context(replaced(torch.nn.attention, "_sdpa_kernel", _sdpa_kernel))


def _autograd_function(stack: contextlib.ExitStack, recorder: Recorder, active: Any) -> None:
    thread = threading.get_ident()

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if active() and cls is checkpointing.CheckpointFunction:
            recorder.fail(
                "the forward calls torch.utils.checkpoint with use_reentrant=True, which a graph cannot hold: "
                "use_reentrant=False can be captured"
            )
        if threading.get_ident() == thread and recorder.below:
            recorder.fail(
                f"the autograd.Function {cls.__qualname__} is called under a transform of torch.func, such as vmap, "
                "where a graph cannot keep its backward"
            )
        bound = functools.partial(plain_apply, cls)
        return (
            call_autograd_function(recorder, cls, bound, args, kwargs) if active() else bound(*args, **kwargs)
        )

    replace_apply(stack, apply)


def _transforms(stack: contextlib.ExitStack, below: Callable[[], Any], active: Any) -> None:
    """`vmap`, `grad`, `jvp` and what torch.func makes of them."""

    def recorded(call: Any) -> Any:
        def transform(*args: Any, **kwargs: Any) -> Any:
            if not active():
                return call(*args, **kwargs)
            with below():
                return call(*args, **kwargs)

        return transform

    for owner, name in _TRANSFORMS:
        stack.enter_context(replaced(owner, name, recorded(owner.__dict__[name])))
    forward: Any = recorded(eager_transforms.__dict__["_vjp_with_argnums"])

    def vjp(*args: Any, **kwargs: Any) -> Any:
        result, backward, *aux = forward(*args, **kwargs)
        return result, recorded(backward), *aux

    stack.enter_context(replaced(eager_transforms, "_vjp_with_argnums", vjp))


def _checkpointing(stack: contextlib.ExitStack, refuse: Callable[[str], None], active: Any) -> None:
    """Record what `torch.utils.checkpoint` runs as if it were called directly: values and gradients are the same."""
    original: Any = checkpointing._checkpoint_without_reentrant_generator

    def around_forward(*args: Any, **kwargs: Any) -> Iterator[None]:
        if not active():
            yield from original(*args, **kwargs)
            return
        bound = inspect.signature(original).bind(*args, **kwargs).arguments
        if bound.get("context_fn", checkpointing.noop_context_fn) is not checkpointing.noop_context_fn:
            refuse("the forward gives torch.utils.checkpoint a context_fn, which a graph cannot hold")
        warnings.warn(
            "the graph holds the forward without activation checkpointing: its gradients are the same, "
            "and it keeps the activations that checkpointing would compute again.",
            stacklevel=2,
        )
        yield

    stack.enter_context(replaced(checkpointing, "_checkpoint_without_reentrant_generator", around_forward))


def _conversions(stack: contextlib.ExitStack, active: Any) -> None:
    original: Any = torch.nn.Module.to

    def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if active():
            device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
            tensors = [*self.parameters(), *self.buffers()]
            if memory_format is None and all(
                device in (None, t.device) and (dtype in (None, t.dtype) or not t.is_floating_point())
                for t in tensors
            ):
                return self  # it would assign to each parameter what that is already
        return original(self, *args, **kwargs)

    stack.enter_context(replaced(torch.nn.Module, "to", to))


def _queries(stack: contextlib.ExitStack, queries: PropertyReads, active: Any) -> None:
    """Take note of global modes that the model reads, which the graph takes for granted."""
    for name, mode in _MODES.items():
        original: Any = getattr(torch, name)

        def ask(*args: Any, original: Any = original, mode: str = mode) -> bool:
            answer = bool(original(*args))
            caller = sys._getframe(1)
            if active() and is_model_code(caller.f_code.co_filename):
                queries.note_mode(mode, answer)
            return answer

        stack.enter_context(replaced(torch, name, ask))


def _lists(stack: contextlib.ExitStack, active: Any) -> None:
    """Give the same unbacked numbers each time that a tensor is listed, until it is written."""
    original: Any = FakeTensor.tolist
    # Tensors, kept alive, and what `tolist` gave, by identity and version.
    known: dict[tuple[int, int], Any] = {}

    def tolist(self: Any) -> Any:
        if not active() or self.is_inference():
            return original(self)
        key = id(self), self._version
        if key not in known:
            known[key] = self, original(self)
        return _new_lists(known[key][1])

    stack.enter_context(replaced(FakeTensor, "tolist", tolist))


def _new_lists(listed: Any) -> Any:
    """The same numbers in lists that the forward may change."""
    return list(map(_new_lists, listed)) if type(listed) is list else listed


def _attention(stack: contextlib.ExitStack, active: Any) -> None:
    """`length > 1 and causal` gives its first operand where that is false, and attention takes a bool alone."""
    original: Any = torch.nn.functional.scaled_dot_product_attention

    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
        if active() and isinstance(kwargs.get("is_causal"), torch.SymBool):
            kwargs["is_causal"] = bool(kwargs["is_causal"])
        return original(*args, **kwargs)

    stack.enter_context(
        replaced(torch.nn.functional, "scaled_dot_product_attention", scaled_dot_product_attention)
    )


def _refusals(stack: contextlib.ExitStack, refuse: Callable[[str], None], active: Any) -> None:
    """Refuse what a graph cannot hold, and what would be lost without a word."""
    hooks: Any = torch.autograd.graph.saved_tensors_hooks
    enter = hooks.__enter__

    def __enter__(self: Any) -> None:
        if active() and type(self) is hooks:  # checkpointing has a class of its own, and changes no value
            refuse("the forward sets saved_tensors_hooks, which a graph cannot hold")
        enter(self)

    stack.enter_context(replaced(hooks, "__enter__", __enter__))
    set_dtype: Any = torch.set_default_dtype

    def set_default_dtype(dtype: torch.dtype) -> None:
        if active() and dtype != torch.get_default_dtype():
            refuse("the forward sets torch's default dtype, which a graph cannot hold. Give dtypes in calls")
        set_dtype(dtype)

    stack.enter_context(replaced(torch, "set_default_dtype", set_default_dtype))
    for name in ("manual_seed", "seed", "set_rng_state", "get_rng_state"):
        original: Any = getattr(torch.random, name)

        def seed(*args: Any, original: Any = original, name: str = name) -> Any:
            if active():
                refuse(f"the forward calls torch.{name}, and a graph cannot hold the state of random numbers")
            return original(*args)

        for module in (torch, torch.random):
            stack.enter_context(replaced(module, name, seed))
