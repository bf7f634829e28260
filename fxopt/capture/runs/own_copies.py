"""Copies of a model, its graph and inputs, to run them without side effects on the user's objects."""

from __future__ import annotations

import contextvars
import copy
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fxopt import outputs
from fxopt.capture.capture_internals import make_subclass
from fxopt.capture.fakes.fake_model import Written
from fxopt.capture.fakes.model_copy import deepcopy_with_closures
from fxopt.capture.recording.random_state import PythonRandomState
from fxopt.capture.recording.request import Request
from fxopt.capture.runtime.input_guard import InputGuard
from fxopt.capture.runtime.traced_module import TracedModule
from fxopt.objects import tensors_in
from fxopt.torch_internals import REGISTRIES, buffers_of, storage_identity

T = TypeVar("T")


class ComparisonCopy:
    """A copy of the model or its graph to run in a comparison; it shares only the parameters that are not `written`."""

    def __init__(self, module: torch.nn.Module, written: Written) -> None:
        self.module = (
            copy_graph(module, written) if isinstance(module, TracedModule) else copy_model(module, written)
        )
        self._context = contextvars.copy_context()
        self._outside = [(tensor, tensor.detach().clone()) for tensor in written.outside]

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function that runs the module; during the call, written tensors outside have this copy's values."""
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
    """Copy a model with its buffers and Python state; share the memory of parameters that are not `written`."""
    copied: torch.nn.Module = deepcopy_with_closures(model, _memo(model, written))
    copies = dict(copied.named_modules())
    for name, module in model.named_modules():
        # A copied GraphModule registers tensors that are plain attributes as buffers.
        for buffer in {*buffers_of(copies[name]).keys()} - {
            *buffers_of(module).keys()
        }:  # lists, in torch.jit
            copies[name].__dict__[buffer] = buffers_of(copies[name]).pop(buffer)
    return copied


def copy_graph(traced: TracedModule, written: Written) -> TracedModule:
    """Copy a graph module with its layers and buffers; share its nodes, and the parameters that are not `written`."""
    memo = _memo(traced, written)
    memo |= {id(module): module for module in traced.modules() if isinstance(module, InputGuard)}
    copied: TracedModule = object.__new__(type(traced))
    memo[id(traced)] = copied
    copied.__dict__.update(traced.__dict__)
    copied.__dict__.pop("_containers", None)
    for registry in REGISTRIES[:3]:
        copied.__dict__[registry] = deepcopy_with_closures(traced.__dict__[registry], memo)
    return copied


@dataclasses.dataclass(frozen=True)
class Examples:
    """A copy of the example inputs by name, and the leaf tensors of those that require gradients."""

    values: dict[str, Any]
    leaves: list[torch.Tensor]


def copy_inputs(inputs: dict[str, Any]) -> Examples:
    """Copy the inputs into new memory, with the offsets, strides and overlaps of the originals."""
    memo: dict[int, Any] = {}
    leaves = []
    storages: dict[int, torch.UntypedStorage] = {}
    for key, tensor in {id(tensor): tensor for tensor in tensors_in(inputs)}.items():
        copied = _in_own_storage(tensor.detach(), storages) if _is_plain(tensor) else tensor.detach().clone()
        if tensor.requires_grad:
            leaves.append(copied.requires_grad_())
            # An in-place write into a leaf is an error; an input that is not a leaf accepts it.
            copied = copied if tensor.is_leaf else copied.view_as(copied) * 1
        memo[key] = copied
    return Examples(outputs.copied(inputs, memo), leaves)


class RepeatedRandomness:
    """The states of all random generators of the process, so that each run starts from the same states."""

    def __init__(self, request: Request) -> None:
        devices = {t.device for t in request.tensors() if t.device.type not in ("cpu", "meta")}
        self._python = PythonRandomState()
        self._cpu = torch.get_rng_state()
        self._others = {d: torch.get_device_module(d).get_rng_state(d) for d in devices}

    def rewind(self) -> None:
        """Reset all generators to the saved states."""
        self._python.take_back()
        torch.set_rng_state(self._cpu)
        for device, state in self._others.items():
            torch.get_device_module(device).set_rng_state(state, device)

    def were_used(self) -> bool:
        """Tell whether a run drew from one of torch's generators."""
        return not torch.equal(self._cpu, torch.get_rng_state()) or any(
            not torch.equal(state, torch.get_device_module(device).get_rng_state(device))
            for device, state in self._others.items()
        )


def _memo(module: torch.nn.Module, written: Written) -> dict[int, Any]:
    memo: dict[int, Any] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) not in memo:
            memo[id(parameter)] = _alias(parameter, name in written.parameters or parameter.is_inference())
    for part in module.modules():
        for value in (*part.__dict__.values(), *buffers_of(part).values()):
            if isinstance(value, torch.Tensor) and id(value) not in memo:
                memo[id(value)] = value.detach().clone().requires_grad_(value.requires_grad)
    return memo


def _alias(parameter: torch.Tensor, is_written: bool) -> torch.Tensor:
    """Copy a parameter with its attributes and its `grad` field; share its memory unless `is_written`."""
    data = parameter.detach().clone() if is_written else parameter.detach()
    if type(data) is not torch.Tensor:
        return data.requires_grad_(parameter.requires_grad)
    alias: Any = make_subclass(type(parameter), data, parameter.requires_grad)
    alias.__dict__.update(copy.copy(parameter.__dict__))
    alias.grad = parameter.grad
    return alias  # type: ignore[no-any-return]


def _is_plain(tensor: torch.Tensor) -> bool:
    lazy = tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not lazy


def _in_own_storage(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    """Copy a tensor to its offset in a new storage of the same size. The rest, perhaps of a large file, is not read."""
    storage = tensor.untyped_storage()
    if storage_identity(storage) not in storages:
        storages[storage_identity(storage)] = torch.UntypedStorage(storage.nbytes(), device=storage.device)
    copied = tensor.new_empty(0)
    copied.set_(storages[storage_identity(storage)], tensor.storage_offset(), tensor.shape, tensor.stride())
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    span = last + 1 if tensor.numel() else 0
    copied.as_strided((span,), (1,)).copy_(tensor.as_strided((span,), (1,)))
    return copied
