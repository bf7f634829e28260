"""Python's types as the model's code sees them: a fake has its real tensor's type, and a dynamic size stays dynamic.

This concerns `type(x) is torch.Tensor`, `int(x)`, `float(n)` and `range(n)`. Python's builtins cannot be replaced: torch
uses `type` to detect fakes, and all code uses `int`. So stand-ins are put into the globals of the modules that define the
model and its imported functions and classes, while a run lasts. A stand-in for `int` or `float` is left out if the code
passes this type on, as `x.to(int)` does. Functions of `math` imported by name are replaced by the patched ones.
"""

from __future__ import annotations

import dis
import functools
import math
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fxopt.capture.fakes.dynamic_shapes import PYTHON_TYPES, is_given
from fxopt.capture.nodes.source_location import is_model_package, makes_calls
from fxopt.capture.patches.replaced import Patches
from fxopt.torch_internals import FakeTensor

# Instructions of comparisons, including those for tuples and unions of types, and instructions that only load more.
_COMPARES = {"BUILD_TUPLE", "BINARY_OP", "COMPARE_OP", "CONTAINS_OP", "MATCH_CLASS"}
_LOADS = {"LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD"}
_DECORATED = (types.FunctionType, staticmethod, classmethod, functools._lru_cache_wrapper)
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


def patch_types(patch: Patches, model: torch.nn.Module, decided: bool) -> None:
    """Let the model's code see ordinary types; unbacked numbers are `decided` by the example inputs, or stay symbolic."""

    def type_of(*args: Any, **kwargs: Any) -> Any:
        found = type(*args, **kwargs)
        if len(args) == 1 and patch.active():
            if found is FakeTensor:
                return torch.nn.Parameter if isinstance(args[0], torch.nn.Parameter) else torch.Tensor
            found = PYTHON_TYPES.get(found, found)
        known = sys._getframe(2).f_globals  # globals of the model's module, which may define its own `int`
        return known.get(found.__name__, found) if found in (type, int, float, range) else found

    def is_symbolic(value: Any) -> bool:
        return type(value) in (torch.SymInt, torch.SymFloat) and (not decided or value.node.has_hint())

    def whole(*args: Any, **kwargs: Any) -> Any:
        value: Any = args[0] if len(args) == 1 and not kwargs and patch.active() else None
        if type(value) is FakeTensor and value.dtype in _INTEGERS and value.constant is None and not decided:
            value = value.item()
        if type(value) is torch.SymBool and not value.node.has_hint() and not decided:
            value = torch.sym_ite(value, 1, 0)
        return torch.sym_int(value) if is_symbolic(value) else int(*args, **kwargs)

    @makes_calls
    def real(*args: Any) -> Any:
        symbolic = len(args) == 1 and is_symbolic(args[0]) and patch.active()
        return torch.sym_float(args[0]) if symbolic else float(*args)

    def steps(*args: Any) -> Any:
        symbolic = any(type(value) is torch.SymInt for value in args)
        return _steps(*args) if symbolic and all(map(is_given, args)) and patch.active() else range(*args)

    stand_ins = {
        "type": _stand_in(type, type_of),
        "int": _stand_in(int, whole),
        "float": _stand_in(float, real),
        "range": _stand_in(range, steps, ()),
    }
    for known in _globals(model):
        codes = [*_codes(known)]
        left = {n for n in ("int", "float") if any(n in c.co_names and _hands_on(c, n) for c in codes)}
        for name in stand_ins.keys() - known.keys() - left:
            known[name] = stand_ins[name]
            patch.callback(known.pop, name, None)
        for name, value in list(known.items()):
            if isinstance(value, types.BuiltinFunctionType) and value.__module__ == "math":
                known[name] = getattr(math, value.__name__)  # the patched one, if imported by name
                patch.callback(known.__setitem__, name, value)


def _globals(model: torch.nn.Module) -> list[dict[str, Any]]:
    """The globals of the modules that define the model's classes, and of the modules from which these import by name."""
    names = {base.__module__ for module in model.modules() for base in type(module).__mro__}
    own = [vars(sys.modules[name]) for name in names if is_model_package(name) and name in sys.modules]
    found = {id(known): known for known in own}
    for value in (value for known in own for value in list(known.values())):
        if isinstance(value, (type, types.FunctionType, types.ModuleType)):
            name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
            if name in sys.modules and is_model_package(name):
                known = vars(sys.modules[name])
                found[id(known)] = known
    return list(found.values())


def _steps(start: Any, stop: Any = None, step: Any = 1) -> Any:
    """A range over dynamic sizes, of static length: a loop over chunks is valid for all sizes with this number of chunks."""
    start, stop = (0, start) if stop is None else (start, stop)
    if not step > 0:
        return range(start, stop, step)
    count = int((stop - start + step - 1) // step) if stop > start else 0
    if type(start) is int is type(step) and step == 1:
        return range(start, start + count)
    return [start + number * step for number in range(count)]  # a range cannot have a symbolic `stop`


def _stand_in(kind: type, call: Callable[..., Any], bases: tuple[type, ...] | None = None) -> type:
    """A class that Python code cannot tell from `kind`, except that calling it runs `call`."""

    class Meta(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, kind) or PYTHON_TYPES.get(type(value)) is kind  # C code asks this, too

        def __subclasscheck__(cls, value: Any) -> bool:
            return issubclass(value, kind)

        def __eq__(cls, other: object) -> bool:
            return other is kind or other is cls

        def __hash__(cls) -> int:
            return hash(kind)

    return Meta(kind.__name__, (kind,) if bases is None else bases, {"__module__": kind.__module__})


def _codes(known: dict[str, Any]) -> Iterator[types.CodeType]:
    """The code of the functions and methods with these globals, also inside decorators."""
    for value in list(known.values()):
        for held in list(vars(value).values()) if isinstance(value, type) else [value]:
            below: list[Any] = []  # torch.export makes functions that wrap themselves
            while isinstance(held, (property, *_DECORATED)) and all(held is not each for each in below):
                below.append(held)
                if isinstance(held, types.FunctionType) and held.__globals__ is known:
                    yield held.__code__
                held = held.fget if isinstance(held, property) else getattr(held, "__wrapped__", None)


@functools.lru_cache(maxsize=4096)
def _hands_on(code: types.CodeType, name: str) -> bool:
    """Tell whether code passes a type such as `int` on, as `x.to(int)` does, rather than calling or comparing it."""
    given, before = False, ""  # whether the type was just loaded
    of_type = False  # `type(x)` gives the stand-in here, but a stored `int` is the builtin
    for instruction in dis.get_instructions(code):
        loaded = instruction.opname == "LOAD_GLOBAL" and instruction.argval == name
        of_type = before == "CALL" and "type" in code.co_names if loaded else of_type
        before = instruction.opname
        compared = (
            before in _COMPARES
            or (before == "IS_OP" and of_type)
            or (
                before in ("PRECALL", "CALL") and instruction.arg == 2 and "to" not in code.co_names
            )  # `isinstance`
        )
        names_none = instruction.argval == ()  # names no attributes, in a pattern `case int():`
        if given and not compared and before not in _LOADS and not names_none:
            return True
        given = (given and not compared) or (loaded and not (instruction.arg or 0) & 1)
    return any(_hands_on(inner, name) for inner in code.co_consts if isinstance(inner, types.CodeType))
