"""The command `fxopt`.

`trace`, `explain`, `passes` and `doctor` are in this file and need only torch. The other commands belong to the validation
harness. `STATUSES` lists the exit statuses.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from torch.fx import GraphModule

from fxopt.capture.runtime.guard_listing import guards
from fxopt.doctor import examine
from fxopt.drawing import draw
from fxopt.errors import FxoptError, TraceError
from fxopt.importing import in_a_line
from fxopt.named_model import UsageError, captured
from fxopt.passes import ready
from fxopt.saving.folder import save

# The package of the harness is `fxopt_validation` in the wheel and `validation` in the repository.
HARNESS = (
    "fxopt_validation" if Path(__file__).parents[1].joinpath("fxopt_validation").is_dir() else "validation"
)

OF_THE_HARNESS = {
    "validate": "run every case of a zoo: its models, each with each pass",
    "report": "write the views of a run again",
    "compare": "what changed from one run to another",
    "merge": "join parts of a run, reruns, and runs that were cut",
    "accept": "expect another result of one case from now on",
    "baseline": "make a run the one that others are compared with",
    "history": "one line a run, and what drifted",
    "zoo": "check a zoo file; record how many sites each pass has in its models",
}

LACKING = 'the harness is not installed: `pip install ".[validation]"` in a clone of fxopt'


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    # Names and sources of models may contain characters that the terminal cannot show.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # models and passes are found as with `python -m`
    try:
        if arguments and arguments[0] in OF_THE_HARNESS:
            return int(_harness().run(arguments))
        options = _parser().parse_args(arguments)
        status = int(options.run(options))
        if sys.stdout is not None:  # None: stdout was closed
            sys.stdout.flush()
        return status
    except TraceError as error:
        print(f"error: not captured: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of the output, such as `head`, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (FxoptError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


STATUSES = {
    0: "all is well",
    1: "the answer is no: a model is not captured, a case fails, `compare` finds something worse, `doctor` or `zoo check` finds a fault",
    2: "a mistake in the command or in a file that it names, no case chosen, or the harness is not installed",
    3: "`validate`: pytest or one of its plugins failed",
    130: "interrupted; what ran is kept",
    141: "the reader of the output has left, such as `head`",
}
"""The exit statuses of all commands, with their meanings."""


class _Parser(argparse.ArgumentParser):
    """Parser that reports a wrong argument in one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `{self.prog} --help`")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        "fxopt",
        description="Capture models as torch.fx graphs, rewrite them, and validate that.",
        epilog="exit status:\n" + "".join(f"  {status:<9} {text}\n" for status, text in STATUSES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=importlib.metadata.version("fxopt"))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(run: Callable[[argparse.Namespace], int], text: str) -> Callable[..., argparse.Action]:
        command = commands.add_parser(run.__name__.strip("_"), help=text, description=f"{text}.")
        command.set_defaults(run=run)
        return command.add_argument

    named = "package.module:factory of a model, or of a model and its inputs"
    shapes = "an input of the forward, such as x=1,3,224,224 or ids=2,16:int64; repeatable"
    only = "only this, repeatable: a name, or mypackage.passes.MyPass"
    for option in (
        trace := add(_trace, "capture a model and print its graph"),
        explain := add(_explain, "list what the passes would rewrite in a model, and what not, and why"),
    ):
        option("model", metavar="MODEL", help=named)
        option("--zoo", metavar="FILE", help="MODEL is an entry of this zoo file")
        option("--input", dest="inputs", action="append", default=[], metavar="NAME=SHAPE", help=shapes)
        option("--specialize", action="store_true", help="decide branches on values by the inputs")
    trace("--save", metavar="FOLDER", help="save it for `fxopt.load`")
    trace("--draw", metavar="FILE", help="draw it: .svg (needs Graphviz) or .dot")
    for option in (explain, add(_passes, "list the passes, also those that other packages and you add")):
        option("--pass", dest="passes", action="append", default=[], metavar="PASS", help=only)
    add(_doctor, "say what is installed, and whether fxopt works here")
    for name, text in OF_THE_HARNESS.items():
        commands.add_parser(name, help=text)
    return parser


def _captured(options: argparse.Namespace) -> GraphModule:
    if options.zoo is None:
        return captured(options.model, options.inputs, specialize=options.specialize)
    if options.inputs or options.specialize:
        raise UsageError(f"--input and --specialize: {options.zoo} says how {options.model} is captured")
    found: GraphModule = _harness().captured(Path(options.zoo), options.model)
    return found


def _trace(options: argparse.Namespace) -> int:
    if options.draw and not options.draw.endswith((".svg", ".dot")):
        raise UsageError(f"--draw {options.draw}: .svg or .dot")
    traced = _captured(options)
    if options.save:
        save(traced, options.save)
    if options.draw:
        Path(options.draw).write_text(draw(traced, format=options.draw[-3:]), encoding="utf-8")
    limits = guards(traced)
    print(f"{options.model}: {len(traced.graph.nodes)} nodes")
    print(f"{len(limits)} guards on the inputs" + "".join(f"\n  {guard}" for guard in limits))
    print(traced.code.strip())
    return 0


def _explain(options: argparse.Namespace) -> int:
    passes = _chosen(options.passes)
    traced = _captured(options)
    idle: list[str] = []
    for name, pass_ in passes.items():
        try:
            explanation = pass_.explain(traced) if hasattr(pass_, "explain") else None
        except FxoptError:
            raise
        except Exception as error:
            raise UsageError(f"{pass_!r} raises {in_a_line(error)}") from error
        if explanation and explanation.rows:
            print(explanation)
        else:
            idle.append(name if explanation else f"{name} (it cannot tell)")
    if idle:
        print(f"nothing to rewrite: {', '.join(idle)}")
    return 0


def _passes(options: argparse.Namespace) -> int:
    for name, pass_ in _chosen(options.passes).items():
        facts = ["keeps the outputs"] * pass_.preserves_computation + ["can be undone"] * pass_.reversible
        summary = " ".join((type(pass_).__doc__ or "").split("\n\n")[0].split())
        print(f"{name} ({', '.join([*facts, type(pass_).__module__])})\n  {summary}")
    return 0


def _chosen(names: Sequence[str]) -> dict[str, Any]:
    """Select the passes of these names and paths; all passes if `names` is empty."""
    found = ready(name for name in names if "." in name)
    wanted = [name.rpartition(".")[2] for name in names] or [*found]
    if unknown := [name for name in wanted if name not in found]:
        raise UsageError(f"--pass {unknown[0]}: no such pass; there are {', '.join(found)}")
    return {name: found[name] for name in wanted}


def _doctor(options: argparse.Namespace) -> int:
    facts, problems = examine(_try_harness)
    for name, fact in facts.items():
        print(f"{name:<22} {fact}")
    print(f"does not work: {', '.join(problems)}" if problems else "all works")
    return 1 if problems else 0


def _try_harness() -> str:
    try:
        _harness()
        return f"installed, as {HARNESS}"
    except UsageError as error:
        return str(error)


def _harness() -> Any:
    try:
        return importlib.import_module(f"{HARNESS}.commands.cli")
    except ModuleNotFoundError as error:
        raise UsageError(f"{LACKING} ({error})") from error
