"""The command `fxopt`: its commands that need torch alone, and what it says where the harness is not installed."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import fxopt
from fxopt import command_line, doctor
from fxopt.errors import PassError
from fxopt.passes import ready


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) + self.right(x)


class Undecided(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * int(x.sum())


def with_inputs() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Two(), {"x": torch.zeros(3, 4)}


def undecided() -> tuple[nn.Module, torch.Tensor]:
    return Undecided(), torch.ones(2)


def broken() -> nn.Module:
    raise RuntimeError("no weights\nhere")


def leaves() -> nn.Module:
    raise SystemExit(3)


class MergeLinears(fxopt.MergeLinears):
    """Has the name of another pass."""


class Doubles(fxopt.Transformation):
    """A pass of a user."""

    def transform(self, graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
        return graph_module


HERE = __name__


class Unmatched(fxopt.ReversibleRewrite[fx.Node]):
    def match(self, graph_module: fx.GraphModule) -> Any:
        raise KeyError("key")

    def apply(self, rewriter: fxopt.Rewriter, site: fx.Node) -> None: ...


class Unmade(Unmatched):
    def __init__(self) -> None:
        raise KeyError("key")


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: str) -> tuple[int, str, str]:
        try:
            status = command_line.main(arguments)
        except SystemExit as done:  # of argparse
            status = int(done.code or 0)
        return status, *capsys.readouterr()

    return call


def test_trace_prints_a_graph_and_saves_it(call: Any, tmp_path: Path) -> None:
    status, out, _ = call("trace", f"{HERE}:with_inputs", "--save", str(tmp_path / "two"))
    assert status == 0
    assert "3 guards on the inputs\n" in out
    assert "x.shape[0] == 3" in out
    assert "def forward(self, x)" in out
    assert fxopt.load(tmp_path / "two")(torch.zeros(3, 4)).shape == (3, 2)


def test_trace_takes_the_shapes_of_inputs_and_draws(call: Any, tmp_path: Path) -> None:
    status, out, _ = call("trace", f"{HERE}:Two", "--input", "x=5,4", "--draw", str(tmp_path / "two.dot"))
    assert status == 0
    assert "x, dimension 0: x.shape[0] == 5" in out
    assert "5×2" in (tmp_path / "two.dot").read_text(encoding="utf-8")


def test_explain_lists_sites_of_the_passes_that_are_named(call: Any) -> None:
    status, out, _ = call("explain", f"{HERE}:with_inputs", "--pass", "MergeLinears", "--pass", "MergeConvs")
    assert status == 0
    assert out.startswith("MergeLinears: 1 sites, 0 refused\n")
    assert re.search(r"\n  left +left +test_command_line.py:\d+ +site\n", out)
    assert out.endswith("nothing to rewrite: MergeConvs\n")
    _, out, _ = call("explain", f"{HERE}:with_inputs", "--pass", f"{HERE}.Doubles")
    assert out == "nothing to rewrite: Doubles (it cannot tell)\n"


def test_passes_lists_those_of_users_by_path(call: Any) -> None:
    status, out, _ = call("passes", "--pass", f"{HERE}.Doubles", "--pass", "MergeLinears")
    assert status == 0
    assert f"Doubles ({HERE})\n  A pass of a user.\n" in out
    assert "MergeLinears (keeps the outputs, can be undone, fxopt.passes.merge_linears)\n" in out


def test_doctor_tells_what_works(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, _ = call("doctor")
    assert (status, out.splitlines()[-1]) == (0, "all works")
    found = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert found["torch"] == importlib.metadata.version("torch")
    assert out.count("openvino") >= 2, "its version, and whether it computes graphs"
    assert re.search(r"^engines on cpu +torch; inductor", out, re.M)
    assert found["harness"] == f"installed, as {command_line.HARNESS}"
    monkeypatch.setattr(doctor, "undo", lambda module: (_ for _ in ()).throw(PassError("no record")))
    status, out, _ = call("doctor")
    assert status == 1
    assert out.endswith("does not work: capture, pass and undo\n")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["trace", f"{HERE}:undecided"], 1, "error: not captured: "),
        (["trace", f"{HERE}:broken"], 2, "error: .*broken\\(\\) raises RuntimeError: no weights here"),
        (["trace", f"{HERE}:leaves"], 2, "error: .*leaves\\(\\) raises SystemExit: 3"),
        (["trace", f"{HERE}:Two"], 2, "--input NAME=2,3 for each argument"),
        (["trace", f"{HERE}:Two", "--input", "x=2,many"], 2, "write it as x=2,3 or ids=2,16:int64"),
        (["trace", f"{HERE}:Two", "--input", "x=2,4:quint8"], 2, "write it as x=2,3 or ids=2,16:int64"),
        (["trace", f"{HERE}:Two", "--input", "x=2,4", "--draw", "two.png"], 2, "two.png: .svg or .dot"),
        (["trace", f"{HERE}:Three"], 2, "has no function or class 'Three'"),
        (["trace", "nowhere:Model"], 2, "nowhere cannot be imported"),
        (["trace", "Two"], 2, "a model is named package.module:factory"),
        (
            ["explain", f"{HERE}:Two", "--pass", "Merge"],
            2,
            "--pass Merge: no such pass; there are .*MergeLinears",
        ),
        (["passes", "--pass", f"{HERE}.Two"], 2, "'Two', which is no pass that takes no arguments"),
        (["passes", "--pass", f"{HERE}.Three"], 2, "has no class 'Three'"),
        (
            ["passes", "--pass", f"{HERE}.Unmade"],
            2,
            r"constructor raises KeyError: 'key', at .*test_comm.*\.py:\d+",
        ),
        (
            ["explain", f"{HERE}:with_inputs", "--pass", f"{HERE}.Unmatched"],
            2,
            r"Unmatched\(\) raises KeyError: 'key', at .*:\d+",
        ),
        (["passes", "--pass", f"{HERE}.MergeLinears"], 2, "has a pass of the same name"),
        (["trace"], 2, "the following arguments are required: MODEL; see `fxopt trace --help`"),
        (["doctor", "--loud"], 2, "unrecognized arguments: --loud; see `fxopt --help`"),
        (
            ["trace", "torch.nn:Linear"],
            2,
            "missing 2 required positional arguments.*; name a function of your own",
        ),
        (["trance"], 2, "invalid choice: 'trance' .*trace.*validate.*; see `fxopt --help`"),
        (["trace", "net", "--zoo", "nowhere.yaml"], 2, "nowhere.yaml: no such file"),
    ],
)
def test_a_mistake_is_one_line(call: Any, arguments: list[str], status: int, message: str) -> None:
    found, out, err = call(*arguments)
    assert (found, out) == (status, "")
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1 or status == 1
    assert re.search(message, err), err


@pytest.mark.long
def test_letters_that_a_terminal_lacks_are_written_in_others(tmp_path: Path) -> None:
    (tmp_path / "own_model.py").write_text(
        "import torch\nclass Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.größe = torch.nn.Linear(2, 2)\n    def forward(self, x):\n        return self.größe(x)\n",
        encoding="utf-8",
    )
    done = run_command(tmp_path, "trace", "own_model:Net", "--input", "x=1,2", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"gr\xf6\xdfe" in done.stdout


@pytest.mark.long
def test_output_that_nobody_reads_to_its_end(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = run_command(tmp_path, "passes", stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def run_command(folder: Path, *arguments: str, stdout: int = subprocess.PIPE, **variables: str) -> Any:
    paths = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUTF8": "0", **variables}
    return subprocess.run(
        [sys.executable, "-c", "from fxopt.command_line import main; raise SystemExit(main())", *arguments],
        cwd=folder,
        env=os.environ | paths,
        stdout=stdout,
        stderr=subprocess.PIPE,
        check=False,
    )


@pytest.mark.parametrize("text", ["import torch\nmissing", "x = (", "raise SystemExit(3)"])
def test_code_of_users_that_fails_when_it_is_imported_is_one_line(
    call: Any, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_module.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    for arguments in (["trace", "broken_module:net"], ["passes", "--pass", "broken_module.Pass"]):
        status, out, err = call(*arguments)
        assert (status, out, len(err.splitlines())) == (2, "", 1)
        assert re.search(
            r"broken_module cannot be imported: (NameError|SyntaxError|SystemExit): .*\.py", err
        ), err
    (tmp_path / "zoo.yaml").write_text(
        "models: [{name: net, model: broken_module.net, sizes: fixed, inputs: {x: {shape: [1]}}}]"
    )
    status, out, err = call("zoo", "check", str(tmp_path / "zoo.yaml"))
    assert status == 1
    assert "net: model: broken_module cannot be imported: " in err


@pytest.mark.parametrize(
    "command", [["compare", "a", "b"], ["validate"], ["trace", "net", "--zoo", "zoo.yaml"]]
)
def test_with_torch_alone_one_sentence_says_what_to_install(
    call: Any, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.delitem(sys.modules, f"{command_line.HARNESS}.commands.cli", raising=False)
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.setitem(sys.modules, "typer", None)
    status, out, err = call(*command)
    assert (status, out) == (2, "")
    assert err.startswith('error: the harness is not installed: `pip install ".[validation]"` in a clone')
    assert len(err.splitlines()) == 1
    assert call("doctor")[0] == 0


def test_installed_packages_offer_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.dist-info").mkdir()
    (tmp_path / "own.dist-info/METADATA").write_text("Name: own\nVersion: 1\n")
    offer = tmp_path / "own.dist-info/entry_points.txt"
    offer.write_text(f"[fxopt.passes]\nDoubles = {HERE}:Doubles\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert type(ready()["Doubles"]) is Doubles
    offer.write_text(f"[fxopt.passes]\nDoubles = {HERE}:Gone\n")
    importlib.invalidate_caches()
    with pytest.raises(PassError, match=f"pass {HERE}.Gone: {HERE} has no class 'Gone'"):
        ready()
