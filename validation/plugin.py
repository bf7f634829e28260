"""The pytest layer: the plan as test parameters. `pytest_fxopt` has the options, and loads this module on request."""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pytest
import torch

import fxopt.passes
from fxopt.errors import FxoptError
from fxopt.rewriting.transformation import Transformation

from .judging.subject import TIMING
from .records import LACKING, Case, counted
from .running.controller import Controller
from .running.fleet import Fleet
from .running.pool import Make, Pool
from .running.run import in_worker
from .zoo.entry import Entry
from .zoo.plan import content, members, plan, unmet
from .zoo.sources import SOURCES, architectures, load_zoo, name_of

LEFT_OUT = pytest.StashKey[list[str]]()
CASES = pytest.StashKey[Mapping[str, Case]]()
WORKERS = pytest.StashKey[int]()


def prepare(config: pytest.Config) -> None:
    """Set up options and paths before other plugins read the options.

    `-n` is the number of processes in the pool, so pytest-xdist gets nothing to do. Models and passes of the repository in
    which pytest runs can be imported from its root, as with `python -m`.
    """
    count = getattr(config.option, "numprocesses", None)
    if count in ("auto", "logical"):
        count = config.hook.pytest_xdist_auto_num_workers(config=config)
    config.stash[WORKERS] = count or 1
    if count is not None:
        config.option.numprocesses, config.option.dist, config.option.tx = None, "no", []
    _root_first(config)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Put the root first again: pytest puts site-packages before it if the harness is installed, and workers inherit the path."""
    _root_first(session.config)


def _root_first(config: pytest.Config) -> None:
    folder = str(root(config))
    sys.path[:] = [folder, *(place for place in sys.path if place != folder)]


def root(config: pytest.Config) -> Path:
    """The folder of the validated repository: that of pytest's configuration, otherwise that where pytest was started.

    This is not `rootpath`: without a configuration, `rootpath` may be the value of an option, as in `--fx-report-dir
    /tmp/out`.
    """
    return config.inipath.parent if config.inipath else config.invocation_params.dir


def pytest_configure(config: pytest.Config) -> None:
    try:
        _configure(config)
    except FxoptError as error:
        raise pytest.UsageError(str(error)) from error


def _configure(config: pytest.Config) -> None:
    """Read the options and the zoo, and register the controller. Raises `FxoptError` for mistakes in them."""
    present = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    if "cuda" in (config.getoption("--fx-device") or []) and "cuda" not in present:
        raise pytest.UsageError("--fx-device cuda: no CUDA device here")
    devices = _chosen(config, "--fx-device", present) or present
    whole, passes = _zoo(config)
    wanted = _known("--fx-pass", [*map(name_of, config.getoption("--fx-pass") or ())], passes)
    left_out = ", ".join(f"{entry.name} ({entry.lacks})" for entry in whole if entry.lacks)
    config.stash[LEFT_OUT] = [LACKING + left_out] if left_out else []
    whole, zoo = ([each for each in some if not each.lacks] for some in (whole, _part_of(config, whole)))
    if mistakes := unmet(zoo, passes, ["cpu", "cuda"]):
        raise pytest.UsageError("\n".join(mistakes))
    entries = {entry.name: entry for entry in zoo}
    named = {case: "+".join(case.pipeline) for case in plan(zoo, passes, devices)}
    pipelines = _chosen(config, "--fx-pipeline", {*named.values()} - {""})
    config.stash[CASES] = cases = {
        case.id: case
        for case, pipeline in named.items()
        if not pipelines or pipeline in pipelines
        if not wanted or set(wanted) & set(members(entries[case.model], case.pipeline, passes))
    }
    # Otherwise pytest would skip a test without parameters, and pass. With --fx-part, the last parts may have no models.
    if not cases and config.getoption("--fx-part") is None:
        text = ". ".join(
            [f"the options leave {len(zoo)} of {counted(len(whole), 'model')}", *config.stash[LEFT_OUT]]
        )
        raise pytest.UsageError(f"no case is chosen: {text}")
    timing: float = config.getoption("--fx-timing") or TIMING
    controller = Controller(
        cases=cases,
        planned=[case.id for case in plan(whole, passes, present)],
        left_out=left_out,
        devices=devices,
        directory=config.getoption("--fx-report-dir") or root(config) / "reports",
        root=root(config),
        pool=_engine(config, entries, functools.partial(in_worker, zoo, passes, timing)),
        workers=config.stash[WORKERS],
        content=lambda case: content(case, entries[case.model], passes),
        resume=bool(config.getoption("--fx-resume")),
    )
    config.pluginmanager.register(controller, "fxopt-controller")


def pytest_report_header(config: pytest.Config) -> list[str]:
    return config.stash.get(LEFT_OUT, [])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = sorted(metafunc.config.stash[CASES].values(), key=lambda case: case.timed)
        metafunc.parametrize("case", [pytest.param(case, id=case.id) for case in cases])


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    return ("no-op", "n", "NO-OP") if getattr(report, "is_no_op", False) else None


def _engine(config: pytest.Config, entries: Mapping[str, Entry], make: Make) -> Pool | Fleet:
    """The processes of this machine, or the nodes of a cluster, that run the cases."""
    limit: float | None = config.getoption("--fx-timeout")
    address = config.getoption("--fx-address")

    def timeout(case: Case) -> float:
        return limit or entries[case.model].timeout

    if config.getoption("--fx-engine") is not None:
        return Fleet(make, timeout, address=address or "")
    if address is not None:
        raise pytest.UsageError("--fx-address: only with --fx-engine ray")
    return Pool(make, timeout)


def _zoo(config: pytest.Config) -> tuple[list[Entry], dict[str, Transformation]]:
    """All entries of the requested zoo, a file or a built-in one, and all passes that pipelines may name."""
    name = str(config.getoption("--fx-zoo") or root(config) / "model_zoo.yaml")
    paths = [name for name in config.getoption("--fx-pass") or () if "." in name]
    peer = config.getoption("--fx-peer") is not None
    if name in SOURCES:
        return [*architectures(name, peer)], fxopt.passes.ready(paths)
    if peer:
        raise pytest.UsageError(f"--fx-peer: only for the zoos that are built in: {', '.join(SOURCES)}")
    return load_zoo(Path(name), paths)


def _part_of(config: pytest.Config, zoo: Sequence[Entry]) -> list[Entry]:
    """The entries that the options select."""
    tags = _chosen(config, "--fx-tag", {tag for entry in zoo for tag in entry.tags})
    models = _chosen(config, "--fx-model", {entry.name for entry in zoo})
    number, count = config.getoption("--fx-part") or (1, 1)
    return [
        entry
        for entry in sorted(zoo, key=lambda entry: entry.name)[number - 1 :: count]
        if (not tags or set(tags) & set(entry.tags)) and (not models or entry.name in models)
    ]


def _chosen(config: pytest.Config, option: str, known: Collection[str]) -> list[str]:
    """The values of a repeatable option, all of which must be known."""
    return _known(option, config.getoption(option) or [], known)


def _known(option: str, chosen: list[str], known: Collection[str]) -> list[str]:
    if unknown := [value for value in chosen if value not in known]:
        names = ", ".join(sorted(known)) or "none"
        raise pytest.UsageError(f"{option} {unknown[0]}: not known; there are {names}")
    return chosen
