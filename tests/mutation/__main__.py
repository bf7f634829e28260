"""Plants faults one after the other and runs the tests: `python -m tests.mutation [--guards] [names ...]`.

Prints a line a fault and the score; exits with 1 if a fault survived. The list is written to `reports/mutation`. Each fault runs in a process forked from one that
has imported torch and transformers, on a copy of the code, so that the repository is not touched.

With `--verify`, the faults by which a pass rewrites wrongly are planted, and it does not count which tests fail: each pass
that they call or explain is verified, and only what that says counts. It prints which of the faults that alone finds.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
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

from tests.mutation.fault import BEHIND, ROOT, SITE, Fault, FaultError, guards
from tests.mutation.faults import FAULTS
from tests.mutation.harness import SEEN_BY
from tests.mutation.listing import BROKEN, CAUGHT, SURVIVED, Outcome, seen_before, write

LIMIT = 1200
"""Seconds that the tests may take with one fault; a fault that makes them hang is seen."""

_FOLDS = [
    *("tests/passes/test_fold_batch_norms.py", "tests/passes/test_fuse_batch_norm1d_in_linear.py"),
    *("tests/passes/test_fuse_batch_norm2d_in_conv2d.py", "tests/passes/test_undo_folds.py"),
    "tests/hazards/test_gradients_and_buffers.py",
]

_FIRST = {
    "capture": [
        f"tests/capture/test_{name}.py"
        for name in ("against_eager", "silent_changes", "state", "reads", "trace", "modes", "module")
    ],
    "graph.py": ["tests/passes/test_replace_activation.py"],
    "graph_index.py": [
        *("tests/passes/test_replace_activation.py", "tests/passes/test_merge_linears.py"),
        *(
            f"tests/hazards/test_{name}.py"
            for name in ("shared_layers", "unusual_layers", "gradients_and_buffers")
        ),
    ],
    "obstacles/batch_norm.py": _FOLDS,
    "obstacles/scaling.py": _FOLDS,
    "passes/folding.py": _FOLDS,
    "passes/fold_batch_norms.py": _FOLDS,
    "passes/merging.py": ["tests/passes/test_merge_linears.py", "tests/passes/test_merge_convs.py"],
    "passes/fold_norm_weights.py": ["tests/passes/test_fold_norm_weights.py"],
    "passes/fold_scale_and_shift.py": ["tests/passes/test_fold_scale_and_shift.py"],
    "obstacles/foldable.py": [
        *_FOLDS,
        *(f"tests/passes/test_fold_{name}.py" for name in ("norm_weights", "scale_and_shift")),
    ],
    "obstacles/parameter_constants.py": ["tests/passes/test_fold_scale_and_shift.py"],
    "attention": ["tests/passes/test_fuse_attention.py"],
    "passes/remove_repeated_heads.py": ["tests/passes/test_remove_repeated_heads.py"],
    "packing.py": ["tests/passes/test_packing.py"],
    "packed_operators.py": ["tests/test_kernels.py", "tests/passes/test_packing.py"],
    "kernels.py": ["tests/test_kernels.py", "tests/passes/test_packing.py"],
    "obstacles/layouts.py": ["tests/passes/test_packing.py"],
    "passes/pack_convs.py": ["tests/passes/test_packing.py"],
    "passes/fuse_epilogues.py": ["tests/passes/test_packing.py"],
    "optimizing/backend.py": ["tests/optimizing/test_backend.py"],
    "saving": [f"tests/{name}.py" for name in ("optimizing/test_saving_optimized", "test_saving")],
    "optimizing": [f"tests/optimizing/test_{name}.py" for name in ("optimize", "generation")],
    "obstacles/rounding.py": ["tests/passes/test_change_true_div_to_mul_by_inverse.py"],
    "obstacles/slicing.py": [
        "tests/passes/test_merge_linears.py",
        "tests/hazards/test_numbers_and_writes.py",
    ],
    "constants.py": ["tests/passes/test_fold_constants.py"],
    "activations.py": ["tests/passes/test_replace_activation.py"],
    "testing": [
        f"tests/test_{name}.py"
        for name in ("oracle", "deceptions", "more_deceptions", "testing", "divergence")
    ],
    "obstacles/precision_plan.py": ["tests/passes/test_change_precision.py"],
    "operators.py": [
        *("tests/passes/test_merge_linears.py", "tests/test_memory.py"),
        "tests/hazards/test_numbers_and_writes.py",
    ],
    "effects.py": [
        "tests/test_memory.py",
        *(f"tests/passes/test_eliminate_{name}.py" for name in ("dead_code", "common_subexpressions")),
        "tests/passes/test_remove_identity.py",
    ],
    "rewriting": [
        *("tests/test_rewriter.py", "tests/test_fingerprint.py", "tests/test_undo_of_compositions.py"),
        *("tests/test_undo_between_edits.py", "tests/test_history.py", "tests/test_rewrite.py"),
        *("tests/passes/test_fuse_batch_norm1d_in_linear.py", "tests/passes/test_metadata.py"),
        *("tests/passes/test_merge_linears.py", "tests/passes/test_undo_folds.py"),
        *(
            "tests/test_history_of_users_passes.py",
            "tests/test_composition.py",
            "tests/test_failed_passes.py",
        ),
        *("tests/test_verification.py", "tests/test_transformation.py"),
    ],
}
"""The tests that see most faults of a file or folder, and soon."""

_HAZARDS = ["tests/hazards"]

_NO_FAULT_SEEN = {"test_names.py"}
"""Tests that read no code."""

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
    outcome, failed = _run(NO_FAULT, _soon(faults) if options.soon else _stages(NO_FAULT))
    if outcome != SURVIVED:
        print(f"without a fault, {failed} fails: the score would say nothing")
        return 1
    results, before = list[Outcome](), seen_before()
    name, title = ("guards", "Guards, disabled") if options.guards else ("faults", "Planted faults")
    for number, fault in enumerate(faults, 1):
        started = time.monotonic()
        first_tests = [[before[fault.name]]] if fault.name in before else []
        outcome, seen_by = _run(fault, itertools.chain(first_tests, _stages(fault, options.soon)))
        results.append(Outcome(fault, outcome, seen_by))
        write(f"{name}{part}", title, results)
        took = time.monotonic() - started
        print(f"{number:3}/{len(faults)} {outcome:8} {took:5.0f} s  {fault.name}  {seen_by}", flush=True)
    missed = [each for each in results if each.outcome != CAUGHT]
    print(f"mutation score: {len(results) - len(missed)} of {len(results)} caught")
    for each in missed:
        print(f"  {each.outcome}: {each.fault.name}")
    return int(bool(missed))


def _soon(faults: Sequence[Fault]) -> Iterator[list[str]]:
    """All tests that see faults soon, those of a file in one run."""
    tests = {test for fault in faults for stage in _stages(fault, soon=True) for test in stage}
    for _, of_file in itertools.groupby(sorted(tests), lambda test: test.partition("::")[0]):
        yield list(of_file)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("names", nargs="*", help="only faults whose name, or file, contains one of these")
    parser.add_argument("--guards", action="store_true", help="instead, disable each guard of the passes")
    parser.add_argument(
        "--verify", action="store_true", help="count what verify=True says of the passes, and no test"
    )
    parser.add_argument(
        "--soon", action="store_true", help="run only the tests that see most faults of a file"
    )
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
    tests = list(dict.fromkeys(itertools.chain(*map(_tests_of, faults), _HAZARDS)))
    known, _ = _heard(NO_FAULT, tests, None)
    print(
        f"without a fault, site validation speaks in {len(known)} tests, which are not counted: {', '.join(known)}"
    )
    results, outcomes = dict[Fault, str](), list[Outcome]()
    for number, fault in enumerate(faults, 1):
        results[fault], why = _found_by_validation(fault, known)
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


def _found_by_validation(fault: Fault, known: Collection[str]) -> tuple[str, str]:
    """Tell whether the validation of sites finds the fault in the tests that see it soon, or in the tables of hazards, and what it says."""
    for tests in (_tests_of(fault), _HAZARDS):
        said, status = _heard(fault, tests, known)
        if said or status == "timeout":
            return CAUGHT, next((f"{test}: {reason}" for test, reason in said.items()), "time limit")
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return BROKEN, ""
    return SURVIVED, ""


def _tests_of(fault: Fault) -> list[str]:
    return next(_stages(fault, soon=True))


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


def _run(fault: Fault, stages: Iterable[list[str]]) -> tuple[str, str]:
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


def _stages(fault: Fault, soon: bool = False) -> Iterator[list[str]]:
    """Gives the runs to make until a test fails: the test of the file, those beside it, and all other tests of the library.

    Where `soon` is on, without all others.
    """
    if fault.package == "validation":
        folder = fault.file.partition("/")[0]
        seen_by = (fault.seen_by,) if fault.seen_by else SEEN_BY.get(fault.file) or SEEN_BY[folder]
        yield [f"tests/validation/{test}" for test in seen_by]
        if not soon:
            yield ["tests/validation"]
        return
    path, _, name = fault.file.rpartition("/")
    folder = path.partition("/")[0]  # the rooms of a folder share its tests
    mirror = f"tests/{folder + '/' if folder else ''}test_{name}"
    found = sorted((ROOT / "tests").glob("test_*.py"))
    files = [f"tests/{file.name}" for file in found if file.name not in _NO_FAULT_SEEN]
    others = ["tests/passes", "tests/hazards", *files, "tests/capture"]
    first = [f"tests/{folder}"] if folder else []
    sees = [mirror, f"tests/test_{name}", *_FIRST.get(fault.file, _FIRST.get(folder or name, []))]
    rest = [] if soon else [test for test in others if test not in first]
    for tests in (sees, first, rest):
        if present := [test for test in tests if (ROOT / test).exists()]:
            yield present


def _pytest(copy: Path, tests: list[str]) -> int:
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
    sys.exit(main())
