"""Kernels of operators that torch, on fakes, takes apart in a way that fixes a size, or not at all."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._C import DispatchKey
from torch.nn.modules.batchnorm import _BatchNorm

from fxopt.capture.patches.replaced import Patches

aten = torch.ops.aten

_RECURRENT = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
_KEYS = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)


def patch_kernels(patch: Patches) -> None:
    """Replace these kernels in the calls of the forward."""
    for operator in _RECURRENT:
        step_by_step = operator.py_kernels[DispatchKey.Autograd]
        _replace(patch, operator, functools.partial(_first_step, step_by_step), step_by_step)
    in_parts = functools.partial(aten.cdist.default._op_dk, DispatchKey.CompositeImplicitAutograd)
    _replace(patch, aten.cdist.default, _distances, in_parts)
    _cumulative_average(patch)


def _replace(patch: Patches, operator: Any, kernel: Any, original: Any) -> None:
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (kernel if patch.in_forward() else original)(*args, **kwargs)

    patch.callback(operator._dispatch_cache.clear)  # where torch keeps the kernels that it has found
    patch.set(operator, "py_kernels", {**operator.py_kernels, **dict.fromkeys(_KEYS, chosen)})
    operator._dispatch_cache.clear()


def _cumulative_average(patch: Patches) -> None:
    """A batch normalisation that is a layer averages by the number in its `num_batches_tracked`, which no fake has: any will do."""
    forward = _BatchNorm.forward

    def averaged(self: Any, input: torch.Tensor) -> torch.Tensor:
        if self.momentum is not None or patch.active() or not patch.in_forward():
            return forward(self, input)
        self.momentum = 0.0
        try:
            return forward(self, input)
        finally:
            self.momentum = None

    patch.set(_BatchNorm, "forward", averaged)


def _first_step(
    step_by_step: Any, input: torch.Tensor, hx: Any, params: Any, *options: Any
) -> tuple[torch.Tensor, ...]:
    """A recurrent layer: torch makes the calls of each step, and so fixes how many there are. All give what the first one gives."""
    time = 1 if options[-1] else 0  # `batch_first`
    first, *state = step_by_step(input.narrow(time, 0, 1), hx, params, *options)
    first = first.transpose(0, time)
    steps = first.expand(input.shape[time], *first.shape[1:]).clone(memory_format=torch.contiguous_format)
    return (steps.transpose(0, time), *state)


def _distances(x1: torch.Tensor, x2: torch.Tensor, p: float = 2.0, mode: int | None = None) -> torch.Tensor:
    """`cdist`, whose code in C++ knows no free sizes."""
    made: torch.Tensor = aten._cdist_forward(x1, x2, p, mode)
    return made
