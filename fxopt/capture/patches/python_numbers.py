"""Python's functions of numbers (`len`, `max`, `round`, `hash`), for sizes that are dynamic or unbacked."""

from __future__ import annotations

import builtins
import copy
import functools
import itertools
import math
import sys
import types
from typing import Any

import torch

from fxopt.capture.capture_internals import SYMBOLIC, SymNode, float_operations, size_functions
from fxopt.capture.data_dependence.branch_decisions import BranchDecisions
from fxopt.capture.data_dependence.branches import SizeAsKeyError
from fxopt.capture.data_dependence.source_statements import is_diagnostic
from fxopt.capture.fakes.dynamic_shapes import PYTHON_TYPES, is_given
from fxopt.capture.fakes.shape_env import Rounded
from fxopt.capture.nodes.size_nodes import FLOAT_FUNCTIONS
from fxopt.capture.nodes.source_location import is_model_code, makes_calls
from fxopt.capture.patches.replaced import Patches
from fxopt.torch_internals import FakeTensor

_SYMBOLIC = (torch.SymInt, torch.SymFloat)


def patch_numbers(patch: Patches, decisions: BranchDecisions) -> None:
    """Let Python treat symbolic sizes as the ints that they are to the model."""
    _lengths(patch)
    _extremes(patch, decisions)
    _keys(patch, decisions)
    _types(patch, decisions)
    _flags(patch)
    _floats(patch)
    _functions(patch)

    @patch(torch.SymFloat, "__round__")
    def __round__(original: Any, self: Any, digits: int | None = None) -> Any:
        """Round an unbacked number after deciding its value, as `float` does: torch has no symbol for `round`."""
        return original(self, digits) if self.node.has_hint() else round(float(self), digits)

    @patch(torch.SymInt, "__round__")
    def to_tens(original: Any, self: Any, digits: int | None = None) -> Any:
        """Decide the value for `round(size, -1)`, as `int` does: torch would return `size` itself."""
        return original(self) if (digits or 0) >= 0 else round(int(self), digits)


def _lengths(patch: Patches) -> None:
    """Return the first size for `len` of a tensor: CPython would convert it to an int, and so make it static."""
    original: Any = builtins.len

    def length(value: Any) -> Any:
        tensor = type(value) is FakeTensor and value.dim() and patch.active()
        if tensor and is_model_code(sys._getframe(1).f_code.co_filename):
            return value.shape[0]
        return original(value)

    patch.set(builtins, "len", length)


def _extremes(patch: Patches, decisions: BranchDecisions) -> None:
    """Compute `max` and `min` of sizes in the graph; with `specialize=True`, unbacked sizes are decided."""
    for name, symbolic in (("max", torch.sym_max), ("min", torch.sym_min)):

        def choose(
            original: Any, *args: Any, name: str = name, symbolic: Any = symbolic, **options: Any
        ) -> Any:
            if len(args) == 1 and type(args[0]) is types.GeneratorType:
                args = (list(args[0]),)
            values = args[0] if len(args) == 1 and type(args[0]) in (tuple, list) else args
            kinds = set(map(type, values))
            free = torch.SymInt in kinds and kinds <= {int, torch.SymInt}
            if not free or options or not is_model_code(sys._getframe(2).f_code.co_filename):
                return original(*args, **options)
            if decisions.specialised and not all(map(is_given, values)):
                return original(*args)
            return functools.reduce(symbolic, values)

        patch(builtins, name)(choose)


def _keys(patch: Patches, decisions: BranchDecisions) -> None:
    """Decide the value of a number that is the key of a dict, as `int(number)` does, or make its size static.

    At first, hashing raises an error: einops, which looks up by sizes, then continues without its cache. If the forward
    fails with this error, it runs again with known keys.
    """

    @patch(torch.SymInt, "__hash__")
    def __hash__(original: Any, self: Any) -> int:
        if not is_model_code(sys._getframe(2).f_code.co_filename):
            return int(original(self))
        if decisions.reads_dict_keys or self.node.expr.is_number:
            return hash(int(self))
        raise SizeAsKeyError("a free size is the key of a dict")


