"""Private names of torch: no other file uses one, and each can be absent at the price of one capability."""

import ast
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fxopt
from fxopt.torch_internals import ROWS, how_tested

FXOPT = Path(fxopt.__file__).parent
NAMES = sorted(ROWS)
BATCHES = [NAMES[start::32] for start in range(32)]


def run_without(*names: str) -> dict[str, dict[str, str]]:
    """By name, the outcome of each capability without it."""
    command = [sys.executable, Path(__file__).with_name("without_names.py"), *names]
    env = {**os.environ, "PYTHONPATH": str(FXOPT.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    found = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    assert found.keys() == {*names}, done.stderr[-3000:]
    return found


@pytest.mark.sweep(16, day=8)
@pytest.mark.parametrize("names", BATCHES, ids=lambda names: names[0].rpartition(".")[2])
def test_what_needs_an_absent_name_says_so_and_all_else_is_right(names: list[str]) -> None:
    for name, outcomes in run_without(*names).items():
        wrong = {
            capability: outcome
            for capability, outcome in outcomes.items()
            if outcome != "right" and f"torch {torch.__version__} has no {name}: " not in outcome
        }
        assert not wrong, (name, wrong)
        refused = [capability for capability, outcome in outcomes.items() if outcome != "right"]
        assert refused or ROWS[name].has_fallback, f"nothing needs {name}"


def test_with_all_names_all_capabilities_are_right() -> None:
    assert {*run_without("")[""].values()} == {"right"}


def test_this_torch_has_all_names() -> None:
    assert [str(row) for row in ROWS.values() if not row.found] == []


def test_the_tested_versions_are_those_of_the_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = FXOPT.with_name("pyproject.toml").read_text()
    oldest, newest = fxopt.torch_internals.TESTED
    assert f'"torch>={oldest}"' in metadata
    for version, said in [
        (oldest, "tested"),
        (f"{newest}.3+cpu", "tested"),
        ("2.99.0a0", "untested"),
        ("2.9.1", "untested"),
    ]:
        monkeypatch.setattr(torch, "__version__", version)
        assert how_tested().startswith(said)


def private_uses(source: str) -> list[str]:
    """Where code uses a private name of torch: an import, an attribute of a module, or one of an object of torch."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name for name in names if "._" in name or name.startswith("torch.fx.experimental")]
        elif isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.startswith("torch.") and "._" in a.name]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls", "super()"):
            path = ast.unparse(node)
            of_torch = re.fullmatch(r"torch[.\w]*\._(?!_)[.\w]*", path)
            if node.attr in private_attributes() or of_torch:
                found.append(path)
    return [name for name in found if name not in DOCUMENTED]


DOCUMENTED = {"torch._check"}


@functools.cache
def private_attributes() -> set[str]:
    graph = torch.fx.Graph()
    samples = (
        *(nn.Module(), nn.Linear(1, 1), torch.empty(0), torch.empty(0).untyped_storage(), graph),
        *(graph.placeholder("x"), torch.ops.aten.relu.default, torch.fx.GraphModule(nn.Module(), torch.fx.Graph())),
    )  # fmt: skip
    names = {name for sample in samples for name in dir(sample)}
    return {name for name in names if name.startswith("_") and not name.startswith("__")} - {"_is_impure"}


def test_private_names_of_torch_stand_in_two_files() -> None:
    files = [file for file in FXOPT.rglob("*.py") if not file.name.endswith("_internals.py")]
    found = {str(file.relative_to(FXOPT)): private_uses(file.read_text()) for file in files}
    assert {file: names for file, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    ["from torch._ops import OpOverload", "import torch._dynamo", "torch._C._nn.gelu", "layer._parameters", "x.node._erased"],
)  # fmt: skip
def test_a_private_name_is_seen(source: str) -> None:
    assert private_uses(source)
