"""The benchmark that takes the time of each node of an optimized model."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from validation.bench.__main__ import app

pytestmark = pytest.mark.long


def test_operators_and_layers_have_rows_with_their_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXOPT_CACHE", str(tmp_path))
    options = ["profile", "--small", "--models", "resnet,llama-decode", "--seconds", "0", "--threads", "1"]
    result = CliRunner().invoke(app, [*options, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    text = (tmp_path / "profile.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line[:1] == "|"]
    convolutions = [row for row in rows if "Conv2d(" in row[0]]
    assert convolutions
    assert all("%)" in row[-1] for row in convolutions)
    assert any(row[0] == "scaled_dot_product_attention" and row[-1] == "-" for row in rows)


def test_an_unknown_model_is_said(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["profile", "--small", "--models", "nothing", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "there is no model 'nothing'" in result.output
    assert not list(tmp_path.iterdir())
