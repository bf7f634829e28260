"""The gradients that reach the inputs and weights of a module: where a graph cuts them, its outputs are right all the same."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fxopt.errors import GuardError
from fxopt.outputs import leaves, mapped, plain, restored, same_bits
from fxopt.testing.observations import Call
from fxopt.torch_internals import buffers_of

FARTHER = 100
"""Gradients may be this many times farther off than outputs: they go through each step twice."""

PARAMETER = "the parameter "


@dataclasses.dataclass(frozen=True)
class Gradients:
    """Gradients of one call of a module.

    Attributes:
        call: its arguments.
        arrive: for each output that is a tensor, whether it has gradients to give.
        found: each floating input and each parameter that is trained, and its gradient, zeros where none arrives.
    """

    call: Call
    arrive: dict[str, bool]
    found: dict[str, tuple[Tensor, Tensor]]

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
        same = actual.found.keys() == self.found.keys()
        new = {
            _layer(n)
            for n, (value, _) in self.found.items()
            if same and not same_bits(value, actual.found[n][0])
        }
        for name, (value, expected) in self.found.items():
            # Where a pass has made weights of its own, part of the gradients goes there: of those of their layers, and all of
            # a weight that was folded.
            if name.startswith(PARAMETER) and (not same or _layer(name) in new):
                continue
            its, found = actual.found[name]
            if name.startswith(PARAMETER) and new and not found.any():
                continue
            off = (expected - found).abs()[(expected != found) & ~(expected.isnan() & found.isnan())]
            far = off.numel() and not float(off.max()) <= FARTHER * error * _size(expected)
            if far and same_bits(value, its):
                raise AssertionError(f"{where}the gradient of {name} is {float(off.max()):.3g} off")


def _layer(name: str) -> str:
    """The layer that holds a parameter."""
    return name.rpartition(".")[0]


def gradients_of(module: nn.Module, call: Call) -> Gradients | None:
    """The gradients of a number to which every output contributes; `None` for a module without a backward."""
    try:
        return _gradients(module, call)
    except Exception:  # whatever autograd raises, such as for what was written after it had been read
        return None


def trained_place(module: nn.Module, call: Call) -> str:
    """An output through which training would change the weights of a module; empty where there is none."""
    if any(parameter.requires_grad for parameter in module.parameters()):
        with _recording(module), contextlib.suppress(Exception):  # as above
            return next(
                (place for place, value in _outputs(module, call.fresh()).items() if value.requires_grad), ""
            )
    return ""


def _gradients(module: nn.Module, call: Call) -> Gradients:
    inputs: dict[str, Tensor] = {}

    def followed(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor.detach().clone()
        leaf = inputs[f"floating input {len(inputs)}"] = tensor.detach().clone().requires_grad_()
        return leaf * 1  # the module may write into it, which it may not into a leaf

    with _recording(module):
        outputs = _outputs(module, Call(*mapped((call.args, call.kwargs), followed)))
        terms = [_term(value) for value in outputs.values() if value.requires_grad]
        wanted = inputs | {PARAMETER + name: p for name, p in module.named_parameters() if p.requires_grad}
        given = [None] * len(wanted)
        if wanted and terms:
            given = torch.autograd.grad(torch.stack(terms).sum(), list(wanted.values()), allow_unused=True)  # type: ignore[assignment]
    found = {
        name: (value.detach(), torch.zeros_like(value) if grad is None else plain(grad))
        for (name, value), grad in zip(wanted.items(), given, strict=True)
    }
    return Gradients(call, {place: value.requires_grad for place, value in outputs.items()}, found)


@contextlib.contextmanager
def _recording(module: nn.Module) -> Iterator[None]:
    """A block in which gradients are recorded; what is written under autograd holds its graph, so buffers are copies there."""
    parts = list(module.modules())
    with restored(module, dict(module.named_buffers())), torch.enable_grad(), torch.random.fork_rng():
        for part, copies in zip(parts, copy.deepcopy([buffers_of(part) for part in parts]), strict=True):
            buffers_of(part).update(copies)
        torch.manual_seed(0)
        yield


def _outputs(module: nn.Module, call: Call) -> dict[str, Tensor]:
    given = module(*call.args, **call.kwargs)
    return {place: value for place, value in leaves(given) if isinstance(value, Tensor)}


def _term(output: Tensor) -> Tensor:
    """A number that each value moves by another amount: the sum of some outputs, such as of softmax, is constant."""
    values = (torch.view_as_real(output.resolve_conj()) if output.is_complex() else output).double()
    return (values / _size(values.detach())).sin().sum()


def _size(values: Tensor) -> float:
    """The largest finite value, at least 1."""
    finite = values[values.isfinite()].abs()
    return max(1.0, float(finite.max())) if finite.numel() else 1.0
