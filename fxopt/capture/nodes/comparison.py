"""Equality of two graphs of one model: the same calls, even if sizes are written and unbacked symbols named differently."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch

from fxopt.capture.capture_internals import FloorDiv, SymT, expression_of, symbol_is_type
from fxopt.capture.fakes.dynamic_shapes import SymbolicNumber
from fxopt.capture.runtime import modes
from fxopt.capture.runtime.checks import check_outcome
from fxopt.capture.runtime.input_specs import dtype_kind, same_parts, same_value
from fxopt.graph import function_name
from fxopt.operators import is_write_name

_RUN_TIME = (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)


def same_expression(one: Any, other: Any) -> bool:
    """Tell whether arithmetic can show that two sympy expressions are equal for all sizes."""
    if one == other:
        return True
    if not (isinstance(one, sympy.Expr) and isinstance(other, sympy.Expr)):
        return False
    return bool(sympy.expand(one.replace(FloorDiv, _quotient) - other.replace(FloorDiv, _quotient)) == 0)


def _quotient(numerator: Any, denominator: Any) -> Any:
    """Simplify an exact quotient, as `(8*a*b)//8` to `a*b`."""
    if denominator.is_Integer:
        terms = sympy.expand(numerator).as_coefficients_dict().items()
        if all(term.is_integer and count % denominator == 0 for term, count in terms):
            return sum(term * (count // denominator) for term, count in terms)
    return FloorDiv(numerator, denominator)


# Pairs of corresponding calls in two graphs.
Pairs = Sequence[tuple[torch.fx.Node, torch.fx.Node]]


# Node -> another node with the same value.
Aliases = Mapping[torch.fx.Node, torch.fx.Node]

# Views of all elements of the first argument: if the shape is the same, the view equals this argument.
_RESHAPING = {"expand", "expand_as", "broadcast_to", "view", "view_as", "reshape", "reshape_as"}


def paired_calls(graph: torch.fx.Graph, other: torch.fx.Graph, without: Aliases | None = None) -> Pairs:
    """Pair the calls of both graphs in order, without the nodes in `without`.

    If one graph has more calls, the output of the other graph is paired with a call.
    """
    mine, its = ([call for call in calls_of(one) if call not in (without or {})] for one in (graph, other))
    return list(zip(mine, its, strict=False))


def views_of_same_shape(
    graph: torch.fx.Graph, size: Callable[[Any], Any]
) -> dict[torch.fx.Node, torch.fx.Node]:
    """Map each view that has the shape of its base to the base; `size` rewrites expressions of sizes first.

    A view is left out if view or base is written, or if only the base may have a gradient.
    """

    def same_size(mine: Any, its: Any) -> bool:
        return same_expression(size(mine), size(its))

    views = {}
    detached = _without_gradients(graph)
    for node in calls_of(graph):
        viewed = node.args[0] if function_name(node) in _RESHAPING and node.args else None
        if not isinstance(viewed, torch.fx.Node) or node in detached:
            continue
        if not (_is_written(node) or _is_written(viewed)) and same_results([(node, viewed)], same_size):
            views[node] = viewed
    return views


def _without_gradients(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The nodes that run with gradients disabled, if their dtype can have gradients."""
    detached: set[torch.fx.Node] = set()
    before: dict[torch.fx.Node, bool] = {}
    enabled = True
    for node in graph.nodes:
        argument = node.args[0] if node.args else None
        value = node.meta.get("val")
        if isinstance(argument, torch.fx.Node) and argument in before:
            enabled = before[argument]
        elif node.target in (modes.set_grad_enabled, modes.enter_inference_mode):
            before[node] = enabled
            enabled = bool(argument) if node.target is modes.set_grad_enabled else enabled and not argument
        elif (
            not enabled
            and isinstance(value, torch.Tensor)
            and dtype_kind(value.dtype) in ("floating", "complex")
        ):
            detached.add(node)
    return detached


def _is_written(node: torch.fx.Node) -> bool:
    return any(user.args[:1] == (node,) and is_write_name(function_name(user)) for user in node.users)


class CallComparison:
    """Compares the arguments of calls of two graphs.

    Sizes, parts of tuples and the model's tensors are compared by value, not by the nodes that compute them. `same_size`
    compares sympy expressions of both graphs; `aliases` maps nodes of either graph to a node with the same value.
    """

    def __init__(self, same_size: Callable[[Any, Any], bool], aliases: Aliases | None = None) -> None:
        self.same_size, self._aliases = same_size, aliases or {}
        self.counterpart: dict[torch.fx.Node, torch.fx.Node] = {}

    def same_call(self, mine: torch.fx.Node, its: torch.fx.Node) -> bool:
        """Tell whether two nodes call the same target with the same arguments; later comparisons treat them as equal."""
        self.counterpart[mine] = its
        if mine.op != its.op or mine.target != its.target:
            return False
        return self.same((_arguments(mine), mine.kwargs), (_arguments(its), its.kwargs))

    def same(self, mine: Any, its: Any) -> bool:
        """Tell whether two arguments have the same value."""
        if is_size(mine) or is_size(its):
            numbers = all(is_size(value) or isinstance(value, int) for value in (mine, its))
            return numbers and self.same_size(_expression(mine), _expression(its))
        if isinstance(mine, torch.fx.Node):
            return isinstance(its, torch.fx.Node) and self.same_value(mine, its)
        parts = same_parts(mine, its, self.same)
        return same_value(mine, its) if parts is None else parts

    def same_value(self, mine: torch.fx.Node, its: torch.fx.Node) -> bool:
        """Tell whether two nodes that are not sizes have the same value."""
        mine, its = _without_aliases(mine, self._aliases), _without_aliases(its, self._aliases)
        if _is_reference(mine) and mine.target == its.target:
            return self.same((mine.op, mine.args), (its.op, its.args))
        return self.counterpart.get(mine) is its or (is_device(mine) and is_device(its))


