"""One cause is one line, whatever it takes along: of each kind of fault that a night may bring."""

from __future__ import annotations

import dataclasses
import datetime
import sys

import pytest

from validation import store
from validation.records import UNTRIED, Case, Check, Outcome, Record
from validation.report import headline, markdown, worse_lines

MODELS = ("bert", "resnet", "whisper")
PIPELINES = ((), ("MergeLinears",), ("FuseBiasInLinear",), ("MergeLinears", "FuseBiasInLinear"), ("all",))
MEASURED = {
    "relative_error": 1e-7,
    "tolerance": 1e-4,
    "sites": 4.0,
    "apply_seconds": 0.05,
    "apply_memory_mb": 2.0,
    "trace_seconds": 1.0,
    "memory_peak_mb": 8.0,
    "cosine": 0.9999,
}


def night(run, number, faulty=lambda record: record):
    """The table of a whole run: each model, pipeline and check, as `faulty` changes it."""
    records = [
        Record(Case(model, pipeline, "cpu", check), Outcome.PASS, measurements=dict(MEASURED))
        for model in MODELS
        for pipeline in PIPELINES
        for check in (Check.EFFECT, Check.EQUIVALENCE)
    ]
    made = dataclasses.replace(
        run,
        started=run.started + datetime.timedelta(days=number),
        commit=f"c0ffee{number:02d}",
        plan=store.plan_of([record.case.id for record in records]),
    )
    return store.table_of([faulty(record) for record in records], made).to_pandas()


def measuring(pipeline, model="", check=None, **measurements):
    """A fault that changes measurements of the pipelines that hold a pass."""

    def faulty(record):
        held = pipeline in record.case.pipeline or (pipeline and record.case.pipeline == ("all",))
        own = held if pipeline else not record.case.pipeline
        if not own or model not in record.case.model or check not in (None, record.case.check):
            return record
        return dataclasses.replace(record, measurements=record.measurements | measurements)

    return faulty


def not_captured(record):
    if record.case.model != "bert":
        return record
    reason = "the value of `x.sum()` decides, at modeling_bert.py:312"
    return dataclasses.replace(record, outcome=Outcome.ERROR, stage="capture", reason=reason, measurements={})


def wrong(record):
    holds = "MergeLinears" in record.case.pipeline or record.case.pipeline in (("all",), ("deploy",))
    if not holds or record.case.check is not Check.EQUIVALENCE:
        return record
    reason = f"logits of {record.case.model} differ by 0.001"
    measurements = MEASURED | {"relative_error": 1e-3}
    return dataclasses.replace(
        record, outcome=Outcome.FAIL, stage="compare", reason=reason, measurements=measurements
    )


PLANTED = {
    "a capture that is refused": (
        not_captured,
        ["bert is not captured: the value of", "modeling_bert.py:312"],
    ),
    "a wrong pass": (wrong, ["MergeLinears fails in bert, resnet, whisper: logits of bert differ"]),
    "an error": (
        measuring("MergeLinears", relative_error=1e-5),
        ["MergeLinears, relative error: 1e-07 → 1e-05"],
    ),
    "accuracy": (
        measuring("MergeLinears", "bert", cosine=0.99),
        ["MergeLinears, cosine: 0.9999 → 0.99 in bert"],
    ),
    "sites": (measuring("FuseBiasInLinear", "bert", sites=2.0), ["FuseBiasInLinear, sites: 4 → 2 in bert"]),
    "memory": (
        measuring("MergeLinears", memory_peak_mb=12.0),
        ["MergeLinears, memory peak mb: 8 → 12"],
    ),
    "memory of a pass": (measuring("MergeLinears", apply_memory_mb=40.0), ["apply memory mb: 2 → 40"]),
    "time of a pass": (measuring("MergeLinears", apply_seconds=0.6), ["apply seconds: 0.05 → 0.6"]),
    "time of capture": (measuring("", trace_seconds=3.0), ["The graph, trace seconds: 1 → 3 in bert"]),
}


