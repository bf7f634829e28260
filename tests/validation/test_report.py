from __future__ import annotations

import dataclasses
import datetime
import html.parser
import math
import re

import pytest
from markdown_it import MarkdownIt

from tests.validation.written import table_of
from validation import report, store
from validation.records import Case, Check, Outcome, Record
from validation.report import headline, markdown, tables, wording
from validation.report import html as html_view

CASE = Case("bert", ("MergeLinears",), "cpu", Check.EQUIVALENCE)


def written(records, run, directory, planned=None):
    planned = planned or [record.case.id for record in records]
    return report.write_run(store.table_of(records, run), directory, planned)


def failed_write(*args, **kwargs):
    raise OSError("no space left on device")


# --- writing a run -------------------------------------------------------------------------------------


def test_a_run_writes_every_view_and_the_history(records, run, tmp_path):
    done = written(records, run, tmp_path)
    files = done.files
    assert done.problems == []
    names = {str(file.relative_to(tmp_path)) for file in files}
    assert names == {
        "latest/records.parquet",
        "latest/summary.md",
        "latest/report.html",
        *(f"latest/compatibility/{model}.md" for model in ("bert-base", "groupvit", "resnet-50")),
        *(
            f"latest/passes/{name}.md"
            for name in {"+".join(r.case.pipeline) for r in records}
            if name and "+" not in name
        ),
        f"history/{run.id}.parquet",
    }
    assert all(file.stat().st_size > 100 for file in files)


def test_views_come_from_the_table_alone(records, run, tmp_path):
    written(records, run, tmp_path / "first")
    again = tmp_path / "again"
    files = report.write_views(store.read_run(tmp_path / "first" / "latest"), again).files
    assert {file.parent.name for file in files} == {"again", "compatibility", "passes"}
    for file in files:
        assert file.read_bytes() == (tmp_path / "first/latest" / file.relative_to(again)).read_bytes()


@pytest.mark.parametrize(
    ("module", "view", "file"),
    [
        (html_view, "document", "report.html"),
        (markdown, "summary", "summary.md"),
        (markdown, "compatibility", "compatibility/groupvit.md"),
    ],
)
def test_a_view_that_fails_costs_nothing_but_itself(
    module, view, file, records, run, tmp_path, monkeypatch, later
):
    written(records[:3], run, tmp_path)
    monkeypatch.setattr(module, view, failed_write)
    done = written(records, later, tmp_path)
    assert f"{tmp_path}/latest/{file}: not written: OSError: no space left on device" in done.problems
    assert not (tmp_path / "latest" / file).exists()  # the one of the run before would mislead
    assert set(store.read_run(tmp_path / "latest")["run"]) == {later.id}
    assert len(store.history(tmp_path / "history")["run"].unique()) == 2


def test_a_run_of_a_part_takes_the_place_of_its_own_cases_and_is_no_night(records, run, tmp_path):
    planned = [record.case.id for record in records]
    run = dataclasses.replace(run, plan=store.plan_of(planned))
    written(records, run, tmp_path)
    again = dataclasses.replace(records[0], outcome=Outcome.FAIL, reason="new")
    later = dataclasses.replace(run, started=run.started + datetime.timedelta(days=1))
    written([again], later, tmp_path, planned)
    latest = store.read_run(tmp_path / "latest").set_index("id")
    assert sorted(latest.index) == sorted(planned)
    assert latest["run"].value_counts().to_dict() == {run.id: len(records) - 1, later.id: 1}
    assert latest.loc[again.case.id, "reason"] == "new"
    assert set(store.history(tmp_path / "history")["run"]) == {run.id}


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("commit", "b0bb1e00", "commit (acf9a7c1, b0bb1e00)"),
        ("torch", "2.14.0", "torch (2.13.0, 2.14.0)"),
        ("options", " --zoo other.yaml", "options (none, --zoo other.yaml)"),
    ],
)
def test_a_part_of_another_commit_leaves_the_last_run_alone(field, value, told, records, run, tmp_path):
    run = dataclasses.replace(run, plan=store.plan_of([record.case.id for record in records]))
    written(records, run, tmp_path)
    before = {file: file.read_bytes() for file in (tmp_path / "latest").rglob("*.*")}
    old = dataclasses.replace(run, started=run.started + datetime.timedelta(days=1), **{field: value})
    done = written([records[0]], old, tmp_path, [records[0].case.id])
    assert {file: file.read_bytes() for file in (tmp_path / "latest").rglob("*.*")} == before
    assert store.read_run(tmp_path / "part")["id"].tolist() == [records[0].case.id]
    text = report.terminal_summary(store.read_run(tmp_path / "part"), done)
    assert f"these differ in {told}. This part is in {tmp_path}/part." in text
    planned = [record.case.id for record in records]
    written(records[1:3], old, tmp_path, planned)
    assert len(store.read_run(tmp_path / "part")) == 3
    done = written(records[3:], old, tmp_path, planned)
    assert (done.stays, set(store.read_run(tmp_path / "latest")[field])) == ("", {value})
    assert not (tmp_path / "part").exists()
    written([records[0]], run, tmp_path, planned)
    written(records, dataclasses.replace(old, started=old.started + datetime.timedelta(days=1)), tmp_path)
    assert (tmp_path / "part").exists(), "of yet another run"
    written(records, run, tmp_path)
    assert not (tmp_path / "part").exists(), "the whole run"


