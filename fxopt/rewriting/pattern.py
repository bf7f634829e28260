"""A pass written as two functions: the computation to find in a graph, and the computation that replaces it."""

from __future__ import annotations

import abc
import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxopt import effects, graph, submodules
from fxopt.compare import epsilon, pairs, tensor_error, unlike
from fxopt.errors import PassError, UndoError
from fxopt.graph_index import GraphIndex
from fxopt.operators import name_of
from fxopt.rewriting.explanation import Refusal
from fxopt.rewriting.function_graph import FunctionGraph, trace_function
from fxopt.rewriting.proof import Proof, prove, strides_of
from fxopt.rewriting.random_inputs import is_finite
from fxopt.rewriting.rewrite import ReversibleRewrite
from fxopt.rewriting.rewriter import Rewriter
from fxopt.rewriting.spelling import Call, arguments_of, call_of, ways
from fxopt.rewriting.weights import Keep, Left, Restore


@dataclasses.dataclass(frozen=True)
class PatternSite:
    """A site that computes the pattern.

    Attributes:
        node: the node whose value is the result of the pattern.
        inside: the matched nodes of the graph, by the nodes of the pattern.
        values: the nodes, numbers and layers that the parameters match.
        calls: the nodes that call the layers, by parameter.
        steps: the calls of the proved replacement; None without a proof.
    """

    node: Node
    inside: dict[Node, Node] = dataclasses.field(default_factory=dict)
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    calls: dict[str, Node] = dataclasses.field(default_factory=dict)
    steps: tuple[Any, ...] | None = None


