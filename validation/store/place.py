"""The place of reports: a folder, or a URL that a folder of this machine stands in for."""

from __future__ import annotations

import atexit
import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .table import ReportError, first_line

PAUSE, SHARE = 10.0, 0.05
"""Seconds between two times that a run sends what it has found, and the most of its time that sending may take."""

STATED = ("size", "ETag", "etag", "mtime", "created", "LastModified", "last_modified")
"""The facts by which a file at a URL is known to be still the same; drivers of fsspec give some of them."""

MARK = ".fxopt"
"""A file of the folder that stands in for a URL; where it is gone, so is the folder, though one may be there anew."""

KEPT = ("history/", "baseline/")
"""The folders from which nothing is ever removed at a URL."""


class Place:
    """A folder, or a URL of fsspec such as `s3://bucket/reports`, whose files are fetched to a folder and sent from there.

    Storage that is reached by a URL seldom has locks, or files that grow or are renamed: all of that happens in the folder,
    and what is sent is whole files. `path` is the folder, or the file where it is one; it stands in for a URL where the place
    is `far`, at which there was nothing where it is `empty`. Raises `ReportError` for a URL that cannot be read.
    """

    def __init__(self, name: str | Path) -> None:
        self.name, self.path, self.far, self.empty = str(name), Path(name), "://" in str(name), False
        if not self.far:
            return
        with self._asked("read"):
            import fsspec

            self._files, root = fsspec.url_to_fs(self.name)
            if self._files.protocol == ("file", "local"):
                self.path, self.far = Path(root), False
                return
            self._root: str = root
            self._there = self._stated()
            self._folder = self.path = Path(tempfile.mkdtemp(prefix="fxopt-reports-"))
            self._fetched = False
            atexit.register(self._remove)
            (self._folder / MARK).touch()
            if [*self._there] == [""]:  # a file
                self._root, _, file = root.rpartition("/")
                self._there, self.path = {file: self._there[""]}, self._folder / file
            if self._there:
                there = [f"{self._root.rstrip('/')}/{name}" for name in self._there]
                self._files.get(there, [str(self._folder / name) for name in self._there])
        self._sent, self._next, self.empty, self._fetched = self._stamps(), 0.0, not self._there, True

    def send(self) -> None:
        """Has the URL follow the folder: sends what is new there, and then removes what is gone.

        What another has written there since, or is kept for good, is not removed. Raises `ReportError` when the folder is
        gone, or sending fails; what was sent before stays, and the next time sends the rest.
        """
        if not self.far:
            return
        if not (self._folder / MARK).exists():  # else all at the URL would seem to be gone, too
            raise ReportError(f"{self._folder}: is gone, so that nothing more can be sent to {self.name}")
        began, now = time.monotonic(), self._stamps()
        new = [name for name, stamp in now.items() if self._sent.get(name) != stamp]
        try:
            with self._asked(f"written, so that {self._folder} keeps what is not there"):
                if new:
                    self._files.put(
                        [str(self._folder / name) for name in new], [f"{self._root}/{name}" for name in new]
                    )
                there = self._stated()
                self._there |= {name: there[name] for name in new if name in there}
                for name in self._sent.keys() - now.keys():
                    if name in there and there[name] == self._there.get(name) and not name.startswith(KEPT):
                        with contextlib.suppress(FileNotFoundError):
                            self._files.rm_file(f"{self._root}/{name}")
                self._sent = now
        finally:
            took = time.monotonic() - began
            self._next = time.monotonic() + max(PAUSE, took / SHARE)

    def send_soon(self) -> None:
        """Sends what is new, where that was not done a moment ago; the next time makes up for what goes wrong."""
        if self.far and time.monotonic() >= self._next:
            with contextlib.suppress(ReportError):
                self.send()

    def named(self, text: object) -> str:
        """A text with the files of the folder as they are called there."""
        return str(text).replace(str(self._folder), self.name.rstrip("/")) if self.far else str(text)

    def _stated(self) -> dict[str, dict[str, Any]]:
        """The facts that tell the files at the URL from later ones, by their name; "" is what the URL names, a file."""
        self._files.invalidate_cache()
        found = self._files.find(self._root, detail=True).items()
        named = {file.removeprefix(self._root).lstrip("/"): info for file, info in found if not _hidden(file)}
        return {name: {fact: info[fact] for fact in STATED if fact in info} for name, info in named.items()}

    def _stamps(self) -> dict[str, tuple[int, int]]:
        """Changes with a file, by its name; hidden files are locks, and files that are not finished."""
        files = [file for file in self._folder.rglob("[!.]*") if file.is_file()]
        facts = {file.relative_to(self._folder).as_posix(): file.stat() for file in files}
        return {name: (fact.st_mtime_ns, fact.st_size) for name, fact in facts.items()}

    def _remove(self) -> None:
        if not self._fetched or self._stamps() == self._sent:
            shutil.rmtree(self._folder, ignore_errors=True)

    @contextlib.contextmanager
    def _asked(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the boundary: the packages behind fsspec have errors of their own
            text = f"{type(error).__name__}: {first_line(error)}"
            raise ReportError(f"{self.name}: cannot be {what} ({text})") from error


def _hidden(file: str) -> bool:
    return file.rpartition("/")[2].startswith(".")
