"""A fleet of machines that run cases, on Ray: a task has the cases of one model, in a pool of its own on its node."""

from __future__ import annotations

import dataclasses
import functools
import platform
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from ..records import Case, Outcome, Record
from ..store import version
from .pool import PRELOADED, Make, Pool, deaths

HELD_BACK = 0.05
"""Seconds for which records wait for others, so that cases of a millisecond do not cost a message each."""

ATTEMPTS = 3
"""A case during which its node was lost this often is given up: it may be what ends the nodes."""

COMPARED = ("torch", "transformers", "fxopt")
"""The distributions that all nodes must have in the version of the driver, or the rows are of different things."""

PRELOADED_THERE = [*PRELOADED, f"{__package__}.run", "ray._private.workers.default_worker"]
"""Imported once in each process of Ray: the last is its main module, which each process forked from it imports."""

ANSWER = 5.0
"""Seconds in which the head of a cluster has to accept a connection."""


class FleetError(RuntimeError):
    """The cluster cannot be used: the message says why, before any case has run."""


@dataclasses.dataclass
class _Chunk:
    """Cases of one model on one device, all or none of them timed, that one task runs, how often it was lost, and the bytes set aside for it."""

    cases: deque[Case]
    timed: bool
    lost: int = 0
    memory: int = 0


