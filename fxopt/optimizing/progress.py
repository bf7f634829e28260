"""A line on the terminal that says what `optimize` does, for what takes longer than two seconds."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

_AFTER = 2.0  # seconds
_CLEAR = "\r\x1b[2K"


@contextlib.contextmanager
def progress(title: str, shown: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that takes the name of each stage; nothing is shown where stderr is not a terminal."""
    start, stage, done = time.perf_counter(), [""], threading.Event()

    def draw() -> None:
        wait = _AFTER
        while not done.wait(wait):
            wait = 0.5
            sys.stderr.write(f"{_CLEAR}{title}: {stage[0]}, {time.perf_counter() - start:.0f} s")
            sys.stderr.flush()

    def enter(name: str) -> None:
        stage[0] = name

    if not (shown and sys.stderr is not None and sys.stderr.isatty()):
        yield enter
        return
    drawing = threading.Thread(target=draw, daemon=True)
    drawing.start()
    try:
        yield enter
    finally:
        done.set()
        drawing.join()
        if time.perf_counter() - start >= _AFTER:
            sys.stderr.write(_CLEAR)
            sys.stderr.flush()
