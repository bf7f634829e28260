"""Activation checkpointing: functions run by `torch.utils.checkpoint` are recorded as if they were called directly."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils.checkpoint as checkpointing

from fxopt.capture.capture_internals import CHECKPOINT
from fxopt.capture.patches.replaced import Patches
from fxopt.capture.recording.recorder import Recorder
from fxopt.objects import tensors_in


def patch_checkpointing(patch: Patches, refuse: Callable[[str], None]) -> None:
    """Record the function that a checkpoint with `use_reentrant=False` runs: values and gradients are the same."""

    @patch(*CHECKPOINT)
    def around_forward(original: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        bound = inspect.signature(original).bind(*args, **kwargs).arguments
        if bound.get("context_fn", checkpointing.noop_context_fn) is not checkpointing.noop_context_fn:
            refuse("the forward gives torch.utils.checkpoint a context_fn, which a graph cannot hold")
        _warn_of_activations()
        yield


def reentrant_checkpoint(recorder: Recorder, function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Call the function of a checkpoint with `use_reentrant=True`: it has gradients only if a tensor argument requires them."""
    nested = [arg for arg in args if not isinstance(arg, torch.Tensor)]
    if any(tensor.requires_grad for tensor in tensors_in(nested)):
        recorder.fail(
            "the forward calls torch.utils.checkpoint with use_reentrant=True on tensors in containers, whose "
            "gradients then differ from those of a graph: pass use_reentrant=False"
        )
    if not torch.is_grad_enabled():  # not a read by the model
        recorder.queries.note_mode("grad", False)
        return function(*args)
    recorder.queries.note_gradients()
    _warn_of_activations()
    if not any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
        with torch.no_grad():
            return function(*args)
    modes_read = recorder.queries.modes_read
    read = modes_read.pop("grad", None)
    result = function(*args)
    if "grad" in modes_read:
        recorder.fail(
            "the function that torch.utils.checkpoint calls with use_reentrant=True reads whether gradients are on, which "
            "differs between its forward and its backward: pass use_reentrant=False"
        )
    modes_read |= {} if read is None else {"grad": read}
    for part in result if isinstance(result, tuple) else (result,):
        is_tensor = isinstance(part, torch.Tensor)
        takes_gradients = [tensor.requires_grad for tensor in tensors_in(part) if tensor.is_floating_point()]
        # torch gives gradients to each tensor that is returned, detached or not, and to none in a container.
        if any(takes != is_tensor for takes in takes_gradients):
            recorder.fail(
                "the function that torch.utils.checkpoint calls with use_reentrant=True returns a tensor without gradients, "
                "or one in a container, whose gradients then differ from those of a graph: pass use_reentrant=False"
            )
    return result


def _warn_of_activations() -> None:
    warnings.warn(
        "activation checkpointing is not captured: the gradients of the graph are the same, "
        "but it keeps the activations that checkpointing would compute again.",
        stacklevel=2,
    )
