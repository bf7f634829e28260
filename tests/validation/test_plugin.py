"""The options of the harness: passes by their paths, what is named and not there, and what brings the harness in."""

from __future__ import annotations

import pytest
import torch

from tests.test_command_line import Doubles
from tests.validation.test_harness import Harness, harness  # noqa: F401

OWN = f"{Doubles.__module__}.Doubles"


@pytest.fixture
def collected(harness: Harness, capsys: pytest.CaptureFixture[str]) -> object:  # noqa: F811
    def collected(*arguments: str) -> tuple[set[str], str]:
        harness.run("--collect-only", "-q", *arguments)
        out, err = capsys.readouterr()
        return {line.partition("[")[2].rstrip("]") for line in out.splitlines() if "test_case[" in line}, err

    return collected


def test_a_pass_by_its_path_is_planned_as_the_others_are(collected) -> None:
    cases, _ = collected("--fx-pass", OWN)
    assert "good-Doubles-cpu-accuracy" in cases
    assert not any("MergeLinears" in case for case in cases)


def test_the_zoo_names_passes_of_its_own(collected, harness: Harness) -> None:  # noqa: F811
    file = harness.folder / "zoo.yaml"
    text = file.read_text()
    file.write_text(f"passes: [{OWN}]\n{text}")
    cases, _ = collected()
    assert {"good-Doubles-cpu-accuracy", "good-FuseBiasInLinear-cpu-effect"} <= cases
    file.write_text(f"passes: [Doubles]\n{text}")
    cases, error = collected()
    assert not cases
    assert "zoo.yaml: passes.0: no such pass: 'Doubles'" in error
    file.write_text(f"passes: [{OWN}s]\n{text}")
    wrong = f"zoo.yaml: passes.0: pass {OWN}s: {Doubles.__module__} has no class 'Doubless'"
    assert wrong in collected()[1]


def test_a_named_pipeline_is_chosen_by_its_name(collected, harness: Harness) -> None:  # noqa: F811
    file = harness.folder / "zoo.yaml"
    file.write_text(f"pipelines: {{deploy: [MergeLinears, {OWN}]}}\n" + file.read_text())
    cases, _ = collected("--fx-pipeline", "deploy")
    assert cases == {f"good-deploy-cpu-{check}" for check in ("effect", "accuracy", "usable", "latency")}
    cases, _ = collected("--fx-pass", "Doubles")
    assert {"Doubles", "deploy"} <= {case.split("-")[1] for case in cases}
    assert "ERROR: --fx-pipeline ship: not known; there are" in collected("--fx-pipeline", "ship")[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_here_is_said_plainly(collected) -> None:
    assert collected("--fx-device", "cuda")[1].strip() == "ERROR: --fx-device cuda: no CUDA device here"
