"""Plants faults one after the other and runs the tests: `python -m tests.mutation [--guards] [names ...]`.

A fault in the library is shown to the tests that execute its lines, which one run of all tests under coverage.py tells
beforehand (`executed.py`), one in the harness to those that its table names, and with `--tests` to these.

Prints a line a fault and the score; exits with 1 if a fault survived. The list is written to `reports/mutation`. Each fault
runs in a process forked from one that has imported torch and transformers, on a copy of the code, so that the repository
is not touched.

With `--verify`, the faults by which a pass rewrites wrongly are planted, and it does not count which tests fail: each pass
that they call or explain is verified, and only what that says counts. It prints which of the faults that alone finds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.mutation.executed import Executed, TestsError, run_all
from tests.mutation.fault import BEHIND, ROOT, SITE, Fault, FaultError, guards
from tests.mutation.faults import FAULTS
from tests.mutation.harness import seen_by
from tests.mutation.listing import BROKEN, CAUGHT, SURVIVED, Outcome, write

LIMIT = 1200
"""Seconds that the tests may take with one fault; a fault that makes them hang is seen."""

_OF_SITES = ("tests/passes", "tests/hazards")
"""Tests whose passes are verified: they show them sites."""

_IMPORT = "from __future__ import annotations\n"
NO_FAULT = Fault("no fault", "errors.py", _IMPORT, f"{_IMPORT}\n")


def main() -> int:
    """Run the faults that the command line names."""
    options = _options()
    os.environ.update(HF_HUB_OFFLINE="1", NIGHTLY="1")  # each case of a sweep may see a fault
    faults = list(guards()) if options.guards else list(FAULTS)
    if options.verify:
        faults = [fault for fault in faults if fault.rewrites]
    faults = [
        f for f in faults if not options.names or any(name in f"{f.path} {f.name}" for name in options.names)
    ]
    first, of = (int(number) for number in options.part.split("/"))
    faults = faults[first - 1 :: of]
    part = f"-{first}-of-{of}" if of > 1 else ""
    _import_all()
    if options.verify:
        return _verify(faults, f"verify{part}")
    stages = _stages(faults, options.tests)
    results = list[Outcome]()
    name, title = ("guards", "Guards, disabled") if options.guards else ("faults", "Planted faults")
    for number, fault in enumerate(faults, 1):
        started = time.monotonic()
        outcome, failed = _run(fault, stages(fault))
        results.append(Outcome(fault, outcome, failed))
        write(f"{name}{part}", title, results)
        took = time.monotonic() - started
        print(f"{number:3}/{len(faults)} {outcome:8} {took:5.0f} s  {fault.name}  {failed}", flush=True)
    missed = [each for each in results if each.outcome != CAUGHT]
    print(f"mutation score: {len(results) - len(missed)} of {len(results)} caught")
    for each in missed:
        print(f"  {each.outcome}: {each.fault.name}")
    return int(bool(missed))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("names", nargs="*", help="only faults whose name, or file, contains one of these")
    parser.add_argument("--guards", action="store_true", help="instead, disable each guard of the passes")
    parser.add_argument(
        "--verify", action="store_true", help="count what verify=True says of the passes, and no test"
    )
    parser.add_argument("--tests", nargs="+", help="the tests to run, of files or by their ids")
    parser.add_argument("--part", default="1/1", help="every n-th fault: 1/2 and 2/2 are two halves")
    return parser.parse_args()


def _import_all() -> None:
    """Import what takes long and is not the code under test."""
    import hypothesis  # noqa: F401
    import torch.export
    import torch.fx.experimental.symbolic_shapes
    import transformers
    import transformers.models.bert.modeling_bert
    import transformers.models.resnet.modeling_resnet  # noqa: F401

    torch.set_num_threads(1)


def _verify(faults: list[Fault], name: str) -> int:
    """Print which faults the validation of sites alone finds, and its share."""
    run_all()
    executed = Executed()
    known, _ = _heard(NO_FAULT, _OF_SITES, None)
    print(
        f"without a fault, site validation speaks in {len(known)} tests, which are not counted: {', '.join(known)}"
    )
    results, outcomes = dict[Fault, str](), list[Outcome]()
    for number, fault in enumerate(faults, 1):
        results[fault], why = _found_by_validation(fault, known, executed)
        outcomes.append(Outcome(fault, results[fault], why))
        write(name, "Wrong rewrites that site validation alone finds", outcomes)
        print(
            f"{number:3}/{len(faults)} {results[fault]:8} {fault.rewrites:6} {fault.name}  {why}", flush=True
        )
    print("\nwrong rewrites that site validation alone finds")
    for kind, where in (
        (SITE, "the site is wrong"),
        (BEHIND, "the site is right but for rounding or layout"),
    ):
        for folder, of in (("in passes", True), ("in what they stand on", False)):
            own = [f for f in results if f.rewrites == kind and f.file.startswith("passes/") == of]
            print(f"  {where}, {folder}: {_share([results[fault] for fault in own])}")
            print("".join(f"    {results[f]}: {f.name}\n" for f in own if results[f] != CAUGHT), end="")
    in_passes = [results[fault] for fault in results if fault.file.startswith("passes/")]
    print(f"  all in passes: {_share(in_passes)}\n  all: {_share(list(results.values()))}")
    others = sum(not f.rewrites and f.file.startswith("passes/") for f in FAULTS)
    print(
        f"  left out: {others} faults in passes that change no output (undo, names, metadata, gradients, ...)"
    )
    return 0


def _share(outcomes: Sequence[str]) -> str:
    caught = sum(outcome == CAUGHT for outcome in outcomes)
    return f"{caught} of {len(outcomes)}" + (f" ({caught / len(outcomes):.0%})" if outcomes else "")


def _found_by_validation(fault: Fault, known: Collection[str], executed: Executed) -> tuple[str, str]:
    """Tell whether the validation of sites finds the fault in tests that execute it, and what it says."""
    for tests in executed.stages(fault, lambda test: test.startswith(_OF_SITES)):
        said, status = _heard(fault, tests, known)
        if said or status == "timeout":
            return CAUGHT, next((f"{test}: {reason}" for test, reason in said.items()), "time limit")
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return BROKEN, ""
    return SURVIVED, ""


def _stages(
    faults: Sequence[Fault], tests: Sequence[str] | None
) -> Callable[[Fault], Iterable[Sequence[str]]]:
    """Gives the runs to make with each fault until a test fails; none does without a fault.

    Raises:
        TestsError: one does.
    """
    in_harness = [fault for fault in faults if fault.package == "validation"]
    chosen = tests or sorted({test for fault in in_harness for test in seen_by(fault)})
    outcome, failed = _run(NO_FAULT, [chosen] if chosen else [])
    if outcome != SURVIVED:
        raise TestsError(f"{failed} fails without a fault: that it fails with one would say nothing")
    if tests:
        return lambda fault: [tests]
    if len(in_harness) < len(faults):
        run_all()
        executed = Executed()
    return lambda fault: [seen_by(fault)] if fault in in_harness else executed.stages(fault)


def _heard(
    fault: Fault, tests: Sequence[str], known: Collection[str] | None
) -> tuple[dict[str, str], int | str]:
    """Gives what the validation of sites says in these tests, up to the first that is not known, and how they end."""
    with _copy_with(fault) as copy:
        status = _in_fork(copy, lambda folder: _listen(folder, tests, known))
        said = (copy / "said").read_text(encoding="utf-8") if (copy / "said").exists() else "{}"
    return {test: reason for test, reason in json.loads(said).items() if test not in (known or ())}, status


def _listen(copy: Path, tests: Sequence[str], known: Collection[str] | None) -> int:
    from tests.mutation.verified import Listener

    listener = Listener(known)
    status = pytest.main(["-q", "-p", "no:cacheprovider", *tests], plugins=[listener])
    (copy / "said").write_text(json.dumps(listener.said), encoding="utf-8")
    return int(status)


def _run(fault: Fault, stages: Iterable[Sequence[str]]) -> tuple[str, str]:
    """Tell whether a test fails with the fault, and which."""
    try:
        with _copy_with(fault) as copy:
            for tests in stages:
                status = _in_fork(copy, lambda folder, tests=tests: _pytest(folder, tests))
                if status == "timeout":
                    return CAUGHT, "time limit"
                if status == pytest.ExitCode.TESTS_FAILED:
                    return CAUGHT, (copy / "failed").read_text(encoding="utf-8").strip()
                if status != pytest.ExitCode.OK:
                    return BROKEN, f"pytest ends with {status}: the code does not import"
    except FaultError as error:
        return BROKEN, str(error)
    return SURVIVED, ""


@contextlib.contextmanager
def _copy_with(fault: Fault) -> Iterator[Path]:
    """A copy of the code with the fault in it."""
    with tempfile.TemporaryDirectory(prefix="fxopt-mutation-") as folder:
        copy = Path(folder)
        for name in ("fxopt", "validation", "tests", "docs", "reports/baseline"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        zoo = ("model_zoo.yaml", "model_zoo.sites.yaml")
        for name in ("pyproject.toml", "pytest_fxopt.py", "README.md", *zoo):
            shutil.copy(ROOT / name, copy / name)
        target = copy / fault.path
        target.write_text(fault.applied(target.read_text(encoding="utf-8")), encoding="utf-8")
        yield copy


def _pytest(copy: Path, tests: Sequence[str]) -> int:
    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests], plugins=[_Failed(copy)]))


def _in_fork(copy: Path, function: Callable[[Path], int]) -> int | str:
    """Call a function in a process of its own, which imports the code out of the copy."""
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(copy)
        for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "fxopt", "validation")]:
            del sys.modules[name]
        sys.path[:] = [str(copy), *(entry for entry in sys.path if entry not in ("", str(ROOT)))]
        os.environ["PYTHONPATH"] = str(copy)
        status = 99
        try:
            with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
                os.dup2(nothing.fileno(), 1)
                os.dup2(nothing.fileno(), 2)
                status = function(copy)
        finally:
            os._exit(status)
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timeout"


class _Failed:
    """Writes down which test failed first."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "failed"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self._file.exists():
            self._file.write_text(report.nodeid, encoding="utf-8")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TestsError as error:
        sys.exit(str(error))
