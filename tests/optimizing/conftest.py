"""Each test measures anew, and leaves no file behind."""

import pytest

from fxopt import tuning
from fxopt.optimizing import prepare


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FXOPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "_rows", {})


@pytest.fixture
def no_timing(monkeypatch):
    """Each graph counts as faster than the model."""
    monkeypatch.setattr(prepare, "speedup", lambda *_: 1.5)
