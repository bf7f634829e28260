"""Runs models of a lower precision in float64."""

from __future__ import annotations

import copy
import functools
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt.compare import rounds
from fxopt.errors import GuardError
from fxopt.graph import branches_of
from fxopt.outputs import mapped
from fxopt.submodules import weights_of
from fxopt.torch_internals import TorchDispatchMode, converter_of, pytree, schema_of

M = TypeVar("M", bound=nn.Module)
_LOWER = (torch.float32, torch.bfloat16, torch.float16)


def wide_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of a tensor after conversion of floating numbers to `dtype`; complex tensors get the complex counterpart."""
    if dtype is None or not rounds(tensor):
        return tensor.dtype
    return dtype.to_complex() if tensor.is_complex() else dtype


class Float64(TorchDispatchMode):  # type: ignore[misc]
    """While this mode is active, operators compute in float64, also where a model creates a tensor or names a lower dtype.

    Convert weights to float64 first: composite operators such as `lstm` compare dtypes before the mode sees the call. An
    operator that does not accept float64, such as a quantized one, computes in float32.

    Example:
        >>> with Float64():
        ...     (torch.zeros(2) + torch.ones(2, dtype=torch.bfloat16)).dtype
        torch.float64
    """

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, schema = kwargs or {}, schema_of(operator)
        # Operators that read bits or draw numbers (`rand`, `randn_like`) run in float32, and so give the model's values.
        if operator is torch.ops.aten.view.dtype or operator.__name__.startswith("rand"):
            return _in(torch.float64, operator(*_in(torch.float32, args), **kwargs))
        written = [each.alias_info is not None and each.alias_info.is_write for each in schema.arguments]
        wide = [a if w else _in(torch.float64, a) for a, w in zip(args, written, strict=False)]
        try:
            found = operator(*wide, **_in(torch.float64, kwargs))
            if isinstance(found, Tensor) and found.dtype in _LOWER and "dtype" not in kwargs:
                found = self._of_integers(operator, wide, _in(torch.float64, kwargs))
        except RuntimeError:
            found = operator(*_in(torch.float32, args), **_in(torch.float32, kwargs))
        return found if any(written) else _in(torch.float64, found)

    @staticmethod
    def _of_integers(operator: Any, args: Any, kwargs: Any) -> Any:
        """Compute in float64 the floating result of numbers and integers, such as `torch.zeros(2)` and `indices / 3`."""
        if any(each.name == "dtype" for each in schema_of(operator).arguments):
            return operator(*args, **kwargs, dtype=torch.float64)

        def one(leaf: Any) -> Any:
            is_whole = isinstance(leaf, Tensor) and not (rounds(leaf) or leaf.is_quantized)
            return leaf.double() if is_whole else leaf

        return operator(*pytree.tree_map(one, args), **kwargs)


def _in(dtype: torch.dtype, value: Any) -> Any:
    """Convert the floating tensors of nested arguments to `dtype`; float32, bfloat16 and float16 as values become `dtype`."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(wide_dtype(leaf, dtype))
        return dtype if isinstance(leaf, torch.dtype) and leaf in _LOWER else leaf

    return pytree.tree_map(one, value)


def in_float64(module: M) -> M:
    """Copy a module deeply, with floating parameters and buffers in float64, complex ones in complex128.

    Raises:
        GuardError: if `module` is a graph with dtype constants, which a copy in float64 cannot have.
        TypeError: if `module` is not a `torch.nn.Module`.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"a {type(module).__name__} is no torch.nn.Module: make a function the forward of one"
        )
    copied = copy.deepcopy(module)
    # The cache converts a buffer of two layers once, so that the layers still share it.
    try:
        converter_of(copied)(functools.cache(lambda t: t.to(wide_dtype(t, torch.float64))))
    except GuardError as error:
        raise GuardError(
            f"{type(module).__name__}: the graph contains dtype constants, so a float64 copy is not possible. Capture "
            "`model.double()` as well and pass `float64=(before, after)`."
        ) from error
    forward = copied.forward

    @functools.wraps(forward)
    def in_mode(*args: Any, **kwargs: Any) -> Any:
        with Float64():  # a forward may create tensors, or name a dtype
            return forward(*args, **kwargs)

    copied.forward = in_mode
    return copied


def run_in_float64(traced: GraphModule, values: Any) -> Any:
    """Run a graph in float64, with float64 copies of the weights of only one layer at a time.

    Args:
        traced: the graph. Its weights and buffers are not changed.
        values: the values of the placeholders, in order. They are not changed.
    """
    with torch.no_grad():
        return _Interpreter(traced).run(*mapped(values, _wide_copy))


class _Interpreter(torch.fx.Interpreter):
    """Runs nodes on values in float64."""

    def __init__(self, traced: GraphModule) -> None:
        super().__init__(traced)
        self._read = dict[str, Any]()

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        return next(self.args_iter)  # torch's would give `*args` all remaining values

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module: Any = self.fetch_attr(target)
        if getattr(module, "checks_inputs", False):
            return None  # the guard would require the dtype of the capture
        if any(map(rounds, weights_of(module))):
            module = copy.deepcopy(module)
            converter_of(module)(lambda tensor: tensor.to(wide_dtype(tensor, torch.float64)))
        with Float64():
            return module(*args, **kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        branches = branches_of(target)
        if branches:
            return _Interpreter(branches[0 if args[0] else 1]).run(*args[1:])
        with Float64():
            return super().call_function(target, args, kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        with Float64():
            return super().call_method(target, args, kwargs)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        if isinstance(value, Tensor):  # one copy for all nodes that read or write it
            return self._read.setdefault(target, _wide_copy(value))
        return value


def _wide_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to(wide_dtype(tensor, torch.float64), copy=True)
