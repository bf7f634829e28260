"""Patches for functions of torch that report no calls, or only some, to a `TorchFunctionMode`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.function
import torch.autograd.graph
import torch.nn.attention

from fxopt.capture.capture_internals import (
    SDPA_KERNEL,
    STANCE,
    TRANSFORMS,
    VJP,
    DynamoStance,
    parse_to,
    push_saved_tensors_hooks,
)
from fxopt.capture.fakes.call_cache import CallCache
from fxopt.capture.fakes.fake_model import FakeModel
from fxopt.capture.fakes.unusable_number import UnusableNumber
from fxopt.capture.nodes.source_location import is_model_code, makes_calls
from fxopt.capture.patches.autograd_functions import patch_apply
from fxopt.capture.patches.checkpoints import patch_checkpointing
from fxopt.capture.patches.replaced import Patches
from fxopt.capture.recording.mode_switches import ModeSwitches
from fxopt.capture.recording.property_reads import PropertyReads
from fxopt.capture.recording.recorder import Recorder
from fxopt.capture.runtime import modes
from fxopt.memory import storage_of
from fxopt.torch_internals import FakeTensor

_MODES = {
    "is_grad_enabled": "grad",
    "is_autocast_enabled": "autocast",
    "is_inference_mode_enabled": "inference_mode",
}
# These modules call Dynamo unless it is running; then they call their operator, which reports to a mode.
_CALL_DYNAMO = ("torch._higher_order_ops", "torch.nn.attention.flex_attention")


def patch_torch(patch: Patches, recorder: Recorder) -> None:
    """Report to `recorder` the calls that torch does not report."""
    _inference_mode(patch, recorder.switches)
    _sdpa_kernel(patch, recorder.switches, recorder.memo)
    patch_apply(patch, recorder)
    _compilation(patch)
    _transforms(patch, recorder.below_transforms)
    patch_checkpointing(patch, recorder.fail)
    _conversions(patch)
    _assignments(patch, recorder.shell)
    _queries(patch, recorder.queries)
    _lists(patch)
    _attention(patch)
    _saved_tensors(patch, recorder)
    _generator_states(patch, recorder)
    _refusals(patch, recorder.fail)


def _inference_mode(patch: Patches, switches: ModeSwitches) -> None:
    @patch(torch.inference_mode, "__enter__")
    def enter(original: Any, self: Any) -> None:
        original(self)
        switches.enter(self, modes.enter_inference_mode, self.mode)

    @patch(torch.inference_mode, "__exit__")
    def leave(original: Any, self: Any, *error: Any) -> None:
        original(self, *error)
        switches.leave(self)


def _sdpa_kernel(patch: Patches, switches: ModeSwitches, memo: CallCache) -> None:
    @patch(*SDPA_KERNEL)
    def switch(original: Any, backends: Any, set_priority: bool = False) -> None:
        original(backends, set_priority)
        memo.forget()  # the backend determines the strides of attention outputs
        # Called twice from the frame of one context manager: to enter and to leave.
        block = sys._getframe(2)
        if switches.entered(block):
            switches.leave(block)
        else:
            switches.enter(block, modes.enter_sdpa_kernel, [b.name for b in backends], set_priority)


def _compilation(patch: Patches) -> None:
    """Keep Dynamo, which would capture by itself, from running: compiled parts of the model run in eager mode."""
    if DynamoStance is not None:
        patch.set(*STANCE, DynamoStance("force_eager"))

    @patch(torch, "compile")
    def leave_as_it_is(original: Any, model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(torch.compile, **options)
        if isinstance(model, torch.nn.Module | type):
            return model

        # A new function, as in torch, so that a `functools.wraps` of it refers to the model's function, not to itself.
        @functools.wraps(model)
        @makes_calls
        def compiled(*args: Any, **kwargs: Any) -> Any:
            return model(*args, **kwargs)

        return compiled

    @patch(torch.compiler, "is_dynamo_compiling")
    def is_dynamo_compiling(original: Any) -> bool:
        caller = sys._getframe(2).f_globals.get("__name__", "")
        return bool(original()) or caller.startswith(_CALL_DYNAMO)


def _transforms(patch: Patches, below: Callable[[], Any]) -> None:
    """Record `vmap`, `grad`, `jvp` and the other transforms of torch.func by their operators."""

    def recorded(call: Any, *args: Any, **kwargs: Any) -> Any:
        if not patch.active():
            return call(*args, **kwargs)
        with below():
            return call(*args, **kwargs)

    for owner, name in TRANSFORMS:
        patch(owner, name)(recorded)

    @patch(*VJP)
    def vjp(original: Any, *args: Any, **kwargs: Any) -> Any:
        result, backward, *aux = recorded(original, *args, **kwargs)
        return result, functools.partial(recorded, backward), *aux


def _conversions(patch: Patches) -> None:
    @patch(torch.nn.Module, "to")
    def to(original: Any, self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        device, dtype, _, memory_format = parse_to(*args, **kwargs)
        if memory_format is None and all(
            device in (None, t.device) and (dtype in (None, t.dtype) or not t.is_floating_point())
            for t in (*self.parameters(), *self.buffers())
        ):
            return self  # nothing to convert: the call would assign each parameter to itself
        return original(self, *args, **kwargs)


def _assignments(patch: Patches, shell: FakeModel) -> None:
    """Record the attributes to which the forward assigns."""

    @patch(torch.nn.Module, "__setattr__")
    def assign(original: Any, self: torch.nn.Module, name: str, value: Any) -> None:
        shell.note_assigned(self, name)
        original(self, name, value)


def _queries(patch: Patches, queries: PropertyReads) -> None:
    """Record the global modes that the model reads; the graph assumes their values."""
    for name, mode in _MODES.items():

        def ask(original: Any, *args: Any, mode: str = mode, **named: Any) -> bool:
            answer = bool(original(*args, **named))
            if is_model_code(sys._getframe(2).f_code.co_filename):
                queries.note_mode(mode, answer)
            return answer

        patch(torch, name)(ask)


def _lists(patch: Patches) -> None:
    """Return the same unbacked numbers each time that a tensor is listed, until it is written."""
    # Identity and version -> the tensor, kept alive, and the result of `tolist`.
    known: dict[tuple[int, int], Any] = {}

    @patch(FakeTensor, "tolist")
    def tolist(original: Any, self: Any) -> Any:
        if self.is_inference():
            return original(self)
        key = id(self), self._version
        if key not in known:
            known[key] = self, original(self)
        return _new_lists(known[key][1])


def _new_lists(listed: Any) -> Any:
    """Copy nested lists, which the forward may change; the numbers stay the same."""
    return list(map(_new_lists, listed)) if type(listed) is list else listed


def _attention(patch: Patches) -> None:
    """Convert a symbolic `is_causal` to the bool that attention requires, as `length > 1 and causal` may give one."""

    @patch(torch.nn.functional, "scaled_dot_product_attention")
    def attend(original: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("is_causal"), torch.SymBool):
            kwargs["is_causal"] = bool(kwargs["is_causal"])
        return original(*args, **kwargs)


def _saved_tensors(patch: Patches, recorder: Recorder) -> None:
    """Leave out hooks that return the saved tensors unchanged to autograd, as hooks do that move, count or print them.

    Subclasses, such as those of checkpointing and `save_on_cpu`, change no values and run unpatched.
    """
    hooks: Any = torch.autograd.graph.saved_tensors_hooks

    @patch(hooks, "__enter__")
    def enter(original: Any, self: Any) -> None:
        if type(self) is not hooks:
            original(self)
            return

        def packed(saved: torch.Tensor) -> torch.Tensor:
            given = self.unpack_hook(self.pack_hook(saved))
            if not (isinstance(given, torch.Tensor) and _is_same_memory(given, saved)):
                recorder.fail(
                    "the forward sets saved_tensors_hooks that change tensors, which a graph cannot hold"
                )
            return saved

        recorder.memo.forget()  # a cached call saves nothing
        if torch.is_grad_enabled():
            recorder.queries.note_gradients()  # gradients determine which tensors are saved
        else:
            recorder.queries.note_mode("grad", False)
        push_saved_tensors_hooks(packed, lambda saved: saved)


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    laid_out = one.shape == other.shape and one.stride() == other.stride()
    start = storage_of(one) == storage_of(other) and one.storage_offset() == other.storage_offset()
    return laid_out and start and (one.dtype, one.is_conj()) == (other.dtype, other.is_conj())


def _generator_states(patch: Patches, recorder: Recorder) -> None:
    """Allow restoring the state of torch's generator, as in `fork_rng`, if nothing was drawn since the state was read."""
    found: list[tuple[UnusableNumber, int]] = []

    def refuse() -> None:
        recorder.fail(
            "the forward uses torch.get_rng_state, and a graph cannot hold the state of its numbers"
        )

    def get(original: Any) -> UnusableNumber:
        found.append((UnusableNumber(refuse), recorder.fake_mode.drawn))
        return found[-1][0]

    def restore(original: Any, state: Any) -> None:
        if not any(state is one and drawn == recorder.fake_mode.drawn for one, drawn in found):
            refuse()

    for module in (torch, torch.random):
        patch(module, "get_rng_state")(get)
        patch(module, "set_rng_state")(restore)


def _refusals(patch: Patches, refuse: Callable[[str], None]) -> None:
    """Refuse changes that a graph cannot contain and would otherwise lose silently."""

    @patch(torch, "set_default_dtype")
    def set_default_dtype(original: Any, dtype: torch.dtype) -> None:
        if dtype != torch.get_default_dtype():
            refuse("the forward sets torch's default dtype, which a graph cannot hold. Give dtypes in calls")
        original(dtype)

    @patch(torch, "set_default_device")
    def set_default_device(original: Any, device: Any) -> None:
        if torch.device("cpu" if device is None else device) != torch.get_default_device():
            refuse(
                "the forward sets torch's default device, which a graph cannot hold. Give devices in calls"
            )

    for name in ("manual_seed", "seed"):

        def seed(original: Any, *args: Any, name: str = name) -> None:
            refuse(f"the forward calls torch.{name}, and a graph cannot hold the state of random numbers")

        for module in (torch, torch.random):
            patch(module, name)(seed)
