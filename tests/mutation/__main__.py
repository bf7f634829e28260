"""Plants faults one after the other and runs the tests: `python -m tests.mutation [--guards] [names ...]`.

Prints a line a fault and the score; exits with 1 if a fault survived. Each fault runs in a process forked from one that
has imported torch and transformers, on a copy of the code, so that the repository is not touched.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutation.fault import ROOT, Fault, FaultError, guards
from tests.mutation.faults import FAULTS

LIMIT = 1200
"""Seconds that the tests may take with one fault; a fault that makes them hang is seen."""

_FIRST = {
    "capture": [
        f"tests/capture/test_{name}.py"
        for name in ("silent_changes", "state", "reads", "trace", "modes", "module")
    ],
    "batch_norm.py": ["tests/passes/test_fuse_batch_norm1d_in_linear.py", "tests/passes/test_undo_folds.py"],
    "precision_plan.py": ["tests/passes/test_change_precision.py"],
}
"""What sees most faults of a file or folder, and soon."""

_IMPORT = "from __future__ import annotations\n"
NO_FAULT = Fault("no fault", "errors.py", _IMPORT, f"{_IMPORT}\n")

CAUGHT, SURVIVED, BROKEN = "caught", "SURVIVED", "BROKEN"


def main() -> int:
    """Run the faults that the command line names."""
    options = _options()
    os.environ["HF_HUB_OFFLINE"] = "1"
    faults = list(guards()) if options.guards else list(FAULTS)
    faults = [f for f in faults if not options.names or any(name in f.name for name in options.names)]
    first, of = (int(number) for number in options.part.split("/"))
    faults = faults[first - 1 :: of]
    _import_all()
    outcome, failed = _run(NO_FAULT)
    if outcome != SURVIVED:
        print(f"without a fault, {failed} fails: the score would say nothing")
        return 1
    results = {}
    for number, fault in enumerate(faults, 1):
        started = time.monotonic()
        outcome, seen_by = _run(fault)
        results[fault.name] = outcome
        took = time.monotonic() - started
        print(f"{number:3}/{len(faults)} {outcome:8} {took:5.0f} s  {fault.name}  {seen_by}", flush=True)
    caught = sum(outcome == CAUGHT for outcome in results.values())
    print(f"mutation score: {caught} of {len(results)} caught")
    for name, outcome in results.items():
        if outcome != CAUGHT:
            print(f"  {outcome}: {name}")
    return int(caught < len(results))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("names", nargs="*", help="only faults whose name contains one of these")
    parser.add_argument("--guards", action="store_true", help="instead, disable each guard of the passes")
    parser.add_argument("--part", default="1/1", help="every n-th fault: 1/2 and 2/2 are two halves")
    return parser.parse_args()


def _import_all() -> None:
    """What takes long to import, and is not the code under test."""
    import hypothesis  # noqa: F401
    import torch.export
    import torch.fx.experimental.symbolic_shapes
    import transformers
    import transformers.models.bert.modeling_bert
    import transformers.models.resnet.modeling_resnet  # noqa: F401

    torch.set_num_threads(1)


def _run(fault: Fault) -> tuple[str, str]:
    """Whether a test fails with the fault, and which."""
    with tempfile.TemporaryDirectory(prefix="fxopt-mutation-") as folder:
        copy = Path(folder)
        for name in ("fxopt", "validation", "tests", "docs"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "model_zoo.yaml", "README.md"):
            shutil.copy(ROOT / name, copy / name)
        target = copy / "fxopt" / fault.file
        try:
            target.write_text(fault.applied(target.read_text(encoding="utf-8")), encoding="utf-8")
        except FaultError as error:
            return BROKEN, str(error)
        for tests in _stages(fault):
            status = _pytest_in_fork(copy, tests)
            if status == "timeout":
                return CAUGHT, "time limit"
            if status == pytest.ExitCode.TESTS_FAILED:
                return CAUGHT, (copy / "failed").read_text(encoding="utf-8").strip()
            if status != pytest.ExitCode.OK:
                return BROKEN, f"pytest ends with {status}: the code does not import"
        return SURVIVED, ""


def _stages(fault: Fault) -> Iterator[list[str]]:
    """What is run until a test fails: the test of the file, those beside it, and all other tests of the library."""
    folder, _, name = fault.file.rpartition("/")
    mirror = f"tests/{folder + '/' if folder else ''}test_{name}"
    files = [f"tests/{file.name}" for file in sorted((ROOT / "tests").glob("test_*.py"))]
    others = ["tests/passes", "tests/hazards", *files, "tests/capture"]
    first = [f"tests/{folder}"] if folder else []
    soon = [mirror, *_FIRST.get(folder or name, [])]
    for tests in (soon, first, [test for test in others if test not in first]):
        if present := [test for test in tests if (ROOT / test).exists()]:
            yield present


def _pytest_in_fork(copy: Path, tests: list[str]) -> int | str:
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(copy)
        for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "fxopt", "validation")]:
            del sys.modules[name]
        sys.path[:] = [str(copy), *(entry for entry in sys.path if entry not in ("", str(ROOT)))]
        os.environ["PYTHONPATH"] = str(copy)
        with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
            status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests], plugins=[_Failed(copy)])
        os._exit(int(status))
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
    sys.exit(main())