class Pattern(ReversibleRewrite[PatternSite]):
    """A pass in two functions: wherever a graph computes `pattern`, it gets `replacement` instead.

    A parameter without annotation, or annotated with `Tensor`, matches the value of any node. `float` and `int` match a
    number, and a layer class matches a layer of exactly this class. Both functions return one value. The pattern matches
    whether the model calls an operator as function, method, Python operator or layer without weights; `+` and `*` match in
    both orders.

    `replacement` gets the numbers and layers of a site, and calls these layers or new ones. It must not change a given layer,
    only a copy. A new layer must have the dtype, device, `requires_grad` and training flag of the old layers.

    A site is refused if its layers have hooks, shared weights or other calls, if other nodes use an inner value, or if a
    node writes into the values of the site. Before the first site of a kind is rewritten, both functions run on random
    values, weights and numbers; if they differ, a `PassError` is raised and nothing changes.

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
          layer  layer  ...  site
    """

    preserves_computation = True

    @abc.abstractmethod
    def pattern(self, *values: Any, **named: Any) -> Any:
        """Compute the value to find in the graph."""

    @abc.abstractmethod
    def replacement(self, *values: Any, **named: Any) -> Any:
        """Compute the value that replaces that of `pattern`."""

    def refuses(self, *values: Any, **named: Any) -> str | None:
        """Return a reason to refuse a site, or None; the arguments are those of `pattern`, with nodes for values."""
        return None

    inverse: Callable[..., Any] | None = None
    """Optional method: computes the old layer, or a tuple of the old layers in the order of the parameters, from the new layer,
    and the numbers by name. Undo calls it if the new weights have changed; without `inverse`, it raises `UndoError` then."""

    def match(self, graph_module: GraphModule) -> Iterator[PatternSite | Refusal]:
        """Yield sites that compute the pattern and do not overlap; overlapping ones are found after these are rewritten."""
        index, taken = GraphIndex(graph_module), set[Node]()
        wanted = _Wanted(self, index)
        for node in index.nodes:
            found = wanted.found_at(node)
            if found is None or not taken.isdisjoint((*found.inside.values(), *_nodes(found.values))):
                continue
            reason, steps = self._obstacle(index, found, wanted), None
            if reason is None and self.preserves_computation:
                proof = self._proof_at(index, found)
                reason, steps = proof.reason, proof.steps
            taken.update(() if reason else found.inside.values())
            yield Refusal(node, reason) if reason else dataclasses.replace(found, steps=steps)

    def opens_sites(self, graph_module: GraphModule, sites: Iterable[PatternSite]) -> bool:
        """Return True, because the value of a replacement may be part of another match."""
        return True

    def apply(self, rewriter: Rewriter, site: PatternSite) -> Node:
        """Insert the replacement before the result of the pattern, and erase the pattern."""
        made = trace_function(self, "replacement", site.values)
        if site.steps is not None and made.steps != site.steps:
            # The calls depend on the weights of the layers, so prove the replacement for these weights.
            proof = self._proof_at(GraphIndex(rewriter.graph_module), site, own_layers=True)
            reason = proof.reason or (proof.steps != made.steps and "it makes other calls each time")
            if reason:
                raise PassError(f"replacement of {self!r} cannot be proven for these layers: {reason}")
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
        for node in sorted({*site.inside.values()}, reverse=True):
            rewriter.erase(node)
        if gone:
            rewriter.swap({}, gone)
        return result

    def _place(
        self, rewriter: Rewriter, site: PatternSite, made: FunctionGraph
    ) -> tuple[dict[int, str], list[str]]:
        """Add new layers to the graph module; returns the path of each called layer by id, and the paths to remove."""
        paths = {id(site.values[name]): str(call.target) for name, call in site.calls.items()}
        called = {id(module): module for module in made.modules.values()}
        gone = [str(call.target) for name, call in site.calls.items() if id(site.values[name]) not in called]
        new = [module for identity, module in called.items() if identity not in paths]
        for module in new:
            _check_new(self, module, [site.values[name] for name in site.calls])
        if new and gone:
            place = str(max(call for call in site.calls.values() if str(call.target) in gone).target)
            restore = self._restore(site, place, new[0], gone) if len(new) == 1 else None
            rewriter.swap({place: new[0]}, [path for path in gone if path != place], restore)
            paths[id(new[0])], new, gone = place, new[1:], []
        parent = submodules.split_path(next(iter(paths.values()), ""))[0]
        for module in new:
            paths[id(module)] = rewriter.add_module(parent, type(module).__name__.lower(), module)
        return paths, gone

    def _restore(self, site: PatternSite, place: str, new: nn.Module, gone: list[str]) -> Restore | None:
        if self.inverse is None:
            return None
        numbers = {
            name: value for name, value in site.values.items() if not isinstance(value, Node | nn.Module)
        }
        old = {
            str(call.target): site.values[name]
            for name, call in site.calls.items()
            if str(call.target) in gone
        }
        _check_inverse(self, new, old, numbers)
        return functools.partial(_inverted, self, place, Keep.of(old, {place: new}), numbers)

    def _obstacle(self, index: GraphIndex, found: PatternSite, wanted: _Wanted) -> str | None:
        inside = {*found.inside.values()}
        for name, call in found.calls.items():
            if reason := index.replacing_obstacle(call, wanted.kinds[name]):
                return reason
        for node in inside:
            if reason := index.removing_obstacle(node):
                return reason
            if index.memory.writes(node):
                return f"{node.name} writes, or has another effect"
            if effects.draws(node, index.called(node)):
                return f"{node.name} draws random numbers"
        for node in inside - {found.node}:
            if reason := graph.use_obstacle(node, inside):
                return reason
            for value in node.all_input_nodes:
                if reason := index.memory.write_between(node, found.node, value):
                    return reason
        return self.refuses(**found.values) or None

    def _proof_at(self, index: GraphIndex, found: PatternSite, own_layers: bool = False) -> Proof:
        """Prove the rule for the values of a site; the reason also covers other uses of these values."""
        floats = [name for name, kind in _kinds_of(self).items() if kind is float]
        proof = prove(self, found.values, floats, index, own_layers)
        value, reason = graph.value_of(found.node), proof.reason
        if reason is None and isinstance(value, Tensor) and strides_of(value) != proof.strides:
            reason = "the pattern gives another layout in memory than this order of its values"
        # The result has other memory than before, which writes and the caller can observe.
        moved = [found.values[name] for name in proof.moves]
        for each in () if reason or not moved else (found.node, *moved):
            if index.memory.is_returned(each) or index.memory.writers(each):
                reason = f"{each.name} is returned or written, and the replacement is in other memory"
        return dataclasses.replace(proof, reason=reason)


