"""Models named on the command line: captures `package.module:factory` with inputs of given shapes."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import make_tensor

from fxopt.capture import TracedModule, symbolic_trace, trace
from fxopt.errors import FxoptError
from fxopt.importing import imported, in_a_line


class UsageError(FxoptError):
    """A name or an option of the command line is wrong: the message says what it should be."""


def captured(name: str, inputs: Sequence[str] = (), *, specialize: bool = False) -> TracedModule:
    """Capture the model of a name, in evaluation mode.

    Args:
        name: `package.module:factory`. A factory returns a model, or a model and its example inputs: a tensor, a
            sequence of positional arguments, or a dict of keyword arguments. It may also be a model itself.
        inputs: `name=2,16` for numbers from 0 to 2 of that shape, `name=2,16:int64` for zeros and ones of a dtype. If this
            is empty, a model of transformers is captured with its main input, for all sizes.
        specialize: as for `fxopt.trace`.

    Raises:
        UsageError: if there is no such model, or it needs other inputs.
        TraceError: if the model cannot be captured.

    Example:
        >>> captured("torch.nn:ReLU", ["input=2,3"]).graph.find_nodes(op="placeholder")
        [input_1]
    """
    made = _made(name)
    model, given = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise UsageError(f"{name}: gives {type(model).__name__}, not a model, or a model and its inputs")
    model = model.eval()
    if inputs:
        given = dict(map(_input, inputs))
    if isinstance(given, Mapping):
        return trace(model, kwargs=given, specialize=specialize)
    if given is not None:
        return trace(model, (given,) if isinstance(given, Tensor) else given, specialize=specialize)
    if not hasattr(model, "main_input_name"):  # a class of transformers has it
        raise UsageError(f"{name}: say what it takes: --input NAME=2,3 for each argument of its forward")
    return symbolic_trace(model, specialize=specialize)


def _made(name: str) -> Any:
    module_name, _, path = name.partition(":")
    if not path:
        text = "a model is named package.module:factory, or as an entry of a zoo file, with --zoo"
        raise UsageError(f"{name}: {text}")
    module = imported(module_name, UsageError)
    try:
        found = operator.attrgetter(path)(module)
    except AttributeError:
        found = None
    if not callable(found):
        raise UsageError(f"{module_name} has no function or class {path!r}")
    try:
        return found if isinstance(found, nn.Module) else found()
    except (Exception, SystemExit) as error:
        advice = "name a function of your own that takes no arguments and returns the model"
        raise UsageError(f"{name}() raises {in_a_line(error)}; {advice}") from error


def _input(text: str) -> tuple[str, Tensor]:
    name, _, what = text.partition("=")
    sizes, _, dtype_name = what.partition(":")
    dtype = getattr(torch, dtype_name or "float32", None)
    try:
        shape = [int(size) for size in sizes.split(",") if size]
        if not name.isidentifier() or not what or not isinstance(dtype, torch.dtype):
            raise ValueError(text)
        return name, make_tensor(shape, dtype=dtype, device="cpu", low=0, high=2)
    except (
        ValueError,
        RuntimeError,
        TypeError,
    ) as error:  # torch's: a size below 0, a dtype of quantized tensors
        raise UsageError(f"--input {text}: write it as x=2,3 or ids=2,16:int64") from error
