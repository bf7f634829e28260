"""Dynamic sizes: the dimensions of an input that may vary according to `dynamic_shapes`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.export import Dim

from fxopt.capture.capture_internals import DimDynamic, StatelessSymbolicContext, free_unbacked_symbols
from fxopt.errors import TraceError

SymbolicNumber = (torch.SymInt, torch.SymFloat, torch.SymBool)
# The Python type that each of these represents.
PYTHON_TYPES: dict[type, Any] = dict(zip(SymbolicNumber, (int, float, bool), strict=True))
# How one dimension of an input may vary: None is static; dimensions with the same name have the same size.
Dimension = Any


def is_backed(size: Any) -> bool:
    """Tell whether a size is symbolic and has a value in the example."""
    return type(size) is torch.SymInt and bool(size.node.has_hint())


def is_given(number: Any) -> bool:
    """Tell whether an integer has a value in the example, which an unbacked one has not."""
    return type(number) is int or is_backed(number)


def is_unbacked(size: Any) -> bool:
    """Tell whether a size is known only when the graph runs."""
    return isinstance(size, torch.SymInt) and bool(free_unbacked_symbols(size))


def expression_of_size(size: Any) -> Any:
    """A size as a sympy expression, which can be compared without a guard; an int if the size is static."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def symbolic_context(tensor: torch.Tensor, free: dict[int, Dimension]) -> StatelessSymbolicContext[Any, Any]:
    """Say which dimensions of `tensor` become symbols of the ShapeEnv."""
    dims = range(tensor.dim())
    return StatelessSymbolicContext([DimDynamic.DYNAMIC if d in free else DimDynamic.STATIC for d in dims])


def dynamic_dimensions(spec: Any, tensor: torch.Tensor, where: str) -> dict[int, Dimension]:
    """The dynamic dimensions of one tensor, from its entry in `dynamic_shapes` (in the form of torch.export)."""
    if spec is None:
        return {}
    if isinstance(spec, (list, tuple)):
        if len(spec) != tensor.dim():
            raise TraceError(
                f"dynamic_shapes of {where} has {len(spec)} entries, the tensor has {tensor.dim()} dimensions."
            )
        spec = dict(enumerate(spec))
    if not isinstance(spec, dict):
        raise TraceError(f"dynamic_shapes of {where} must be a dict, a tuple or None, not {spec!r}.")
    result = {}
    for dim, choice in spec.items():
        if not isinstance(dim, int) or not -tensor.dim() <= dim < tensor.dim():
            raise TraceError(f"dynamic_shapes of {where} names dimension {dim!r}; it has {tensor.dim()}.")
        if choice is None or is_hint(choice, Dim.STATIC):
            continue
        if isinstance(choice, int) and not isinstance(choice, bool):
            if choice != tensor.shape[dim]:
                raise TraceError(
                    f"dynamic_shapes fixes dimension {dim} of {where} to {choice}; the example has {tensor.shape[dim]}."
                )
            continue
        if not (isinstance(choice, Dim) or is_hint(choice, Dim.AUTO) or is_hint(choice, Dim.DYNAMIC)):
            raise TraceError(
                f"dynamic_shapes of {where}, dimension {dim}: {choice!r} is no torch.export.Dim, int or None."
            )
        result[dim % tensor.dim()] = choice
    return result


def is_hint(choice: Any, hint: Any) -> bool:
    """Tell whether a choice is `Dim.AUTO`, `Dim.DYNAMIC` or `Dim.STATIC`, with limits (`Dim.AUTO(max=64)`) or without."""
    return type(choice) is type(hint) and choice.type == hint.type


def is_for_all(spec: Any) -> bool:
    """Tell whether an entry of `dynamic_shapes` maps dimensions, and so applies to all tensors inside an object."""
    return (
        isinstance(spec, Mapping)
        and all(isinstance(key, int) for key in spec)
        and not any(isinstance(choice, (Mapping, tuple, list)) for choice in spec.values())
    )


def parts_of(spec: Any, keys: Collection[Any], where: str) -> list[Any]:
    """The entries of `dynamic_shapes` for the parts of a container with these keys.

    Raises:
        TraceError: if the entry names parts that the container does not have, or has another length.
    """
    if spec is None:
        return [None] * len(keys)
    if isinstance(spec, Mapping):
        unknown = [key for key, entry in spec.items() if entry is not None and key not in keys]
        if unknown:
            raise TraceError(f"dynamic_shapes of {where} names {unknown}; its parts are {list(keys)}.")
        return [spec.get(key) for key in keys]
    if not isinstance(spec, (list, tuple)) or len(spec) != len(keys):
        raise TraceError(
            f"dynamic_shapes of {where} must be a dict, a tuple of {len(keys)} entries or None, not {spec!r}."
        )
    return list(spec)
