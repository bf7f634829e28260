"""A fleet of machines that run cases, on Ray: a task runs the cases of one model, in its own pool on its node."""

from __future__ import annotations

import dataclasses
import platform
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from fxopt.errors import FxoptError

from ..records import Case, Outcome, Record
from ..store import version
from .pool import PRELOADED, Make, Pool, grouped

ATTEMPTS = 3
"""A case whose node was lost this often is given up, because it may be the cause."""

COMPARED = ("torch", "transformers", "fxopt")
"""The distributions whose versions must be equal on all nodes and the driver; otherwise rows are not comparable."""

PRELOADED_THERE = [*PRELOADED, f"{__package__}.run", "ray._private.workers.default_worker"]
"""Modules that each forkserver imports once; the last is the main module of Ray's processes, which forked processes import."""

ANSWER = 5.0
"""Seconds within which the head of a cluster must accept a connection."""


class FleetError(FxoptError):
    """The cluster cannot be used, or the harness failed on a node; the message has the reason."""


@dataclasses.dataclass
class _Chunk:
    """Cases of one model on one device that one task runs, and how often the task was lost."""

    cases: deque[Case]
    lost: int = 0


class Fleet:
    """Runs cases on the nodes of a Ray cluster; it replaces `Pool` and accepts the same arguments.

    Ray places the tasks and detects lost nodes; on a node, `Pool` handles the cases. If a node is lost, its cases without a
    record run on another node; cases whose record has arrived do not run again. A timed case has its node to itself, if all
    cases of a run are timed. The cluster is at `address`, as for `ray.init`; an empty address starts a cluster on this
    machine.

    Raises `FleetError` if Ray is not installed, the cluster does not answer, or its nodes have other versions.
    """

    def __init__(
        self,
        make: Make,
        limit: Callable[[Case], float],
        preload: Collection[str] = PRELOADED_THERE,
        address: str = "",
    ) -> None:
        self._ray = _connected(address)
        self._parts = self._ray.put((make, limit, preload))
        self._run = self._ray.remote(max_retries=0, num_returns="streaming")(_run)
        _check_versions(self._ray)

    def run(
        self, cases: Iterable[Case], workers: int = 0, begun: Callable[[Case], None] = lambda case: None
    ) -> Iterator[Record]:
        """Yield the record of each case as it arrives; `workers` is ignored, because the cluster decides."""
        waiting = deque(map(_Chunk, grouped(cases).values()))
        running: dict[Any, tuple[_Chunk, str]] = {}
        try:
            while waiting or running:
                while waiting and (place := self._place(waiting[0], running)) is not None:
                    chunk = waiting.popleft()
                    running[self._submit(chunk, place)] = chunk, place
                if not running:
                    time.sleep(1.0)  # no node is free for the waiting chunks; Ray may be starting one
                    continue
                ready, _ = self._ray.wait(list(running), timeout=1.0)
                for task in ready:
                    chunk, _ = running[task]
                    for record in self._heard(task, chunk):
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

    def _place(self, chunk: _Chunk, running: dict[Any, tuple[_Chunk, str]]) -> str | None:
        """The node for a timed chunk, on which nothing else runs; "" if Ray may choose; None if all nodes are busy."""
        if not chunk.cases[0].timed:
            return "" if len(running) < 2 * self._ray.cluster_resources().get("CPU", 1) else None
        taken = {place for _, place in running.values()}
        needed = "GPU" if _on_gpu(chunk) else "CPU"
        alive = (
            node["NodeID"] for node in self._ray.nodes() if node["Alive"] and needed in node["Resources"]
        )
        return next((node for node in alive if node not in taken), None)

    def _submit(self, chunk: _Chunk, place: str) -> Any:
        options: dict[str, Any] = {"num_cpus": 1, "num_gpus": int(_on_gpu(chunk))}
        if place:
            strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
            options["scheduling_strategy"] = strategy(node_id=place, soft=False)
        return self._run.options(**options).remote(self._parts, list(chunk.cases))

    def _heard(self, task: Any, chunk: _Chunk) -> Iterator[Record | None]:
        """Yield the record that a task has sent, or None if the task or its node has ended."""
        try:
            record: Record = self._ray.get(next(task))
        except StopIteration:
            yield None
        except self._ray.exceptions.RayTaskError as error:
            raise FleetError(f"the harness failed on a node: {error}") from error
        except (self._ray.exceptions.TaskUnschedulableError, self._ray.exceptions.TaskCancelledError):
            time.sleep(1.0)  # Ray lists a lost node for some more seconds
            yield None
        except self._ray.exceptions.RayError as error:
            chunk.lost += 1
            if chunk.lost >= ATTEMPTS:
                chunk.lost = 0
                reason = f"its node or process was lost {ATTEMPTS} times ({type(error).__name__})"
                out_of_memory = isinstance(error, self._ray.exceptions.OutOfMemoryError)
                outcome = Outcome.MEMORY if out_of_memory else Outcome.CRASH
                yield Record(chunk.cases.popleft(), outcome, "", reason)
            yield None
        else:
            chunk.lost = 0
            chunk.cases.remove(record.case)
            yield record


def _on_gpu(chunk: _Chunk) -> bool:
    return chunk.cases[0].device.partition(":")[0] == "cuda"


def _run(parts: tuple[Make, Any, Collection[str]], cases: Sequence[Case]) -> Iterator[Record]:
    """Run a task on its node: a pool of one process yields the records as they arrive."""
    make, limit, preload = parts
    yield from Pool(make, limit, preload=preload).run(cases, 1)


def _connected(address: str) -> Any:
    """Connect Ray to a cluster, and return the module."""
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
    """Raise a FleetError if a node has other versions than this process."""
    ours = versions()
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        here = strategy(node_id=node["NodeID"], soft=False)
        asked = ray.remote(versions).options(num_cpus=0, scheduling_strategy=here).remote()
        where = node["NodeManagerAddress"]
        try:
            theirs = ray.get(asked)
        except ray.exceptions.TaskUnschedulableError:  # the node was lost meanwhile
            continue
        except ray.exceptions.RayError as error:  # such as of a node without this package
            text = str(error).strip().splitlines()[-1]
            raise FleetError(f"the harness cannot run on {where}: {text}") from error
        if theirs != ours:
            raise FleetError(f"the nodes differ from this machine ({ours}): {where} has {theirs}")
