"""Each check passes what is right and fails what is wrong: the faults here are planted."""

from __future__ import annotations

import copy
import gc
import operator
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt.transformation import ReversibleTransformation, Transformation
from validation import build, checks, digits
from validation.checks import latency
from validation.comparison import judge
from validation.records import Check, Finding, Outcome
from validation.run import Runner
from validation.subject import Subject
from validation.zoo import Entry


class Net(nn.Module):
    """Two linears, a batch normalisation, and a division."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.second(torch.relu(self.norm(self.first(x)))) / 7.0}


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"empty": x[:0], "name": "nothing"}


class ReadsGradMode(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if torch.is_grad_enabled() else 3 * x


class NotFinite(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(-torch.exp(x))


class Inverse(ReversibleTransformation):
    """A right rewrite: division by a constant becomes multiplication by its inverse."""

    preserves_computation = True

    def transform(self, graph_module: GraphModule) -> GraphModule:
        for node in graph_module.graph.find_nodes(op="call_function", target=operator.truediv):
            node.target, node.args = operator.mul, (node.args[0], self.factor(node.args[1]))
            self.mark_as_transformed(node)
        return graph_module

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        for node in self.get_transformed_nodes(graph_module):
            node.target, node.args = operator.truediv, (node.args[0], self.divisor(node.args[1]))
            self.mark_as_restored(node)
        return graph_module

    def factor(self, divisor: float) -> float:
        return 1 / divisor

    def divisor(self, factor: float) -> float:
        return 7.0


class AlmostInverse(Inverse):
    """Off by one part in ten million: float32 cannot see it, float64 can."""

    def factor(self, divisor: float) -> float:
        return (1 + 1e-7) / divisor


class BadReverse(Inverse):
    """1 / (1 / 49) is not 49: what comes back is not what was there."""

    def divisor(self, factor: float) -> float:
        return float(np.nextafter(1 / factor, 8))


class ReplaceFirst(Transformation):
    """Puts a new linear in the place of `first`; `change` makes it wrong, or right."""

    preserves_computation = True

    def transform(self, graph_module: GraphModule) -> GraphModule:
        graph_module.first = self.change(copy.deepcopy(graph_module.first))
        (node,) = graph_module.graph.find_nodes(op="call_module", target="first")
        self.mark_as_transformed(node)
        return graph_module

    def change(self, linear: nn.Linear) -> nn.Linear:
        return linear


class ForgetBias(ReplaceFirst):
    def change(self, linear: nn.Linear) -> nn.Linear:
        linear.bias = None
        return linear


class ForgetBatchNorm(Transformation):
    """With fresh statistics, 0 and 1, nobody would notice."""

    preserves_computation = True

    def transform(self, graph_module: GraphModule) -> GraphModule:
        (node,) = graph_module.graph.find_nodes(op="call_module", target="norm")
        node.replace_all_uses_with(node.args[0])
        self.mark_as_transformed(node.args[0])
        graph_module.graph.erase_node(node)
        return graph_module


class ChangeInPlace(Inverse):
    """Changes a module that the graph shares with the user's model, in a way that changes no output."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        graph_module.first.weight.data *= 1
        graph_module.first.bias = nn.Parameter(graph_module.first.bias + 1)
        return super().transform(graph_module)


class MarkOnly(Inverse):
    def transform(self, graph_module: GraphModule) -> GraphModule:
        for node in graph_module.graph.find_nodes(op="call_function", target=operator.truediv):
            self.mark_as_transformed(node)
        return graph_module


class Unmarked(Inverse):
    def mark_as_transformed(self, node: torch.fx.Node) -> None:
        pass


class Idle(Inverse):
    def transform(self, graph_module: GraphModule) -> GraphModule:
        return graph_module


class Rough(Inverse):
    preserves_computation = False

    def factor(self, divisor: float) -> float:
        return 1.001 / divisor


class Negate(Rough):
    def factor(self, divisor: float) -> float:
        return -1 / divisor


class Overflow(Rough):
    def factor(self, divisor: float) -> float:
        return float("inf")


class Raise(Inverse):
    def transform(self, graph_module: GraphModule) -> GraphModule:
        raise ValueError("no such thing")