class _Wanted:
    """The pattern of a pass as a graph, to be found in another graph.

    Attributes:
        kinds: the annotations of its parameters, by name.
    """

    def __init__(self, pass_: Pattern, index: GraphIndex) -> None:
        self._pass, self._index, self.kinds = pass_, index, _kinds_of(pass_)
        layers = {name: _Layer() if _is_layer(kind) else None for name, kind in self.kinds.items()}
        self._traced = trace_function(pass_, "pattern", layers)
        self._names = {
            node: str(node.target) for node in self._traced.graph.nodes if node.op == "placeholder"
        }
        self._calls = {
            node: self._call(node) for node in self._traced.graph.nodes if node.op.startswith("call")
        }
        used = {name for node, name in self._names.items() if node.users}
        used |= {call for call in self._calls.values() if isinstance(call, str)}
        if unused := [name for name in self.kinds if name not in used]:
            raise self._error(f"does not use {', '.join(unused)}: leave the parameter out")
        if self._traced.result in self._names:
            raise self._error(f"returns {self._traced.result} itself, which is a pattern of any value")

    def found_at(self, node: Node) -> PatternSite | None:
        """The site whose result is the value of `node`; `None` if the pattern does not match there."""
        ways_of = self._match(self._traced.result, node, PatternSite(node))
        # Nodes that the match erases must not be values of parameters, such as p = y * z in `p + p`.
        apart = (each for each in ways_of if {*each.inside.values()}.isdisjoint(_nodes(each.values)))
        found = next(apart, None)
        if found is None:
            return None
        values, calls = (
            {n: held[n] for n in self.kinds if n in held} for held in (found.values, found.calls)
        )
        return PatternSite(node, found.inside, values, calls)

    def _error(self, what: str) -> PassError:
        return PassError(f"pattern of {type(self._pass).__name__} {what}")

    def _call(self, node: Node) -> Call | str:
        """The operator call of a node of the pattern, or the name of the layer parameter that the node calls."""
        module = self._traced.modules.get(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, _Layer):
            return str(node.target)
        call = call_of(node, module)
        if call is None:
            called = node.target if module is None else f"a new {type(module).__name__}"
            raise self._error(
                f"calls {called}: it may call functions of torch, and layers that are parameters with their class"
            )
        return call

    def _match(self, wanted: Any, value: Any, found: PatternSite) -> Iterator[PatternSite]:
        """Yield each match of `value`, an argument in the graph, with `wanted`, a node or literal of the pattern."""
        if isinstance(wanted, Node) and wanted in self._names:
            yield from self._bound(self._names[wanted], value, found)
        elif isinstance(wanted, Node):
            if isinstance(value, Node) and found.inside.get(wanted, value) is value:
                yield from self._called(wanted, value, found)
        elif isinstance(wanted, list | tuple):
            if isinstance(value, list | tuple) and len(value) == len(wanted):
                yield from self._all(dict(enumerate(wanted)), dict(enumerate(value)), found)
        elif isinstance(wanted, slice):
            if isinstance(value, slice):
                one, other = ((each.start, each.stop, each.step) for each in (wanted, value))
                yield from self._match(one, other, found)
        elif not isinstance(value, Node) and wanted == value:
            # 1 and 1.0 match each other if all input tensors are floating.
            sources = (source for call in found.inside.values() for source in call.all_input_nodes)
            numbers = {type(wanted), type(value)} == {int, float} and all(map(graph.is_floating, sources))
            if type(wanted) is type(value) or numbers:
                yield found

    def _called(self, wanted: Node, value: Node, found: PatternSite) -> Iterator[PatternSite]:
        call, module = self._calls[wanted], self._index.called(value)
        inside = {**found.inside, wanted: value}
        if isinstance(call, str):
            known = found.calls.get(call, value) is value
            if module is not None and known and type(module) is self.kinds[call]:
                values, calls = {**found.values, call: module}, {**found.calls, call: value}
                found = PatternSite(found.node, inside, values, calls)
                asked = arguments_of(module.forward, wanted.args, wanted.kwargs)
                given = arguments_of(module.forward, value.args, value.kwargs)
                if asked is not None and given is not None:
                    yield from self._all(asked, given, found)
            return
        named = module is not None or name_of(value) == call.name  # fast: a graph has thousands of calls
        own = call_of(value, module) if named else None
        if own is None or call.name != own.name:
            return
        found = dataclasses.replace(found, inside=inside)
        for one, other in ways(call, own):
            yield from self._all(one, other, found)

    def _all(
        self, wanted: Mapping[Any, Any], values: Mapping[Any, Any], found: PatternSite
    ) -> Iterator[PatternSite]:
        if wanted.keys() != values.keys():
            return
        if not wanted:
            yield found
            return
        (name, first), *rest = wanted.items()
        for each in self._match(first, values[name], found):
            others = {key: value for key, value in values.items() if key != name}
            yield from self._all(dict(rest), others, each)

    def _bound(self, name: str, value: Any, found: PatternSite) -> Iterator[PatternSite]:
        kind, known = self.kinds[name], found.values.get(name, value)
        fits = isinstance(value, Node) if kind is inspect.Parameter.empty else type(value) in (int, kind)
        if fits and (
            known is value or (not isinstance(value, Node) and known == value and type(known) is type(value))
        ):
            yield dataclasses.replace(found, values={**found.values, name: value})


