"""Runs of a model and of its graph on the same inputs, which restore buffers; attributes keep the values of the last run."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from fxopt import effects, graph
from fxopt.capture import TracedModule
from fxopt.capture.runtime.traced_module import BY_FIRST_CALL
from fxopt.compare import norm_error, unlike
from fxopt.engines import Unfit
from fxopt.graph_index import GraphIndex
from fxopt.memory import version_of
from fxopt.optimizing.inputs import Inputs
from fxopt.optimizing.lowering import assigned_attributes
from fxopt.outputs import mapped, restored, same_bits
from fxopt.submodules import parts, split_path, tensors_of
from fxopt.tuning import least_seconds

Function = Callable[..., Any]


_ROUNDING = {"tf32": 2.0**-11, "bf16": 2.0**-8}
"""The relative rounding error of each precision in which torch may multiply float32."""
_SECONDS = 0.25  # how long to time a function
_SHORT = 0.1  # seconds; what ran before disturbs shorter calls, by other data in the caches and threads that still spin


class Unused(Unfit):
    """The graph is not used; the message is the reason in the report."""


class Failed(Exception):
    """The model itself raises an error for these inputs: the cause of this one."""


class Trial:
    """Runs a model and its graph, and restores the buffers that they write into, such as a static cache.

    Attributes:
        places: the buffers that the model writes into, and the attributes that layers assign, each as a module path and a
            name; empty before `own`.

    Args:
        model: the model.
        traced: its graph, before any pass.
        inputs: the inputs of all runs.

    Raises:
        Unused: the graph draws random numbers, or has side effects that cannot be undone.
    """

    def __init__(self, model: nn.Module, traced: TracedModule, inputs: Inputs) -> None:
        index, own = GraphIndex(traced), dict(tensors_of({"": model}))
        self.places: list[tuple[str, str]] = []
        self._model, self._traced, self._inputs = model, traced, inputs
        self._written = {name: tensor for name, tensor in own.items() if index.memory.writer_of(tensor)}
        self._left: dict[str, Tensor] = {}
        self._generator = torch.Generator().manual_seed(0)  # leaves the global generator alone
        first_write = min(_writes_into_inputs(index), default=None)
        for node in index.nodes:
            fault = _fault(index, node, first_write)
            if fault:
                raise Unused(f"{fault}, at {graph.place(node)}")
        known = {*map(id, own.values())}
        for _, tensor in tensors_of({"": traced}):
            writer = index.memory.writer_of(tensor) if id(tensor) not in known else None
            if writer is not None:
                raise Unused(f"a call may write into a constant of the graph, at {graph.place(writer)}")

    def own(self) -> Any:
        """The outputs of the model's own method; if the graph assigns attributes, in a pair with their values."""
        before = [(path, vars(layer), dict(vars(layer))) for path, layer in self._model.named_modules()]
        try:
            value, self._left = self._run(getattr(self._model, self._inputs.method))
        except Unused:
            raise
        except Exception as error:
            # Capture with fake tensors accepts more, such as two dtypes in a product.
            raise Failed from error
        self.places = [split_path(name) for name in self._left]
        for path, now, then in before:  # `weight_norm` computes the attribute `weight`
            self.places += [(path, n) for n in now if n not in BY_FIRST_CALL and now[n] is not then.get(n)]
        return self._with_assigned(self._model, value)

    def run(self, function: Function) -> Any:
        """The outputs of a graph.

        Raises:
            Unused: the graph leaves other values in the buffers than the model.
        """
        value, left = self._run(function)
        if unlike(self._left, left) or norm_error(self._left, left) > 1e-2:
            names = sorted(self._left.keys() ^ left.keys() or left)
            raise Unused(f"its graph leaves other values than the model in {', '.join(names)}")
        return value

    def moved(self) -> Any:
        """The outputs of a copy of the model in which each weight in float32 or float64 is rounded up or down at random.

        The step is one unit in the last place of the weight's dtype, or of TF32 or bfloat16 if torch may multiply in these.

        Source: Parker, Monte Carlo Arithmetic, 1997, section 4: rounding errors that a computation can have.
        """

        def neighbour(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, nn.Parameter) or tensor.dtype not in (torch.float32, torch.float64):
                return tensor.detach().clone()
            draws = torch.randint(2, tensor.shape, generator=self._generator, device="cpu").to(tensor)
            rounding, sign = _ROUNDING.get(_precision(tensor)), 1 - 2 * draws
            moved = tensor * (1 + rounding * sign) if rounding else tensor.nextafter(torch.inf * sign)
            return nn.Parameter(moved, False)

        memo = {id(tensor): neighbour(tensor) for _, tensor in tensors_of({"": self._model})}
        copied = copy.deepcopy(self._model, memo)
        return self._with_assigned(copied, self._inputs.call(getattr(copied, self._inputs.method)))

    def repeatable(self, function: Function, ask: Callable[[], object] = bool) -> Function:
        """A function that calls `ask` before each call, and restores afterwards what the call wrote."""

        def again(*args: Any, **kwargs: Any) -> Any:
            ask()
            with restored(self._model, self._written) if self._written else contextlib.nullcontext():
                return function(*args, **kwargs)

        return again

    def _with_assigned(self, model: nn.Module, value: Any) -> Any:
        """The outputs of the model, or of its copy, as a graph returns them: in a pair with the attributes that the forward assigns."""
        left = tuple(getattr(module, name) for module, name in assigned_attributes(self._traced, model))
        return (value, left) if left else value

    def _run(self, function: Function) -> tuple[Any, dict[str, Tensor]]:
        """The outputs of a call, and the values that it writes into tensors of the model, by their names."""
        buffers = dict(self._model.named_buffers())
        with restored(self._model, self._written) as before:
            versions = {name: version_of(tensor) for name, (tensor, _) in before.items()}
            value = self._inputs.call(function)
            for name, buffer in self._model.named_buffers():
                if buffer is not buffers.get(name, buffer):
                    raise Unused(f"the forward replaces the buffer {name!r}. Write into it with `.copy_()`.")
            # Values tell of writes that torch does not count, by `batch_norm` and into `.data`; versions of those that change no value.
            left = {
                name: t.detach().clone()
                for name, (t, old) in before.items()
                if version_of(t) != versions[name] or not same_bits(old, t)
            }
            # An output may be a view of a buffer.
            return mapped(value, Tensor.clone) if left else value, left