def same_calls(pairs: Pairs, same_size: Callable[[Any, Any], bool], aliases: Aliases | None = None) -> bool:
    """Tell whether the calls of each pair have the same target and the same arguments."""
    comparison = CallComparison(same_size, aliases)
    return all(comparison.same_call(mine, its) for mine, its in pairs)


def _without_aliases(node: torch.fx.Node, aliases: Aliases) -> torch.fx.Node:
    while node in aliases:
        node = aliases[node]
    return node


def same_results(pairs: Pairs, same_size: Callable[[Any, Any], bool]) -> bool:
    """Tell whether the results of the calls have the same sizes and dtypes; the calls must be the same."""
    for mine, its in pairs:
        facts, others = list(_facts(mine.meta.get("val"))), list(_facts(its.meta.get("val")))
        if len(facts) != len(others):
            return False
        for fact, fact_of_other in zip(facts, others, strict=True):
            sizes = isinstance(fact, sympy.Basic) and isinstance(fact_of_other, sympy.Basic)
            if not (same_size(fact, fact_of_other) if sizes else fact == fact_of_other):
                return False
    return True


def matched_unbacked_symbols(pairs: Pairs) -> dict[sympy.Symbol, sympy.Symbol] | None:
    """Map unbacked symbols of the second graph to those at the same place in results of the first; None if ambiguous."""
    names: dict[sympy.Symbol, sympy.Symbol] = {}

    def pair(mine: Any, its: Any) -> bool:
        if isinstance(its, sympy.Symbol) and symbol_is_type(its, _RUN_TIME):
            return isinstance(mine, sympy.Symbol) and names.setdefault(its, mine) == mine
        if isinstance(its, sympy.Basic) and isinstance(mine, sympy.Basic) and mine.func is its.func:
            return len(mine.args) == len(its.args) and all(map(pair, mine.args, its.args))
        return True  # sizes are compared elsewhere

    for mine, its in pairs:
        values = zip(_facts(mine.meta.get("val"), True), _facts(its.meta.get("val"), True), strict=False)
        if not all(pair(*both) for both in values):
            return None
    return names if len(set(names.values())) == len(names) else None


def _arguments(node: torch.fx.Node) -> tuple[Any, ...]:
    """The arguments of a call, without the text of a model's error, which may contain sizes."""
    return (*node.args[:3], bool(node.args[3])) if node.target is check_outcome else node.args


def same_constants(constants: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> bool:
    """Tell whether both have bitwise equal tensors under the same names."""
    return list(constants) == list(others) and all(
        mine.dtype == its.dtype
        and mine.shape == its.shape
        and mine.requires_grad == its.requires_grad
        and torch.equal(mine, its)
        and same_value(mine.tolist(), its.tolist())  # 0.0 and -0.0 are equal
        for mine, its in zip(constants.values(), others.values(), strict=True)
    )


def made_at(node: torch.fx.Node) -> tuple[Any, ...]:
    """The op and target of a node, with its module and its lines in the model."""
    modules = list(node.meta.get("nn_module_stack", ()))
    return node.op, node.target, modules[-1:], node.meta.get("stack_trace")


def calls_of(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The calls of a model, without nodes that are only arguments: they compute sizes, read the device, or name a tensor."""
    return list(filter(is_call, graph.nodes))


def is_call(node: torch.fx.Node) -> bool:
    """Tell whether a node is a call of the model, an input or the output."""
    made = "stack_trace" in node.meta and not _is_reference(node)
    return made or node.op in ("placeholder", "output")


def _is_reference(node: torch.fx.Node) -> bool:
    """Tell whether a node names a tensor of the model or a part of a tuple, so that its position does not matter."""
    if node.op == "get_attr":
        return True
    whole = node.args[0] if node.target is operator.getitem else None
    return isinstance(whole, torch.fx.Node) and isinstance(whole.meta.get("val"), tuple)


def is_device(node: torch.fx.Node) -> bool:
    """Tell whether a node reads the device of a tensor."""
    return node.target is getattr and node.args[1] == "device"


def is_size(value: Any) -> bool:
    """Tell whether a value is a node that computes a size."""
    return (
        isinstance(value, torch.fx.Node)
        and isinstance(value.meta.get("val"), SymbolicNumber)
        and not is_call(value)
    )


def _expression(value: Any) -> Any:
    """The sympy expression of a size."""
    return value.meta["val"].node.expr if isinstance(value, torch.fx.Node) else sympy.sympify(value)


def _facts(value: Any, original: bool = False) -> Iterator[Any]:
    """Everything known about a result: dtypes, counts, and sizes, in `original` form or with what is known since."""
    if isinstance(value, torch.Tensor):
        yield value.dtype
        yield value.dim()
        for size in value.shape:
            yield from _facts(size, original)
    elif isinstance(value, SymbolicNumber):
        yield expression_of(value.node) if original else value.node.expr
    elif isinstance(value, int):
        yield sympy.sympify(value)
    elif isinstance(value, (tuple, list)):
        yield len(value)
        for item in value:
            yield from _facts(item, original)
    elif isinstance(value, dict):
        yield list(value)
        for item in value.values():
            yield from _facts(item, original)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _facts(getattr(value, field.name), original)
