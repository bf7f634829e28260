"""A pool of processes that run cases: a hanging process is ended, a dead one becomes a record, and the others continue."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import re
import resource
import signal
import tempfile
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ..records import UNTRIED, Case, Outcome, Record

Run = Callable[[Case], Record]
Make = Callable[[Callable[[Case, str], None]], Run]
"""Makes the function that runs cases in a worker, from a callback for each stage that a case enters."""

PRELOADED = ["torch._dynamo", "torch.export", "transformers", f"{__package__}.run"]
"""Modules imported once, in the process from which all workers are forked, so that workers start fast."""

MOST_DEATHS = 2
"""A model that has hung or died this often is not tried in its other cases."""

START, LAST_WORDS = 300.0, 5.0
"""The seconds that a worker may take to start, and to write its stack before it is killed."""


class PoolError(RuntimeError):
    """No worker can start; the message has the worker's output."""


class Pool:
    """Runs cases in separate processes; the cases of one model run in the same process while there are any.

    `make`, which is pickled, makes the function that runs the cases, each for at most `limit` seconds. All workers import
    the modules in `preload`.
    """

    def __init__(
        self, make: Make, limit: Callable[[Case], float], preload: Collection[str] = PRELOADED
    ) -> None:
        self._make, self._limit = make, limit
        self._context: Any = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))
        self._deaths = defaultdict[Group, list[str]](list)

    def run(
        self, cases: Iterable[Case], workers: int, begun: Callable[[Case], None] = lambda case: None
    ) -> Iterator[Record]:
        """Yield the record of each case as it arrives, from `workers` processes, which end with this generator.

        `begun` is called with each case that starts. Raises `PoolError` if a worker does not start.
        """
        waiting = grouped(cases)
        pool: list[_Worker] = []
        try:
            while waiting or any(worker.case for worker in pool):
                for worker in [worker for worker in pool if worker.ready and not worker.case]:
                    taken = {other.group for other in pool if other is not worker}
                    while case := _next(waiting, worker.group, taken):
                        begun(case)
                        dead = self._deaths[_group(case)]
                        if len(dead) < MOST_DEATHS:
                            worker.begin(case, self._limit(case))
                            break
                        yield Record(case, Outcome.SKIP, "", f"{UNTRIED} {', '.join(dead)}")
                    else:
                        worker.end()
                        pool.remove(worker)
                busy = sum(worker.case is not None for worker in pool)
                while len(pool) < min(workers, busy + sum(map(len, waiting.values()))):
                    pool.append(_Worker(self._context, self._make))
                for worker in _woken(pool):
                    if record := worker.hear():
                        yield record
                    if worker.dead:
                        pool.remove(worker)
                        if record := worker.obituary():
                            self._deaths[_group(record.case)].append(record.case.id)
                            yield record
        finally:
            for worker in pool:
                worker.end()


Group = tuple[str, str]
"""A model and a device, whose objects a worker keeps."""


def _group(case: Case) -> Group:
    return case.model, case.device


def grouped(cases: Iterable[Case]) -> dict[Group, deque[Case]]:
    """Group the cases that one worker should run in a row; the largest groups come first."""
    groups: dict[Group, deque[Case]] = {}
    for case in cases:
        groups.setdefault(_group(case), deque()).append(case)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


def _next(
    waiting: dict[Group, deque[Case]], own: Group | None, taken: Collection[Group | None]
) -> Case | None:
    """Take the next case: of the worker's own group, otherwise of the first group without a worker, otherwise of the first."""
    free = (group for group in waiting if group not in taken)
    group = own if own in waiting else next(free, next(iter(waiting), None))
    if group is None:
        return None
    case = waiting[group].popleft()
    if not waiting[group]:
        del waiting[group]
    return case


