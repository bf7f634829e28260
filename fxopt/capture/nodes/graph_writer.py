"""The writer of nodes for values: it maps tensors to the nodes that made them, and writes arguments and outputs."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import operator
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from fxopt.capture.capture_internals import is_functorch_wrapped_tensor
from fxopt.capture.fakes.dynamic_shapes import SymbolicNumber
from fxopt.capture.fakes.fake_model import FakeModel
from fxopt.capture.nodes.call_targets import importable
from fxopt.capture.nodes.completion import add_constant
from fxopt.capture.nodes.container_values import check_keys, write_container
from fxopt.capture.nodes.mutable_objects import MutableObjects
from fxopt.capture.nodes.shared_memory import Origin, OutOfSightError, SharedMemory
from fxopt.capture.nodes.size_nodes import SizeNodes
from fxopt.capture.nodes.source_location import RunningCode, describe_location, model_frame, stack_trace
from fxopt.capture.runtime.checks import check_value
from fxopt.errors import TraceError
from fxopt.memory import storage_of, version_of
from fxopt.objects import is_open, mapped, qualified_name, tensors_in
from fxopt.torch_internals import FakeTensor

_PLAIN_TUPLES = ("builtins", "torch", "torch.return_types")
_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), enum.Enum, range),
    *(torch.dtype, torch.layout, torch.memory_format),
)


@dataclasses.dataclass(eq=False)
class GraphWriter:
    """Writes the nodes of one capture.

    `shell` has the names of the model's tensors. `device` is the device of the capture, which the graph reads from its
    input. `running` collects the functions of the model that make calls.
    """

    graph: torch.fx.Graph
    sizes: SizeNodes
    shell: FakeModel
    device: torch.device
    running: RunningCode

    def __post_init__(self) -> None:
        self.constants: dict[str, torch.Tensor] = {}
        # Tensors that the forward makes from Python data, with their versions: each call of the graph needs fresh ones.
        self.fresh: list[tuple[torch.Tensor, float, torch.fx.Node]] = []
        self._values: dict[int, Origin] = {}
        self._alive: list[Any] = []
        self.memory = SharedMemory(self.shell.model, self._alive)
        self._device_source: torch.fx.Node | None = None
        self._device_node: torch.fx.Node | None = None
        self._modules: list[tuple[str, str]] = []
        self.containers = MutableObjects(self.graph, self.call, self.argument, self._bind_entry)
        self._inputs: list[Any] = []
        # True when all calls are written and only the output is left, in which a `torch.Size` is not a tuple.
        self._is_complete = False

    def add_input(self, tensor: torch.Tensor, node: torch.fx.Node, path: tuple[tuple[str, Any], ...]) -> None:
        """Register `tensor` as the value of a placeholder, or of the entry at `path` inside it."""
        self.bind_result(tensor, Origin(node, path))
        if self._device_source is None and tensor.device == self.device and not path:
            self._device_source = node

    def add_object(self, value: Any, node: torch.fx.Node, path: tuple[tuple[str, Any], ...]) -> None:
        """Register an open object as the value of a placeholder, or of the entry at `path` inside it."""
        self.containers.add(value, functools.cache(lambda: self._follow(Origin(node, path))), bind=True)
        self._inputs.append(value)

    def add_output(self, value: Any) -> None:
        """Write the output node; clone tensors from Python data that are written or returned, so that each call gets its own."""
        self._is_complete = True
        for changed in self._inputs:
            self.containers.write_back(changed)
        self.graph.output(self.argument(value))
        self.containers.erase_unused()
        returned = {storage_of(tensor) for tensor in tensors_in([value, self._inputs])}
        for fake, version, node in self.fresh:
            if version_of(fake) != version or storage_of(fake) in returned:
                with self.graph.inserting_after(node):
                    clone = self.graph.call_method("clone", (node,))
                clone.meta = dict(node.meta)
                node.replace_all_uses_with(clone, delete_user_cb=lambda user, clone=clone: user is not clone)  # type: ignore[misc]

    def argument(self, value: Any) -> Any:
        """Return `value` as an argument of a node; raise TraceError if code cannot express it."""
        if isinstance(value, torch.Tensor):
            return self._node_of(value)
        if isinstance(value, SymbolicNumber):
            return self.sizes.node(value)
        if isinstance(value, torch.device):
            return self._device_argument(value)
        if type(value).__module__ == "torch.return_types" and id(value) in self._values:
            return self._values[id(value)].node
        if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
            value = value.item()  # its repr is no Python literal
        if isinstance(value, enum.Flag) and value.name not in type(value).__members__:
            return self.call(importable(type(value)), value.value)  # torch.fx would write `Kind.A|B`
        if isinstance(value, _PLAIN):
            return value
        if self._is_complete and self.containers.knows(value):
            return self.containers.node(value)
        if (made := write_container(value, self.argument, self.create, self.where)) is not None:
            return made
        if type(value) is torch.Size and self._is_complete:
            return self.call(torch.Size, [self.argument(size) for size in value])
        if type(value) is list:
            return [self.argument(item) for item in value]
        if isinstance(value, tuple) and (not self._is_complete or type(value).__module__ in _PLAIN_TUPLES):
            return tuple(self.argument(item) for item in value)
        if type(value) is dict:
            check_keys(value, self.where())
            pairs = [(key, self.argument(item)) for key, item in value.items()]
            # torch.fx writes the members of an enumeration as code, but not those in a dict.
            return self.call(dict, pairs) if _holds_enum(pairs) else dict(pairs)
        if isinstance(value, slice):
            return slice(self.argument(value.start), self.argument(value.stop), self.argument(value.step))
        if is_open(value):
            return self.containers.node(value)
        if isinstance(value, torch.Generator):
            raise TraceError(
                "random numbers are drawn from a torch.Generator, which a graph cannot hold: leave `generator=` out to use "
                f"torch's own generator, or make the module that draws them a leaf (leaf_modules=...). {self.where()}"
            )
        raise TraceError(
            f"a {qualified_name(type(value))} cannot be in a graph, which can hold only tensors, "
            f"numbers, strings, dtypes, devices, and tuples, lists, dicts, dataclasses and plain objects of those. {self.where()}"
        )

    def _node_of(self, tensor: torch.Tensor) -> torch.fx.Node:
        tensor = self.shell.fake(tensor) if self.shell.holds(tensor) else tensor
        value = self._values.get(id(tensor))
        if value is None:
            return self._attribute(tensor)
        if value.path:
            value = Origin(self._follow(value))
            value.node.meta["val"] = tensor
            self._values[id(tensor)] = value
        return value.node

    def made_by(self, tensor: torch.Tensor) -> torch.fx.Node | None:
        """The node that made a tensor; None for tensors of the model, and for parts of a node's result."""
        origin = self._values.get(id(tensor))
        return origin.node if origin is not None and not origin.path else None

    def forget(self, nodes: Collection[torch.fx.Node]) -> None:
        """Forget what these nodes made."""
        self._values = {key: value for key, value in self._values.items() if value.source not in nodes}

    def read_sizes(self, tensor: torch.Tensor) -> None:
        """Read the symbolic sizes of a tensor before its shape changes; its node keeps the current shape."""
        with self.containers.reading():
            for size in tensor.shape:
                self.argument(size)
        self._node_of(tensor).meta["val"] = tensor.view_as(tensor)

    def share_origin(self, tensor: torch.Tensor, made: torch.Tensor) -> None:
        """Register the origin of `made` as the origin of `tensor`."""
        self._values[id(tensor)] = self._values[id(made)]

    def _follow(self, value: Origin) -> torch.fx.Node:
        """Write the nodes along a path, and return the last one."""
        node = value.node
        for kind, key in value.path:
            node = self.call(operator.getitem if kind == "item" else getattr, node, key)
        return node

    def _attribute(self, tensor: torch.Tensor) -> torch.fx.Node:
        """The node of a tensor that no recorded call made: a parameter, a buffer, or one from outside the forward."""
        name = self.shell.names.get(id(tensor))
        if name is None and id(tensor) in self.shell.originals:
            name = self.constant(self.shell.originals[id(tensor)])
            self.shell.names[id(tensor)] = name
        if id(tensor) in self.shell.stale:
            raise TraceError(f"the forward reads what an earlier call has left. {self.where()}")
        if name is None:
            raise OutOfSightError(
                "a tensor was made out of sight of the capture (in a custom C++ function, in a hook of a layer, or by a "
                f"transform of torch.func). Make the module that makes it a leaf. {self.where()}"
            )
        return self.create("get_attr", name, (), {}, tensor)

    def faked(self, value: Any) -> Any:
        """`value` with a fake in place of each real tensor, so that no call computes or writes anything."""
        return mapped(value, self._faked)

    def _faked(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        if is_functorch_wrapped_tensor(value):
            return value
        if isinstance(value, torch.nn.Parameter):
            raise TraceError(
                "a parameter is used that is not in the model's tree of modules, as that of a layer in a plain list. "
                f"Register it: torch.nn.ModuleList, ModuleDict, register_parameter. {self.where()}"
            )
        return self.shell.fake(value)

    def constant(self, tensor: torch.Tensor) -> str:
        return add_constant(self.constants, tensor, self.shell.model)

    def _device_argument(self, device: torch.device) -> Any:
        if device != self.device or self._device_source is None:
            return device
        if self._device_node is None:
            with self.graph.inserting_after(self._device_source):
                self._device_node = self.graph.call_function(getattr, (self._device_source, "device"))
                self._device_node.meta["val"] = device
        return self._device_node

    def makes_something(self, result: Any) -> bool:
        """Tell whether a result holds a tensor or a number that only the graph can compute."""
        if isinstance(result, torch.Tensor):
            return True
        if isinstance(result, SymbolicNumber):
            return self.sizes.lacks_source(result)
        items = result.values() if isinstance(result, dict) else result
        return isinstance(result, (tuple, list, dict)) and any(map(self.makes_something, items))

    def arguments(self, name: str, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        try:
            return tuple(self.argument(arg) for arg in args), {
                key: self.argument(arg) for key, arg in kwargs.items()
            }
        except TraceError as error:
            error.args = (f"in an argument of {name!r}: {error}",)
            raise

    def create(
        self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> torch.fx.Node:
        node = self.graph.create_node(op, target, args, kwargs)
        if result is not None:
            node.meta["val"] = result
        node.meta["nn_module_stack"] = {name: (name, kind) for name, kind in self._modules}
        node.meta["stack_trace"] = stack_trace(sys._getframe(1), self.running)
        self.bind_result(result, Origin(node))
        return node

    def call(self, target: Any, *args: Any) -> torch.fx.Node:
        """Write a call whose value the forward does not see."""
        return self.create("call_function", target, args, {}, None)

    def assume(self, condition: Any, what: str) -> None:
        """Write a runtime check of a condition that the graph assumes."""
        self.call(check_value, condition, f"the graph assumes {what}. {self.where()}")

    def _bind_entry(self, value: Any, node: Callable[[], torch.fx.Node], kind: str, key: Any) -> None:
        """Register `value` as an entry of the value of `node()`."""
        if isinstance(value, (torch.Tensor, tuple, *SymbolicNumber)):
            self.bind_result(value, Origin(node, ((kind, key),)))

    def bind_result(self, result: Any, value: Origin) -> None:
        if isinstance(result, torch.Tensor):
            self._bind(result, value)
            self.sizes.bind_shape(result, functools.partial(self._node_of, result))
        elif isinstance(result, SymbolicNumber):
            self.sizes.bind(result, functools.partial(self._follow, value))
        elif isinstance(result, (tuple, list, dict)):
            if type(result).__module__ == "torch.return_types":
                self._bind(result, value)
            for key, item in result.items() if isinstance(result, dict) else enumerate(result):
                self.bind_result(item, Origin(value.source, (*value.path, ("item", key))))
        elif is_open(result):
            self.containers.add(result, functools.cache(lambda: self._follow(value)), bind=True)

    def _bind(self, result: Any, value: Origin) -> None:
        self._values[id(result)] = value
        self._alive.append(result)

    @contextlib.contextmanager
    def inside(self, name: str, module: torch.nn.Module) -> Iterator[None]:
        self._modules.append((name, qualified_name(type(module))))
        try:
            yield
        finally:
            self._modules.pop()

    def location(self) -> str:
        """`file:line` of the model's code that runs now."""
        frame = model_frame(sys._getframe(1))
        return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "a layer of torch"

    def where(self) -> str:
        """The module path, file, line and source text of the model's code that runs now."""
        return describe_location(model_frame(sys._getframe(1)), self._modules[-1] if self._modules else None)


def _holds_enum(value: Any) -> bool:
    return isinstance(value, enum.Enum) or (isinstance(value, (list, tuple)) and any(map(_holds_enum, value)))
