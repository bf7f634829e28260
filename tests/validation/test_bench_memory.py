"""The memory of captures."""

from __future__ import annotations

import sys

import pytest

from tests.validation.small_workloads import SMALL
from validation.bench import memory

pytestmark = pytest.mark.long


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_captures_have_a_row_in_each_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_alone", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(memory, "VERIFIED", {"bert": SMALL["bert"]})
    assert memory.memory_table().row_count == 2
