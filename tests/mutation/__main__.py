"""Plants faults in fxopt and validation, and runs the tests that execute them: `python -m tests.mutation [path ...]`.

The faults are those that the operators make of the files, in an order that the seed draws. Verdicts are appended to a file
as they are made, and those that are there are not made again. At the end the score of each folder and what survived are
written to `reports/mutation/mutation.md`.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.mutation.executed import Executed
from tests.mutation.forks import Say, in_fork, run_afresh, run_items
from tests.mutation.operators import Mutant, mutants
from tests.mutation.planting import ROOT, functions_by_file
from tests.mutation.report import CAUGHT, SURVIVED, UNTESTED, Verdict, page, read

FOLDER = ROOT / "reports" / "mutation"
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
LIMIT = 20
"""CPU seconds of tests that each mutant is shown."""

Run = Callable[[Sequence[str], Mutant | None, Say], int]


def main() -> int:
    """Do what the command line says; return 1 where the score is lower than it asks for."""
    options = _options()
    FOLDER.mkdir(parents=True, exist_ok=True)
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    executed = options.executed or FOLDER / "executed.db"
    if not executed.exists():
        _record(executed, options.jobs)
    sample, marked = _sample(options.paths or ["fxopt", "validation"], options.sample, options.seed)
    print(f"{len(sample)} mutants, and {marked} that are marked as equivalent", flush=True)
    known = read(options.verdicts, sample)
    to_do = [mutant for mutant in sample if mutant.key not in known]
    workers = list[int]()
    for number in range(options.jobs if to_do else 0):
        workers.append(os.fork())
        if not workers[-1]:
            status = 1
            try:
                _judge(
                    to_do[number :: options.jobs], Judge(Executed(executed), options.limit, options.verdicts)
                )
                status = 0
            finally:
                sys.stdout.flush()
                os._exit(status)
    broken = [worker for worker in workers if os.waitpid(worker, 0)[1]]
    text, score = page(options.seed, sample, read(options.verdicts, sample), marked)
    (FOLDER / "mutation.md").write_text(text, encoding="utf-8")
    print(text)
    return int(bool(broken) or score < options.least)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("paths", nargs="*", help="files or folders of fxopt and validation; default: all")
    parser.add_argument("--sample", type=int, help="how many mutants; default: all")
    parser.add_argument(
        "--seed", type=int, default=0, help="draws their order: a larger sample begins with a smaller one"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes, of some 2 GiB each")
    parser.add_argument(
        "--limit", type=float, default=LIMIT, help="CPU seconds of tests that each mutant is shown"
    )
    parser.add_argument(
        "--least", type=float, default=0, help="the score below which this command fails: 0.8"
    )
    parser.add_argument(
        "--executed", type=Path, help="the record of an earlier run of all tests, for the same code"
    )
    parser.add_argument(
        "--verdicts", type=Path, default=FOLDER / "verdicts.jsonl", help="where they are kept"
    )
    return parser.parse_args()


def _record(database: Path, jobs: int) -> None:
    """Run all tests once, and note which lines each executes."""
    print("one run of all tests, to see which executes which line", flush=True)
    options = ["-q", "-p", "no:cacheprovider", "-p", "tests.mutation.executed"]
    command = [sys.executable, "-m", "pytest", *options, "-n", str(jobs), "--dist", "worksteal", "tests"]
    unfinished = database.with_suffix(".unfinished")
    unfinished.unlink(missing_ok=True)
    subprocess.run(command, cwd=ROOT, env={**os.environ, "EXECUTED": str(unfinished)}, check=False)
    unfinished.rename(database)


def _sample(paths: Sequence[str], size: int | None, seed: int) -> tuple[list[Mutant], int]:
    """The first mutants in the order of the seed, and how many of these files are marked as equivalent."""
    files = sorted(
        file
        for path in (ROOT / path for path in paths)
        for file in ([path] if path.is_file() else path.rglob("*.py"))
    )
    found = [
        each
        for file in files
        for each in mutants(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8"))
    ]
    marks = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8")).get("mutant", [])
    marked = {(mark["hash"], mark["change"]) for mark in marks}
    left = [mutant for mutant in found if (mutant.function[1], mutant.change) not in marked]
    random.Random(seed).shuffle(left)
    return left[:size], len(found) - len(left)


class Judge:
    """Runs the tests that execute a mutant, and writes the verdict."""

    def __init__(self, executed: Executed, limit: float, verdicts: Path) -> None:
        self.executed = executed
        self._limit, self._verdicts = limit, verdicts
        self._sound, self._unsound = set[str](), set[str]()

    def tests(self, mutant: Mutant) -> tuple[list[str], float]:
        """The tests to run, and the CPU seconds that they take."""
        return self.executed.tests(mutant, self._limit, self._unsound)

    def __call__(self, mutant: Mutant, run: Run) -> None:
        """Write whether a test fails with the mutant that passes without it."""
        outcome, by = None, ""
        while outcome is None:
            tests, seconds = self.tests(mutant)
            status, by = in_fork(lambda say: run(tests, mutant, say), seconds, mutant) if tests else (5, "")
            if status == pytest.ExitCode.NO_TESTS_COLLECTED:
                outcome = UNTESTED
            elif not status:
                outcome = SURVIVED
            elif not by or self._passes_without(by, run):
                outcome, by = CAUGHT, by or f"ends with {status}"
        verdict = Verdict(mutant.key, outcome, by, len(tests))
        with self._verdicts.open("a", encoding="utf-8") as file:
            file.write(verdict.to_json() + "\n")
        print(f"{outcome:9} {mutant}"[:150], flush=True)

    def _passes_without(self, test: str, run: Run) -> bool:
        if test not in self._sound | self._unsound:
            status, _ = in_fork(lambda say: run([test], None, say), self._limit, None)
            (self._unsound if status else self._sound).add(test)
        return test in self._sound


def _judge(sample: Sequence[Mutant], judge: Judge) -> None:
    """Judge mutants of what runs at import, each in a process that imports it, and then those of functions."""
    warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads: these are idle
    _import_others()
    at_import = [mutant for mutant in sample if judge.executed.at_import(mutant)]
    for mutant in at_import:
        judge(mutant, run_afresh)
    rest = [mutant for mutant in sample if mutant not in at_import]
    files = {test.partition("::")[0] for mutant in rest for test in judge.tests(mutant)[0]}
    pytest.main(["-q", "-s", "-p", "no:cacheprovider", *sorted(files)], plugins=[_Loop(rest, judge)])


class _Loop:
    """Runs tests that are collected once, in forks, instead of all of them."""

    def __init__(self, sample: Sequence[Mutant], judge: Judge) -> None:
        self._sample, self._judge = sample, judge

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        functions = functions_by_file()
        for mutant in self._sample:

            def run(tests: Sequence[str], planted: Mutant | None, say: Say, file: str = mutant.file) -> int:
                return run_items(
                    [items[test] for test in tests if test in items], planted, functions[file], say
                )

            self._judge(mutant, run)
        return True


def _import_others() -> None:
    """Import what takes long and is not under test."""
    import hypothesis  # noqa: F401
    import pandas  # noqa: F401
    import torch.export
    import torch.fx.experimental.symbolic_shapes
    import transformers.models.bert.modeling_bert
    import transformers.models.resnet.modeling_resnet  # noqa: F401

    torch.set_num_threads(1)


if __name__ == "__main__":
    sys.exit(main())
