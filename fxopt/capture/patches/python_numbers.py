"""Python's functions of numbers (`len`, `max`, `round`, `hash`), for sizes that are free or unbacked."""

from __future__ import annotations

import builtins
import contextlib
import functools
import sys
import types
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from fxopt.capture.data_dependence.branch_decisions import BranchDecisions
from fxopt.capture.data_dependence.branches import SizeAsKeyError
from fxopt.capture.data_dependence.diagnostic_text import is_diagnostic
from fxopt.capture.fakes.dynamic_shapes import is_backed
from fxopt.capture.nodes.source_location import is_model_code
from fxopt.capture.patches.replaced import replaced


def patch_numbers(stack: contextlib.ExitStack, decisions: BranchDecisions, active: Any) -> None:
    """Let Python take such sizes for the ints that they are to the model."""
    _lengths(stack, active)
    _extremes(stack, decisions, active)
    _rounding(stack, active)
    _keys(stack, decisions, active)
    _types(stack, decisions, active)


def _lengths(stack: contextlib.ExitStack, active: Any) -> None:
    """`len` of a tensor is its first size; CPython would have it as an int, and so fix it or ask for it."""
    original: Any = builtins.len

    def length(value: Any) -> Any:
        tensor = type(value) is FakeTensor and value.dim() and active()
        if tensor and is_model_code(sys._getframe(1).f_code.co_filename):
            return value.shape[0]
        return original(value)

    stack.enter_context(replaced(builtins, "len", length))


def _extremes(stack: contextlib.ExitStack, decisions: BranchDecisions, active: Any) -> None:
    """`max` and `min` of sizes: which one it is becomes a guard that holds where the two are equal, too.

    Of unbacked sizes, the graph computes them; if it is specialised, they are decided.
    """
    for name, symbolic in (("max", torch.sym_max), ("min", torch.sym_min)):
        original: Any = getattr(builtins, name)

        def choose(
            *args: Any, original: Any = original, name: str = name, symbolic: Any = symbolic, **options: Any
        ) -> Any:
            if len(args) == 1 and type(args[0]) is types.GeneratorType and active():
                args = (list(args[0]),)
            values = args[0] if len(args) == 1 and type(args[0]) in (tuple, list) else args
            if not any(type(value) is torch.SymInt for value in values) or options or not active():
                return original(*args, **options)
            sizes = all(type(value) in (int, torch.SymInt) for value in values)
            if not sizes or not is_model_code(sys._getframe(1).f_code.co_filename):
                return original(*args)
            if not all(type(value) is int or is_backed(value) for value in values):
                decided = decisions.specialised
                return original(*args) if decided else functools.reduce(symbolic, values)
            best = original(values, key=_hint)
            for value in values:
                bool(best >= value if name == "max" else best <= value)  # puts the guard
            return best

        stack.enter_context(replaced(builtins, name, choose))


def _rounding(stack: contextlib.ExitStack, active: Any) -> None:
    """`round` of an unbacked number: torch has no symbol for it, so the number is decided, as by `float`."""
    original: Any = torch.SymFloat.__dict__["__round__"]

    def __round__(self: Any, digits: int | None = None) -> Any:
        if active() and not self.node.has_hint():
            return round(float(self), digits)
        return original(self, digits)

    stack.enter_context(replaced(torch.SymFloat, "__round__", __round__))


def _keys(stack: contextlib.ExitStack, decisions: BranchDecisions, active: Any) -> None:
    """A number that is the key of a dict must be known: it is fixed, or decided, as by `int(number)`.

    At first it cannot be hashed: einops, which looks up by sizes, then goes on without. Only where the forward fails
    so, it is run anew.
    """
    original: Any = torch.SymInt.__hash__

    def __hash__(self: Any) -> int:
        if active() and is_model_code(sys._getframe(1).f_code.co_filename):
            if decisions.knows_keys or self.node.expr.is_number:
                return hash(int(self))
            raise SizeAsKeyError("a free size is the key of a dict")
        return int(original(self))

    stack.enter_context(replaced(torch.SymInt, "__hash__", __hash__))


def _types(stack: contextlib.ExitStack, decisions: BranchDecisions, active: Any) -> None:
    """A free size is an int to the model: to `isinstance`, and as text, for which it must be known but in messages."""
    original: Any = builtins.isinstance
    sym_int = torch.SymInt

    def is_instance(value: Any, kinds: Any) -> bool:
        if original(value, kinds):  # first, as all of torch asks millions of times
            return True
        of_model = type(value) is sym_int and active() and is_model_code(sys._getframe(1).f_code.co_filename)
        return of_model and bool(original(0, kinds))

    stack.enter_context(replaced(builtins, "isinstance", is_instance))
    for cls, kind in ((torch.SymInt, int), (torch.SymFloat, float), (torch.SymBool, bool)):
        text: Any = cls.__dict__["__repr__"]

        def __repr__(self: Any, text: Any = text, kind: Any = kind) -> str:
            frame = sys._getframe(1)
            if not active() or not is_model_code(frame.f_code.co_filename):
                return str(text(self))
            if not self.node.has_hint():
                decisions.note_text(self)
                return str(text(self))
            return str(kind(self.node.hint if is_diagnostic(frame) else self))

        stack.enter_context(replaced(cls, "__repr__", __repr__))


def _hint(value: Any) -> int:
    return int(value.node.hint if isinstance(value, torch.SymInt) else value)
