"""A pass written as two functions: one computes what a graph has, the other what the graph gets in its place."""

from __future__ import annotations

import abc
import copy
import dataclasses
import functools
import inspect
import threading
import unittest.mock
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node, Proxy
from torch.fx.node import map_aggregate, map_arg
from torch.fx.proxy import GraphAppendingTracer

from fxopt import graph, submodules
from fxopt.errors import PassError
from fxopt.graph_index import GraphIndex
from fxopt.rewriting.agreement import error_of, unlike
from fxopt.rewriting.explanation import Refusal
from fxopt.rewriting.random_inputs import Numbers
from fxopt.rewriting.rewrite import ReversibleRewrite
from fxopt.rewriting.rewriter import Rewriter
from fxopt.rewriting.spelling import COMMUTATIVE, Call, call_of
from fxopt.rewriting.weights import Left, Restore, options_of

RTOL = 1e-9
"""Limit of the error in float64, relative to the largest value of a row."""

NUMBERS = (0.3, -1.7)
"""Numbers that take the place of the number of a site in further proofs."""


@dataclasses.dataclass(frozen=True)
class Found:
    """A place that computes the pattern.

    Attributes:
        node: the node that gives its result.
        inside: the nodes of the graph, by the nodes of the pattern.
        values: what the parameters stand for: nodes, numbers, and layers.
        calls: the nodes that call the layers, by parameter.
    """

    node: Node
    inside: dict[Node, Node] = dataclasses.field(default_factory=dict)
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    calls: dict[str, Node] = dataclasses.field(default_factory=dict)

    def copy(self) -> Found:
        """A copy, to try another way."""
        return Found(self.node, dict(self.inside), dict(self.values), dict(self.calls))


