"""The results of one call of a model: outputs, inputs, buffers, gradients; and where two calls differ.

An outcome contains no tensor with an autograd history, so that the activations of a run are freed before the next run.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fxopt.capture.runs.own_copies import Examples
from fxopt.compare import tensor_error
from fxopt.errors import error_text
from fxopt.objects import attributes, is_open, tensors_in
from fxopt.outputs import plain, strides_of
from fxopt.torch_internals import storage_identity

# A tensor of at least _LARGE numbers is condensed: each block of _BLOCK numbers to one, _PART numbers at a time.
_LARGE, _BLOCK, _PART = 2**12, 2**6, 2**18


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The results of a call, or the error that it raised; `gradient_error` is an error of its backward.

    `contents` has by kind ("output", "input", "buffer NAME", "gradient of") the places in the value with their contents.
    `shared` has for each tensor in inputs and output the number of the first tensor in the same memory.
    """

    contents: dict[str, list[tuple[str, Content]]]
    shared: list[int] = dataclasses.field(default_factory=list)
    error: Exception | None = None
    gradient_error: Exception | None = None


@dataclasses.dataclass(frozen=True)
class Content:
    """The compared parts of one value; the numbers of two tensors may differ by `limit`, relative to the largest number."""

    kind: type
    traits: dict[str, Any]
    requires_grad: bool = False
    numbers: torch.Tensor | None = None
    limit: float = 0.0


def outcome_of(
    call: Callable[[dict[str, Any]], Any],
    examples: Examples,
    module: torch.nn.Module,
    gradients: bool,
    condensed: bool,
) -> Outcome:
    """Call a model or a graph, with backward if `gradients`; if `condensed`, keep only sums of blocks of large tensors."""
    gradient_error = None
    try:
        values = {"output": call(examples.values), "input": examples.values}
    except Exception as raised:
        return Outcome({}, error=raised)
    try:
        values |= {"gradient of": _gradients(values["output"], examples, module)} if gradients else {}
    except Exception as raised:
        gradient_error = raised
    values |= {f"buffer {name}": b for name, b in module.named_buffers(remove_duplicate=False)}
    contents = {kind: list(contents_of(value, condensed)) for kind, value in values.items()}
    return Outcome(contents, _sharing([examples.values, values["output"]]), gradient_error=gradient_error)


def difference(expected: Outcome, found: Outcome) -> str | None:
    """Describe the first difference between the expected outcome and the found one; None if they agree."""
    if error := expected.error or found.error:
        return f"raises {named(error)}"
    if expected.gradient_error is None and found.gradient_error is not None:
        return f"backward, which raises {named(found.gradient_error)}"
    for kind, left in expected.contents.items():
        # As long as kinds and entries agree, the places agree.
        right = found.contents.get(kind) or contents_of(None, condensed=False)
        for (where, one), (_, other) in zip(left, right, strict=False):
            if (what := _content_difference(one, other)) is not None:
                return f"{kind} {where}".strip() + f" {what}"
    if expected.shared != found.shared:
        return "output, whose tensors share memory with others than those of the model"
    return None


def named(error: Exception) -> str:
    """Return an error as one line of text."""
    return error_text(error).splitlines()[0].removesuffix(": ")


def _gradients(output: Any, examples: Examples, module: torch.nn.Module) -> dict[str, Any]:
    """Return the gradients of a random sum of all outputs; no `.grad` changes."""
    outputs = [t for t in {id(t): t for t in tensors_in(output)}.values() if t.requires_grad]
    # A copied TorchScript module has parameters other than those that Python sees: they are not compared.
    scripted = [m for m in module.modules() if isinstance(m, torch.jit.ScriptModule)]
    apart = {id(p) for m in scripted for p in m.parameters()}
    named: dict[str, torch.Tensor] = {
        n: p for n, p in module.named_parameters() if p.requires_grad and id(p) not in apart
    }
    named |= {f"input {n}": leaf for n, leaf in enumerate(examples.leaves)}
    if not outputs or not named:
        return dict.fromkeys(named)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(t.shape, dtype=t.dtype, generator=generator).to(t.device) for t in outputs]
    computed = torch.autograd.grad(outputs, list(named.values()), weights, allow_unused=True)
    return dict(zip(named, computed, strict=True))