@pytest.mark.parametrize("name", PLANTED)
def test_one_planted_cause_is_one_line_until_it_is_mended(name, run):
    faulty, texts = PLANTED[name]
    good, bad, still = night(run, 0), night(run, 1, faulty), night(run, 2, faulty)
    for runs, table in (([good], bad), ([good, bad], still)):
        since = headline.since(table, runs)
        assert len(since.causes) == 1, [cause.text for cause in since.causes]
        assert all(text in since.causes[0].text for text in texts), since.causes[0].text
        assert since.causes[0].since == "c0ffee00..c0ffee01"
        first = markdown.summary(table, since).splitlines()[:9]
        assert f"1 cause of regressions since the run of {run.started:%Y-%m-%d} (commit c0ffee00)" in first[2]
        assert "fxopt validate --model" in first[4]
        # The case of a worse measurement passes at each commit.
        bisects = name in ("a capture that is refused", "a wrong pass")
        assert ("git bisect start c0ffee01 c0ffee00" in first[6]) == bisects
        assert ("bisect run sh -c 'COMMAND; s=$?; [ $s -gt 1 ] && exit 125; exit $s'" in first[6]) == bisects
        assert worse_lines(since)[1].startswith("1. ")
    assert not headline.since(night(run, 3), [good, bad, still]).causes


def test_a_named_pipeline_of_the_zoo_is_not_the_cause(run, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "PIPELINES", (*PIPELINES, ("deploy",)))
    (cause,) = headline.since(night(run, 1, wrong), [night(run, 0)]).causes
    assert cause.text.startswith("MergeLinears fails in bert, resnet, whisper")


def test_each_cause_has_the_commits_between_which_it_came(run):
    (first, _), second = PLANTED["memory"], not_captured
    nights = [night(run, 0), night(run, 1, first), night(run, 2, first)]
    since = headline.since(night(run, 3, lambda record: second(first(record))), nights)
    assert {cause.since for cause in since.causes} == {"c0ffee00..c0ffee01", "c0ffee02..c0ffee03"}
    assert headline.to_do(since).startswith("The commit of 1: `git bisect start c0ffee03 c0ffee02`")


def test_slower_graphs_of_optimize_are_one_line_with_the_commits_of_their_first_run(run):
    names = {("MergeLinears",): ("optimize",), ("FuseBiasInLinear",): ("optimize_int8",)}

    def optimized(record, ratio):
        name = names.get(record.case.pipeline) if record.case.check is Check.EFFECT else None
        measured = dict.fromkeys(("latency_ratio", "latency_ratio_low", "latency_ratio_high"), ratio)
        case = dataclasses.replace(record.case, pipeline=name)
        return dataclasses.replace(record, case=case, measurements=measured) if name else record

    ratios = [0.5] * 4 + [0.65] * 2
    nights = [night(run, number, lambda r, x=x: optimized(r, x)) for number, x in enumerate(ratios)]
    nights.append(night(run, 6, lambda record: optimized(wrong(record), 0.65)))
    since = headline.since(nights[-1], nights[:-1])
    failing, slower = since.causes
    assert failing.text.startswith("MergeLinears fails in bert, resnet, whisper")
    assert "optimize, optimize_int8, latency ratio: 0.500 → 0.650 (+30%) in bert" in slower.text
    assert (failing.since, slower.since) == ("c0ffee05..c0ffee06", "c0ffee03..c0ffee04")
    assert "The commit of 1: `git bisect start c0ffee06 c0ffee05`" in headline.to_do(since)
    assert "(commit c0ffee03)" in headline.got_worse(since), "the last night before the slower ones"
    assert "c0ffee04" not in headline.to_do(since)


