"""A run is a journal while it lasts and then one Parquet file, one row a case; all else that it shows are views of that."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import filelock
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fxopt.errors import FxoptError

from .records import FAILING, Record

REFUSAL = pa.struct([("pass", pa.string()), ("node", pa.string()), ("reason", pa.string())])

SCHEMA = 2
"""The version of the files, in their metadata; a higher one was written by a later version of this package."""

# The columns that every run has, and those that the first version of the files lacked get empty. All others are
# measurements, a float64 column a name, and facts, a string column a name.
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
    "content": pa.string(),  # digest of what the case is made of: rows of one id with two of them are not alike
    "plan": pa.string(),  # number and digest of all cases of the plan that the run belongs to
    "accepted": pa.string(),  # why a baseline takes this row in the place of a better one
}
REQUIRED = ("id", "model", "pipeline", "device", "check", "outcome")


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
    plan: str = ""

    @property
    def id(self) -> str:
        """Sorts by time, and tells two runs of the same second apart: `20260102T030405.678Z-acf9a7c1`."""
        utc = self.started.astimezone(datetime.UTC)
        stamp = f"{utc:%Y%m%dT%H%M%S}.{utc.microsecond // 1000:03d}Z"
        return "-".join(filter(None, [stamp, self.commit]))

    @classmethod
    def now(
        cls, *, threads: int, devices: Iterable[str] = ("cpu",), plan: str = "", root: Path = Path()
    ) -> Run:
        """The run that starts now, on this machine, with the installed versions and the commit that `root` is at."""
        return cls(
            started=datetime.datetime.now(datetime.UTC),
            commit=_commit(root),
            python=platform.python_version(),
            torch=_version("torch"),
            transformers=_version("transformers"),
            devices={device: _device_name(device) for device in devices},
            threads=threads,
            plan=plan,
        )


def plan_of(ids: Collection[str]) -> str:
    """The number and the digest of the cases of a plan."""
    return f"{len(ids)}-{hashlib.sha256(' '.join(sorted(ids)).encode()).hexdigest()[:8]}"


def missing(table: pd.DataFrame) -> int:
    """How many cases of its plan a table lacks: 0 for a whole run, and where its plan is not known.

    At least 1 where it has others in their place: a merge of runs of two plans.
    """
    if "plan" not in table or not (plan := str(table.sort_values("started", kind="stable")["plan"].iloc[-1])):
        return 0
    ids = set(table["id"])
    return 0 if plan == plan_of(ids) else max(1, int(plan.partition("-")[0]) - len(ids))


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
    return _stamped(pa.Table.from_pylist(rows, schema=schema))


def file_of(run: Path) -> Path:
    """The Parquet file of a run: the path itself, or the `records.parquet` in it."""
    return run / "records.parquet" if run.is_dir() else run


def read_run(path: Path) -> pd.DataFrame:
    """The table of one run: of its Parquet file, the directory that holds `records.parquet`, or its journal.

    Raises `ReportError` when there is no such file, or when it is not the table of a run.
    """
    frame: pd.DataFrame = read_table(path).to_pandas()
    return frame


def read_table(path: Path) -> pa.Table:
    """What `read_run` reads, with every column of this version; the new ones are empty in a file of an older one."""
    file = file_of(path)
    if not file.is_file():
        raise ReportError(f"{file}: no such file; `fxopt validate` writes one")
    if file.suffix == ".jsonl":
        return _read_journal(file)
    try:
        table = pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise ReportError(f"{file}: not a readable Parquet file ({_first_line(error)})") from error
    _check_schema(file, int((table.schema.metadata or {}).get(b"fxopt.schema", 1)))
    if lacking := [name for name in REQUIRED if name not in table.column_names]:
        raise ReportError(f"{file}: not the table of a run, it has no column {', '.join(lacking)}")
    if not table.num_rows:
        raise ReportError(f"{file}: the table of this run is empty")
    for name, kind in COLUMNS.items():
        if name not in table.column_names:
            empty: object = "" if kind == pa.string() else [] if pa.types.is_list(kind) else None
            table = table.append_column(name, pa.array([empty] * table.num_rows, kind))
    return table


def merge(tables: Sequence[pa.Table]) -> pa.Table:
    """One table of several: of each case the row that started last, so that merging it again changes nothing."""
    joined = pa.concat_tables(
        [table.replace_schema_metadata() for table in tables], promote_options="default"
    )
    rows = joined.select(["id", "started"]).to_pandas().sort_values("started", kind="stable")
    chosen = rows.drop_duplicates("id", keep="last").sort_values("id", kind="stable")
    return _stamped(joined.take(pa.array(chosen.index)))


def accept(case: str, reason: str, current: Path, baseline: Path) -> None:
    """Puts the row of one case into a baseline, with the reason, or takes it out where `current` lacks it.

    Raises `ReportError` without a reason, and for a case that neither has, that fails, or that a partial run may just
    not have run.
    """
    if not reason.strip():
        raise ReportError(f"{case}: --reason is empty: say why its change is right")
    new, old = read_table(current), read_table(baseline)
    rest, row = (
        old.filter(pc.not_equal(old["id"], case)),
        new.filter(pc.equal(new["id"], case)),
    )
    if row.num_rows:
        found = row.to_pylist()[0]
        if found["outcome"] in FAILING:
            known = {"check": found["check"], "pipeline": found["pipeline"], "stage": found["stage"]}
            entry = ", ".join(
                f"{key}: {json.dumps(value)}" for key, value in {**known, "reason": reason}.items()
            )
            raise ReportError(f"{case} fails; its model may say so in the zoo: known_failures: [{{{entry}}}]")
        row = row.set_column(row.column_names.index("accepted"), "accepted", pa.array([reason]))
    elif rest.num_rows == old.num_rows:
        raise ReportError(f"{case}: neither {current} nor {baseline} has this case")
    elif missing(new.to_pandas()):
        raise ReportError(f"{case}: {current} is a part of a run, and may just not have run it")
    joined = pa.concat_tables(
        [part.replace_schema_metadata() for part in (rest, row)], promote_options="default"
    )
    replace(file_of(baseline), _parquet(_stamped(joined.sort_by("id"))))


def seconds_by_group(directory: Path) -> dict[str, float]:
    """How long the cases of each model on each device took in the runs of a directory, by `<model>-<device>`."""
    seconds: Counter[str] = Counter()
    for file in sorted(directory.glob("*.parquet")):
        with contextlib.suppress(ReportError, pa.ArrowException):  # without it, only the order is another
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


def write_table(table: pa.Table, directory: Path) -> list[Path]:
    """Writes `records.parquet`, and `records.csv` for those who have no Parquet reader."""
    directory.mkdir(parents=True, exist_ok=True)
    files = [directory / "records.parquet", directory / "records.csv"]
    replace(files[0], _parquet(table))
    frame = table.to_pandas()
    frame["refusals"] = [json.dumps(list(refusals)) for refusals in frame["refusals"]]
    replace(files[1], frame.to_csv(index=False).encode())
    return files


def append_history(table: pa.Table, directory: Path) -> Path:
    """Adds the table of a run to the history, one file a run; returns the file."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"{table['run'][0].as_py()}.parquet"
    replace(file, _parquet(table))
    return file


