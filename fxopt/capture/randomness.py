"""The random numbers of Python and numpy: a graph cannot draw them, and a capture leaves their states as they were."""

from __future__ import annotations

import pickle
import random
import sys
from typing import Any


class Draws:
    """Notices whether code draws such numbers, but for those that follow a seed and are the same each time."""

    def __init__(self) -> None:
        self._before = _states()
        self._seeded: set[str] = set()

    def drawn_from(self) -> list[str]:
        """The modules (`random`, `numpy.random`) from which numbers have been drawn that nobody can know."""
        now = _states()
        return [
            name
            for name, (_, before) in self._before.items()
            if now[name][1] != before and name not in self._seeded
        ]

    def seed(self, name: str) -> None:
        """Take note that one of these modules is about to be seeded."""
        if name not in self.drawn_from():
            self._seeded.add(name)

    def take_back(self) -> None:
        """Restore the states that were found."""
        random.setstate(self._before["random"][0])
        if "numpy.random" in self._before:
            sys.modules["numpy.random"].set_state(self._before["numpy.random"][0])


def generator_state(value: Any) -> Any:
    """The state of a generator of Python or numpy, in a form that can be compared; None for what is none."""
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate()
    return pickle.dumps(value) if type(value).__module__.startswith("numpy.random") else None


def _states() -> dict[str, tuple[Any, Any]]:
    """The state of each module, as it takes it back, and in a form that can be compared."""
    state = random.getstate()
    states: dict[str, tuple[Any, Any]] = {"random": (state, state)}
    if "numpy.random" in sys.modules:  # the library does not need it, a model may
        state = sys.modules["numpy.random"].get_state()
        states["numpy.random"] = state, (state[1].tobytes(), *state[2:])
    return states
