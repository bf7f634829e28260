"""The sweep: each stage is seen to fail, what is reported is what was found, and parts are fixed and disjoint."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import fxopt.passes
from fxopt import ReversibleTransformation, Transformation
from fxopt.capture.runtime.traced_module import TracedModule
from tests.validation import sweep_models
from validation import report, store
from validation.judging import subject
from validation.records import WORST_FIRST, Case, Check, Outcome, Record
from validation.regressions.compare import compare
from validation.report import architectures as page
from validation.running.run import Runner
from validation.zoo import sources as zoo
from validation.zoo.build import DEFAULT, SPECIALIZE
from validation.zoo.plan import plan
from validation.zoo.sources import Architecture, architectures

ROOT = Path(__file__).resolve().parents[2]
PASSES: dict[str, Transformation] = {
    name: fxopt.passes.available()[name]() for name in ("ChangeTrueDivToMulByInverse", "ReplaceActivation")
}


def run(
    name: str, passes: dict[str, Transformation] = PASSES, peer: bool = False
) -> dict[tuple[str, Check], Record]:
    """The record of each case of a model, by its pass and its check."""
    entry = Architecture(name=name, model=name, source=sweep_models.__name__, peer=peer)
    runner = Runner([entry], passes)
    cases = plan([entry], passes, ["cpu"])
    return {("+".join(case.pipeline), case.check): runner.run(case) for case in cases}


def parity(name: str, **options: Any) -> Record:
    return run(name, **options)["", Check.PARITY]


def worst(records: dict[tuple[str, Check], Record]) -> Record:
    return min(records.values(), key=lambda record: WORST_FIRST.index(record.outcome))


class Unchanged(ReversibleTransformation):
    """Marks the division, and does nothing."""

    preserves_computation = True

    def transform(self, graph_module: GraphModule) -> GraphModule:
        self.mark_as_transformed(self.division(graph_module))
        return graph_module

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        self.mark_as_restored(self.division(graph_module))
        return graph_module

    def division(self, graph_module: GraphModule) -> Any:
        return next(node for node in graph_module.graph.nodes if "truediv" in node.name)


class Wrong(Unchanged):
    def transform(self, graph_module: GraphModule) -> GraphModule:
        node = self.division(graph_module)
        node.args = (node.args[0], 7.0000001)
        return super().transform(graph_module)


class Silent(Wrong):
    """Marks nothing."""

    def mark_as_transformed(self, node: Any) -> None:
        pass


class WrongAndRough(Wrong):
    preserves_computation = False


class NoWayBack(Wrong):
    """Writes what is right to the last bit but one; it is still there after the undo."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        node = self.division(graph_module)
        node.args = (node.args[0], 7.000000000000001)
        return Unchanged.transform(self, graph_module)


def test_what_is_right_passes_every_check_and_is_measured() -> None:
    records = run("good", peer=True)
    assert {record.outcome for record in records.values()} == {Outcome.PASS, Outcome.NO_OP}
    found, peer = records["", Check.PARITY], records["", Check.PEER]
    assert (found.outcome, found.stage, found.reason, found.dtype) == (Outcome.PASS, "", "", "float64")
    facts = {"captured": DEFAULT, "refusal": "", "grade": "bit-exact"}
    assert found.facts == {**facts, "source": "sweep_models"}
    assert peer.facts == {"peer": "right", "peer_reason": "", "source": "sweep_models"}
    assert found.measurements["nodes"] == 5
    sites = {name: records[name, Check.EFFECT].measurements["sites"] for name in PASSES}
    assert sites == {"ChangeTrueDivToMulByInverse": 1, "ReplaceActivation": 0}
    assert 0 < found.measurements["trace_seconds"] < found.seconds


