"""Outputs of models: their leaves, copies and distances, and the buffers that a call leaves, to be put back."""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxopt.objects import attributes, is_open, tensors_in
from fxopt.torch_internals import buffers_of


def leaves(value: object, path: str = "output") -> Iterator[tuple[str, object]]:
    """The leaves of a nested output with their paths: tensors, numbers, strings, `None`.

    Example:
        >>> [path for path, _ in leaves({"logits": 1.0, "states": (2, 3), 1: None})]
        ['output.logits', 'output.states[0]', 'output.states[1]', 'output[1]']
    """
    return ((place, item) for place, item in _walk(value, path) if _entries(item) is None)


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A deep copy of nested values, with `function(tensor)` for each tensor."""
    return copy.deepcopy(value, {id(tensor): function(tensor) for tensor in tensors_in(value)})


def pairs(expected: object, actual: object, path: str = "output") -> list[tuple[str, Any, Any]]:
    """The leaves of two values, side by side; raises `AssertionError` where they differ in structure."""
    sides = [list(_walk(value, path)) for value in (expected, actual)]
    for (place, left), (_, right) in zip(*sides, strict=False):
        containers = [_entries(value) is not None for value in (left, right)]
        if any(containers) and type(left) is not type(right):
            raise AssertionError(f"{place}: expected {_a(left)}, got {_a(right)}")
    left_paths, right_paths = ([place for place, _ in side] for side in sides)
    if left_paths != right_paths:
        raise AssertionError(f"the outputs differ in structure: {first_difference(left_paths, right_paths)}")
    return [
        (place, left, right)
        for (place, left), (_, right) in zip(*sides, strict=True)
        if _entries(left) is None
    ]


def _a(value: object) -> str:
    plain = value is None or isinstance(value, int | float | str)
    return repr(value) if plain else f"a {type(value).__name__}"


def first_difference(before: Any, after: Any) -> str:
    """The first of two sequences of lines or entries that differs, in words."""
    if isinstance(before, str):
        before, after = before.splitlines(), after.splitlines()
    for old, new in zip(before, after, strict=False):
        if old != new:
            return f"{old!r} became {new!r}"
    longer, word = (before, "is gone") if len(before) > len(after) else (after, "is new")
    return f"{longer[min(len(before), len(after))]!r} {word}"


def same_bits(left: Tensor, right: Tensor) -> bool:
    """True where two tensors have the same shape, dtype and values, bit for bit."""
    if left.shape != right.shape or left.dtype != right.dtype or left.is_meta != right.is_meta:
        return False
    if left.is_meta or not left.numel():
        return True
    return torch.equal(*(bits_of(plain(t)).cpu() for t in (left, right)))


def plain(tensor: Tensor) -> Tensor:
    """The numbers of a tensor that lies in memory otherwise than by strides, or that torch does not compute with."""
    if tensor.is_nested:
        return torch.cat([each.flatten() for each in tensor.unbind()])
    if tensor.layout != torch.strided:
        return tensor.to_dense()
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor


def bits_of(tensor: Tensor) -> Tensor:
    """The bits of a tensor as integers, of the same shape; those of complex128 in a dimension more."""
    raw = tensor.detach().resolve_conj().resolve_neg()
    return (torch.view_as_real(raw) if raw.dtype == torch.complex128 else raw).view(BITS[raw.element_size()])


BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@contextlib.contextmanager
def restored(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Put the buffers of a module back at the end of the block, and the values of some tensors.

    Args:
        module: the module; the block may also give other tensors to its buffers.
        tensors: those whose values are put back, by name: its buffers, or what may be written.

    Returns:
        Each of these tensors, with a copy of it.
    """
    tables = [(table, dict(table)) for table in map(buffers_of, module.modules())]
    before = {name: (tensor, tensor.detach().clone()) for name, tensor in tensors.items()}
    try:
        yield before
    finally:
        for table, held in tables:
            if [*map(id, table.values())] != [*map(id, held.values())]:
                table.clear()
                table.update(held)
        for tensor, values in before.values():
            if not same_bits(values, tensor):
                with torch.no_grad():
                    tensor.copy_(values)


def relative_error(exact: Any, found: Any) -> float:
    """The largest distance of a floating tensor from the exact one, by the norm of that one; infinite where it is unlike it."""
    return max(relative_errors(exact, found), default=0.0)


def relative_errors(exact: Any, found: Any) -> list[float]:
    """The distance of each floating tensor from the exact one, as `relative_error` measures it."""
    return [_distance(left, right) for left, right in _floating(exact, found)]


def unlike(own: Any, found: Any) -> str | None:
    """Where two outputs differ in structure, shapes, dtypes, or in what is no floating tensor; None where they are alike."""
    try:
        both = pairs(own, found)
    except AssertionError:
        return "their structure"
    for path, value, other in both:
        if isinstance(value, Tensor) and isinstance(other, Tensor):
            alike = value.shape == other.shape and value.dtype == other.dtype
            if not alike or (not value.is_floating_point() and not torch.equal(value, other)):
                return path
        elif type(value) is not type(other):
            return path
    return None


def cosine_similarity(exact: Any, found: Any) -> float:
    """The least cosine between a floating tensor and the exact one."""
    cosines = [
        float(torch.nn.functional.cosine_similarity(left.flatten(), right.double().flatten(), dim=0))
        for left, right in _floating(exact, found)
        if left.norm() > 0
    ]
    return min(cosines, default=1.0)


def _walk(value: object, path: str) -> Iterator[tuple[str, object]]:
    yield path, value
    for key, item in _entries(value) or ():
        yield from _walk(item, path + key)


def _entries(value: object) -> list[tuple[str, object]] | None:
    """The parts of a container, by the end of their paths; `None` for a leaf."""
    if isinstance(value, Tensor):
        return None
    if isinstance(value, Mapping):
        return [(_key(key), item) for key, item in value.items()]
    if isinstance(value, tuple | list | deque):
        return [(f"[{index}]", item) for index, item in enumerate(value)]
    if isinstance(value, type | nn.Module) or (callable(value) and not any(True for _ in tensors_in(value))):
        return None
    if hasattr(value, "__dict__") or is_open(value):  # a cache object, or a dataclass
        named = vars(value) if hasattr(value, "__dict__") else attributes(value)
        return [(f".{key}", item) for key, item in named.items()]
    return None


def _key(key: object) -> str:
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"


def _floating(exact: Any, found: Any) -> list[tuple[Tensor, Tensor]]:
    """The floating tensors of two outputs, at the same places."""
    return [
        (left, right)
        for (_, left), (_, right) in zip(leaves(exact), leaves(found), strict=False)
        if isinstance(left, Tensor)
        and isinstance(right, Tensor)
        and left.is_floating_point()
        and left.numel()
    ]


def _distance(exact: Tensor, found: Tensor) -> float:
    exact, found = exact.double(), found.double()
    same = (exact == found) | (exact.isnan() & found.isnan())
    distance = torch.where(same, 0.0, exact - found)
    if not distance.isfinite().all():
        return float("inf")
    size = float(torch.where(exact.isfinite(), exact, 0.0).norm())
    return float(distance.norm()) / size if size else float(distance.norm())
