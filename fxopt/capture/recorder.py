"""The recorder: a `TorchFunctionMode` that writes each torch-level call of a forward as a node.

The forward runs on fake tensors, so Python sees ordinary tensors and nothing is computed. Design: one map from
the identity of a tensor to the node that made it; an in-place method returns the same object, so the map is
rebound and later uses are right by themselves.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode
from torch.fx.node import _side_effectful_functions
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily

from fxopt.capture import modes
from fxopt.capture.canonical import canonical, named, property_name, writes
from fxopt.capture.layers import LayerRunner
from fxopt.capture.ones import CaptureShapeEnv
from fxopt.capture.places import model_frame, place, stack_trace
from fxopt.capture.shell import Shell
from fxopt.capture.sizes import Sizes, SymbolicNumber
from fxopt.errors import TraceError

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.layout, torch.memory_format)
_LAYOUT_QUERIES = {"stride", "is_contiguous", "is_non_overlapping_and_dense", "storage_offset"}
_DTYPE_QUERIES = {"element_size", "itemsize", "nbytes", "type"}
_RESHAPES_IN_PLACE = {
    *("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_"),
    *("resize_", "resize_as_", "set_", "as_strided_"),
}
_HOOKS = {"register_hook", "register_post_accumulate_grad_hook"}
_FROM_DATA = {torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy}

_GRAD_CLASSES = (torch.no_grad, torch.enable_grad, torch.set_grad_enabled)
_GRAD_EXITS = {block.__exit__.__code__ for block in _GRAD_CLASSES}
_GRAD_BLOCKS = (
    _GRAD_EXITS
    | {block.__enter__.__code__ for block in _GRAD_CLASSES}
    | {torch.set_grad_enabled.__init__.__code__}
)


@dataclasses.dataclass
class Value:
    """Where a tensor comes from: a node, and the way from the node's result to the tensor."""

    node: torch.fx.Node
    path: tuple[tuple[str, Any], ...] = ()


