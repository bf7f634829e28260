"""Random numbers that are not torch's, while a forward is captured: those of Python, numpy and the operating system."""

from __future__ import annotations

import contextlib
import numbers
import os
import random
import sys
from collections.abc import Callable
from typing import Any

from fxopt.capture.fakes.unusable_number import UnusableNumber
from fxopt.capture.patches.replaced import replaced
from fxopt.capture.recording.random_state import PythonRandomState, generators, reason, restore, state_of

_NO_DRAWS = {"seed", "getstate", "setstate", "get_state", "set_state"}


def patch_random_numbers(
    stack: contextlib.ExitStack, draws: PythonRandomState, active: Any, refuse: Callable[[str], None]
) -> None:
    """Refuse what nobody can know, but for numbers that nothing uses, and let seeds make the rest known."""
    _seeds(stack, draws, active)
    _states(stack, draws, active, refuse)
    _draws(stack, draws, active, refuse)
    _entropy(stack, active, refuse)


def _seeds(stack: contextlib.ExitStack, draws: PythonRandomState, active: Any) -> None:
    """Take note of seeds: numbers that Python and numpy draw after one are the same each time."""
    for name in {"random", "numpy.random"} & sys.modules.keys():
        original: Any = sys.modules[name].__dict__["seed"]

        def seed(*args: Any, original: Any = original, name: str = name, **kwargs: Any) -> None:
            if active() and (args or kwargs):
                draws.seed(name)
            original(*args, **kwargs)

        stack.enter_context(replaced(sys.modules[name], "seed", seed))


def _states(
    stack: contextlib.ExitStack, draws: PythonRandomState, active: Any, refuse: Callable[[str], None]
) -> None:
    """Look for draws out of sight before a state is restored, which hides them."""
    for name, function in (("random", "setstate"), ("numpy.random", "set_state")):
        if name not in generators():
            continue
        original: Any = sys.modules[name].__dict__[function]

        def restored(*args: Any, original: Any = original, name: str = name, **kwargs: Any) -> None:
            if active() and name in draws.drawn_from():
                refuse(reason(name))
            original(*args, **kwargs)
            if active():
                draws.restored(name)

        stack.enter_context(replaced(sys.modules[name], function, restored))


def _draws(
    stack: contextlib.ExitStack, draws: PythonRandomState, active: Any, refuse: Callable[[str], None]
) -> None:
    """A number that a forward draws and does not use is harmless, as one that drops layers in training alone."""
    for name, generator in generators().items():
        for function, original in list(vars(sys.modules[name]).items()):
            if getattr(original, "__self__", None) is not generator or function in _NO_DRAWS:
                continue

            def draw(*args: Any, original: Any = original, name: str = name, **kwargs: Any) -> Any:
                if not active() or draws.is_seeded(name):
                    return original(*args, **kwargs)
                before = state_of(name)
                drawn = original(*args, **kwargs)
                if not isinstance(drawn, numbers.Number):
                    return drawn
                restore(name, before)
                return UnusableNumber(lambda: refuse(reason(name)))

            stack.enter_context(replaced(sys.modules[name], function, draw))


def _entropy(stack: contextlib.ExitStack, active: Any, refuse: Callable[[str], None]) -> None:
    """Refuse numbers that the operating system draws, for `secrets`, `uuid4`, and generators without a seed."""

    def refuse_entropy() -> None:
        if active():
            refuse(
                "the forward draws random numbers from the operating system, as generators without a seed do, and a graph "
                "would hold those that it drew. Use torch's, or make the module that draws them a leaf (leaf_modules=...)"
            )

    for module, name in ((os, "urandom"), (random, "_urandom")):
        original: Any = module.__dict__[name]

        def urandom(size: int, original: Any = original) -> bytes:
            refuse_entropy()
            return bytes(original(size))

        stack.enter_context(replaced(module, name, urandom))
    prepare: Any = random.Random.__init__

    def __init__(self: Any, *seed: Any, **named: Any) -> None:
        if seed in ((), (None,)) and not named:
            refuse_entropy()
        prepare(self, *seed, **named)

    stack.enter_context(replaced(random.Random, "__init__", __init__))
