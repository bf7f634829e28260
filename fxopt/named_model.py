"""Models of the command line: from `package.module:factory` and the shapes of inputs to a captured graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxopt.capture import TracedModule, symbolic_trace, trace
from fxopt.errors import FxoptError
from fxopt.importing import imported, in_a_line


class UsageError(FxoptError):
    """A name or an option of the command line is wrong: the message says what it should be."""


def captured(name: str, inputs: Sequence[str] = (), *, specialize: bool = False) -> TracedModule:
    """The graph of a model that has a name, in evaluation mode.

    Args:
        name: `package.module:factory`. A factory returns a model, or a model and its example inputs: a tensor, a
            sequence of positional arguments, or a dict of keyword arguments. It may also be a model itself.
        inputs: `name=2,16` for normal noise of that shape, `name=2,16:int64` for zeros and ones of a dtype. Without any,
            a model of transformers is captured with its main input, for all sizes.
        specialize: as for `fxopt.trace`.

    Raises:
        UsageError: where there is no such model, or it needs other inputs.
        TraceError: where the model cannot be captured.

    Example:
        >>> captured("torch.nn:ReLU", ["input=2,3"]).graph.find_nodes(op="placeholder")
        [input_1]
    """
    factory = _imported(name)
    made = factory if isinstance(factory, nn.Module) else _called(name, factory)
    model, given = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise UsageError(f"{name}: gives {type(model).__name__}, not a model, or a model and its inputs")
    model = model.eval()
    if inputs:
        given = dict(map(_input, inputs))
        if len(given) < len(inputs):
            raise UsageError(f"--input {' --input '.join(inputs)}: give each name once")
    if given is None:
        if not hasattr(model, "main_input_name"):  # a class of transformers has it
            raise UsageError(f"{name}: say what it takes: --input NAME=2,3 for each argument of its forward")
        return symbolic_trace(model, specialize=specialize)
    if isinstance(given, Mapping):
        return trace(model, kwargs=given, specialize=specialize)
    return trace(model, (given,) if isinstance(given, Tensor) else given, specialize=specialize)


def _imported(name: str) -> Callable[[], Any] | nn.Module:
    module_name, _, path = name.partition(":")
    if not path:
        text = "a model is named package.module:factory, or as an entry of a zoo file, with --zoo"
        raise UsageError(f"{name}: {text}")
    found: Any = imported(module_name, UsageError)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise UsageError(f"{module_name} has no function or class {path!r}")
    return found  # type: ignore[no-any-return]


def _called(name: str, factory: Callable[[], Any]) -> Any:
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise UsageError(
            f"{name}: {error}; name a function of your own that takes none and returns the model"
        ) from error
    except ValueError:
        pass  # what is written in C has no signature: the call tells
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise UsageError(f"{name}() raises {in_a_line(error)}") from error


def _input(text: str) -> tuple[str, Tensor]:
    name, _, what = text.partition("=")
    sizes, _, dtype_name = what.partition(":")
    dtype = getattr(torch, dtype_name or "float32", None)
    try:
        shape = [int(size) for size in sizes.split(",") if size]
        if not name.isidentifier() or not what or not isinstance(dtype, torch.dtype):
            raise ValueError(text)
        generator = torch.Generator().manual_seed(0)
        if dtype.is_floating_point or dtype.is_complex:
            return name, torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
        return name, torch.randint(0, 2, shape, generator=generator).to(dtype)
    except (ValueError, RuntimeError) as error:  # torch's: a size below 0, a dtype of quantised tensors
        raise UsageError(f"--input {text}: write it as x=2,3 or ids=2,16:int64") from error
