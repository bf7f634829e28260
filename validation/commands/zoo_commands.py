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
from ..records import Case, Check, counted
from ..running.run import Runner
from ..zoo.entry import Entry
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
    """Read a zoo file, and report its mistakes and its plan. Exit status: 0, 1 for mistakes in it, or 2."""
    try:
        entries, passes = load_zoo(zoo)
        if mistakes := unmet(entries, passes, ["cpu", "cuda"]):
            raise ZooError("\n".join(mistakes))
    except FxoptError as error:
        for mistake in str(error).splitlines():
            typer.echo(f"error: {mistake}", err=True)
        raise typer.Exit(1 if zoo.is_file() else 2) from error
    cases = counted(len(plan(entries, passes, ["cpu"])), "case")
    typer.echo(f"{zoo}: {counted(len(entries), 'model')}, {cases} on a device")
    for entry in filter(lambda entry: entry.lacks, entries):
        typer.echo(f"{entry.name}: left out: {entry.lacks} is not installed")


@zoo_app.command("sites")
def zoo_sites_command(
    zoo: Zoo = Path("model_zoo.yaml"),
    model: Annotated[list[str] | None, typer.Option(help="Only this, repeatable; default: all.")] = None,
) -> None:
    """Count the sites that each single pass rewrites in each model, and record them beside the zoo file.

    Records that cannot be counted, for example because a package is missing, stay unchanged.
    """
    with one_line_errors():
        entries, passes = load_zoo(zoo)
        found, failed = recorded_sites(zoo), []
        runner = Runner(entries, passes)
        chosen = [_named(name, entries, zoo) for name in model] if model else entries
        for entry in chosen:
            if entry.lacks:
                typer.echo(f"{entry.name}: left out: {entry.lacks} is not installed")
                continue
            counts = found.setdefault(entry.name, {})
            for name in passes:
                row = runner.run(Case(entry.name, (name,), "cpu", Check.EFFECT))
                if "sites" in row.measurements:
                    counts[name] = int(row.measurements["sites"])
                else:
                    failed.append(f"{name} in {entry.name} ({row.outcome}: {row.reason})")
            typer.echo(f"{entry.name}: {len(counts)} passes counted")
        gc.unfreeze()  # the runner freezes imported objects
        if all(entry.lacks for entry in chosen):
            raise ZooError("nothing is recorded: all these models are left out")
        found = {
            name: {key: count for key, count in found[name].items() if key in passes}
            for name in [entry.name for entry in entries]
            if found.get(name)
        }
        store.replace(sites_file(zoo), f"{HEADER}{yaml.safe_dump(found)}".encode())
        typer.echo(f"{sites_file(zoo)}: recorded")
        if failed:
            raise ZooError(f"not counted: {', '.join(failed)}")


def captured(zoo: Path, name: str) -> GraphModule:
    """The graph of an entry of a zoo file. Raises `ZooError`, and the errors of a capture."""
    entries, passes = load_zoo(zoo)
    return Subject(_named(name, entries, zoo), "cpu", passes).traced(torch.float32)


def _named(name: str, entries: list[Entry], zoo: Path) -> Entry:
    for entry in entries:
        if entry.name == name:
            return entry
    raise ZooError(f"{zoo}: no model {name!r}; there are {', '.join(entry.name for entry in entries)}")