class Recorder(PreDispatchTorchFunctionMode):
    """Records the calls of one forward into `graph`.

    `shell` knows the names of the model's tensors and what its layers were like before the forward. It is a
    PreDispatchTorchFunctionMode because torch reports `autocast` to those alone.
    """

    def __init__(
        self,
        graph: torch.fx.Graph,
        sizes: Sizes,
        shape_env: CaptureShapeEnv,
        shell: Shell,
        device: torch.device,
    ) -> None:
        TorchFunctionMode.__init__(self)
        self.graph = graph
        self.sizes = sizes
        self.device = device
        # Where the forward first asked for strides.
        self.layout_read_at: str | None = None
        # Where it asked for each dtype, and for a global mode, with the answer.
        self.dtypes_read_at: dict[torch.dtype, str] = {}
        self.modes_read: dict[str, tuple[bool, str]] = {}
        # The first error of ours; a forward may catch it, but a graph must not come of it.
        self.failure: TraceError | None = None
        self.constants: dict[str, torch.Tensor] = {}
        self._shape_env = shape_env
        self._shell = shell
        self._values: dict[int, Value] = {}
        self._alive: list[Any] = []
        self._device_source: torch.fx.Node | None = None
        self._device_node: torch.fx.Node | None = None
        self._modules: list[tuple[str, str]] = []
        self._blocks: dict[int, tuple[Any, torch.fx.Node]] = {}
        # Tensors that the forward makes from Python data, with their versions: each run must start from fresh ones.
        self._fresh: list[tuple[torch.Tensor, int, torch.fx.Node]] = []
        self._layers = LayerRunner()
        self._opaque = 0

    # --- inputs and outputs

    def add_input(self, tensor: torch.Tensor, node: torch.fx.Node, path: tuple[tuple[str, Any], ...]) -> None:
        """Take `tensor` as the value of a placeholder, or of the entry at `path` inside it."""
        self._bind(tensor, Value(node, path))
        if self._device_source is None and tensor.device == self.device:
            self._device_source = node if not path else None
        self.sizes.bind_shape(tensor, functools.partial(self._node_of, tensor))

    def add_output(self, value: Any) -> None:
        """Write the output node, and give every run tensors of its own where the forward makes them from data."""
        self.graph.output(self.argument(value))
        returned = {_storage(tensor) for tensor in _tensors(value)}
        for fake, version, node in self._fresh:
            if fake._version != version or _storage(fake) in returned:
                with self.graph.inserting_after(node):
                    clone = self.graph.call_method("clone", (node,))
                clone.meta = dict(node.meta)
                node.replace_all_uses_with(clone, delete_user_cb=lambda user, clone=clone: user is not clone)  # type: ignore[misc]

    def argument(self, value: Any) -> Any:
        """`value` as an argument of a node; TraceError when code cannot name it."""
        if isinstance(value, torch.Tensor):
            return self._node_of(value)
        if isinstance(value, SymbolicNumber):
            return self.sizes.node(value)
        if isinstance(value, torch.device):
            return self._device(value)
        if isinstance(value, (enum.Enum, range)):
            return value
        if type(value).__module__ == "torch.return_types" and id(value) in self._values:
            return self._values[id(value)].node
        if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
            value = value.item()  # its repr is no Python literal
        if value is None or value is Ellipsis or isinstance(value, _PLAIN):
            return value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return self._create(
                "call_function", named(type(value)), tuple(map(self.argument, value)), {}, None
            )
        if type(value) is list:
            return [self.argument(item) for item in value]
        if isinstance(value, tuple):
            return tuple(self.argument(item) for item in value)
        if type(value) is dict:
            return {key: self.argument(item) for key, item in value.items()}
        if type(value) is collections.OrderedDict:
            pairs = [(key, self.argument(item)) for key, item in value.items()]
            return self._create("call_function", collections.OrderedDict, (pairs,), {}, None)
        if isinstance(value, slice):
            return slice(self.argument(value.start), self.argument(value.stop), self.argument(value.step))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._construct(value)
        raise TraceError(
            f"a {type(value).__module__}.{type(value).__qualname__} is used where the graph can hold tensors, "
            f"numbers, strings, dtypes, devices, and tuples, lists, dicts and dataclasses of those. {self.where()}"
        )

    def _construct(self, value: Any) -> torch.fx.Node:
        """The node that builds a dataclass (a ModelOutput, for example) from its fields."""
        fields = [field for field in dataclasses.fields(value) if field.init]
        extra = set(value if isinstance(value, dict) else value.__dict__) - {field.name for field in fields}
        if extra:
            raise TraceError(
                f"a {type(value).__name__} carries {sorted(extra)} besides its fields, which a graph cannot give back. "
                f"{self.where()}"
            )
        given = {f.name: getattr(value, f.name) for f in fields}
        kwargs = {f.name: self.argument(given[f.name]) for f in fields if given[f.name] is not f.default}
        return self._create("call_function", named(type(value)), (), kwargs, None)

    # --- calls

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._opaque:
            return function(*args, **kwargs)
        # What torch does inside a call (it enters modes, too) is not the model's doing.
        self._opaque += 1
        try:
            return self._call(function, self._faked(args), self._faked(kwargs))
        except TraceError as error:
            self.failure = self.failure or error
            raise
        finally:
            self._opaque -= 1

    def _call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make one call, and write the node for it."""
        if function is _enter_autocast or function is _exit_autocast:
            return self._autocast(function, args)
        if function is torch._C._set_grad_enabled:
            return self._set_grad_enabled(args[0])
        if function in _FROM_DATA and not _contains(
            args[0] if args else kwargs["data"], (torch.Tensor, *SymbolicNumber)
        ):
            return self._tensor_from_data(function, args, kwargs)
        if kwargs.get("out") is not None:
            out = kwargs["out"]
            return self._written(out, function, args, {key: kwargs[key] for key in kwargs if key != "out"})
        if _has_inplace_flag(function):
            call = inspect.signature(function).bind(*args, **kwargs)
            if call.arguments.get("inplace"):
                call.arguments["inplace"] = False
                return self._written(call.arguments["input"], function, call.args, call.kwargs)
        with self._shape_env.in_operator() as questions:
            result = function(*args, **kwargs)
        writing = writes(getattr(function, "__name__", ""))
        if isinstance(result, torch.Tensor) and not writing:
            result = _distinct(result, args, kwargs)
        if self.record(function, args, kwargs, result) and not writing:
            self._shape_env.settle_at_one(questions, function, args, kwargs, result)
        else:
            self._shape_env.guard(questions)
        return result

    def record(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
        """Write the node for a call that has been made, and say so; a call that only asked a question has none."""
        name = getattr(function, "__name__", "")
        if name == "__set__":
            raise TraceError(
                f"the forward assigns to the attribute {function.__self__.__name__!r} of a tensor, which a graph "
                f"cannot hold. {self.where()}"
            )
        if name in _HOOKS:
            raise TraceError(
                f"the forward calls {name!r}: a graph cannot hold what it does to gradients. {self.where()}"
            )
        if result is None:
            if not writes(name) and function not in _side_effectful_functions:
                raise TraceError(f"the forward calls {name!r}, which a graph cannot hold. {self.where()}")
        elif not self._makes_something(result):
            self._note_query(property_name(function) if name == "__get__" else name, args, result)
            return False
        if name in _RESHAPES_IN_PLACE and any(isinstance(size, torch.SymInt) for size in args[0].shape):
            raise TraceError(
                f"the forward changes the shape of a tensor in place ({name!r}), while its sizes are free: sizes that "
                f"were read before would be read from the changed tensor. Use {name.rstrip('_')!r}. {self.where()}"
            )
        op, target, node_args, node_kwargs = canonical(function, args, kwargs)
        node_args, node_kwargs = self._arguments(name, node_args, node_kwargs)
        self._create(op, target, node_args, node_kwargs, result)
        return True

    def _note_query(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Keep where the forward asked something whose answer the graph takes for granted."""
        if name in _LAYOUT_QUERIES and self.layout_read_at is None:
            self.layout_read_at = self.location()
        if isinstance(result, torch.dtype):
            self.dtypes_read_at.setdefault(result, self.location())
        elif name in _DTYPE_QUERIES:
            self.dtypes_read_at.setdefault(args[0].dtype, self.location())

    def call_layer(self, name: str, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a layer on fake tensors, out of sight, and write one `call_module` node."""
        if self._opaque:
            return module._call_impl(*args, **kwargs)
        self._shell.check_layer(name, module)
        args, kwargs = self._faked(args), self._faked(kwargs)
        versions = _versions((args, kwargs))
        with self.paused():
            with self._shape_env.in_operator() as questions:
                result = self._layers.run(module, args, kwargs)
            if isinstance(result, torch.Tensor) and versions == _versions((args, kwargs)):
                result = _distinct(result, args, kwargs)
            if module.training:
                self._shape_env.guard(questions)
            else:
                self._shape_env.settle_at_one(questions, module._call_impl, args, kwargs, result)
        with self._inside(name, module):
            node_args, node_kwargs = self._arguments(name, args, kwargs)
            self._create("call_module", name, node_args, node_kwargs, result)
        return result

    def call_container(self, name: str, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a module whose own forward is recorded."""
        if self._opaque:
            return module._call_impl(*args, **kwargs)
        if module._backward_hooks or module._backward_pre_hooks:
            self.fail(
                f"module {name!r} has backward hooks, which a graph cannot hold: make it a leaf (leaf_modules=...)"
            )
        with self._inside(name, module):
            return module._call_impl(*args, **kwargs)

    def call_autograd_function(self, cls: type, apply: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a `torch.autograd.Function`, out of sight, and write one node, so that it keeps its backward."""
        args, kwargs = self._faked(args), self._faked(kwargs)
        with self.paused():
            result = apply(*args, **kwargs)
        node_args, node_kwargs = self._arguments(f"{cls.__qualname__}.apply", args, kwargs)
        self._create("call_function", modes.ApplyFunction(cls), node_args, node_kwargs, result)
        return result

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Run the block without recording it."""
        self._opaque += 1
        try:
            with _pop_mode_temporarily():
                yield
        finally:
            self._opaque -= 1

    def fail(self, reason: str) -> None:
        """Raise TraceError, also where the forward would catch it."""
        self.failure = self.failure or TraceError(f"{reason}. {self.where()}")
        raise self.failure

    @property
    def recording(self) -> bool:
        """Whether calls are recorded at this moment."""
        return not self._opaque

    # --- modes

    def enter(self, block: Any, function: Callable[..., Any], *args: Any) -> None:
        """Write the node that enters a mode; `leave(block)` restores what it found."""
        self._blocks[id(block)] = (block, self._create("call_function", function, args, {}, None))

    def leave(self, block: Any) -> None:
        """Write the node that leaves the mode that `block` entered."""
        self._create("call_function", modes.leave, (self._blocks.pop(id(block))[1],), {}, None)

    def entered(self, block: Any) -> bool:
        """Whether `block` has entered a mode and not left it."""
        return id(block) in self._blocks

    def _autocast(self, function: Any, args: tuple[Any, ...]) -> None:
        # torch has switched the mode already; the frame that reports it is autocast's own method.
        block = _caller(3).f_locals["self"]
        if function is _enter_autocast:
            device_type, dtype, enabled, cache_enabled = args
            self.enter(block, modes.enter_autocast, device_type, dtype, enabled, cache_enabled)
        else:
            self.leave(block)

    def _set_grad_enabled(self, mode: bool) -> None:
        """A block restores what it found: which block this call belongs to stands in the frames above it."""
        torch._C._set_grad_enabled(mode)
        frame = _caller(3)
        while frame.f_back is not None and frame.f_back.f_code in _GRAD_BLOCKS:
            frame = frame.f_back  # no_grad switches through set_grad_enabled
        block = frame.f_locals["self"] if frame.f_code in _GRAD_BLOCKS else None
        if frame.f_code in _GRAD_EXITS and self.entered(block):
            previous = self._blocks.pop(id(block))[1]
            self._create("call_function", modes.set_grad_enabled, (previous,), {}, None)
            return
        node = self._create("call_function", modes.set_grad_enabled, (mode,), {}, None)
        if block is not None and not self.entered(block):
            self._blocks[id(block)] = (block, node)

    # --- special calls

    def _tensor_from_data(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        with unset_fake_temporarily():
            real = function(*args, **kwargs)
        fake: torch.Tensor = function(*args, **kwargs)
        node = self._create("get_attr", self._constant(real), (), {}, fake)
        self._fresh.append((fake, fake._version, node))
        return fake

    def _written(self, out: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`f(x, out=y)` and `f(y, inplace=True)` as `y.copy_(f(...))`, of which fx knows that it writes."""
        if not isinstance(out, torch.Tensor):
            raise TraceError(
                f"`out` of {function.__name__!r} is a {type(out).__name__}; give one tensor. {self.where()}"
            )
        result = function(*args, **kwargs)
        if result.shape != out.shape:
            raise TraceError(
                f"`out` of {function.__name__!r} would be resized; give it the right shape. {self.where()}"
            )
        result = _distinct(result, args, kwargs)
        self.record(function, args, kwargs, result)
        out.copy_(result)
        self.record(torch.Tensor.copy_, (out, result), {}, out)
        return out

    # --- values

    def _node_of(self, tensor: torch.Tensor) -> torch.fx.Node:
        value = self._values.get(id(tensor))
        if value is None:
            return self._attribute(tensor)
        if value.path:
            value = Value(self._follow(value))
            value.node.meta["val"] = tensor
            self._values[id(tensor)] = value
        return value.node

    def _follow(self, value: Value) -> torch.fx.Node:
        """The node at the end of a path, made the first time that something uses it."""
        node = value.node
        for kind, key in value.path:
            target = operator.getitem if kind == "item" else getattr
            node = self._create("call_function", target, (node, key), {}, None)
        return node

    def _attribute(self, tensor: torch.Tensor) -> torch.fx.Node:
        """A tensor that no recorded call made: a parameter, a buffer, or one from outside the forward."""
        name = self._shell.names.get(id(tensor))
        if name is None and id(tensor) in self._shell.originals:
            name = self._constant(self._shell.originals[id(tensor)])
            self._shell.names[id(tensor)] = name
        if name is None:
            raise TraceError(
                "a tensor was made out of sight of the capture (in a custom C++ function, or under torch.vmap). "
                f"Make the module that makes it a leaf. {self.where()}"
            )
        return self._create("get_attr", name, (), {}, tensor)

    def _faked(self, value: Any) -> Any:
        """`value` with a fake in the place of each real tensor, so that no call computes or writes anything."""
        if isinstance(value, torch.Tensor):
            if isinstance(value, FakeTensor) or torch._C._functorch.is_functorch_wrapped_tensor(value):
                return value
            if isinstance(value, torch.nn.Parameter):
                raise TraceError(
                    "a parameter is used that is not in the model's tree of modules, as that of a layer in a plain list. "
                    f"Register it: torch.nn.ModuleList, ModuleDict, register_parameter. {self.where()}"
                )
            return self._shell.fake(value)
        if type(value) in (tuple, list):
            return type(value)(self._faked(item) for item in value)
        if type(value) is dict:
            return {key: self._faked(item) for key, item in value.items()}
        return value

    def _constant(self, tensor: torch.Tensor) -> str:
        name = f"_tensor_constant{len(self.constants)}"
        self.constants[name] = tensor
        return name

    def _device(self, device: torch.device) -> Any:
        if device != self.device:
            return device
        if self._device_node is None:
            if self._device_source is None:
                return device
            with self.graph.inserting_after(self._device_source):
                self._device_node = self.graph.call_function(getattr, (self._device_source, "device"))
                self._device_node.meta["val"] = device
        return self._device_node

    def _makes_something(self, result: Any) -> bool:
        """Whether a result holds a tensor or a number that only the graph can compute."""
        if isinstance(result, torch.Tensor):
            return True
        if isinstance(result, SymbolicNumber):
            return self.sizes.is_new(result)
        if isinstance(result, (tuple, list)):
            return any(self._makes_something(item) for item in result)
        if isinstance(result, dict):
            return any(self._makes_something(item) for item in result.values())
        return False

    def _arguments(self, name: str, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        try:
            return tuple(self.argument(arg) for arg in args), {
                key: self.argument(arg) for key, arg in kwargs.items()
            }
        except TraceError as error:
            raise TraceError(f"in an argument of {name!r}: {error}") from error

    def _create(
        self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> torch.fx.Node:
        node = self.graph.create_node(op, target, args, kwargs)
        if result is not None:
            node.meta["val"] = result
        node.meta["nn_module_stack"] = {name: (name, kind) for name, kind in self._modules}
        node.meta["stack_trace"] = stack_trace(sys._getframe(1))
        self._bind_result(result, Value(node))
        return node

    def _bind_result(self, result: Any, value: Value) -> None:
        if isinstance(result, torch.Tensor):
            self._bind(result, value)
            self.sizes.bind_shape(result, functools.partial(self._node_of, result))
        elif isinstance(result, SymbolicNumber):
            self.sizes.bind(result, functools.partial(self._follow, value))
        elif isinstance(result, (tuple, list)):
            if type(result).__module__ == "torch.return_types":
                self._values[id(result)] = value
                self._alive.append(result)
            for index, item in enumerate(result):
                self._bind_result(item, Value(value.node, (*value.path, ("item", index))))
        elif isinstance(result, dict):
            for key, item in result.items():
                self._bind_result(item, Value(value.node, (*value.path, ("item", key))))

    def _bind(self, tensor: torch.Tensor, value: Value) -> None:
        self._values[id(tensor)] = value
        self._alive.append(tensor)

    # --- places

    @contextlib.contextmanager
    def _inside(self, name: str, module: torch.nn.Module) -> Iterator[None]:
        self._modules.append((name, f"{type(module).__module__}.{type(module).__qualname__}"))
        try:
            yield
        finally:
            self._modules.pop()

    def location(self) -> str:
        """`file:line` of the model's code that runs now."""
        frame = model_frame(sys._getframe(1))
        return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "an unknown place"

    def where(self) -> str:
        """The module path, file, line and source text of the model's code that runs now."""
        return place(model_frame(sys._getframe(1)), self._modules[-1] if self._modules else None)


def _caller(depth: int) -> FrameType:
    return sys._getframe(depth + 1)


def _distinct(result: Any, args: Any, kwargs: Any) -> Any:
    """`result`, as an object of its own if it is one of the arguments.

    `x.to(dtype)` or dropout in eval mode may return `x` itself. The two are different nodes: what comes out of
    the call must not be taken for what went in.
    """
    if not any(result is value for value in (*args, *kwargs.values())):
        return result
    alias = result.view_as(result)
    if isinstance(result, FakeTensor):
        alias.constant = result.constant
    return alias


@functools.lru_cache(maxsize=1024)
def _has_inplace_flag(function: Any) -> bool:
    return getattr(function, "__module__", "") == "torch.nn.functional" and "inplace" in getattr(
        getattr(function, "__code__", None), "co_varnames", ()
    )


def _versions(value: Any) -> list[int]:
    return [tensor._version for tensor in _tensors(value) if not tensor.is_inference()]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))


def _contains(data: Any, types: Any) -> bool:
    if isinstance(data, (list, tuple)):
        return any(_contains(item, types) for item in data)
    return isinstance(data, types)
