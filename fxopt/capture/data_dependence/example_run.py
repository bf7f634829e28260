"""Runs the example inputs through the nodes recorded so far: with `specialize=True`, the resulting values decide."""

from __future__ import annotations

import concurrent.futures
import copy
import functools
import random
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

import torch

from fxopt import effects, operators
from fxopt.capture.capture_internals import set_grad_enabled
from fxopt.capture.nodes.comparison import is_device
from fxopt.capture.nodes.graph_writer import GraphWriter
from fxopt.capture.nodes.shared_memory import memory_of
from fxopt.capture.runtime import modes
from fxopt.capture.runtime.checks import check_outcome, check_same_outcome, check_value
from fxopt.errors import TraceError, error_text
from fxopt.graph import called_module
from fxopt.objects import tensors_in
from fxopt.torch_internals import storage_identity

T = TypeVar("T")

# Not run: checks, which the example satisfies, and the choice of attention backends, which affects the whole process.
_SKIPPED = {check_same_outcome, check_outcome, check_value, modes.enter_sdpa_kernel}


class ExampleRun:
    """Runs the nodes of an unfinished graph on real data as soon as a value is needed, and keeps all values.

    The nodes run in a separate thread, because torch keeps modes (fake tensors, gradients, autocast) per thread. The model does
    not change: buffers, and parameters that a layer writes, are copied. `constants` are the tensors of `get_attr` nodes that
    the model does not have. `examples` has the real value for each fake input, by the identity of the fake.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        layers: Collection[int],
        graph: torch.fx.Graph,
        constants: Mapping[str, torch.Tensor],
        examples: Mapping[int, Any],
    ) -> None:
        self._model, self._layers, self._graph = model, layers, graph
        self._constants, self._examples = constants, examples
        # Runs the nodes written so far; a copy of the model replaces the empty module.
        self._interpreter = torch.fx.Interpreter(torch.nn.Module(), False, graph)
        self._values = self._interpreter.env
        self._inputs: dict[int, Any] = {}
        self._shared: set[int] = set()
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        self._modes = _current_modes()
        self._random_state: torch.Tensor | None = None

    def read(self, node: torch.fx.Node, read: Callable[[Any], T]) -> T:
        """Apply `read` to the value that `node` has for the example inputs."""
        if self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(max_workers=1)
            self._thread.submit(self._start).result()
        self._thread.submit(self._run).result()
        return self._thread.submit(lambda: read(self._values[node])).result()

    def close(self) -> None:
        """Leave the modes that the nodes entered, and end the thread."""
        if self._thread is not None:
            self._thread.submit(modes.leave_all).result()
            self._thread.shutdown()
            self._thread = None

    def _start(self) -> None:
        for enter in self._modes:
            enter()
        layers = [module for module in self._model.modules() if id(module) in self._layers]
        written = {id(t) for layer in layers for t in effects.written_parameters(layer)}
        plain = [t for m in self._model.modules() for t in vars(m).values() if isinstance(t, torch.Tensor)]
        shared = [t for t in (*self._model.parameters(), *plain) if id(t) not in written]
        self._shared = {storage_identity(t.untyped_storage()) for t in shared}
        drawn = random.getstate()  # some models draw a random name when they are copied
        memo = {id(t): t for t in (*shared, *sys.modules.values())}
        self._interpreter.module = copy.deepcopy(self._model, memo)
        random.setstate(drawn)
        self._inputs = dict(self._examples)
        for key, value in self._examples.items():
            if isinstance(value, torch.Tensor):
                self._inputs[key] = value.detach().clone().requires_grad_(value.requires_grad)

    def _nodes(self) -> Iterable[torch.fx.Node]:
        return self._graph.nodes

    def _run(self) -> None:
        """Run the new nodes."""
        devices = {t.device for t in tensors_in(list(self._examples.values())) if t.is_cuda}
        with torch.random.fork_rng(devices=devices):
            if self._random_state is not None:
                torch.set_rng_state(self._random_state)  # continue after the numbers that the last nodes drew
            for node in self._nodes():
                if node in self._values:
                    continue
                try:
                    self._values[node] = self._result(node)
                except TraceError:
                    raise
                except Exception as error:  # the model's own error for these values
                    raise TraceError(
                        "specialize=True runs the graph on the example inputs, which fails at "
                        f"{node.format_node()}: {error_text(error)}"
                    ) from error
            self._random_state = torch.get_rng_state()

    def _result(self, node: torch.fx.Node) -> Any:
        if node.op == "placeholder":
            # The fake input with a real tensor in the place of each fake one.
            return copy.deepcopy(node.meta["val"], dict(self._inputs))
        if node.op == "get_attr" and str(node.target) in self._constants:
            return self._constants[str(node.target)].clone()
        leaves_nothing = node.target is modes.leave and self._values[node.args[0]] is None  # type: ignore[index]
        if node.target in _SKIPPED or leaves_nothing:
            return None
        self._refuse_write(node)
        return self._interpreter.run_node(node)

    def _refuse_write(self, node: torch.fx.Node) -> None:
        """Raise TraceError for a node that would write into a tensor of the user's model."""
        if node.op == "call_function" and not operators.is_torch_function(node.target):
            return
        for target in effects.written_by(node, None) or ():
            for tensor in tensors_in(self._values[target]):
                if storage_identity(tensor.untyped_storage()) in self._shared:
                    raise TraceError(
                        f"the forward writes into a parameter ({node.format_node()}), so it cannot be run on the example "
                        "inputs without changing the model: specialize=True is not possible here."
                    )