def entry(model: str = "Net", **fields: Any) -> Entry:
    shape = {"x": {"shape": [5, 4]}}
    path = f"{__name__}.{model}"
    return Entry.model_validate({"name": "net", "model": path, "sizes": "fixed", "inputs": shape, **fields})


def run(check: Check, pass_: type[Transformation] | None = None, **fields: Any) -> Finding:
    passes = {pass_.__name__: pass_()} if pass_ else {}
    subject = Subject(entry(**fields), "cpu", passes)
    return checks.available()[check](subject, tuple(passes))


def test_every_check_has_a_file() -> None:
    assert set(checks.available()) == set(Check)


def test_trace_passes_and_counts_what_it_compared() -> None:
    finding = run(Check.TRACE)
    assert finding.outcome is Outcome.PASS
    assert (finding.measurements["tensors_compared"], finding.measurements["values_compared"]) == (1, 15)


def test_a_graph_is_captured_in_the_grad_mode_in_which_it_is_run() -> None:
    assert run(Check.TRACE, model="ReadsGradMode").outcome is Outcome.PASS


def test_trace_fails_when_the_graph_computes_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Subject.traced
    monkeypatch.setattr(
        Subject, "traced", lambda self, dtype: AlmostInverse()(copy.deepcopy(traced(self, dtype)))
    )
    finding = run(Check.TRACE)
    assert finding.outcome is Outcome.FAIL
    assert "in float64, output.logits is 1e-07 off" in finding.reason


def test_an_output_with_nothing_to_compare_fails() -> None:
    with pytest.raises(AssertionError, match="nothing was compared"):
        run(Check.TRACE, model="Nothing")


def test_an_output_that_is_not_finite_fails() -> None:
    finding = run(Check.TRACE, model="NotFinite")
    assert finding.outcome is Outcome.FAIL
    assert "not finite" in finding.reason


@pytest.mark.parametrize("pass_", [Inverse, ReplaceFirst])
def test_equivalence_passes_a_right_rewrite(pass_: type[Transformation]) -> None:
    finding = run(Check.EQUIVALENCE, pass_, dtypes=["float32", "bfloat16"])
    assert finding.outcome is Outcome.PASS, finding.reason
    assert finding.measurements["relative_error_float64"] <= 1e-15
    assert finding.measurements["relative_error"] < 1e-5 < finding.measurements["relative_error_bfloat16"]


@pytest.mark.parametrize("pass_", [AlmostInverse, ForgetBias, ForgetBatchNorm])
def test_equivalence_fails_a_wrong_rewrite(pass_: type[Transformation]) -> None:
    finding = run(Check.EQUIVALENCE, pass_)
    assert finding.outcome is Outcome.FAIL
    assert "in float64, output.logits" in finding.reason


def test_equivalence_of_an_idle_pass_is_no_op() -> None:
    assert run(Check.EQUIVALENCE, Idle).outcome is Outcome.NO_OP


def test_in_its_own_dtype_an_output_may_be_twice_as_far_off_and_no_farther() -> None:
    truth = torch.ones(3, dtype=torch.float64)
    original = (truth + torch.tensor([1e-4, 0, 0])).float()
    for factor, outcome in [(1.0, Outcome.PASS), (1.9, Outcome.PASS), (2.2, Outcome.FAIL)]:
        own = (truth + torch.tensor([0, factor * 1e-4, 0])).float()
        finding = judge(truth=truth, wide=truth, original=original, own=own, dtype=torch.float32)
        assert finding.outcome is outcome


def test_an_output_of_another_class_fails() -> None:
    truth, other = {"a": torch.ones(2)}, type("Other", (dict,), {})(a=torch.ones(2))
    finding = judge(truth=truth, wide=other, original=truth, own=other, dtype=torch.float32)
    assert "returns a Other" in finding.reason


def test_round_trip_passes_an_exact_undo() -> None:
    finding = run(Check.ROUND_TRIP, Inverse)
    assert finding.outcome is Outcome.PASS
    assert finding.measurements["values_compared"] > 50


def test_round_trip_fails_an_undo_that_is_almost_exact() -> None:
    with pytest.raises(AssertionError, match="not exact"):
        run(Check.ROUND_TRIP, BadReverse)


