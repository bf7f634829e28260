"""One run is one Parquet file, one row a case; everything else that a run shows is a view of that table."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from fxopt.errors import FxoptError
from validation.records import Record

REFUSAL = pa.struct([("pass", pa.string()), ("node", pa.string()), ("reason", pa.string())])

# The columns that every run has. All others are measurements, a float64 column a name, and facts, a string
# column a name.
COLUMNS: dict[str, pa.DataType] = {
    "id": pa.string(),
    "model": pa.string(),
    "pipeline": pa.string(),  # names of passes joined by "+"; empty for what is checked before any pass
    "device": pa.string(),
    "check": pa.string(),
    "dtype": pa.string(),
    "outcome": pa.string(),
    "stage": pa.string(),
    "reason": pa.string(),
    "seconds": pa.float64(),
    "refusals": pa.list_(REFUSAL),
    "run": pa.string(),
    "started": pa.timestamp("us", tz="UTC"),
    "commit": pa.string(),
    "python": pa.string(),
    "torch": pa.string(),
    "transformers": pa.string(),
    "device_name": pa.string(),
    "threads": pa.int64(),
}


class ReportError(FxoptError):
    """A run cannot be written or read: the message names the file and says what to do."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What all records of one run share.

    `devices` maps a device of the cases (`cpu`, `cuda`) to the name of the hardware, `threads` is the
    number of threads that timed cases ran with. `Run.now` fills it in for the running process.
    """

    started: datetime.datetime
    commit: str
    python: str
    torch: str
    transformers: str
    devices: Mapping[str, str]
    threads: int

    @property
    def id(self) -> str:
        """Sorts by time, and tells two runs of the same second apart: `20260102T030405.678Z-acf9a7c1`."""
        utc = self.started.astimezone(datetime.UTC)
        stamp = f"{utc:%Y%m%dT%H%M%S}.{utc.microsecond // 1000:03d}Z"
        return "-".join(filter(None, [stamp, self.commit]))

    @classmethod
    def now(cls, *, threads: int, devices: Iterable[str] = ("cpu",)) -> Run:
        """The run that starts now, on this machine, with the installed versions."""
        return cls(
            started=datetime.datetime.now(datetime.UTC),
            commit=_commit(),
            python=platform.python_version(),
            torch=_version("torch"),
            transformers=_version("transformers"),
            devices={device: _device_name(device) for device in devices},
            threads=threads,
        )


def table_of(records: Sequence[Record], run: Run) -> pa.Table:
    """The records as one table, sorted by case; a measurement that a case lacks is null, not NaN.

    Raises `ReportError` when there are no records, when two records have the same case, or when a measurement
    has the name of a column that every run has.
    """
    if not records:
        raise ReportError("there are no records to write: no case was run, so the previous report stays")
    rows = [_row(record, run) for record in sorted(records, key=lambda record: record.case)]
    repeated = pd.Series([row["id"] for row in rows]).value_counts().loc[lambda count: count > 1].index
    if len(repeated):
        raise ReportError(f"more than one record of the same case: {', '.join(map(str, repeated))}")
    measured = sorted({name for record in records for name in record.measurements})
    stated = sorted({name for record in records for name in record.facts})
    if clash := [name for name in (*measured, *stated) if name in COLUMNS]:
        raise ReportError(f"measurements may not be called like a column of every run: {', '.join(clash)}")
    schema = pa.schema(COLUMNS | dict.fromkeys(measured, pa.float64()) | dict.fromkeys(stated, pa.string()))
    return pa.Table.from_pylist(rows, schema=schema)


def file_of(run: Path) -> Path:
    """The Parquet file of a run: the path itself, or the `records.parquet` in it."""
    return run / "records.parquet" if run.is_dir() else run


def read_run(path: Path) -> pd.DataFrame:
    """The table of one run, from its Parquet file or from the directory that holds `records.parquet`.

    Raises `ReportError` when there is no such file, or when it is not the table of a run.
    """
    file = file_of(path)
    if not file.is_file():
        raise ReportError(f"{file}: no such file; `pytest validation` writes one")
    try:
        table = pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise ReportError(f"{file}: not a readable Parquet file ({_first_line(error)})") from error
    if missing := [name for name in COLUMNS if name not in table.column_names]:
        raise ReportError(f"{file}: not the table of a run, it has no column {', '.join(missing)}")
    if not table.num_rows:
        raise ReportError(f"{file}: the table of this run is empty")
    frame: pd.DataFrame = table.to_pandas()
    return frame


def seconds_by_group(directory: Path) -> dict[str, float]:
    """How long the cases of each model on each device took in the runs of a directory, by `<model>-<device>`."""
    seconds: Counter[str] = Counter()
    for file in sorted(directory.glob("*.parquet")):
        if "engine" in pq.read_schema(file).names:
            continue  # a benchmark's table beside the runs
        table = read_run(file)
        for model, device, took in zip(table["model"], table["device"], table["seconds"], strict=True):
            seconds[f"{model}-{device}"] += took
    return dict(seconds)


def measurements_of(table: pd.DataFrame) -> list[str]:
    """The names of the measurements of a run: every column of numbers that not all runs have."""
    others = [name for name in table.columns if name not in COLUMNS]
    return [str(name) for name in others if pd.api.types.is_numeric_dtype(table[name])]


def write_table(table: pa.Table, directory: Path) -> None:
    """Writes `records.parquet`, and `records.csv` for those who have no Parquet reader."""
    pq.write_table(table, directory / "records.parquet")
    frame = table.to_pandas()
    frame["refusals"] = [json.dumps(list(refusals)) for refusals in frame["refusals"]]
    frame.to_csv(directory / "records.csv", index=False)


def append_history(table: pa.Table, directory: Path) -> Path:
    """Adds the table of a run to the history, one file a run; returns the file."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"{table['run'][0].as_py()}.parquet"
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer)
    replace(file, buffer.getvalue())
    return file


