"""Tuning: each kernel is run, the fastest is taken, and the times are kept in a file that may be missing or broken."""

import copy
import json

import pytest
import torch
from torch import nn

from fxopt import tuning
from fxopt.kernels import kernels_for

LAYER, SHAPE = nn.Linear(16, 8), (4, 16)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FXOPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "_known", {})
    return tmp_path / "cache" / "kernels.json"


def forget(monkeypatch):
    monkeypatch.setattr(tuning, "_known", {})


def test_every_kernel_is_measured():
    name, seconds = tuning.fastest(LAYER, SHAPE)
    assert {*seconds} == {"plain", *kernels_for(LAYER)}
    assert all(0 < took < 1 for took in seconds.values())
    assert name in seconds


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [
        ({"plain": 1.0, "onednn": 0.9}, "onednn"),
        ({"plain": 1.0, "onednn": 0.98}, "plain"),
    ],
)
def test_a_kernel_has_to_be_faster_by_a_margin(monkeypatch, seconds, wanted):
    monkeypatch.setattr(tuning, "_measure", lambda *_: {"mkl": 1.0} | seconds)
    assert tuning.fastest(LAYER, SHAPE)[0] == wanted


def test_what_was_measured_is_read_by_the_next_process(monkeypatch, cache):
    _, seconds = tuning.fastest(LAYER, SHAPE)
    assert len(json.loads(cache.read_text())) == 1
    forget(monkeypatch)
    monkeypatch.setattr(tuning, "_measure", None)
    assert tuning.fastest(LAYER, SHAPE)[1] == seconds


def test_another_layer_shape_dtype_or_number_of_threads_is_measured_by_itself(cache):
    threads = torch.get_num_threads()
    try:
        for layer, shape in [
            (LAYER, SHAPE),
            (LAYER, (8, 16)),
            (nn.Linear(16, 8, False), SHAPE),
            (copy.deepcopy(LAYER).bfloat16(), SHAPE),
        ]:
            tuning.measured(layer, shape, kernels_for(layer))
        torch.set_num_threads(threads + 1)
        tuning.measured(LAYER, SHAPE, kernels_for(LAYER))
    finally:
        torch.set_num_threads(threads)
    assert len(json.loads(cache.read_text())) == 5


@pytest.mark.parametrize("text", ["", "{", "[]", '{"x": 1}', '{"x": {"onednn": 1.0}}'])
def test_a_broken_file_is_written_anew(monkeypatch, cache, text):
    cache.parent.mkdir()
    cache.write_text(text)
    _, seconds = tuning.fastest(LAYER, SHAPE)
    (kept,) = json.loads(cache.read_text()).values()
    assert kept == seconds


def test_where_no_file_can_be_written_each_process_measures(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FXOPT_CACHE", str(tmp_path / "file" / "below"))
    _, seconds = tuning.fastest(LAYER, SHAPE)
    assert tuning.fastest(LAYER, SHAPE)[1] == seconds


def test_processes_that_write_at_once_keep_each_others_times(monkeypatch, cache):
    tuning.measured(LAYER, SHAPE, kernels_for(LAYER))
    forget(monkeypatch)
    monkeypatch.setattr(tuning, "_read", dict)  # as if it had begun before the other one wrote
    tuning.measured(LAYER, (8, 16), kernels_for(LAYER))
    assert len(json.loads(cache.read_text())) == 1  # a lost time costs a measurement, and no more


def test_copies_at_borders_are_measured():
    assert 0 < tuning.copying((2, 8, 16, 16)) < 1


def test_a_merged_layer_is_timed_beside_those_that_it_is_made_of(monkeypatch, cache):
    parts, merged = [nn.Linear(16, 8), nn.Linear(16, 4, bias=False)], nn.Linear(16, 12)
    ratio = tuning.merged_time(parts, merged, SHAPE)
    assert 0 < ratio < 100
    forget(monkeypatch)
    monkeypatch.setattr(tuning, "_times", None)  # nothing is measured again
    assert tuning.merged_time(parts, merged, SHAPE) == ratio
    row = next(row for key, row in json.loads(cache.read_text()).items() if key.startswith("merged "))
    assert ratio == row["merged"] / row["plain"]
