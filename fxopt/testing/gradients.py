"""The gradients that reach the inputs and weights of a module; a graph with right outputs may still cut them."""

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
"""Largest accepted ratio of errors, gradients ÷ outputs: gradients pass through each operation twice."""

PARAMETER = "the parameter "


@dataclasses.dataclass(frozen=True)
class Gradients:
    """Gradients of one call of a module.

    Attributes:
        call: the arguments of the call.
        arrive: for each output that is a tensor, whether it requires gradients.
        found: for each floating input and trained parameter, its value and its gradient; zeros if no gradient arrives.
    """

    call: Call
    arrive: dict[str, bool]
    found: dict[str, tuple[Tensor, Tensor]]

    def expect_of(self, module: nn.Module, error: float, where: str = "") -> None:
        """Raise `AssertionError` if the gradients of another module differ; `error` is the error of its outputs.

        Differences are relative to the largest value of the expected gradient, or to 1 if all are smaller. A graph that
        refuses calls with gradients, because it was captured without them, is not compared.
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
            # New weights of a pass receive gradients of old ones: layers with new weights are skipped, and below also
            # folded weights, which receive no gradient at all.
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
    """Compute the gradients of a scalar to which every output contributes; `None` for a module without a backward."""
    try:
        return _gradients(module, call)
    except Exception:  # autograd may raise anything, such as for a saved value that was written in place
        return None


def trained_place(module: nn.Module, call: Call) -> str:
    """Find an output that requires gradients while the module has trainable weights; empty if there is none."""
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
        return leaf * 1  # the module may write into it, but autograd forbids writes into a leaf

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
    """Record gradients in a block; buffers are copies there, because a buffer written under autograd keeps an autograd graph."""
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
    """A scalar to which each value contributes differently; the plain sum of some outputs, such as softmax, is constant."""
    values = (torch.view_as_real(output.resolve_conj()) if output.is_complex() else output).double()
    return (values / _size(values.detach())).sin().sum()


def _size(values: Tensor) -> float:
    """The largest finite value, at least 1."""
    finite = values[values.isfinite()].abs()
    return max(1.0, float(finite.max())) if finite.numel() else 1.0