class Baked(nn.Module):
    """Something else than the model at any batch but 2."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def module(self) -> nn.Module:
        return self

    def forward(self, x: torch.Tensor) -> Any:
        return torch.utils._pytree.tree_map(lambda value: value * (len(x) == 2), self.model(x))


def test_a_sweep_goes_through_the_checks_of_every_model() -> None:
    records = run("good")
    assert {check for _, check in records} == set(Check) - {Check.PEER, Check.LATENCY, Check.OPTIMIZE}


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("name", "outcome", "stage", "reason"),
    [
        ("unbuilt", Outcome.SKIP, "load", "ValueError: not without a config"),
        ("unrunnable", Outcome.SKIP, "run the model", "RuntimeError: .*"),
        ("infinite", Outcome.SKIP, "run the model", "ValueError: output is not finite everywhere, .*"),
        ("unseeded", Outcome.REFUSED, "capture", ".*manual_seed.*"),
        ("different", Outcome.FAIL, "compare", "in float64, output differs by 1e-07 of its largest value.*"),
        (
            "differentatothersizes",
            Outcome.FAIL,
            "compare",
            "in float64, with other values, output differs .*",
        ),
    ],
)
def test_each_stage_is_seen_to_fail(name: str, outcome: Outcome, stage: str, reason: str) -> None:
    records = run(name)
    record = records["", Check.PARITY]
    assert (record.outcome, record.stage) == (outcome, stage), record.reason
    assert re.fullmatch(reason, record.reason), record.reason
    if stage != "compare":  # no graph, which is said once
        others = {other.outcome for key, other in records.items() if key != ("", Check.PARITY)}
        assert others == {Outcome.SKIP}


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("pass_", "check", "reason"),
    [
        (Wrong(), Check.EQUIVALENCE, "in float64, output differs by .*"),
        (Silent(), Check.EQUIVALENCE, "in float64, output differs by .*"),
        (WrongAndRough(), Check.ROUND_TRIP, "the round trip is not exact.*"),
        (NoWayBack(), Check.ROUND_TRIP, "the round trip is not exact.*"),
        (Unchanged(), Check.EFFECT, "tells of 1 sites, but the graph module is the same"),
    ],
)
def test_a_wrong_pass_is_seen(pass_: Transformation, check: Check, reason: str) -> None:
    record = run("good", {"Planted": pass_})["Planted", check]
    assert record.outcome == Outcome.FAIL, record.reason
    assert re.fullmatch(reason, record.reason), record.reason


def test_a_graph_that_cannot_be_pickled_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def reduce(module: Any, protocol: Any) -> Any:
        raise pickle.PicklingError("node 'linear' cannot be pickled")

    monkeypatch.setattr(TracedModule, "__reduce_ex__", reduce)
    record = run("good")["", Check.USABLE]
    assert record.outcome is Outcome.FAIL
    assert "pickle: PicklingError: node 'linear' cannot be pickled" in record.reason


def test_weights_that_do_not_fit_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TracedModule, "state_dict", lambda module: {})
    record = run("good")["", Check.USABLE]
    assert record.outcome is Outcome.FAIL
    assert "Missing key(s) in state_dict" in record.reason


def test_an_error_that_is_not_a_refusal_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def trace(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("tensor 3")

    monkeypatch.setattr(fxopt, "trace", trace)
    records = run("good", peer=True)
    record = records["", Check.PARITY]
    assert (record.outcome, record.stage) == (Outcome.ERROR, "capture")
    assert record.reason.startswith("KeyError: 'tensor 3', at test_sweep.py:")
    assert records["", Check.PEER].facts["peer"] == "right"
    assert records["", Check.USABLE].outcome is Outcome.SKIP


def test_an_error_of_the_oracle_is_no_property_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def oracle(*args: Any, **kwargs: Any) -> Any:
        raise TypeError("not callable")

    monkeypatch.setattr(subject, "Oracle", oracle)
    assert parity("good").outcome is Outcome.ERROR


def test_a_branch_on_values_is_captured_with_specialize_alone() -> None:
    records = run("decides", peer=True)
    record, peer = records["", Check.PARITY], records["", Check.PEER]
    assert (record.outcome, record.facts["captured"]) == (Outcome.PASS, SPECIALIZE), record.reason
    assert "sweep_models.py" in record.facts["refusal"]
    assert peer.facts["peer"] == "failed"
    assert peer.facts["peer_reason"]


@pytest.mark.parametrize("name", ["single", "overflows"])
def test_a_model_that_does_not_run_in_float64_is_judged_in_its_own_dtype(name: str) -> None:
    record = parity(name)
    assert (record.outcome, record.dtype) == (Outcome.PASS, "float32"), record.reason


def test_a_model_is_captured_in_the_mode_in_which_it_is_run() -> None:
    assert parity("reads").outcome is Outcome.PASS


def test_what_the_model_cannot_is_not_asked_of_the_graph() -> None:
    record = run("parametrized")["", Check.USABLE]
    assert record.outcome is Outcome.PASS, record.reason
    assert {"no_pickle", "no_save"} <= set(record.facts)


# --- options and reports -------------------------------------------------------------------------------


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `pytest validation` over the planted models, in this process; returns the exit status."""
    monkeypatch.setitem(zoo.SOURCES, "planted", sweep_models.__name__)
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    options = ["--fx-device", "cpu", "--fx-report-dir", str(tmp_path), "-o", f"cache_dir={tmp_path}/cache"]
    return lambda *arguments: pytest.main(
        ["validation", "--fx-zoo", "planted", "-n", "0", *options, *arguments]
    )


