"""A plugin that cuts a run after its first case, as the end of a job does."""

from __future__ import annotations

import pytest

_sessions: list[pytest.Session] = []


def pytest_collection_finish(session: pytest.Session) -> None:
    _sessions[:] = [session]


def pytest_runtest_logfinish() -> None:
    _sessions[0].shouldstop = "cut"
