"""What a graph assumes of its inputs, checked on entry.

The check is a module without parameters, called by the first node after the placeholders: it travels with
the graph through deepcopy, pickle, other passes and other tracers, and dead code elimination keeps it.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.node import has_side_effect
from torch.utils._sympy.printers import PythonPrinter

from fxopt.errors import GuardError
from fxopt.objects import is_mutable, is_open

Path = tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class TensorInput:
    """A tensor.

    `shape` holds an int for a fixed dimension and an expression in symbols for a free one. `fixed_by` gives, for
    dimensions that were left free and that the forward fixed all the same, the line that did. `strict_dtype`
    is set when the forward read this dtype, `layout` when it read strides, `requires_grad` when it asked for gradients.
    """

    name: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int | str, ...]
    fixed_by: tuple[tuple[int, str], ...] = ()
    strict_dtype: bool = False
    layout: tuple[Any, ...] | None = None
    requires_grad: bool | None = None


@dataclasses.dataclass(frozen=True)
class ConstantInput:
    """A value that is no tensor; the graph holds for this one alone."""

    name: str
    path: Path
    value: Any


@dataclasses.dataclass(frozen=True)
class NumberInput:
    """An int that the forward changes from call to call: an expression in symbols, or the one value that it fixed."""

    name: str
    path: Path
    value: int | str


@dataclasses.dataclass(frozen=True)
class StructureInput:
    """A container or an object, of this type with these keys."""

    name: str
    path: Path
    type: type
    keys: tuple[Any, ...]


class Formula:
    """An expression over sizes, as torch prints it, made a function once: torch.compile can follow that."""

    def __init__(self, text: str) -> None:
        known: dict[str, Any] = {"math": math, "torch": torch}
        names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
        self.text = text
        self.symbols = tuple(sorted(names - known.keys() - vars(builtins).keys()))
        self._function = eval(f"lambda {', '.join(self.symbols)}: {text}", known)

    def value(self, sizes: dict[str, int]) -> Any:
        """The value for these sizes."""
        return self._function(*[sizes[symbol] for symbol in self.symbols])

    def __reduce__(self) -> tuple[Any, ...]:
        return Formula, (self.text,)


@dataclasses.dataclass(frozen=True)
class SizeGuard:
    """A condition on symbols, as Python, and the line of the model that needs it."""

    condition: str
    source: str
    formula: Formula = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "formula", Formula(self.condition))

    @property
    def symbols(self) -> tuple[str, ...]:
        """The sizes that the condition is about."""
        return self.formula.symbols

    def holds(self, sizes: dict[str, int]) -> bool:
        """Whether the condition is true for these sizes."""
        try:
            return bool(self.formula.value(sizes))
        except ZeroDivisionError:
            return False


Input = TensorInput | ConstantInput | NumberInput | StructureInput


class InputGuard(torch.nn.Module):
    """Raises GuardError unless the inputs are such as the graph was captured for.

    `alternatives` are sets of guards of which one must hold: a graph that was captured twice with the same
    result, at sizes of 1 and at larger ones, holds where either capture does. `decisions` says what the graph itself
    checks while it runs: decisions on values.
    """

    # torch.fx reads this: the call is kept though nothing uses its result.
    _is_impure = True

    def __init__(
        self,
        inputs: Sequence[Input],
        alternatives: Sequence[Sequence[SizeGuard]],
        decisions: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.decisions = tuple(decisions)
        self.inputs = tuple(inputs)
        self.alternatives = tuple(tuple(guards) for guards in alternatives)
        # What each symbol is the size of: an input and a dimension, or a number among the inputs.
        self.subjects = _subjects(self.inputs)
        self._places = {
            symbol: input if dim is None else f"{input}.shape[{dim}]"
            for symbol, (input, dim) in self.subjects.items()
        }
        self._formulas = {guard.condition: guard.formula for guards in self.alternatives for guard in guards}
        self._formulas |= {text: Formula(text) for text in _expressions(self.inputs)}
        # Each condition and expression in words of the inputs; made here, because torch.compile cannot.
        self.words = {text: self._in_words(formula) for text, formula in self._formulas.items()}

    def forward(self, **named: Any) -> None:
        """Check the placeholders, given by name."""
        sizes: dict[str, int] = {}
        deferred: list[Deferred] = []
        objects: dict[int, str] = {}
        for expected in self.inputs:
            value = named[expected.name]
            for kind, key in expected.path:
                value = value[key] if kind == "item" else getattr(value, key)
            if isinstance(expected, TensorInput):
                _check_tensor(expected, value, sizes, deferred)
            elif isinstance(expected, StructureInput):
                _check_structure(expected, value, objects)
            elif isinstance(expected, NumberInput):
                _check_number(expected, value, sizes, deferred)
            elif not same_value(value, expected.value):
                raise GuardError(
                    f"input {describe(expected)!r} is {value!r}; the graph was captured for {expected.value!r}. "
                    "Capture again with the value that you need."
                )
        for subject, size, expression in deferred:
            wanted = self._formulas[expression].value(sizes)
            if wanted != size:
                raise GuardError(
                    f"{subject} is {size}; it must be {wanted} ({self.words[expression]}) with the sizes of the "
                    "other inputs."
                )
        if not any(all(guard.holds(sizes) for guard in guards) for guards in self.alternatives):
            failed = next(guard for guard in self.alternatives[0] if not guard.holds(sizes))
            raise GuardError(self._explain(failed, sizes))

    def _in_words(self, formula: Formula) -> str:
        """`s0 + 1` with the inputs and dimensions that its symbols stand for."""
        return re.sub(r"\b\w+\b", lambda word: self._places.get(word[0], word[0]), formula.text)

    def conditions(self) -> list[str]:
        """The guards in words of the inputs, one line each."""
        return [f"{self.words[guard.condition]}  # {guard.source}" for guard in self.alternatives[0]]

    def _explain(self, guard: SizeGuard, sizes: dict[str, int]) -> str:
        symbols = [symbol for symbol in guard.symbols if symbol in sizes]
        if len(symbols) != 1 or torch.compiler.is_compiling():  # compiled, a size is a symbol
            return (
                f"sizes {', '.join(f'{self._places[s]} = {sizes[s]}' for s in symbols)} are outside what the graph "
                f"was captured for: {self.words[guard.condition]} (needed by {guard.source})."
            )
        (symbol,) = symbols
        limit = _limit(guard, symbol, sizes[symbol]) or f"it must satisfy {self.words[guard.condition]}"
        input, dimension = self.subjects[symbol]
        subject = f"input {input!r}" if dimension is None else f"input {input!r}, dimension {dimension}"
        return f"{subject} is {sizes[symbol]}; {limit} (needed by {guard.source})."

    def extra_repr(self) -> str:
        return "\n".join([*self.conditions(), *self.decisions])


@has_side_effect
def check_value(condition: bool, message: str) -> None:
    """Raise GuardError unless a condition on numbers that the graph computes is true."""
    if not condition:
        raise GuardError(f"{message}; this input is outside of that.")


@has_side_effect
def check_decision(value: Any, decided: Any, where: str, otherwise: str) -> None:
    """Raise GuardError unless `value` leads the forward to the decision of the capture.

    `decided` is what Python made of the value: a bool or number, or a tensor for all values of an array.
    `otherwise` is the error that the model itself raises for any other value, where it does.
    """
    if isinstance(value, torch.Tensor) and value.is_meta:
        return  # nothing is computed
    if isinstance(decided, torch.Tensor):
        if value.shape != decided.shape or not torch.allclose(value, decided, 0, 0, equal_nan=True):
            raise GuardError(
                f"the forward reads all values of a tensor, and they are not those of the capture. {where}"
            )
        return
    now = type(decided)(value)
    if not same_value(now, decided):
        raise GuardError(
            f"the model raises {otherwise}. {where}"
            if otherwise
            else f"the forward decides on a value: it was {decided} when the graph was captured, and is {now} now. {where} "
            "Capture again with inputs such as these."
        )


@has_side_effect
def check_alike(value: Any, earlier: bool | None, where: str) -> bool | None:
    """Return `value` as a bool; raise GuardError if the question before it at this line had another answer."""
    if isinstance(value, torch.Tensor) and value.is_meta:
        return None  # nothing is computed
    if earlier is not None and bool(value) != earlier:
        raise GuardError(
            f"the forward decides on values, and does not decide alike each time. {where} The graph was captured for "
            "inputs with which all these decisions fall the same way: call the model itself, or capture with "
            "specialize=True and inputs such as these."
        )
    return bool(value)


def describe(expected: Input) -> str:
    """`past[0].keys`: the name of an input with the path inside it."""
    return expected.name + "".join(
        f"[{key!r}]" if kind == "item" else f".{key}" for kind, key in expected.path
    )


def python_expression(expression: Any) -> str:
    """A sympy expression over sizes as Python source."""
    return str(PythonPrinter().doprint(expression))


def _expressions(inputs: Sequence[Input]) -> set[str]:
    """The expressions in symbols that sizes and numbers among the inputs must equal."""
    found = [size for i in inputs if isinstance(i, TensorInput) for size in i.shape]
    found += [i.value for i in inputs if isinstance(i, NumberInput)]
    return {text for text in found if isinstance(text, str)}


def _subjects(inputs: Sequence[Input]) -> dict[str, tuple[str, int | None]]:
    """For each symbol the first input, and dimension of it, that it is the size of."""
    subjects: dict[str, tuple[str, int | None]] = {}
    for expected in inputs:
        if isinstance(expected, NumberInput):
            subjects.setdefault(str(expected.value), (describe(expected), None))
        elif isinstance(expected, TensorInput):
            for dim, size in enumerate(expected.shape):
                subjects.setdefault(str(size), (describe(expected), dim))
    return {symbol: subject for symbol, subject in subjects.items() if symbol.isidentifier()}


# What must equal an expression in sizes that are not known yet: its description, its value and the expression.
Deferred = tuple[str, int, str]


def _check_tensor(expected: TensorInput, value: Any, sizes: dict[str, int], deferred: list[Deferred]) -> None:
    if not isinstance(value, torch.Tensor):
        raise GuardError(
            f"input {describe(expected)!r} is {type(value).__name__}; the graph takes a tensor there."
        )
    if value.dtype != expected.dtype and (expected.strict_dtype or kind(value.dtype) != kind(expected.dtype)):
        raise GuardError(
            f"input {describe(expected)!r} is {value.dtype}; the graph was captured with {expected.dtype}. "
            "Convert the input, or capture the model in the dtype in which you run it."
        )
    if expected.layout is not None and layout(value) != expected.layout:
        raise GuardError(
            f"input {describe(expected)!r} is {'' if value.is_contiguous() else 'not '}contiguous, or laid out otherwise "
            "than the example; the forward reads strides. Call `.contiguous()`, or capture with such an input."
        )
    if expected.requires_grad is not None and value.requires_grad != expected.requires_grad:
        raise GuardError(
            f"input {describe(expected)!r} has requires_grad={value.requires_grad}, and the forward reads that: it was "
            f"{expected.requires_grad} when the graph was captured. Capture again with an input such as this."
        )
    shape = value.shape
    if len(shape) != len(expected.shape):
        raise GuardError(
            f"input {describe(expected)!r} has {len(shape)} dimensions; the graph was captured with {len(expected.shape)}."
        )
    for dim, (size, wanted) in enumerate(zip(shape, expected.shape, strict=True)):
        if isinstance(wanted, int):
            if size != wanted:
                raise GuardError(
                    f"input {describe(expected)!r}, dimension {dim} is {size}; the graph was captured for {wanted} "
                    f"alone. {_why_fixed(expected, dim)}"
                )
        elif not wanted.isidentifier():
            deferred.append((f"input {describe(expected)!r}, dimension {dim}", size, wanted))
        elif sizes.setdefault(wanted, size) != size:
            raise GuardError(
                f"input {describe(expected)!r}, dimension {dim} is {size}; it must be {sizes[wanted]}, "
                "as in the inputs before it."
            )


def layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """How a tensor lies in memory: contiguous or not, the order of its strides, which with the sizes gives them all
    where its elements fill their memory, and where it starts."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
    dense = tensor.permute(order).is_contiguous()
    return tensor.is_contiguous(), tuple(order), None if dense else strides, tensor.storage_offset()


