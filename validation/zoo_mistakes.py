"""Mistakes in a zoo file that its schema alone cannot tell."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from .entry import Entry, Limits, ZooFile, factory


def mistakes_in(file: ZooFile, passes: Collection[str]) -> Iterator[tuple[Any, str]]:
    """Find what the schema alone cannot tell: names that stand for nothing, or for two things."""
    taken = {*passes, "all", "exact"}
    for name in taken & {*file.pipelines}:
        yield ("pipelines", name), "a pass, or a pipeline that is always there, has this name"
    for index, name in enumerate(file.order):
        if name not in passes:
            yield ("order", index), f"no such pass: {name!r}; there are {', '.join(sorted(passes))}"
    seen: set[str] = set()
    for index, entry in enumerate(file.models):
        here: tuple[Any, ...] = ("models", index)
        if entry.name in seen:
            yield (*here, "name"), "another entry has the same name"
        seen.add(entry.name)
        if "sites" in entry.model_fields_set:
            yield (*here, "sites"), "not written by hand: `fxopt zoo sites` counts and records them"
        if "pipelines" in entry.model_fields_set:
            yield (*here, "pipelines"), "they are for all models: name them beside `models`"
        pipelines = {
            **{("known_failures", number): each.pipeline for number, each in enumerate(entry.known_failures)},
            **{("tolerances", number): each.pipeline for number, each in enumerate(entry.tolerances)},
        }
        for place, pipeline in pipelines.items():
            for name in pipeline.split("+") if pipeline else ():
                if name not in {*taken, *file.pipelines} and not set(name) & set("*?["):
                    where = (*here, *place, "pipeline")
                    yield where, f"no such pass: {name!r}; there are {', '.join(sorted(passes))}"
        for field, what in _wrong_dimensions(entry):
            yield (*here, *field), what
        if entry.requires:
            continue  # importing what only this entry needs takes seconds: its mistakes show when it is run
        try:
            function = factory(entry)
        except ValueError as error:
            yield (*here, "model"), str(error)
            continue
        for field, what in _mismatches(entry, function):
            yield (*here, *field), what


def _wrong_dimensions(entry: Entry) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Free dimensions that the inputs do not have, or not in a size that is allowed."""
    if entry.dynamic_shapes and "sizes" in entry.model_fields_set:
        yield ("sizes",), "give `sizes` or `dynamic_shapes`, not both"
    seen: dict[str, int] = {}
    for name, free in entry.dynamic_shapes.items():
        here = ("dynamic_shapes", name)
        if name not in entry.inputs:
            yield here, f"no such input; there are {', '.join(entry.inputs)}"
            continue
        shape = entry.inputs[name].shape
        for dim, symbol in free.items():
            if dim >= len(shape):
                yield (*here, dim), f"{name} has no dimension {dim}: its shape is {list(shape)}"
                continue
            size, limits = shape[dim], entry.dims.get(symbol, Limits())
            if seen.setdefault(symbol, size) != size:
                yield (*here, dim), f"{symbol} is {size} here, and {seen[symbol]} elsewhere"
            if not (limits.min or 0) <= size <= (limits.max or size):
                yield (
                    (*here, dim),
                    f"{symbol} is {size}, and dims allows {limits.min or ''}..{limits.max or ''}",
                )
    for symbol in entry.dims:
        if symbol not in seen:
            yield ("dims", symbol), "no such dimension in dynamic_shapes"


def _mismatches(entry: Entry, function: Callable[..., Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Config overrides and inputs that the model does not know; transformers would ignore a wrong override."""
    config_class = getattr(function, "config_class", None)
    if config_class is not None:
        yield from _unknown_options(entry.config, _defaults(config_class), ("config",))
    else:
        try:
            inspect.signature(function).bind(**entry.config)
        except (TypeError, ValueError) as error:
            yield ("config",), f"{entry.model} does not take these arguments: {error}"
        if entry.weights.source == "pretrained":
            yield ("weights",), "only classes of transformers have pretrained weights"
        if entry.sizes == "dynamic" and not entry.dynamic_shapes:
            text = "only classes of transformers are captured for all sizes: say `sizes: fixed`, or give `dynamic_shapes`"
            yield ("sizes",), text
    if isinstance(function, type) and issubclass(function, torch.nn.Module):
        parameters = _parameters(function.forward)
        # The forwards of transformers take any keyword, but name those that are tensors.
        if config_class or not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            known = [name for name in parameters if name != "self"]
            for name in entry.inputs:
                if name not in known:
                    yield ("inputs", name), f"the forward takes no such input; it takes {', '.join(known)}"


@functools.cache
def _defaults(config_class: Callable[[], Any]) -> Any:
    return config_class()


@functools.cache
def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _unknown_options(
    overrides: Mapping[str, Any], config: Any, where: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], str]]:
    for name, value in overrides.items():
        if not hasattr(config, name) and not hasattr(config, f"_{name}"):
            yield (*where, name), f"{type(config).__name__} has no option {name!r}"
        elif isinstance(value, dict) and hasattr(getattr(config, name), "to_dict"):
            yield from _unknown_options(value, getattr(config, name), (*where, name))
