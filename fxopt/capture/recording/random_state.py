"""The random numbers of Python and numpy: a graph cannot draw them, and a capture leaves their states as they were."""

from __future__ import annotations

import random
import sys
from typing import Any


class PythonRandomState:
    """Detects whether code draws such numbers, except those that follow a seed and are reproducible."""

    def __init__(self) -> None:
        self._before = _states()
        self._seeded: set[str] = set()

    def drawn_from(self) -> list[str]:
        """The modules (`random`, `numpy.random`) from which unpredictable numbers were drawn."""
        now = _states()
        return [
            name
            for name, (_, before) in self._before.items()
            if now[name][1] != before and name not in self._seeded
        ]

    def seed(self, name: str) -> None:
        """Record that one of these modules is about to be seeded."""
        if name not in self.drawn_from():
            self._seeded.add(name)

    def restored(self, name: str) -> None:
        """Record that a module's state was set: numbers that follow the initial state are unknown."""
        if _states()[name][1] == self._before[name][1]:
            self._seeded.discard(name)

    def is_seeded(self, name: str) -> bool:
        """Tell whether the numbers of this module follow a seed."""
        return name in self._seeded

    def take_back(self) -> None:
        """Restore the initial states."""
        for name, (state, _) in self._before.items():
            restore(name, state)


def generators() -> dict[str, Any]:
    """The generator from which each module draws; numpy is included only if it is imported."""
    numpy: Any = sys.modules.get("numpy.random")
    return {"random": random._inst} | ({"numpy.random": numpy.mtrand._rand} if numpy else {})


def state_of(name: str) -> Any:
    """The state of the generator of a module."""
    return random.getstate() if name == "random" else sys.modules[name].get_state()


def restore(name: str, state: Any) -> None:
    """Restore an earlier state of the generator of a module."""
    generator = generators()[name]
    generator.setstate(state) if name == "random" else generator.set_state(state)


def reason(name: str) -> str:
    """The reason for refusing a number that a forward draws from one of these modules."""
    return (
        f"the forward draws random numbers from Python's {name!r}, and a graph would hold those that it drew. Use "
        "torch's, or make the module that draws them a leaf (leaf_modules=...)"
    )


def _states() -> dict[str, tuple[Any, Any]]:
    """The state of each module, in the form for restoring it and in a comparable form."""
    states = {name: (state, state) for name in generators() for state in (state_of(name),)}
    if "numpy.random" in states:
        state, _ = states["numpy.random"]
        states["numpy.random"] = state, (state[1].tobytes(), *state[2:])
    return states
