"""Higher-order operators, as the calls of torch that they stand for: `while_loop`, `scan`, `map`, `flex_attention`.

They exist so that a compiler need not look into Python's loops. A capture does look: a loop over a dimension is unrolled.
`cond_branches.py` makes a node of `torch.cond`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree


def expansion(operator: torch._ops.HigherOrderOperator) -> Callable[..., Any] | None:
    """The function that computes what `operator` does by ordinary calls of torch; None if there is none."""
    return _EXPANSIONS.get(operator.name())


def _while_loop(
    cond_fn: Any, body_fn: Any, carried: Sequence[Any], additional: Sequence[Any], *_: Any
) -> Any:
    while cond_fn(*carried, *additional):
        carried = body_fn(*carried, *additional)
    return tuple(carried)


def _scan(combine_fn: Any, init: Sequence[Any], xs: Sequence[Any], additional_inputs: Sequence[Any]) -> Any:
    carry, rows = list(init), []
    for row in zip(*(x.unbind(0) for x in xs), strict=True):
        results = combine_fn(*carry, *row, *additional_inputs)
        carry = list(results[: len(init)])
        rows.append(results[len(init) :])
    return [*carry, *(torch.stack(column) for column in zip(*rows, strict=True))]


def _map(function: Any, xs: Sequence[Any], args: Sequence[Any]) -> Any:
    rows = [function(*row, *args) for row in zip(*(x.unbind(0) for x in xs), strict=True)]
    return pytree.tree_map(lambda *column: torch.stack(column), *rows)


def _flex_attention(*args: Any, **kwargs: Any) -> Any:
    from torch._higher_order_ops.flex_attention import sdpa_dense

    return sdpa_dense(*args, **kwargs)


_EXPANSIONS: dict[str, Callable[..., Any]] = {
    "while_loop": _while_loop,
    "scan": _scan,
    "map_impl": _map,
    "flex_attention": _flex_attention,
}
