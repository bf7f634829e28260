"""A plugin: writes when each case ran."""

from __future__ import annotations

import json
import os

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call":
        with open(os.environ["STAMPS"], "a") as file:
            file.write(json.dumps([report.nodeid, report.start, report.stop]) + "\n")