def test_two_causes_are_two_lines_the_one_with_more_cases_first(run):
    def both(record):
        return not_captured(measuring("FuseBiasInLinear", "resnet", Check.EFFECT, sites=1.0)(record))

    since = headline.since(night(run, 1, both), [night(run, 0)])
    assert [cause.text.split(",")[0].split(" is")[0] for cause in since.causes] == [
        "bert",
        "FuseBiasInLinear",
    ]
    assert [cause.cases for cause in since.causes] == [10, 3]


def test_what_fails_comes_before_what_vanished(run):
    def failing(record):
        wanted = record.case.model == "bert" and record.case.pipeline == ("MergeLinears",)
        return wrong(record) if wanted else record

    bad = night(run, 1, failing)
    since = headline.since(bad[bad["model"] != "resnet"].assign(plan=""), [night(run, 0)])
    assert [cause.cases for cause in since.causes] == [1, 10]
    assert since.causes[0].text.startswith("MergeLinears fails in bert")


def test_the_command_names_the_zoo_and_passes_of_the_run(run):
    made = dataclasses.replace(run, options=" --zoo zoo.yaml --pass own.Pass")
    since = headline.since(night(made, 1, not_captured), [night(made, 0)])
    command = "fxopt validate --model bert -k bert-eager-cpu-equivalence --zoo zoo.yaml --pass own.Pass"
    assert since.causes[0].command == command


def test_no_pass_is_to_blame_where_the_graph_without_any_fails(run):
    def fails(record):
        if record.case.model != "bert":
            return record
        stage = "run the model" if not record.case.pipeline else "usable"
        case = record.case if record.case.pipeline else dataclasses.replace(record.case, check=Check.PARITY)
        return dataclasses.replace(
            record, case=case, outcome=Outcome.ERROR, stage=stage, reason="ValueError: broken\nin two lines"
        )

    (cause,) = headline.since(night(run, 0, fails), []).causes
    assert cause.text == "bert does not run: ValueError: broken in two lines"
    assert cause.models == ("bert",)


def dies(record, outcome=Outcome.CRASH):
    """Two cases of a pass end their process, and the others of the model are not tried."""
    if record.case.model != "bert":
        return record
    if record.case.pipeline == ("MergeLinears",):
        return dataclasses.replace(record, outcome=outcome, reason="the process ended itself with status 3")
    reason = f"{UNTRIED} bert-MergeLinears-cpu-effect, bert-MergeLinears-cpu-equivalence"
    return dataclasses.replace(record, outcome=Outcome.SKIP, reason=reason)


def test_cases_that_are_not_tried_belong_to_what_ended_the_process(run):
    (cause,) = headline.since(night(run, 1, dies), [night(run, 0)]).causes
    assert cause.text == "MergeLinears crashes in bert: the process ended itself with status 3"
    assert cause.cases == 10

    def raises(record):
        return dies(record, Outcome.ERROR) if record.case.pipeline == ("MergeLinears",) else record

    (cause,) = headline.since(night(run, 1, dies), [night(run, 0, raises)]).causes
    assert cause.text == f"bert: {UNTRIED} bert-MergeLinears-cpu-effect, bert-MergeLinears-cpu-equivalence"
    assert cause.command == "fxopt validate --model bert -k bert-MergeLinears-cpu-effect"


@pytest.mark.parametrize(
    ("stage", "name"),
    [
        ("transform FuseBiasInLinear", "FuseBiasInLinear"),
        ("time FuseBiasInLinear", "FuseBiasInLinear"),
        ("time captured", "The graph"),
    ],
)
def test_a_process_that_ends_in_the_arm_of_another_pass_is_that_pass_s(run, stage, name):
    def ends(record):
        if record.case == Case("whisper", ("MergeLinears",), "cpu", Check.EQUIVALENCE):
            return dataclasses.replace(record, outcome=Outcome.FAIL, reason="it differs")
        if record.case != Case("bert", ("MergeLinears",), "cpu", Check.EQUIVALENCE):
            return record
        return dataclasses.replace(record, outcome=Outcome.CRASH, stage=stage, reason="it ended")

    found = headline.since(night(run, 1, ends), [night(run, 0)]).causes
    assert {cause.text for cause in found} == {
        f"{name} crashes in bert: it ended in stage {stage}",
        "MergeLinears fails in whisper: it differs",
    }


