"""The HTML report: one file with its data, style and script inside, which asks nothing of the network."""

from __future__ import annotations

from pathlib import Path

import jinja2
import pandas as pd

from . import data, tables
from .since import Since

TEMPLATES = Path(__file__).parent / "templates"


def document(table: pd.DataFrame, runs: list[pd.DataFrame] | None = None, since: Since | None = None) -> str:
    """The report of a run, with the runs before it, as one HTML document."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(
        run=tables.conditions(table)["run"],
        data=data.packed(table, runs or [], since),
        style=(TEMPLATES / "report.css").read_text(encoding="utf-8"),
        script="\n".join((TEMPLATES / name).read_text(encoding="utf-8") for name in ("rows.js", "report.js")),
    )
