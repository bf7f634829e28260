"""One activation function in the place of another: GELU in its tanh form, or any other pair."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, Node

from fxopt import graph, submodules
from fxopt.graph_index import GraphIndex
from fxopt.rewrite import TRACE, Change, Refusal, ReversibleRewrite, leave_trace, traces


@dataclasses.dataclass(frozen=True)
class ActivationCalls:
    """All calls of an activation module with its names, or one call of a function or method."""

    calls: tuple[Node, ...]
    paths: tuple[str, ...] = ()

    @property
    def node(self) -> Node:
        return self.calls[0]


@dataclasses.dataclass(frozen=True)
class ReplaceActivation(ReversibleRewrite[ActivationCalls]):
    """Replaces an activation function wherever it is called: as a module, a function or a method.

    Args:
        source: the activation to replace: a name out of `ACTIVATIONS`, or a type of module, which must be
            matched exactly.
        target: what takes its place: a name, or a type of module that can be made without arguments.

    By default exact GELU becomes `0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`, which is faster and
    differs by less than 5e-4 in absolute value.

    Undo it before the graph is traced again: a function in a new trace tells nothing of what it was, so that
    undoing there leaves it as it is.

    Source: Hendrycks and Gimpel, Gaussian Error Linear Units, 2016, arXiv:1606.08415.

    Example:
        >>> import torch
        >>> replace = ReplaceActivation("relu", "silu")
        >>> traced = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU()))
        >>> replace(traced).get_submodule("0")
        SiLU()
        >>> replace(traced, reverse=True).get_submodule("0")
        ReLU()
    """

    source: str | type[nn.Module] = "gelu"
    target: str | type[nn.Module] = "gelu_tanh"

    def __post_init__(self) -> None:
        for option in ("source", "target"):
            value = getattr(self, option)
            if isinstance(value, str) and value not in ACTIVATIONS:
                raise ValueError(f"{option} is {value!r}; known names are {', '.join(sorted(ACTIVATIONS))}")
            if not isinstance(value, str) and not (isinstance(value, type) and issubclass(value, nn.Module)):
                raise TypeError(f"{option} is {value!r}; give a name or a type of torch.nn.Module")
        if isinstance(self.target, type):
            try:
                inspect.signature(self.target).bind()
            except TypeError as error:
                raise TypeError(
                    f"target is {self.target.__name__}, which cannot be made without arguments ({error}); give a "
                    "type of module that can, such as a subclass that fixes them"
                ) from None
        if self.source == self.target:
            raise ValueError(f"source and target are both {self.source!r}, so there is nothing to replace")

    def match(self, graph_module: GraphModule) -> Iterator[ActivationCalls | Refusal]:
        """Yield the calls of the source activation; all calls of one module are one site."""
        index = GraphIndex(graph_module)
        kind = ACTIVATIONS[self.source].module if isinstance(self.source, str) else self.source
        for node in index.calls_like(kind):
            inexact = index.inexact(node, kind)
            if inexact:
                yield Refusal(node, inexact)
        for node in index.nodes:
            if node.op == "call_module":
                module = index.module(node)
                calls = index.call_sites(module)
                if node is not calls[0] or not self._is_source(module) or self.signature in traces(module):
                    continue  # a module that this pass made may be of the source's type, too
                writes = getattr(module, "inplace", False)
                reason = "it writes into its input" if writes else _module_obstacle(index, calls, module)
                site = ActivationCalls(tuple(calls), tuple(index.names(module)))
            elif isinstance(self.source, str) and _calls(node, ACTIVATIONS[self.source]):
                reason = "it writes into its input" if index.memory.writes(node) else None
                site = ActivationCalls((node,))
            else:
                continue
            yield Refusal(node, reason) if reason else site

    def apply(self, graph_module: GraphModule, site: ActivationCalls) -> Change:
        """Put the new activation in the place of the old one."""
        if not site.paths:
            return self._replace_function(graph_module, site.node)
        old = graph_module.get_submodule(site.paths[0])
        new = self._new_module(old)
        for path in site.paths:
            submodules.set_module(graph_module, path, new)
        nodes = {str(number): call for number, call in enumerate(site.calls)}
        keywords = tuple(next(iter(call.kwargs), None) for call in site.calls)
        data = ModuleCalls(submodules.without_tensors(old), site.paths, keywords)
        for call in site.calls:  # the new module may have another name for its input
            call.args, call.kwargs = tuple(call.all_input_nodes), {}
        return Change(site.calls, nodes, site.paths, data)

    def revert(self, graph_module: GraphModule, nodes: dict[str, Node], data: Any) -> None:
        """Put the old activation back."""
        if isinstance(data, FunctionCall):
            self._restore_function(graph_module, nodes["0"], data)
            return
        paths = [str(node.target) for node in nodes.values()]
        modules = [graph_module.get_submodule(path) for path in paths]
        if any(self.signature not in traces(module) for module in modules):
            raise self.changed(nodes["0"], ", ".join(paths))
        if any(len(node.args) != 1 or node.kwargs for node in nodes.values()):
            raise self.changed(nodes["0"], f"a call of {', '.join(paths)}")
        old = submodules.without_tensors(data.shell).train(modules[0].training)
        for name in data.names:
            submodules.set_module(graph_module, name, old)
        for node, keyword in zip(nodes.values(), data.keywords, strict=True):
            if keyword:
                node.args, node.kwargs = (), {keyword: node.all_input_nodes[0]}

    def _replace_function(self, graph_module: GraphModule, node: Node) -> Change:
        (value,) = node.all_input_nodes
        before = (node.op, node.target, *_mapped(node.args, node.kwargs, value, INPUT))
        path = None
        if isinstance(self.target, str):
            activation = ACTIVATIONS[self.target]
            node.op, node.target, node.kwargs = "call_function", activation.function, dict(activation.options)
        else:
            path = submodules.free_path(graph_module, "", f"fxopt_activation_{node.name}")
            submodules.set_module(graph_module, path, self._new_module(graph_module))
            node.op, node.target, node.kwargs = "call_module", path, {}
        node.args = (value,)
        data = FunctionCall(before, path)
        return Change((node,), {"0": node}, (path,) if path else (), data)

    def _restore_function(self, graph_module: GraphModule, node: Node, data: FunctionCall) -> None:
        if isinstance(self.target, str):  # fx's pickle may have spelled defaults out
            as_left = _calls(node, ACTIVATIONS[self.target])
        else:
            as_left = (node.op, node.target, len(node.args)) == ("call_module", data.path, 1)
        if not as_left:
            raise self.changed(node, node.name)
        (value,) = node.all_input_nodes
        node.op, node.target, args, kwargs = data.before
        node.args, node.kwargs = _mapped(args, kwargs, INPUT, value)
        if data.path:
            submodules.remove_module(graph_module, data.path)

    def _is_source(self, module: nn.Module) -> bool:
        if isinstance(self.source, str):
            return _same_activation(module, ACTIVATIONS[self.source].make())
        return type(module) is self.source

    def _new_module(self, old: nn.Module) -> nn.Module:
        new = ACTIVATIONS[self.target].make() if isinstance(self.target, str) else self.target()
        leave_trace(new.train(old.training), self, [old])
        return new


@dataclasses.dataclass(frozen=True)
class Activation:
    """How an activation is spelled in a graph, and how it is made."""

    module: type[nn.Module]
    function: Callable[..., Any]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    other_functions: tuple[Callable[..., Any], ...] = ()
    method: str | None = None

    def make(self) -> nn.Module:
        """A new module."""
        return self.module(**self.options)


ACTIVATIONS: Mapping[str, Activation] = {
    "elu": Activation(nn.ELU, F.elu),
    "gelu": Activation(nn.GELU, F.gelu),
    "gelu_tanh": Activation(nn.GELU, F.gelu, {"approximate": "tanh"}),
    "hardsigmoid": Activation(nn.Hardsigmoid, F.hardsigmoid),
    "hardswish": Activation(nn.Hardswish, F.hardswish),
    "leaky_relu": Activation(nn.LeakyReLU, F.leaky_relu),
    "mish": Activation(nn.Mish, F.mish),
    "relu": Activation(nn.ReLU, F.relu, other_functions=(torch.relu,), method="relu"),
    "relu6": Activation(nn.ReLU6, F.relu6),
    "selu": Activation(nn.SELU, F.selu, other_functions=(torch.selu,)),
    "sigmoid": Activation(nn.Sigmoid, torch.sigmoid, other_functions=(F.sigmoid,), method="sigmoid"),
    "silu": Activation(nn.SiLU, F.silu),
    "softplus": Activation(nn.Softplus, F.softplus),
    "tanh": Activation(nn.Tanh, torch.tanh, other_functions=(F.tanh,), method="tanh"),
}
"""The activations that `ReplaceActivation` knows by name, each with the default options of its module."""


@dataclasses.dataclass(frozen=True)
class Input:
    """Stands for the input in the stored arguments of a call."""


INPUT = Input()


@dataclasses.dataclass(frozen=True)
class ModuleCalls:
    """What undo needs of the calls of a module: what it was, where, and the name of the input where it was given."""

    shell: nn.Module
    names: tuple[str, ...]
    keywords: tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class FunctionCall:
    """What undo needs of a call of a function: what it was, and the module made for it."""

    before: tuple[str, Any, Any, Any]
    path: str | None


def _module_obstacle(index: GraphIndex, calls: list[Node], module: nn.Module) -> str | None:
    """Why a module cannot be replaced by another at all its calls; `None` if it can."""
    unclear = [call.name for call in calls if graph.input_of(call, module) is None]
    if unclear:
        return f"{', '.join(unclear)} does not call it with one tensor alone"
    return index.obstacle_everywhere(module)


def _mapped(args: Any, kwargs: Any, old: Any, new: Any) -> tuple[Any, Any]:
    """The arguments with `new` where `old` was."""
    mapped: tuple[Any, Any] = torch.fx.node.map_aggregate(
        (args, kwargs), lambda item: new if item is old or item == old else item
    )
    return mapped


def _same_activation(module: nn.Module, model: nn.Module) -> bool:
    return type(module) is type(model) and _settings(module) == _settings(model)


def _settings(module: nn.Module) -> dict[str, Any]:
    ignored = {"training", "inplace", "forward", TRACE}  # a forward of its own is an obstacle, not a setting
    return {k: v for k, v in vars(module).items() if not k.startswith("_") and k not in ignored}


def _calls(node: Node, activation: Activation) -> bool:
    """Whether a node calls an activation as a function or method, with its own options."""
    if len(node.all_input_nodes) != 1:
        return False
    if node.op == "call_method":
        return node.target == activation.method and len(node.args) == 1 and not node.kwargs
    functions = (activation.function, *activation.other_functions)
    if node.op != "call_function" or node.target not in functions:
        return False
    options = {k: v for k, v in _options(node).items() if not isinstance(v, Node) and k != "inplace"}
    return options == activation.options


# Functions written in C++ have no signature to read defaults from.
_DEFAULTS: Mapping[Any, dict[str, Any]] = {
    F.gelu: {"approximate": "none"},
    F.softplus: {"beta": 1, "threshold": 20},
}


def _options(node: Node) -> dict[str, Any]:
    """The arguments of a call by name, without those that have their default."""
    target: Any = node.target
    try:
        signature = inspect.signature(target)
    except ValueError:  # a builtin: its options are keywords, or follow the input in this order
        defaults = _DEFAULTS.get(target, {})
        arguments = dict(zip(["input", *defaults], node.args, strict=False)) | dict(node.kwargs)
    else:
        defaults = {name: parameter.default for name, parameter in signature.parameters.items()}
        arguments = signature.bind(*node.args, **node.kwargs).arguments
    return {name: value for name, value in arguments.items() if value != defaults.get(name, Input)}
