"""The benchmark that leaves out one pass of optimize after the other."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from validation.bench.__main__ import app
from validation.bench.ablation import AGAIN, PLAIN

pytestmark = pytest.mark.long


def test_each_pass_that_changes_something_has_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXOPT_CACHE", str(tmp_path))
    options = [
        "ablation",
        "--small",
        "--models",
        "resnet",
        "--seconds",
        "0",
        "--threads",
        "1",
        "--out",
        str(tmp_path),
    ]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    rows = [
        line.split("|")[1].strip()
        for line in (tmp_path / "ablation.md").read_text().splitlines()
        if "|" in line
    ]
    assert {AGAIN, PLAIN, "FoldBatchNorms"} <= set(rows)
    assert {"QuantizeLinears", "FuseAttention"}.isdisjoint(rows)


def test_an_unknown_model_is_said(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["ablation", "--small", "--models", "nothing", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "there is no model 'nothing'" in result.output
    assert not list(tmp_path.iterdir())
