"""Passes and named pipelines in a zoo file, and models some of whose sizes are free."""

from __future__ import annotations

import dataclasses
import re
import runpy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt import Transformation
from tests.validation.planted import Inverse, entry
from validation.judging import repro
from validation.records import Case, Check, Outcome
from validation.running.run import Runner
from validation.zoo import plan
from validation.zoo.build import named_shapes
from validation.zoo.entry import Entry
from validation.zoo.sources import load_zoo
from validation.zoo.yaml_file import ZooError

MODEL = """
models:
  - {name: net, model: tests.validation.planted.Net, sizes: fixed, inputs: {x: {shape: [5, 4]}}}
"""


def zoo(folder: Path, text: str) -> Path:
    (folder / "zoo.yaml").write_text(text + MODEL)
    return folder / "zoo.yaml"


@dataclasses.dataclass(frozen=True)
class Scale(Transformation):
    """Multiplies by what has no default."""

    by: int

    def __post_init__(self) -> None:
        if self.by == 0:
            raise ValueError("by is 0: give another number")

    def transform(self, graph_module: GraphModule) -> GraphModule:
        return graph_module


SCALE = f"{__name__}.Scale"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("passes: [ChangePrecison]", "passes.0: no such pass: 'ChangePrecison'"),
        (f"passes: [{SCALE}s]", "passes.0: .*has no class 'Scales'"),
        ("passes: [nowhere.Pass]", "nowhere.Pass.* cannot be imported: ModuleNotFoundError"),
        ("passes: [torch.nn.Linear]", "torch.nn.Linear.* no pass"),
        (f"passes: [{SCALE}]", "no pass that takes no arguments"),
        ("pipelines: {half: [MergeLinears, ChangePrecison]}", "pipelines.half.1: no such pass"),
    ],
)
def test_a_wrong_pass_is_one_line_with_its_place(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(ZooError) as raised:
        load_zoo(zoo(tmp_path, text))
    (said,) = str(raised.value).splitlines()
    assert said.startswith(f"{tmp_path}/zoo.yaml: ")
    assert re.search(what, said), said


def test_a_named_pipeline_is_planned_checked_and_measured_by_its_passes(tmp_path: Path) -> None:
    own = f"{Inverse.__module__}.Inverse"
    file = zoo(tmp_path, f"pipelines: {{deploy: [{own}, ChangePrecision]}}")
    (net,), passes = load_zoo(file)
    assert plan.members(net, ("deploy",), passes) == ("Inverse", "ChangePrecision")
    cases = [case for case in plan.plan([net], passes, ["cpu"]) if case.pipeline == ("deploy",)]
    assert {case.check for case in cases} == {
        *(Check.EFFECT, Check.ACCURACY, Check.ROUND_TRIP, Check.USABLE, Check.LATENCY)
    }
    runner = Runner([net], passes)
    found = {case.check: runner.run(case) for case in cases if case.check is not Check.LATENCY}
    assert {record.outcome for record in found.values()} == {Outcome.PASS}, found
    assert found[Check.EFFECT].measurements["sites"] > 1


class Lengths(nn.Module):
    """Takes any batch, and lengths up to 16."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.table[: x.shape[1]]) / 7.0


FREE = {
    "model": f"{__name__}.Lengths",
    "inputs": {"x": {"shape": [2, 8, 4]}},
    "dynamic_shapes": {"x": {0: "batch", 1: "length"}},
}


def free(**fields: object) -> Entry:
    return Entry.model_validate({"name": "lengths", **FREE, **fields})


@dataclasses.dataclass(frozen=True)
class BakesLength(Transformation):
    """Builds the length of the example in."""

    preserves_computation = True

    def transform(self, graph_module: GraphModule) -> GraphModule:
        (part,) = (
            node for node in graph_module.graph.nodes if "getitem" in node.name and "table" in str(node.args)
        )
        part.args = (part.args[0], slice(None, 8))
        return graph_module


def test_named_dimensions_are_free() -> None:
    record = Runner([free()], {}).run(Case("lengths", (), "cpu", Check.PARITY))
    assert record.outcome is Outcome.PASS, record.reason
    assert named_shapes(free())["x"][1].__name__ == "length"
    wrong = Case("lengths", ("Bakes",), "cpu", Check.EQUIVALENCE)
    record = Runner([free()], {"Bakes": BakesLength()}).run(wrong)
    assert record.outcome is Outcome.ERROR
    assert "(with other sizes)" in record.reason


def test_the_script_of_a_failure_has_the_named_dimensions(tmp_path: Path) -> None:
    text = repro.script(Case("lengths", (), "cpu", Check.PARITY), "why", free(), [], 0.0)
    assert "'length': torch.export.Dim('length')" in text
    (tmp_path / "script.py").write_text(text)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(tmp_path / "script.py"))
    assert not ended.value.code


def test_the_content_of_a_case_has_its_free_dimensions_and_options() -> None:
    case = Case("lengths", ("P",), "cpu", Check.EFFECT)
    made = {
        plan.content(case, each, {"P": Scale(by)})
        for each in (free(), free(dynamic_shapes={"x": {0: "batch"}}))
        for by in (1, 2)
    }
    assert len(made) == 4
    assert entry().dynamic_shapes == {}
