"""How far a run of pytest is: one line every 30 seconds, which tells a slow run from one that hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

import pytest

SECONDS = 30.0


class Progress:
    """A plugin that writes how many tests are done, and about how long the others take; for runs in several processes.

    `weight` is the expected seconds of a test, in any unit; without it, all tests count the same.
    """

    def __init__(self, weight: Callable[[str], float] = lambda nodeid: 1.0, every: float = SECONDS) -> None:
        self._weight, self._every = weight, every
        self._left: dict[str, float] = {}
        self._done, self._weight_done = 0, 0.0
        self._begun, self._ended = time.monotonic(), threading.Event()

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        threading.Thread(target=self._write, args=(session.config,), daemon=True).start()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._plan(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Each worker collects all tests."""
        self._plan(ids)

    def _plan(self, nodeids: Iterable[str]) -> None:
        if not self._left and not self._done:
            self._left = {nodeid: self._weight(nodeid) for nodeid in nodeids}
            self._begun = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._weight_done += self._left.pop(nodeid, 0.0)
        self._done += 1

    def pytest_sessionfinish(self) -> None:
        self._ended.set()

    def line(self) -> str:
        """What is done, how long that took, and how long the rest will take."""
        seconds = time.monotonic() - self._begun
        if not self._left and not self._done:
            return f"collecting for {seconds:.0f} s"
        text = f"{self._done:,} of {self._done + len(self._left):,} in {seconds:.0f} s"
        if self._weight_done:
            left = seconds * sum([*self._left.values()]) / self._weight_done
            text += f", about {left:.0f} s left"
        return text

    def _write(self, config: pytest.Config) -> None:
        writer = config.get_terminal_writer()
        while not self._ended.wait(self._every):
            if writer.width_of_current_line:
                writer.line()
            writer.line(self.line())
            writer.flush()
