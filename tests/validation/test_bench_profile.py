"""The benchmark that takes the time of each operator of an optimized model."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.validation.small_workloads import SMALL
from validation.bench import profile
from validation.bench.__main__ import app

pytestmark = pytest.mark.long


def test_operators_have_rows_with_their_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXOPT_CACHE", str(tmp_path))
    monkeypatch.setattr(profile, "zoo", lambda: SMALL)
    monkeypatch.setattr(profile, "workload", lambda name: SMALL[name]())
    result = CliRunner().invoke(app, ["profile", "--models", "resnet", "--threads", "1"])
    assert result.exit_code == 0, result.output
    assert "resnet: float32 matrix products reach" in result.output
    assert "Input Shapes" in result.output
    assert "[[1, 3, 32, 32]" in result.output


def test_an_unknown_model_is_said() -> None:
    result = CliRunner().invoke(app, ["profile", "--models", "nothing"])
    assert result.exit_code == 2
    assert "there is no model 'nothing'" in result.output
