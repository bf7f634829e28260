"""The command `fxopt`: `trace`, `explain`, `passes` and `doctor` are here, and need torch alone; the others are the harness's.

`STATUSES` has the exit statuses.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from torch.fx import GraphModule

import fxopt.passes
from fxopt import graph
from fxopt.capture.runtime.guard_listing import guards
from fxopt.doctor import examine
from fxopt.drawing import draw
from fxopt.errors import FxoptError, TraceError
from fxopt.importing import in_a_line
from fxopt.named_model import UsageError, captured
from fxopt.rewriting.explanation import Explanation
from fxopt.saving.folder import save

# What the wheel calls the harness, and what the repository does.
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
    # Names and sources of models may be in letters that a terminal lacks.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # models and passes are found as with `python -m`
    try:
        if arguments and arguments[0] in OF_THE_HARNESS:
            return int(_harness().run(arguments))
        parser = _parser()
        if not arguments:
            parser.print_help(sys.stderr)
            return 2
        if arguments[0] not in OWN and not arguments[0].startswith("-"):
            raise UsageError(f"no command {arguments[0]!r}; there are {', '.join([*OWN, *OF_THE_HARNESS])}")
        options = parser.parse_args(arguments)
        status = int(options.run(options))
        if sys.stdout is not None:  # it was closed
            sys.stdout.flush()
        return status
    except TraceError as error:
        print(f"error: not captured: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # what reads the output has seen enough, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (FxoptError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


STATUSES = {
    0: "all is well",
    1: "the answer is no: a model is not captured, a case fails, something got worse, `doctor` found a fault",
    2: "a mistake in the command or in a file that it names, no case chosen, or the harness is not installed",
    3: "`validate`: pytest or one of its plugins failed",
    130: "interrupted; what ran is kept",
    141: "the reader of the output has left, such as `head`",
}
"""The exit statuses of all commands, and what each says."""


class _Parser(argparse.ArgumentParser):
    """Says in one line which argument is wrong."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `{self.prog} --help`")


def _parser() -> argparse.ArgumentParser:
    epilog = (
        "Of the harness, each with --help of its own:\n"
        + "".join(f"  {name:<9} {text}\n" for name, text in OF_THE_HARNESS.items())
        + "\nExit status:\n"
        + "".join(f"  {status:<9} {text}\n" for status, text in STATUSES.items())
    )
    parser = _Parser(
        "fxopt",
        description="Capture models as torch.fx graphs, rewrite them, and validate that.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=importlib.metadata.version("fxopt"))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (run, text) in OWN.items():
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        command.set_defaults(run=run)
        command.add_argument("--json", action="store_true", help="print data for programs")
        if name in ("trace", "explain"):
            _add_model(command)
        if name in ("explain", "passes"):
            command.add_argument(
                "--pass",
                dest="passes",
                action="append",
                default=[],
                metavar="PASS",
                help="only this, repeatable: a name, or mypackage.passes.MyPass",
            )
        if name == "trace":
            command.add_argument("--save", metavar="FOLDER", help="save it for `fxopt.load`")
            command.add_argument("--draw", metavar="FILE", help="draw it: .svg (needs Graphviz) or .dot")
    return parser


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "model", metavar="MODEL", help="package.module:factory of a model, or of a model and its inputs"
    )
    command.add_argument("--zoo", metavar="FILE", help="MODEL is an entry of this zoo file")
    command.add_argument(
        "--input",
        dest="inputs",
        action="append",
        default=[],
        metavar="NAME=SHAPE",
        help="an input of the forward, such as x=1,3,224,224 or ids=2,16:int64; repeatable",
    )
    command.add_argument("--specialize", action="store_true", help="decide branches on values by the inputs")


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
        text = draw(traced, format="dot" if options.draw.endswith(".dot") else "svg")
        Path(options.draw).write_text(text, encoding="utf-8")
    limits = guards(traced)
    if options.json:
        listed = [vars(guard) for guard in limits]
        nodes = [
            {
                "name": node.name,
                "op": node.op,
                "target": graph.function_name(node) if node.op == "call_function" else str(node.target),
                "inputs": [each.name for each in node.all_input_nodes],
                "module": graph.module_path(node),
                "source": graph.source_line(node),
                "shape": [str(size) for size in getattr(node.meta.get("val"), "shape", ())],
            }
            for node in traced.graph.nodes
        ]
        _print_json({"model": options.model, "guards": listed, "nodes": nodes})
        return 0
    print(f"{options.model}: {len(traced.graph.nodes)} nodes")
    print(f"{len(limits)} guards on the inputs" + "".join(f"\n  {guard}" for guard in limits))
    print(traced.code.strip())
    return 0


def _explain(options: argparse.Namespace) -> int:
    passes = _chosen(options.passes)
    traced = _captured(options)
    explanations: list[Explanation] = []
    for pass_ in passes.values():
        if (explain := getattr(pass_, "explain", None)) is not None:
            try:
                explanations.append(explain(traced))
            except FxoptError:
                raise
            except Exception as error:
                raise UsageError(f"{pass_!r} raises {in_a_line(error)}") from error
    if options.json:
        rows = [{"pass": each.name, **row._asdict()} for each in explanations for row in each.rows]
        _print_json(rows)
        return 0
    for each in explanations:
        if each.rows:
            print(each)
    nothing = [each.name for each in explanations if not each.rows]
    silent = [name for name, pass_ in passes.items() if not hasattr(pass_, "explain")]
    for text, names in (("nothing to rewrite", nothing), ("explains nothing", silent)):
        if names:
            print(f"{text}: {', '.join(names)}")
    return 0


def _passes(options: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "keeps_outputs": pass_.preserves_computation,
            "reversible": pass_.reversible,
            "module": type(pass_).__module__,
            "summary": " ".join((type(pass_).__doc__ or "").split("\n\n")[0].split()),
        }
        for name, pass_ in _chosen(options.passes).items()
    ]
    if options.json:
        _print_json(rows)
        return 0
    for row in rows:
        facts = {
            "keeps the outputs": row["keeps_outputs"],
            "can be undone": row["reversible"],
            row["module"]: True,
        }
        print(
            f"{row['name']} ({', '.join(name for name, is_so in facts.items() if is_so)})\n  {row['summary']}"
        )
    return 0


def _chosen(names: Sequence[str]) -> dict[str, Any]:
    """The passes of these names and paths, or all where there are none."""
    ready = fxopt.passes.ready(name for name in names if "." in name)
    wanted = [name.rpartition(".")[2] for name in names] or [*ready]
    if unknown := [name for name in wanted if name not in ready]:
        raise UsageError(f"--pass {unknown[0]}: no such pass; there are {', '.join(ready)}")
    return {name: ready[name] for name in wanted}


def _doctor(options: argparse.Namespace) -> int:
    facts, problems = examine(_try_harness)
    if options.json:
        _print_json({"facts": facts, "problems": problems})
    else:
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


OWN = {
    "trace": (_trace, "capture a model and print its graph"),
    "explain": (_explain, "list what the passes would rewrite in a model, and what not, and why"),
    "passes": (_passes, "list the passes, also those that other packages and you add"),
    "doctor": (_doctor, "say what is installed, and whether fxopt works here"),
}


def _print_json(data: object) -> None:
    print(json.dumps(data, indent=1))
