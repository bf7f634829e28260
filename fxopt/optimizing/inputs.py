"""The arguments of one call: their structure, their sizes, and which of these differ from call to call."""

from __future__ import annotations

import collections
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import GraphModule

from fxopt.memory_formats import images_in_channels_last
from fxopt.objects import entries, is_open, nested, tensors_in
from fxopt.outputs import mapped


class Kind(NamedTuple):
    """A kind of call: the method, the number of positional arguments, the keywords, and which arguments are channels-last images."""

    method: str
    positional: int
    names: tuple[str, ...]
    images: tuple[int, ...]


Dims = set[tuple[int, int]]
"""Dimensions of inputs, each as the index of the tensor and the index of the dimension."""

Sizes = frozenset[tuple[tuple[int, int], int]]
"""Sizes of inputs, each behind the index of the tensor and the index of the dimension."""


_SHOWN = 4  # the most numbers of a list in a report
_PLAIN = (Tensor, bool, int, float, str, type(None))


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arguments of one call of a method."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    method: str = "forward"

    @property
    def kind(self) -> Kind:
        """The kind of the call."""
        return Kind(
            self.method, len(self.args), tuple(self.kwargs), images_in_channels_last(self.args, self.kwargs)
        )

    def with_dicts(self) -> tuple[Inputs, list[tuple[Any, dict[Any, Any]]]]:
        """Replace mappings that are no dicts, such as `BatchEncoding`, by dicts; also returns each mapping with its dict."""
        values = (*self.args, *self.kwargs.values())
        pairs = [(v, dict(v)) for v in values if isinstance(v, Mapping) and not isinstance(v, dict)]
        found = {id(mapping): items for mapping, items in pairs}
        args = tuple(found.get(id(value), value) for value in self.args)
        kwargs = {name: found.get(id(value), value) for name, value in self.kwargs.items()}
        return Inputs(args, kwargs, self.method), pairs

    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [*tensors_in((*self.args, *self.kwargs.values()))]

    def copied(self) -> Inputs:
        """Copy the tensors, because a forward may write into its inputs, as into a cache."""
        args, kwargs = mapped((self.args, dict(self.kwargs)), lambda tensor: tensor.detach().clone())
        return Inputs(args, kwargs, self.method)

    def call(self, function: Callable[..., Any]) -> Any:
        """Call a function with a copy."""
        copied = self.copied()
        return function(*copied.args, **copied.kwargs)

    def named(self, function: Callable[..., Any]) -> dict[str, Any]:
        """The arguments by the names of the function's parameters; those in `**kwargs` by their keywords."""
        signature = inspect.signature(function)
        named = signature.bind(*self.args, **self.kwargs).arguments
        rest = next((n for n, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD), "")
        others: dict[str, Any] = named.pop(rest, {})
        return named | others

    def bound(self, traced: GraphModule) -> dict[str, Any]:
        """The values of the placeholders of a graph by their names, in order."""
        bound = inspect.signature(traced.forward).bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        return bound.arguments

    def plain_signature(self) -> tuple[Any, ...] | None:
        """Describe fast what decides which graph serves the call; None unless all inputs are tensors and constants."""
        values = (*self.args, *self.kwargs.values())
        if any(type(value) not in _PLAIN for value in values):
            return None
        described = ((v.dtype, v.device, v.shape) if type(v) is Tensor else (type(v), v) for v in values)
        return self.kind, tuple(described)


def written_back(value: Any, pairs: list[tuple[Any, dict[Any, Any]]]) -> Any:
    """Copy what a call left in each dict into the mapping that the dict replaced; returns the mapping if the call returned the dict."""
    for mapping, items in pairs:
        for key in mapping.keys() - items.keys():
            del mapping[key]
        for key, item in items.items():
            if mapping.get(key) is not item:
                mapping[key] = item
        value = mapping if value is items else value
    return value


def structure_of(value: Any, *, inside: bool = False) -> Any:
    """Describe what two calls must have in common for one graph with free sizes: containers, kinds of tensors, constants.

    Args:
        value: an input, or a dict of all inputs.
        inside: whether the value is in an object; its numbers are left out, because they may count the calls.
    """
    if isinstance(value, Tensor):
        return value.dtype, value.device, value.dim()
    if _has_entries(value):
        within = inside or is_open(value)
        parts = entries(value).items()
        return type(value), tuple((key, structure_of(part, inside=within)) for key, part in parts)
    return type(value) if inside else (type(value), repr(value))


def sizes_of(value: Any) -> Sizes:
    """The sizes of the tensors in `value`."""
    shapes = enumerate(tensor.shape for tensor in tensors_in(value))
    return frozenset(((number, dim), size) for number, shape in shapes for dim, size in enumerate(shape))


def dynamic_shapes(inputs: Mapping[str, Any], free: Dims, tied: bool = False) -> dict[str, Any]:
    """The entry of each input for `dynamic_shapes` of `fxopt.trace` that leaves these dimensions free.

    Args:
        tied: give equal sizes of one dimension one name, such as the batch of two inputs; returns nothing if no sizes are equal.
    """
    sizes = {(place, size) for place, size in sizes_of(inputs) if place in free}
    alike = collections.Counter((dim, size) for (_, dim), size in sizes)
    if tied and max(alike.values(), default=0) < 2:
        return {}
    free_dims = {
        place: Dim(f"size_{size}_{place[1]}") if tied and alike[place[1], size] > 1 else Dim.AUTO
        for place, size in sizes
    }
    specs = {
        id(tensor): {dim: each for (of, dim), each in free_dims.items() if of == number}
        for number, tensor in enumerate(tensors_in(inputs))
    }
    return {name: nested(value, lambda tensor: specs.get(id(tensor))) for name, value in inputs.items()}


def text_of(inputs: Mapping[str, Any], free: Dims) -> str:
    """The inputs with their shapes for a report, with `?` for each free size."""
    shapes = {
        id(tensor): " x ".join(
            "?" if (number, dim) in free else str(size) for dim, size in enumerate(tensor.shape)
        )
        for number, tensor in enumerate(tensors_in(inputs))
    }

    def text(value: Any) -> str:
        held = [shapes[id(tensor)] or "a number" for tensor in tensors_in(value)]
        if isinstance(value, Tensor):
            return held[0]
        if _has_entries(value):
            numbers = [] if held else [*map(text, list(entries(value).values())[:_SHOWN])]
            return f"{type(value).__name__}({', '.join(numbers or held[:1] + ['...'] * (len(held) > 1))})"
        return repr(value) if value is None or isinstance(value, int | float | str) else type(value).__name__

    return ", ".join(f"{name}: {text(value)}" for name, value in inputs.items())


def has_own_kernels(value: Any) -> bool:
    """Tell whether the class or layout of a tensor has kernels of its own, which packed kernels would ignore."""
    return isinstance(value, Tensor) and (
        type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided or value.is_nested
    )


def _has_entries(value: Any) -> bool:
    return isinstance(value, tuple | list | dict) or is_open(value)
