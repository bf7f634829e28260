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
    monkeypatch.setattr(tuning, "_once", {})
    return tmp_path / "cache" / "kernels.json"


def forget(monkeypatch):
    monkeypatch.setattr(tuning, "_known", {})
    monkeypatch.setattr(tuning, "_once", {})


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


def test_what_two_processes_found_the_next_one_reads(monkeypatch, cache):
    """The first one measured on a busy machine; the second one finds another kernel, and the third one agrees."""
    quick, quicker = {"plain": 1.0, "onednn": 0.8, "mkl": 0.9}, {"plain": 0.5, "onednn": 0.6, "mkl": 0.9}
    for row, wanted, processes in [
        (quick, "onednn", 1.0),
        (quicker, "plain", 1.0),
        (quicker, "plain", 2.0),
        (None, "plain", 2.0),
    ]:
        forget(monkeypatch)
        monkeypatch.setattr(tuning, "_measure", lambda *_, row=row: dict(row))
        assert tuning.fastest(LAYER, SHAPE)[0] == wanted
        assert tuning.fastest(LAYER, SHAPE)[0] == wanted, "a process measures once"
        (kept,) = json.loads(cache.read_text()).values()
        assert kept["processes"] == processes
    assert kept == {"plain": 0.5, "onednn": 0.6, "mkl": 0.9, "processes": 2.0}, "the shortest times of all"


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
    assert kept == {**seconds, "processes": 1.0}


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
