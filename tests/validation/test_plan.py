"""The plan: every model, pass and device, pairs of what has sites, and only checks that make sense."""

from __future__ import annotations

import random

import pytest
import torch
from torch.fx import GraphModule

from fxopt import ReversibleTransformation, Transformation
from fxopt.passes.change_precision import ChangePrecision
from validation.records import Case, Check
from validation.zoo.entry import Entry
from validation.zoo.plan import OPTIMIZED, checks, content, members, pipelines, plan, unmet
from validation.zoo.sources import Architecture


class Exact(ReversibleTransformation):
    preserves_computation = True

    def transform(self, graph_module: GraphModule) -> GraphModule:
        return graph_module

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        return graph_module


class OneWay(Transformation):
    preserves_computation = True

    def transform(self, graph_module: GraphModule) -> GraphModule:
        return graph_module


class Rough(Exact):
    preserves_computation = False


PASSES = {"Exact": Exact(), "OneWay": OneWay(), "Rough": Rough()}


def entry(name: str = "model", **sites: int | None) -> Entry:
    return Entry.model_validate(
        {
            "name": name,
            "model": "BertModel",
            "inputs": {"input_ids": {"shape": [1, 2]}},
            "sites": sites,
        }
    )


def test_every_model_pass_and_device_is_planned() -> None:
    cases = plan([entry("a"), entry("b", Exact=0)], PASSES, ["cpu", "cuda"])
    planned = {(case.model, case.device, name) for case in cases for name in case.pipeline}
    assert {(m, d, p) for m in "ab" for d in ("cpu", "cuda") for p in PASSES} <= planned
    traced = [(case.model, case.device) for case in cases if case.check is Check.PARITY]
    assert traced == [("a", "cpu"), ("a", "cuda"), ("b", "cpu"), ("b", "cuda")]


def test_the_plan_is_sorted_stable_and_has_no_case_twice() -> None:
    entries = [entry(name, Exact=1, OneWay=2, Rough=3) for name in "abc"]
    cases = plan(entries, PASSES, ["cpu"])
    random.Random(1).shuffle(entries)
    assert plan(entries, PASSES, ["cpu"]) == cases == sorted(cases)
    assert len({case.id for case in cases}) == len(cases)


def test_a_pass_without_sites_is_checked_for_its_effect_alone() -> None:
    assert checks(entry(Exact=0), ("Exact",), PASSES) == [Check.EFFECT]


def test_a_large_model_has_no_pairs_and_is_used_after_full_pipelines() -> None:
    small = entry(Exact=1, OneWay=5, Rough=0)
    large = small.model_copy(update={"large": True, "name": "large"})
    alone = [p for p in pipelines(small, PASSES) if len(p) < 2]
    assert pipelines(large, PASSES) == alone
    cases = plan([small, large], PASSES, ["cpu"])
    assert ("Exact", "OneWay") in {case.pipeline for case in cases if case.model == small.name}
    planned = [case for case in cases if case.model == "large"]
    assert {case.pipeline for case in planned} == {(), *alone}
    assert {c.pipeline for c in planned if c.check is Check.USABLE} == {
        (),
        *(p for p in alone if p[0] not in (*PASSES, *OPTIMIZED)),
    }
    assert ("Exact",) in {case.pipeline for case in planned if case.check is Check.LATENCY}


def test_a_pass_that_is_not_recorded_is_planned_in_full_but_not_in_pairs() -> None:
    model = entry(OneWay=1)
    assert Check.EQUIVALENCE in checks(model, ("Exact",), PASSES)
    assert not [pipeline for pipeline in pipelines(model, PASSES) if len(pipeline) == 2]
    assert members(model, ("all",), PASSES) == ("OneWay", "Exact", "Rough")
    assert members(entry(Rough=None, OneWay=1, Exact=None), ("all",), PASSES) == ("Rough", "OneWay", "Exact")


def test_the_full_pipelines_run_in_the_order_of_the_entry() -> None:
    model = entry(Rough=1, OneWay=1, Exact=1)
    assert members(model, ("all",), PASSES) == ("Rough", "OneWay", "Exact")
    assert members(model, ("exact",), PASSES) == ("OneWay", "Exact")


