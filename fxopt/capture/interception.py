"""What does not reach a `TorchFunctionMode` by itself, made to: for one capture, in one thread.

`torch.inference_mode`, `sdpa_kernel` and `torch.autograd.Function` report to no mode. Their entry points are
replaced while a capture runs, under a lock; calls from any other thread go straight to the originals.
The compiling and exporting states of torch are set for the same time, as `torch.export` does: models that
branch on them then take the branch that needs no data.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import inspect
import logging
import os
import random
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch._functorch.apis as functorch
import torch._functorch.eager_transforms as eager_transforms
import torch.autograd.function
import torch.autograd.graph
import torch.nn.attention
import torch.utils.checkpoint as checkpointing
from torch._subclasses.fake_tensor import FakeTensor

from fxopt.capture import modes
from fxopt.capture.autograd_functions import call_autograd_function
from fxopt.capture.masks import watch_masks
from fxopt.capture.messages import is_message
from fxopt.capture.places import is_model_code
from fxopt.capture.recorder import Recorder
from fxopt.errors import TraceError

lock = threading.RLock()

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


@contextlib.contextmanager
def intercepted(recorder: Recorder) -> Iterator[None]:
    """Report to `recorder` what this thread does inside the block."""
    thread = threading.get_ident()

    def active() -> bool:
        return threading.get_ident() == thread and recorder.recording

    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(torch.compiler, "_is_compiling_flag", True))
        stack.enter_context(_replaced(torch.compiler, "_is_exporting_flag", True))
        # It logs each error of an operator before raising it, and some are answers to questions asked here.
        stack.enter_context(_replaced(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True))
        _inference_mode(stack, recorder, active)
        _sdpa_kernel(stack, recorder, active)
        _autograd_function(stack, recorder, active)
        _transforms(stack, recorder, active)
        _checkpointing(stack, recorder, active)
        _conversions(stack, active)
        _queries(stack, recorder, active)
        _extremes(stack, recorder, active)
        _rounding(stack, active)
        _keys(stack, active)
        _types(stack, recorder, active)
        _seeds(stack, recorder, active)
        _entropy(stack, recorder, active)
        _lists(stack, active)
        _attention(stack, active)
        watch_masks(stack, recorder, active)
        _refusals(stack, recorder, active)
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
            recorder.switches.enter(self, modes.enter_inference_mode, self.mode)

    def __exit__(self: Any, *error: Any) -> None:
        leave(self, *error)
        if active():
            recorder.switches.leave(self)

    stack.enter_context(_replaced(torch.inference_mode, "__enter__", __enter__))
    stack.enter_context(_replaced(torch.inference_mode, "__exit__", __exit__))


def _sdpa_kernel(stack: contextlib.ExitStack, recorder: Recorder, active: Any) -> None:
    switch: Any = torch.nn.attention._sdpa_kernel

    def _sdpa_kernel(backends: Any, set_priority: bool = False) -> None:
        switch(backends, set_priority)
        if active():
            recorder.memo.forget()  # which backend is chosen decides on the strides of what attention gives
            # Called twice from the frame of one context manager: to enter and to leave.
            block = sys._getframe(1)
            if recorder.switches.entered(block):
                recorder.switches.leave(block)
            else:
                recorder.switches.enter(
                    block, modes.enter_sdpa_kernel, [b.name for b in backends], set_priority
                )

    stack.enter_context(_replaced(torch.nn.attention, "_sdpa_kernel", _sdpa_kernel))


def _autograd_function(stack: contextlib.ExitStack, recorder: Recorder, active: Any) -> None:
    thread = threading.get_ident()
    function = torch.autograd.function.Function
    original: Any = function.__dict__["apply"]
    is_setup_context_defined: Any = torch.autograd.function._is_setup_context_defined

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
        bound = original.__get__(None, cls)
        return (
            call_autograd_function(recorder, cls, bound, args, kwargs) if active() else bound(*args, **kwargs)
        )

    def first_call_of_the_original(setup_context: Any) -> bool:
        # Reached while recording only when the original was bound before the capture began.
        if active():
            cls = sys._getframe(1).f_locals["cls"]
            raise TraceError(
                f"the autograd.Function {cls.__qualname__} is called through a reference to its `apply` that was "
                f"taken before the capture, where it cannot be seen. Write `{cls.__qualname__}.apply(...)` in the "
                f"forward. {recorder.writer.where()}"
            )
        return bool(is_setup_context_defined(setup_context))

    stack.enter_context(_replaced(function, "apply", classmethod(apply)))
    stack.enter_context(
        _replaced(torch.autograd.function, "_is_setup_context_defined", first_call_of_the_original)
    )


def _transforms(stack: contextlib.ExitStack, recorder: Recorder, active: Any) -> None:
    """`vmap`, `grad`, `jvp` and what torch.func makes of them."""

    def recorded(call: Any) -> Any:
        def transform(*args: Any, **kwargs: Any) -> Any:
            if not active():
                return call(*args, **kwargs)
            with recorder.below_transforms():
                return call(*args, **kwargs)

        return transform

    for owner, name in _TRANSFORMS:
        stack.enter_context(_replaced(owner, name, recorded(owner.__dict__[name])))
    forward: Any = recorded(eager_transforms.__dict__["_vjp_with_argnums"])

    def vjp(*args: Any, **kwargs: Any) -> Any:
        result, backward, *aux = forward(*args, **kwargs)
        return result, recorded(backward), *aux

    stack.enter_context(_replaced(eager_transforms, "_vjp_with_argnums", vjp))


def _checkpointing(stack: contextlib.ExitStack, recorder: Recorder, active: Any) -> None:
    """Record what `torch.utils.checkpoint` runs as if it were called directly: values and gradients are the same."""
    original: Any = checkpointing._checkpoint_without_reentrant_generator

    def around_forward(*args: Any, **kwargs: Any) -> Iterator[None]:
        if not active():
            yield from original(*args, **kwargs)
            return
        bound = inspect.signature(original).bind(*args, **kwargs).arguments
        if bound.get("context_fn", checkpointing.noop_context_fn) is not checkpointing.noop_context_fn:
            recorder.fail("the forward gives torch.utils.checkpoint a context_fn, which a graph cannot hold")
        warnings.warn(
            "the graph holds the forward without activation checkpointing: its gradients are the same, "
            "and it keeps the activations that checkpointing would compute again.",
            stacklevel=2,
        )
        yield

    stack.enter_context(_replaced(checkpointing, "_checkpoint_without_reentrant_generator", around_forward))


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

    stack.enter_context(_replaced(torch.nn.Module, "to", to))


def _queries(stack: contextlib.ExitStack, recorder: Recorder, active: Any) -> None:
    """The model's own questions after global modes, whose answers the graph takes for granted."""
    for name, mode in _MODES.items():
        original: Any = getattr(torch, name)

        def ask(*args: Any, original: Any = original, mode: str = mode) -> bool:
            answer = bool(original(*args))
            caller = sys._getframe(1)
            if active() and is_model_code(caller.f_code.co_filename):
                recorder.queries.note_mode(mode, answer)
            return answer

        stack.enter_context(_replaced(torch, name, ask))