def test_a_run_of_a_part_says_so(records, run, tmp_path):
    planned = [record.case.id for record in records]
    part = dataclasses.replace(run, plan=store.plan_of(planned))
    written(records[:3], part, tmp_path)
    assert f"Partial: {len(records) - 3} planned cases" in (tmp_path / "latest/summary.md").read_text()
    assert not (tmp_path / "history").exists()
    gone = dataclasses.replace(records[5], case=dataclasses.replace(records[5].case, model="gone"))
    written([gone], part, tmp_path)
    written(records[3:4], part, tmp_path, planned)
    assert "gone" not in set(store.read_run(tmp_path / "latest")["model"])


@pytest.mark.parametrize("outcome", Outcome)
def test_a_single_record_without_measurements_can_be_reported(outcome, run, tmp_path):
    written([Record(CASE, outcome)], run, tmp_path)
    word = "not run" if outcome is Outcome.SKIP else outcome
    assert word in (tmp_path / "latest/summary.md").read_text()


# --- tables --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("effect", "verdict"), [(Outcome.FAIL, "fail"), (Outcome.NO_OP, "no-op")])
def test_a_verdict_is_of_all_checks(effect, verdict, run, tmp_path):
    ends = {Check.EQUIVALENCE: Outcome.PASS, Check.EFFECT: effect, Check.LATENCY: Outcome.SKIP}
    records = [Record(dataclasses.replace(CASE, check=check), end) for check, end in ends.items()]
    assert tables.verdicts(table_of(records, run, tmp_path))["verdict"].tolist() == [verdict]


def test_the_matrix_has_a_word_for_every_model_and_pass(table):
    matrix = tables.matrix(table).set_index("passes")
    assert matrix.loc["MergeLinears", "bert-base · cpu"] == "crash"
    assert matrix.loc["MergeLinears", "bert-base · cuda"] == "pass"
    assert matrix.loc["FuseBatchNorm2dInConv2d → FuseBiasInLinear", "bert-base · cpu"] == wording.ABSENT
    assert matrix.index[0] == wording.NO_PASS


def test_failures_come_with_stage_and_reason_the_worst_first(table):
    problems = tables.problems(table)
    assert problems["outcome"].tolist() == ["crash", "out-of-memory", "timeout", "error", "fail"]
    assert problems["reason"].iloc[0] == "the worker died and sent nothing back"
    assert problems["stage"].tolist() == ["", "transform", "transform", "transform", "compare"]


def test_one_reason_is_one_row_and_the_simplest_case_comes_first(run, tmp_path):
    cases = [dataclasses.replace(CASE, check=check) for check in (Check.LATENCY, Check.EQUIVALENCE)]
    cases += [dataclasses.replace(CASE, pipeline=(), check=Check.PARITY)]
    cases += [dataclasses.replace(CASE, pipeline=("A", name), check=Check.EFFECT) for name in "BC"]
    records = [Record(case, Outcome.ERROR, case.check, "cannot be captured") for case in cases]
    problems = tables.problems(table_of(records, run, tmp_path))
    assert problems["cases"].tolist() == [5]
    assert problems.loc[0, "case"].startswith("bert-eager-cpu-parity, bert-MergeLinears")
    assert problems.loc[0, "case"].endswith(" and 2 more")
    assert problems.loc[0, "stage"] == "parity; equivalence; latency; effect"


