"""A failing case has a script that shows it alone and says which pass and site are wrong, and a command that repeats it."""

from __future__ import annotations

import itertools
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fxopt import FuseBiasInLinear, MergeLinears, RemoveIdentity, Transformation
from tests.validation.test_harness import ONE_PASS, ROOT, Harness, harness  # noqa: F401
from tests.validation.wrong_passes import ForgetsBias, Wrong, WrongAndInexact, WrongReverse
from validation.commands.cli import app
from validation.records import Case, Check, Outcome, Record
from validation.running.run import Runner
from validation.zoo.entry import Entry
from validation.zoo.plan import plan
from validation.zoo.sources import load_zoo

DEEP = {
    "model": "tests.validation.wrong_passes.Deep",
    "sizes": "fixed",
    "inputs": {"input": {"shape": [5, 6]}},
}
PARTS = {"model": "tests.validation.wrong_passes.Parts", "sizes": "fixed", "inputs": {"x": {"shape": [5, 4]}}}


def records(fields: object, passes: Mapping[str, Transformation], *cases: tuple[Check, str]) -> list[Record]:
    entry = Entry.model_validate({"name": "planted", **fields})  # type: ignore[dict-item]
    runner = Runner([entry], passes)
    return [
        runner.run(Case(entry.name, tuple(filter(None, pipeline.split("+"))), "cpu", check))
        for check, pipeline in cases
    ]


def ending(text: str, tmp_path: Path) -> int:
    """Run a script in this process, and give what it ends with."""
    file = tmp_path / "script.py"
    file.write_text(text)
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(file))
    return int(caught.value.code or 0)


@pytest.mark.long
def test_a_script_names_the_pass_and_the_site(tmp_path: Path) -> None:
    passes = {
        "A": RemoveIdentity(),
        "B": MergeLinears(),
        "C": ForgetsBias(of=("8",)),
        "D": FuseBiasInLinear(),
    }
    (record,) = records(DEEP, passes, (Check.EQUIVALENCE, "A+B+C+D"))
    assert record.outcome is Outcome.FAIL
    file = tmp_path / "script.py"
    file.write_text(record.repro)
    run = subprocess.run([sys.executable, str(file)], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1, run.stderr
    assert "wrong: in float64, output differs by" in run.stdout
    assert "ForgetsBias(of=('8',)) is wrong, already at 1 of its 13 sites (_8)" in run.stdout
    assert "it first diverges at node pad (module 8" in run.stdout
    assert ending(record.repro.replace("of=('8',)", "of=()"), tmp_path) == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("check", "pass_", "right"),
    [
        (Check.EQUIVALENCE, Wrong("it remembers its first result"), "RemoveIdentity()"),
        (Check.EQUIVALENCE, Wrong("it divides zero by zero"), "RemoveIdentity()"),
        (Check.ACCURACY, WrongAndInexact("a list becomes a tuple"), "RemoveIdentity()"),
        (Check.EQUIVALENCE, Wrong("an output is laid out otherwise"), "RemoveIdentity()"),
    ],
    ids=["wrong on other values", "wrong at a site", "wrong in form", "wrong in strides"],
)
def test_a_script_ends_with_1_until_the_pass_is_right(
    check: Check, pass_: Wrong, right: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    (record,) = records(PARTS, {"A": pass_}, (check, "A"))
    assert record.outcome is Outcome.FAIL
    text = record.repro.replace(f"[{pass_!r}]", "[fxopt.RemoveIdentity()]")
    assert text != record.repro
    assert ending(text, tmp_path) == 0
    if pass_ == Wrong("it divides zero by zero"):
        with pytest.raises(UserWarning, match="differs by inf"):
            ending(record.repro, tmp_path)
    else:
        assert ending(record.repro, tmp_path) == 1


def test_a_script_of_a_round_trip(tmp_path: Path) -> None:
    (record,) = records(PARTS, {"A": WrongReverse("a hook is left")}, (Check.ROUND_TRIP, "A"))
    file = tmp_path / "script.py"
    file.write_text(record.repro)
    with pytest.raises(AssertionError, match="the round trip is not exact"):
        runpy.run_path(str(file))
    assert ending(record.repro.replace("a hook is left", ""), tmp_path) == 0


@pytest.mark.long
def test_of_transformers_weights_and_inputs_are_those_of_the_case(tmp_path: Path) -> None:
    bert = {
        "model": "BertModel",
        "config": {
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 8,
        },
        "inputs": {
            "input_ids": {"shape": [2, 8], "integers": [1, 20]},
            "attention_mask": {"shape": [2, 8], "padding": True},
        },
    }
    pass_ = ForgetsBias(of=("encoder.layer.0.output.dense",))
    (record,) = records(bert, {"A": pass_}, (Check.EQUIVALENCE, "A"))
    assert "site-packages" not in record.repro
    assert "needs torch, fxopt, tests and transformers alone" in record.repro
    (error,) = re.findall(r"differs by (\S+) of its largest value", record.reason)[:1]
    file = tmp_path / "script.py"
    file.write_text(record.repro.replace("print(verdict)", f"assert {error!r} in str(verdict), verdict"))
    with pytest.raises(SystemExit):
        runpy.run_path(str(file))


def test_a_command_is_of_one_case() -> None:
    cases = plan(*load_zoo(ROOT / "model_zoo.yaml"), ["cpu", "cuda"])
    ids = {
        model: [c.id.lower() for c in group] for model, group in itertools.groupby(cases, lambda c: c.model)
    }
    text = {model: "\n".join(names) for model, names in ids.items()}
    assert all(text[model].count(name) == 1 for model, names in ids.items() for name in names)


@pytest.mark.long
def test_a_failure_has_the_command_that_runs_its_case_alone(
    harness: Harness,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    harness.zoo("Error", "Good")
    harness.run(*ONE_PASS, "-k", "error and equivalence")
    # Where CI is set, pytest's summary gives the whole reason a second time.
    (command,) = set(re.findall(r"^again: (.*)", capsys.readouterr().out, re.MULTILINE))
    assert [file.name for file in (harness.folder / "reports/latest/repro").glob("*")] == [
        "error-FuseBiasInLinear-cpu-equivalence.py"
    ]
    found = CliRunner().invoke(app, [*shlex.split(command)[1:], "--collect-only", "-q"])
    assert found.exit_code == 0, found.output
    out = found.output + capsys.readouterr().out
    assert [line for line in out.splitlines() if "::" in line] == [
        "validation/test_cases.py::test_case[error-FuseBiasInLinear-cpu-equivalence]"
    ]
