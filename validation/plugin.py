"""The pytest layer: the plan as parameters. `pytest_fxopt` has the options, and loads this where it is asked for."""

from __future__ import annotations

import collections
import functools
import gc
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fxopt.passes
from fxopt.errors import PassError
from fxopt.rewriting.transformation import Transformation

from .judging.subject import TIMING
from .progress import Progress
from .records import Case, Outcome, counted
from .running.controller import Controller, case_id, received
from .running.fleet import Fleet, FleetError
from .running.pool import Pool
from .running.run import Runner, in_worker
from .store import Place, ReportError, seconds_by_case
from .zoo.build import memory_of
from .zoo.entry import Entry, is_installed, judged
from .zoo.passes import ZooError, passes_of
from .zoo.plan import content, members, plan, unmet
from .zoo.sources import SOURCES, architectures, load_zoo, marked

LEFT_OUT = pytest.StashKey[dict[str, str]]()
CASES = pytest.StashKey[Mapping[str, Case]]()
RUNNER = pytest.StashKey[Runner]()
WORKERS = pytest.StashKey[int]()


def prepare(config: pytest.Config) -> None:
    """Prepare what other plugins must find when they read the options.

    `-n` is the number of processes in the pool: pytest-xdist is left with nothing to do. And models and passes of
    the repository that pytest runs in can be imported from its root, as with `python -m`.
    """
    count = getattr(config.option, "numprocesses", None)
    if count in ("auto", "logical"):
        count = config.hook.pytest_xdist_auto_num_workers(config=config)
    config.stash[WORKERS] = count or 1
    if count is not None:
        config.option.numprocesses, config.option.dist, config.option.tx = None, "no", []
    _root_first(config)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Once more: where the harness is installed, pytest has put site-packages before it, for workers to inherit."""
    _root_first(session.config)


def _root_first(config: pytest.Config) -> None:
    folder = str(root(config))
    sys.path[:] = [folder, *(place for place in sys.path if place != folder)]


def root(config: pytest.Config) -> Path:
    """The folder of the repository that is validated: where pytest's configuration is, else where it was started.

    It is not `rootpath`: without a configuration, this may be what an option names, such as `--fx-report-dir /tmp/out`.
    """
    return config.inipath.parent if config.inipath else config.invocation_params.dir


def pytest_configure(config: pytest.Config) -> None:
    present = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    if "cuda" in (config.getoption("--fx-device") or []) and "cuda" not in present:
        raise pytest.UsageError("--fx-device cuda: no CUDA device here")
    devices = _chosen("--fx-device", config.getoption("--fx-device"), present) or present
    passes, wanted = _passes(config)
    whole = _zoo(config, passes)
    chosen = config.getoption("--fx-model") or ()
    config.stash[LEFT_OUT] = left_out = {
        entry.name: entry.requires
        for entry in whole
        if entry.requires and entry.name not in chosen and not is_installed(entry.requires)
    }
    whole = [entry for entry in whole if entry.name not in left_out]
    zoo = _part_of(config, whole)
    if mistakes := unmet(zoo, passes, ["cpu", "cuda"]):
        raise pytest.UsageError("\n".join(mistakes))
    entries = {entry.name: entry for entry in zoo}
    cases = {
        case.id: case
        for case in _of_pipelines(config, plan(zoo, passes, devices))
        if not wanted or set(wanted) & set(members(entries[case.model], case.pipeline, passes))
    }
    # Else pytest makes a test of none, which it skips, and all is well. Of parts, the last may have no models.
    if not cases and config.getoption("--fx-part") is None:
        raise pytest.UsageError(
            f"no case is chosen: the options leave {len(zoo)} of {counted(len(whole), 'model')}"
        )
    place = _place(config)
    known = seconds_by_case(place.path / "baseline")
    seconds = {name: known.get(name, 0.1) for name in cases}
    of_group: dict[tuple[str, str], float] = collections.defaultdict(float)
    for name, case in cases.items():
        of_group[case.model, case.device] += seconds[name]
    limit: float | None = config.getoption("--fx-timeout")
    config.stash[CASES] = cases
    timing: float = config.getoption("--fx-timing") or TIMING
    config.stash[RUNNER] = Runner(zoo, passes, timing=timing)
    arguments: Any = {
        "make": functools.partial(in_worker, zoo, passes, timing),
        "limit": lambda case: limit or entries[case.model].timeout,
        "expected": of_group.__getitem__,
        "judged": lambda record: marked(
            entries[record.case.model], judged(entries[record.case.model].known_failures, record)
        ),
    }
    controller = Controller(
        cases=cases,
        planned=[case.id for case in plan(whole, passes, present)],
        devices=devices,
        place=place,
        root=root(config),
        pool=_engine(config, arguments, entries),
        workers=config.stash[WORKERS],
        content=lambda case: content(case, entries[case.model], passes),
        budget=config.getoption("--fx-budget"),
        resume=bool(config.getoption("--fx-resume")),
    )
    config.pluginmanager.register(controller, "fxopt-controller")

    def weight(nodeid: str) -> float:
        case = cases.get(case_id(nodeid))  # none of a test that is no case
        return seconds[case.id] / (1 if case.timed else config.stash[WORKERS]) if case else 0.0

    config.pluginmanager.register(Progress(weight), "fxopt-progress")


def pytest_report_header(config: pytest.Config) -> list[str]:
    if not (left_out := config.stash.get(LEFT_OUT, {})):
        return []
    packages = ", ".join(sorted(set(left_out.values())))
    return [f"left out: {counted(len(left_out), 'model')} whose libraries are not installed ({packages})"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = sorted(metafunc.config.stash[CASES].values(), key=lambda case: case.timed)
        metafunc.parametrize("case", [pytest.param(case, id=case.id) for case in cases])


@pytest.fixture(scope="session")
def runner(pytestconfig: pytest.Config) -> Iterator[Runner]:
    torch.set_num_threads(1)
    yield pytestconfig.stash[RUNNER]
    gc.unfreeze()


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    record = received(report)
    return ("no-op", "n", "NO-OP") if record and record.outcome is Outcome.NO_OP else None


def _place(config: pytest.Config) -> Place:
    """Where the reports go."""
    try:
        return Place(config.getoption("--fx-report-dir") or root(config) / "reports")
    except ReportError as error:
        raise pytest.UsageError(f"--fx-report-dir {error}") from error


def _engine(config: pytest.Config, arguments: dict[str, Any], entries: Mapping[str, Entry]) -> Pool | Fleet:
    """The processes of this machine, or the nodes of a cluster, that run the cases."""
    address = config.getoption("--fx-address")
    if config.getoption("--fx-engine") is None:
        if address is not None:
            raise pytest.UsageError("--fx-address: only with --fx-engine ray")
        return Pool(**arguments)
    try:
        return Fleet(**arguments, address=address or "", memory=lambda model: memory_of(entries[model]))
    except FleetError as error:
        raise pytest.UsageError(f"--fx-engine ray: {error}") from error


def _passes(config: pytest.Config) -> tuple[dict[str, Transformation], list[str]]:
    """All passes, with those that the zoo adds and `--fx-pass` names by their paths; and the names of those in `--fx-pass`."""
    wanted: list[str] = config.getoption("--fx-pass") or []
    paths, source = [name for name in wanted if "." in name], _source(config)
    try:
        passes = fxopt.passes.ready(paths) if source in SOURCES else passes_of(Path(source), paths)
    except (PassError, ZooError) as error:
        raise pytest.UsageError(str(error)) from error
    return passes, _chosen("--fx-pass", [name.rpartition(".")[2] for name in wanted], passes)


def _of_pipelines(config: pytest.Config, cases: Sequence[Case]) -> list[Case]:
    """The cases of the pipelines in `--fx-pipeline`: names, or those of passes joined by "+"."""
    named = {case: "+".join(case.pipeline) for case in cases}
    wanted = _chosen("--fx-pipeline", config.getoption("--fx-pipeline"), {*named.values()} - {""})
    return [case for case in cases if not wanted or named[case] in wanted]


def _source(config: pytest.Config) -> str:
    """The zoo that is asked for: a file, or the name of one that is built in."""
    return str(config.getoption("--fx-zoo") or root(config) / "model_zoo.yaml")


def _zoo(config: pytest.Config, passes: Mapping[str, Transformation]) -> list[Entry]:
    """All entries of the zoo that is asked for."""
    name = _source(config)
    peer = config.getoption("--fx-peer") is not None
    if peer and name not in SOURCES:
        raise pytest.UsageError(f"--fx-peer: only for the zoos that are built in: {', '.join(SOURCES)}")
    try:
        return [*architectures(name, peer)] if name in SOURCES else [*load_zoo(Path(name), passes)]
    except ZooError as error:
        raise pytest.UsageError(str(error)) from error


def _part_of(config: pytest.Config, zoo: Sequence[Entry]) -> list[Entry]:
    """The entries that the options leave."""
    known_tags, names = {tag for entry in zoo for tag in entry.tags}, {entry.name for entry in zoo}
    tags = _chosen("--fx-tag", config.getoption("--fx-tag"), known_tags)
    models = _chosen("--fx-model", config.getoption("--fx-model"), names)
    number, count = config.getoption("--fx-part") or (1, 1)
    return [
        entry
        for entry in sorted(zoo, key=lambda entry: entry.name)[number - 1 :: count]
        if (not tags or set(tags) & set(entry.tags)) and (not models or entry.name in models)
    ]


def _chosen(option: str, chosen: Sequence[str] | None, known: Collection[str]) -> list[str]:
    """The values of a repeatable option, of which all have to be known."""
    if unknown := [value for value in chosen or () if value not in known]:
        raise pytest.UsageError(
            f"{option} {unknown[0]}: not known; there are {', '.join(sorted(known)) or 'none'}"
        )
    return [*(chosen or ())]