def replace(file: Path, content: bytes) -> None:
    """Writes a file at once: nobody ever sees a part of it."""
    unfinished = file.with_name(f".{file.name}.unfinished")
    unfinished.write_bytes(content)
    unfinished.replace(file)


def history(directory: Path) -> pd.DataFrame:
    """The records of every run in the history, oldest run first; measurements a run lacks are missing.

    Raises `ReportError` when the directory holds no run, or a file that cannot be read.
    """
    files = sorted(str(file) for file in directory.glob("*.parquet") if not file.name.startswith("."))
    if not files:
        raise ReportError(f"{directory}: no runs here; every `pytest validation` adds one")
    with duckdb.connect() as connection:
        try:
            connection.execute("SET TimeZone = 'UTC'")
            query = "SELECT * FROM read_parquet(?, union_by_name = true) ORDER BY started, run, id"
            frame: pd.DataFrame = connection.sql(query, params=[files]).to_arrow_table().to_pandas()
            return frame
        except duckdb.Error as error:
            for file in files:  # duckdb does not always name the file that is at fault
                read_run(Path(file))
            raise ReportError(f"{directory}: cannot be read ({_first_line(error)})") from error


@contextlib.contextmanager
def replacing(directory: Path) -> Iterator[Path]:
    """Yields an empty directory that takes the place of `directory` if the block ends without an error.

    Until then, and after an error, `directory` is as it was. Raises `ReportError` when `directory` holds
    something that is not a report, which would be lost.
    """
    directory = directory.resolve()
    if directory.exists() and not _is_report(directory):
        raise ReportError(f"{directory}: not replaced, because it is not a report; choose another directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished, previous = (
        directory.with_name(f".{directory.name}-{state}-{uuid.uuid4().hex}") for state in ("new", "old")
    )
    unfinished.mkdir()
    try:
        yield unfinished
        if directory.exists():
            directory.rename(previous)
        try:
            unfinished.rename(directory)
        except OSError:
            if previous.exists():
                previous.rename(directory)
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    shutil.rmtree(previous, ignore_errors=True)


def _row(record: Record, run: Run) -> dict[str, object]:
    case = record.case
    return {
        "id": case.id,
        "model": case.model,
        "pipeline": "+".join(case.pipeline),
        "device": case.device,
        "check": str(case.check),
        "dtype": record.dtype,
        "outcome": str(record.outcome),
        "stage": record.stage,
        "reason": record.reason,
        "seconds": record.seconds,
        "refusals": [dict(zip(("pass", "node", "reason"), row, strict=True)) for row in record.refusals],
        "run": run.id,
        "started": run.started,
        "commit": run.commit,
        "python": run.python,
        "torch": run.torch,
        "transformers": run.transformers,
        "device_name": run.devices.get(case.device, ""),
        "threads": run.threads,
        **{name: float(value) for name, value in record.measurements.items()},
        **record.facts,
    }


def _is_report(directory: Path) -> bool:
    return directory.is_dir() and ((directory / "records.parquet").is_file() or not any(directory.iterdir()))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    """The commit that this file belongs to, `-dirty` if tracked files differ; empty outside a checkout."""
    here = Path(__file__)

    def git(*arguments: str) -> str | None:
        try:
            command = ["git", "-C", str(here.parent), *arguments]
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", here.name) is None:
        return ""  # installed somewhere inside another project's checkout
    commit = git("rev-parse", "--short=8", "HEAD") or ""
    return commit + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")


def _device_name(device: str) -> str:
    if device.partition(":")[0] == "cuda":
        import torch  # reading a report must not wait for torch to load

        return torch.cuda.get_device_name(device) if torch.cuda.is_available() else ""
    if device == "cpu":
        with contextlib.suppress(OSError):  # Linux alone has this file
            for line in Path("/proc/cpuinfo").read_text().splitlines():
                if line.startswith("model name"):
                    return f"{line.partition(':')[2].strip()}, {os.cpu_count()} cores"
        return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    return ""
