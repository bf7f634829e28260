"""Attention that is written out: a product of queries and keys, a softmax, and a product with the values."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.node import map_aggregate

from fxopt import graph
from fxopt.constants import computed_constant, constants_of
from fxopt.graph import alike
from fxopt.graph_index import GraphIndex
from fxopt.operators import Fact, facts_of, name_of
from fxopt.submodules import attribute


@dataclasses.dataclass(frozen=True)
class Mask:
    """A tensor that is added to scores, or says where they have another value.

    Attributes:
        node: the tensor, with as many dimensions as the scores or fewer; of booleans where there is a `fill`.
        step: the node that applies it.
        fill: the value that stands where `node` is `where`; None where `node` is added.
        where: at which elements of `node` the value stands.
    """

    node: Node
    step: Node
    fill: float | Node | None = None
    where: bool = True


@dataclasses.dataclass(frozen=True)
class Attention:
    """Nodes that compute one attention.

    Attributes:
        node: the product with the values.
        steps: the other nodes whose work is a part of it, in order: the product of queries and keys, maybe a scaling of the
            queries before it, and all that leads to the weights.
        query: (..., L, E).
        key: (..., E, S) where it is `turned`, else (..., S, E).
        value: (..., S, D).
        turned: whether the queries are multiplied with `key` as it is.
        scale: the factor of the scores, before masks.
        masks: in the order in which they are applied.
        heads: the sizes of batch and heads where some steps have one dimension for both, and others two; else None.
    """

    node: Node
    steps: tuple[Node, ...]
    query: Node
    key: Node
    value: Node
    turned: bool
    scale: float
    masks: tuple[Mask, ...]
    heads: tuple[Any, Any] | None


class Obstacle(Exception):
    """A reason why something that looks like attention is none, or is not known to be one."""


class AttentionReader:
    """Finds and reads attention in one graph.

    Args:
        index: the graph.
        each_row_has_a_key: whether no row of scores is masked entirely in any run.
    """

    def __init__(self, index: GraphIndex, each_row_has_a_key: bool) -> None:
        self._index = index
        self._each_row_has_a_key = each_row_has_a_key
        self._read: set[Node] = set()
        self._finite: set[Node] = set()

    def places(self) -> Iterator[tuple[Node, ...]]:
        """Nodes that lead from a product by way of a softmax to another product, in order."""
        for node in self._index.nodes:
            if self._name(node) == "softmax":
                before = self._path(node, _sources)
                behind = self._path(node, lambda step: [*step.users]) if before else ()
                if before and behind:
                    yield (*reversed(before), *behind[1:])

    def read(self, place: tuple[Node, ...]) -> Attention:
        """Read one of these places.

        Raises:
            Obstacle: it is no attention, or something keeps it from being computed at once.
        """
        *steps, last = place
        query, key, turned = _factors(steps[0])
        weights, value, by_columns = _factors(last)
        if weights is not steps[-1] or value is weights or not by_columns or name_of(last) == "baddbmm":
            raise Obstacle("the weights are not on the left of the product with the values")
        self._check_uses(place)
        self._check_kept(last, last)
        for node in (*place, query, key, value):
            _value(node)
        scores = _Scores(steps[0])
        for source, step in itertools.pairwise(steps):
            self._read_step(scores, source, step)
        heads = self._heads(place, (query, key, value), turned, scores.masks)
        _check_types(place, (query, key, value), scores.masks)
        if scores.masks and graph.dtype_of(last) == torch.float16:
            self._ask_for_keys("in float16, a row that is masked entirely would have other weights")
        reads = [(steps[0], query), (steps[0], key), *((mask.step, mask.node) for mask in scores.masks)]
        factor = _factor_of(query)
        if factor is not None and [*query.users] == steps[:1] and not self._index.memory.writes(query):
            (source,) = query.all_input_nodes
            if graph.dtype_of(source) == graph.dtype_of(query):
                reads.append((query, source))
                steps, query, scores.scale = [query, *steps], source, scores.scale * factor
        for reader, tensor in [*reads, (last, value)]:
            _stop(self._index.memory.write_between(reader, last, tensor))
            self._check_kept(last, tensor)
        self._read.add(last)
        return Attention(
            last, tuple(steps), query, key, value, turned, scores.scale, tuple(scores.masks), heads
        )

    def _path(self, start: Node, following: Callable[[Node], Sequence[Node]]) -> tuple[Node, ...]:
        """The nodes from `start` to a product near it; none where there is no product."""
        came: dict[Node, Node | None] = {start: None}
        pending = [start]
        while pending and len(came) < _NEAR:
            node = pending.pop()
            if node is not start and name_of(node) in _PRODUCTS:
                path = [node]
                while (before := came[path[-1]]) is not None:
                    path.append(before)
                return tuple(reversed(path))
            if node is start or (self._name(node) and Fact.MIXES not in facts_of(node)):
                found = [other for other in following(node) if other not in came]
                came.update(dict.fromkeys(found, node))
                pending += reversed(found)
        return ()

    def _name(self, node: Node) -> str:
        """The name of the operator of a node, also where it is a module without weights; empty for other nodes."""
        if node.op != "call_module":
            return name_of(node)
        return _MODULES.get(type(self._index.module(node)), "")

    def _check_uses(self, place: tuple[Node, ...]) -> None:
        if place[0] in self._read:
            raise Obstacle(f"{place[0].name} is the product of another attention")
        for node, following in itertools.pairwise(place):
            others = [user.name for user in node.users if user is not following]
            if others:
                raise Obstacle(f"{node.name} is also used by {', '.join(others)}")
            written = self._index.memory.written_by(node)
            if written and not (len(written) == 1 and written[0] in place):
                raise Obstacle(f"{node.name} may write into what is no part of the attention")
        if self._index.memory.writes(place[0]) or self._index.memory.writes(place[-1]):
            raise Obstacle("a product writes into a tensor")

    def _check_kept(self, last: Node, tensor: Node) -> None:
        for writer in self._index.memory.writers(tensor):
            if self._index.position[writer] > self._index.position[last]:
                raise Obstacle(
                    f"{writer.name} may write into {tensor.name}, which the call keeps for gradients"
                )

    def _read_step(self, scores: _Scores, source: Node, step: Node) -> None:
        """Take note of the work of one step after the product of queries and keys."""
        name = self._name(step)
        if step.op == "call_module":
            _stop(self._index.reading_obstacle(step))
        if "dropout" in name:
            if not self._index.memory.is_pure(step) and graph.argument(step, "p") != 0:
                raise Obstacle(f"{step.name} is active: the model is in training mode")
        elif name in _CASTS:
            options = [*step.args[1:], *step.kwargs.values()]
            if not all(isinstance(option, torch.dtype) for option in options):
                raise Obstacle(f"{step.name} may move the scores to another device")
        elif name == "softmax" and not scores.normalised:
            if self._softmax_dimension(step) not in (-1, len(_value(step).shape) - 1):
                raise Obstacle("the softmax is not over the keys")
            scores.normalised = True
        elif name not in _VIEWS and name != "identity":
            if scores.normalised:
                raise Obstacle(f"{step.name} stands between the softmax and the values")
            self._read_change(scores, name, source, step)

    def _softmax_dimension(self, step: Node) -> Any:
        if step.op == "call_module":
            return getattr(self._index.module(step), "dim", None)
        return step.kwargs.get("dim", step.args[1] if len(step.args) > 1 else None)

    def _read_change(self, scores: _Scores, name: str, source: Node, step: Node) -> None:
        """Take note of a scaling or a mask."""
        args = (
            (*step.args[1::-1], *step.args[2:]) if step.op == "call_method" and name == "where" else step.args
        )
        factor, others = _factor_of(step), [arg for arg in args if arg is not source]
        nodes = [other for other in others if isinstance(other, Node)]
        if factor is not None:
            if scores.masks:
                raise Obstacle(f"{step.name} scales what is masked")
            scores.scale *= factor
        elif name == "add" and len(args) == 2 and len(nodes) == 1 and not step.kwargs:
            if self._may_be_infinite(nodes[0]):
                self._ask_for_keys(f"{nodes[0].name} may hold -inf: a row of it is NaN, and would be zeros")
            scores.masks.append(Mask(nodes[0], step))
        elif name == "masked_fill" and len(args) == 3 and args[0] is source and len(others) == 2 and nodes:
            scores.masks.append(Mask(nodes[0], step, self._checked_fill(source, others[1])))
        elif name == "where" and len(args) == 3 and args[0] is not source and len(others) == 2 and nodes:
            fill = self._checked_fill(source, others[1])
            scores.masks.append(Mask(nodes[0], step, fill, where=args[2] is source))
        else:
            raise Obstacle(f"{step.name} stands between the product of queries and keys and the softmax")

    def _checked_fill(self, source: Node, fill: Any) -> Any:
        """A value that masks, if it is so small that a score which is added to it makes no difference."""
        number = fill
        if isinstance(fill, Node):
            value = _value(fill)
            if fill not in self._constants or value.shape or value.dtype != graph.dtype_of(source):
                raise Obstacle(f"{fill.name}, which masks, is not known to be one small number")
            number = computed_constant(self._index.graph_module, fill, {}).item()
        if number == -math.inf:
            self._ask_for_keys(
                "masked scores are -inf: a row that is masked entirely is NaN, and would be zeros"
            )
        if type(number) not in (int, float) or not number <= _SMALLEST:
            raise Obstacle(f"masked scores are {number}, beside which a score may count")
        self._ask_for_keys(
            "in a row that is masked entirely, scores would have gradients that they do not have"
        )
        return fill

    def _ask_for_keys(self, reason: str) -> None:
        if not self._each_row_has_a_key:
            raise Obstacle(f"{reason}. Where there is no such row, give each_row_has_a_key=True")

    def _may_be_infinite(self, mask: Node) -> bool:
        """Tell whether the graph writes -inf into a mask, or makes it by a logarithm."""
        seen, pending = {mask}, [mask]
        while pending:
            node = pending.pop()
            if node in self._finite:
                continue
            found: list[Any] = []
            map_aggregate((node.args, node.kwargs), found.append)
            if node.op == "get_attr":
                found.append(attribute(self._index.graph_module, str(node.target)))
            if any(map(_holds_infinity, found)) or name_of(node) in _LOGARITHMS:
                return True
            if node.op != "call_module" and Fact.MIXES not in facts_of(node):
                made_by = (*node.all_input_nodes, *self._index.memory.writers(node))
                new = [value for value in made_by if value not in seen]
                seen.update(new)
                pending += new
        self._finite |= seen
        return False

    @functools.cached_property
    def _constants(self) -> Collection[Node]:
        return constants_of(self._index)

    def _heads(
        self, place: Sequence[Node], inputs: Sequence[Node], turned: bool, masks: Sequence[Mask]
    ) -> tuple[Any, Any] | None:
        """Check that all shapes fit, and return the sizes of batch and heads where some steps have them in one."""
        *steps, _ = place
        (*front, rows, columns), (*behind, _, _) = _value(steps[0]).shape, _value(steps[-1]).shape
        query, key, value = (_value(node).shape for node in inputs)
        inner = (query[-1], columns) if turned else (columns, query[-1])
        fits = alike(query[:-1], (*front, rows)) and alike(key, (*front, *inner))
        if not fits or not alike(value[:-1], (*behind, columns)):
            raise Obstacle("queries, keys and values are broadcast to each other")
        shapes = [_value(step).shape for step in steps]
        for before, after, step in zip(shapes, shapes[1:], steps[1:], strict=False):
            regrouped = self._name(step) in _VIEWS and self._index.guard and alike(before[-2:], after[-2:])
            if not regrouped and not alike(before, after):
                raise Obstacle(f"{step.name} changes the shape of the scores")
        if not all(len(shape) in (3, 4) for shape in shapes):
            raise Obstacle("the scores do not have 3 or 4 dimensions")
        if not all(_value(mask.node).shape for mask in masks):
            raise Obstacle("a mask is one number")
        grouped = [shape[:2] for shape in shapes if len(shape) == 4]
        if not all(alike(grouped[0], sizes) for sizes in grouped):
            raise Obstacle("batch and heads are grouped in two ways")
        if not grouped or len(grouped) == len(shapes):
            return None
        heads = min(grouped, key=lambda sizes: not isinstance(sizes[1], int))
        if not any(isinstance(size, int) for size in heads):
            raise Obstacle("the number of heads is not known")
        return heads[0], heads[1]


@dataclasses.dataclass
class _Scores:
    """The facts of the scores after some steps."""

    product: Node
    scale: float = 1.0
    masks: list[Mask] = dataclasses.field(default_factory=list)
    normalised: bool = False

    def __post_init__(self) -> None:
        if name_of(self.product) == "baddbmm":
            alpha, beta = (self.product.kwargs.get(name, 1) for name in ("alpha", "beta"))
            if not _is_number(alpha) or beta not in (0, 1) or not self.product.args:
                raise Obstacle(f"{self.product.name} scales what it adds")
            self.scale = float(alpha)
            self.masks = [Mask(self.product.all_input_nodes[0], self.product)] if beta else []


def _factors(product: Node) -> tuple[Node, Node, bool]:
    """Both factors, and whether the second one is (..., inner, columns) rather than (..., columns, inner)."""
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
    """Tell whether an einsum of the last two dimensions takes (..., inner, columns), or (..., columns, inner)."""
    found = re.fullmatch(r"(\w*|\.\.\.)(\w)(\w),\1(\w)(\w)->\1\2(\w)", equation)
    batch, row, inner, first, second, out = found.groups() if found else [""] * 6
    letters = [*batch.replace(".", ""), row, inner, out]
    if {first, second} != {inner, out} or len(letters) != len({*letters}):
        raise Obstacle(f"{equation} is not a product of the last dimensions")
    return first == inner


def _sources(step: Node) -> list[Node]:
    """The values that may be the scores, of which a step makes others; likely ones first."""
    if name_of(step) == "where" and step.op == "call_function":
        nodes = [arg for arg in step.args[1:] if isinstance(arg, Node)]
    elif name_of(step) in ("masked_fill", "where"):
        nodes = step.all_input_nodes[:1]
    else:
        nodes = step.all_input_nodes
    return sorted(nodes, key=lambda node: len(node.users) > 1)


def _factor_of(step: Node) -> float | None:
    """The number by which a step multiplies a tensor; None where it does something else."""
    name, args = name_of(step), step.args
    if len(args) != 2 or step.kwargs:
        return None
    if name in ("div", "divide", "true_divide", "truediv"):
        return 1 / args[1] if _is_number(args[1]) and args[1] else None
    if name in ("mul", "multiply"):
        left, right = args
        number, other = (left, right) if _is_number(left) else (right, left)
        return float(number) if _is_number(number) and isinstance(other, Node) else None
    return None


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _holds_infinity(value: object) -> bool:
    if isinstance(value, Tensor) and value.is_floating_point() and not value.is_meta:
        return bool(value.isneginf().any())
    return isinstance(value, float) and value == -math.inf


def _check_types(place: Sequence[Node], inputs: Sequence[Node], masks: Sequence[Mask]) -> None:
    """Refuse what would be computed in less precision, or with other values of masks."""
    dtype = graph.dtype_of(place[-1])
    half = dtype in (torch.float16, torch.bfloat16)
    for node in (*inputs, *place):
        other = graph.dtype_of(node)
        if other != dtype and not (half and other == torch.float32 and node in place):
            raise Obstacle(f"{node.name} is in {other}, and the output in {dtype}")
    if dtype is None or not dtype.is_floating_point:
        raise Obstacle(f"{place[-1].name} is in {dtype}")
    for mask in masks:
        own = graph.dtype_of(mask.node)
        if own != (dtype if mask.fill is None else torch.bool):
            raise Obstacle(f"the mask {mask.node.name} is in {own}")
        if _is_number(mask.fill) and mask.fill < torch.finfo(dtype).min:
            raise Obstacle(f"masked scores are {mask.fill}, which {dtype} cannot hold")


def _value(node: Node) -> Tensor:
    value = graph.value_of(node)
    if not isinstance(value, Tensor):
        raise Obstacle(
            f"the shape of {node.name} is unknown: trace with fxopt.trace, or run "
            "torch.fx.passes.fake_tensor_prop.FakeTensorProp"
        )
    return value


def _stop(reason: str | None) -> None:
    if reason:
        raise Obstacle(reason)


_NEAR = 64
"""How many nodes around a softmax are searched for a product."""

_PRODUCTS = ("matmul", "bmm", "baddbmm", "einsum")
_MODULES: dict[type[nn.Module], str] = {nn.Softmax: "softmax", nn.Dropout: "dropout", nn.Identity: "identity"}
_VIEWS = ("view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "contiguous")
_LOGARITHMS = ("log", "log2", "log10", "log1p", "logit", "logsumexp", "log_softmax", "log_sigmoid")
_CASTS = ("to", "type", "float", "double", "half", "bfloat16")

_SMALLEST = torch.finfo(torch.bfloat16).min
"""The value that masks with at most: a score that is added to it is lost in rounding, in every dtype but float16."""