def _extremes(stack: contextlib.ExitStack, recorder: Recorder, active: Any) -> None:
    """`max` and `min` of sizes: which one it is becomes a guard that holds where the two are equal, too.

    Of sizes that only a run knows, the graph computes them; if it is specialised, they are decided.
    """
    for name, symbolic in (("max", torch.sym_max), ("min", torch.sym_min)):
        original: Any = getattr(builtins, name)

        def choose(
            *args: Any, original: Any = original, name: str = name, symbolic: Any = symbolic, **options: Any
        ) -> Any:
            if len(args) == 1 and type(args[0]) is types.GeneratorType and active():
                args = (list(args[0]),)
            values = args[0] if len(args) == 1 and type(args[0]) in (tuple, list) else args
            if not any(type(value) is torch.SymInt for value in values) or options or not active():
                return original(*args, **options)
            sizes = all(type(value) in (int, torch.SymInt) for value in values)
            if not sizes or not is_model_code(sys._getframe(1).f_code.co_filename):
                return original(*args)
            if not all(type(value) is int or _has_hint(value) for value in values):
                decided = recorder.decisions.specialised
                return original(*args) if decided else functools.reduce(symbolic, values)
            best = original(values, key=_hint)
            for value in values:
                bool(best >= value if name == "max" else best <= value)  # puts the guard
            return best

        stack.enter_context(_replaced(builtins, name, choose))


def _rounding(stack: contextlib.ExitStack, active: Any) -> None:
    """`round` of a number that only a run knows: torch has no symbol for it, so the number is decided, as by `float`."""
    original: Any = torch.SymFloat.__dict__["__round__"]

    def __round__(self: Any, digits: int | None = None) -> Any:
        if active() and not self.node.has_hint():
            return round(float(self), digits)
        return original(self, digits)

    stack.enter_context(_replaced(torch.SymFloat, "__round__", __round__))