@pytest.mark.long
def test_a_sweep_has_a_page_with_a_line_an_architecture(harness: Any, tmp_path: Path) -> None:
    assert harness("--fx-peer", "torch.export") == pytest.ExitCode.TESTS_FAILED
    table = store.read_run(tmp_path / "architectures")
    assert sorted(set(table["model"])) == sweep_models.model_types()
    of = table.set_index("id")
    guarded = of.loc["counts-ChangePrecision-cpu-accuracy"]
    assert guarded["outcome"] == Outcome.REFUSED  # nothing was compared
    assert "decides on a value" in guarded["reason"]
    rows = page.by_architecture(table)
    text = (tmp_path / "architectures/architectures.md").read_text()
    for row in rows.itertuples():
        lines = [line for line in text.splitlines() if line.startswith(f"| {row.architecture} |")]
        said = [outcome for outcome in Outcome for line in lines if f" {outcome} |" in line]
        assert said == ([row.outcome] if row.outcome in ("fail", "error", "refused") else []), (
            row.architecture
        )
    assert str(ROOT) not in text
    numbers = dict(page.summary(table).itertuples(index=False, name=None))
    assert numbers["architectures"] == "16"
    assert numbers["run eagerly"] == "13"
    assert numbers["captured and right with default arguments"] == "61.5 % (8 of 13)"
    assert numbers["captured and right, with `specialize=True` where that is needed"] == "76.9 % (10 of 13)"
    assert numbers["past every stage"] == "69.2 % (9 of 13)"  # one is refused by a pass
    assert numbers["wrong without an error"] == "2"
    for number in numbers.values():
        assert f"| {number} |" in text
    assert report.write_views(table, tmp_path / "again").files[0].read_text() == text


def test_a_sweep_that_captures_nothing_has_a_page(harness: Any, tmp_path: Path) -> None:
    harness("--fx-model", "unseeded")
    text = (tmp_path / "architectures/architectures.md").read_text()
    assert "captured and right with default arguments" in text
    assert "nan" not in text


def test_what_a_part_of_a_sweep_leaves_out_is_not_counted_as_wrong(harness: Any, tmp_path: Path) -> None:
    assert harness("--fx-model", "good", "-k", "effect") == pytest.ExitCode.OK
    text = (tmp_path / "architectures/architectures.md").read_text()
    assert "past every stage | 100.0 % (1 of 1)" in text
    assert "Not captured, or not right: 0" in text
    assert "captured and right" not in text.partition("## ")[0]


def test_one_model_is_chosen_by_name(harness: Any, tmp_path: Path) -> None:
    assert harness("--fx-model", "good", "-k", "parity") == pytest.ExitCode.OK
    assert set(store.read_run(tmp_path / "architectures")["model"]) == {"good"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fx-model", "goof"], "--fx-model goof: not known"),
        (["--fx-part", "11/10"], "'11/10' is not a part such as 1/10"),
    ],
)
def test_an_option_that_makes_no_sense_says_so(
    harness: Any, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert harness(*arguments) == pytest.ExitCode.USAGE_ERROR
    assert message in capsys.readouterr().err


def test_a_package_that_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(zoo.SOURCES, "planted", "tests.validation.no_such_models")
    with pytest.raises(zoo.ZooError, match="planted cannot be swept: No module named"):
        architectures("planted")


# --- comparing -----------------------------------------------------------------------------------------

BERT = Case("bert", (), "cpu", Check.PARITY)
LLAMA = Case("llama", (), "cpu", Check.PARITY)
RIGHT = {"captured": DEFAULT}


def bert(outcome: Outcome = Outcome.PASS, stage: str = "", sites: int = 2, **facts: str) -> Record:
    return Record(BERT, outcome, stage, "why", measurements={"sites_A": sites}, facts={**RIGHT, **facts})


@pytest.mark.parametrize(
    ("before", "after", "kinds"),
    [
        (bert(), bert(), set()),
        (bert(), bert(Outcome.REFUSED, "capture"), {"outcome"}),
        (bert(), bert(Outcome.SKIP, "load"), {"outcome"}),
        (bert(Outcome.REFUSED, "capture"), bert(Outcome.SKIP, "load"), {"stage"}),
        (bert(Outcome.ERROR, "run the graph"), bert(Outcome.ERROR, "capture"), {"stage"}),
        (bert(Outcome.REFUSED, "capture"), bert(Outcome.ERROR, "capture"), {"outcome"}),
        (bert(), bert(captured=SPECIALIZE), {"captured"}),
        (bert(), bert(sites=1), {"sites"}),
        (bert(sites=1), bert(), set()),
        (bert(Outcome.REFUSED, "capture"), bert(), set()),
        (bert(Outcome.SKIP, "load"), bert(Outcome.REFUSED, "capture"), set()),
        (bert(captured=SPECIALIZE), bert(), set()),
    ],
)
def test_an_architecture_that_gets_worse_is_a_regression(
    before: Record, after: Record, kinds: set[str], run: store.Run, tmp_path: Path
) -> None:
    changes = changed([before], [after], run, tmp_path)
    assert set(changes.loc[changes["regression"].astype(bool), "kind"]) == kinds, changes.to_string()


def changed(before: list[Record], after: list[Record], run: store.Run, folder: Path, **options: bool) -> Any:
    tables = []
    for records in (before, after):
        store.write_table(store.table_of(records, run), folder)
        tables.append(store.read_run(folder))
    return compare(*tables, **options)
