"""How far outputs are from those in float64, which a graph computes layer by layer in little memory."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from fxopt.testing.differences import leaves, mapped, pairs

_LOWER = (torch.float32, torch.bfloat16, torch.float16)
_CASTS = ("float", "half", "bfloat16")


def in_float64(traced: GraphModule, values: Any) -> Any:
    """Run a graph in float64.

    Args:
        traced: the graph; its weights stay as they are.
        values: the values of its placeholders, in order, which stay as they are.
    """
    return _Float64(traced).run(*_raised(values))


def relative_error(exact: Any, found: Any) -> float:
    """The largest distance of a floating tensor from the exact one, by the norm of that one; infinite where it is unlike it."""
    return max((_distance(left, right) for left, right in _pairs(exact, found)), default=0.0)


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
        for left, right in _pairs(exact, found)
        if left.norm() > 0
    ]
    return min(cosines, default=1.0)


class _Float64(torch.fx.Interpreter):
    """Runs a graph in float64; one layer at a time has its weights in float64."""

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        return next(self.args_iter)  # that of `*args` has others behind it, by keyword

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module: Any = self.fetch_attr(target)
        if getattr(module, "checks_inputs", False):
            return None  # it would ask for the dtype of the capture
        if any(tensor.is_floating_point() for tensor in (*module.parameters(), *module.buffers())):
            module = copy.deepcopy(module).double()
        return module(*args, **kwargs)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return _raised(super().get_attr(target, args, kwargs))

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_method("double" if target in _CASTS else target, args, kwargs)

    def fetch_args_kwargs_from_env(self, n: Node) -> Any:
        args, kwargs = map_aggregate((n.args, n.kwargs), _raised_dtype)
        return self.map_nodes_to_values(args, n), self.map_nodes_to_values(kwargs, n)


def _raised(value: Any) -> Any:
    """A copy of a value, with its floating tensors in float64."""
    return mapped(
        value, lambda t: t.detach().to(torch.float64 if t.is_floating_point() else t.dtype, copy=True)
    )


def _raised_dtype(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _LOWER else value


def _pairs(exact: Any, found: Any) -> list[tuple[Tensor, Tensor]]:
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