def test_an_error_stands_beside_its_own_limit(table):
    view = tables.compatibility(table[table["model"] == "bert-base"]).set_index(["passes", "device"])
    row = view.loc[("MergeLinears", "cuda")]
    assert row["relative error (limit)"].endswith("e-07 (2.0e-06)")
    assert row["relative error float64 (limit)"].endswith("(1.0e-09)")
    assert not any("error original" in name or "max abs" in name for name in view.columns)


def test_a_refused_site_counts_once_however_many_checks_saw_it(run, tmp_path):
    refused = (("MergeLinears", "linear_1", "used elsewhere"), ("MergeLinears", "linear_2", "used elsewhere"))
    records = [
        Record(dataclasses.replace(CASE, check=check), Outcome.PASS, refusals=refused)
        for check in (Check.EFFECT, Check.EQUIVALENCE)
    ]
    refusals = tables.refusals(table_of(records, run, tmp_path))
    assert refusals[["pass", "reason", "sites"]].values.tolist() == [["MergeLinears", "used elsewhere", 2]]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("max_abs_error", 3.16e-7, "3.2e-07"),
        ("max_abs_error", 0.0, "0"),
        ("max_abs_error", 2.0, "2.0e+00"),
        ("max_abs_error", math.inf, "inf"),
        ("max_abs_error", math.nan, "-"),
        ("parameters_after", 109482240.0, "109,482,240"),
        ("latency_baseline_ms", 98.7654, "98.77"),
        ("sites", 0.0, "0"),
        ("cosine", 0.99996, "0.99996"),
        ("agreement", 1.0, "1"),
        ("tolerance", 2e-6, "2.0e-06"),
    ],
)
def test_numbers_as_text(name, value, text):
    assert wording.shown(name, value) == text


# --- Markdown ------------------------------------------------------------------------------------------


def rendered(text):
    return MarkdownIt("commonmark").enable("table").render(text)


def test_markdown_tables_stay_tables(table):
    for page in (
        markdown.summary(table),
        *(markdown.compatibility(table, m, "model") for m in table["model"].unique()),
    ):
        rows = [line for line in page.splitlines() if line.startswith("|")]
        assert rendered(page).count("<tr>") == len(rows) - len(re.findall(r"^\|[ :|-]+\|$", page, re.M))


def test_the_summary_has_every_section_that_has_something_to_say(table):
    sections = [
        "Failures",
        "Verdicts",
        "Failed as expected",
        "Why sites were refused",
    ]
    assert re.findall("^## (.*)$", markdown.summary(table), re.M) == sections


def test_a_page_of_a_pass_says_where_it_rewrites_and_what_it_refuses(run, tmp_path):
    found = dataclasses.replace(CASE, check=Check.EFFECT)
    other = dataclasses.replace(found, model="t5")
    records = [
        Record(
            found,
            Outcome.PASS,
            measurements={"sites": 2.0, "relative_error": 1e-7, "tolerance": 1e-4, "latency_ratio": 0.8},
            facts={"places": '["query (in layer.0, from bert.py:12)", "key (in layer.0, from bert.py:13)"]'},
            refusals=((CASE.pipeline[0], "value", "it has hooks"),),
        ),
        Record(other, Outcome.NO_OP, measurements={"sites": 0.0}),
    ]
    written(records, run, tmp_path)
    name = CASE.pipeline[0]
    page = rendered((tmp_path / f"latest/passes/{name}.md").read_text())
    for text in ("query (in layer.0, from bert.py:12)", "it has hooks", "1.0e-07 (1.0e-04)", "0.800", "t5"):
        assert text in page
    assert f"[{name}](passes/{name}.md)" in (tmp_path / "latest/summary.md").read_text()


def test_markup_in_a_reason_is_text_in_markdown(table):
    page = rendered(markdown.summary(table))
    assert "<script>" not in page
    assert "logits differ by 3.2e-01, more than 1e-09 | see &lt;b&gt;node&lt;/b&gt; `mul_3`" in page


@pytest.mark.parametrize(
    "text", ["__rsub__", "a|b", "*x*", "[a](b)", r"a\|b", "<b>", "&amp;", "`x", "a_b_c", "~~x~~"]
)
def test_escaped_text_reads_as_written(text):
    cell = re.search(r"<td>(.*)</td>", rendered(f"| a |\n|---|\n| {markdown.escape(text)} |\n"))
    assert cell is not None
    assert html_text(cell[1]) == text


