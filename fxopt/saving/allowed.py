"""The functions and classes that a saved graph may call or create, by name.

A file is not trusted: a name in it must be in a table of operators that compute, or name a class of a kind that only contains
values. No other object can be named, and attributes are not followed. So `os.system`, `torch.load` and chains of dunder
attributes have no name, and neither have operators that accept functions or open files. A name imports a module only if the
module is one of those that define such classes.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import importlib
import math
import operator
import pkgutil
import re
import sys
import types
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn import functional

from fxopt import objects
from fxopt.capture.runtime import checks, modes
from fxopt.capture.runtime.conditional import Conditional
from fxopt.objects import qualified_name
from fxopt.rewriting.transformation import Transformation
from fxopt.torch_internals import OpOverload, OpOverloadPacket, bindings, dispatch_has_kernel, schema_of

# Tensor methods that run a function, expose memory or change how an object is stored.
_DENIED_METHODS = {
    *("apply_", "map_", "map2_", "register_hook", "register_post_accumulate_grad_hook", "reinforce"),
    *("const_data_ptr", "data_ptr", "numpy", "record_stream", "set_", "share_memory_", "storage"),
    *("as_subclass", "module_load", "new", "storage_type", "untyped_storage"),
    "values",  # also an attribute of caches: the call might run an object that was assigned to it
}
# Functions that call others, open files or read memory.
_DENIED_FUNCTIONS = {
    *("autocast", "from_file", "from_numpy", "frombuffer", "lobpcg", "triplet_margin_with_distance_loss"),
}
_PRIVATE_METHODS = {"_is_all_true", "_is_any_true", "_nnz", "_indices", "_values"}
# Only the functions of `operator` that have a sign in Python: `operator.call` would call any object.
_OPERATORS = {
    *("is_", "is_not", "truth"),
    *(name for name in operator.__all__ if f"__{name.strip('_')}__" in vars(operator) and name != "call"),
}
_MORE = {
    "torch": (
        *("_fused_rms_norm", "_grouped_mm", "_int_mm", "_is_all_true", "_is_any_true", "_log_softmax"),
        *(
            "_scaled_grouped_mm",
            "_scaled_mm",
            "_shape_as_tensor",
            "_softmax",
            "_standard_gamma",
            "_weight_norm",
        ),
    ),
    "torch.nn.functional": (
        *("hardsigmoid", "hardswish", "sigmoid", "tanh", "grouped_mm", "scaled_mm", "upsample"),
    ),
    "operator": _OPERATORS,
}
# Modules of functions that a graph may call: those that `__torch_function__` can override, and outside of `torch` also builtins.
_MODULES = (
    *(torch, functional, torch.functional, torch.linalg, torch.fft, torch.special, math),
    *(bindings[name] for name in ("_nn", "_linalg", "_fft", "_special")),
)
BUILTINS = (
    *(abs, all, any, bool, complex, dict, divmod, float, getattr, int, len, list, max, min, pow, range),
    *(round, slice, str, sum, tuple),
)
_OWN = (
    *(objects.build_object, objects.find, objects.in_order, objects.set_attributes, objects.set_items),
    *(checks.check_same_outcome, checks.check_outcome, checks.check_no_write, checks.check_value),
    *(modes.enter_autocast, modes.enter_inference_mode, modes.enter_sdpa_kernel, modes.leave),
    modes.set_grad_enabled,
)
_PASSES = "fxopt.passes."  # only the files in it: functions of the package itself import any name
# Functions of fxopt that passes write into graphs. Others may return more than tensors, such as generators.
_WRITTEN_BY_PASSES = {
    *("fxopt.memory_formats.channels_last", "fxopt.memory_formats.contiguous"),
    "fxopt.passes.change_precision.saturate",
}
_RESTORING = (_PASSES, "fxopt.packing", "fxopt.rewriting.pattern")
CONSTANTS = (torch.dtype, torch.layout, torch.memory_format, type(...))
"""Types whose values have names."""
# Types of values that a graph may also call.
_TYPES = (
    *(bytes, frozenset, set),
    *(collections.OrderedDict, torch.Size, torch.Tensor, torch.device, torch.dtype, torch.nn.Parameter),
)
# Modules of libraries whose output classes, caches, enumerations and autograd functions may be named.
_LIBRARIES = re.compile(
    r"transformers\.(cache_utils|modeling_outputs|utils\.generic|models\.\w+\.(modeling_\w+|quant_modules|vision))"
    r"|diffusers\.(models|utils\.outputs)(\.(?!__)\w+)*|timm\.(layers|models)(\.(?!__)\w+)*"
)
_OF_LIBRARIES = (collections.OrderedDict, enum.Enum, torch.autograd.Function)
_CACHES = {"Cache", "CacheLayerMixin"}
_LAYERS = (torch.nn.Module, Transformation)
# The allowed namespaces of torch.ops; transformers registers its operators when `_REGISTERS` is imported.
_NAMESPACES = ("aten", "prims", "mkldnn", "transformers")
_REGISTERS = "transformers.integrations.moe"


class Refused(Exception):
    """A saved graph has a part that is not allowed, or lacks one; the text names the part and its place."""

    def __init__(self, what: str) -> None:
        self.what, self.places = what, list[str]()

    def __str__(self) -> str:
        return f"{'.'.join(self.places)}: {self.what}" if self.places else self.what


@contextlib.contextmanager
def within(place: str) -> Iterator[None]:
    """Add the name of a part of a graph module to each `Refused` that is raised in the block."""
    try:
        yield
    except Refused as error:
        error.places.insert(0, place)
        raise


class Names:
    """The objects that a saved graph may name.

    Args:
        trusted: further classes, functions and operators, of the user.
    """

    def __init__(self, trusted: Iterable[Any] = ()) -> None:
        self.trusted: dict[str, Any] = {qualified_name(value): value for value in trusted}

    def of(self, value: Any) -> str:
        """Return the name of a function, operator or class; raise Refused if it has none."""
        if isinstance(value, modes.ApplyFunction):
            return f"apply:{self.of(value.function)}"
        if isinstance(value, Conditional):
            raise Refused("a branch on a value, whose sides are graphs of their own, which cannot be saved")
        hashable = isinstance(value, collections.abc.Hashable)
        known = _names().get((value, getattr(value, "__name__", ""))) if hashable else None
        name = known or qualified_name(value)
        if self.find(name) != value:
            raise Refused(f"{name}, which is no longer found by that name")
        return name

    def find(self, name: Any) -> Any:
        """Return the object of a name; raise Refused if there is none, or if it must not be named."""
        if not isinstance(name, str):
            return _refuse(name)
        found = self.trusted.get(name) or _functions().get(name)
        if found is None and name.startswith("apply:"):
            function = self.find(name.removeprefix("apply:"))
            is_function = isinstance(function, type) and issubclass(function, torch.autograd.Function)
            found = modes.ApplyFunction(function) if is_function else None
        elif found is None:
            found = _operator(name) if name.startswith("torch.ops.") else _defined(name)
        return _refuse(name) if found is None else found

    def target(self, name: str) -> Any:
        """Return the operator or class of values that a graph may call by a name; raise Refused for others."""
        found = self.find(name)
        return _refuse(name) if isinstance(found, type) and issubclass(found, _LAYERS) else found

    def restoring(self, name: str) -> Any:
        """Return a function of fxopt, or a trusted one, that undoes a pass; raise Refused for other names."""
        found = self.trusted.get(name) or _function_of(name, _RESTORING)
        return _refuse(name) if found is None else found


def _refuse(name: object) -> Any:
    raise Refused(
        f"{name if isinstance(name, str) else repr(name)}, which is neither an operator of torch nor a layer or a class "
        "that only holds values. If it is a class or function of yours, give it in `trusted`, for save and for load"
    )


@functools.cache
def _functions() -> dict[str, Any]:
    """Every function and type that a graph may call, and every constant with a name, by name."""
    variable = bindings["_VariableFunctions"]
    with warnings.catch_warnings():  # the list includes deprecated names
        warnings.simplefilter("ignore")
        known = set().union(*torch.overrides.get_overridable_functions().values())
    known |= {getattr(variable, name) for name in dir(variable) if not name.startswith("_")}
    found: dict[str, Any] = {}
    for module in _MODULES:
        for name in dir(module):
            value = getattr(module, name)
            computes = module is not torch and isinstance(value, types.BuiltinFunctionType) and name[0] != "_"
            if computes or (
                callable(value) and isinstance(value, collections.abc.Hashable) and value in known
            ):
                found[f"{module.__name__}.{name}"] = value
    for owner, names in {**_MORE, "torch.Tensor": methods()}.items():
        found |= {f"{owner}.{name}": getattr(pkgutil.resolve_name(owner), name, None) for name in names}
    outputs = torch.return_types.all_return_types
    found |= {qualified_name(value): value for value in (*_TYPES, *BUILTINS, *_OWN, *outputs)}
    constants = (value for value in vars(torch).values() if isinstance(value, CONSTANTS))
    found |= {repr(value): value for value in (*constants, ...)}
    return {n: v for n, v in found.items() if v is not None and n.rpartition(".")[2] not in _DENIED_FUNCTIONS}


@functools.cache
def _names() -> dict[Any, str]:
    """The first name of each function; the key includes `__name__`, because `torch.mm` equals `torch.dsmm`."""
    pairs = reversed(_functions().items())
    return {(function, getattr(function, "__name__", "")): name for name, function in pairs}


@functools.cache
def methods() -> frozenset[str]:
    """The methods of tensors that a graph may call."""
    public = {n for n in dir(torch.Tensor) if not n.startswith("_") and callable(getattr(torch.Tensor, n))}
    signs = ("len", "bool", "int", "float", *(name.strip("_") for name in _OPERATORS))
    dunder = {f"__{side}{sign}__" for sign in signs for side in ("", "r")}
    found = public | {name for name in dunder if hasattr(torch.Tensor, name)} | _PRIVATE_METHODS
    return frozenset(found - _DENIED_METHODS)


def _operator(name: str) -> Any:
    """An operator of `torch.ops`, if it belongs to torch's dispatcher and opens no file; None otherwise."""
    namespace, *path = name.removeprefix("torch.ops.").split(".")
    if namespace not in _NAMESPACES or len(path) not in (1, 2) or not all(map(str.isidentifier, path)):
        return None
    if namespace == "transformers":
        with contextlib.suppress(ImportError):
            importlib.import_module(_REGISTERS)
    try:
        found = functools.reduce(getattr, path, getattr(torch.ops, namespace))
    except (AttributeError, RuntimeError):
        return None
    packet = isinstance(found, OpOverloadPacket)
    overloads = [getattr(found, each) for each in found.overloads()] if packet else [found]
    return found if all(map(_is_dispatched, overloads)) else None


