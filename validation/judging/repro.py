"""A failing case as a separate script, which needs only torch, fxopt and the packages of its model and passes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import jinja2

from fxopt.rewriting.transformation import Transformation

from ..records import Case, Check, Record
from ..zoo import build
from ..zoo.entry import Entry, factory
from .subject import FLOOR

FOLDER = "repro"
"""The folder of the scripts in a report."""

SHOWN = (Check.PARITY, Check.EQUIVALENCE, Check.ACCURACY, Check.ROUND_TRIP)
"""The checks that a script can reproduce; other checks need more than a model and its graph."""


def script(case: Case, reason: str, entry: Entry, passes: Sequence[Transformation], limit: float) -> str:
    """The text of the script, which ends with status 0 if the case is right; empty if a pass cannot be imported.

    `limit` is the largest accepted change of outputs for passes that do not preserve the computation.
    """
    if case.check not in SHOWN or any("<locals>" in type(each).__qualname__ for each in passes):
        return ""
    module, _, name = entry.model.rpartition(".")
    module = module or "transformers"
    classes = [(type(each).__module__, type(each).__qualname__.partition(".")[0]) for each in passes]
    sources = sorted({(module, name), *classes})
    others = {source.partition(".")[0] for source, _ in sources} - {"torch", "fxopt"}
    *needed, last = ("torch", "fxopt", *sorted(others))
    template = Path(__file__).with_name("repro.jinja").read_text(encoding="utf-8")
    made = jinja2.Template(template, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    text: str = made.render(
        case=case.id,
        check=str(case.check),
        floor=FLOOR,
        limit=limit,
        reason=reason.replace('"""', "'''"),
        packages=f"{', '.join(needed)} and {last}",
        local=bool(others - {"transformers"}),
        imports=[f"from {source} import {name}" for source, name in sources],
        passes=", ".join(map(repr, passes)),
        entry=entry,
        model=name,
        configured=hasattr(factory(entry), "config_class"),
        made=build.make_inputs(entry),
        device=repr(case.device),
        symbols=sorted({symbol for free in entry.dynamic_shapes.values() for symbol in free.values()}),
    )
    return text


def write(records: Iterable[Record], folder: Path, whole: bool) -> list[Path]:
    """Write the scripts of failed cases into a folder, and delete outdated ones.

    If the records are not `whole` (all cases that exist), the scripts of other cases stay.
    """
    scripts = {f"{record.case.id}.py": record.repro for record in records}
    for file in folder.glob("*.py"):
        if whole or file.name in scripts:
            file.unlink()
    written = [folder / name for name, text in sorted(scripts.items()) if text]
    for file in written:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(scripts[file.name], encoding="utf-8", errors="backslashreplace")
    return written


def portable(text: str) -> str:
    """Make paths in a text independent of the machine: relative to site-packages, or to the current directory."""
    return re.sub(rf"(/[^\s:'\"]+)?/site-packages/|{re.escape(str(Path.cwd()))}/", "", text)
