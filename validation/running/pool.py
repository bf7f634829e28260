"""A pool of processes that run cases: what hangs is ended, what dies is a row, and the others go on."""

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
"""Makes what runs cases, in a worker: it is given what to tell each stage that a case enters."""

PRELOADED = ["torch._dynamo", "torch.export", "transformers", f"{__package__}.run"]
"""Imported once, in the process that all workers are forked from: a new worker is there in a moment."""

MOST_DEATHS = 2
"""A model that has hung or died this often is not tried for its other cases."""

START, LAST_WORDS = 300.0, 5.0
"""Seconds that a worker may take to start, and to write its stack when it is ended."""


class PoolError(RuntimeError):
    """No worker can start: the message has what it said."""


class Pool:
    """Runs cases in processes of their own, those of one model in the same one while there are any.

    What `make`, which is pickled, makes runs the cases, each for at most `limit` seconds. All workers import the modules
    in `preload`.
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
        """The record of each case as it arrives, from `workers` processes, which end with it.

        `begun` is told each case that starts. Raises `PoolError` when a worker does not start.
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
"""A model and a device: a worker keeps what it has made for them."""


def _group(case: Case) -> Group:
    return case.model, case.device


def grouped(cases: Iterable[Case]) -> dict[Group, deque[Case]]:
    """The cases that a worker should have in a row, the most cases first."""
    groups: dict[Group, deque[Case]] = {}
    for case in cases:
        groups.setdefault(_group(case), deque()).append(case)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


def _next(
    waiting: dict[Group, deque[Case]], own: Group | None, taken: Collection[Group | None]
) -> Case | None:
    """The next case of a worker's own group; else of the first that no other worker has; else of the first."""
    free = (group for group in waiting if group not in taken)
    group = own if own in waiting else next(free, next(iter(waiting), None))
    if group is None:
        return None
    case = waiting[group].popleft()
    if not waiting[group]:
        del waiting[group]
    return case


class _Worker:
    """A process, and what is known of it from outside."""

    def __init__(self, context: Any, make: Make) -> None:
        self.connection, theirs = context.Pipe()
        descriptor, name = tempfile.mkstemp(prefix="fxopt-validation-", suffix=".log")
        os.close(descriptor)
        self._log = Path(name)
        # A daemon: whatever stops this process between two lines, it does not wait at its end for a case that hangs.
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
        with contextlib.suppress(OSError):  # it died meanwhile, which `hear` finds out
            self.connection.send(case)

    def hear(self) -> Record | None:
        """The record that has arrived, if one has; what else the worker has said, or that it must end, is noted."""
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
            # It writes its stack, even from compiled code, where no signal handler of Python runs.
            os.kill(self._process.pid, signal.SIGABRT)
            self._process.join(LAST_WORDS)
            self._process.kill()
            self._late = self.dead = True
        return None

    def obituary(self) -> Record | None:
        """The record of the case during which the process ended."""
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
        """End the process: it has nothing to say any more."""
        self.connection.close()
        if self.case is not None or not self.ready:
            self._process.kill()
        self._process.join(LAST_WORDS)
        self._process.kill()
        self._log.unlink(missing_ok=True)


def _woken(pool: list[_Worker]) -> list[_Worker]:
    """The workers that have something to say, or whose time is up."""
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
    """Where the process was, from the stack that it left, whose thread of the cases is marked; else the error that ended it."""
    thread = log[max(log.rfind("Current thread"), log.rfind("Fatal Python error")) :]
    if frame := re.search(r'File "(.*)", line (\d+) in (.*)', thread):
        return f", in {frame[3]} ({Path(frame[1]).name}:{frame[2]})"
    return "".join(f": {error}" for error in re.findall(r"^[\w.]+Error: .*", log, re.M)[-1:])


def _work(connection: Connection, make: Make, log: str) -> None:
    """Work in a process of the pool: cases come in, stages and records go out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that the user started
    threading.Thread(target=_end_with_parent, daemon=True).start()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a model that dies is a row, and no file of its size
    with contextlib.suppress(OSError):  # Linux alone: when memory runs out, this process goes
        Path("/proc/self/oom_score_adj").write_text("1000")
    with open(log, "w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
        faulthandler.enable(file)
        try:
            run = make(lambda case, stage: connection.send(stage))
        except Exception:  # the boundary of a process: whatever it is, the other one must know
            connection.send(PoolError(f"a worker process cannot start: {traceback.format_exc()}"))
            return
        connection.send(None)
        with contextlib.suppress(EOFError):
            while True:
                connection.send(run(connection.recv()))


def _end_with_parent() -> None:
    """End this process with the one that it works for: if that is killed, nobody else ends a case that hangs."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
