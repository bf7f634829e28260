"""The folder on disk: `graph.json` names the file with the weights, so that one rename replaces both."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fxopt.errors import LoadError, SaveError, error_text
from fxopt.version import __version__

GRAPH = "graph.json"
FORMAT = 3
"""The number of the format; any other is refused."""


def write(folder: Path, document: Mapping[str, Any], entries: Mapping[str, Tensor]) -> None:
    """Write both files, or neither: raise SaveError if one of them fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fxopt-", dir=folder) as new:
            graph, weights = Path(new, GRAPH), Path(new, "weights")
            save_file(dict(entries), weights)
            digest = _digest(weights)
            graph.write_text(_sealed(document, digest), encoding="utf-8")
            shutil.copymode(graph, weights)  # safetensors makes the file readable only for the user
            for file in (weights, graph):
                with file.open("rb+") as written:
                    os.fsync(written.fileno())
            _put_in_place(folder, graph, weights, weights_file(folder, digest))
    except (OSError, SafetensorError) as error:
        raise SaveError(f"{folder} could not be written, and is as it was: {error}") from error


def _put_in_place(folder: Path, graph: Path, weights: Path, target: Path) -> None:
    """Rename the new files, the weights first, so that a reader always finds the weights that `graph.json` names."""
    old = target
    with contextlib.suppress(LoadError):  # no old file, or not one of fxopt
        old = weights_file(folder, _document(folder).get("weights"))
    was_there = target.exists()
    os.replace(weights, target)
    try:
        os.replace(graph, folder / GRAPH)
    except BaseException:
        if not was_there:
            target.unlink()
        raise
    if old != target:
        old.unlink(missing_ok=True)


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the document and the tensors; raise LoadError if a file is missing, damaged or of another format."""
    while True:
        document = _document(folder)
        try:
            return document, _tensors(weights_file(folder, document.get("weights")), document)
        except LoadError:
            if _document(folder) == document:  # no other save has replaced the files in the meantime
                raise


def weights_file(folder: Path, digest: object) -> Path:
    """The file with the weights of this digest."""
    return folder / f"model-{re.sub(r'[^0-9a-f]', '', str(digest))[:16]}.safetensors"


def as_read(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document as it is when it is read from a file."""
    read: dict[str, Any] = json.loads(json.dumps(document, allow_nan=False))
    return read


_AGAIN = "Copy the folder again, or save again."


def _tensors(path: Path, document: Mapping[str, Any]) -> dict[str, Tensor]:
    with _explained(path):
        if _digest(path) != document["weights"]:
            raise LoadError(f"{path} was changed since it was saved: its digest differs. {_AGAIN}")
        with safe_open(path, "pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def _document(folder: Path) -> dict[str, Any]:
    path = folder / GRAPH
    with _explained(path):
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        number, seal = document["format"], document.pop("sha256", None)
        if number != FORMAT:
            raise LoadError(
                f"{path} is of format {number}, written by {document.get('versions')}; this fxopt reads format {FORMAT}. Use "
                "the version that wrote it, or capture and save again."
            )
        if seal != _seal(document):
            raise LoadError(f"{path} was changed since it was saved: its digest differs. {_AGAIN}")
        return document


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise LoadError(f"{path} is missing: give a folder that fxopt.save wrote.") from error
    except LoadError:
        raise
    except Exception as error:  # a file may contain anything
        what = error_text(error)
        raise LoadError(f"{path} is cut off, or no file that fxopt saved ({what}). {_AGAIN}") from error


def _sealed(document: Mapping[str, Any], weights: str) -> str:
    """The text of `graph.json`, with one line for each node and module."""
    versions = {"fxopt": __version__, "torch": torch.__version__}
    content = {"format": FORMAT, "versions": versions, "weights": weights, **document}
    text = json.dumps({**content, "sha256": _seal(content)}, allow_nan=False)
    for first in ("op", "class"):
        text = text.replace(f'{{"{first}": ', f'\n{{"{first}": ')
    return text + "\n"


def _seal(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
