"""The recorded sites: how many each pass rewrites alone in each model, counted and written beside the zoo file."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

import fxopt.passes
from validation import store
from validation.records import Case, Check, Outcome
from validation.run import Runner
from validation.zoo import ZooError, load_zoo, recorded_sites, sites_file

HEADER = """\
# How many sites each pass rewrites, alone, in each model of the zoo: a pass that finds another number fails.
# Written by `fxopt-validation sites`, not by hand.
"""


def record(zoo: Path, models: Sequence[str]) -> Iterator[tuple[str, Outcome, str]]:
    """Count the sites in some models of a zoo file, by default all, and write the file when all are counted.

    What cannot be counted, such as in a model whose package is missing, stays as it was recorded.

    Yields:
        Each model when it is counted, with `pass`; or else the outcome of the first pass that was not, and why.

    Raises:
        ZooError: the zoo file is wrong, or has no such model.
    """
    passes = {name: cls() for name, cls in fxopt.passes.available().items()}
    entries = load_zoo(zoo, passes)
    names = [entry.name for entry in entries]
    if unknown := [model for model in models if model not in names]:
        raise ZooError(f"{zoo}: no model {unknown[0]!r}; there are {', '.join(names)}")
    found = {model: counts for model, counts in recorded_sites(zoo).items() if model in names}
    runner = Runner(entries, passes)
    for model in models or names:
        records = {name: runner.run(Case(model, (name,), "cpu", Check.EFFECT)) for name in passes}
        counted = {n: int(r.measurements["sites"]) for n, r in records.items() if "sites" in r.measurements}
        kept = {name: count for name, count in found.get(model, {}).items() if name in passes}
        found[model] = {**kept, **counted}
        failed = [record for name, record in records.items() if name not in counted]
        yield (model, failed[0].outcome, failed[0].reason) if failed else (model, Outcome.PASS, "")
    gc.unfreeze()  # the runner freezes what is imported, and duckdb complains of what is left at the end
    recorded = {model: counts for model, counts in found.items() if counts}
    store.replace(sites_file(zoo), f"{HEADER}{yaml.safe_dump(recorded)}".encode())
