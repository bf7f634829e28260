"""The table of a run, one row a case: built from records, merged, compared with its plan, and written atomically."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from fxopt.errors import FxoptError

from ..records import Record
from .provenance import Run

REFUSAL = pa.struct([("pass", pa.string()), ("node", pa.string()), ("reason", pa.string())])

DESCRIBED: dict[str, tuple[pa.DataType, str]] = {
    "id": (pa.string(), "the name of the case: `MODEL-PIPELINE-DEVICE-CHECK`"),
    "model": (pa.string(), "the model"),
    "pipeline": (pa.string(), "the passes, joined by `+`; empty for what is checked before any pass"),
    "device": (pa.string(), "`cpu` or `cuda`"),
    "check": (pa.string(), "the check"),
    "dtype": (pa.string(), "the dtype of the model; of a sweep, the one that it was judged in"),
    "outcome": (pa.string(), "how the case ended"),
    "stage": (pa.string(), "the stage in which it ended"),
    "reason": (pa.string(), "why the outcome is not `pass`, or why `optimize` uses no graph"),
    "seconds": (pa.float64(), "the seconds that the case took"),
    "refusals": (pa.list_(REFUSAL), "the sites that a pass refused: pass, node, reason"),
    "run": (pa.string(), "the name of the run, which sorts by time"),
    "started": (pa.timestamp("us", tz="UTC"), "when the run started"),
    "commit": (pa.string(), "the commit of the repository, `-dirty` if tracked files differ"),
    "python": (pa.string(), "the version of Python"),
    "torch": (pa.string(), "the version of torch"),
    "transformers": (pa.string(), "the version of transformers"),
    "fxopt": (pa.string(), "the version of fxopt"),
    "device_name": (
        pa.string(),
        "the machine: processor, instructions, cores, BLAS and build of torch; or the GPU and CUDA",
    ),
    "threads": (pa.int64(), "the threads of timed cases"),
    "content": (
        pa.string(),
        "a digest of the definition of the case: rows with two of them are not compared",
    ),
    "plan": (pa.string(), "the number and a digest of all planned cases"),
    "left_out": (pa.string(), "the models that the plan leaves out, each with the package that is missing"),
    "options": (pa.string(), "the options with which `fxopt validate` finds the zoo and the passes"),
    "accepted": (pa.string(), "why a baseline holds this row in the place of a better one"),
}
"""The columns of every run, each with type and meaning; columns that an older file lacks are read as empty.

