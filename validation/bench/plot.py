"""The plot of the zoo: for each kind of models the speed-up of each engine, with its geometric mean."""

from __future__ import annotations

import io

import numpy as np
import pandas as pd

_TICKS = (0.5, 0.7, 1, 1.4, 2, 3, 4, 6)


def mean(speedups: pd.Series) -> float:
    """The geometric mean."""
    return float(np.exp(np.log(speedups).mean()))


def drawn(ran: pd.DataFrame) -> bytes:
    """Draw rows of `zoo.parquet` of one machine and precision as SVG: a row a kind, a dot a model, a bar for the mean.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    kinds, engines = ["all", *ran["kind"].unique()], [*ran["engine"].unique()]
    figure = Figure(figsize=(8.3, 1 + 0.11 * len(kinds) * (len(engines) + 1.5)), layout="constrained")
    axes, of_kind = figure.subplots(), [ran, *(ran[ran["kind"] == kind] for kind in kinds[1:])]
    for place, engine in enumerate(engines):
        heights = [row + (place - (len(engines) - 1) / 2) / (len(engines) + 1.5) for row in range(len(kinds))]
        groups = [rows[rows["engine"] == engine] for rows in of_kind]
        means = [mean(group["speedup"]) for group in groups]
        (bars,) = axes.plot(means, heights, "|", markersize=9, markeredgewidth=3, label=engine)
        for group, height in zip(groups[1:], heights[1:], strict=True):
            dots = np.full(len(group), height)
            axes.plot(group["speedup"], dots, "o", color=bars.get_color(), markersize=4, alpha=0.35, mew=0)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
    axes.minorticks_off()
    first = ran.iloc[0]
    where = f"{first['precision']}, {first['threads']} threads, {first['machine'].partition(';')[0]}"
    axes.set_xlabel(f"eager's time ÷ the engine's (dots: models, bars: geometric means)\n{where}")
    labels = [f"{kind}, {rows['model'].nunique()}" for kind, rows in zip(kinds, of_kind, strict=True)]
    axes.set_yticks(range(len(kinds)), labels)
    axes.invert_yaxis()
    axes.grid(axis="x", linewidth=0.3)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(engines), frameon=False)
    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "fxopt", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
