"""The functions and classes that a saved graph may call or make, by name.

A file is data from anywhere: a name in it is looked up in a table of operators that compute, or is a class of a kind
that only holds values. Nothing else is found, and no attribute of anything is followed. So `os.system`, `torch.load`
or a walk through dunder attributes has no name here; neither have operators that take functions or open files. A name
imports a module only where the path of the module is one of those that define such classes.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import importlib
import keyword
import math
import operator
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn import functional

from fxopt import objects
from fxopt.capture.runtime import checks, modes
from fxopt.capture.runtime.conditional import Conditional
from fxopt.rewriting.transformation import Transformation
from fxopt.torch_internals import OpOverload, OpOverloadPacket, bindings, dispatch_has_kernel, schema_of

# Tensor methods that run a function, hand out memory or change how an object is stored.
_DENIED_METHODS = {
    *("apply_", "map_", "map2_", "register_hook", "register_post_accumulate_grad_hook", "reinforce"),
    *("const_data_ptr", "data_ptr", "numpy", "record_stream", "set_", "share_memory_", "storage"),
    *("as_subclass", "module_load", "new", "storage_type", "untyped_storage"),
    "values",  # an attribute of caches: this might call what somebody put there
}
# Functions that call others, open files or read memory.
_DENIED_FUNCTIONS = {
    *("autocast", "from_file", "from_numpy", "frombuffer", "lobpcg", "triplet_margin_with_distance_loss"),
}
_PRIVATE_METHODS = ("_is_all_true", "_is_any_true", "_nnz", "_indices", "_values")
_PRIVATE_FUNCTIONS = (
    *("_fused_rms_norm", "_grouped_mm", "_int_mm", "_is_all_true", "_is_any_true", "_log_softmax"),
    *("_scaled_grouped_mm", "_scaled_mm", "_shape_as_tensor", "_softmax", "_standard_gamma", "_weight_norm"),
)
# The functions of `operator` for which Python has signs, and no other: `operator.call` calls what it is given.
_OPERATORS = {
    *("is_", "is_not", "truth"),
    *(name for name in operator.__all__ if f"__{name.strip('_')}__" in vars(operator) and name != "call"),
}
BUILTINS = (
    *(abs, all, any, bool, complex, dict, divmod, float, getattr, int, len, list, max, min, pow, range),
    *(round, slice, str, sum, tuple),
)
_OWN = (
    *(objects.build_object, objects.find, objects.set_attributes, objects.set_items),
    *(checks.check_same_outcome, checks.check_outcome, checks.check_no_write, checks.check_value),
    *(modes.enter_autocast, modes.enter_inference_mode, modes.enter_sdpa_kernel, modes.leave),
    modes.set_grad_enabled,
)
_PASSES = "fxopt.passes."  # the files in it: the package itself imports what it is told
# Types of values; a graph may call them, too.
_TYPES = (
    *(bool, bytes, complex, dict, float, frozenset, int, list, range, set, slice, str, tuple),
    *(collections.OrderedDict, torch.Size, torch.Tensor, torch.device, torch.dtype, torch.nn.Parameter),
)
# The modules of libraries whose output classes, caches, enumerations and functions with gradients are known by name.
_LIBRARIES = re.compile(
    r"transformers\.(cache_utils|modeling_outputs|utils\.generic|models\.\w+\.(modeling_\w+|quant_modules|vision))"
    r"|diffusers\.(models|utils\.outputs)(\.\w+)*|timm\.(layers|models)(\.\w+)*"
)
_CACHES = ("Cache", "CacheLayerMixin")
# Operators of torch.ops are those of these namespaces; what registers them where torch itself does not.
_NAMESPACES = {"aten": "", "prims": "", "mkldnn": "", "transformers": "transformers.integrations.moe"}


class NameRefused(Exception):
    """A name, or what would have to be named, that no saved graph may hold."""


class Names:
    """The objects that have a name in a saved graph.

    Args:
        trusted: classes, functions and operators of the user that have one, too.
    """

    def __init__(self, trusted: Iterable[Any] = ()) -> None:
        self.trusted: dict[str, Any] = {qualified_name(value): value for value in trusted}

    def of(self, value: Any) -> str:
        """The name of a function, operator or class; NameRefused where it has none."""
        if isinstance(value, modes.ApplyFunction):
            return f"apply:{self.of(value.function)}"
        if isinstance(value, Conditional):
            raise NameRefused("a branch on a value, whose sides are graphs of their own")
        name = _names().get((value, getattr(value, "__name__", ""))) or qualified_name(value)
        if self.find(name) != value:
            raise NameRefused(f"{name}, which is no longer found by that name")
        return name

    def find(self, name: str) -> Any:
        """The object that has a name; NameRefused where there is none, or where it may not be named."""
        if not isinstance(name, str):
            raise NameRefused(f"{name!r}, which is no name")
        if name in self.trusted:
            return self.trusted[name]
        if name in _functions():
            return _functions()[name]
        if name.startswith("apply:"):
            return modes.ApplyFunction(self._class(name.removeprefix("apply:"), torch.autograd.Function))
        if name.startswith("torch.ops."):
            return _operator(name)
        if name.startswith(_PASSES) and not name.rpartition(".")[2].startswith("_") and _own_function(name):
            return _own_function(name)
        return self._class(name, object)

    def target(self, name: str) -> Any:
        """The operator or class of values that a graph may call by a name."""
        found = self.find(name)
        if isinstance(found, type) and issubclass(found, torch.nn.Module | Transformation):
            raise NameRefused(f"{name}, which a graph cannot call")
        return found

    def method(self, name: Any) -> str:
        """A name of a method that a graph may call; NameRefused otherwise."""
        if name not in _methods():
            raise NameRefused(f"the method {name!r}")
        return str(name)

    def restoring(self, name: str) -> Any:
        """A function by which a pass is undone: one of fxopt, or one that is trusted; NameRefused for any other name."""
        found = self.trusted.get(name) or _own_function(name)
        if found is None:
            raise NameRefused(name)
        return found

    def _class(self, name: str, base: type) -> Any:
        if name in self.trusted:
            return self.trusted[name]
        cls = _class_named(name)
        if cls is None or not issubclass(cls, base):
            raise NameRefused(name)
        return cls


def qualified_name(value: Any) -> str:
    """The name by which a function, operator or class is imported, as it says itself."""
    if isinstance(value, OpOverload | OpOverloadPacket):
        return f"torch.ops.{str(value).replace('::', '.')}"
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    return f"{getattr(value, '__module__', None)}.{name}" if name else repr(value)


def is_identifier(name: Any) -> bool:
    """Tell whether code may be written with a name in it."""
    return isinstance(name, str) and name.isascii() and name.isidentifier() and not keyword.iskeyword(name)


@functools.cache
def _functions() -> dict[str, Callable[..., Any]]:
    """Every function that a graph may call, by name."""
    found: dict[str, Callable[..., Any]] = {}
    for module, names in _torch_names():
        for name in names:
            function = getattr(module, name, None)
            if name not in _DENIED_FUNCTIONS and callable(function):
                found[f"{module.__name__}.{name}"] = function
    for name in _methods():
        found[f"torch.Tensor.{name}"] = getattr(torch.Tensor, name)
    found |= {f"operator.{name}": getattr(operator, name) for name in _OPERATORS}
    found |= {f"math.{name}": getattr(math, name) for name in _public(math, types.BuiltinFunctionType)}
    found |= {f"{value.__module__}.{value.__qualname__}": value for value in (*_TYPES, *BUILTINS, *_OWN)}
    return found


def _torch_names() -> Iterator[tuple[Any, Iterable[str]]]:
    with warnings.catch_warnings():  # it looks at names that are on their way out
        warnings.simplefilter("ignore")
        overridable = {
            key: set(values) for key, values in torch.overrides.get_overridable_functions().items()
        }
    for module in (torch, functional, torch.functional, torch.linalg, torch.fft, torch.special):
        known = overridable.get(module, set()) | overridable[torch]
        functions = (name for name in dir(module) if _hashable(getattr(module, name)) in known)
        yield module, list(functions)
    yield torch, [name for name in dir(bindings["_VariableFunctions"]) if not name.startswith("_")]
    yield torch, _PRIVATE_FUNCTIONS
    yield functional, [name for name in _public(functional, Callable) if name.endswith("_")]
    yield functional, ("hardsigmoid", "hardswish", "sigmoid", "tanh", "grouped_mm", "scaled_mm", "upsample")
    for name in ("_nn", "_linalg", "_fft", "_special"):
        yield bindings[name], _public(bindings[name], types.BuiltinFunctionType)


def _public(module: Any, kind: Any) -> list[str]:
    return [n for n in dir(module) if not n.startswith("_") and isinstance(getattr(module, n), kind)]


def _hashable(value: Any) -> Any:
    return value if isinstance(value, collections.abc.Hashable) else None


@functools.cache
def _names() -> dict[Any, str]:
    """The first name of each function; `torch.mm` and `torch.dsmm` are equal, and differ in their own names."""
    names: dict[Any, str] = {}
    for name, function in _functions().items():
        names.setdefault((function, getattr(function, "__name__", "")), name)
    return names


@functools.cache
def _methods() -> frozenset[str]:
    """The methods of tensors that a graph may call."""
    public = {n for n in dir(torch.Tensor) if not n.startswith("_") and callable(getattr(torch.Tensor, n))}
    spelled = {f"__{name.strip('_')}__" for name in _OPERATORS}
    spelled |= {f"__{name}__" for name in ("len", "bool", "int", "float")}
    reflected = {f"__r{name.strip('_')}__" for name in _OPERATORS}
    dunder = {name for name in spelled | reflected if hasattr(torch.Tensor, name)}
    return frozenset((public | dunder | {*_PRIVATE_METHODS}) - _DENIED_METHODS)


def _own_function(name: str) -> Any:
    """A function that a pass or kernel of fxopt defines; None for any other name."""
    module, _, own = name.rpartition(".")
    if not module.startswith((_PASSES, "fxopt.packing", "fxopt.rewriting.pattern")) or not all(
        map(is_identifier, name.split("."))
    ):
        return None
    found = getattr(sys.modules.get(module), own, None)
    return found if isinstance(found, types.FunctionType) and qualified_name(found) == name else None


def _operator(name: str) -> Any:
    """An operator of `torch.ops`, if it is one of torch's dispatcher, which opens no file."""
    namespace, *path = name.removeprefix("torch.ops.").split(".")
    if namespace not in _NAMESPACES or len(path) not in (1, 2):
        raise NameRefused(name)
    found = _overload(namespace, *path)
    if found is None and _NAMESPACES[namespace]:
        with contextlib.suppress(ImportError):
            importlib.import_module(_NAMESPACES[namespace])
        found = _overload(namespace, *path)
    packet = isinstance(found, OpOverloadPacket)
    overloads = [getattr(found, each) for each in found.overloads()] if packet else [found]
    for each in overloads:
        if not isinstance(each, OpOverload) or not dispatch_has_kernel(each.name()):
            raise NameRefused(name)
        if any(argument.name == "filename" for argument in schema_of(each).arguments):
            raise NameRefused(name)
    return found


