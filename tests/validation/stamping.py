"""A plugin: writes when each case ran, and where; and kills a worker in the middle of timing where KILL says so."""

from __future__ import annotations

import json
import os

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and "PYTEST_XDIST_WORKER" not in os.environ:
        worker = report.node.gateway.id if hasattr(report, "node") else "main"
        with open(os.environ["STAMPS"], "a") as file:
            file.write(json.dumps([report.nodeid, report.start, report.stop, worker]) + "\n")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    if any(f"[{case}]" in item.nodeid for case in os.environ.get("KILL", "").split()):
        os._exit(1)