class Pattern(ReversibleRewrite[Found]):
    """A pass in two functions: `replacement` takes the place of `pattern`, wherever a graph computes this.

    A parameter without annotation is any value that a node gives. `float` and `int` are a number, and a class of layers is a
    layer of exactly this class. Both functions compute one value. Functions, methods, operators of Python and layers without
    weights are one spelling, and so are both orders of `+` and `*`.

    `replacement` gets the numbers and layers of a place. It may call these layers, and new ones that it makes, and changes
    none that it was given: a copy first. New layers have the dtype, device, `requires_grad` and training flag of the old ones.

    A place is left alone, with the reason, where layers have hooks, shared weights or other calls, where other nodes use a
    value inside, or where one writes into what is computed. Before the first place of a kind is rewritten, both functions run
    on random values, weights and numbers in float64; a rule that is wrong is a `PassError`, and nothing is changed.

    Example:
        >>> import copy, torch
        >>> from torch import nn
        >>> class FoldNumber(Pattern):
        ...     def pattern(self, x, c: float, linear: nn.Linear):
        ...         return linear(x * c)
        ...     def replacement(self, x, c, linear):
        ...         folded = copy.deepcopy(linear)
        ...         folded.weight.mul_(c)
        ...         return folded(x)
        >>> class Model(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = nn.Linear(2, 3)
        ...     def forward(self, x):
        ...         return self.layer(0.5 * x)
        >>> import fxopt
        >>> FoldNumber().explain(fxopt.trace(Model(), (torch.ones(1, 2),)))
        FoldNumber: 1 sites, 0 refused
          layer  layer  ...  rewritten
    """

    preserves_computation = True
    _proved: ClassVar[set[tuple[Any, ...]]] = set()

    @abc.abstractmethod
    def pattern(self, *values: Any, **named: Any) -> Any:
        """Compute what is to be replaced."""

    @abc.abstractmethod
    def replacement(self, *values: Any, **named: Any) -> Any:
        """Compute what takes its place."""

    def refuses(self, *values: Any, **named: Any) -> str | None:
        """Say why a place is to be left alone: gets what `replacement` gets, with nodes for values."""
        return None

    inverse: Callable[..., Any] | None = None
    """Makes the old layer, or a tuple of the old ones in the order of the parameters, of the new layer and the numbers of a
    place, which it gets by name. Without it, undo puts copies of the old layers back, unless the new weights have changed."""

    def match(self, graph_module: GraphModule) -> Iterator[Found | Refusal]:
        """Yield the places that compute the pattern and do not overlap."""
        wanted, index, taken = _Wanted(self), GraphIndex(graph_module), set[Node]()
        for node in index.nodes:
            found = wanted.found_at(node, index)
            if found is None or not taken.isdisjoint(found.inside.values()):
                continue
            taken.update(found.inside.values())
            reason = self._obstacle(index, found, wanted) or self._unproved(found, wanted)
            yield Refusal(node, reason) if reason else found

    def opens_sites(self, graph_module: GraphModule, sites: Iterable[Found]) -> bool:
        """Return True: the value of a replacement may be a part of the pattern again."""
        return True

    def apply(self, rewriter: Rewriter, site: Found) -> Node:
        """Write the replacement in front of the result of the pattern, and erase the pattern."""
        made = _traced(self.replacement, site.values)
        paths, gone = self._place(rewriter, site, made)
        nodes: dict[Node, Node] = {}
        for node in made.graph.nodes:
            if node.op == "placeholder":
                nodes[node] = site.values[str(node.target)]
            elif node.op != "output":
                target = (
                    paths[id(made.modules[str(node.target)])] if node.op == "call_module" else node.target
                )
                args, kwargs = map_arg((node.args, node.kwargs), nodes.__getitem__)
                nodes[node] = rewriter.create(node.op, target, args, kwargs, before=site.node)
        result = nodes[made.result]
        rewriter.replace_uses(site.node, result)
        for node in sorted(site.inside.values(), reverse=True):
            rewriter.erase(node)
        if gone:
            rewriter.swap({}, gone)
        return result

    def _place(self, rewriter: Rewriter, site: Found, made: _Traced) -> tuple[dict[int, str], list[str]]:
        """Put new layers into the graph module; returns the path of each called layer by id, and the paths that are free now."""
        paths = {id(site.values[name]): str(call.target) for name, call in site.calls.items()}
        called = {id(module): module for module in made.modules.values()}
        gone = [str(call.target) for name, call in site.calls.items() if id(site.values[name]) not in called]
        new = [module for identity, module in called.items() if identity not in paths]
        for module in new:
            _check_new(self, module, [site.values[name] for name in site.calls])
        if new and gone:
            place = str(
                max(site.calls[name] for name in site.calls if str(site.calls[name].target) in gone).target
            )
            restore = self._restore(site, place, gone) if len(new) == 1 else None
            rewriter.swap({place: new[0]}, [path for path in gone if path != place], restore)
            paths[id(new[0])], new, gone = place, new[1:], []
        parent = submodules.split_path(next(iter(paths.values()), ""))[0]
        for module in new:
            paths[id(module)] = rewriter.add_module(parent, type(module).__name__.lower(), module)
        return paths, gone

    def _restore(self, site: Found, place: str, gone: list[str]) -> Restore | None:
        if self.inverse is None:
            return None
        numbers = {
            name: value for name, value in site.values.items() if not isinstance(value, Node | nn.Module)
        }
        return functools.partial(_inverted, self, place, tuple(gone), numbers)

    def _obstacle(self, index: GraphIndex, found: Found, wanted: _Wanted) -> str | None:
        inside = {*found.inside.values()}
        for name, call in found.calls.items():
            if reason := index.replacing_obstacle(call, wanted.kinds[name]):
                return reason
        for node in inside:
            if index.memory.writes(node) or not index.memory.is_pure(node):
                return f"{node.name} writes, or has another effect"
            if node.op == "call_module" and (reason := index.removing_obstacle(node)):
                return reason
        for node in inside - {found.node}:
            if others := [user.name for user in node.users if user not in inside]:
                return f"{node.name} is also used by {', '.join(others)}"
            for value in node.all_input_nodes:
                if reason := index.memory.write_between(node, found.node, value):
                    return reason
        return self.refuses(**found.values)

    def _unproved(self, found: Found, wanted: _Wanted) -> str | None:
        """Run both functions on random values, weights and numbers; PassError where they differ."""
        if not self.preserves_computation:
            return None
        described = {
            name: graph.value_of(value) for name, value in found.values.items() if isinstance(value, Node)
        }
        if not all(isinstance(value, Tensor) for value in described.values()):
            return "the shape of an input is unknown: capture the model with fxopt.trace"
        key = self.signature, *(_kind(described.get(name, value)) for name, value in found.values.items())
        if key in self._proved:
            return None
        floats = [name for name, kind in wanted.kinds.items() if kind is float]
        for number in (None, *NUMBERS) if floats else (None,):
            values = {**found.values, **({} if number is None else dict.fromkeys(floats, number))}
            if number is None or not self.refuses(**values):
                self._prove({**values, **described})
        self._proved.add(key)
        return None

    def _prove(self, values: Mapping[str, Any]) -> None:
        drawn = {name: _random(value, seed) for seed, (name, value) in enumerate(values.items())}
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            sides = [function(**copy.deepcopy(drawn)) for function in (self.pattern, self.replacement)]
        reason = unlike(sides[0], sides[1], True)
        if reason is None and (error := error_of(sides[0], sides[1], 1e-30)) > RTOL:
            reason = f"off by {error:.2g} of the largest value in its row"
        if reason:
            given = ", ".join(f"{name}={_text(value)}" for name, value in values.items())
            raise PassError(
                f"{self!r} is wrong: for {given}, the value of replacement is {reason}, in float64"
            )


