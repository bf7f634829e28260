"""Installs this checkout, with all that `make` needs, into a virtual environment: `python .ci/install.py .venv`.

Nothing is done if the environment is whole and newer than what it is made of. An environment without the stamp, which is
written last, was interrupted: it is emptied first. Two installs into one folder wait for each other.
"""

import argparse
import fcntl
import os
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
MADE_OF = [ROOT / "pyproject.toml", CONSTRAINTS, Path(__file__)]
OLDEST = (3, 11)
SILENT = 30
"""The seconds after which a step that writes to no terminal says that it is still at work."""


def install(folder: Path, torch: str, index_url: str) -> None:
    """Install into a folder: `torch` is the pinned version (""), another one, or `newest`."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(
        folder, os.O_RDONLY
    )  # the folder stays, whatever is removed in it; the lock ends with this process
    fcntl.flock(lock, fcntl.LOCK_EX)
    stamp = folder / ".installed"
    if stamp.exists() and stamp.stat().st_mtime > max(file.stat().st_mtime for file in MADE_OF):
        return  # another process did it, while this one waited
    if stamp.exists():
        stamp.unlink()  # what is there is brought up to date, which is quicker
    else:
        print(f"creating {folder}", flush=True)
        venv.create(folder, clear=True, with_pip=True)
    pinned = CONSTRAINTS.read_text().splitlines()
    if torch:
        pinned = [line for line in pinned if line.partition("==")[0] not in ("torch", "torchvision")]
        wanted = "torch" if torch == "newest" else f"torch=={torch}"
    else:
        (wanted,) = (line for line in pinned if line.startswith("torch=="))
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(pinned) + "\n")
    index = ["--index-url", index_url] if index_url else []
    # torch goes first and by exact version: a range would take the newest build and its CUDA libraries.
    _pip(folder, f"1 of 2: {wanted}, some minutes", wanted, *index)
    _pip(
        folder,
        "2 of 2: all else, some minutes",
        "--constraint",
        str(constraints),
        "--editable",
        f"{ROOT}[dev,docs]",
    )
    stamp.touch()


def _pip(folder: Path, step: str, *arguments: str) -> None:
    print(f"installing into {folder}, {step}", flush=True)
    talks = [] if sys.stdout.isatty() else ["--quiet", "--progress-bar", "off"]
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", *talks, *arguments]
    started = time.monotonic()
    with subprocess.Popen(command) as process:
        while True:
            try:
                status = process.wait(timeout=SILENT)
                break
            except subprocess.TimeoutExpired:
                if talks:
                    print(f"installing, {step}: {time.monotonic() - started:.0f} s so far", flush=True)
    if status:
        raise SystemExit(
            f"pip could not install {step.partition(',')[0]} (status {status}); `make` begins anew"
        )


if __name__ == "__main__":
    if sys.version_info < OLDEST:
        raise SystemExit(
            f"Python {OLDEST[0]}.{OLDEST[1]} or later is needed, and {sys.executable} is {sys.version.split()[0]}: make PYTHON=python3.11"
        )
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--torch", default="", help="a version of torch, or `newest`; default: that of constraints.txt"
    )
    parser.add_argument("--index-url", default="", help="where torch comes from; default: pip's own index")
    options = parser.parse_args()
    install(options.folder, options.torch, options.index_url)
