"""The suite as a whole: of a sweep every n-th case runs, and at night each."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests import conftest


class Case(SimpleNamespace):
    nodeid: str
    n: int | None

    def get_closest_marker(self, name):
        return None if self.n is None else SimpleNamespace(args=(self.n,))


@pytest.mark.parametrize(
    ("nightly", "kept"), [("", ["s[0]", "s[3]", "one", "t[a]"]), ("1", [f"s[{i}]" for i in range(5)])]
)
def test_of_a_sweep_every_nth_case_runs_and_at_night_each(monkeypatch, nightly, kept):
    monkeypatch.setenv("NIGHTLY", nightly)
    cases = [Case(nodeid=f"s[{i}]", n=3) for i in range(5)]
    cases += [Case(nodeid="one", n=None), Case(nodeid="t[a]", n=2), Case(nodeid="t[b]", n=2)]
    left, every = [], list(cases)
    hook = SimpleNamespace(pytest_deselected=lambda items: left.extend(items))
    conftest.pytest_collection_modifyitems(SimpleNamespace(hook=hook), cases)
    assert [case.nodeid for case in cases][: len(kept)] == kept
    assert sorted(case.nodeid for case in (*cases, *left)) == sorted(case.nodeid for case in every)
    assert bool(left) is not bool(nightly)