def _why_fixed(expected: TensorInput, dim: int) -> str:
    line = dict(expected.fixed_by).get(dim)
    if line is None:
        return "Name the dimension in `dynamic_shapes` to leave it free."
    return f"The forward fixes it, at {line}: capture again with the size that you need."


def _check_number(expected: NumberInput, value: Any, sizes: dict[str, int], deferred: list[Deferred]) -> None:
    subject = f"input {describe(expected)!r}"
    if type(value) is not int:
        raise GuardError(f"{subject} is {value!r}; the graph takes an int there.")
    if isinstance(expected.value, int):
        if value != expected.value:
            raise GuardError(
                f"{subject} is {value}; the graph was captured for {expected.value}. "
                "Capture again with the value that you need."
            )
    elif not expected.value.isidentifier():
        deferred.append((subject, value, expected.value))
    elif sizes.setdefault(expected.value, value) != value:
        raise GuardError(
            f"{subject} is {value}; it must be {sizes[expected.value]}, as in the inputs before it."
        )


def _check_structure(expected: StructureInput, value: Any, objects: dict[int, str]) -> None:
    if type(value) is not expected.type:
        raise GuardError(
            f"input {describe(expected)!r} is {type(value).__name__}; the graph takes {expected.type.__name__} there."
        )
    keys = structure_keys(value)
    if keys != expected.keys and not (is_open(value) and set(keys) == set(expected.keys)):
        raise GuardError(f"input {describe(expected)!r} {_difference(keys, expected)}")
    if is_mutable(value) and objects.setdefault(id(value), describe(expected)) != describe(expected):
        raise GuardError(
            f"inputs {objects[id(value)]!r} and {describe(expected)!r} are one {type(value).__name__}; "
            "the graph takes two."
        )


