"""How cases are dealt to the workers of pytest-xdist: first those that may share the machine, then the timed ones.

A worker starts an item only when it holds another, or is told to shut down. So when the first phase runs dry,
all workers but one are shut down, which makes them finish; when they are gone, the last one gets the timed
items, and has the machine to itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from xdist.scheduler import WorkStealingScheduling
from xdist.workermanage import WorkerController

IN_FLIGHT = 2
"""Items at a worker: the one it runs and the next. All others wait here, so that `-x` stops at once."""


class PhasedScheduling(WorkStealingScheduling):  # type: ignore[misc]
    """Deals items one by one: a worker stays with a group of items (a model) while there are any.

    Args:
        config: pytest's.
        log: xdist's.
        group_of: the group of an item, by its id; a worker keeps what it has made for a group.
        seconds_of: how long a group took in an earlier run; the longest come first, so that none is left for the end.
        is_timed: whether an item belongs to the second phase.
    """

    def __init__(
        self,
        config: pytest.Config,
        log: Any,
        *,
        group_of: Callable[[str], str],
        seconds_of: Callable[[str], float],
        is_timed: Callable[[str], bool],
    ) -> None:
        super().__init__(config, log)
        self._group_of = group_of
        self._seconds_of = seconds_of
        self._is_timed = is_timed
        self._last_group: dict[WorkerController, str] = {}
        self._starting = 0  # replacements of dead workers that are not here yet: they load the machine, too

    def add_node(self, node: WorkerController) -> None:
        """A worker has started."""
        super().add_node(node)
        self._starting = max(0, self._starting - 1)

    def add_node_collection(self, node: WorkerController, collection: Any) -> None:
        """A worker has collected; one that found other items than the rest is of no use."""
        super().add_node_collection(node, collection)
        if node not in self.node2collection:
            node.shutdown()

    def remove_node(self, node: WorkerController) -> str | None:
        """A worker has finished or died; returns the item that it was running when it died."""
        if node in self.node2pending and not hasattr(node, "workeroutput"):
            self._starting += 1  # it sent no farewell, so xdist replaces it
        crashed: str | None = super().remove_node(node)
        return crashed

    def check_schedule(self) -> None:
        """Hand out what can be handed out now. The base class calls this after every event."""
        if self.collection is None:
            return  # a worker died before all had collected
        ready = [n for n in self.node2pending if n in self.node2collection and not n.shutting_down]
        timed = [index for index in self.pending if self._is_timed(self.collection[index])]
        if len(timed) < len(self.pending):
            for node in ready:
                while len(self.node2pending[node]) < IN_FLIGHT and self._deal(node):
                    pass
        elif timed and ready:
            survivor, *others = ready
            for node in others:
                node.shutdown()
            if list(self.node2pending) == [survivor] and not self._starting:
                while len(self.node2pending[survivor]) < IN_FLIGHT and self.pending:
                    self._send_tests(survivor, 1)

    def _deal(self, node: WorkerController) -> bool:
        """Send the next item of the first phase: of the worker's own group, else of the longest nobody has."""
        assert self.collection is not None
        waiting = [index for index in self.pending if not self._is_timed(self.collection[index])]
        if not waiting:
            return False
        groups = Counter(self._group_of(self.collection[index]) for index in waiting)
        taken = {group for other, group in self._last_group.items() if other is not node}
        chosen = self._last_group.get(node, "")
        if chosen not in groups:
            chosen = max(
                groups, key=lambda group: (group not in taken, self._seconds_of(group), groups[group])
            )
        self._last_group[node] = chosen
        index = next(i for i in waiting if self._group_of(self.collection[i]) == chosen)
        self.pending.remove(index)
        self.node2pending[node].append(index)
        node.send_runtest_some([index])
        return True
