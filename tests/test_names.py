"""Names of files: one name stands for one thing."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import fxopt

EVERY_PACKAGE_HAS = {"__init__.py", "__main__.py"}


def test_no_two_files_have_one_name() -> None:
    files = list(Path(fxopt.__file__).parent.rglob("*.py"))
    assert len(files) > 50
    names = Counter(file.name for file in files if file.name not in EVERY_PACKAGE_HAS)
    assert [name for name, count in names.items() if count > 1] == []