@pytest.mark.parametrize(
    ("pipeline", "expected"),
    [
        (("Exact",), {Check.EFFECT, Check.EQUIVALENCE, Check.ROUND_TRIP, Check.USABLE, Check.LATENCY}),
        (("OneWay",), {Check.EFFECT, Check.EQUIVALENCE, Check.USABLE, Check.LATENCY}),
        (("Rough",), {Check.EFFECT, Check.ACCURACY, Check.ROUND_TRIP, Check.USABLE, Check.LATENCY}),
        (("Exact", "OneWay"), {Check.EFFECT, Check.EQUIVALENCE}),
        (("Exact", "Rough"), {Check.EFFECT, Check.ACCURACY, Check.ROUND_TRIP}),
        (("all",), {Check.EFFECT, Check.ACCURACY, Check.USABLE, Check.LATENCY}),
        (("exact",), {Check.EFFECT, Check.EQUIVALENCE, Check.USABLE, Check.LATENCY}),
    ],
)
def test_checks_fit_the_pipeline(pipeline: tuple[str, ...], expected: set[Check]) -> None:
    assert set(checks(entry(Exact=1, OneWay=1, Rough=1), pipeline, PASSES)) == expected


def test_a_model_alone_is_compared_and_used() -> None:
    assert checks(entry(), (), PASSES) == [Check.PARITY, Check.USABLE, Check.LATENCY]


def test_a_model_of_a_sweep_goes_through_each_pass_alone_and_is_not_timed() -> None:
    swept = Architecture(name="bert", model="bert", source="some.where", peer=True)
    cases = plan([swept], PASSES, ["cpu"])
    assert {case.pipeline for case in cases} == {(), ("Exact",), ("OneWay",), ("Rough",)}
    assert {case.check for case in cases if not case.pipeline} == {Check.PARITY, Check.USABLE, Check.PEER}
    assert {case.check for case in cases if case.pipeline == ("Exact",)} == {
        *(Check.EFFECT, Check.EQUIVALENCE, Check.ROUND_TRIP)
    }


def test_a_known_failure_that_no_planned_case_has_is_a_mistake() -> None:
    failures = [
        {"check": "equivalence", "pipeline": "Exact", "device": "cuda", "reason": "right"},
        {"check": "equivalence", "pipeline": "*OneWay*", "reason": "right"},
        {"check": "latency", "pipeline": "Exact+OneWay", "reason": "pairs are not timed"},
        {"check": "equivalence", "pipeline": "Two*", "reason": "matches nothing"},
    ]
    tolerances = [{"pipeline": name, "relative_error": 0.1, "reason": "rough"} for name in ("Exact", "Exaxt")]
    accepted = {"known_failures": failures, "tolerances": tolerances}
    model = Entry.model_validate({**entry(Exact=1, OneWay=1).model_dump(), **accepted})
    assert unmet([model], PASSES, ["cpu", "cuda"]) == [
        "model: known_failures: no planned case is latency of 'Exact+OneWay'",
        "model: known_failures: no planned case is equivalence of 'Two*'",
        "model: tolerances: no planned case is of 'Exaxt'",
    ]


def test_the_content_of_a_case_is_its_definition_and_its_passes_with_their_options() -> None:
    case = Case("model", ("all",), "cpu", Check.EFFECT)
    here = content(case, entry(Exact=1, Rough=1), PASSES)
    assert here == content(case, entry(Exact=2, Rough=1), PASSES)  # how many sites it has is what it finds
    assert here != content(case, entry(Exact=1, Rough=0), PASSES)
    other = entry(Exact=1, Rough=1).model_copy(update={"config": {"hidden_size": 32}})
    assert here != content(case, other, PASSES)
    precisions = [{"Change": ChangePrecision(dtype=dtype)} for dtype in (torch.bfloat16, torch.float16)]
    of_pass = Case("model", ("Change",), "cpu", Check.EFFECT)
    assert len({content(of_pass, entry(), passes) for passes in precisions}) == 2


def test_ids_are_readable() -> None:
    case = Case("bert-base", ("MergeLinears",), "cpu", Check.EQUIVALENCE)
    assert case.id == "bert-base-MergeLinears-cpu-equivalence"