All other columns are measurements (float64) and facts (string), one column a name.
"""

COLUMNS = {name: kind for name, (kind, _) in DESCRIBED.items()}

REQUIRED = ("id", "model", "pipeline", "device", "check", "outcome")


def plan_of(ids: Collection[str]) -> str:
    """The number and the digest of the cases of a plan."""
    return f"{len(ids)}-{hashlib.sha256(' '.join(sorted(ids)).encode()).hexdigest()[:8]}"


def missing(table: pd.DataFrame) -> int:
    """The number of planned cases that a table lacks: 0 for a whole run, and if its plan is not known.

    At least 1 if other cases are in their place, after a merge of runs of two plans.
    """
    if "plan" not in table or not (plan := str(table.sort_values("started", kind="stable")["plan"].iloc[-1])):
        return 0
    ids = set(table["id"])
    return 0 if plan == plan_of(ids) else max(1, int(plan.partition("-")[0]) - len(ids))


def left_out(table: pd.DataFrame) -> str:
    """The models that the plan of a table leaves out, each with its missing package: `vit (timm), unet (diffusers)`."""
    return str(table.sort_values("started", kind="stable")["left_out"].iloc[-1])


def table_of(records: Sequence[Record], run: Run) -> pa.Table:
    """The records as one table, sorted by case; a measurement that a case lacks is null, not NaN.

    Raises `ReportError` if there are no records, or if a measurement has the name of a column of every run.
    """
    if not records:
        raise ReportError("there are no records to write: no case was run, so the previous report stays")
    rows = [_writable(_row(record, run)) for record in sorted(records, key=lambda record: record.case)]
    measured = sorted({name for record in records for name in record.measurements})
    stated = sorted({name for record in records for name in record.facts})
    if clash := [name for name in (*measured, *stated) if name in COLUMNS]:
        raise ReportError(f"measurements may not be called like a column of every run: {', '.join(clash)}")
    schema = pa.schema(COLUMNS | dict.fromkeys(measured, pa.float64()) | dict.fromkeys(stated, pa.string()))
    return stamped(pa.Table.from_pylist(rows, schema=schema))


def merge(tables: Sequence[pa.Table]) -> pa.Table:
    """Merge tables: of each case, keep the row that started last, so that merging again changes nothing.

    Raises `ReportError` for runs of several commits, versions or zoos.
    """
    try:
        joined = pa.concat_tables(
            [table.replace_schema_metadata() for table in tables], promote_options="default"
        )
    except pa.ArrowTypeError as error:
        text = f"one of these runs was written by another version of the harness ({first_line(error)}): move it away"
        raise ReportError(text) from error
    if differing := unlike(joined):
        raise ReportError(
            f"rows of one report are of one commit, versions and zoo; these differ in {differing}"
        )
    rows = joined.select(["id", "started"]).to_pandas().sort_values("started", kind="stable")
    chosen = rows.drop_duplicates("id", keep="last").sort_values("id", kind="stable")
    return stamped(joined.take(pa.array(chosen.index)))


SHARED = ("commit", "python", "torch", "transformers", "fxopt", "options")
"""The columns that must have one value in all rows of a report."""


def unlike(*tables: pa.Table | pd.DataFrame) -> str:
    """The columns of `SHARED` that differ between rows of some tables, with the values; empty if all agree."""
    found = {
        name: dict.fromkeys(str(value).strip() or "none" for each in tables for value in each[name].unique())
        for name in SHARED
    }
    return ", ".join(f"{name} ({', '.join(values)})" for name, values in found.items() if len(values) > 1)


def measurements_of(table: pd.DataFrame) -> list[str]:
    """The names of the measurements of a run: every column of numbers that not all runs have."""
    others = [name for name in table.columns if name not in COLUMNS]
    return [str(name) for name in others if pd.api.types.is_numeric_dtype(table[name])]


def _row(record: Record, run: Run) -> dict[str, object]:
    case = record.case
    return {
        **{n: value for each in (case, record, run) for n, value in vars(each).items() if n in COLUMNS},
        "id": case.id,
        "pipeline": "+".join(case.pipeline),
        "check": str(case.check),
        "outcome": str(record.outcome),
        "refusals": [dict(zip(("pass", "node", "reason"), row, strict=True)) for row in record.refusals],
        "run": run.id,
        "device_name": run.devices.get(case.device, ""),
        "accepted": "",
        **{name: float(value) for name, value in record.measurements.items()},
        **record.facts,
    }


def _writable(value: Any) -> Any:
    """Escape characters that UTF-8 cannot encode, such as those in a file name in an error text."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _writable(each) for key, each in value.items()}
    return [_writable(each) for each in value] if isinstance(value, list) else value


SCHEMA = 2
"""The version of the file format, stored as metadata; a later version of this package may write a higher one."""


class ReportError(FxoptError):
    """A run cannot be written or read; the message names the file and the remedy."""


def file_of(run: Path) -> Path:
    """The Parquet file of a run: the path itself, or the `records.parquet` in it."""
    return run / "records.parquet" if run.is_dir() else run


def replace(file: Path, content: bytes) -> None:
    """Write a file atomically: no reader ever sees a part of it."""
    unfinished = file.with_name(f".{file.name}.unfinished")
    unfinished.write_bytes(content)
    unfinished.replace(file)


def parquet(table: pa.Table) -> bytes:
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer)
    return buffer.getvalue().to_pybytes()  # type: ignore[no-any-return]


def stamped(table: pa.Table) -> pa.Table:
    return table.replace_schema_metadata({"fxopt.schema": str(SCHEMA)})


def check_schema(file: Path, version: int) -> None:
    if version > SCHEMA:
        raise ReportError(
            f"{file}: written by a later version of the harness (schema {version}, this is {SCHEMA})"
        )


def first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
