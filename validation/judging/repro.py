"""A failing case as a script of its own, which needs torch, fxopt and the packages of the model and the passes alone; `repro.jinja` is its text."""

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
"""The folder of the scripts, in a report."""

SHOWN = (Check.PARITY, Check.EQUIVALENCE, Check.ACCURACY, Check.ROUND_TRIP)
"""The checks that a script can show; others are about more than a model and its graph."""


def script(case: Case, reason: str, entry: Entry, passes: Sequence[Transformation], limit: float) -> str:
    """The text of the script: it ends with 0 when the case is right; empty where a pass can be imported from nowhere.

    `limit` is how far passes that do not preserve the computation may move the outputs.
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
    """Write the scripts of the cases that failed into a folder, and delete those that are out of date.

    Where the records are not `whole`, those of all the cases that there are, the scripts of others stay.
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
    """The text with the paths of files as they are on every machine: below the package index, or where the run began."""
    return re.sub(rf"(/[^\s:'\"]+)?/site-packages/|{re.escape(str(Path.cwd()))}/", "", text)