def _overload(*names: str) -> Any:
    if not all(map(is_identifier, names[:2])) or names[1].startswith("__"):
        return None
    try:
        return functools.reduce(getattr, names, torch.ops)
    except (AttributeError, RuntimeError):
        return None


@functools.lru_cache(maxsize=4096)
def _class_named(name: str) -> type | None:
    """A class that holds values or is a layer, by its own name; None for any other."""
    if name.startswith("torch.return_types."):
        return getattr(torch.return_types, name.removeprefix("torch.return_types."), None)
    path, _, own = name.rpartition(".")
    if not all(is_identifier(part) and not part.startswith("__") for part in name.split(".")):
        return None
    if _LIBRARIES.fullmatch(path):
        try:
            importlib.import_module(path)
        except ImportError as error:
            raise NameRefused(f"{name}, which cannot be imported here ({error})") from error
        holds = _holds_values
    elif path.startswith(("torch.nn.modules.", "fxopt.")):
        holds = _is_layer
    else:
        return None
    found = getattr(sys.modules.get(path), own, None)
    if not isinstance(found, type) or f"{found.__module__}.{found.__qualname__}" != name:
        return None  # no class, or one that the module imports
    return found if holds(found) else None


def _is_layer(cls: type) -> bool:
    return issubclass(cls, torch.nn.Module | Transformation)


def _holds_values(cls: type) -> bool:
    """Tell whether a class of a library is an output, a cache, an enumeration or a function with gradients."""
    kinds = (collections.OrderedDict, enum.Enum, torch.autograd.Function)
    return issubclass(cls, kinds) or any(base.__name__ in _CACHES for base in cls.__mro__)
