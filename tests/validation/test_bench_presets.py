"""`python -m validation.bench presets` measures models of the zoo in each precision, and their accuracy."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from validation.bench.__main__ import app

pytestmark = pytest.mark.long


def test_each_precision_has_a_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXOPT_CACHE", str(tmp_path))
    options = ["--models", "bert-small", "--precision", "float32", "--seconds", "0", "--threads", "1"]
    result = CliRunner().invoke(app, ["presets", *options, "--out", str(tmp_path)], catch_exceptions=False)
    assert result.exit_code == 0
    table = (tmp_path / "presets.md").read_text()
    assert "bert-small" in table
    assert "eager, again" in table
    wrong = CliRunner().invoke(app, ["presets", "--models", "nothing", "--out", str(tmp_path)])
    assert wrong.exit_code == 2