class _Worker:
    """A process, and its state as known from outside."""

    def __init__(self, context: Any, make: Make) -> None:
        self.connection, theirs = context.Pipe()
        descriptor, name = tempfile.mkstemp(prefix="fxopt-validation-", suffix=".log")
        os.close(descriptor)
        self._log = Path(name)
        # A daemon: if this process ends for any reason, it does not wait for a hanging case.
        self._process = context.Process(target=_work, args=(theirs, make, name), daemon=True)
        self._process.start()
        theirs.close()
        self.ready = self.dead = False
        self.case: Case | None = None
        self.group: Group | None = None
        self._stage, self._started, self._limit, self._late = "", time.monotonic(), START, False
        self.deadline = self._started + START

    def begin(self, case: Case, limit: float) -> None:
        self.case, self.group, self._stage = case, _group(case), ""
        self._started, self._limit, self._late = time.monotonic(), limit, False
        self.deadline = self._started + limit
        with contextlib.suppress(OSError):  # the process died meanwhile, which `hear` detects
            self.connection.send(case)

    def hear(self) -> Record | None:
        """Return the record that has arrived, if any; note other messages, and end the process after its deadline."""
        try:
            while self.connection.poll():
                said = self.connection.recv()
                if isinstance(said, Record):
                    self.case, self.deadline = None, float("inf")
                    return said
                if isinstance(said, Exception):
                    raise PoolError(str(said))
                self._stage = said or ""
                if said is None:
                    self.ready, self.deadline = True, float("inf")
        except (EOFError, OSError):
            self.dead = True
            return None
        if time.monotonic() >= self.deadline:
            # faulthandler writes the stack, even in compiled code, where Python's signal handlers do not run.
            os.kill(self._process.pid, signal.SIGABRT)
            self._process.join(LAST_WORDS)
            self._process.kill()
            self._late = self.dead = True
        return None

    def obituary(self) -> Record | None:
        """The record of the case during which the process ended; None if no case was running."""
        self._process.join(LAST_WORDS)
        log, code = self._log.read_text(encoding="utf-8", errors="replace")[-100_000:], self._process.exitcode
        self.end()
        if not self.ready:
            raise PoolError(f"a worker process ended at its start ({_how(code)}): {log.strip()[-2000:]}")
        if self.case is None:
            return None
        if self._late:
            outcome, reason = Outcome.TIMEOUT, f"took more than {self._limit:g} s, so its process was ended"
        elif code == -signal.SIGKILL:
            outcome, reason = (
                Outcome.MEMORY,
                f"the process {_how(code)}, as the kernel does when memory runs out",
            )
        else:
            outcome, reason = Outcome.CRASH, f"the process {_how(code)}"
        seconds = time.monotonic() - self._started
        return Record(self.case, outcome, self._stage, f"{reason}{_place(log)}", seconds)

    def end(self) -> None:
        """End the process, which is no longer needed."""
        self.connection.close()
        if self.case is not None or not self.ready:
            self._process.kill()
        self._process.join(LAST_WORDS)
        self._process.kill()
        self._log.unlink(missing_ok=True)


def _woken(pool: list[_Worker]) -> list[_Worker]:
    """The workers that have sent something, or whose time is up."""
    soonest = min((worker.deadline for worker in pool), default=0.0) - time.monotonic()
    said = wait(
        [worker.connection for worker in pool], None if soonest == float("inf") else max(0.0, soonest)
    )
    return [worker for worker in pool if worker.connection in said or worker.deadline <= time.monotonic()]


def _how(code: int | None) -> str:
    if code is None or code >= 0:
        return f"ended itself with status {code}"
    return f"was ended by {signal.Signals(-code).name}"


def _place(log: str) -> str:
    """The place in the stack that the process wrote, where the thread of the cases is marked; otherwise its last error."""
    thread = log[max(log.rfind("Current thread"), log.rfind("Fatal Python error")) :]
    if frame := re.search(r'File "(.*)", line (\d+) in (.*)', thread):
        return f", in {frame[3]} ({Path(frame[1]).name}:{frame[2]})"
    return "".join(f": {error}" for error in re.findall(r"^[\w.]+Error: .*", log, re.M)[-1:])


def _work(connection: Connection, make: Make, log: str) -> None:
    """Work in a process of the pool: receive cases, send stages and records."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that the user started
    threading.Thread(target=_end_with_parent, daemon=True).start()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a dying model leaves no core file
    with contextlib.suppress(OSError):  # only on Linux: when memory runs out, this process is killed first
        Path("/proc/self/oom_score_adj").write_text("1000")
    with open(log, "w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
        faulthandler.enable(file)
        try:
            run = make(lambda case, stage: connection.send(stage))
        except Exception:  # the process boundary: the parent must learn of any error
            connection.send(PoolError(f"a worker process cannot start: {traceback.format_exc()}"))
            return
        connection.send(None)
        with contextlib.suppress(EOFError):
            while True:
                connection.send(run(connection.recv()))


def _end_with_parent() -> None:
    """End this process when its parent ends: if the parent is killed, no other process ends a hanging case."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
