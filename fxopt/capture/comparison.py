"""Whether two captures of one model made the same calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv
from torch.utils._sympy.symbol import SymT, symbol_is_type

from fxopt.capture.expected import same_value
from fxopt.capture.sizes import SymbolicNumber

_RUN_TIME = (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)


def same_expression(one: Any, other: Any) -> bool:
    """Whether two sympy expressions of sizes are equal for all sizes, as far as that can be told by arithmetic."""
    if one == other:
        return True
    if not (isinstance(one, sympy.Expr) and isinstance(other, sympy.Expr)):
        return False
    return bool(sympy.expand(_divided(one) - _divided(other)) == 0)


def _divided(expression: Any) -> Any:
    """An expression with each `(8*a*b)//8` in it as `a*b`."""
    return expression.replace(FloorDiv, _quotient)


def _quotient(numerator: Any, denominator: Any) -> Any:
    if denominator.is_Integer:
        terms = sympy.expand(numerator).as_coefficients_dict().items()
        if all(term.is_integer and count % denominator == 0 for term, count in terms):
            return sum(term * (count // denominator) for term, count in terms)
    return FloorDiv(numerator, denominator)


def same_calls(graph: torch.fx.Graph, other: torch.fx.Graph, same_size: Callable[[Any, Any], bool]) -> bool:
    """Whether both graphs call the same things with the same arguments, in the same order, with alike results.

    Sizes are compared by what they are, not by the nodes that compute them: `same_size` says whether a sympy
    expression of `graph` and one of `other` are the same.
    """
    calls, others = _calls(graph), _calls(other)
    if len(calls) != len(others):
        return False
    counterpart: dict[torch.fx.Node, torch.fx.Node] = {}

    def same(mine: Any, its: Any) -> bool:
        if _is_size(mine) or _is_size(its):
            return _is_number(mine) and _is_number(its) and same_size(_expression(mine), _expression(its))
        if isinstance(mine, torch.fx.Node):
            return isinstance(its, torch.fx.Node) and (counterpart.get(mine) is its or _is_device(mine, its))
        if isinstance(mine, dict):
            return (
                isinstance(its, dict)
                and list(mine) == list(its)
                and all(same(mine[key], its[key]) for key in mine)
            )
        if isinstance(mine, (tuple, list)):
            return type(mine) is type(its) and len(mine) == len(its) and all(map(same, mine, its))
        if isinstance(mine, slice):
            return isinstance(its, slice) and same(_parts(mine), _parts(its))
        return same_value(mine, its)

    for mine, its in zip(calls, others, strict=True):
        if mine.op != its.op or mine.target != its.target:
            return False
        if not same((mine.args, mine.kwargs), (its.args, its.kwargs)):
            return False
        counterpart[mine] = its
    return True


def same_results(graph: torch.fx.Graph, other: torch.fx.Graph, same_size: Callable[[Any, Any], bool]) -> bool:
    """Whether the results of the calls have the same sizes and dtypes; the calls must be the same."""
    for mine, its in zip(_calls(graph), _calls(other), strict=True):
        facts, others = list(_facts(mine.meta.get("val"))), list(_facts(its.meta.get("val")))
        if len(facts) != len(others):
            return False
        for fact, fact_of_other in zip(facts, others, strict=True):
            if isinstance(fact, sympy.Basic) and isinstance(fact_of_other, sympy.Basic):
                if not same_size(fact, fact_of_other):
                    return False
            elif fact != fact_of_other:
                return False
    return True


def names_at_run_time(
    graph: torch.fx.Graph, other: torch.fx.Graph
) -> dict[sympy.Symbol, sympy.Symbol] | None:
    """The symbol of `graph` for each of `other` that stands for a number that only a run knows.

    Two such symbols are one if results of the same call hold them in the same place; None where that is ambiguous.
    """
    names: dict[sympy.Symbol, sympy.Symbol] = {}

    def pair(mine: Any, its: Any) -> bool:
        if isinstance(its, sympy.Symbol) and symbol_is_type(its, _RUN_TIME):
            return isinstance(mine, sympy.Symbol) and names.setdefault(its, mine) == mine
        if isinstance(its, sympy.Basic) and isinstance(mine, sympy.Basic) and mine.func is its.func:
            return len(mine.args) == len(its.args) and all(map(pair, mine.args, its.args))
        return True  # for the comparison of sizes

    for mine, its in zip(_calls(graph), _calls(other), strict=False):
        values = zip(_facts(mine.meta.get("val"), True), _facts(its.meta.get("val"), True), strict=False)
        if not all(pair(*both) for both in values):
            return None
    return names if len(set(names.values())) == len(names) else None


def same_constants(constants: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    """Whether both hold the same tensors under the same names, to the last bit."""
    return list(constants) == list(others) and all(
        mine.dtype == its.dtype
        and mine.shape == its.shape
        and mine.requires_grad == its.requires_grad
        and torch.equal(mine, its)
        and same_value(mine.tolist(), its.tolist())  # 0.0 and -0.0 are equal
        for mine, its in zip(constants.values(), others.values(), strict=True)
    )


def _calls(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    return list(filter(_is_call, graph.nodes))


def _is_call(node: torch.fx.Node) -> bool:
    """Nodes that compute sizes, or read the device, are arguments of calls and not calls of the model."""
    return "stack_trace" in node.meta or node.op in ("placeholder", "output")


def _is_device(mine: torch.fx.Node, its: torch.fx.Node) -> bool:
    return mine.target is getattr and its.target is getattr and mine.args[1] == its.args[1] == "device"


def _is_size(value: Any) -> bool:
    """Whether a value is a node that computes a size."""
    return (
        isinstance(value, torch.fx.Node)
        and isinstance(value.meta.get("val"), SymbolicNumber)
        and not _is_call(value)
    )


def _is_number(value: Any) -> bool:
    return _is_size(value) or isinstance(value, int)


def _expression(value: Any) -> Any:
    """The sympy expression of a size."""
    return value.meta["val"].node.expr if isinstance(value, torch.fx.Node) else sympy.sympify(value)


def _facts(value: Any, original: bool = False) -> Iterator[Any]:
    """What is known of a result: sizes as sympy expressions, dtypes, and how many there are.

    `original` sizes are as they were made, before more was learned of them.
    """
    if isinstance(value, torch.Tensor):
        yield value.dtype
        yield value.dim()
        for size in value.shape:
            yield from _facts(size, original)
    elif isinstance(value, SymbolicNumber):
        yield value.node._expr if original else value.node.expr
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


def _parts(value: slice) -> tuple[Any, Any, Any]:
    return value.start, value.stop, value.step
