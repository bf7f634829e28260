"""All that one call of a model leaves: outputs, inputs, buffers, gradients; and where two calls differ."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fxopt.capture.runs.own_copies import Examples
from fxopt.objects import attributes, is_open, tensors_in
from fxopt.torch_internals import storage_identity


@dataclasses.dataclass(frozen=True)
class Outcome:
    """All that a call has given, or the error that it raised; `gradients` and their error where they were asked for."""

    output: Any
    inputs: dict[str, Any]
    buffers: dict[str, torch.Tensor]
    gradients: dict[str, Any] | None
    error: Exception | None = None
    gradient_error: Exception | None = None


def outcome_of(
    call: Callable[[dict[str, Any]], Any], examples: Examples, module: torch.nn.Module, gradients: bool
) -> Outcome:
    """Call a model or a graph, and in training its backward."""
    output, computed, error, gradient_error = None, None, None, None
    try:
        output = call(examples.values)
    except Exception as raised:
        error = raised
    if gradients and error is None:
        try:
            computed = _gradients(output, examples, module)
        except Exception as raised:
            gradient_error = raised
    buffers = dict(module.named_buffers(remove_duplicate=False))
    return Outcome(output, examples.values, buffers, computed, error, gradient_error)


def difference(expected: Outcome, found: Outcome) -> str | None:
    """The first thing in which an outcome is not as expected, in words; None where there is none."""
    if expected.gradient_error is None and found.gradient_error is not None:
        error = found.gradient_error
        return f"backward, which raises {type(error).__name__}: {str(error).splitlines()[0]}"
    pairs = (
        ("output", expected.output, found.output),
        ("input", expected.inputs, found.inputs),
        ("buffer", expected.buffers, {name: found.buffers.get(name) for name in expected.buffers}),
        ("gradient of", expected.gradients, found.gradients if expected.gradient_error is None else None),
    )
    for kind, left, right in pairs:
        for where, what in _differences(left, right, "", {}):
            return f"{kind} {where}".strip() + f" {what}"
    left_shared, right_shared = _sharing(expected), _sharing(found)
    if left_shared != right_shared:
        return "output, whose tensors share memory with others than those of the model"
    return None


def _gradients(output: Any, examples: Examples, module: torch.nn.Module) -> dict[str, Any]:
    """The gradients of a random sum of all outputs, without a trace in any `.grad`."""
    outputs = [t for t in {id(t): t for t in tensors_in(output)}.values() if t.requires_grad]
    # A copied TorchScript module has parameters of its own beside those that Python sees: they are not compared.
    scripted = [m for m in module.modules() if isinstance(m, torch.jit.ScriptModule)]
    apart = {id(p) for m in scripted for p in m.parameters()}
    named: dict[str, torch.Tensor] = {
        n: p for n, p in module.named_parameters() if p.requires_grad and id(p) not in apart
    }
    named |= {f"input {n}": leaf for n, leaf in enumerate(examples.leaves)}
    if not outputs or not named:
        return dict.fromkeys(named)
    generator = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(t.shape, dtype=t.dtype, generator=generator).to(t.device)
        if t.dtype.is_floating_point or t.dtype.is_complex
        else None
        for t in outputs
    ]
    computed = torch.autograd.grad(outputs, list(named.values()), weights, allow_unused=True)
    return dict(zip(named, computed, strict=True))


def _differences(left: Any, right: Any, where: str, seen: dict[int, int]) -> Iterator[tuple[str, str]]:
    """Places in which two values differ, and how; each object is looked at once."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if (how := _tensor_difference(left, right)) is not None:
            yield where, how
        return
    if type(left) is not type(right) and not _is_zero_for_none(left, right):
        yield where, f"is a {type(right).__name__}, not a {type(left).__name__}"
        return
    if id(left) in seen:
        return
    seen[id(left)] = id(right)
    parts = _parts(left), _parts(right)
    if parts[0] is None or parts[1] is None:
        if isinstance(left, (bool, int, float, complex, str, bytes)) and repr(left) != repr(right):
            yield where, f"is {right!r}, not {left!r}"
        return
    if list(parts[0]) != list(parts[1]):
        yield where, f"has the entries {list(parts[1])}, not {list(parts[0])}"
        return
    for key, value in parts[0].items():
        yield from _differences(value, parts[1][key], f"{where}.{key}" if where else str(key), seen)


def _is_zero_for_none(left: Any, right: Any) -> bool:
    """Tell whether a gradient is 0 that the model does not have, as where a branch is taken always that it did not take."""
    return left is None and isinstance(right, torch.Tensor) and not bool(right.any())


def _parts(value: Any) -> dict[Any, Any] | None:
    if isinstance(value, dict):
        return value
    if isinstance(value, (tuple, list, collections.deque, collections.abc.MappingView)):
        return dict(enumerate(tuple(value)))  # type: ignore[arg-type]
    if isinstance(value, (set, frozenset)):
        return dict.fromkeys(sorted(map(repr, value)))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return attributes(value) if is_open(value) else None


def _tensor_difference(left: torch.Tensor, right: torch.Tensor) -> str | None:
    for name in ("dtype", "shape", "layout", "device"):
        found, expected = getattr(right, name), getattr(left, name)
        if found != expected:
            found, expected = (tuple(found), tuple(expected)) if name == "shape" else (found, expected)
            return f"has {name} {found}, not {expected}"
    # A branch that is taken always may bring gradients, of 0.
    if left.requires_grad and not right.requires_grad:
        return "takes no gradients"
    if type(left) is not type(right):
        return f"is a {type(right).__name__}, not a {type(left).__name__}"
    if left.layout is torch.strided and not left.is_nested and _strides(left) != _strides(right):
        return f"has strides {right.stride()}, not {left.stride()}"
    same = _same_values(_comparable(left.detach()), _comparable(right.detach()))
    return None if same else "has other values"


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor of a dtype that `==` knows: not of 8 bits floating, nor of many bits without a sign."""
    if tensor.is_nested:
        return tensor.values() if tensor.layout is torch.jagged else tensor.to_padded_tensor(0.0)
    if tensor.is_quantized or tensor.layout is not torch.strided:
        return tensor.dequantize() if tensor.is_quantized else tensor.to_dense()
    if tensor.is_floating_point() and tensor.element_size() == 1:
        return tensor.float()
    signed = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
    return tensor.view(signed[tensor.dtype]) if tensor.dtype in signed else tensor


def _same_values(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit for bit, or as near as half the digits of a dtype: other kernels, or other runs, add in another order."""
    if left.shape != right.shape:
        return False
    same = (left == right) | (left.isnan() & right.isnan())
    if bool(same.all()):
        return True
    if not (left.is_floating_point() or left.is_complex()) or not bool(left[~same].isfinite().all()):
        return False
    wide = torch.complex128 if left.is_complex() else torch.float64
    distance = (left[~same].to(wide) - right[~same].to(wide)).abs().max()
    largest = left[left.isfinite()].abs().max().double()
    return bool(distance <= torch.finfo(left.dtype).eps ** 0.5 * largest)


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of the dimensions that are longer than 1, of which alone they tell something."""
    return tuple(
        s for size, s in zip(tensor.shape, tensor.stride(), strict=True) if size > 1 and tensor.numel()
    )


def _sharing(outcome: Outcome) -> list[int]:
    """For each tensor in inputs and output, the first one that has the same memory."""
    first: dict[Any, int] = {}
    return [
        first.setdefault(storage_identity(t.untyped_storage()) if t.layout is torch.strided else id(t), n)
        for n, t in enumerate(tensors_in([outcome.inputs, outcome.output]))
    ]
