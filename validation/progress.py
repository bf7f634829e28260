"""How far a run of pytest is: one line every 30 seconds, which tells a slow run from one that hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

import pytest


class Progress:
    """A plugin that writes how many tests are done, and about how long the others take; for runs in several processes.

    `weight` is the expected seconds of a test, in any unit; without it, all tests count the same.
    """

    def __init__(self, weight: Callable[[str], float] = lambda nodeid: 1.0, every: float = 30.0) -> None:
        self._weight, self._every = weight, every
        self._left: dict[str, float] = {}
        self._done: list[float] = []
        self._begun, self._ended = time.monotonic(), threading.Event()

    @pytest.hookimpl(trylast=True)  # where others end the run, no thread begins
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
        self._done.append(self._left.pop(nodeid, 0.0))

    def pytest_sessionfinish(self) -> None:
        self._ended.set()

    def line(self) -> str:
        """What is done, how long that took, and how long the rest will take."""
        seconds, done, left = time.monotonic() - self._begun, sum(self._done), sum([*self._left.values()])
        if not done + left:
            return f"collecting for {seconds:.0f} s"
        rest = f", about {seconds * left / done:.0f} s left" if done else ""
        return f"{len(self._done):,} of {len(self._done) + len(self._left):,} in {seconds:.0f} s{rest}"

    def _write(self, config: pytest.Config) -> None:
        writer = config.get_terminal_writer()
        while not self._ended.wait(self._every):
            if writer.width_of_current_line:
                writer.line()
            writer.line(self.line(), flush=True)
