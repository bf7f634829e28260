"""Names: one name stands for one thing."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import fxopt
import validation
from validation.records import Check

EVERY_PACKAGE_HAS = {"__init__.py", "__main__.py"}


def test_no_two_files_have_one_name() -> None:
    files = list(Path(fxopt.__file__).parent.rglob("*.py"))
    assert len(files) > 50
    names = Counter(file.name for file in files if file.name not in EVERY_PACKAGE_HAS)
    assert [name for name, count in names.items() if count > 1] == []


def test_trace_is_the_function_that_captures_and_no_check_or_stage_of_the_harness() -> None:
    text = "".join(file.read_text() for file in Path(validation.__file__).parent.rglob("*.py"))
    stages = set(re.findall(r'entering\("(.+?)"\)', text))
    assert {"transform", "compare"} <= stages
    assert "trace" not in stages | {*Check}
