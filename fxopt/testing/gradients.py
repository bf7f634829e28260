"""The gradients that reach the inputs and weights of a module: where a graph cuts them, its outputs are right all the same."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from fxopt.errors import GuardError
from fxopt.outputs import leaves, mapped, plain, restored, same_bits
from fxopt.testing.observations import Call
from fxopt.torch_internals import buffers_of

FARTHER = 100
"""Gradients may be this many times farther off than outputs: they go through each step twice."""


@dataclasses.dataclass(frozen=True)
class Gradients:
    """Gradients of one call of a module.

    Attributes:
        call: its arguments.
        arrive: for each output that is a tensor, whether it has gradients to give.
        inputs: the gradient of each floating input, zeros where none arrives.
        weights: each parameter that is trained, and its gradient, by name.
    """

    call: Call
    arrive: dict[str, bool]
    inputs: list[Tensor]
    weights: dict[str, tuple[Tensor, Tensor]]

    def expect_of(self, module: nn.Module, error: float, where: str = "") -> None:
        """Raise `AssertionError` where those of another module differ, whose outputs are off by an error.

        They are compared by the largest of an input, or by 1 where all are smaller. A graph that was captured for calls
        without gradients, and refuses others, is not asked.
        """
        try:
            actual = _gradients(module, self.call)
        except GuardError:
            return
        except Exception as raised:  # whatever the module raises under autograd
            raise AssertionError(f"{where}it has no backward, unlike the original: {raised}") from raised
        for place, arrives in self.arrive.items():
            if actual.arrive.get(place) is not arrives:
                word = "no gradients" if arrives else "gradients"
                raise AssertionError(f"{where}{place} gives {word}, unlike that of the original")
        sides = zip(self.inputs, actual.inputs, strict=True)
        pairs = {f"floating input {number}": each for number, each in enumerate(sides)}
        # Where a pass has made weights of its own, part of the gradients goes there.
        same = actual.weights.keys() == self.weights.keys()
        for name, (weight, expected) in self.weights.items() if same else ():
            its, found = actual.weights[name]
            if same_bits(weight, its):
                pairs[f"the parameter {name}"] = expected, found
        for of, (expected, found) in pairs.items():
            off = (expected - found).abs()[(expected != found) & ~(expected.isnan() & found.isnan())]
            if off.numel() and not float(off.max()) <= FARTHER * error * _size(expected):
                raise AssertionError(f"{where}the gradient of {of} is {float(off.max()):.3g} off")


def gradients_of(module: nn.Module, call: Call) -> Gradients | None:
    """The gradients of a number to which every output contributes; `None` for a module without a backward."""
    try:
        return _gradients(module, call)
    except Exception:  # whatever autograd raises, such as for what was written after it had been read
        return None


def trained_place(module: nn.Module, call: Call) -> str:
    """An output through which training would change the weights of a module; empty where there is none."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return ""
    given = call.fresh()
    with restored(module, dict(module.named_buffers())), torch.enable_grad(), torch.random.fork_rng():
        try:
            found = leaves(module(*given.args, **given.kwargs))
        except Exception:  # as above
            return ""
        return next(
            (place for place, value in found if isinstance(value, Tensor) and value.requires_grad), ""
        )


def _gradients(module: nn.Module, call: Call) -> Gradients:
    inputs: list[Tensor] = []

    def followed(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor.detach().clone()
        inputs.append(tensor.detach().clone().requires_grad_())
        return inputs[-1] * 1  # the module may write into it, which it may not into a leaf

    args, kwargs = mapped((list(call.args), call.kwargs), followed)
    parts = list(module.modules())
    with restored(module, dict(module.named_buffers())), torch.enable_grad(), torch.random.fork_rng():
        for part, copies in zip(parts, copy.deepcopy([buffers_of(part) for part in parts]), strict=True):
            buffers_of(part).update(copies)  # what is written under autograd holds its graph from then on
        torch.manual_seed(0)
        found = dict(leaves(module(*args, **kwargs)))
        outputs = {place: value for place, value in found.items() if isinstance(value, Tensor)}
        terms = [_term(value) for value in outputs.values() if value.requires_grad]
        weights = {name: each for name, each in module.named_parameters() if each.requires_grad}
        wanted = [*inputs, *weights.values()]
        given: tuple[Any, ...] = (None,) * len(wanted)
        if wanted and terms:
            given = torch.autograd.grad(torch.stack(terms).sum(), wanted, allow_unused=True)
        found_for = [
            torch.zeros_like(x) if grad is None else plain(grad)
            for x, grad in zip(wanted, given, strict=True)
        ]
    return Gradients(
        call,
        {place: value.requires_grad for place, value in outputs.items()},
        found_for[: len(inputs)],
        {
            name: (weight.detach(), grad)
            for (name, weight), grad in zip(weights.items(), found_for[len(inputs) :], strict=True)
        },
    )


def _term(output: Tensor) -> Tensor:
    """A number that each value moves by another amount: the sum of some outputs, such as of softmax, is constant."""
    values = (torch.view_as_real(output.resolve_conj()) if output.is_complex() else output).double()
    return (values / _size(values.detach())).sin().sum()


def _size(values: Tensor) -> float:
    """The largest finite value, at least 1."""
    finite = values[values.isfinite()].abs()
    return max(1.0, float(finite.max())) if finite.numel() else 1.0