def html_text(source):
    parts = []
    parser = html.parser.HTMLParser()
    parser.handle_data = parts.append
    parser.feed(source)
    assert "<" not in source
    return "".join(parts)


def test_links_of_the_summary_lead_to_the_pages(records, run, tmp_path):
    written(records, run, tmp_path)
    links = re.findall(r'href="([^"]+)"', rendered((tmp_path / "latest/summary.md").read_text()))
    assert {"compatibility/bert-base.md", "passes/MergeLinears.md"} <= {*links}
    assert all((tmp_path / "latest" / link).is_file() for link in links)


# --- the headline, the fastest pipelines, and what changed ----------------------------------------------


def test_what_was_not_run_is_no_case_and_is_told_once(run, tmp_path):
    cases = [dataclasses.replace(CASE, model=name) for name in ("a-b", "c-d", "e-f")]
    missing = "timm cannot be imported"
    records = [
        Record(cases[0], Outcome.PASS),
        *(Record(case, Outcome.SKIP, "", missing) for case in cases[1:]),
    ]
    table = table_of(records, run, tmp_path)
    assert headline.verdict(table) == "No case of 1 failed"
    assert headline.not_run(table) == ["2 cases of 2 models not run: timm cannot be imported"]
    assert markdown.summary(table).count(missing) == 1
    assert "c-d" not in markdown.summary(table)
    cases.append(dataclasses.replace(CASE, model="g-h"))
    other = table_of([*records, Record(cases[-1], Outcome.SKIP, "", "it has died")], run, tmp_path)
    assert headline.not_run(other) == ["3 cases of 3 models not run; the commonest reason: " + missing]


def test_a_report_says_what_changed_since_the_run_before(records, run, tmp_path, later):
    written(records, run, tmp_path)
    assert "regressions since" not in (tmp_path / "latest/summary.md").read_text()
    broken = [dataclasses.replace(records[0], outcome=Outcome.FAIL, reason="new"), *records[1:]]
    written(broken, later, tmp_path)
    page = (tmp_path / "latest/summary.md").read_text()
    assert "**1 cause of regressions since the run of 2026-01-02 (commit acf9a7c1).**" in page.splitlines()[2]
    assert "Dated after" not in page
    written(records, dataclasses.replace(run, started=run.started - datetime.timedelta(days=1)), tmp_path)
    page = (tmp_path / "latest/summary.md").read_text()
    assert "Dated after this run, and not compared: 2 runs of the history." in page
    part = dataclasses.replace(later, plan=store.plan_of([*(r.case.id for r in records), "more"]))
    written(
        records[:1], dataclasses.replace(part, started=later.started + datetime.timedelta(days=1)), tmp_path
    )
    page = (tmp_path / "latest/summary.md").read_text()
    assert "**Nothing got worse since the run of 2026-01-02 (commit acf9a7c1).**" in page, "the last good run"


# --- the terminal --------------------------------------------------------------------------------------


def test_the_terminal_shows_failures_first_then_counts_and_paths(table, tmp_path):
    text = report.terminal_summary(table, report.Written([tmp_path / "latest/report.html"]))
    assert text.index("MergeLinears crashes in bert-base") < text.index("report.html")
    assert "FuseBiasInLinear fails in bert-base: logits differ" in text
    assert "   fxopt validate --model bert-base -k bert-base-FuseBiasInLinear-cpu-equivalence" in text


def test_the_terminal_tells_only_of_the_cases_that_ran(records, run, tmp_path):
    whole = written(records, run, tmp_path)
    passing = [record for record in records if record.outcome is Outcome.PASS][:1]
    part = dataclasses.replace(run, plan=store.plan_of([r.case.id for r in records]))
    text = report.terminal_summary(table_of(passing, part, tmp_path / "part"), whole)
    assert "cause" not in text
    assert "No case of 1 failed" in text


def test_the_terminal_does_not_drown_in_failures(run, tmp_path):
    cases = [dataclasses.replace(CASE, pipeline=(f"Pass{number}",)) for number in range(200)]
    records = [Record(case, Outcome.FAIL, "", "why") for case in cases]
    text = report.terminal_summary(table_of(records, run, tmp_path), report.Written())
    assert text.count(" fails in ") == 20
    assert "180 more causes" in text
