"""The wheel, in an environment of its own, and a repository of somebody else that uses it: examples/own_repository."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pandas as pd
import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True)
class Installed:
    """A copy of the example, and an environment that has the wheel of fxopt and of the example, and not this checkout."""

    repository: Path
    environment: Path

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        program, *arguments = command
        known = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHON"))
        }
        return subprocess.run(
            [str(self.environment / "bin" / program), *arguments],
            cwd=self.repository,
            env={**known, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("elsewhere")
    repository, environment = folder / "repository", folder / "environment"
    shutil.copytree(ROOT / "examples" / "own_repository", repository)
    for command in (
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        [sys.executable, "-m", "venv", "--without-pip", str(environment)],
    ):
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    # torch and the other dependencies are those of this environment, found by its path: installing them anew takes
    # minutes. What is in a .pth file of it, such as the checkout in an editable install, is not found.
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    (wheel,) = folder.glob("*.whl")
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(environment / "bin" / "python"),
        "install",
        "--quiet",
    ]
    offline = ["--no-deps", "--no-index", "--no-build-isolation", "--force-reinstall"]
    subprocess.run([*install, *offline, str(wheel), str(repository)], check=True, capture_output=True)
    git = ["git", "-c", "user.name=somebody", "-c", "user.email=somebody@example.com"]
    for arguments in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "All of it"]):
        subprocess.run([*git, *arguments], cwd=repository, check=True, capture_output=True)
    return Installed(repository, environment)


def test_the_harness_takes_no_common_name(installed: Installed) -> None:
    (packages,) = installed.environment.glob("lib/python*/site-packages")
    ours = {path.name for path in packages.iterdir()} - {"dependencies.pth", "__pycache__"}
    assert {name for name in ours if not name.endswith(".dist-info")} == {
        "fxopt",
        "fxopt_validation",
        "own_models",
        "pytest_fxopt.py",
    }
    assert not (packages / "fxopt_validation" / "conftest.py").exists()


def test_pytest_loads_the_plugin_and_nothing_heavy(installed: Installed) -> None:
    (installed.repository / "test_light.py").write_text(
        "import sys\n"
        "def test_light(pytestconfig):\n"
        "    assert pytestconfig.pluginmanager.has_plugin('pytest_fxopt')\n"
        "    assert not {'torch', 'pandas', 'fxopt', 'fxopt_validation'} & {*sys.modules}\n"
    )
    done = installed.run("python", "-m", "pytest", "-q", "test_light.py", "-p", "no:hypothesispytest")
    (installed.repository / "test_light.py").unlink()
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_repository_runs_its_own_pass_on_its_own_zoo(installed: Installed) -> None:
    own = installed.run("python", "-m", "pytest", "-q")
    assert own.returncode == 0, own.stdout + own.stderr
    done = installed.run(
        *("fxopt", "validate", "--pass", "RemoveRepeatedReLU", "-k", "RemoveRepeatedReLU"),
        *("--timing", "0.1"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout
    assert (
        installed.run("fxopt", "history", "reports/history").returncode == 2
    )  # a part of the plan is no night
    assert (installed.repository / "reports/latest/report.html").is_file()
    commit = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"],
        cwd=installed.repository,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    records = pd.read_parquet(installed.repository / "reports/latest/records.parquet")
    assert set(records["commit"]) == {commit}
    assert not list(installed.environment.rglob("reports"))


def test_a_wrong_pass_of_a_repository_fails(installed: Installed) -> None:
    file = installed.repository / "own_models" / "passes.py"
    right = file.read_text()
    wrong = right.replace("if first not in", "if first in").replace(
        "= obstacle(index, first, second)", "= None"
    )
    assert wrong != right
    file.write_text(wrong)
    select = "RemoveRepeatedReLU and equivalence"
    done = installed.run(
        "python", "-m", "pytest", "--fx-pass", "own_models.passes.RemoveRepeatedReLU", "-k", select
    )
    file.write_text(right)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "net-RemoveRepeatedReLU-cpu-equivalence" in done.stdout