class _Wanted:
    """The pattern of a pass as a graph.

    Attributes:
        kinds: the annotations of its parameters, by name.
    """

    def __init__(self, pass_: Pattern) -> None:
        parameters = inspect.signature(pass_.pattern, eval_str=True).parameters.values()
        self.kinds = {each.name: each.annotation for each in parameters}
        for name, kind in self.kinds.items():
            if not (kind in (inspect.Parameter.empty, int, float) or _is_layer(kind)):
                raise PassError(
                    f"the parameter {name} of {type(pass_).__name__}.pattern is annotated with {kind!r}: give float, int, a "
                    "class of layers, or nothing"
                )
        self._traced = _traced(
            pass_.pattern, {n: _Layer() if _is_layer(k) else None for n, k in self.kinds.items()}
        )
        self._names = {
            node: str(node.target) for node in self._traced.graph.nodes if node.op == "placeholder"
        }
        self._calls = {node: self._call(node) for node in self._traced.graph.nodes}
        if self._traced.result in self._names:
            raise PassError(
                f"{type(pass_).__name__}.pattern returns {self._traced.result}, which each graph computes"
            )

    def found_at(self, node: Node, index: GraphIndex) -> Found | None:
        """The place at which `node` gives the result of the pattern; `None` if it does not."""
        found = self._match(self._traced.result, node, Found(node), index)
        if found is None:
            return None
        values, calls = (
            {n: held[n] for n in self.kinds if n in held} for held in (found.values, found.calls)
        )
        return Found(node, found.inside, values, calls)

    def _call(self, node: Node) -> Call | str | None:
        """The operator that a node of the pattern calls, or the parameter that is the layer."""
        if node.op != "call_module":
            return call_of(node)
        module = self._traced.modules[str(node.target)]
        return str(node.target) if isinstance(module, _Layer) else call_of(node, module)

    def _match(self, wanted: Any, value: Any, found: Found, index: GraphIndex) -> Found | None:
        """`found` with all that makes `value` what the pattern computes at its node `wanted`."""
        if not isinstance(wanted, Node):
            same = type(wanted) is type(value) and not isinstance(value, Node) and wanted == value
            return found if same or (_is_number(wanted) and _is_number(value) and wanted == value) else None
        if wanted in self._names:
            return self._bound(self._names[wanted], value, found)
        if not isinstance(value, Node) or found.inside.get(wanted, value) is not value:
            return None
        found = found.copy()
        found.inside[wanted] = value
        call, module = self._calls[wanted], index.module(value) if value.op == "call_module" else None
        if isinstance(call, str):
            if (
                type(module) is not self.kinds[call]
                or value.kwargs
                or found.calls.get(call, value) is not value
            ):
                return None
            found.values[call], found.calls[call] = module, value
            return self._all(dict(enumerate(wanted.args)), dict(enumerate(value.args)), found, index)
        own = call_of(value, module)
        if call is None or own is None or call.name != own.name:
            return None
        given = self._all(call.arguments, own.arguments, found, index)
        if given is None and call.name in COMMUTATIVE and own.arguments.keys() == {"self", "other"}:
            turned = {"self": own.arguments["other"], "other": own.arguments["self"]}
            given = self._all(call.arguments, turned, found, index)
        return given

    def _all(
        self, wanted: Mapping[Any, Any], values: Mapping[Any, Any], found: Found | None, index: GraphIndex
    ) -> Found | None:
        if wanted.keys() != values.keys():
            return None
        for name, each in wanted.items():
            found = found and self._match(each, values[name], found, index)
        return found

    def _bound(self, name: str, value: Any, found: Found) -> Found | None:
        kind = self.kinds[name]
        fits = isinstance(value, Node) if kind is inspect.Parameter.empty else _is_number(value)
        if not fits or (kind is int and type(value) is not int):
            return None
        known = found.values.get(name, value)
        if known is not value and not (_is_number(known) and known == value):
            return None
        found = found.copy()
        found.values[name] = value
        return found


