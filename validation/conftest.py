"""The pytest layer: options, and the plan as parameters."""

from __future__ import annotations

import argparse
import functools
import gc
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fxopt.passes
from fxopt.rewriting.transformation import Transformation

from .controller import Controller, is_timed
from .gather import received
from .plan import content, members, plan, unmet
from .pool import Pool
from .records import Case, Outcome
from .run import Runner, in_worker
from .store import seconds_by_group
from .sweep import SOURCES, architectures, marked
from .zoo import Entry, ZooError, judged, load_zoo

ROOT = Path(__file__).resolve().parent.parent
CASES = pytest.StashKey[Mapping[str, Case]]()
RUNNER = pytest.StashKey[Runner]()
WORKERS = pytest.StashKey[int]()


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
    group.addoption("--fx-timeout", type=float, help="seconds that a case may take; default: the zoo's")
    group.addoption(
        "--fx-report-dir", type=Path, default=ROOT / "reports", help="latest/ and history/ are written here"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """`-n` is the number of processes in the pool: pytest-xdist, which reads it next, is left with nothing to do."""
    count = getattr(config.option, "numprocesses", None)
    if count in ("auto", "logical"):
        count = config.hook.pytest_xdist_auto_num_workers(config=config)
    config.stash[WORKERS] = count or 1
    if count is not None:
        config.option.numprocesses, config.option.dist, config.option.tx = None, "no", []


def pytest_configure(config: pytest.Config) -> None:
    passes = {name: cls() for name, cls in fxopt.passes.available().items()}
    wanted = _chosen(config, "--fx-pass", passes)
    present = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    devices = _chosen(config, "--fx-device", present) or present
    whole = _zoo(config, passes)
    zoo = _part_of(config, whole)
    if mistakes := unmet(zoo, passes, ["cpu", "cuda"]):
        raise pytest.UsageError("\n".join(mistakes))
    entries = {entry.name: entry for entry in zoo}
    cases = {
        case.id: case
        for case in plan(zoo, passes, devices)
        if not wanted or set(wanted) & set(members(entries[case.model], case.pipeline, passes))
    }
    seconds = seconds_by_group(ROOT / "reports" / "baseline")
    limit: float | None = config.getoption("--fx-timeout")
    config.stash[CASES] = cases
    config.stash[RUNNER] = Runner(zoo, passes)
    pool = Pool(
        functools.partial(in_worker, zoo, passes),
        limit=lambda case: limit or entries[case.model].timeout,
        expected=lambda group: seconds.get("-".join(group), 0.0),
        judged=lambda record: marked(
            entries[record.case.model], judged(entries[record.case.model].known_failures, record)
        ),
    )
    controller = Controller(
        cases=cases,
        planned=[case.id for case in plan(whole, passes, present)],
        devices=devices,
        directory=config.getoption("--fx-report-dir"),
        pool=pool,
        workers=config.stash[WORKERS],
        content=lambda case: content(case, entries[case.model], passes),
    )
    config.pluginmanager.register(controller, "fxopt-controller")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = sorted(metafunc.config.stash[CASES].values(), key=is_timed)
        metafunc.parametrize("case", [pytest.param(case, id=case.id) for case in cases])


@pytest.fixture(scope="session")
def runner(pytestconfig: pytest.Config) -> Iterator[Runner]:
    torch.set_num_threads(1)
    yield pytestconfig.stash[RUNNER]
    gc.unfreeze()


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    record = received(report.user_properties) if report.when == "call" else None
    return ("no-op", "n", "NO-OP") if record and record.outcome is Outcome.NO_OP else None


def _zoo(config: pytest.Config, passes: Mapping[str, Transformation]) -> list[Entry]:
    """All entries of the zoo that is asked for."""
    name = config.getoption("--fx-zoo")
    peer = config.getoption("--fx-peer") is not None
    if peer and name not in SOURCES:
        raise pytest.UsageError(f"--fx-peer: only for the zoos that are built in: {', '.join(SOURCES)}")
    try:
        return [*architectures(name, peer)] if name in SOURCES else [*load_zoo(Path(name), passes)]
    except ZooError as error:
        raise pytest.UsageError(str(error)) from error


def _part_of(config: pytest.Config, zoo: Sequence[Entry]) -> list[Entry]:
    """The entries that the options leave."""
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
