"""Each test measures anew, and leaves no file behind."""

import pytest

from fxopt import tuning


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FXOPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "_rows", {})