def _types(patch: Patches, decisions: BranchDecisions) -> None:
    """Make symbolic sizes ints for `isinstance` and as text; except in messages, the text requires a known value."""
    original: Any = builtins.isinstance

    def is_instance(value: Any, kinds: Any) -> bool:
        if original(value, kinds):  # first, because torch calls this millions of times
            return True
        known = (
            type(value) in PYTHON_TYPES
            and patch.active()
            and is_model_code(sys._getframe(1).f_code.co_filename)
        )
        return known and bool(original(PYTHON_TYPES[type(value)](), kinds))

    patch.set(builtins, "isinstance", is_instance)
    for cls, kind in PYTHON_TYPES.items():

        def __repr__(original: Any, self: Any, kind: Any = kind) -> str:
            frame = sys._getframe(2)
            if not is_model_code(frame.f_code.co_filename):
                return str(original(self))
            if not self.node.has_hint():
                decisions.note_text(self)
                return str(original(self))
            return str(kind(self.node.hint if is_diagnostic(frame) else self))

        patch(cls, "__repr__")(__repr__)


def _flags(patch: Patches) -> None:
    """Decide the flag in `(n > 2) == 1`, as `bool` does: sympy cannot evaluate it, or evaluates it to false."""

    @patch(torch.SymBool, "__eq__")
    def __eq__(original: Any, self: Any, other: Any) -> Any:
        return bool(self) == other if type(other) in (bool, int) else original(self, other)


def _floats(patch: Patches) -> None:
    """Hide products from sympy: it turns `(n * 0.29) * 100`, where Python rounds twice, into `n * 29.0`."""
    for owner, name in float_operations:
        original = vars(owner)[name]

        def compute(self: Any, other: Any, original: Any = original) -> Any:
            made = original(self, other)
            if made.pytype is not float or not patch.in_forward():
                return made
            left, right = _rounded(self), _rounded(other)
            pairs = (self, other), (left, other), (self, right), (left, _rounded(right))
            return next(m for one, two in pairs if _rounds_once(m := original(one, two), one, two))

        patch.set(owner, name, compute)
    for name in ("__floordiv__", "__rfloordiv__", "__mod__", "__rmod__"):

        @patch(torch.SymFloat, name)
        def divide(original: Any, self: Any, other: Any, name: str = name) -> Any:
            """Divide as Python does, which does not take the floor of the rounded quotient: 0.4 // 0.1 is 3."""
            return getattr(float(self), name)(float(other)) if patch.in_forward() else original(self, other)


def _functions(patch: Patches) -> None:
    """Patch functions that torch supports in sympy, such as `math.log(n)`; `np.log(n)` calls a method of `n`."""
    methods: dict[str, Any] = {"__divmod__": lambda self, other: (self // other, self % other)}
    for name in ("sqrt", *FLOAT_FUNCTIONS):

        @patch(math, name)
        @makes_calls  # errors of `math` are the model's
        def compute(original: Any, number: Any, *base: Any, name: str = name) -> Any:
            if base and any(isinstance(each, _SYMBOLIC) for each in (number, *base)):
                return math.log(number) / math.log(*base)
            if not isinstance(number, _SYMBOLIC):
                return original(number, *base)
            function = getattr(size_functions, f"OpaqueUnaryFn_{name}")
            return number.node.shape_env.symbolic(function(number.node.expr), float)

        methods[name] = getattr(math, name)
    for cls, name in itertools.product(_SYMBOLIC, methods):
        setattr(cls, name, methods[name])
        patch.callback(delattr, cls, name)

    @patch(math, "isqrt")
    @makes_calls
    def whole_root(original: Any, number: Any) -> Any:
        # Exact below 2**52, and no size is larger.
        return torch.sym_int(math.sqrt(number)) if isinstance(number, torch.SymInt) else original(number)

    @patch(math, "pow")
    @makes_calls
    def power(original: Any, base: Any, exponent: Any) -> Any:
        symbolic = any(isinstance(each, _SYMBOLIC) for each in (base, exponent))
        if symbolic and base > 0:  # otherwise Python's `**` differs
            return torch.sym_float(base) ** torch.sym_float(exponent)
        return original(base, exponent)


def _rounded(number: SymNode) -> SymNode:
    """Wrap a float so that sympy cannot simplify it."""
    made = copy.copy(number)
    vars(made)[SYMBOLIC] = Rounded(number.expr)
    return made


def _rounds_once(made: SymNode, one: SymNode, other: SymNode) -> bool:
    """Tell whether a float is one sum, difference or product of two others, or one of these."""
    parts = {one.expr, other.expr}
    whole = made.expr.is_number or not parts.isdisjoint({made.expr, -made.expr})
    return whole or set(made.expr.args) in (parts, {one.expr, -other.expr})
