"""Runs the console commands of README.md as they stand there, all but those that CI runs anyway."""

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

RUN_BY_CI = ("make validate", "make test")
"""Commands that take minutes: `.ci/run` or a workflow has a line for each."""


def commands() -> list[str]:
    """The lines of the README's console blocks, without their comments."""
    blocks = re.findall(r"^```console\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    lines = (re.sub(r"\s+#.*", "", line).strip() for block in blocks for line in block.splitlines())
    return [line for line in lines if line]


def main() -> int:
    """Run each command in the root of the checkout; `pip` and `python` are those of a new environment.

    The new environment finds torch and transformers in the environment that runs this file: installing these again takes
    minutes, and `make install` did so.
    """
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        (packages,) = Path(folder).glob("lib/python*/site-packages")
        (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
        known = {
            name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")
        }
        environment = known | {"PATH": f"{folder}/bin{os.pathsep}{os.environ['PATH']}"}
        # The package that was installed last is found in a folder that is not the checkout.
        works = f'cd "{folder}" && python -c "import fxopt, transformers; print(fxopt.__file__)"'
        for command in [*(each for each in commands() if each not in RUN_BY_CI), works]:
            print(f"$ {command}", flush=True)
            status = subprocess.run(
                ["bash", "-c", command], cwd=ROOT, env=environment, check=False
            ).returncode
            if status:
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
