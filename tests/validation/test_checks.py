"""Each check passes what is right and fails what is wrong: the faults here are planted."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Node

import fxopt
from fxopt import Transformation
from tests.validation.planted import (
    AlmostInverse,
    BadReverse,
    BadUnmarkedReverse,
    ChangeInPlace,
    ForgetBatchNorm,
    ForgetBias,
    Idle,
    Inverse,
    MarkOnly,
    MulToAdd,
    Negate,
    Overflow,
    Refuses,
    ReplaceFirst,
    Rough,
    RoundUnmarked,
    RoundWeights,
    Tolerant,
    Unmarked,
    run,
    run_pipeline,
)
from validation import checks
from validation.judging import subject
from validation.judging.comparison import difference
from validation.judging.rewritten import sites_of
from validation.judging.subject import Subject
from validation.records import Check, Outcome


def test_every_check_has_a_file() -> None:
    assert set(checks.available()) == set(Check)


def test_parity_passes_and_counts_what_it_compared() -> None:
    finding = run(Check.PARITY)
    assert finding.outcome is Outcome.PASS
    assert (finding.measurements["tensors_compared"], finding.measurements["values_compared"]) == (1, 15)


def test_a_graph_is_captured_in_the_grad_mode_in_which_it_is_run() -> None:
    assert run(Check.PARITY, model="ReadsGradMode").outcome is Outcome.PASS


def test_parity_fails_when_the_graph_computes_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Subject.traced
    monkeypatch.setattr(
        Subject, "traced", lambda self, dtype: AlmostInverse()(copy.deepcopy(traced(self, dtype)))
    )
    finding = run(Check.PARITY)
    assert finding.outcome is Outcome.FAIL
    assert "in float64, output.logits differs by 1e-07 of its largest value" in finding.reason


@pytest.mark.parametrize(("model", "outcome"), [("Net", Outcome.PASS), ("OneSize", Outcome.FAIL)])
def test_sizes_that_are_said_to_be_free_are_tried(model: str, outcome: Outcome) -> None:
    free = {"dynamic_shapes": {"x": {0: "rows"}}}
    finding = run(Check.PARITY, model=model, **free)
    assert finding.outcome is outcome, finding.reason
    assert finding.reason.startswith("the graph was captured for other sizes" if model == "OneSize" else "")


def test_a_difference_is_relative_to_the_largest_value_of_a_tensor() -> None:
    expected = {"a": torch.tensor([2.0, 4.0])}
    assert difference(expected, {"a": torch.tensor([2.0, 4.5])}, 0.2) == ""
    assert (
        difference(expected, {"a": torch.tensor([2.0, 4.5])}, 0.1)
        == "output.a is 0.125 of its largest value off"
    )
    assert difference(expected, [1], 1.0)


def test_an_output_with_nothing_to_compare_fails() -> None:
    finding = run(Check.PARITY, model="Nothing")
    assert finding.outcome is Outcome.FAIL
    assert "nothing was compared" in finding.reason


def test_an_output_that_is_not_finite_fails() -> None:
    finding = run(Check.PARITY, model="NotFinite")
    assert finding.outcome is Outcome.FAIL
    assert "not finite" in finding.reason


@pytest.mark.parametrize("pass_", [Inverse, ReplaceFirst])
def test_equivalence_passes_a_right_rewrite(pass_: type[Transformation]) -> None:
    finding = run(Check.EQUIVALENCE, pass_, dtype="bfloat16")
    assert finding.outcome is Outcome.PASS, finding.reason
    assert finding.measurements["relative_error_float64"] <= 1e-15
    assert finding.measurements["relative_error"] > 1e-5
    assert run(Check.EQUIVALENCE, pass_).measurements["relative_error"] < 1e-5


@pytest.mark.parametrize("pass_", [AlmostInverse, ForgetBias, ForgetBatchNorm])
def test_equivalence_fails_a_wrong_rewrite(pass_: type[Transformation]) -> None:
    finding = run(Check.EQUIVALENCE, pass_)
    assert finding.outcome is Outcome.FAIL
    assert "in float64, output.logits" in finding.reason
    assert "was rolled back: " in finding.reason


@pytest.mark.parametrize(("error", "outcome"), [(1e-6, Outcome.PASS), (1e-8, Outcome.FAIL)])
def test_a_tolerance_of_the_zoo_holds_for_its_pipeline(error: float, outcome: Outcome) -> None:
    said = {"pipeline": "AlmostInverse", "relative_error": error, "reason": "a divisor in float32"}
    found = run(Check.EQUIVALENCE, AlmostInverse, tolerances=[said])
    assert (found.outcome, found.measurements["tolerance_float64"]) == (outcome, max(error, 1e-9))
    other = run(Check.EQUIVALENCE, AlmostInverse, tolerances=[{**said, "pipeline": "Inverse"}])
    assert other.outcome is Outcome.FAIL


def test_equivalence_of_an_idle_pass_is_no_op() -> None:
    assert run(Check.EQUIVALENCE, Idle).outcome is Outcome.NO_OP


def test_round_trip_passes_an_exact_undo() -> None:
    finding = run(Check.ROUND_TRIP, Inverse)
    assert finding.outcome is Outcome.PASS
    assert finding.measurements["values_compared"] > 50
    half = run(Check.ROUND_TRIP, Inverse, dtype="bfloat16")
    assert half.measurements["values_compared"] == finding.measurements["values_compared"]


def test_round_trip_undoes_in_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "undo", lambda module, steps: module)
    with pytest.raises(AssertionError, match="by `undo`, "):
        run(Check.ROUND_TRIP, Inverse)


def test_round_trip_fails_an_undo_that_is_almost_exact() -> None:
    finding = run(Check.ROUND_TRIP, BadReverse)
    assert finding.outcome is Outcome.FAIL
    assert "differs from the graph module before the pass, because some changes" in finding.reason


def test_effect_counts_what_was_done() -> None:
    finding = run(Check.EFFECT, ForgetBatchNorm)
    measured = finding.measurements
    assert finding.outcome is Outcome.PASS
    assert (measured["sites"], measured["refused"]) == (1, 0)
    assert measured["nodes_before"] - measured["nodes_after"] == 1


@pytest.mark.parametrize(
    ("pass_", "reason"),
    [
        (ChangeInPlace, "shares with the user's model: first.bias"),
        (MarkOnly, "the graph module is the same"),
    ],
)
def test_effect_fails_a_pass_that_says_one_thing_and_does_another(
    pass_: type[Transformation], reason: str
) -> None:
    finding = run(Check.EFFECT, pass_)
    assert finding.outcome is Outcome.FAIL
    assert reason in finding.reason


@pytest.mark.parametrize(
    ("pipeline", "sites"),
    [
        ([MulToAdd], 1),
        ([Unmarked], 1),
        ([RoundWeights], 2),
        ([RoundUnmarked], 1),
        ([Idle, RoundUnmarked], 1),
        ([Inverse, RoundUnmarked], 2),
        ([RoundUnmarked, Idle], 1),
    ],
)
def test_effect_goes_by_what_changed_and_not_by_marks(
    pipeline: list[type[Transformation]], sites: int
) -> None:
    finding = run_pipeline(Check.EFFECT, *pipeline)
    assert finding.outcome is Outcome.PASS, finding.reason
    assert finding.measurements["sites"] == sites


def test_effect_of_passes_that_all_find_nothing_is_no_op() -> None:
    assert run_pipeline(Check.EFFECT, Idle, Refuses).outcome is Outcome.NO_OP


def test_what_marks_nothing_is_compared_like_others() -> None:
    assert run(Check.EQUIVALENCE, Unmarked).outcome is Outcome.PASS
    assert run(Check.EQUIVALENCE, RoundUnmarked).outcome is Outcome.FAIL
    assert "the round trip is not exact" in run(Check.ROUND_TRIP, BadUnmarkedReverse).reason


@pytest.mark.parametrize(
    ("pass_", "count", "outcome"),
    [
        (Inverse, 1, Outcome.PASS),
        (Inverse, None, Outcome.PASS),
        (Inverse, 2, Outcome.FAIL),
        (Inverse, 0, Outcome.FAIL),
        (Idle, 0, Outcome.NO_OP),
        (Idle, None, Outcome.NO_OP),
        (Idle, 1, Outcome.FAIL),
    ],
)
def test_effect_holds_sites_against_those_recorded(
    pass_: type[Transformation], count: int | None, outcome: Outcome
) -> None:
    assert run(Check.EFFECT, pass_).outcome is (Outcome.PASS if pass_ is Inverse else Outcome.NO_OP)
    finding = run(Check.EFFECT, pass_, sites={pass_.__name__: count})
    assert finding.outcome is outcome
    if outcome is Outcome.FAIL:
        found = int(pass_ is Inverse)
        assert f"{pass_.__name__} rewrites {found} sites in net, {count} are recorded" in finding.reason
        assert "`fxopt zoo sites --model net` records it anew" in finding.reason


def test_effect_says_why_most_sites_were_refused() -> None:
    finding = run(Check.EFFECT, Refuses, sites={"Refuses": 3})
    assert "3 are recorded; refused 2 times: too wide. If" in finding.reason


def test_accuracy_measures_a_small_change() -> None:
    finding = run(Check.ACCURACY, Tolerant)
    assert finding.outcome is Outcome.PASS
    assert finding.measurements["agreement"] == 1
    assert finding.measurements["relative_error"] == pytest.approx(1e-3, rel=1e-2)
    assert run(Check.ACCURACY, Tolerant, dtype="bfloat16").measurements["agreement"] == 1


def test_a_pass_that_moves_the_outputs_and_states_no_tolerance_is_not_found_right() -> None:
    finding = run(Check.ACCURACY, Rough)
    assert finding.outcome is Outcome.UNJUDGED
    assert finding.reason == "the outputs moved by 0.001 of their norm; Rough states no `tolerance`"
    said = {"pipeline": "Rough", "relative_error": 1e-2, "reason": "a coarse divisor"}
    assert run(Check.ACCURACY, Rough, tolerances=[said]).outcome is Outcome.PASS


def test_sites_are_those_that_a_pass_rewrote_whatever_it_marks() -> None:
    for pairs in (1, 2, 5):
        layers = [layer for _ in range(pairs) for layer in (nn.Linear(4, 4), nn.ReLU(), nn.ReLU())]
        graph = fxopt.trace(nn.Sequential(*layers).eval(), (torch.randn(2, 4),))
        pass_ = RemoveRepeatedReLU()
        assert sites_of(pass_, graph, pass_(copy.deepcopy(graph))) == pairs


@dataclasses.dataclass(frozen=True)
class RemoveRepeatedReLU(fxopt.ReversibleRewrite):
    """Its `apply` returns nothing, so that no node is marked."""

    preserves_computation = True

    def match(self, graph_module: GraphModule) -> Iterator[Node]:
        calls = graph_module.graph.find_nodes(op="call_module")
        relus = [node for node in calls if type(graph_module.get_submodule(node.target)) is nn.ReLU]
        yield from (node for node in relus if node.all_input_nodes[0] in relus)

    def apply(self, rewriter: fxopt.Rewriter, site: Node) -> None:
        rewriter.replace_uses(site, site.all_input_nodes[0])
        rewriter.erase(site)


@pytest.mark.parametrize(
    ("pass_", "model", "reason"),
    [
        (Negate, "Net", "moved by 2 of their norm, the limit is 0.01"),
        (Overflow, "Net", "not finite where the original is"),
        (Rough, "NotFinite", "output is not finite"),
    ],
)
def test_accuracy_fails_a_model_that_is_ruined(pass_: type[Transformation], model: str, reason: str) -> None:
    finding = run(Check.ACCURACY, pass_, model=model)
    assert finding.outcome is Outcome.FAIL
    assert reason in finding.reason
