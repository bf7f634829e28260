"""Random numbers from outside torch during a capture: those of Python, numpy and the operating system; clocks."""

from __future__ import annotations

import numbers
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

from fxopt.capture.data_dependence.source_statements import is_diagnostic
from fxopt.capture.fakes.unusable_number import CountedNumber, UnusableNumber
from fxopt.capture.nodes.source_location import is_model_package, model_frame
from fxopt.capture.patches.replaced import Patches
from fxopt.capture.recording.random_state import PythonRandomState, generators, reason, restore, state_of
from fxopt.errors import FIRST_CALL

_NO_DRAWS = {"seed", "getstate", "setstate", "get_state", "set_state"}


def patch_random_numbers(patch: Patches, draws: PythonRandomState, refuse: Callable[[str], None]) -> None:
    """Refuse unknown numbers if something uses them; numbers that follow a seed are known."""
    for name, generator in generators().items():
        _states(patch, draws, name, refuse)
        _draws(patch, draws, name, generator, refuse)
    _entropy(patch, refuse)
    _clocks(patch, refuse)


def _states(patch: Patches, draws: PythonRandomState, name: str, refuse: Callable[[str], None]) -> None:
    """Record seeds, after which numbers are reproducible; check for draws before a restored state hides them."""

    @patch(sys.modules[name], "seed")
    def seed(original: Any, *args: Any, **kwargs: Any) -> None:
        if args or kwargs:
            draws.seed(name)
        original(*args, **kwargs)

    @patch(sys.modules[name], "setstate" if name == "random" else "set_state")
    def restored(original: Any, *args: Any, **kwargs: Any) -> None:
        if name in draws.drawn_from():
            refuse(reason(name))
        original(*args, **kwargs)
        draws.restored(name)


def _draws(
    patch: Patches, draws: PythonRandomState, name: str, generator: Any, refuse: Callable[[str], None]
) -> None:
    """Allow a forward to draw a number that it does not use, as one that drops layers only in training."""

    def draw(original: Any, *args: Any, **kwargs: Any) -> Any:
        if draws.is_seeded(name):
            return original(*args, **kwargs)
        before = state_of(name)
        drawn = original(*args, **kwargs)
        if not isinstance(drawn, numbers.Number):
            return drawn
        restore(name, before)
        return UnusableNumber(lambda: refuse(reason(name)))

    for function, original in list(vars(sys.modules[name]).items()):
        if getattr(original, "__self__", None) is generator and function not in _NO_DRAWS:
            patch(sys.modules[name], function)(draw)


def _entropy(patch: Patches, refuse: Callable[[str], None]) -> None:
    """Refuse numbers that the operating system draws, for `secrets`, `uuid4`, and generators without a seed."""

    def refused(original: Any, *args: Any) -> Any:
        refuse(
            "the forward draws random numbers from the operating system, as generators without a seed do, and a graph "
            "would hold those that it drew. Use torch's, or make the module that draws them a leaf (leaf_modules=...)"
            f"{FIRST_CALL}"
        )

    patch(os, "urandom")(refused)
    patch(random, "_urandom")(refused)

    @patch(random.Random, "__init__")
    def prepare(original: Any, self: Any, *seed: Any, **named: Any) -> None:
        if seed in ((), (None,)) and not named:
            refused(original)
        original(self, *seed, **named)


def _clocks(patch: Patches, refuse: Callable[[str], None]) -> None:
    """Let a forward report how long it takes, but use the time for nothing else."""

    def refused() -> None:
        if not is_diagnostic(model_frame(sys._getframe(1))):
            refuse(
                "the forward reads a clock, and a graph would hold the time of its capture. Give it as an input, or make the "
                "module that reads it a leaf (leaf_modules=...)"
            )

    for name in ("time", "perf_counter", "monotonic", "process_time"):
        for clock, kind in ((name, float), (f"{name}_ns", int)):

            @patch(time, clock)
            def read(original: Any, kind: type = kind) -> Any:
                of_model = is_model_package(sys._getframe(2).f_globals.get("__name__"))
                return CountedNumber(refused, kind) if of_model else original()
