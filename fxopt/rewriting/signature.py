"""Texts that identify values, the same in every process; signatures of passes are made of them."""

from __future__ import annotations

import enum
import hashlib
import types
from collections.abc import Mapping
from typing import Any

import torch

from fxopt.errors import PassError, error_text
from fxopt.objects import is_found, qualified_name
from fxopt.submodules import digest


def stable_text(value: object, within: tuple[int, ...] = ()) -> str:
    """Describe an option of a pass as text; values without a name or a plain repr are hashed by content.

    Args:
        value: the option.
        within: the ids of the values that contain it.

    Raises:
        PassError: the content cannot be read, for example that of an object implemented in C.

    Example:
        >>> stable_text({"b", "a"}), stable_text(torch.relu), stable_text(lambda x: x) == stable_text(lambda x: -x)
        ("{'a', 'b'}", 'torch.relu', False)
    """
    if id(value) in within:
        return "itself"
    signature, inside = getattr(value, "signature", None), (*within, id(value))
    if isinstance(signature, str):
        return signature  # a transformation inside another
    if value is None or isinstance(value, _PLAIN):
        return f"{qualified_name(type(value))}.{value.name}" if isinstance(value, enum.Enum) else repr(value)
    if isinstance(value, Mapping):
        pairs = (f"{stable_text(k, inside)}: {stable_text(v, inside)}" for k, v in value.items())
        return "{" + ", ".join(sorted(pairs)) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(stable_text(item, inside) for item in value)) + "}"
    if type(value) in (list, tuple):
        items: Any = value
        return "(" + ", ".join(stable_text(item, inside) for item in items) + ")"
    if isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {digest({'': value})}"
    return _name(value) or _digest(value, inside)


_PLAIN = (
    *(bool, int, float, complex, str, bytes, enum.Enum, range, slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)


def _name(value: Any) -> str:
    """The name by which a class or function can be imported; empty if it cannot."""
    names = getattr(value, "__qualname__", None), getattr(value, "__name__", None)
    owners = getattr(value, "__module__", None), "torch", "builtins"  # builtins of torch name no module
    found = (f"{owner}.{name}" for owner in owners for name in names if isinstance(name, str))
    is_method = isinstance(value, types.MethodType)
    return next((name for name in found if not is_method and is_found(name, value)), "")


def _digest(value: Any, within: tuple[int, ...]) -> str:
    """The name of a value, which other values may share, with a hash of its content."""
    text = stable_text(_content(value), within)
    name = getattr(value, "__qualname__", None) or qualified_name(type(value))
    return f"{name}#{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


def _content(value: Any) -> list[Any]:
    """The parts of a value that identify it."""
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return [_code(value.__code__), cells, value.__defaults__, value.__kwdefaults__]
    if isinstance(value, type):
        own = {k: v for k, v in vars(value).items() if callable(v) or not k.startswith(("__", "_abc_"))}
        return [value.__bases__, own]
    if isinstance(value, property | classmethod | staticmethod):
        return [getattr(value, name, None) for name in ("fget", "fset", "fdel", "__func__")]
    try:
        return [*value.__reduce_ex__(4)]
    except Exception as error:  # user classes may raise anything
        raise PassError(
            f"{value!r} cannot be told from other values of its type ({error_text(error)}), so a pass "
            "with this option has no signature: give the pass a property `signature` of its own"
        ) from error


def _code(code: types.CodeType) -> list[Any]:
    consts = [_code(const) if isinstance(const, types.CodeType) else const for const in code.co_consts]
    return [code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars, consts]