def test_the_failures_of_a_first_run_are_grouped_too(run):
    since = headline.since(night(run, 0, not_captured), [])
    assert headline.got_worse(since) == "1 cause of failures"
    assert since.causes[0].cases == 10


def test_a_run_of_another_machine_says_what_is_not_compared(run):
    other = dataclasses.replace(run, devices={"cpu": "another one"})
    since = headline.since(night(run, 1, PLANTED["memory"][0]), [night(other, 0)])
    assert not since.causes
    assert (
        "The last good run was on another machine" in markdown.summary(night(run, 1), since).splitlines()[4]
    )


def test_a_new_model_that_fails_is_named_so_without_commits(run):
    good = night(run, 0)
    since = headline.since(night(run, 1, not_captured), [good[good["model"] != "bert"]])
    (cause,) = since.causes
    assert cause.text.startswith("New, and fails: bert is not captured: the value of")
    assert headline.told(cause) == "10 cases of 1 model"
    assert "bisect" not in headline.to_do(since)


def test_of_two_runs_of_one_commit_the_versions_changed(run):
    good = night(run, 0)
    for version, changed in (("2.14.0", "torch (2.13.0, 2.14.0)"), ("2.13.0", "no version")):
        bad = night(dataclasses.replace(run, torch=version), 1, wrong).assign(commit="c0ffee00")
        since = headline.since(bad, [good])
        assert f"both runs are of commit c0ffee00: {changed} changed" in headline.told(since.causes[0])
        assert "bisect" not in headline.to_do(since)
        assert ("torch 2.13.0 → 2.14.0" in headline.to_do(since)) == (version == "2.14.0")


def test_a_busy_machine_is_told(run):
    table = night(run, 0).assign(busy_percent=50.0)
    assert "The machine was busy in the time measurements of 3 models" in headline.not_run(table)[0]


def test_what_vanished_is_one_line(run):
    good = night(run, 0)
    part = good[good["model"] != "bert"]
    part = part.assign(plan="", commit="c0ffee01")
    since = headline.compared(good.assign(options=" --zoo zoo.yaml"), part)
    (cause,) = since.causes
    assert (cause.since, "bisect" in headline.to_do(since)) == ("c0ffee00..c0ffee01", False)
    assert cause.text == "bert: 10 cases vanished (only the earlier run has it)"
    assert cause.command == "fxopt accept bert --reason ...", "a model that the zoo lacks cannot run"
    kept = good.drop(good.index[good["model"] == "bert"][0]).assign(plan="", commit="c0ffee01")
    (cause,) = headline.compared(good.assign(options=" --zoo zoo.yaml"), kept).causes
    assert cause.command == "fxopt validate --model bert --zoo zoo.yaml"


def test_a_vanished_model_that_was_left_out_is_not_to_be_accepted(run):
    good = night(run, 0)
    names = good["model"].unique()
    left = good[good["model"] == names[0]].assign(plan="", left_out=f"{names[1]} (timm), other (rdkit)")
    since = headline.compared(good, left)
    gone, lacking = sorted(since.causes, key=lambda cause: "left out" in cause.text)
    assert gone.text == f"{names[2]}: 10 cases vanished (only the earlier run has it)"
    assert lacking.text == f"{names[1]}: 10 cases vanished (left out: timm is not installed)"
    assert lacking.command == f"fxopt validate --model {names[1]}"
    assert "fxopt accept" in headline.to_do(since)
    kept = good[good["model"] != names[1]].assign(plan="", left_out=f"{names[1]} (timm)")
    assert "fxopt accept" not in headline.to_do(headline.compared(good, kept))
