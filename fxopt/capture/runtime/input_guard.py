"""The input guard: a module that the first node of a graph calls, so that deepcopy, pickle and other tracers preserve it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import torch

from fxopt.capture.runtime.input_specs import (
    InputSpec,
    NumberSpec,
    StructureSpec,
    TensorSpec,
    describe,
    dtype_kind,
    layout,
    same_value,
    structure_keys,
)
from fxopt.capture.runtime.size_guards import SizeExpression, SizeGuard
from fxopt.errors import GuardError
from fxopt.objects import is_mutable, is_open


class InputGuard(torch.nn.Module):
    """Raises GuardError if the graph was not captured for these inputs.

    `alternatives` are sets of guards, and one set must be satisfied: a graph that was captured at sizes of 1 and at larger
    sizes is valid for both. `decisions` describes the checks that the graph itself makes while it runs.
    """

    # torch.fx reads this: it keeps the call, although nothing uses its result.
    _is_impure = True

    checks_inputs = True

    def __init__(
        self,
        inputs: Sequence[InputSpec],
        alternatives: Sequence[Sequence[SizeGuard]],
        decisions: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.decisions = tuple(decisions)
        self.inputs = tuple(inputs)
        self.alternatives = tuple(tuple(guards) for guards in alternatives)
        # The meaning of each symbol: the size of an input in a dimension, or a number among the inputs.
        self.subjects = _subjects(self.inputs)
        self._places = {
            symbol: input if dim is None else f"{input}.shape[{dim}]"
            for symbol, (input, dim) in self.subjects.items()
        }
        self._formulas = {guard.condition: guard.formula for guards in self.alternatives for guard in guards}
        self._formulas |= {text: SizeExpression(text) for text in _expressions(self.inputs)}
        # Each condition and expression in terms of the inputs; computed here, because torch.compile cannot do it.
        self.words = {text: self._in_words(formula) for text, formula in self._formulas.items()}

    @property
    def tensors(self) -> list[TensorSpec]:
        """The descriptions of the tensors, in the order of the inputs."""
        return [each for each in self.inputs if isinstance(each, TensorSpec)]

    @property
    def free_sizes(self) -> set[tuple[int, int]]:
        """The dynamic dimensions, each as the number of the tensor and the number of the dimension."""
        return {
            (number, dim)
            for number, each in enumerate(self.tensors)
            for dim, size in enumerate(each.shape)
            if isinstance(size, str)
        }

    def takes(self, sizes: dict[str, int]) -> bool:
        """Tell whether the graph is valid if its symbols have these sizes."""
        return any(all(guard.holds(sizes) for guard in guards) for guards in self.alternatives)

    def fix_dtypes(self) -> None:
        """Accept only the dtypes of the capture, so that casts without effect on these dtypes may be removed."""
        self.inputs = tuple(
            dataclasses.replace(each, strict_dtype=True, any_dtype=False)
            if isinstance(each, TensorSpec)
            else each
            for each in self.inputs
        )

    def forward(self, **named: Any) -> None:
        """Check the placeholders, given by name."""
        sizes: dict[str, int] = {}
        deferred: list[Deferred] = []
        objects: dict[int, str] = {}
        tensors: list[tuple[torch.Tensor, str]] = []
        for expected in self.inputs:
            value = named[expected.name]
            for kind, key in expected.path:
                value = value[key] if kind == "item" else getattr(value, key)
            if isinstance(expected, TensorSpec):
                _check_tensor(expected, value, sizes, deferred)
                _check_identity(expected, value, tensors)
            elif isinstance(expected, StructureSpec):
                _check_structure(expected, value, objects)
            elif isinstance(expected, NumberSpec):
                _check_number(expected, value, sizes, deferred)
            elif not same_value(value, expected.value):
                raise GuardError(
                    f"input {describe(expected)!r} is {_named(value)}; the graph was captured for {expected.value!r}. "
                    "Capture again with the value that you need."
                )
        for subject, size, expression in deferred:
            wanted = self._formulas[expression].value(sizes)
            if wanted != size:
                raise GuardError(
                    f"{subject} is {size}; it must be {wanted} ({self.words[expression]}) with the sizes of the "
                    "other inputs."
                )
        if not self.takes(sizes):
            failed = next(guard for guard in self.alternatives[0] if not guard.holds(sizes))
            raise GuardError(self._explain(failed, sizes))

    def _in_words(self, formula: SizeExpression) -> str:
        """Return a formula such as `s0 + 1` with inputs and dimensions in place of its symbols."""
        return re.sub(r"\b\w+\b", lambda word: self._places.get(word[0], word[0]), formula.text)

    def conditions(self) -> list[str]:
        """Return the guards in terms of the inputs, one line each."""
        return [f"{self.words[guard.condition]}  # {guard.source}" for guard in self.alternatives[0]]

    def _explain(self, guard: SizeGuard, sizes: dict[str, int]) -> str:
        symbols = [symbol for symbol in guard.symbols if symbol in sizes]
        if len(symbols) != 1 or torch.compiler.is_compiling():  # compiled, a size is a symbol
            return (
                f"sizes {', '.join(f'{self._places[s]} = {sizes[s]}' for s in symbols)} are outside what the graph "
                f"was captured for: {self.words[guard.condition]} (needed by {guard.source})."
            )
        (symbol,) = symbols
        limit = guard.limit(symbol, sizes[symbol]) or f"it must satisfy {self.words[guard.condition]}"
        input, dimension = self.subjects[symbol]
        subject = f"input {input!r}" if dimension is None else f"input {input!r}, dimension {dimension}"
        return f"{subject} is {sizes[symbol]}; {limit} (needed by {guard.source})."

    def extra_repr(self) -> str:
        return "\n".join([*self.conditions(), *self.decisions])


def guard_of(traced: torch.nn.Module) -> InputGuard:
    """Return the input guard of a captured graph."""
    return next(module for module in traced.modules() if isinstance(module, InputGuard))


def _expressions(inputs: Sequence[InputSpec]) -> set[str]:
    """Return the expressions in symbols that sizes and numbers among the inputs must equal."""
    found = [size for i in inputs if isinstance(i, TensorSpec) for size in i.shape]
    found += [i.value for i in inputs if isinstance(i, NumberSpec)]
    return {text for text in found if isinstance(text, str)}


def _subjects(inputs: Sequence[InputSpec]) -> dict[str, tuple[str, int | None]]:
    """Return for each symbol the first input that has it as a size, with the dimension, or as a number."""
    subjects: dict[str, tuple[str, int | None]] = {}
    for expected in inputs:
        if isinstance(expected, NumberSpec):
            subjects.setdefault(str(expected.value), (describe(expected), None))
        elif isinstance(expected, TensorSpec):
            for dim, size in enumerate(expected.shape):
                subjects.setdefault(str(size), (describe(expected), dim))
    return {symbol: subject for symbol, subject in subjects.items() if symbol.isidentifier()}


# A check that needs sizes not known yet: the description of a number, its value, and the expression that it must equal.
Deferred = tuple[str, int, str]


def _check_tensor(expected: TensorSpec, value: Any, sizes: dict[str, int], deferred: list[Deferred]) -> None:
    subject = f"input {describe(expected)!r}"
    if not isinstance(value, torch.Tensor):
        raise GuardError(f"{subject} is {type(value).__name__}; the graph takes a tensor there.")
    same_kind = expected.any_dtype or dtype_kind(value.dtype) == dtype_kind(expected.dtype)
    if value.dtype != expected.dtype and (expected.strict_dtype or not same_kind):
        raise GuardError(
            f"{subject} is {value.dtype}; the graph was captured with {expected.dtype}. "
            "Convert the input, or capture the model in the dtype in which you run it."
        )
    if expected.layout is not None and layout(value) != expected.layout:
        raise GuardError(
            f"{subject}, which is {'' if value.is_contiguous() else 'not '}contiguous, has another memory layout "
            "than the example; the forward reads strides. Call `.contiguous()`, or capture with such an input."
        )
    if expected.requires_grad is not None and value.requires_grad != expected.requires_grad:
        raise GuardError(
            f"{subject} has requires_grad={value.requires_grad}; at capture it was "
            f"{expected.requires_grad}, and the forward reads this flag. Capture again with an input such as this."
        )
    shape = value.shape
    if len(shape) != len(expected.shape):
        raise GuardError(
            f"{subject} has {len(shape)} dimensions; the graph was captured with {len(expected.shape)}."
        )
    for dim, (size, wanted) in enumerate(zip(shape, expected.shape, strict=True)):
        if isinstance(wanted, int):
            if size != wanted:
                raise GuardError(
                    f"{subject}, dimension {dim} is {size}; the graph was captured for {wanted} "
                    f"alone. {_why_fixed(expected, dim)}"
                )
        elif size == 0:
            raise GuardError(
                f"{subject}, dimension {dim} is 0; it takes at least 1, as all free sizes do, because "
                "forwards and torch's operators may treat empty tensors differently. Call the eager model, or capture again "
                "with this size fixed."
            )
        else:
            _check_free(f"{subject}, dimension {dim}", size, wanted, sizes, deferred)


def _check_free(
    subject: str, size: int, wanted: str, sizes: dict[str, int], deferred: list[Deferred]
) -> None:
    if not wanted.isidentifier():
        deferred.append((subject, size, wanted))
    elif sizes.setdefault(wanted, size) != size:
        raise GuardError(f"{subject} is {size}; it must be {sizes[wanted]}, as in the inputs before it.")


def _why_fixed(expected: TensorSpec, dim: int) -> str:
    line = dict(expected.fixed_by).get(dim)
    if line is None:
        return "Name the dimension in `dynamic_shapes` to leave it free."
    return f"The forward fixes it, at {line}: capture again with the size that you need."


def _named(value: Any) -> str:
    """Return a value as text for an error; for a tensor, only its shape."""
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def _check_number(expected: NumberSpec, value: Any, sizes: dict[str, int], deferred: list[Deferred]) -> None:
    subject = f"input {describe(expected)!r}"
    if type(value) is not int:
        raise GuardError(f"{subject} is {value!r}; the graph takes an int there.")
    if isinstance(expected.value, str):
        _check_free(subject, value, expected.value, sizes, deferred)
    elif value != expected.value:
        raise GuardError(
            f"{subject} is {value}; the graph was captured for {expected.value}. Capture again with the value that you need."
        )


def _check_identity(
    expected: TensorSpec, value: torch.Tensor, earlier: list[tuple[torch.Tensor, str]]
) -> None:
    """Check that an input is the same tensor as an earlier input if and only if it was at capture."""
    if expected.same_as is None:
        return
    name = describe(expected)
    first = next((other for tensor, other in earlier if tensor is value), name)
    earlier.append((value, name))
    if first != expected.same_as:
        found = f"the same tensor as {first!r}" if first != name else "a tensor of its own"
        captured = f"the same as {expected.same_as!r}" if expected.same_as != name else "one of its own"
        raise GuardError(
            f"input {name!r} is {found}; at capture it was {captured}, and the forward compares tensors by identity or "
            "memory address. Capture again with inputs such as these."
        )


def _check_structure(expected: StructureSpec, value: Any, objects: dict[int, str]) -> None:
    if type(value) is not expected.type:
        raise GuardError(
            f"input {describe(expected)!r} is {type(value).__name__}; the graph takes {expected.type.__name__} there."
        )
    keys = structure_keys(value)
    if keys != expected.keys and not (is_open(value) and set(keys) == set(expected.keys)):
        raise GuardError(f"input {describe(expected)!r} {_difference(keys, expected)}")
    if is_mutable(value) and objects.setdefault(id(value), describe(expected)) != describe(expected):
        raise GuardError(
            f"inputs {objects[id(value)]!r} and {describe(expected)!r} are the same {type(value).__name__}; "
            "the graph needs two."
        )


def _difference(keys: tuple[Any, ...], expected: StructureSpec) -> str:
    if issubclass(expected.type, (list, tuple)):
        return f"has {len(keys)} entries; the graph was captured with {len(expected.keys)}."
    if issubclass(expected.type, dict) or dataclasses.is_dataclass(expected.type):
        return f"has entries {list(keys)}; the graph was captured with {list(expected.keys)}."
    missing, more = ([k for k in a if k not in b] for a, b in ((expected.keys, keys), (keys, expected.keys)))
    words = [f"has no {', '.join(missing)}"] * bool(missing) + [f"has also {', '.join(more)}"] * bool(more)
    return (
        f"{' and '.join(words)}, unlike the {expected.type.__name__} that the graph was captured with "
        "(is one of them still empty?)."
    )
