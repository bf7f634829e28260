"""One spelling for each call: what torch reports as `x.add(y)`, `torch.add(x, y)` or `y.__radd__(x)` is `operator.add`.

Passes and users match `node.target == operator.mul`, so the recorder writes that form whenever the arguments
allow it. Everything else keeps its own: a method of `Tensor` is `call_method`, a write is `call_function` with
a target that fx knows to be impure, a function is itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.node import _get_qualified_name, has_side_effect

from fxopt.errors import TraceError

# Name of the Tensor method (or torch function) -> the operator that means the same for two operands.
_BINARY: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "subtract": operator.sub,
    "mul": operator.mul,
    "multiply": operator.mul,
    "div": operator.truediv,
    "divide": operator.truediv,
    "true_divide": operator.truediv,
    "truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "remainder": operator.mod,
    "mod": operator.mod,
    "pow": operator.pow,
    "matmul": operator.matmul,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "getitem": operator.getitem,
}
_REFLECTED: dict[str, Callable[..., Any]] = {
    "__radd__": operator.add,
    "__rsub__": operator.sub,
    "__rmul__": operator.mul,
    "__rdiv__": operator.truediv,
    "__rtruediv__": operator.truediv,
    "__rfloordiv__": operator.floordiv,
    "__rmod__": operator.mod,
    "__rpow__": operator.pow,
    "__rmatmul__": operator.matmul,
    "__rand__": operator.and_,
    "__ror__": operator.or_,
    "__rxor__": operator.xor,
}
_UNARY: dict[str, Callable[..., Any]] = {
    "neg": operator.neg,
    "negative": operator.neg,
    "__invert__": operator.invert,
}
_AUGMENTED = {
    f"__i{name}__" for name in ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and")
} | {
    "__ior__",
    "__ixor__",
    "__ilshift__",
    "__irshift__",
    "__setitem__",
}
# Overloads of these names on `torch` mean something else than the operator (`torch.mod` does not exist).
_METHODS_ONLY = {"and", "or", "xor", "truediv", "floordiv", "mod", "getitem"}

Call = tuple[str, Any, tuple[Any, ...], dict[str, Any]]


def canonical(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The (op, target, args, kwargs) of the node for a call that reached `__torch_function__`.

    Raises TraceError when the function has no importable name, so that no code could be generated for it.
    """
    name = getattr(function, "__name__", "")
    is_method = getattr(torch.Tensor, name, None) is function
    if name == "__get__":
        return "call_function", getattr, (args[0], _property_name(function)), {}
    if not kwargs:
        if is_method and name in _REFLECTED and len(args) == 2:
            return "call_function", _REFLECTED[name], (args[1], args[0]), {}
        if is_method and name == "__setitem__":
            return "call_function", operator.setitem, args, {}
        operation = _operator(name, is_method)
        if operation is not None and len(args) == (1 if operation in _UNARY.values() else 2):
            if is_method or getattr(torch, name, None) is function:
                return "call_function", operation, args, {}
    if is_method:
        if writes(name):
            return "call_function", has_side_effect(function), args, kwargs
        return "call_method", name, args, kwargs
    if writes(name):
        has_side_effect(function)
    return "call_function", named(function), args, kwargs


def writes(name: str) -> bool:
    """Whether a function of this name writes into its first argument, by torch's naming rule."""
    return name in _AUGMENTED or (name.endswith("_") and not name.endswith("__"))


def named(function: Any) -> Any:
    """`function`, if code generation can name it; TraceError otherwise."""
    try:
        _get_qualified_name(function)
    except (RuntimeError, AttributeError, TypeError) as error:
        raise TraceError(
            f"{function!r} has no importable name, so no code can be generated for a call of it. "
            "Define it at the top level of a module, or make the module that calls it a leaf."
        ) from error
    return function


def _operator(name: str, is_method: bool) -> Callable[..., Any] | None:
    if name in _UNARY:
        return _UNARY[name]
    bare = name[2:-2] if name.startswith("__") and name.endswith("__") else name
    if not is_method and bare in _METHODS_ONLY:
        return None
    return _BINARY.get(bare)


def _property_name(getter: Any) -> str:
    owner = getter.__self__
    name: str = owner.fget.__name__ if isinstance(owner, property) else owner.__name__
    return name
