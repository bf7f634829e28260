"""The suite as a whole: what is long."""

from __future__ import annotations

from types import SimpleNamespace

from tests import conftest


class Case(SimpleNamespace):
    nodeid: str
    n: int | None

    def get_closest_marker(self, name):
        return None if self.n is None else SimpleNamespace(args=(self.n,))

    def add_marker(self, marker):
        self.long = marker.name == "long"


def test_of_a_sweep_all_but_every_nth_case_are_long():
    cases = [Case(nodeid=f"s[{i}]", n=3, long=False) for i in range(5)]
    cases += [Case(nodeid="one", n=None, long=False), Case(nodeid="t[a]", n=2, long=False)]
    conftest.pytest_collection_modifyitems(cases)
    assert [case.nodeid for case in cases if not case.long] == ["s[0]", "s[3]", "one", "t[a]"]
