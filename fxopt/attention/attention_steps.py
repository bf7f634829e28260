"""Reads the single operators of attention that is written out."""

from __future__ import annotations

import math
import re
from typing import Any, TypeGuard

from torch import Tensor, nn
from torch.fx import Node

from fxopt import graph
from fxopt.graph_index import GraphIndex
from fxopt.operators import name_of


class Obstacle(Exception):
    """A reason why nodes that look like attention are not, or are not known to be."""


def stop(reason: str | None) -> None:
    """Raise an Obstacle if there is a reason."""
    if reason:
        raise Obstacle(reason)


def described(node: Node) -> Tensor:
    """The fake tensor of a value, with its shape and dtype.

    Raises:
        Obstacle: shape and dtype are not known.
    """
    value = graph.value_of(node)
    if not isinstance(value, Tensor):
        raise Obstacle(graph.unknown_shape(node))
    return value


def step_name(index: GraphIndex, node: Node) -> str:
    """The name of the operator that a node computes as a call or as a module without weights; empty for other nodes."""
    if node.op != "call_module":
        return name_of(node)
    return _MODULES.get(type(index.module(node)), "")


def factors(product: Node) -> tuple[Node, Node, bool]:
    """Return both factors, and whether the second one is (..., inner, columns) rather than (..., columns, inner)."""
    args: Any = product.args
    turned, name = True, name_of(product)
    if name == "einsum":
        turned = _is_turned("".join(str(args[0]).split()))
        args = args[1] if len(args) == 2 and isinstance(args[1], tuple | list) else args[1:]
    elif name == "baddbmm":
        args = (*args[1:], *(product.kwargs[key] for key in ("batch1", "batch2") if key in product.kwargs))
    elif product.kwargs:
        args = ()
    if len(args) != 2 or not all(isinstance(arg, Node) for arg in args):
        raise Obstacle(f"{product.name} does not take two tensors")
    return args[0], args[1], turned


def _is_turned(equation: str) -> bool:
    """Tell whether the second factor of an einsum is (..., inner, columns) rather than (..., columns, inner)."""
    found = re.fullmatch(r"(\w*|\.\.\.)(\w)(\w),\1(\w)(\w)->\1\2(\w)", equation)
    batch, row, inner, first, second, out = found.groups() if found else [""] * 6
    letters = [*batch.replace(".", ""), row, inner, out]
    if {first, second} != {inner, out} or len(letters) != len({*letters}):
        raise Obstacle(f"{equation} is not a product of the last dimensions")
    return first == inner


def swaps_last(node: Node) -> bool:
    """Tell whether a node only exchanges the last two dimensions of its input."""
    name, rank = name_of(node), graph.rank_of(node)
    if name == "mT" or node.kwargs or rank is None:
        return name == "mT"
    options = node.args[1] if len(node.args) == 2 else node.args[1:]
    several = options if isinstance(options, tuple | list) else ()
    dims = [dim % rank for dim in several if isinstance(dim, int)]
    if name in ("transpose", "swapaxes", "swapdims"):
        return sorted(dims) == [rank - 2, rank - 1]
    return name == "permute" and dims == [*range(rank - 2), rank - 1, rank - 2]


def factor_of(step: Node) -> float | None:
    """The number by which a step multiplies a tensor; None if it computes something else."""
    name, args = name_of(step), step.args
    if len(args) != 2 or step.kwargs:
        return None
    if name in ("div", "divide", "true_divide", "truediv"):
        return 1 / args[1] if is_number(args[1]) and args[1] else None
    if name in ("mul", "multiply"):
        left, right = args
        number, other = (left, right) if is_number(left) else (right, left)
        return float(number) if is_number(number) and isinstance(other, Node) else None
    return None


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_MODULES: dict[type[nn.Module], str] = {nn.Softmax: "softmax", nn.Dropout: "dropout", nn.Identity: "identity"}