def _kinds_of(pass_: Pattern) -> dict[str, Any]:
    """The annotations of the parameters of `pattern`, by name."""
    try:
        parameters = inspect.signature(pass_.pattern, eval_str=True).parameters.values()
    except NameError as error:
        raise PassError(f"an annotation of {type(pass_).__name__}.pattern is unknown: {error}") from error
    kinds = {each.name: each.empty if each.annotation is Tensor else each.annotation for each in parameters}
    for each in parameters:
        where = f"the parameter {each.name} of {type(pass_).__name__}.pattern"
        kind = kinds[each.name]
        if each.kind is not each.POSITIONAL_OR_KEYWORD or each.default is not each.empty:
            raise PassError(f"{where} is variadic, positional, keyword-only or has a default")
        if not (kind in (each.empty, int, float) or (_is_layer(kind) and kind is not nn.Module)):
            raise PassError(
                f"{where} is annotated with {kind!r}: give float, int, Tensor, a class of layers, or nothing"
            )
    for method in ("replacement", "refuses"):
        try:
            inspect.signature(getattr(pass_, method)).bind(**kinds)
        except TypeError as error:
            name = type(pass_).__name__
            raise PassError(f"{method} of {name} takes other parameters than its pattern: {error}") from error
    return kinds


class _Layer(nn.Module):
    """A placeholder for a layer while the pattern is traced."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a pattern only calls its layers; it cannot read {name}: use refuses() for conditions"
        )


def _inverted(
    pass_: Pattern,
    place: str,
    kept: Keep,
    numbers: Mapping[str, Any],
    now: Mapping[str, Any],
    left: Mapping[str, Left],
) -> Mapping[str, Any]:
    """Restore the old layers: from copies or, if the weights of the new layer have changed, by `inverse`."""
    try:
        return kept(now, left)
    except UndoError:
        return _inverse_of(pass_, now[place], list(kept.copies), numbers)


def _inverse_of(
    pass_: Pattern, new: nn.Module, paths: list[str], numbers: Mapping[str, Any]
) -> dict[str, nn.Module]:
    assert pass_.inverse is not None
    with torch.no_grad():
        old = pass_.inverse(new, **numbers)
    layers = old if isinstance(old, tuple) else (old,)
    if [isinstance(layer, nn.Module) for layer in layers] != [True] * len(paths):
        raise PassError(
            f"inverse of {type(pass_).__name__} returned {type(old).__name__}: it has to return one layer for each of {', '.join(paths)}"
        )
    return dict(zip(paths, layers, strict=True))


def _check_inverse(
    pass_: Pattern, new: nn.Module, old: Mapping[str, nn.Module], numbers: Mapping[str, Any]
) -> None:
    """Raise a PassError if `inverse` of a new layer differs from the old layers by more than rounding."""
    found = _inverse_of(pass_, copy.deepcopy(new), list(old), numbers)
    for path, layer in old.items():
        if type(layer) is not type(found[path]) or not _is_close(layer, found[path]):
            raise PassError(f"inverse of {pass_!r} does not give {path} back as it was: {layer}")


def _is_close(layer: nn.Module, other: nn.Module) -> bool:
    """Tell whether two layers have the same tensors, up to rounding, and the same training flags."""
    mine, theirs = (
        ([part.training for part in each.modules()], dict(submodules.tensors_of({"": each})))
        for each in (layer, other)
    )
    return not unlike(mine, theirs) and all(
        tensor_error(one, two)[1] <= 1e3 * epsilon(one) for _, one, two in pairs(mine, theirs)
    )


def _check_new(pass_: Pattern, new: nn.Module, old: list[nn.Module]) -> None:
    """Raise a PassError if a new layer differs from the old ones in dtype, device or flags, or has non-finite weights."""
    for known, made in zip(_facts(old), _facts([new]), strict=True):
        other = made - known if known else set()
        if other:
            raise PassError(
                f"replacement of {pass_!r} made a {type(new).__name__} with {', '.join(sorted(other))}, and the old layers "
                f"have {', '.join(sorted(known))}: start from a copy of an old layer, or convert the new one"
            )
    if is_finite([[*layer.parameters()] for layer in old]) and not is_finite([*new.parameters()]):
        raise PassError(
            f"replacement of {pass_!r} made a {type(new).__name__} with weights that are not finite"
        )


def _facts(layers: Sequence[nn.Module]) -> tuple[set[str], set[str]]:
    """The training flags of layers, and the dtype, device and `requires_grad` of their parameters."""
    parameters = (parameter for layer in layers for parameter in layer.parameters())
    kinds = {f"{p.dtype} on {p.device}, requires_grad={p.requires_grad}" for p in parameters}
    return {f"training={layer.training}" for layer in layers}, kinds


def _nodes(values: Mapping[str, Any]) -> list[Node]:
    return [value for value in values.values() if isinstance(value, Node)]


def _is_layer(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, nn.Module)