class _Layer(nn.Module):
    """Stands for a layer in a pattern."""


@dataclasses.dataclass(frozen=True)
class _Traced:
    """A function as a graph.

    Attributes:
        graph: the graph.
        result: the node that gives its value.
        modules: what its nodes call, by target.
    """

    graph: Graph
    result: Node
    modules: dict[str, nn.Module]


_LOCK = threading.RLock()


def _traced(function: Callable[..., Any], values: Mapping[str, Any]) -> _Traced:
    """Run a function on proxies of nodes, where layers become nodes that call them.

    Args:
        function: the function, a method of a pattern.
        values: numbers and layers by name, and nodes, or `None`, for what becomes a proxy.
    """
    made, modules, call = Graph(), dict[str, nn.Module](), nn.Module.__call__
    tracer = GraphAppendingTracer(made)

    def node_of(value: Any) -> Any:
        return value.node if isinstance(value, Proxy) else value

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(value, Proxy) for value in (*args, *kwargs.values())):
            return call(module, *args, **kwargs)
        known = (name for name, value in values.items() if value is module)
        target = next(known, f"new_{id(module)}")
        modules[target] = module
        given = map_aggregate(args, node_of), map_aggregate(kwargs, node_of)
        return Proxy(made.call_module(target, *given), tracer)

    given = {
        name: Proxy(made.placeholder(name), tracer) if value is None or isinstance(value, Node) else value
        for name, value in values.items()
    }
    # Layers of other threads, which get no proxies, compute as ever.
    with _LOCK, torch.no_grad(), unittest.mock.patch.object(nn.Module, "__call__", called):
        result = function(**given)
    if not isinstance(result, Proxy):
        raise PassError(
            f"{function.__qualname__} returned a {type(result).__name__}: it has to return one value"
        )
    return _Traced(made, result.node, modules)


def _inverted(
    pass_: Pattern,
    place: str,
    paths: tuple[str, ...],
    numbers: Mapping[str, Any],
    now: Mapping[str, Any],
    left: Mapping[str, Left],
) -> Mapping[str, Any]:
    assert pass_.inverse is not None
    with torch.no_grad():
        old = pass_.inverse(now[place], **numbers)
    return dict(zip(paths, old if isinstance(old, tuple) else (old,), strict=True))


def _check_new(pass_: Pattern, new: nn.Module, old: list[nn.Module]) -> None:
    """Raise a PassError if a new layer has another dtype, device, gradient flag or training flag than the old ones."""
    for fact in (_flags, _kinds):
        known = {each for layer in old for each in fact(layer)}
        other = {*fact(new)} - known if known else set()
        if other:
            raise PassError(
                f"replacement of {pass_!r} made a {type(new).__name__} with {', '.join(sorted(other))}, and the old layers "
                f"have {', '.join(sorted(known))}: start from a copy of an old layer, or convert the new one"
            )


def _flags(layer: nn.Module) -> list[str]:
    return [f"training={layer.training}"]


def _kinds(layer: nn.Module) -> list[str]:
    return [f"{p.dtype} on {p.device}, requires_grad={p.requires_grad}" for p in layer.parameters()]


def _kind(value: Any) -> Any:
    """The property of a value for which a proof holds."""
    if isinstance(value, nn.Module):
        tensors = [name for name, _ in (*value.named_parameters(), *value.named_buffers())]
        return type(value), value.training, options_of(value), tuple(tensors)
    if isinstance(value, Tensor):
        return value.dtype, value.ndim
    return type(value) if isinstance(value, float) else value


def _random(value: Any, seed: int) -> Any:
    """Random values in float64 for a description, a copy of a layer with other weights, or the number itself."""
    if isinstance(value, Tensor):
        drawn = Numbers(torch.float64, integers=2).like(value, seed)
        return drawn.double() if drawn.is_floating_point() else drawn
    if not isinstance(value, nn.Module):
        return value
    layer, generator = copy.deepcopy(value).cpu().double(), torch.Generator().manual_seed(seed)
    for tensor in (*layer.parameters(), *layer.buffers()):
        if tensor.is_floating_point():
            tensor.data += torch.rand(tensor.shape, dtype=torch.float64, generator=generator)
    return layer


def _text(value: Any) -> str:
    return f"{value.dtype} {[*value.shape]}" if isinstance(value, Tensor) else repr(value)


def _is_layer(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, nn.Module)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)