def replace(file: Path, content: bytes) -> None:
    """Writes a file at once: nobody ever sees a part of it."""
    unfinished = file.with_name(f".{file.name}.unfinished")
    unfinished.write_bytes(content)
    unfinished.replace(file)


def history(directory: Path) -> pd.DataFrame:
    """The records of every run in the history, oldest run first; measurements a run lacks are missing.

    A file that cannot be read is passed over, with a warning. Raises `ReportError` when no run is left.
    """
    runs = []
    for file in sorted(directory.glob("*.parquet")):
        if not file.name.startswith("."):
            try:
                runs.append(read_table(file).replace_schema_metadata())
            except ReportError as error:
                warnings.warn(f"passed over: {error}", stacklevel=2)
    if not runs:
        raise ReportError(f"{directory}: no runs here; every whole `fxopt validate` adds one")
    joined: pd.DataFrame = pa.concat_tables(runs, promote_options="default").to_pandas()
    return joined.sort_values(["started", "run", "id"], ignore_index=True)


class Journal:
    """The records of a run as they arrive, one line each, in a folder that no other run writes to meanwhile.

    Args:
        directory: where reports are kept.
        run: the one that begins.

    Raises:
        ReportError: when the folder cannot be written, or another run has it.
    """

    def __init__(self, directory: Path, run: Run) -> None:
        self._lock = filelock.FileLock(directory / ".lock")
        self.file = directory / "running" / f"{run.id}.jsonl"
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
            facts = {**dataclasses.asdict(run), "started": run.started.isoformat()}
            self.file.write_text(json.dumps({"schema": SCHEMA, "run": facts}) + "\n", encoding="utf-8")
        except filelock.Timeout as error:
            text = "another run writes here: wait for it, or choose another folder with --fx-report-dir"
            raise ReportError(f"{directory}: {text}") from error
        except OSError as error:
            self._lock.release()
            raise ReportError(f"{directory}: cannot be written ({error}); choose another folder") from error

    def append(self, record: Record) -> None:
        """Adds a record. Raises `OSError`, such as for a full disk: what was added before is safe."""
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record.to_json()) + "\n")

    def close(self, written: bool) -> None:
        """Leaves the folder to others; the file goes when all of it is `written` elsewhere."""
        if written:
            self.file.unlink(missing_ok=True)
        self._lock.release()


def _read_journal(file: Path) -> pa.Table:
    """The table of a journal, without what was cut off when its process died."""
    try:
        first, *lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
        header = json.loads(first)
        _check_schema(file, header["schema"])
        started = datetime.datetime.fromisoformat(header["run"]["started"])
        run = Run(**{**header["run"], "started": started})
        records = [Record.from_json(json.loads(line)) for line in lines[:-1]]  # the last is empty, or cut off
    except (ValueError, KeyError, TypeError) as error:
        raise ReportError(f"{file}: not the journal of a run ({_first_line(error)})") from error
    return table_of(list({record.case: record for record in records}.values()), run)


def _check_schema(file: Path, version: int) -> None:
    if version > SCHEMA:
        raise ReportError(
            f"{file}: written by a later version of the harness (schema {version}, this is {SCHEMA})"
        )


def _stamped(table: pa.Table) -> pa.Table:
    return table.replace_schema_metadata({"fxopt.schema": str(SCHEMA)})


def _parquet(table: pa.Table) -> bytes:
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer)
    return buffer.getvalue().to_pybytes()  # type: ignore[no-any-return]


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
        "content": record.content,
        "plan": run.plan,
        "accepted": "",
        **{name: float(value) for name, value in record.measurements.items()},
        **record.facts,
    }


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _commit(root: Path) -> str:
    """The commit of the repository that `root` is in, `-dirty` if tracked files differ; empty where it is in none."""

    def git(*arguments: str) -> str:
        try:
            command = ["git", "-C", str(root), *arguments]
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short=8", "HEAD")
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
