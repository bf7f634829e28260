"""The result of a capture: a `torch.fx.GraphModule` that copies and pickles without loss.

fx pickles a graph module as its generated code and traces that code again: names change, guards and item assignments raise,
output classes become dicts. Here, the nodes are stored as data. The whole module tree is kept, so that the model and the
graph module can load each other's state dicts.
"""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fxopt.capture.runtime import modes
from fxopt.capture.runtime.stored_nodes import copyable, picklable, rebuilt_graph
from fxopt.errors import GuardError
from fxopt.torch_internals import DERIVED_FROM_GRAPH, REGISTRIES, WRAPPED_CALL

# Attributes that are created again when a module is rebuilt.
_DERIVED = {*DERIVED_FROM_GRAPH, "_containers"}


ASSIGNED = "assigned"
"""Key in the `meta` of a captured method, which returns (result, values): module and name of each attribute that it assigns."""

BY_FIRST_CALL = ("_output_capturing_hooks_installed", "_containers")
"""Attributes that only the first call assigns: of a transformers model, which then hooks its layers, and of a graph module."""


class TracedModule(torch.fx.GraphModule):
    """A captured model.

    It behaves as any `torch.fx.GraphModule`. In addition, `copy.deepcopy`, `pickle` and `torch.save` preserve the
    graph and all names, and `state_dict`, `config`, `device` and `dtype` are those of the model. A call raises
    GuardError in another training mode than at capture, or with inputs that the graph was not captured for.

    The graph module shares `torch.nn` layers and parameters with the model until a pass replaces them, so `.to()`
    moves both. To avoid that, use a `copy.deepcopy` of the graph module.

    Example:
        >>> import copy, pickle, torch, fxopt
        >>> traced = fxopt.trace(torch.nn.Sequential(torch.nn.Linear(4, 2)).eval(), (torch.zeros(3, 4),))
        >>> pickle.loads(pickle.dumps(traced)).code == copy.deepcopy(traced).code == traced.code
        True
        >>> traced(torch.zeros(5, 4))
        Traceback (most recent call last):
        ...
        fxopt.errors.GuardError: input 'input', dimension 0 is 5; the graph was captured for 3 alone. ...
    """

    config: Any
    # Each dtype that the forward read, and where, as `file:line`.
    dtypes_read_at: dict[torch.dtype, str]
    # A parameter of a dtype that the forward read, with that dtype: `model.half()` changes the parameter in place.
    read_parameter: tuple[torch.nn.Parameter, torch.dtype] | None
    # The line where the forward read requires_grad, with the flag of each parameter at capture.
    gradients_read: tuple[str, dict[str, bool]] | None
    # Each global mode that the forward read (`grad`, `autocast`), with its value and the line.
    modes_read: dict[str, tuple[bool, str]]
    # Qualified name of each container -> its training flag at capture.
    captured_training: dict[str, bool]

    def __init__(
        self, root: torch.nn.Module, graph: torch.fx.Graph, class_name: str = "TracedModule"
    ) -> None:
        super().__init__(torch.nn.Module(), torch.fx.Graph(), class_name)
        self.training = root.training
        for registry in REGISTRIES:
            self.__dict__[registry] = root.__dict__[registry]
        for node in graph.find_nodes(op="call_function", target=operator.pow):
            if repr(node.args[0]).startswith("-"):  # torch.fx writes `-1 ** x`, which is -(1 ** x)
                node.target = torch.pow if isinstance(node.meta.get("val"), torch.Tensor) else pow
        self.graph = graph
        self.config = None
        self.dtypes_read_at = {}
        self.read_parameter = None
        self.gradients_read = None
        self.modes_read = {}
        # A plain module is a container that the capture made; every other module is a layer of the model.
        self.captured_training = {
            name: module.training
            for name, module in self.named_modules()
            if type(module) is torch.nn.Module or not name
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._check_training_mode()
        self._check_dtype()
        self._check_gradients()
        for mode, (captured, where) in self.modes_read.items():
            if modes.is_enabled(mode, self.device.type) != captured:
                raise GuardError(
                    f"{self.__class__.__name__} was captured with {mode} {'on' if captured else 'off'}, which its forward "
                    f"reads at {where}: run it so, or capture it in the mode in which you run it."
                )
        with modes.restored_on_error():
            return super().__call__(*args, **kwargs)

    @property
    def device(self) -> torch.device:
        """The device of the first parameter or buffer; the CPU if there is none."""
        return next((t.device for t in self._tensors()), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first floating parameter or buffer; torch's default if there is none."""
        return next((t.dtype for t in self._tensors() if t.is_floating_point()), torch.get_default_dtype())

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from self.parameters()
        yield from self.buffers()

    def _check_training_mode(self) -> None:
        modules = self.__dict__.get("_containers")
        if modules is None:
            named = dict(self.named_modules())
            modules = [
                (name, named[name], flag) for name, flag in self.captured_training.items() if name in named
            ]
            # Not through __setattr__, which would register the modules a second time.
            self.__dict__["_containers"] = modules
        for name, module, flag in modules:
            if module.training != flag:
                wanted = "train()" if flag else "eval()"
                raise GuardError(
                    f"{self.__class__.__name__}{'.' + name if name else ''} was captured in "
                    f"{'training' if flag else 'eval'} mode, which functional dropout and branches of the forward "
                    f"depend on: call .{wanted} first, or capture the model in the mode in which you run it."
                )

    def _check_dtype(self) -> None:
        if self.read_parameter is None or self.read_parameter[0].dtype == self.read_parameter[1]:
            return
        now, captured = self.read_parameter[0].dtype, self.read_parameter[1]
        raise GuardError(
            f"{self.__class__.__name__} was captured in {captured}, which its forward reads at "
            f"{self.dtypes_read_at[captured]}; its parameters are {now} now. A model shares them with its graph, so "
            f"that converting one converts both: capture the converted model, or convert a copy.deepcopy of the model."
        )

    def _check_gradients(self) -> None:
        if self.gradients_read is None:
            return
        where, captured = self.gradients_read
        # A parameter that a pass merged has a new name: it may have the flag of any parameter at capture.
        any_of_them = set(captured.values())
        for name, parameter in self.named_parameters():
            allowed = {captured[name]} if name in captured else any_of_them
            if allowed and parameter.requires_grad not in allowed:
                raise GuardError(
                    f"parameter {name!r} of {self.__class__.__name__} has requires_grad={parameter.requires_grad}; "
                    f"it was {not parameter.requires_grad} at capture, and the forward reads at {where} whether a tensor "
                    "requires gradients. Set the flag back, or capture the model again."
                )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        if any(dtype.is_floating_point for dtype in self.dtypes_read_at):
            for tensor in self._tensors():
                if tensor.dtype in self.dtypes_read_at:
                    probe = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                    if fn(probe).dtype != tensor.dtype:
                        raise GuardError(
                            f"{self.__class__.__name__} cannot change its dtype to {fn(probe).dtype}: the forward "
                            f"reads a dtype at {self.dtypes_read_at[tensor.dtype]}, and the graph holds what it read. "
                            "Convert the model and capture it again, or use the pass ChangePrecision."
                        )
                    break
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def recompile(self) -> Any:
        """Generate the code of the graph; a tracer that calls it with proxies gets its nodes, including modes and checks."""
        cls: Any = self.__class__
        # torch.compile compiles at most eight versions of a function, then falls back to eager: each graph gets its own function.
        call = TracedModule.__call__
        if self._plain_class().__call__ is call:
            own = types.FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)
            cls.__call__ = functools.update_wrapper(own, call)
            if WRAPPED_CALL in vars(cls):  # it calls the previous function of the graph
                delattr(cls, WRAPPED_CALL)
        code = super().recompile()
        forward = cls.forward

        @functools.wraps(forward)
        def retraced(self: TracedModule, *args: Any, **kwargs: Any) -> Any:
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.fx.Proxy):
                    return _retrace(
                        self, value.tracer, inspect.signature(forward).bind(self, *args, **kwargs)
                    )
            return forward(self, *args, **kwargs)

        cls.forward = retraced
        return code

    def __deepcopy__(self, memo: dict[int, Any]) -> TracedModule:
        result = _empty(self._plain_class(), self.__class__.__name__)
        memo[id(self)] = result
        result.__dict__.update(copy.deepcopy(self._state(), memo))
        result.graph = rebuilt_graph(copyable(self.graph))
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        nodes = picklable(self.graph)
        return _rebuild, (self._plain_class(), self.__class__.__name__, self._state(), nodes)

    def _state(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in _DERIVED}

    def _plain_class(self) -> type[TracedModule]:
        """Return the class without the subclass that fx creates for every instance."""
        return next(c for c in type(self).__mro__ if not c.__qualname__.endswith("GraphModuleImpl"))


def _retrace(module: TracedModule, tracer: Any, inputs: inspect.BoundArguments) -> Any:
    """Write the nodes of the graph into the graph of a tracer, and return the proxy of the output."""
    inputs.apply_defaults()
    path = tracer.path_of_module(module) if module is not tracer.root else ""
    values: dict[torch.fx.Node, Any] = {}
    for node in module.graph.nodes:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "placeholder":
            values[node] = inputs.arguments[str(node.target).lstrip("*")]
        elif node.op == "output":
            return args[0]
        else:
            inside = path and node.op in ("call_module", "get_attr")
            target = f"{path}.{node.target}" if inside else node.target
            values[node] = tracer.create_proxy(node.op, target, args, kwargs)
    return None


def _empty(cls: type[TracedModule], class_name: str) -> TracedModule:
    module = cls.__new__(cls)
    type(module).__name__ = class_name
    return module


def _rebuild(cls: type[TracedModule], class_name: str, state: dict[str, Any], nodes: Any) -> TracedModule:
    module = _empty(cls, class_name)
    module.__dict__.update(state)
    module.graph = rebuilt_graph(nodes)
    return module
