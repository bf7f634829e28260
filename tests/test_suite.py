"""The suite as a whole: what is long."""

from __future__ import annotations

from types import SimpleNamespace

from tests import conftest


class Case(SimpleNamespace):
    nodeid: str
    n: int | None
    day: int = 1

    def get_closest_marker(self, name):
        return None if self.n is None else SimpleNamespace(args=(self.n,), kwargs={"day": self.day})

    def add_marker(self, marker):
        self.marks = {*getattr(self, "marks", ()), marker.name}


def test_of_a_sweep_all_but_every_nth_case_are_long():
    cases = [Case(nodeid=f"s[{i}]", n=3) for i in range(5)]
    cases += [Case(nodeid="one", n=None), Case(nodeid="t[a]", n=2)]
    conftest.pytest_collection_modifyitems(cases)
    assert [case.nodeid for case in cases if not hasattr(case, "marks")] == ["s[0]", "s[3]", "one", "t[a]"]


def test_of_a_sweep_for_the_night_each_day_has_some_cases():
    cases = [Case(nodeid=f"s[{i}]", n=6, day=2) for i in range(8)]
    conftest.pytest_collection_modifyitems(cases)
    short, long = ([c.nodeid for c in cases if getattr(c, "marks", set()) == m] for m in (set(), {"long"}))
    assert (short, long) == (["s[0]", "s[6]"], ["s[2]", "s[4]"])
