"""Models of transformers, timm and diffusers go through what users do; and what goes wrong is seen."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxopt

from . import journeys, models
from .models import Subject, _call

pytestmark = pytest.mark.long


@pytest.mark.sweep(day=16)
@pytest.mark.parametrize("name", models.NAMES)
def test_an_optimized_model_gives_what_the_model_gives(name: str) -> None:
    pytest.importorskip(name.partition(".")[0])
    assert journeys.wrong(models.subject(name)) == {}


class Tiny(nn.Linear):
    def encode(self, x: Tensor) -> Tensor:
        return self(x)  # type: ignore[no-any-return]

    def generate(self, x: Tensor) -> Tensor:
        return self(x).argmax(1)  # type: ignore[no-any-return]


class Unpicklable(Tiny):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.local = lambda: None  # copied as it is, and not pickled


def _subject(kind: type[Tiny] = Tiny) -> Subject:
    torch.manual_seed(0)
    first, other = torch.randn(2, 8), torch.randn(3, 8)
    calls = [_call("__call__", {"input": each}, "input") for each in (first, other)]
    generations, methods = ([_call(name, {"x": first}, "x")] for name in ("generate", "encode"))
    return Subject(kind(8, 8).eval(), calls, generations, methods)


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
def test_a_planted_fault_is_seen(
    fault: type[Faulty], found: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fxopt, "optimize", lambda model, tune: fault(model))
    assert journeys.wrong(_subject()).keys() == found


def test_an_internal_error_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise ArithmeticError("of our own")

    monkeypatch.setattr(fxopt.optimizing.prepare, "run_in_float64", fails)
    found = journeys.wrong(_subject())
    assert found["report"].startswith("ArithmeticError while its graph was made. Please report this")


def test_a_model_that_cannot_be_pickled_itself_is_right() -> None:
    assert journeys.wrong(_subject(Unpicklable)) == {}
