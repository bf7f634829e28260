"""The views of the table of peers: Markdown, and a plot."""

from __future__ import annotations

import dataclasses
import io
import math

import altair as alt
import pandas as pd

from ..report.markdown import escape, page, pipes
from ..report.wording import ABSENT
from .engine_rows import Row
from .engines import AGAIN, EAGER
from .machine import BUSY

CASE = ["model", "precision", "threads"]
"""The columns that say what was compared: one table each."""

INTRODUCTION = f"""\
`{EAGER}` is the model itself in float32 under `torch.no_grad()`. Every round runs all engines in a new random order, each \
twice, of which the second run counts. *Speed-up* is eager's time divided by the engine's own in the same round: the \
median with its 95 % bootstrap interval. `{AGAIN}` is the same model once more: as far as its speed-up is from 1, the \
measurement is off. All engines have the same number of threads, and those of others than torch do not wait actively \
(`session.intra_op.allow_spinning=0`), but for `onnxruntime, spinning`, which does so within a run, as is its default.

*GFLOP/s* counts matrix products and convolutions, also where an engine saves some; in brackets it is beside the best \
product of two float32 matrices (1024 or 2048 square) that torch reached in the same run. *Error* is the largest difference to \
the model in float64, relative to the largest value of the output, in brackets as a multiple of eager's; *cosine* is the \
similarity to float64; both are of the worst output."""

FIRST_CALL = {
    True: """\
*First call* goes from the model in memory to the first result, in a process of its own that has imported torch and \
transformers, with empty caches. *Resident* is the memory of this process after it and *peak* the most on the way, \
the model that it was made from included; processes that compile for inductor are not counted.""",
    False: """\
Where memory was not measured, *first call* is timed in the process that measures, which has run the model before.""",
}
"""How first calls were measured: in processes of their own or not."""

_NOT_IDLE = f"⚠️ **The machine was not idle**: other processes used {{:.1f}} cores (more than {BUSY}), so the times say little."


def document(table: pd.DataFrame) -> str:
    """The page: how it was measured and on which machine, the plot, then one table a case."""
    cases = [_case(_rows(rows)) for _, rows in table.groupby(CASE, sort=False)]
    return page(
        "# fxopt beside its peers",
        INTRODUCTION,
        "\n\n".join(text for alone, text in FIRST_CALL.items() if (table["alone"] == alone).any()),
        pipes(_conditions(table)),
        "![speed-up over eager, by engine, model and number of threads](peers.svg)",
        *(block for blocks in cases for block in blocks),
    )


def plot(table: pd.DataFrame, kind: str) -> bytes:
    """Bars of the speed-up over eager with their intervals, one frame a case, as `svg` or `png`."""
    rows = [row for row in _rows(table) if not row.reason and row.engine != EAGER]
    engines = list(dict.fromkeys(row.engine for row in rows))
    cases = list(dict.fromkeys((row.model, _run(row) + _mark(row)) for row in rows))
    frames = [
        _frame([row for row in rows if (row.model, _run(row) + _mark(row)) == case], engines)
        for case in cases
    ]
    columns = max(sum(model == first for model, _ in cases) for first, _ in cases)
    chart = alt.concat(*frames, columns=columns).resolve_scale(x="shared", color="shared")
    if kind == "png":
        picture = io.BytesIO()
        chart.save(picture, format="png", scale_factor=2)
        return picture.getvalue()
    text = io.StringIO()
    chart.save(text, format="svg")
    return text.getvalue().encode()


def _frame(rows: list[Row], engines: list[str]) -> alt.LayerChart:
    """One model at one precision and number of threads; an engine has the same colour in all frames."""
    names = ("engine", "speedup", "speedup_low", "speedup_high")
    data = alt.Data(values=[{name: getattr(row, name) for name in names} for row in rows])
    y = alt.Y("engine:N", sort=[row.engine for row in rows], title=None, axis=alt.Axis(labelLimit=200))
    x = alt.X("speedup:Q", title="speed-up over eager")
    color = alt.Color("engine:N", scale=alt.Scale(domain=engines), legend=None)
    bars = alt.Chart().mark_bar().encode(x=x, y=y, color=color)
    ends = alt.Chart().mark_rule().encode(x=alt.X("speedup_low:Q"), x2="speedup_high:Q", y=y)
    eager = alt.Chart().mark_rule(strokeDash=[4, 3]).encode(x=alt.datum(1))
    title = f"{rows[0].model}, {_run(rows[0])}{_mark(rows[0])}"
    chart: alt.LayerChart = alt.layer(bars, ends, eager, data=data, title=title, width=260)
    return chart


def _case(rows: list[Row]) -> list[str]:
    """The blocks of one table: a heading, a mark where the machine was not idle, the table, and who is left out."""
    ran = [row for row in rows if not row.reason]
    first = ran[0]
    busy = max(first.busy_before, first.busy_during)
    return [
        f"## {first.model}, {_run(first)}",
        "" if first.idle else _NOT_IDLE.format(busy),
        pipes(pd.DataFrame([_numbers(row) for row in ran])),
        f"{first.rounds:,} rounds. Float32 matrix products reach {first.gemm_gflops:,.0f} GFLOP/s; other processes used "
        f"{busy:.2f} cores.",
        "\n".join(f"- Left out: {row.engine}: {escape(row.reason)}" for row in rows if row.reason),
    ]


def _numbers(row: Row) -> dict[str, str]:
    """One line of a table."""
    return {
        "engine": row.engine + _mark(row),
        "median, ms": f"{row.median_ms:,.2f}",
        "speed-up (95 %)": f"{row.speedup:.2f} ({row.speedup_low:.2f} to {row.speedup_high:.2f})",
        "GFLOP/s (of GEMM)": f"{row.gflops:,.1f} ({row.gflops / row.gemm_gflops:.0%})",
        "first call, s": f"{row.first_call_s:.2f}",
        "resident, MB": _megabytes(row.resident_mb),
        "peak, MB": _megabytes(row.peak_mb),
        "error (of eager's)": f"{row.error:.1e} ({row.error_ratio:.1f})",
        "cosine": f"{row.cosine:.6f}",
    }


def _conditions(table: pd.DataFrame) -> pd.DataFrame:
    """The machine and versions; where runs differ, all of them."""
    names = {
        "machine": "machine",
        "instructions": "instructions",
        "versions": "versions",
        "settings": "environment",
        "system": "system",
        "commit": "commit",
        "started": "measured",
    }
    rows = {}
    for column, name in names.items():
        values = table[column]
        if column == "started":
            values = pd.to_datetime(values).dt.strftime("%Y-%m-%d")
        rows[name] = "; ".join(dict.fromkeys(str(value) for value in values if value)) or ABSENT
    rows["threads"] = ", ".join(map(str, sorted(set(table["threads"]))))
    rows["idle"] = "yes" if table["idle"].all() else "no, see the marks ⚠️"
    return pd.DataFrame(rows.items(), columns=["made with", ""])


def _rows(table: pd.DataFrame) -> list[Row]:
    fields = [field.name for field in dataclasses.fields(Row)]
    return [Row(**dict(zip(fields, values, strict=True))) for values in table[fields].itertuples(index=False)]


def _run(row: Row) -> str:
    return f"{row.precision}, {row.threads} thread{'' if row.threads == 1 else 's'}"


def _mark(row: Row) -> str:
    return "" if row.idle else " ⚠️"


def _megabytes(value: float) -> str:
    return ABSENT if math.isnan(value) else f"{value:,.0f}"