def fastest(functions: Mapping[str, Function], inputs: Inputs) -> str:
    """The name of the fastest function."""
    times = _in_turns(functions, inputs)
    return min(times, key=times.__getitem__)


def speedup(model: Function, computed: Function, inputs: Inputs) -> float:
    """The least time of the model ÷ the least time of the graph."""
    times = _in_turns({"model": model, "graph": computed}, inputs)
    return times["model"] / times["graph"]


def _in_turns(functions: Mapping[str, Function], inputs: Inputs) -> dict[str, float]:
    """The least seconds of each function over rounds in which all run; other processes can only make a run longer."""
    return least_seconds(functions, lambda function, _: _seconds(function, inputs), _SECONDS, 50)


def _seconds(function: Function, inputs: Inputs, again: bool = True) -> float:
    """The seconds of a call, until its device has computed; a short call runs twice in a row, and the second run counts."""
    copied = inputs.copied()
    # None is the current CUDA device.
    devices: Collection[int | None] = {t.device.index for t in inputs.tensors() if t.is_cuda} or (None,)
    _wait(devices)
    start = time.perf_counter()
    function(*copied.args, **copied.kwargs)
    _wait(devices)
    took = time.perf_counter() - start
    return _seconds(function, inputs, False) if again and took < _SHORT else took


def _precision(weight: Tensor) -> str:
    """The name of the precision in which torch may multiply this weight of a linear layer or convolution."""
    backends: Any = torch.backends
    conv, linear = (
        (backends.cudnn.conv, backends.cuda.matmul)
        if weight.is_cuda
        else (backends.mkldnn.conv, backends.mkldnn.matmul)
    )
    multiplies = weight.dtype == torch.float32 and weight.dim() > 1
    return str((conv if weight.dim() > 2 else linear).fp32_precision) if multiplies else ""


def _wait(devices: Collection[int | None]) -> None:
    """Wait until these CUDA devices have computed, where torch uses CUDA."""
    for device in devices if torch.cuda.is_initialized() else ():
        torch.cuda.synchronize(device)


def _writes_into_inputs(index: GraphIndex) -> Iterator[Node]:
    """Yield the nodes that may write into an input, or into a value computed from it.

    An object that is returned with an input and another tensor shares memory with both, but a write into that tensor is none
    into the input.
    """
    for value in (node for node in index.nodes if node.op == "placeholder"):
        views = {*index.memory.derived(value)}
        for writer in index.memory.writers(value):
            if not views.isdisjoint(index.memory.written_by(writer) or views):
                yield writer


def _fault(index: GraphIndex, node: Node, first_write: Node | None) -> str | None:
    """Why a graph with this node cannot be tried out."""
    module = index.called(node)
    if module is not None and any(map(effects.has_forward_hooks, parts(module))):
        return (
            "a layer has hooks on its forward (those of gradient checkpointing in transformers go by "
            "model.disable_input_require_grads())"
        )
    if effects.draws(node, module):
        return "the forward draws random numbers, so its outputs cannot be compared with those of a graph"
    if first_write is not None and first_write < node and effects.only_checks(node):
        return "its graph might refuse these inputs when it has already written into one of them"
    return None
