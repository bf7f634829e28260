"""The recorded sites: how many each pass rewrites alone in each model, counted and written beside the zoo file."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from . import store
from .passes import ZooError, passes_of
from .records import FAILING, Case, Check
from .run import Runner
from .zoo import load_zoo, recorded_sites, sites_file

HEADER = """\
# How many sites each pass rewrites, alone, in each model of the zoo: a pass that finds another number fails.
# Written by `fxopt zoo sites`, not by hand.
"""


def record(zoo: Path, models: Sequence[str]) -> Iterator[str]:
    """Count the sites in some models of a zoo file, by default all, and write the file when all are counted.

    What cannot be counted, such as in a model whose package is missing, stays as it was recorded. Yields a line a
    model, and one at the end. Raises `ZooError` when the zoo file is wrong, has no such model, or a pass failed.
    """
    passes = passes_of(zoo)
    entries, found, failed = load_zoo(zoo, passes), recorded_sites(zoo), []
    names = [entry.name for entry in entries]
    if unknown := [model for model in models if model not in names]:
        raise ZooError(f"{zoo}: no model {unknown[0]!r}; there are {', '.join(names)}")
    runner = Runner(entries, passes)
    for model in models or names:
        results = {name: runner.run(Case(model, (name,), "cpu", Check.EFFECT)) for name in passes}
        lacking = {name: result for name, result in results.items() if "sites" not in result.measurements}
        kept = {name: count for name, count in found.get(model, {}).items() if name in lacking}
        counted = {n: int(r.measurements["sites"]) for n, r in results.items() if n not in lacking}
        found[model] = {**kept, **counted}
        failed += [f"{name} in {model}" for name, result in lacking.items() if result.outcome in FAILING]
        problems = [f"{result.outcome}: {result.reason}" for result in lacking.values()]
        yield f"{model}: {problems[0] if problems else 'counted'}"
    gc.unfreeze()  # the runner freezes what is imported
    found = {model: counts for model, counts in found.items() if counts and model in names}
    store.replace(sites_file(zoo), f"{HEADER}{yaml.safe_dump(found)}".encode())
    yield f"{sites_file(zoo)}: recorded"
    if failed:
        raise ZooError(f"not counted: {', '.join(failed)}")
