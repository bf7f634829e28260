"""A plugin: `far://` are files of this machine that, as in an object store, neither grow nor are renamed, and every record is sent at once."""

from __future__ import annotations

import functools
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from validation.store import place


class FarStorage(LocalFileSystem):
    protocol = "far"

    def __init__(self, **options: Any) -> None:
        super().__init__(auto_mkdir=True, **options)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("far://").rstrip("/")

    def mv(self, *arguments: Any, **options: Any) -> None:
        raise NotImplementedError("no file is renamed here")

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        assert mode in ("rb", "wb"), "no file grows here"
        return super().open(path, mode, **options)


fsspec.register_implementation("far", FarStorage, clobber=True)


def pytest_configure(config: pytest.Config) -> None:
    config.add_cleanup(functools.partial(setattr, place, "PAUSE", place.PAUSE))
    place.PAUSE = 0.0