def _keys(stack: contextlib.ExitStack, active: Any) -> None:
    """A number that is the key of a dict must be known: it is fixed, or decided, as by `int(number)`."""
    original: Any = torch.SymInt.__hash__

    def __hash__(self: Any) -> int:
        if active() and is_model_code(sys._getframe(1).f_code.co_filename):
            return hash(int(self))
        return int(original(self))

    stack.enter_context(_replaced(torch.SymInt, "__hash__", __hash__))


def _lists(stack: contextlib.ExitStack, active: Any) -> None:
    """The numbers in a tensor, which only a run knows, are the same each time that they are listed until it is written."""
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

    stack.enter_context(_replaced(FakeTensor, "tolist", tolist))


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
        _replaced(torch.nn.functional, "scaled_dot_product_attention", scaled_dot_product_attention)
    )


def _types(stack: contextlib.ExitStack, recorder: Recorder, active: Any) -> None:
    """A free size is an int to the model: to `isinstance`, and as text, for which it must be known but in messages."""
    original: Any = builtins.isinstance

    def is_instance(value: Any, kinds: Any) -> bool:
        if type(value) is not torch.SymInt or original(value, kinds):
            return bool(original(value, kinds))
        return active() and is_model_code(sys._getframe(1).f_code.co_filename) and bool(original(0, kinds))

    stack.enter_context(_replaced(builtins, "isinstance", is_instance))
    for cls, kind in ((torch.SymInt, int), (torch.SymFloat, float), (torch.SymBool, bool)):
        text: Any = cls.__dict__["__repr__"]

        def __repr__(self: Any, text: Any = text, kind: Any = kind) -> str:
            frame = sys._getframe(1)
            if not active() or not is_model_code(frame.f_code.co_filename):
                return str(text(self))
            if not self.node.has_hint():
                recorder.decisions.note_text(self)
                return str(text(self))
            return str(kind(self.node.hint if is_message(frame) else self))

        stack.enter_context(_replaced(cls, "__repr__", __repr__))


def _has_hint(value: Any) -> bool:
    return type(value) is torch.SymInt and bool(value.node.has_hint())


def _hint(value: Any) -> int:
    return int(value.node.hint if isinstance(value, torch.SymInt) else value)


def _seeds(stack: contextlib.ExitStack, recorder: Recorder, active: Any) -> None:
    """What Python and numpy draw after a seed is the same each time, and no random number."""
    for name in {"random", "numpy.random"} & sys.modules.keys():
        original: Any = sys.modules[name].__dict__["seed"]

        def seed(*args: Any, original: Any = original, name: str = name, **kwargs: Any) -> None:
            if active() and (args or kwargs):
                recorder.draws.seed(name)
            original(*args, **kwargs)

        stack.enter_context(_replaced(sys.modules[name], "seed", seed))


def _entropy(stack: contextlib.ExitStack, recorder: Recorder, active: Any) -> None:
    """What the operating system draws, for `secrets`, `uuid4`, and generators without a seed."""

    def refuse() -> None:
        if active():
            recorder.fail(
                "the forward draws random numbers from the operating system, as generators without a seed do, and a graph "
                "would hold those that it drew. Use torch's, or make the module that draws them a leaf (leaf_modules=...)"
            )

    for module, name in ((os, "urandom"), (random, "_urandom")):
        original: Any = module.__dict__[name]

        def urandom(size: int, original: Any = original) -> bytes:
            refuse()
            return bytes(original(size))

        stack.enter_context(_replaced(module, name, urandom))
    prepare: Any = random.Random.__init__

    def __init__(self: Any, *seed: Any, **named: Any) -> None:
        if seed in ((), (None,)) and not named:
            refuse()
        prepare(self, *seed, **named)

    stack.enter_context(_replaced(random.Random, "__init__", __init__))


def _refusals(stack: contextlib.ExitStack, recorder: Recorder, active: Any) -> None:
    """What a graph cannot hold, and what would be lost without a word."""
    hooks: Any = torch.autograd.graph.saved_tensors_hooks
    enter = hooks.__enter__

    def __enter__(self: Any) -> None:
        if active() and type(self) is hooks:  # checkpointing has a class of its own, and changes no value
            recorder.fail("the forward sets saved_tensors_hooks, which a graph cannot hold")
        enter(self)

    stack.enter_context(_replaced(hooks, "__enter__", __enter__))
    for name in ("manual_seed", "seed", "set_rng_state", "get_rng_state"):
        original: Any = getattr(torch.random, name)

        def seed(*args: Any, original: Any = original, name: str = name) -> Any:
            if active():
                recorder.fail(
                    f"the forward calls torch.{name}, and a graph cannot hold the state of random numbers"
                )
            return original(*args)

        for module in (torch, torch.random):
            stack.enter_context(_replaced(module, name, seed))
