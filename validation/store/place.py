"""The place of reports: a folder, or a URL that a folder of this machine stands in for."""

from __future__ import annotations

import atexit
import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .table import ReportError, first_line

PAUSE, SHARE = 10.0, 0.05
"""Seconds between two times that a run sends what it has found, and the most of its time that sending may take."""

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
            self._files.invalidate_cache()
            there = self._files.find(root)
            is_file = there == [root]
            self._root: str = root.rpartition("/")[0] if is_file else root
            self._folder, self._next = Path(tempfile.mkdtemp(prefix="fxopt-reports-")), 0.0
            self._sent: dict[str, tuple[int, int]] | None = None
            atexit.register(self._remove)
            (self._folder / MARK).touch()
            names = [file.removeprefix(self._root).lstrip("/") for file in there]
            if names:
                self._files.get(there, [str(self._folder / name) for name in names])
        self._sent, self.empty = self._stamps(), not names
        self.path = self._folder / names[0] if is_file else self._folder

    def send(self) -> None:
        """Has the URL follow the folder: sends what is new there, and removes what this run has fetched or sent and deleted.

        Raises `ReportError` when the folder is gone, or sending fails; the next time sends the rest.
        """
        if not self.far:
            return
        if not (self._folder / MARK).exists():  # else all at the URL would seem to be gone, too
            raise ReportError(f"{self._folder}: is gone, so that nothing more can be sent to {self.name}")
        began, now, sent = time.monotonic(), self._stamps(), self._sent or {}
        new = [name for name, stamp in now.items() if sent.get(name) != stamp]
        gone = [name for name in sent.keys() - now.keys() if not name.startswith(KEPT)]
        try:
            with self._asked(f"written, so that {self._folder} keeps what is not there"):
                if new:
                    folder = [str(self._folder / name) for name in new]
                    self._files.put(folder, [f"{self._root}/{name}" for name in new])
                for name in gone:
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

    def _stamps(self) -> dict[str, tuple[int, int]]:
        """Changes with a file, by its name; hidden files are locks, and files that are not finished."""
        files = [file for file in self._folder.rglob("[!.]*") if file.is_file()]
        facts = {file.relative_to(self._folder).as_posix(): file.stat() for file in files}
        return {name: (fact.st_mtime_ns, fact.st_size) for name, fact in facts.items()}

    def _remove(self) -> None:
        if self._sent is None or self._stamps() == self._sent:
            shutil.rmtree(self._folder, ignore_errors=True)

    @contextlib.contextmanager
    def _asked(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the boundary: the packages behind fsspec have errors of their own
            text = f"{type(error).__name__}: {first_line(error)}"
            raise ReportError(f"{self.name}: cannot be {what} ({text})") from error
