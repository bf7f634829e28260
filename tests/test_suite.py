"""The suite as a whole: what is long, and how far a run is."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests import conftest
from validation.progress import Progress


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


def test_how_far_a_run_is():
    progress = Progress(weight=lambda nodeid: {"a": 1.0, "b": 3.0}[nodeid])
    assert progress.line() == "collecting for 0 s"
    progress.pytest_xdist_node_collection_finished(["a", "b"])
    progress.pytest_xdist_node_collection_finished(["a", "b"])
    assert progress.line() == "0 of 2 in 0 s"
    progress._begun -= 10
    progress.pytest_runtest_logfinish("a")
    assert progress.line() == "1 of 2 in 10 s, about 30 s left"
    progress.pytest_runtest_logfinish("b")
    assert progress.line() == "2 of 2 in 10 s, about 0 s left"


@pytest.mark.long
def test_a_pipe_gets_a_line_now_and_then(tmp_path):
    (tmp_path / "conftest.py").write_text(
        "from validation.progress import Progress\n"
        "def pytest_configure(config):\n    config.pluginmanager.register(Progress(every=0.2))\n"
    )
    (tmp_path / "test_slow.py").write_text("import time\n\ndef test_slow():\n    time.sleep(1)\n")
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(tmp_path), str(tmp_path)]
    command += ["-n", "1"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "\n0 of 1 in " in ran.stdout
