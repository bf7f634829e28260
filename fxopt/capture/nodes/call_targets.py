"""One target for each operation: `x.add(y)`, `torch.add(x, y)` and `y.__radd__(x)` all become `operator.add`.

Passes and users match `node.target == operator.mul`. Other calls keep their form: a method of `Tensor` is `call_method`, a
function is `call_function`. A write is `call_function` with a target that fx treats as impure.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.node import has_side_effect

from fxopt.capture.capture_internals import get_qualified_name
from fxopt.errors import TraceError
from fxopt.objects import find
from fxopt.operators import is_write_name

# Name of the Tensor method (or torch function) -> the operator that means the same for two operands.
_NAMED_ALIKE = "add sub mul truediv floordiv mod pow matmul eq ne lt le gt ge getitem"
_BINARY: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in _NAMED_ALIKE.split()},
    "subtract": operator.sub,
    "multiply": operator.mul,
    "div": operator.truediv,
    "divide": operator.truediv,
    "true_divide": operator.truediv,
    "remainder": operator.mod,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}
_REFLECTED = {f"__r{name}__": operation for name, operation in _BINARY.items()}
_UNARY: dict[str, Callable[..., Any]] = {
    "neg": operator.neg,
    "negative": operator.neg,
    "__invert__": operator.invert,
}

Call = tuple[str, Any, tuple[Any, ...], dict[str, Any]]


def canonical(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The (op, target, args, kwargs) of the node for a call; TraceError if generated code cannot name the function."""
    name = getattr(function, "__name__", "")
    if function is torch.Tensor.__ipow__:  # a Python function with the name `pow_`
        function = torch.Tensor.pow_
    if name == "__get__":
        return "call_function", getattr, (args[0], property_name(function)), {}
    method = _method(function, name)
    operation = _operation(function, name, method, len(args)) if not kwargs else None
    if operation is not None:
        return "call_function", operation, args[::-1] if method in _REFLECTED else args, {}
    if is_write_name(method or name) or method == "retain_grad":
        has_side_effect(function)
        return "call_function", function if method else importable(function), args, kwargs
    if method:
        return "call_method", method, args, kwargs
    return "call_function", importable(function), args, kwargs


def importable(function: Any) -> Any:
    """Return `function` if generated code can name it; raise TraceError otherwise."""
    try:
        name = get_qualified_name(function)
        # fx writes names in torch into the code, and passes other functions as globals.
        if name.startswith("torch.") and find(name) != function:
            raise AttributeError(name)
    except (RuntimeError, AttributeError, TypeError, ImportError) as error:
        raise TraceError(
            f"{function!r} has no importable name, so no code can be generated for a call of it. "
            "Define it at the top level of a module, or make the module that calls it a leaf."
        ) from error
    return function


def _method(function: Any, name: str) -> str | None:
    """The name under which `torch.Tensor` has this function, or None."""
    return next((m for m in (name, f"__{name}__") if getattr(torch.Tensor, m, None) is function), None)


def _operation(function: Any, name: str, method: str | None, operands: int) -> Callable[..., Any] | None:
    """The operator that means the same as this call with this number of positional operands, or None."""
    if method == "__setitem__":
        return operator.setitem
    if method in _REFLECTED:
        return _REFLECTED[method] if operands == 2 else None
    if method is None and getattr(torch, name, None) is not function:
        return None
    if operands == 1:
        return _UNARY.get(method or name)
    bare = name[2:-2] if name.startswith("__") and name.endswith("__") else name
    return _BINARY.get(bare) if operands == 2 else None


def property_name(getter: Any) -> str:
    """The name of the property whose getter this is."""
    owner = getter.__self__
    name: str = owner.fget.__name__ if isinstance(owner, property) and owner.fget else owner.__name__
    return name
