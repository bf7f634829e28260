"""The cost of a fleet beside the cases themselves: cases that do nothing, from the plan to the comparison."""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from .. import store
from ..records import Case, Check, Outcome, Record
from ..regressions.compare import compare
from ..running.fleet import Fleet


def fleet(rows: Annotated[int, typer.Option(help="How many cases.")] = 100_000) -> None:
    """Plan so many cases of 100 a model, run them on a Ray cluster of this machine, journal, merge and compare them."""
    engine = Fleet(nothing, one_minute)
    began = time.perf_counter()
    cases = [Case(f"model-{n // 100}", (f"Pass{n % 100}",), "cpu", Check.EFFECT) for n in range(rows)]
    run = store.Run.now(threads=1, plan=store.plan_of([case.id for case in cases]))
    planned = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        journal = store.Journal(Path(directory), run)
        records = []
        for record in engine.run(cases):
            journal.append(record)
            records.append(record)
        ran = time.perf_counter()
        table = store.table_of(records, run)
        merged = store.merge([table, store.read_table(journal.file)])
        changes = len(compare(table.to_pandas(), merged.to_pandas()))
        journal.close(written=True)
    done = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    typer.echo(
        f"{merged.num_rows:,} cases: planned in {planned - began:.1f} s, run in {ran - planned:.1f} s "
        f"({(ran - planned) / rows * 1e3:.2f} ms a case), merged and compared in {done - ran:.1f} s "
        f"({changes} changes), at most {peak:.2f} GiB in the process that drives"
    )


def nothing(entered: Callable[[Case, str], None]) -> Callable[[Case], Record]:
    """A worker whose cases pass at once."""
    return lambda case: Record(case, Outcome.PASS, measurements={"relative_error": 1e-7})


def one_minute(case: Case) -> float:
    """The limit of every case."""
    return 60.0