def contents_of(value: Any, condensed: bool, where: str = "") -> Iterator[tuple[str, Content]]:
    """Yield the places in a value and their contents, from the outside in."""
    parts = _parts(value)
    if isinstance(value, torch.Tensor):
        yield where, _of_tensor(value, condensed)
    elif parts is None:
        plain = isinstance(value, (bool, int, float, complex, str, bytes))
        yield where, Content(type(value), {"value": repr(value)} if plain else {})
    else:
        yield where, Content(type(value), {"the entries": list(parts)})
        for key, part in parts.items():
            yield from contents_of(part, condensed, f"{where}.{key}" if where else str(key))


def _of_tensor(tensor: torch.Tensor, condensed: bool) -> Content:
    numbers = plain(tensor.detach())
    rounded = numbers.is_floating_point() or numbers.is_complex()
    # Half the digits of a dtype, because other kernels or other runs may add in another order.
    limit = torch.finfo(numbers.dtype).eps ** 0.5 if rounded else 0.0
    traits = {name: getattr(tensor, name) for name in ("dtype", "layout", "device")}
    traits |= {"shape": tuple(tensor.shape), "strides": strides_of(tensor)}
    if condensed and type(numbers) is torch.Tensor and numbers.numel() >= _LARGE:
        numbers, limit = condensed_numbers(numbers), limit / _BLOCK**0.5
    else:
        numbers = numbers.clone()  # it may be a buffer, into which the next call writes
    return Content(type(tensor), traits, tensor.requires_grad, numbers, limit)


def condensed_numbers(numbers: torch.Tensor) -> torch.Tensor:
    """Return a random weighted sum of each block of numbers; the sum differs if a number differs."""
    flat = torch.view_as_real(numbers.resolve_conj()) if numbers.is_complex() else numbers
    flat = flat.flatten().view(torch.int32) if flat.dtype is torch.int64 else flat.flatten()
    wide = torch.float32 if flat.device.type == "mps" else torch.float64
    weights = torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0)).to(flat.device, wide)
    sums = []
    for part in flat.split(_PART):
        padded = torch.nn.functional.pad(part.to(wide), (0, _BLOCK - len(part) % _BLOCK))
        largest = float(padded.nan_to_num(0.0, 0.0, 0.0).abs().max()) or 1.0
        finite = padded.nan_to_num(3 * largest, 2 * largest, -2 * largest)
        sums.append(finite.view(-1, _BLOCK) @ weights)
    return torch.cat(sums)


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


def _content_difference(left: Content, right: Content) -> str | None:
    if left.kind is not right.kind:
        # A branch that always runs in the graph may add gradients of 0.
        added = left.kind is type(None) and right.numbers is not None and not bool(right.numbers.any())
        return None if added else f"is a {right.kind.__name__}, not a {left.kind.__name__}"
    for name, expected in left.traits.items():
        if (found := right.traits[name]) != expected:
            return f"has {name} {found}, not {expected}"
    if left.requires_grad and not right.requires_grad:
        return "takes no gradients"
    if (
        left.numbers is None
        or right.numbers is None
        or _same_numbers(left.numbers, right.numbers, left.limit)
    ):
        return None
    return "has other values"


def _same_numbers(left: torch.Tensor, right: torch.Tensor, limit: float) -> bool:
    if torch.equal(left, right) or left.shape != right.shape:
        return left.shape == right.shape
    return bool(limit) and tensor_error(left, right)[1] <= limit


def _sharing(values: Any) -> list[int]:
    """Return for each tensor the number of the first tensor in the same memory."""
    first: dict[Any, int] = {}
    return [
        first.setdefault(storage_identity(t.untyped_storage()) if t.layout is torch.strided else id(t), n)
        for n, t in enumerate(tensors_in(values))
    ]
