"""Plants faults in fxopt and validation, and runs the tests that execute them: `python -m tests.mutation [path ...]`.

The faults are those that the operators make of the files, in an order that the seed draws. Verdicts are appended to
`reports/mutation/verdicts.jsonl`, and those that are there are not made again. At the end the score of each folder and
what survived are written to `reports/mutation/mutation.md`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.mutation.executed import Executed
from tests.mutation.forks import NOT_PLANTED, TIME_LIMIT, FirstFailure, in_fork
from tests.mutation.operators import Mutant, mutants
from tests.mutation.planting import ROOT, functions_by_file
from tests.mutation.report import BROKEN, CAUGHT, SURVIVED, UNTESTED, append, page, read

FOLDER = ROOT / "reports" / "mutation"
EXECUTED = FOLDER / "executed.db"
VERDICTS = FOLDER / "verdicts.jsonl"
EQUIVALENT = Path(__file__).with_name("equivalent.toml")

LIMIT = 20
"""CPU seconds of tests that each mutant is shown."""

OPTIONS = ["-q", "-s", "-p", "no:cacheprovider"]


def main() -> int:
    """Do what the command line says; return 1 where a process died, or the score is lower than asked for."""
    options = _options()
    FOLDER.mkdir(parents=True, exist_ok=True)
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    if not EXECUTED.exists():
        _record(options.jobs)
    sample, marked = _sample(options.paths or ["fxopt", "validation"], options.sample, options.seed)
    print(f"{len(sample)} mutants; {marked} others are marked as equivalent", flush=True)
    known = {*read(VERDICTS)["key"]}
    to_do = [mutant for mutant in sample if mutant.key not in known]
    workers = []
    for number in range(min(options.jobs, len(to_do))):
        workers.append(os.fork())
        if not workers[-1]:
            os._exit(_Judge().judge(to_do[number :: options.jobs]))
    failures = [os.waitpid(worker, 0)[1] for worker in workers]
    if any(failures):
        print(f"a process ended before its last mutant: is {EXECUTED} older than the tests?")
        return 1
    verdicts = read(VERDICTS)
    title = f"seed {options.seed}; {marked} others are marked as equivalent"
    text, score = page(verdicts[verdicts["key"].isin([mutant.key for mutant in sample])], title)
    (FOLDER / "mutation.md").write_text(text, encoding="utf-8")
    print(text)
    return int(score < options.least)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("paths", nargs="*", help="files or folders; default: fxopt and validation")
    parser.add_argument("--sample", type=int, help="how many mutants; default: all")
    parser.add_argument(
        "--seed", type=int, default=0, help="a larger sample begins with a smaller one of its seed"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes, each of some 2 GiB")
    parser.add_argument("--least", type=float, default=0, help="the score below which the command fails")
    return parser.parse_args()


def _record(jobs: int) -> None:
    """Run all tests once, and record which lines each executes."""
    print("one run of all tests, to see which executes which line", flush=True)
    options = [*OPTIONS[:1], "-p", "tests.mutation.executed", "-n", str(jobs), "--dist", "worksteal", "tests"]
    unfinished = EXECUTED.with_suffix(".unfinished")
    unfinished.unlink(missing_ok=True)
    environment = {**os.environ, "EXECUTED": str(unfinished)}
    subprocess.run([sys.executable, "-m", "pytest", *options], cwd=ROOT, env=environment, check=False)
    unfinished.rename(EXECUTED)


def _sample(paths: Sequence[str], size: int | None, seed: int) -> tuple[list[Mutant], int]:
    """The first mutants in the order of the seed, and how many are marked as equivalent."""
    files = sorted(
        {file for path in paths for file in [ROOT / path, *(ROOT / path).rglob("*.py")] if file.is_file()}
    )
    found = [
        mutant
        for file in files
        for mutant in mutants(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8"))
    ]
    marks = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8")).get("mutant", [])
    marked = {(mark["digest"], mark["change"]) for mark in marks}
    random.Random(seed).shuffle(found)  # before some are marked: the others keep their order
    left = [mutant for mutant in found if (mutant.digest, mutant.change) not in marked]
    executed = Executed(EXECUTED)
    sample = itertools.islice((mutant for mutant in left if not executed.at_import(mutant)), size)
    return [*sample], len(found) - len(left)


class _Judge:
    """Writes for each mutant whether a test fails with it that passes without it.

    It is a plugin of pytest, too: instead of all tests that are collected it runs some in forks.
    """

    def __init__(self) -> None:
        self._executed = Executed(EXECUTED)
        self._sound, self._unsound = set[str](), set[str]()

    def judge(self, sample: Sequence[Mutant]) -> int:
        """Import the tests that may see one of the mutants, and judge each; return the status of pytest."""
        self._sample = sample
        tests = (test for mutant in sample for test in self._executed.tests(mutant, LIMIT)[0])
        return pytest.main([*OPTIONS, *sorted({test.partition("::")[0] for test in tests})], plugins=[self])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Judge the mutants, of whose files all functions are imported now."""
        self._items = {item.nodeid: item for item in session.items}
        self._functions = functions_by_file()
        for mutant in self._sample:
            self._judge(mutant)
        return True

    def _judge(self, mutant: Mutant) -> None:
        outcome, failed, tests = "", "", list[str]()
        while not outcome:
            tests, seconds = self._executed.tests(mutant, LIMIT, self._unsound)
            status, failed = (
                self._run(tests, seconds, mutant) if tests else (pytest.ExitCode.NO_TESTS_COLLECTED, "")
            )
            if status == pytest.ExitCode.TESTS_FAILED and not self._passes(failed):
                continue
            outcomes = {0: SURVIVED, pytest.ExitCode.NO_TESTS_COLLECTED: UNTESTED, NOT_PLANTED: BROKEN}
            outcome = outcomes.get(status, CAUGHT)
            failed = failed or "time limit" * (status == TIME_LIMIT)
        append(VERDICTS, mutant, outcome, failed, len(tests))
        print(f"{outcome:9}{mutant.file}:{mutant.line} {' '.join(mutant.change.split())}"[:150], flush=True)

    def _passes(self, test: str) -> bool:
        """Tell whether a test passes without a fault, alone."""
        if test not in self._sound | self._unsound:
            (self._unsound if self._run([test], LIMIT, None)[0] else self._sound).add(test)
        return test in self._sound

    def _run(self, tests: Sequence[str], seconds: float, mutant: Mutant | None) -> tuple[int, str]:
        functions = self._functions.get(mutant.file, ()) if mutant else ()

        def run(first_failure: FirstFailure) -> int:
            items = [self._items[test] for test in tests]
            items[0].config.pluginmanager.register(first_failure)
            for item, following in zip(items, [*items[1:], None], strict=True):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            return 0

        return in_fork(run, seconds, mutant, functions)


if __name__ == "__main__":
    sys.exit(main())
