"""The folder on disk: written beside the old one and put in its place, and read only if it is whole."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fxopt.errors import LoadError, SaveError
from fxopt.version import __version__

GRAPH, WEIGHTS = "graph.json", "model.safetensors"
FORMAT = 2
"""The number of the format; a newer one is refused."""


def write(folder: Path, document: Mapping[str, Any], entries: Mapping[str, Tensor]) -> None:
    """Write both files, all or nothing; SaveError where that fails."""
    folder = Path(os.path.realpath(folder))
    if folder.exists() and not folder.is_dir():
        raise SaveError(f"{folder} is a file: give a folder.")
    if folder.exists():
        if folder.samefile(os.curdir):
            raise SaveError(
                f"{folder} is the current folder, which would be replaced: give the name of one in it."
            )
        others = sorted({entry.name for entry in os.scandir(folder)} - {GRAPH, WEIGHTS})
        if others:
            raise SaveError(
                f"{folder} holds other files ({', '.join(others[:3])}): give a folder for this module alone."
            )
    new, old = (folder.with_name(f".{folder.name}.{kind}-{uuid.uuid4().hex[:8]}") for kind in ("new", "old"))
    try:
        new.mkdir(parents=True)
        save_file(dict(entries), new / WEIGHTS)
        _flush(new / WEIGHTS)
        facts = {"bytes": (new / WEIGHTS).stat().st_size, "sha256": _digest(new / WEIGHTS)}
        (new / GRAPH).write_text(_sealed(document, facts), encoding="utf-8")
        _flush(new / GRAPH)
        shutil.copymode(new / GRAPH, new / WEIGHTS)  # safetensors lets the user alone read
        _swap(new, folder, old)
    except (OSError, SafetensorError) as error:
        raise SaveError(f"{folder} could not be written, and is as it was: {error}") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The document and the tensors; LoadError where a file is missing, damaged or of a newer format.

    Where `write` puts another folder in the place of this one meanwhile, both files are those of one save.
    """
    for _ in range(_ATTEMPTS):
        found = _identity(folder)
        try:
            document = _checked(folder / GRAPH)
            return document, _tensors(folder / WEIGHTS, document)
        except LoadError:
            if _identity(folder) == found and (found or not _moved_away(folder)):
                raise
            time.sleep(0.01)
    moved = _moved_away(folder)
    if moved and _identity(folder) is None:
        raise LoadError(
            f"{folder} is missing: a save was broken off when it had moved it to {moved[0]}. Move it back, or save again."
        )
    raise LoadError(f"{folder} is saved anew again and again while it is read: load it when that is done.")


def _tensors(weights: Path, document: Mapping[str, Any]) -> dict[str, Tensor]:
    with _explained(weights):
        facts, size = document["weights"], weights.stat().st_size
        if size != facts["bytes"]:
            raise LoadError(
                f"{weights} has {size} bytes, not {facts['bytes']}: it is cut off, or of another save. {_AGAIN}"
            )
        if _digest(weights) != facts["sha256"]:
            raise LoadError(f"{weights} was changed since it was saved: its digest is another. {_AGAIN}")
        with safe_open(weights, "pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def _identity(folder: Path) -> tuple[int, int] | None:
    """Another one for each folder that `write` puts in this place; None where there is none."""
    with contextlib.suppress(OSError):
        facts = folder.stat()
        return facts.st_ino, facts.st_ctime_ns
    return None


def _moved_away(folder: Path) -> list[Path]:
    """The place to which `write` has moved the folder, as long as it has not removed it, in a list."""
    folder = Path(os.path.realpath(folder))
    return list(folder.parent.glob(f".{glob.escape(folder.name)}.old-*"))


_ATTEMPTS = 20
"""How often a folder is read that another save replaces meanwhile."""


def as_read(document: Mapping[str, Any]) -> dict[str, Any]:
    """A document as it comes back from its file."""
    read: dict[str, Any] = json.loads(json.dumps(document, allow_nan=False))
    return read


_AGAIN = "Copy the folder again, or save again."


def _sealed(document: Mapping[str, Any], weights: Mapping[str, Any]) -> str:
    versions = {"fxopt": __version__, "torch": torch.__version__}
    content = {"format": FORMAT, "versions": versions, "weights": weights, **document}
    lines = [f"{json.dumps(key)}: {_lines(value)}" for key, value in content.items()]
    return "{\n" + ",\n".join([*lines, f'"sha256": "{_seal(content)}"']) + "\n}\n"


def _lines(value: Any) -> str:
    """JSON with each node, module and tensor on a line of its own."""
    if isinstance(value, list):
        return "[\n" + ",\n".join(json.dumps(item, allow_nan=False) for item in value) + "\n]"
    if isinstance(value, dict):
        items = (f"{json.dumps(key)}: {json.dumps(item, allow_nan=False)}" for key, item in value.items())
        return "{\n" + ",\n".join(items) + "\n}"
    return json.dumps(value)


def _seal(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _checked(path: Path) -> dict[str, Any]:
    with _explained(path):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            number = document["format"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise LoadError(f"{path} is cut off, or no graph that fxopt saved ({error}). {_AGAIN}") from error
        if type(number) is not int or number > FORMAT:
            writer = document.get("versions")
            by = f"fxopt {writer.get('fxopt')}" if isinstance(writer, dict) else "a newer fxopt"
            raise LoadError(
                f"{path} is of format {number}, written by {by}; this fxopt reads up to {FORMAT}. Update fxopt."
            )
        seal = document.pop("sha256", None)
        try:
            if seal != _seal(document):
                raise LoadError(f"{path} was changed since it was saved: its digest is another. {_AGAIN}")
        except (ValueError, RecursionError) as error:
            raise LoadError(f"{path} is no graph that fxopt saved ({error}). {_AGAIN}") from error
        result: dict[str, Any] = document
        return result


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise LoadError(
            f"{path} is missing: give a folder that fxopt.save wrote, with {GRAPH} and {WEIGHTS}."
        ) from error
    except (OSError, SafetensorError, KeyError, TypeError) as error:
        raise LoadError(f"{path} cannot be read ({type(error).__name__}: {error}). {_AGAIN}") from error


def _swap(new: Path, folder: Path, old: Path) -> None:
    """Put a folder in the place of another, or of none; where that fails, the other stays."""
    with contextlib.suppress(FileNotFoundError):
        shutil.copymode(folder, new)
    while True:
        with contextlib.suppress(FileNotFoundError):
            os.replace(folder, old)
        try:
            os.replace(new, folder)
            break
        except BaseException as error:
            # Another save has put its folder here meanwhile, in the place of the old one.
            if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                shutil.rmtree(old, ignore_errors=True)
                continue
            if old.exists():
                os.replace(old, folder)
            raise
    shutil.rmtree(old, ignore_errors=True)


def _flush(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
