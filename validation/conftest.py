"""The pytest layer: options, the plan as parameters, and time limits."""

from __future__ import annotations

import argparse
import faulthandler
import gc
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import fxopt.passes
from fxopt.rewriting.transformation import Transformation
from validation.gather import Notes, case_id, received, send
from validation.plan import members, plan
from validation.records import Case, Check, Outcome
from validation.run import Runner
from validation.sweep import SOURCES, Architecture, architectures
from validation.zoo import Entry, ZooError, load_zoo

ROOT = Path(__file__).resolve().parent.parent
CASES = pytest.StashKey[Mapping[str, Case]]()
LIMITS = pytest.StashKey[dict[str, float]]()
RUNNER = pytest.StashKey[Runner]()
NOTES = pytest.StashKey[Notes]()

MOST_RESTARTS = 200
"""xdist gives up after four dead workers a process; here a dead worker is a result like others."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fxopt validation")
    group.addoption(
        "--fx-zoo",
        default=str(ROOT / "model_zoo.yaml"),
        help="the zoo file, or `transformers`: every architecture that it has, small",
    )
    group.addoption("--fx-device", action="append", help="cpu or cuda, repeatable; default: all there are")
    group.addoption("--fx-pass", action="append", help="only pipelines with this pass, repeatable")
    group.addoption("--fx-tag", action="append", help="only models with this tag, repeatable")
    group.addoption("--fx-model", action="append", help="only the model of this name, repeatable")
    group.addoption(
        "--fx-part", type=_part, default=(1, 1), help="K/N: of the sorted models each Nth, from the Kth on"
    )
    group.addoption(
        "--fx-peer",
        choices=["torch.export"],
        help="run it beside fxopt on the same models and inputs, where the zoo is `transformers`",
    )
    group.addoption(
        "--fx-report-dir", type=Path, default=ROOT / "reports", help="latest/ and history/ are written here"
    )


def pytest_configure(config: pytest.Config) -> None:
    passes = {name: cls() for name, cls in fxopt.passes.available().items()}
    wanted = _chosen(config, "--fx-pass", passes)
    present = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    devices = _chosen(config, "--fx-device", present) or present
    zoo = _zoo(config, passes)
    if wanted and any(isinstance(entry, Architecture) for entry in zoo):
        raise pytest.UsageError("--fx-pass: an architecture is one case, with every pass in it")
    entries = {entry.name: entry for entry in zoo if isinstance(entry, Entry)}
    cases = [
        case
        for case in plan(zoo, passes, devices)
        if not wanted or set(wanted) & set(members(entries[case.model], case.pipeline, passes))
    ]
    config.stash[CASES] = {case.id: case for case in cases}
    config.stash[LIMITS] = {entry.name: entry.timeout for entry in zoo}
    if workerinput := getattr(config, "workerinput", None):
        notes = config.stash[NOTES] = Notes(Path(workerinput["fx_notes"]), workerinput["workerid"])
        config.stash[RUNNER] = Runner(zoo, passes, notes.enter)
    else:
        config.stash[RUNNER] = Runner(zoo, passes)
        # Here alone, because workers start sooner without the tables and plots of the reports.
        from validation.controller import Controller

        config.pluginmanager.register(Controller(config, config.stash[CASES], devices), "fxopt-controller")
        if getattr(config.option, "maxworkerrestart", None) is None:
            config.option.maxworkerrestart = str(MOST_RESTARTS)


def pytest_sessionstart(session: pytest.Session) -> None:
    # Many workers share the machine, and what they find must not depend on how many; timing sets its own.
    torch.set_num_threads(1)
    gc.freeze()  # cases collect what models leave behind, which is much faster without what is imported
    if notes := session.config.stash.get(NOTES, None):
        notes.start()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = sorted(metafunc.config.stash[CASES].values(), key=lambda case: (_is_timed(case), case))
        limits = metafunc.config.stash[LIMITS]
        override = metafunc.config.getoption("--timeout")
        metafunc.parametrize(
            "case",
            [
                pytest.param(
                    case,
                    id=case.id,
                    marks=pytest.mark.timeout(
                        override or limits[case.model], method="signal", func_only=True
                    ),
                )
                for case in cases
            ],
        )


@pytest.fixture(scope="session")
def runner(pytestconfig: pytest.Config) -> Runner:
    return pytestconfig.stash[RUNNER]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A limit of its own behind pytest-timeout's, which cannot interrupt compiled code."""
    notes, mark = item.config.stash.get(NOTES, None), item.get_closest_marker("timeout")
    if notes is not None and mark is not None:
        notes.end_after(mark.args[0] + max(2.0, mark.args[0] / 10))
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """A case that was thrown out of `Runner.run` has a record as well."""
    case = item.config.stash[CASES].get(case_id(item.nodeid))
    if case and call.when == "call" and call.excinfo and not received(item.user_properties):
        text = call.excinfo.exconly()
        outcome = Outcome.TIMEOUT if "from pytest-timeout" in text else Outcome.ERROR
        record = item.config.stash[RUNNER].interrupted(case, outcome, text.removeprefix("Failed: "))
        item.user_properties.append(send(record))
    return (yield)


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    record = received(report.user_properties) if report.when == "call" else None
    return ("no-op", "n", "NO-OP") if record and record.outcome is Outcome.NO_OP else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from validation.scheduling import PhasedScheduling
    from validation.store import seconds_by_group

    cases = config.stash[CASES]
    seconds = seconds_by_group(ROOT / "reports" / "baseline")
    return PhasedScheduling(
        config,
        log,
        group_of=lambda item: f"{cases[case_id(item)].model}-{cases[case_id(item)].device}",
        seconds_of=lambda group: seconds.get(group, 0.0),
        is_timed=lambda item: _is_timed(cases[case_id(item)]),
    )


def _zoo(config: pytest.Config, passes: Mapping[str, Transformation]) -> list[Entry | Architecture]:
    """The entries that the options leave."""
    name = config.getoption("--fx-zoo")
    peer = config.getoption("--fx-peer") is not None
    if peer and name not in SOURCES:
        raise pytest.UsageError(f"--fx-peer: only for the zoos that are built in: {', '.join(SOURCES)}")
    try:
        zoo: list[Any] = architectures(name, peer) if name in SOURCES else load_zoo(Path(name), passes)
    except ZooError as error:
        raise pytest.UsageError(str(error)) from error
    tags = _chosen(config, "--fx-tag", {tag for entry in zoo for tag in entry.tags})
    models = _chosen(config, "--fx-model", {entry.name for entry in zoo})
    number, count = config.getoption("--fx-part")
    return [
        entry
        for entry in sorted(zoo, key=lambda entry: entry.name)[number - 1 :: count]
        if (not tags or set(tags) & set(entry.tags)) and (not models or entry.name in models)
    ]


def _part(text: str) -> tuple[int, int]:
    """`3/10` as numbers."""
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if found is None or int(found[1]) > int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a part such as 1/10 or 10/10")
    return int(found[1]), int(found[2])


def _chosen(config: pytest.Config, option: str, known: Any) -> list[str]:
    """The values of a repeatable option, of which all have to be known."""
    chosen: list[str] = config.getoption(option) or []
    if unknown := [value for value in chosen if value not in known]:
        raise pytest.UsageError(
            f"{option} {unknown[0]}: not known; there are {', '.join(sorted(known)) or 'none'}"
        )
    return chosen


def _is_timed(case: Case) -> bool:
    return case.check is Check.LATENCY
