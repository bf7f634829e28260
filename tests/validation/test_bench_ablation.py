"""The benchmark that leaves out one pass of optimize after the other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.capture.test_transformers import resnet
from validation.bench.__main__ import app
from validation.bench.ablation import AGAIN, PLAIN
from validation.bench.workloads import WORKLOADS, Workload

pytestmark = pytest.mark.long


def test_each_pass_that_changes_something_has_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXOPT_CACHE", str(tmp_path))
    inputs = {"pixel_values": torch.randn(1, 3, 64, 64)}
    monkeypatch.setitem(WORKLOADS, "small", lambda: Workload(resnet().eval(), inputs, "small"))
    options = [
        "ablation",
        "--models",
        "small",
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
    result = CliRunner().invoke(app, ["ablation", "--models", "nothing", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "there is no model 'nothing'" in result.output
    assert not list(tmp_path.iterdir())
