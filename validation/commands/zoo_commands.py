"""The commands on a zoo file: check it, record the sites of its models, capture one of them."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Annotated

import torch
import typer
import yaml
from torch.fx import GraphModule

from fxopt.errors import FxoptError

from .. import store
from ..judging.subject import Subject
from ..records import FAILING, Case, Check, counted
from ..running.run import Runner
from ..zoo.entry import is_installed
from ..zoo.passes import passes_of
from ..zoo.plan import plan, unmet
from ..zoo.sources import load_zoo, recorded_sites, sites_file
from ..zoo.yaml_file import ZooError
from .console import one_line_errors

HEADER = """\
# How many sites each pass rewrites, alone, in each model of the zoo: a pass that finds another number fails.
# Written by `fxopt zoo sites`, not by hand.
"""

zoo_app = typer.Typer(help="Check a zoo file; record the sites of its models.", no_args_is_help=True)

Zoo = Annotated[Path, typer.Argument(help="The zoo file.")]


@zoo_app.command("check")
def zoo_check_command(zoo: Zoo = Path("model_zoo.yaml")) -> None:
    """Read a zoo file, and say what is wrong with it and what it plans. Exit status: 0, 1 for mistakes in it, or 2."""
    try:
        passes = passes_of(zoo)
        entries = load_zoo(zoo, passes)
        if mistakes := unmet(entries, passes, ["cpu", "cuda"]):
            raise ZooError("\n".join(mistakes))
    except FxoptError as error:
        for mistake in str(error).splitlines():
            typer.echo(f"error: {mistake}", err=True)
        raise typer.Exit(1 if zoo.is_file() else 2) from error
    cases = counted(len(plan(entries, passes, ["cpu"])), "case")
    typer.echo(f"{zoo}: {counted(len(entries), 'model')}, {cases} on a device")


@zoo_app.command("sites")
def zoo_sites_command(
    zoo: Zoo = Path("model_zoo.yaml"),
    model: Annotated[list[str] | None, typer.Option(help="Only this, repeatable; default: all.")] = None,
) -> None:
    """Count the sites that each pass rewrites alone in each model, and record them beside the zoo file.

    What cannot be counted, such as in a model whose package is missing, stays as it was recorded.
    """
    with one_line_errors():
        passes = passes_of(zoo)
        entries, found, failed = load_zoo(zoo, passes), recorded_sites(zoo), []
        names = [entry.name for entry in entries]
        if unknown := [name for name in model or () if name not in names]:
            raise ZooError(f"{zoo}: no model {unknown[0]!r}; there are {', '.join(names)}")
        runner = Runner(entries, passes)
        installed = [entry.name for entry in entries if not entry.requires or is_installed(entry.requires)]
        for each in [each for each in names if each not in installed]:
            typer.echo(f"{each}: left out: {entries[names.index(each)].requires} is not installed")
        for each in model or installed:
            results = {name: runner.run(Case(each, (name,), "cpu", Check.EFFECT)) for name in passes}
            lacking = {name: row for name, row in results.items() if "sites" not in row.measurements}
            kept = {name: count for name, count in found.get(each, {}).items() if name in lacking}
            new = {n: int(row.measurements["sites"]) for n, row in results.items() if n not in lacking}
            found[each] = {**kept, **new}
            failed += [f"{name} in {each}" for name, row in lacking.items() if row.outcome in FAILING]
            problems = [f"{row.outcome}: {row.reason}" for row in lacking.values()]
            typer.echo(f"{each}: {problems[0] if problems else 'counted'}")
        gc.unfreeze()  # the runner freezes what is imported
        found = {name: counts for name, counts in found.items() if counts and name in names}
        store.replace(sites_file(zoo), f"{HEADER}{yaml.safe_dump(found)}".encode())
        typer.echo(f"{sites_file(zoo)}: recorded")
        if failed:
            raise ZooError(f"not counted: {', '.join(failed)}")


def captured(zoo: Path, name: str) -> GraphModule:
    """The graph of an entry of a zoo file. Raises `ZooError`, and what a capture raises."""
    passes = passes_of(zoo)
    entries = {entry.name: entry for entry in load_zoo(zoo, passes)}
    if name not in entries:
        raise ZooError(f"{zoo}: no model {name!r}; there are {', '.join(entries)}")
    return Subject(entries[name], "cpu", passes).traced(torch.float32)