def _difference(keys: tuple[Any, ...], expected: StructureInput) -> str:
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


def structure_keys(value: Any) -> tuple[Any, ...]:
    """The keys of a container: indices of a sequence, keys of a mapping, names of fields or attributes."""
    if isinstance(value, dict):
        return tuple(value)
    if isinstance(value, (tuple, list)):
        return tuple(range(len(value)))
    if dataclasses.is_dataclass(value):
        return tuple(field.name for field in dataclasses.fields(value))
    return tuple(vars(value))


def _limit(guard: SizeGuard, symbol: str, size: int) -> str | None:
    """The limit that a condition puts on one size, where it is a limit: true on one side and false on the other."""

    def holds(n: int) -> bool:
        return guard.holds({symbol: n})

    below = [n for n in (*range(2, 9), *(size - 2**k for k in range(20))) if 1 < n < size]
    good = [n for n in below if holds(n)]
    if good:
        edge = _edge(holds, max(good), size)
        monotone = all(holds(n) == (n <= edge) for n in (*below, edge + 1, 2 * size, 2 * size + 1))
        return f"it takes at most {edge}" if monotone else None
    above = [size + 2**k for k in range(20)]
    good = [n for n in above if holds(n)]
    if good:
        edge = _edge(holds, min(good), size)
        monotone = all(holds(n) == (n >= edge) for n in (*range(1, size + 1), *above))
        return f"it takes at least {edge}" if monotone else None
    return None


def _edge(holds: Callable[[int], bool], good: int, bad: int) -> int:
    """The last size that holds, between one that does and one that does not."""
    while abs(good - bad) > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if holds(middle) else (good, middle)
    return good


def kind(dtype: torch.dtype) -> str:
    """What a dtype must share with the one of the capture: floating, integer, complex or bool."""
    if dtype == torch.bool:
        return "bool"
    return "complex" if dtype.is_complex else "floating" if dtype.is_floating_point else "integer"


def same_value(value: Any, expected: Any) -> bool:
    """Whether two constants are the same to the last bit and type; unlike `==`, which holds for 1 and True."""
    if type(value) is not type(expected):
        return False
    if isinstance(value, float):
        return repr(value) == repr(expected)
    if isinstance(value, (tuple, list)):
        return len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(value, dict):
        return list(value) == list(expected) and all(same_value(value[key], expected[key]) for key in value)
    return bool(value == expected)
