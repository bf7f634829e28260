"""Copies of a model, of its graph and of inputs, which can be run without a trace in those of the user."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from fxopt.capture.fakes.fake_model import Written
from fxopt.capture.fakes.model_copy import deepcopy_with_closures
from fxopt.capture.recording.random_state import PythonRandomState
from fxopt.capture.recording.request import Request
from fxopt.capture.runtime.input_guard import InputGuard
from fxopt.capture.runtime.traced_module import TracedModule
from fxopt.objects import tensors_in

T = TypeVar("T")


class Twin:
    """A copy of the model or of its graph that is run for a comparison.

    It shares the memory of parameters but for those `written`, and has everything else for itself: buffers, Python state,
    closures, context variables, and what it writes into tensors from outside of the model.
    """

    def __init__(self, module: torch.nn.Module, written: Written) -> None:
        self.module = (
            copy_graph(module, written) if isinstance(module, TracedModule) else copy_model(module, written)
        )
        self._context = contextvars.copy_context()
        self._outside = [(tensor, tensor.detach().clone()) for tensor in written.outside]

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function, in which the module runs."""
        found = [tensor.detach().clone() for tensor, _ in self._outside]
        try:
            for tensor, own in self._outside:
                tensor.data.copy_(own)
            return self._context.run(function, *args)
        finally:
            for (tensor, own), before in zip(self._outside, found, strict=True):
                own.copy_(tensor.detach())
                tensor.data.copy_(before)


def copy_model(model: torch.nn.Module, written: Written) -> torch.nn.Module:
    """The model with buffers and Python state of its own, and the memory of its parameters but for those written."""
    copied: torch.nn.Module = deepcopy_with_closures(model, _memo(model, written))
    copies = dict(copied.named_modules())
    for name, module in model.named_modules():
        # A copied GraphModule takes tensors that are plain attributes for buffers.
        for buffer in {*copies[name]._buffers.keys()} - {*module._buffers.keys()}:  # lists, in torch.jit
            copies[name].__dict__[buffer] = copies[name]._buffers.pop(buffer)
    return copied


def copy_graph(traced: TracedModule, written: Written) -> TracedModule:
    """The graph module with layers and buffers of its own, in the same way; its nodes are shared."""
    memo = _memo(traced, written)
    memo |= {id(module): module for module in traced.modules() if isinstance(module, InputGuard)}
    copied: TracedModule = object.__new__(type(traced))
    memo[id(traced)] = copied
    copied.__dict__.update(traced.__dict__)
    copied.__dict__.pop("_containers", None)
    for registry in ("_parameters", "_buffers", "_modules"):
        copied.__dict__[registry] = deepcopy_with_closures(traced.__dict__[registry], memo)
    return copied


@dataclasses.dataclass(frozen=True)
class Examples:
    """A copy of the example inputs: by name, and the leaves of those that take gradients."""

    values: dict[str, Any]
    leaves: list[torch.Tensor]


def copy_inputs(inputs: dict[str, Any]) -> Examples:
    """The inputs with memory of their own, in which tensors lie and overlap as they do in the originals."""
    tensors = {id(tensor): tensor for tensor in tensors_in(inputs)}
    owners: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors.values():
        if _is_plain(tensor):
            owners.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    memo: dict[int, Any] = {}
    leaves = []
    for sharing in owners.values():
        memo |= zip(map(id, sharing), _copy_memory(sharing), strict=True)
    for key, tensor in tensors.items():
        copied = memo.get(key)
        if copied is None:
            copied = tensor.detach().clone()
        if tensor.requires_grad:
            copied.requires_grad_()
            leaves.append(copied)
            # A leaf cannot be written; an input that is none can.
            copied = copied if tensor.is_leaf else copied.view_as(copied) * 1
        memo[key] = copied
    return Examples(copy.deepcopy(inputs, memo), leaves)


class RepeatedRandomness:
    """The states of all random generators of the process: each run begins with those that were found."""

    def __init__(self, request: Request) -> None:
        tensors = [*request.model.parameters(), *request.model.buffers(), *tensors_in(request.inputs)]
        self._devices = {t.device for t in tensors if t.device.type not in ("cpu", "meta")}
        self._python = PythonRandomState()
        self._cpu = torch.get_rng_state()
        self._others = {d: torch.get_device_module(d).get_rng_state(d) for d in self._devices}

    def rewind(self) -> None:
        """Give all generators the states that were found."""
        self._python.take_back()
        torch.set_rng_state(self._cpu)
        for device, state in self._others.items():
            torch.get_device_module(device).set_rng_state(state, device)

    def were_used(self) -> bool:
        """Tell whether a run has drawn from one of torch's."""
        return not torch.equal(self._cpu, torch.get_rng_state()) or any(
            not torch.equal(state, torch.get_device_module(device).get_rng_state(device))
            for device, state in self._others.items()
        )

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Rewind at the end of the block."""
        try:
            yield
        finally:
            self.rewind()


def _memo(module: torch.nn.Module, written: Written) -> dict[int, Any]:
    memo: dict[int, Any] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) not in memo:
            memo[id(parameter)] = _alias(parameter, name in written.parameters or parameter.is_inference())
    for part in module.modules():
        for value in (*part.__dict__.values(), *part._buffers.values()):
            if isinstance(value, torch.Tensor) and id(value) not in memo:
                memo[id(value)] = value.detach().clone().requires_grad_(value.requires_grad)
    return memo


def _alias(parameter: torch.Tensor, is_written: bool) -> torch.Tensor:
    """A parameter with attributes and a gradient of its own, and the memory of `parameter` unless that is written."""
    data = parameter.detach().clone() if is_written else parameter.detach()
    if type(data) is not torch.Tensor:
        return data.requires_grad_(parameter.requires_grad)
    alias: Any = torch.Tensor._make_subclass(type(parameter), data, parameter.requires_grad)
    alias.__dict__.update(copy.copy(parameter.__dict__))
    alias.grad = parameter.grad
    return alias  # type: ignore[no-any-return]


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _copy_memory(sharing: list[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors of one storage, with a copy of the part of it in which they lie."""
    starts = [tensor.storage_offset() for tensor in sharing]
    ends = [
        start + 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
        for t, start in zip(sharing, starts, strict=True)
        if t.numel()
    ]
    first = sharing[0].detach()
    if not ends or len({tensor.dtype for tensor in sharing}) > 1:
        return [tensor.detach().clone() for tensor in sharing]
    # The offset stays what it is, as a forward may read it.
    whole = first.as_strided((max(ends),), (1,), 0)
    memory = torch.empty_like(whole)
    low = min(start for t, start in zip(sharing, starts, strict=True) if t.numel())
    memory[low:].copy_(whole[low:])
    return [memory.as_strided(t.shape, t.stride(), t.storage_offset()) for t in sharing]
