"""A release tells its version and types, and needs torch and safetensors alone."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fxopt

ROOT = Path(__file__).parent.parent

# Refuses to import what an environment with fxopt's own requirements alone would not have.
ALONE = """
import importlib.abc, runpy, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"{{name}} is not installed", name=name)
sys.meta_path.insert(0, Missing())
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.partition(".")[0] in {missing!r} else find(name, *rest)
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.long
def test_fxopt_works_with_torch_alone():
    assert project()["dependencies"] == ["safetensors[numpy]>=0.5", "torch>=2.12"]
    needed = closure(["safetensors", "numpy", "torch"])
    owners = importlib.metadata.packages_distributions()
    missing = {name for name, distributions in owners.items() if not needed & set(map(normal, distributions))}
    missing -= {"fxopt", *sys.stdlib_module_names} | {name for name in owners if name.startswith("_")}
    assert {"transformers", "pandas", "pytest"} <= missing
    assert not {"torch", "sympy", "safetensors"} & missing
    code = ALONE.format(missing=missing, script=str(ROOT / ".ci/smoke.py"))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert f"fxopt {fxopt.__version__} works" in ran.stdout


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def closure(names):
    """The distributions that these need, themselves among them, without extras."""
    found, pending = set(), list(names)
    while pending:
        name = normal(pending.pop())
        if name not in found:
            found.add(name)
            for line in importlib.metadata.requires(name) or ():
                requirement, _, marker = line.partition(";")
                if "extra" not in marker and installed(needed := re.match(r"[\w.-]+", requirement)[0]):
                    pending.append(needed)
    return found


def installed(name):
    return any(importlib.metadata.distributions(name=name))


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_version_is_said_in_one_place():
    assert "version" in project()["dynamic"]
    assert "version" not in project()
    assert re.fullmatch(r"\d+\.\d+\.\d+", fxopt.__version__)


def test_types_are_told_to_others():
    assert (ROOT / "fxopt/py.typed").exists()
