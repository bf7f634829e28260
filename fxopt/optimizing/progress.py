"""A line on the terminal that shows the stage of `optimize`, if making a graph takes longer than two seconds."""

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
    start, stages, done = time.perf_counter(), [""], threading.Event()

    def draw() -> None:
        wait = _AFTER
        while not done.wait(wait):
            wait = 0.5
            _show(f"{_CLEAR}{title}: {stages[-1]}, {time.perf_counter() - start:.0f} s")
        if wait != _AFTER:
            _show(_CLEAR)

    drawing = threading.Thread(target=draw, daemon=True)
    if shown and sys.stderr is not None and sys.stderr.isatty():
        drawing.start()
    try:
        yield stages.append
    finally:
        done.set()
        if drawing.ident:  # it was started
            drawing.join()


def _show(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)
