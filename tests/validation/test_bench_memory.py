"""`python -m validation.bench memory` prints a row for each model and mode."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from validation.bench import memory
from validation.bench.__main__ import app
from validation.bench.workloads import SMALL

pytestmark = pytest.mark.long


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_each_mode_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, asked = memory._alone, []

    def here(function: Any, *arguments: Any) -> Any:
        """One mode in a process of its own, as all of them are for users; the others here, which is faster."""
        asked.append(arguments)
        return function(*arguments) if len(asked) > 1 else alone(function, *arguments)

    monkeypatch.setattr(memory, "_alone", here)
    monkeypatch.setenv("COLUMNS", "200")
    result = CliRunner().invoke(app, ["memory", "--small", "--models", "bert"], catch_exceptions=False)
    lines = result.output.splitlines()
    assert sum(" kept " in line for line in lines) == sum(" not " in line for line in lines) == 1
    assert CliRunner().invoke(app, ["memory", "--models", "nothing"]).exit_code == 2


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_captures_have_a_row_in_each_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_alone", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(memory, "VERIFIED", {"bert": SMALL["bert"]})
    assert memory.memory_table().row_count == 2
