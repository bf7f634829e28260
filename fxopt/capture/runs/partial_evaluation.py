"""Partial evaluation: computes all nodes that depend only on sizes, constants and weights, and lists the remaining steps.

Two graphs with the same remaining steps compute the same from the same inputs, however they compute their constants.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import torch

from fxopt.capture.fakes.dynamic_shapes import SymbolicNumber
from fxopt.capture.nodes.comparison import is_device
from fxopt.capture.runs.run_result import RunResult
from fxopt.capture.runtime import modes
from fxopt.capture.runtime.input_specs import same_parts, same_value
from fxopt.effects import written_by
from fxopt.graph import called_module
from fxopt.memory import storage_of
from fxopt.objects import tensors_in
from fxopt.operators import is_torch_function
from fxopt.torch_internals import FakeTensor

# Calls that read dtype, device and sizes of the argument at this position, but not its numbers.
_READ_NO_NUMBERS = dict.fromkeys(
    ("new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like"), 0
)
_READ_NO_NUMBERS |= dict.fromkeys(("to", "type_as", "expand_as", "view_as", "reshape_as"), 1)
# Tensors with more numbers than this are not computed.
_MOST_NUMBERS = 2**25


@dataclasses.dataclass(frozen=True)
class _Result:
    """The result of a remaining step."""

    step: int


@dataclasses.dataclass(frozen=True)
class _Own:
    """A tensor or module of the model, by name."""

    name: str


@dataclasses.dataclass(frozen=True)
class _Step:
    op: str
    target: Any
    arguments: Any


class PartialEvaluation:
    """The evaluation of the graph of a run at the sizes of its example."""

    def __init__(self, run: RunResult) -> None:
        self._run, self._device = run, run.request.device()
        self._constants = {name: tensor.detach().clone() for name, tensor in run.constants.items()}
        model = run.request.model
        # In training, optimizer steps change the parameters between calls.
        trained = {id(p) for m in model.modules() if m.training for p in m.parameters(recurse=False)}
        weights = (each for each in model.named_parameters() if id(each[1]) not in trained)
        own = itertools.chain(weights, model.named_buffers())
        self._own = {name: tensor for name, tensor in own if name in run.unchanged}
        self._values: dict[torch.fx.Node, Any] = {}
        self._steps: list[_Step] = []
        # Whether a step writes into computed memory that others share: then nothing is known about the graph.
        self._spoilt = False
        with torch.no_grad():
            for node in run.graph.nodes:
                self._values[node] = self._value(node)

    def known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the value, at the end of the run, of a tensor that the run made or received; None if it is unknown."""
        node = self._run.made_by(tensor)
        value = self._values.get(node) if node is not None else self._run.originals.get(id(tensor))
        return value.detach().clone() if isinstance(value, torch.Tensor) and not self._spoilt else None

    def same(self, other: PartialEvaluation) -> bool:
        """Tell whether the same steps remain of both graphs."""
        return (
            not (self._spoilt or other._spoilt)
            and len(self._steps) == len(other._steps)
            and all(
                one.op == its.op and one.target == its.target and _same(one.arguments, its.arguments)
                for one, its in zip(self._steps, other._steps, strict=True)
            )
        )

    def _value(self, node: torch.fx.Node) -> Any:
        """Return the value of a node, or the step that computes it."""
        expected = node.meta.get("val")
        if isinstance(expected, SymbolicNumber) and expected.node.has_hint():
            return expected.node.hint
        if node.target == "size" and expected is None:  # a part of an expression of sizes
            of, dim = node.args
            if isinstance(of, torch.fx.Node) and (size := _hint(of.meta["val"].shape[dim])) >= 0:
                return size
        if node.op == "get_attr":
            name = str(node.target)
            return self._constants.get(name, self._own.get(name, _Own(name)))
        if is_device(node):
            return self._device
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self._values.__getitem__)
        written = written_by(node, called_module(self._run.request.model, node))
        if node.op in ("call_function", "call_method"):
            args, kwargs = _without_data(node, args, kwargs)
            if not _holds_results((args, kwargs)) and written is not None:
                computed = self._computed(node, args, kwargs)
                if computed is not NotImplemented:
                    return computed
        for each in written or ():
            if list(tensors_in([self._values[each]])):
                self._forget(each)
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self._values.__getitem__)
        return self._remaining(node, *_without_data(node, args, kwargs))

    def _forget(self, node: torch.fx.Node) -> None:
        """Treat a tensor that a step writes into as the result of a step; if others share its memory, nothing is known."""
        memory = {storage_of(tensor) for tensor in tensors_in([self._values[node]])}
        sharing = [
            n for n, v in self._values.items() if not memory.isdisjoint(map(storage_of, tensors_in([v])))
        ]
        if sharing != [node] or node.op == "get_attr" or not isinstance(self._values[node], torch.Tensor):
            self._spoilt = True
            return
        self._steps.append(_Step("constant", "", ((_copied(self._values[node]),), {})))
        self._values[node] = _Result(len(self._steps) - 1)

    def _computed(self, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
        """Return the value of a call of torch; NotImplemented if the call fails, is too large or may differ each time."""
        target: Any = node.target
        if node.op == "call_method":
            target = getattr(torch.Tensor, target)
        elif not is_torch_function(target) or _is_large(node.meta.get("val")):
            return NotImplemented
        state = torch.get_rng_state()
        try:
            with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
                value = target(*args, **kwargs)
                drawn = not torch.equal(torch.get_rng_state(), state)
        except Exception:
            return NotImplemented  # the call remains a step
        return value if not drawn and _is_as_expected(value, node.meta.get("val")) else NotImplemented

    def _remaining(self, node: torch.fx.Node, args: Any, kwargs: Any) -> _Result:
        if (
            node.target in (modes.leave, modes.set_grad_enabled)
            and isinstance(node.args[0], torch.fx.Node)
            and self._steps
            and args[0] == _Result(len(self._steps) - 1)
        ):
            self._steps.pop()  # nothing remains between the node that enters a mode and this one
            return _Result(-1)
        # Later steps may write into computed tensors before the steps are compared.
        copied = torch.fx.node.map_aggregate((args, kwargs), _copied)
        self._steps.append(_Step(node.op, node.target, copied))
        return _Result(len(self._steps) - 1)


def same_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors are equal, up to the rounding of the operators that made them."""
    if one.dtype != other.dtype or one.shape != other.shape or one.device != other.device:
        return False
    if one is other or torch.equal(one, other):
        return True
    numbers = one.is_floating_point() or one.is_complex()
    if not numbers or one.layout is not torch.strided or one.is_quantized or one.is_meta:
        return False
    rounding = 8 * torch.finfo(one.dtype).eps
    return torch.allclose(one, other, rtol=rounding, atol=0.0, equal_nan=True)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return same_tensors(one, other)
    parts = same_parts(one, other, _same)
    return same_value(one, other) if parts is None else parts


def _without_data(node: torch.fx.Node, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments, with zeros in place of a step's result if the call reads only dtype, device and sizes."""
    place = _READ_NO_NUMBERS.get(getattr(node.target, "__name__", str(node.target)))
    if place is None or place >= len(args) or not isinstance(args[place], (_Result, _Own)):
        return args, kwargs  # `x.to(dtype=...)` has one argument
    read = node.args[place]
    like = read.meta.get("val") if isinstance(read, torch.fx.Node) else None
    if not isinstance(like, torch.Tensor) or _is_large(like) or any(_hint(size) < 0 for size in like.shape):
        return args, kwargs
    empty = torch.zeros(tuple(map(_hint, like.shape)), dtype=like.dtype, device=like.device)
    return (*args[:place], empty, *args[place + 1 :]), kwargs


def _holds_results(value: Any) -> bool:
    found = []
    torch.fx.node.map_aggregate(value, lambda part: found.append(isinstance(part, (_Result, _Own))))
    return any(found)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _is_large(expected: Any) -> bool:
    return isinstance(expected, torch.Tensor) and math.prod(map(_hint, expected.shape)) > _MOST_NUMBERS


def _is_as_expected(value: Any, expected: Any) -> bool:
    """Tell whether a value has the dtype and the sizes of the fake tensor, which was made under the modes of the forward."""
    if isinstance(value, (tuple, list)) and isinstance(expected, (tuple, list)):
        return len(value) == len(expected) and all(map(_is_as_expected, value, expected))
    if not isinstance(value, torch.Tensor):
        return True
    real = not value.is_meta and not isinstance(value, FakeTensor)
    sizes = isinstance(expected, torch.Tensor) and tuple(map(_hint, expected.shape)) == tuple(value.shape)
    return bool(real and sizes and value.dtype == expected.dtype)


def _hint(size: Any) -> int:
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else -1