def test_effect_counts_what_was_done() -> None:
    finding = run(Check.EFFECT, ForgetBatchNorm)
    measured = finding.measurements
    assert finding.outcome is Outcome.PASS
    assert (measured["sites"], measured["refused"]) == (1, 0)
    assert measured["nodes_before"] - measured["nodes_after"] == 1
    assert measured["modules_before"] - measured["modules_after"] == 1


@pytest.mark.parametrize(
    ("pass_", "reason"),
    [
        (ChangeInPlace, "shares with the user's model: first.bias"),
        (MarkOnly, "the graph module is the same"),
        (Unmarked, "marked no node"),
    ],
)
def test_effect_fails_a_pass_that_says_one_thing_and_does_another(
    pass_: type[Transformation], reason: str
) -> None:
    finding = run(Check.EFFECT, pass_)
    assert finding.outcome is Outcome.FAIL
    assert reason in finding.reason


@pytest.mark.parametrize(
    ("pass_", "count", "outcome"),
    [
        (Inverse, 1, Outcome.PASS),
        (Inverse, "some", Outcome.PASS),
        (Inverse, 2, Outcome.FAIL),
        (Inverse, 0, Outcome.FAIL),
        (Idle, 0, Outcome.NO_OP),
        (Idle, 1, Outcome.FAIL),
        (Idle, "some", Outcome.FAIL),
    ],
)
def test_effect_holds_sites_against_the_entry(
    pass_: type[Transformation], count: Any, outcome: Outcome
) -> None:
    finding = run(Check.EFFECT, pass_, sites={pass_.__name__: {"count": count, "reason": "there is one"}})
    assert finding.outcome is outcome
    if outcome is Outcome.FAIL:
        assert "there is one" in finding.reason


def test_accuracy_measures_a_small_change() -> None:
    finding = run(Check.ACCURACY, Rough)
    assert finding.outcome is Outcome.PASS
    assert finding.measurements["agreement"] == 1
    assert finding.measurements["relative_error"] == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize(
    ("pass_", "reason"), [(Negate, "cosine with the original is -1"), (Overflow, "not finite")]
)
def test_accuracy_fails_a_model_that_is_ruined(pass_: type[Transformation], reason: str) -> None:
    finding = run(Check.ACCURACY, pass_)
    assert finding.outcome is Outcome.FAIL
    assert reason in finding.reason


def test_latency_measures_and_leaves_the_threads_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "SECONDS", 0.0)
    monkeypatch.setattr(latency, "timing_threads", lambda: 2)
    torch.set_num_threads(1)
    finding = run(Check.LATENCY, Inverse)
    measured = finding.measurements
    assert measured["timing_threads"] == 2
    assert measured["latency_pairs"] == latency.FEWEST
    assert measured["latency_ratio_low"] <= measured["latency_ratio"] <= measured["latency_ratio_high"]
    assert torch.get_num_threads() == 1


def test_a_gpu_is_waited_for_before_and_after_each_run() -> None:
    assert latency.synchronise("cuda") is torch.cuda.synchronize
    waits: list[int] = []
    latency.time_pairs(lambda: None, lambda: None, lambda: waits.append(1))
    assert len(waits) >= 4 * (latency.WARM_UP + latency.FEWEST)


def test_the_ratio_of_paired_times_has_an_interval_around_the_truth() -> None:
    noise = np.random.default_rng(0).lognormal(sigma=0.05, size=(200, 2))
    pairs = noise * [0.010, 0.008] * np.linspace(1, 3, 200)[:, None]  # the machine grows slower all the time
    measured = latency.summarise(pairs)
    assert measured["latency_ratio_low"] < 0.8 < measured["latency_ratio_high"]
    assert measured["latency_ratio_high"] - measured["latency_ratio_low"] < 0.04


def test_pairs_are_timed_turn_by_turn() -> None:
    calls: list[str] = []
    pairs = latency.time_pairs(lambda: calls.append("b"), lambda: calls.append("t"), lambda: None)
    timed = "".join(calls[2 * latency.WARM_UP :])
    assert len(timed) == 2 * len(pairs)
    assert timed.startswith("bttbbttb")


