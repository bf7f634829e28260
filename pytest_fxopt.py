"""A pytest plugin: adds the options of the harness everywhere, and loads the harness where one of them is given.

It is a module of its own since every run of pytest imports it: it loads neither torch nor pandas. And it knows what the
harness is called: `fxopt_validation` where the wheel has installed it beside this file, `validation` in the repository.
"""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
HARNESS = "fxopt_validation" if (HERE / "fxopt_validation").is_dir() else "validation"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup(
        "fxopt",
        f"validation of fxopt over a zoo of models: with any of these, or `--pyargs {HARNESS}`, its cases are run",
    )
    for name, how in OPTIONS.items():
        group.addoption(f"--fx-{name}", **how)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # pytest-xdist reads `-n` here
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, object, object]:
    given = any(value is not None for name, value in vars(config.option).items() if name.startswith("fx_"))
    named = any(_is_harness(config, argument) for argument in config.args)
    if given and not named:
        if config.args_source is not pytest.Config.ArgsSource.ARGS:
            config.args.clear()  # no path was named: these would be all tests of the repository
        config.args.append(HARNESS)
        config.option.pyargs = True  # by its path pytest would not enter it: that is in a virtual environment
    if given or named:
        try:
            harness = importlib.import_module(f"{HARNESS}.plugin")
        except ImportError as error:
            raise pytest.UsageError(
                f'the harness needs `pip install ".[validation]"` in a clone of fxopt: {error}'
            ) from error
        harness.prepare(config)
        config.pluginmanager.register(harness, "fxopt-harness")
    return (yield)


def _is_harness(config: pytest.Config, argument: str) -> bool:
    name = argument.partition("::")[0].partition("[")[0]
    if name == HARNESS or name.startswith(f"{HARNESS}."):
        return True
    return (config.invocation_params.dir / name).resolve().is_relative_to(HERE / HARNESS)


def _part(text: str) -> tuple[int, int]:
    """`3/10` as numbers."""
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if found is None or int(found[1]) > int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a part such as 1/10 or 10/10")
    return int(found[1]), int(found[2])


def _folder(text: str) -> Path:
    """A folder of this machine."""
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder of this machine")
    return Path(text)


def _seconds(text: str) -> float:
    """A number of seconds; 0 would mean no limit, and below it nothing would run."""
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


OPTIONS: dict[str, dict[str, Any]] = {
    "zoo": {
        "metavar": "FILE",
        "help": "the zoo file, or `transformers`: a small model of each architecture; default: "
        "model_zoo.yaml of this repository",
    },
    "device": {"action": "append", "help": "cpu or cuda, repeatable; default: all there are"},
    "pass": {
        "action": "append",
        "help": "only pipelines with this pass, repeatable: its name, or mypackage.passes.MyPass",
    },
    "pipeline": {
        "action": "append",
        "help": "only this pipeline, repeatable: a name in the zoo, all, exact, or passes joined by +",
    },
    "tag": {"action": "append", "help": "only models with this tag, repeatable"},
    "model": {"action": "append", "help": "only the model of this name, repeatable"},
    "part": {
        "type": _part,
        "metavar": "K/N",
        "help": "of the sorted models each Nth, from the Kth on",
    },
    "peer": {
        "choices": ["torch.export"],
        "help": "run it beside fxopt on the same models and inputs, where the zoo is `transformers`",
    },
    "timeout": {"type": _seconds, "help": "seconds that a case may take; default: the zoo's"},
    "timing": {
        "type": _seconds,
        "metavar": "SECONDS",
        "help": "how long all that is timed of one model may take turns at most; default: 8",
    },
    "engine": {
        "choices": ["ray"],
        "help": "run the cases on a Ray cluster; default: processes of this machine",
    },
    "address": {
        "metavar": "HOST:PORT",
        "help": "of the Ray cluster, or `auto`; default: one is started here",
    },
    "resume": {
        "action": "store_const",
        "const": True,
        "help": "go on with the newest run that was cut, of the same commit, versions and plan, if there is one",
    },
    "report-dir": {
        "type": _folder,
        "metavar": "FOLDER",
        "help": "latest/ and history/ are written here; default: reports/ of this repository",
    },
}
"""The options of the harness, without their prefix `--fx-`."""