def _is_dispatched(overload: Any) -> bool:
    if not isinstance(overload, OpOverload) or not dispatch_has_kernel(overload.name()):
        return False
    return all(argument.name != "filename" for argument in schema_of(overload).arguments)


@functools.lru_cache(maxsize=4096)
def _defined(name: str) -> Any:
    """A class of values, a layer, a pass, or a function that passes write into graphs, by its own name; otherwise None."""
    path = name.rpartition(".")[0]
    of_library = _LIBRARIES.fullmatch(path) is not None
    if of_library:
        try:
            importlib.import_module(path)
        except ImportError as error:
            raise Refused(f"{name}, which cannot be imported here ({error})") from error
    elif not path.startswith(("torch.nn.modules.", "fxopt.")):
        return None
    found = _found(name)
    if not isinstance(found, type):
        return _function_of(name, "fxopt.") if name in _WRITTEN_BY_PASSES else None
    fits = issubclass(found, _OF_LIBRARIES if of_library else _LAYERS)
    return found if fits or (of_library and _CACHES & {base.__name__ for base in found.__mro__}) else None


def _function_of(name: str, modules: str | tuple[str, ...]) -> Any:
    """A function that is defined in one of these modules; otherwise None."""
    found = _found(name) if name.rpartition(".")[0].startswith(modules) else None
    return found if isinstance(found, types.FunctionType) else None


def _found(name: str) -> Any:
    """The object of this name in an imported module; None if there is none, or if another module defines it."""
    path, _, own = name.rpartition(".")
    found = getattr(sys.modules.get(path), own, None)
    return found if qualified_name(found) == name else None
