"""Whether two captures of one model made the same calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch

from fxopt.capture.sizes import SymbolicNumber


def same_calls(
    graph: torch.fx.Graph,
    other: torch.fx.Graph,
    assumed: Callable[[Any], Any],
    translated: Callable[[Any], Any],
) -> bool:
    """Whether both graphs call the same things with the same arguments, in the same order.

    Sizes are compared by what they are, not by the nodes that compute them: `assumed` rewrites a sympy
    expression of `graph` under what is assumed of its sizes, `translated` one of `other` in the same symbols.
    """
    calls, others = list(filter(_is_call, graph.nodes)), list(filter(_is_call, other.nodes))
    if len(calls) != len(others):
        return False
    counterpart: dict[torch.fx.Node, torch.fx.Node] = {}

    def same(mine: Any, its: Any) -> bool:
        mine_size, its_size = _size(mine), _size(its)
        if mine_size is not None or its_size is not None:
            return (
                mine_size is not None and its_size is not None and assumed(mine_size) == translated(its_size)
            )
        if isinstance(mine, torch.fx.Node):
            return isinstance(its, torch.fx.Node) and (counterpart.get(mine) is its or _is_device(mine, its))
        if isinstance(mine, dict):
            return (
                isinstance(its, dict)
                and mine.keys() == its.keys()
                and all(same(mine[k], its[k]) for k in mine)
            )
        if isinstance(mine, (tuple, list)):
            return isinstance(its, (tuple, list)) and len(mine) == len(its) and all(map(same, mine, its))
        if isinstance(mine, slice):
            return isinstance(its, slice) and same(_parts(mine), _parts(its))
        return type(mine) is type(its) and bool(mine == its)

    for mine, its in zip(calls, others, strict=True):
        if mine.op != its.op or mine.target != its.target:
            return False
        if not same((mine.args, mine.kwargs), (its.args, its.kwargs)):
            return False
        counterpart[mine] = its
    return True


def _is_call(node: torch.fx.Node) -> bool:
    """Nodes that compute sizes, or read the device, are arguments of calls and not calls of the model."""
    return "stack_trace" in node.meta or node.op in ("placeholder", "output")


def _is_device(mine: torch.fx.Node, its: torch.fx.Node) -> bool:
    return mine.target is getattr and its.target is getattr and mine.args[1] == its.args[1] == "device"


def _size(value: Any) -> Any:
    """The sympy expression of a size, or None."""
    if isinstance(value, torch.fx.Node):
        symbolic = value.meta.get("val")
        return symbolic.node.expr if isinstance(symbolic, SymbolicNumber) and not _is_call(value) else None
    if isinstance(value, int) and not isinstance(value, bool):
        return sympy.Integer(value)
    return None


def _parts(value: slice) -> tuple[Any, Any, Any]:
    return value.start, value.stop, value.step
