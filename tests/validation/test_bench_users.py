"""`python -m validation.bench users` takes each model through what users do, and reports what is wrong."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner, Result

import fxopt
from tests.validation.dying import dies
from validation.bench import user_models, users
from validation.bench.__main__ import app
from validation.bench.user_models import Subject

pytestmark = pytest.mark.long


def _run(out: Path, models: str = "transformers.BertModel") -> tuple[Result, dict[Any, Any]]:
    result = CliRunner().invoke(app, ["users", "--models", models, "--out", str(out)], catch_exceptions=False)
    (row,) = pd.read_parquet(out / "users.parquet").to_dict("records")
    return result, row


def test_a_model_takes_all_journeys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXOPT_CACHE", str(tmp_path))
    result, row = _run(tmp_path, "transformers.GPT2LMHeadModel")
    assert result.exit_code == 0, row
    assert row["graphs"] > 0
    assert {name for name, cell in row.items() if cell == "ok"} == {*users.CELLS} - {"methods"}
    assert "**Something is wrong with 0 of 1 models.**" in (tmp_path / "users.md").read_text()
    assert CliRunner().invoke(app, ["users", "--models", "nothing"]).exit_code == 2


def test_what_ends_its_process_or_is_not_there_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    row = users._alone("transformers.Nothing", True)
    assert row["wrong"]
    assert "has no attribute Nothing" in row["report"]
    monkeypatch.setattr(users, "_on_one_thread", dies)
    row = users._alone("transformers.BertModel", True)
    assert row["wrong"]
    assert row["report"].startswith("BrokenProcessPool")


def test_a_library_that_is_not_installed_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    options = ["users", "--models", "timm.resnet18", "--out", str(tmp_path)]
    assert CliRunner().invoke(app, options, catch_exceptions=False).exit_code == 0
    assert "Left out: timm is not installed." in (tmp_path / "users.md").read_text()


class Tiny(nn.Linear):
    def encode(self, x: Tensor) -> Tensor:
        return self(x)  # type: ignore[no-any-return]

    def generate(self, x: Tensor) -> Tensor:
        return self(x).argmax(1)  # type: ignore[no-any-return]


class Unpicklable(Tiny):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.local = lambda: None  # copied as it is, and not pickled


def _subject(kind: type[Tiny]) -> Subject:
    torch.manual_seed(0)
    call, (first, other) = user_models._call, (torch.randn(2, 8), torch.randn(3, 8))
    calls = [call("__call__", {"input": each}, "input") for each in (first, other)]
    return Subject(
        kind(8, 8).eval(), calls, *([call(name, {"x": first}, "x")] for name in ("generate", "encode"))
    )


class Faulty(nn.Module):
    """In the place of an optimized model: the model itself, but for one fault."""

    report = (fxopt.optimizing.report.GraphReport("x"),)

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        return self.model.load_state_dict(state)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)  # type: ignore[no-any-return]

    def encode(self, x: Tensor) -> Tensor:
        return self.model(x)  # type: ignore[no-any-return]

    def generate(self, x: Tensor) -> Tensor:
        return self.model(x).argmax(1)  # type: ignore[no-any-return]


class NoReport(Faulty):
    report = ()


class KeepsWeights(Faulty):
    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        return None


class KeepsSizes(Faulty):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:2]


class KeepsDtype(Faulty):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


class RefusesInferenceMode(Faulty):
    def forward(self, x: Tensor) -> Tensor:
        assert not torch.is_inference_mode_enabled()
        return super().forward(x)


class SharesItsWeights(Faulty):
    def __deepcopy__(self, memo: Any) -> Any:
        return self


class CannotBePickled(Faulty):
    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.local = lambda: None


class OneAtATime(Faulty):
    busy = 0

    def forward(self, x: Tensor) -> Tensor:
        OneAtATime.busy += 1
        time.sleep(0.05)
        value = super().forward(x) * OneAtATime.busy
        OneAtATime.busy -= 1
        return value


class Encodes(Faulty):
    def encode(self, x: Tensor) -> Tensor:
        return self.model(x) * 1.001  # type: ignore[no-any-return]


class Generates(Faulty):
    def generate(self, x: Tensor) -> Tensor:
        return self.model(x).argmin(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (Faulty, set()),
        (NoReport, {"report"}),
        (KeepsWeights, {"load_state_dict", "deepcopy"}),
        (KeepsSizes, {"shapes", "threads", "inference_mode", "to", "load_state_dict"}),
        (KeepsDtype, {"to"}),
        (RefusesInferenceMode, {"inference_mode"}),
        (SharesItsWeights, {"deepcopy"}),
        (CannotBePickled, {"pickled"}),
        (OneAtATime, {"threads"}),
        (Encodes, {"methods"}),
        (Generates, {"generate"}),
    ],
)
def test_a_planted_fault_is_reported(
    fault: Callable[[Any], Any], found: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(users, "_alone", users.journeys)
    monkeypatch.setattr(user_models, "subject", lambda name: _subject(Tiny))
    monkeypatch.setattr(fxopt, "optimize", lambda model, tune: fault(model))
    result, row = _run(tmp_path)
    assert {name for name in users.CELLS if row[name] != "ok"} == found, row
    assert result.exit_code == row["wrong"] == bool(found)


def test_an_internal_error_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise ArithmeticError("of our own")

    monkeypatch.setattr(fxopt.optimizing.prepare, "run_in_float64", fails)
    monkeypatch.setattr(user_models, "subject", lambda name: _subject(Tiny))
    row = users.journeys("transformers.BertModel")
    assert row["wrong"]
    assert row["report"].startswith("ArithmeticError while its graph was made. Please report this")


def test_what_the_model_cannot_do_itself_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_models, "subject", lambda name: _subject(Unpicklable))
    row = users.journeys("transformers.BertModel")
    assert row["pickled"].startswith("skipped: the model itself cannot be pickled")
    assert not row["wrong"], row
