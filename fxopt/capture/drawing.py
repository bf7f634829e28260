"""Random numbers that are not torch's, while a forward is captured: those of Python, numpy and the operating system."""

from __future__ import annotations

import contextlib
import os
import random
import sys
from typing import Any

from fxopt.capture.recorder import Recorder
from fxopt.capture.replaced import replaced


def watch_random_numbers(stack: contextlib.ExitStack, recorder: Recorder, active: Any) -> None:
    """Refuse what nobody can know, and let seeds make the rest known."""
    _seeds(stack, recorder, active)
    _entropy(stack, recorder, active)


def _seeds(stack: contextlib.ExitStack, recorder: Recorder, active: Any) -> None:
    """What Python and numpy draw after a seed is the same each time, and no random number."""
    for name in {"random", "numpy.random"} & sys.modules.keys():
        original: Any = sys.modules[name].__dict__["seed"]

        def seed(*args: Any, original: Any = original, name: str = name, **kwargs: Any) -> None:
            if active() and (args or kwargs):
                recorder.draws.seed(name)
            original(*args, **kwargs)

        stack.enter_context(replaced(sys.modules[name], "seed", seed))


def _entropy(stack: contextlib.ExitStack, recorder: Recorder, active: Any) -> None:
    """What the operating system draws, for `secrets`, `uuid4`, and generators without a seed."""

    def refuse() -> None:
        if active():
            recorder.fail(
                "the forward draws random numbers from the operating system, as generators without a seed do, and a graph "
                "would hold those that it drew. Use torch's, or make the module that draws them a leaf (leaf_modules=...)"
            )

    for module, name in ((os, "urandom"), (random, "_urandom")):
        original: Any = module.__dict__[name]

        def urandom(size: int, original: Any = original) -> bytes:
            refuse()
            return bytes(original(size))

        stack.enter_context(replaced(module, name, urandom))
    prepare: Any = random.Random.__init__

    def __init__(self: Any, *seed: Any, **named: Any) -> None:
        if seed in ((), (None,)) and not named:
            refuse()
        prepare(self, *seed, **named)

    stack.enter_context(replaced(random.Random, "__init__", __init__))
