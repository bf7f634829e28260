"""The commands on a zoo file: check it, record the sites of its models, capture one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.fx import GraphModule

from fxopt.errors import FxoptError

from . import sites
from .console import Json, one_line_errors, print_json
from .entry import why_missing
from .passes import ZooError, passes_of
from .plan import plan, unmet
from .records import counted
from .subject import Subject
from .zoo import load_zoo

zoo_app = typer.Typer(help="Check a zoo file; record the sites of its models.", no_args_is_help=True)

Zoo = Annotated[Path, typer.Argument(help="The zoo file.")]


@zoo_app.command("check")
def zoo_check_command(zoo: Zoo = Path("model_zoo.yaml"), as_json: Json = False) -> None:
    """Read a zoo file, and say what is wrong with it and what it plans. Exit status: 0, 1 for mistakes in it, or 2."""
    with one_line_errors():
        if not zoo.is_file():
            raise ZooError(f"{zoo}: no such file; name one, or write model_zoo.yaml")
    data: dict[str, Any] = {"file": str(zoo), "models": [], "cases": 0, "skipped": {}, "mistakes": []}
    try:
        passes = passes_of(zoo)
        entries = load_zoo(zoo, passes)
        data["mistakes"] = unmet(entries, passes, ["cpu", "cuda"])
        data["models"], data["cases"] = [entry.name for entry in entries], len(plan(entries, passes, ["cpu"]))
        reasons = {entry.name: why_missing(entry.requires) for entry in entries if entry.requires}
        data["skipped"] = {name: reason for name, reason in reasons.items() if reason}
    except FxoptError as error:
        data["mistakes"] = str(error).splitlines()
    if as_json:
        print_json(data)
    else:
        for name, reason in data["skipped"].items():
            typer.echo(f"{name} would be skipped: {reason}")
        for mistake in data["mistakes"]:
            typer.echo(f"error: {mistake}", err=True)
        if not data["mistakes"]:
            typer.echo(
                f"{zoo}: {counted(len(data['models']), 'model')}, {counted(data['cases'], 'case')} on a device"
            )
    if data["mistakes"]:
        raise typer.Exit(1)


@zoo_app.command("sites")
def zoo_sites_command(
    zoo: Zoo = Path("model_zoo.yaml"),
    model: Annotated[list[str] | None, typer.Option(help="Only this, repeatable; default: all.")] = None,
) -> None:
    """Count the sites that each pass rewrites alone in each model, and record them beside the zoo file."""
    with one_line_errors():
        for line in sites.record(zoo, model or ()):
            typer.echo(line)


def captured(zoo: Path, name: str) -> GraphModule:
    """The graph of an entry of a zoo file. Raises `ZooError`, and what a capture raises."""
    passes = passes_of(zoo)
    entries = {entry.name: entry for entry in load_zoo(zoo, passes)}
    if name not in entries:
        raise ZooError(f"{zoo}: no model {name!r}; there are {', '.join(entries)}")
    entry = entries[name]
    if entry.requires and (missing := why_missing(entry.requires)):
        raise ZooError(f"{name}: {missing}")
    return Subject(entry, "cpu", passes).traced(torch.float32)