class ConstantRun(ExampleRun):
    """Runs the nodes that return the same in each call: they depend only on numbers of the forward and on `constants`.

    With `by_state`, parameters and buffers count as constants, too.
    """

    def __init__(self, writer: GraphWriter, by_state: bool) -> None:
        super().__init__(torch.nn.Module(), (), writer.graph, writer.constants, {})
        self._shell, self._made_by, self.by_state = writer.shell, writer.made_by, by_state
        self._needed: set[torch.fx.Node] = set()
        # The targets of the `get_attr` nodes whose tensors decided: the forward must not write these tensors.
        self.decided_by: set[str] = set()

    def knows(self, node: torch.fx.Node, kind: type) -> bool:
        """Tell whether a node returns the same in each call, and Python can convert its value to this kind of number."""
        self._needed = set()
        left = [node]
        while left:
            if (found := left.pop()) not in self._needed:
                if not self._is_constant(found):
                    return False
                self._needed.add(found)
                left += () if is_device(found) else found.all_input_nodes
            left = left or self._writes()
        if any(map(self._written, self._needed)):
            self._values.clear()  # a write may have changed values that were computed earlier
        try:
            self.read(node, kind)
        except Exception:  # also the model's own errors, such as `bool` of several numbers
            return False
        self.decided_by |= {str(each.target) for each in self._read()}
        return True

    def makes(self, tensor: torch.Tensor) -> bool:
        """Tell, after the run, whether a tensor is made only of numbers of the forward, and of no attribute."""
        node = self._made_by(tensor)
        try:
            return node is not None and self.knows(node, type) and not self.is_shared()
        finally:
            self.close()

    def is_shared(self) -> bool:
        """Tell whether the last node given to `knows` depends on a tensor of the model, which users may write between calls."""
        return any(
            each.target not in self._constants
            or self._shell.real(each.meta["val"])[0] not in ("", each.target)
            for each in self._read()
        )

    def would_know(self, node: torch.fx.Node, kind: type) -> bool:
        """Tell whether `knows` would be True if parameters and buffers counted as constants; False if they do already."""
        if self.by_state:
            return False
        decided_by, self.by_state = {*self.decided_by}, True
        try:
            return self.knows(node, kind)
        finally:
            self.decided_by, self.by_state = decided_by, False

    def _read(self) -> list[torch.fx.Node]:
        return [node for node in self._needed if node.op == "get_attr"]

    def _is_constant(self, node: torch.fx.Node) -> bool:
        if node.op == "get_attr":
            # A value that an earlier call computed from sizes or buffers may differ in other calls.
            kept = self.by_state or node.target in self._constants
            return kept and id(node.meta["val"]) not in self._shell.computed
        of_torch = node.op == "call_function" and operators.is_torch_function(node.target)
        on_cpu = all(t.device.type == "cpu" for t in tensors_in(node.meta.get("val")))
        return on_cpu and (of_torch or node.op == "call_method" or is_device(node))

    def _writes(self) -> list[torch.fx.Node]:
        """Return the other nodes that write into memory of the needed nodes."""
        memory = memory_of(self._needed)
        others = [n for n in self._graph.nodes if n not in self._needed and n.target not in _SKIPPED]
        return [node for node in others if memory & self._written(node)]

    def _written(self, node: torch.fx.Node) -> set[int]:
        """Return the memory into which a node writes."""
        written = effects.written_by(node, called_module(self._shell.model, node))
        return memory_of(node.all_input_nodes if written is None else written)

    def _nodes(self) -> Iterable[torch.fx.Node]:
        return [node for node in self._graph.nodes if node in self._needed]

    def _result(self, node: torch.fx.Node) -> Any:
        if is_device(node):
            return node.meta["val"]
        if node.op == "get_attr" and node.target not in self._constants:
            tensor = self._shell.real(node.meta["val"])[1]
            assert tensor is not None
            return tensor.detach().clone()
        before = torch.get_rng_state()
        value = super()._result(node)
        if not torch.equal(before, torch.get_rng_state()):
            raise TraceError("a random number is no constant")
        expected = node.meta.get("val")
        if isinstance(expected, torch.Tensor) and value.dtype != expected.dtype:
            raise TraceError("it is computed under autocast")
        return value


def _current_modes() -> list[Callable[[], Any]]:
    """Return functions that, called in another thread, enter the modes of this thread."""
    enter: list[Callable[[], Any]] = [functools.partial(set_grad_enabled, torch.is_grad_enabled())]
    if torch.is_inference_mode_enabled():
        enter.append(torch.inference_mode().__enter__)
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            dtype, cache = torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()
            enter.append(torch.autocast(device, dtype=dtype, cache_enabled=cache).__enter__)
    return enter
