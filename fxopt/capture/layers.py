"""Running layers on fake tensors, each distinct one once.

A model repeats its layers: the same `nn.Linear` on inputs of the same shape, dozens of times. What comes out, as
far as a fake tensor knows, is the same each time, and costs several operator dispatches on symbolic sizes to
find out; so it is remembered, and later calls make the output tensor alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

_PLAIN = (int, float, str, bool, torch.dtype, torch.device, type(None))


@dataclasses.dataclass(frozen=True)
class _Output:
    """The metadata of a layer's output."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


class LayerRunner:
    """Runs layers of one capture (one ShapeEnv)."""

    def __init__(self) -> None:
        self._outputs: dict[Any, _Output] = {}

    def run(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `module(*args, **kwargs)` returns on fake tensors."""
        key = _key(module, args, kwargs)
        if key is None:
            return module._call_impl(*args, **kwargs)
        (input,) = args
        known = self._outputs.get(key)
        if known is not None:
            return _make(known, input, module)
        result = module._call_impl(input)
        if isinstance(result, torch.Tensor) and _owns_memory(result, input):
            self._outputs[key] = _Output(
                tuple(result.shape), tuple(result.stride()), result.dtype, result.device, result.requires_grad
            )
        return result


def _key(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """All that the output's metadata depends on; None where that is not sure."""
    if kwargs or len(args) != 1 or not isinstance(args[0], torch.Tensor):
        return None
    if module._modules or _has_hooks(module) or not type(module).__module__.startswith("torch.nn.modules"):
        return None
    if torch.is_autocast_enabled(args[0].device.type) or torch.is_inference_mode_enabled():
        return None
    settings = []
    for name, value in module.__dict__.items():
        if not name.startswith("_"):
            if not isinstance(value, _PLAIN) and not (
                isinstance(value, tuple) and all(isinstance(item, _PLAIN) for item in value)
            ):
                return None
            settings.append((name, value))
    tensors = [
        (name, None if t is None else _metadata(t))
        for registry in (module._parameters, module._buffers)
        for name, t in registry.items()
    ]
    return type(module), tuple(settings), tuple(tensors), _metadata(args[0]), torch.is_grad_enabled()


def _metadata(tensor: torch.Tensor) -> tuple[Any, ...]:
    sizes = tuple(_expression(size) for size in tensor.shape)
    strides = tuple(_expression(stride) for stride in tensor.stride())
    return sizes, strides, tensor.dtype, tensor.device, tensor.requires_grad


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _has_hooks(module: torch.nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _owns_memory(result: torch.Tensor, input: torch.Tensor) -> bool:
    return result.untyped_storage()._cdata != input.untyped_storage()._cdata and result.storage_offset() == 0


def _make(known: _Output, input: torch.Tensor, module: torch.nn.Module) -> torch.Tensor:
    if not known.requires_grad:
        return torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device=known.device)
    sources = (input, *module.parameters())
    source = next(tensor for tensor in sources if tensor.requires_grad)
    made: torch.Tensor = _Made.apply(source, known)  # type: ignore[no-untyped-call]
    return made


class _Made(torch.autograd.Function):
    """A tensor that autograd knows to depend on another, as the layer's output does."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, known: _Output) -> torch.Tensor:
        ctx.save_for_backward(source)
        return torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device=known.device)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # Gradients that the forward itself asks for have the shape of the source, and no values.
        return torch.zeros_like(ctx.saved_tensors[0]), None