class Fleet:
    """Runs cases on the nodes of a Ray cluster; it stands in the place of `Pool`, whose arguments it takes.

    Ray places the tasks and finds out that nodes are gone; what happens to a case on its node, `Pool` decides. Cases
    that a lost node had begun or not begun run on another one; those whose record has arrived do not run again. A
    timed case has its node to itself. The cluster is at `address`, as for `ray.init`; empty starts one on this machine.
    `memory` gives the bytes that a case of a model may need, which Ray sets aside; 0 where that is not known.

    Raises `FleetError` where Ray is not installed, the cluster does not answer, or its nodes have other versions.
    """

    def __init__(
        self,
        make: Make,
        limit: Callable[[Case], float],
        expected: Callable[[tuple[str, str]], float] = lambda group: 0.0,
        judged: Callable[[Record], Record] = lambda record: record,
        preload: Collection[str] = PRELOADED_THERE,
        address: str = "",
        memory: Callable[[str], float] = lambda model: 0.0,
    ) -> None:
        self._ray = _connected(address)
        self._expected, self._judged, self._memory = expected, judged, functools.cache(memory)
        self._parts = self._ray.put((make, limit, judged, preload))
        self._run = self._ray.remote(max_retries=0, num_returns="streaming")(_run)
        self._gone: set[str] = set()
        self._deaths: Counter[tuple[str, str]] = Counter()
        _check_versions(self._ray)

    def remember(self, records: Iterable[Record]) -> None:
        """As of `Pool`."""
        self._deaths += deaths(records)

    def run(
        self, cases: Iterable[Case], workers: int = 0, begun: Callable[[Case], None] = lambda case: None
    ) -> Iterator[Record]:
        """The record of each case as it arrives; `workers` is the cluster's to decide."""
        waiting = deque(self._chunks(cases))
        running: dict[Any, tuple[_Chunk, str]] = {}
        try:
            while waiting or running:
                while waiting and (place := self._place(waiting[0], running)) is not None:
                    chunk = waiting.popleft()
                    running[self._submit(chunk, place)] = chunk, place
                if not running:
                    time.sleep(1.0)  # no node is there for what waits; Ray may be starting one
                    continue
                ready, _ = self._ray.wait(list(running), timeout=1.0)
                if not ready:
                    alive = self._alive()
                    for task, (chunk, _) in running.items():
                        if chunk.cases and self._set_aside(chunk, alive) < chunk.memory:
                            self._ray.cancel(task)  # the node that it waits for is lost: it is placed anew
                for task in ready:
                    chunk, place = running[task]
                    for record in self._heard(task, chunk, place):
                        if record is None:
                            del running[task]
                            if chunk.cases:
                                waiting.appendleft(chunk)
                        else:
                            begun(record.case)
                            yield record
        finally:
            for task in running:
                self._ray.cancel(task, force=True)

    def _chunks(self, cases: Iterable[Case]) -> list[_Chunk]:
        """The cases by model and device, those expected to take longest first, the timed ones last.

        In pieces where nodes would be idle, but not the timed ones, which are timed beside each other.
        """
        groups: dict[tuple[bool, str, str], list[Case]] = {}
        for case in cases:
            groups.setdefault((case.timed, case.model, case.device), []).append(case)
        shared = -(-self._slots() // max(1, len(groups)))
        order = sorted(groups, key=lambda group: (group[0], -self._expected(group[1:]), -len(groups[group])))
        return [
            _Chunk(deque(groups[group][first::pieces]), timed=group[0])
            for group in order
            for pieces in [1 if group[0] else min(shared, len(groups[group]))]
            for first in range(pieces)
        ]

    def _slots(self) -> int:
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def _place(self, chunk: _Chunk, running: dict[Any, tuple[_Chunk, str]]) -> str | None:
        """The node for a timed chunk, where nothing else runs; "" where Ray may choose; None when all are busy."""
        if not chunk.timed:
            return "" if len(running) < 2 * self._slots() else None
        if any(not place for _, place in running.values()):
            return None
        taken = {place for _, place in running.values()}
        alive = self._alive()
        memory = self._set_aside(chunk, alive)
        fit = (node["NodeID"] for node in _able(chunk, alive) if _memory_of(node) >= memory)
        return next((node for node in fit if node not in taken), None)

    def _alive(self) -> list[Any]:
        """The nodes that are there, the busy ones as well."""
        return [node for node in self._ray.nodes() if node["Alive"] and node["NodeID"] not in self._gone]

    def _set_aside(self, chunk: _Chunk, alive: list[Any]) -> int:
        """The bytes of memory for a chunk; no more than the largest node has, where it is then alone."""
        if not (wanted := self._memory(chunk.cases[0].model)):
            return 0
        return int(min(wanted, max(map(_memory_of, _able(chunk, alive)), default=0)))

    def _submit(self, chunk: _Chunk, place: str) -> Any:
        options: dict[str, Any] = {"num_cpus": 1, "num_gpus": int(_on_gpu(chunk))}
        options["memory"] = chunk.memory = self._set_aside(chunk, self._alive())
        if place:
            strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
            options["scheduling_strategy"] = strategy(node_id=place, soft=False)
        return self._run.options(**options).remote(
            self._parts, list(chunk.cases), 0.0 if chunk.lost else HELD_BACK, self._deaths
        )

    def _heard(self, task: Any, chunk: _Chunk, place: str) -> Iterator[Record | None]:
        """The records that a task has sent, and None when it has ended, or its node has."""
        try:
            records: list[Record] = self._ray.get(next(task))
        except StopIteration:
            yield None
        except self._ray.exceptions.RayTaskError as error:
            raise FleetError(f"the harness failed on a node: {error}") from error
        except (self._ray.exceptions.TaskUnschedulableError, self._ray.exceptions.TaskCancelledError):
            self._gone.add(place)  # Ray lists a lost node for some seconds more
            yield None
        except self._ray.exceptions.RayError as error:
            chunk.lost += 1
            if chunk.lost >= ATTEMPTS:
                chunk.lost = 0
                reason = f"its node or process was lost {ATTEMPTS} times ({type(error).__name__})"
                out_of_memory = isinstance(error, self._ray.exceptions.OutOfMemoryError)
                outcome = Outcome.MEMORY if out_of_memory else Outcome.CRASH
                yield self._judged(Record(chunk.cases.popleft(), outcome, "", reason))
            yield None
        else:
            chunk.lost = 0
            for record in records:
                chunk.cases.remove(record.case)
                yield record


def _on_gpu(chunk: _Chunk) -> bool:
    return chunk.cases[0].device.partition(":")[0] == "cuda"


def _able(chunk: _Chunk, nodes: list[Any]) -> list[Any]:
    """The nodes that can run a chunk."""
    needed = "GPU" if _on_gpu(chunk) else "CPU"
    return [node for node in nodes if node["Resources"].get(needed)]


def _memory_of(node: Any) -> float:
    return node["Resources"].get("memory", 0.0)  # type: ignore[no-any-return]


def _run(
    parts: tuple[Make, Any, Any, Collection[str]],
    cases: Sequence[Case],
    held_back: float,
    died: Counter[tuple[str, str]],
) -> Iterator[list[Record]]:
    """Work on a task on its node: a pool of one process, and its records as they arrive.

    After a loss nothing is held back: the first case without a record is then the one that was running.
    """
    make, limit, judged, preload = parts
    held: list[Record] = []
    since = time.monotonic()
    pool = Pool(make, limit, judged=judged, preload=preload, died=died)
    for record in pool.run(cases, 1):
        held.append(record)
        if time.monotonic() - since >= held_back:
            yield held
            held, since = [], time.monotonic()
    if held:
        yield held


def _connected(address: str) -> Any:
    """Ray, connected to a cluster."""
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise FleetError("Ray is not installed: pip install 'ray>=2.60'") from error
    if ray.is_initialized():
        return ray
    if address not in ("", "auto", "local"):
        host, _, port = address.removeprefix("ray://").rpartition(":")
        try:
            socket.create_connection((host, int(port)), ANSWER).close()
        except (OSError, ValueError) as error:
            raise FleetError(f"no Ray cluster answers at {address} ({error})") from error
    try:
        ray.init(
            address=address or "local", log_to_driver=False, include_dashboard=False if not address else None
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise FleetError(f"no Ray cluster can be had at {address or 'this machine'}: {error}") from error
    return ray


def versions() -> dict[str, str]:
    """The versions that rows depend on, in this process."""
    return {"python": platform.python_version(), **{name: version(name) for name in COMPARED}}


def _check_versions(ray: Any) -> None:
    """Raise a FleetError that names the nodes whose versions are not those of this process."""
    ours = versions()
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    asked = {
        node["NodeManagerAddress"]: ray.remote(versions)
        .options(num_cpus=0, scheduling_strategy=strategy(node_id=node["NodeID"], soft=False))
        .remote()
        for node in ray.nodes()
        if node["Alive"]
    }
    differences = []
    for node, answer in asked.items():
        try:
            theirs = ray.get(answer)
        except ray.exceptions.TaskUnschedulableError:  # lost meanwhile
            continue
        except ray.exceptions.RayError as error:  # such as of a node without this package
            raise FleetError(
                f"the harness cannot run on {node}: {str(error).strip().splitlines()[-1]}"
            ) from error
        wrong = [name for name, version in ours.items() if theirs.get(name) != version]
        differences += [f"{node} has {name} {theirs.get(name) or 'not at all'}" for name in wrong]
    if differences:
        here = ", ".join(f"{name} {version}" for name, version in ours.items())
        raise FleetError(f"the nodes differ from this machine ({here}): {'; '.join(differences)}")