def runner(pass_: type[Transformation], **fields: Any) -> Callable[[Check], Any]:
    from validation.records import Case

    passes = {pass_.__name__: pass_()}
    made = Runner([entry(**fields)], passes)
    return lambda check: made.run(Case("net", tuple(passes), "cpu", check))


def test_an_error_is_a_record_with_its_stage_place_and_pass() -> None:
    record = runner(Raise)(Check.EQUIVALENCE)
    assert (record.outcome, record.stage) == (Outcome.ERROR, "transform")
    assert "ValueError: no such thing" in record.reason
    assert "Raise" in record.reason
    assert "test_checks.py" in record.reason


def test_a_failed_comparison_is_a_failure_and_no_error() -> None:
    record = runner(BadReverse)(Check.ROUND_TRIP)
    assert (record.outcome, record.stage) == (Outcome.FAIL, "compare")


def test_running_out_of_memory_is_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_much(self: Inverse, divisor: float) -> float:
        return float(torch.empty(2**62, dtype=torch.uint8)[0])

    monkeypatch.setattr(Inverse, "factor", too_much)
    record = runner(Inverse)(Check.EQUIVALENCE)
    assert (record.outcome, record.stage) == (Outcome.MEMORY, "transform")


def test_after_a_failure_the_next_case_starts_afresh() -> None:
    run_check = runner(BadReverse)
    assert run_check(Check.ROUND_TRIP).outcome is Outcome.FAIL
    assert run_check(Check.EQUIVALENCE).outcome is Outcome.PASS


def test_the_graphs_of_the_last_pipeline_are_let_go(request: pytest.FixtureRequest) -> None:
    gc.disable()  # what collects now and then by itself proves nothing
    request.addfinalizer(gc.enable)
    subject = Subject(entry(), "cpu", {"Inverse": Inverse(), "Rough": Rough()})
    first = weakref.ref(subject.rewritten(("Inverse",), torch.float32).module)
    subject.rewritten(("Rough",), torch.float32)
    assert first() is None


def test_a_known_failure_is_expected_and_its_absence_a_failure() -> None:
    known = [
        {"check": check, "pipeline": "AlmostInverse", "reason": "too rough"}
        for check in ("equivalence", "effect")
    ]
    run_check = runner(AlmostInverse, known_failures=known)
    expected, missing = run_check(Check.EQUIVALENCE), run_check(Check.EFFECT)
    assert expected.outcome is Outcome.EXPECTED
    assert expected.reason.startswith("too rough (fail: in float64")
    assert missing.outcome is Outcome.FAIL
    assert "known_failures" in missing.reason


def test_models_and_inputs_are_the_same_every_time() -> None:
    first, second = (build.build_model(entry()) for _ in range(2))
    assert all(
        torch.equal(a, b)
        for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )
    assert torch.equal(build.make_inputs(entry())["x"], build.make_inputs(entry())["x"])


def test_pretrained_weights_come_from_a_folder_as_they_are(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    saved = transformers.BertModel(config)
    saved.save_pretrained(tmp_path)
    weights = {"source": "pretrained", "folder": str(tmp_path)}
    fields = {
        "name": "bert",
        "model": "BertModel",
        "weights": weights,
        "inputs": {"input_ids": {"shape": [1, 2]}},
    }
    loaded = build.build_model(Entry.model_validate(fields))
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in saved.state_dict().items())
    assert not loaded.training


def test_statistics_scales_and_biases_are_random() -> None:
    norm = build.build_model(entry()).norm
    for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
        assert len(tensor.unique()) == 6


def test_a_padding_mask_has_ragged_rows() -> None:
    fields = {"inputs": {"x": {"shape": [4, 8], "padding": True}}}
    assert build.make_inputs(entry(**fields))["x"].sum(1).tolist() == [8, 6, 4, 2]


def test_a_model_learns_the_digits() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    assert digits.accuracy(model, torch.float32, "cpu", 250) < 0.3
    digits.train(model, seed=0)
    assert digits.accuracy(model, torch.float32, "cpu", 250) > 0.93
    assert not model.training
