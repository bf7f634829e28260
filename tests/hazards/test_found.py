"""Faults that fuzzing found: each a script that needs no harness, and fails where the fault is back."""

import pathlib
import runpy

import pytest

SCRIPTS = sorted(pathlib.Path(__file__).parent.joinpath("found").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_stays_fixed(script):
    runpy.run_path(str(script))


def test_there_are_some():
    assert len(SCRIPTS) >= 3
