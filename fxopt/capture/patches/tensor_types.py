"""`type(x) is torch.Tensor`: the type of a fake is that of the tensor for which it stands, to the code of a model.

`type` cannot be replaced in Python's builtins, as torch asks there what is a fake. The modules that define the model, and
those of whose functions and classes they know, get a `type` of their own among their globals, while a run lasts.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from fxopt.capture.nodes.source_location import is_model_package
from fxopt.capture.patches.replaced import Patches

_NUMBERS: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


def patch_types(patch: Patches, model: torch.nn.Module) -> None:
    """Let the model's code see ordinary types."""
    stand_in = _type_of_ordinary_values(patch.active)
    for known in _globals(model):
        if "type" not in known:
            known["type"] = stand_in
            patch.callback(known.pop, "type", None)


def _globals(model: torch.nn.Module) -> list[dict[str, Any]]:
    """The globals of the modules that define the model's classes, and of what these have imported by name."""
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


def _type_of_ordinary_values(active: Any) -> type:
    """A class that is `type` in all that Python code can ask, but for the types of fakes."""

    class Meta(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            found = type(*args, **kwargs)
            if len(args) == 1 and active():
                if found is FakeTensor:
                    return torch.nn.Parameter if isinstance(args[0], torch.nn.Parameter) else torch.Tensor
                found = _NUMBERS.get(found, found)
            return stand_in if found is type else found

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, type)

        def __subclasscheck__(cls, value: Any) -> bool:
            return issubclass(value, type)

        def __eq__(cls, other: object) -> bool:
            return other is type or other is cls

        def __hash__(cls) -> int:
            return hash(type)

    class stand_in(type, metaclass=Meta):
        pass

    return stand_in
