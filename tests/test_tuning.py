"""Tuning: each kernel is run, the fastest is taken, and the times are kept in a file that may be missing or broken."""

import copy
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import fxopt
from fxopt import packing, tuning
from fxopt.kernels import kernels_for

LAYER, SHAPE = nn.Linear(16, 8), (4, 16)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FXOPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "_rows", {})
    return tmp_path / "cache" / "kernels.jsonl"


def kept_in(cache):
    """The rows that later processes find."""
    return dict(json.loads(line) for line in cache.read_text().splitlines() if line.startswith('["'))


def forget(monkeypatch):
    monkeypatch.setattr(tuning, "_rows", {})


@pytest.mark.parametrize(("features", "copies"), [(16, 16), (1024, 8), (2500, 2), (4000, 1)])
def test_weights_come_from_memory(features, copies, monkeypatch):
    found = {}
    monkeypatch.setattr(tuning, "_times", lambda runs: found.update(runs) or dict.fromkeys(runs, 1.0))
    tuning.measured(nn.Linear(features, features, bias=False), (1, features), [])
    assert len(found["plain"]) == copies


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
        (kept,) = kept_in(cache).values()
        assert kept["processes"] == processes
    assert kept == {"plain": 0.5, "onednn": 0.6, "mkl": 0.9, "processes": 2.0}, "the shortest times of all"


def test_one_choice_by_other_times_is_measured_again(monkeypatch, cache):
    """On two busy cores the threads of one kernel wait for each other, so that two processes choose the same wrong kernel."""
    for onednn, wanted in [(15.0, "plain"), (7.0, "plain"), (0.6, "onednn")]:
        forget(monkeypatch)
        row = {"plain": 1.0, "onednn": onednn, "mkl": 1.1}
        monkeypatch.setattr(tuning, "_measure", lambda *_, row=row: dict(row))
        assert tuning.fastest(LAYER, SHAPE)[0] == wanted
    (kept,) = kept_in(cache).values()
    assert kept["processes"] == 1.0


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
    assert len(kept_in(cache)) == 5


@pytest.mark.parametrize("text", ["", "{", "[]", '{"x": 1}', '["x", 1]', '["x", {"onednn": 1.0}]', '["x'])
def test_broken_lines_are_left_out(monkeypatch, cache, text):
    cache.parent.mkdir()
    cache.write_text(text)
    _, seconds = tuning.fastest(LAYER, SHAPE)
    assert list(tuning._read().values()) == [{**seconds, "processes": 1.0}]


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
    assert len(kept_in(cache)) == 2


def test_threads_measure_one_after_the_other_and_each_layer_once(monkeypatch, cache):
    running, most, calls = [], [], []

    def measure(*_):
        running.append(1)
        time.sleep(0.01)
        most.append(len(running))
        calls.append(1)
        running.pop()
        return {"plain": 1.0} | dict.fromkeys(kernels_for(LAYER), 0.5)

    monkeypatch.setattr(tuning, "_measure", measure)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda rows: tuning.fastest(LAYER, (rows, 16)), [1, 2, 3, 4] * 4))
    assert (max(most), len(calls), len(kept_in(cache))) == (1, 4, 4)


def test_a_child_of_a_process_that_measures_does_not_wait(monkeypatch):
    monkeypatch.setattr(
        tuning, "_measure", lambda *_: {"plain": 1.0} | dict.fromkeys(kernels_for(LAYER), 0.5)
    )
    with tuning._lock:
        child = os.fork()
        if not child:
            signal.alarm(60)
            os._exit(0 if tuning.fastest(LAYER, SHAPE) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_numbers_that_others_draw_meanwhile_are_not_drawn_again(monkeypatch):
    plain, drawn = tuning._random_layer, []

    def drawing(*args):
        drawn.append(torch.rand(1))  # as another thread may
        return plain(*args)

    monkeypatch.setattr(tuning, "_random_layer", drawing)
    torch.manual_seed(0)
    tuning.fastest(LAYER, SHAPE)
    drawn.append(torch.rand(1))
    torch.manual_seed(0)
    assert drawn == [torch.rand(1) for _ in drawn]


def test_copies_at_borders_are_measured():
    assert 0 < tuning.copying((2, 8, 16, 16)) < 1


def test_without_tuning_what_was_measured_as_slower_is_left_alone(monkeypatch, cache):
    layer = nn.Linear(8, 4)
    traced = fxopt.trace(nn.Sequential(nn.Linear(8, 4)).eval(), (torch.ones(2, 8),))
    kernel = kernels_for(layer)[0]
    monkeypatch.setattr(packing, "is_slower", tuning.is_slower)
    assert not tuning.is_slower(layer, (2, 8), kernel)
    for slower in (True, False):
        times = dict.fromkeys(kernels_for(layer), 1.0) | {tuning.PLAIN: 0.5 if slower else 2.0}
        monkeypatch.setitem(tuning._rows, tuning._key(layer, (2, 8)), times)
        assert tuning.is_slower(layer, (2, 8), kernel) is slower
        assert len(fxopt.PackLinears("known").explain(traced).sites) == (not slower)
        assert fxopt.PackLinears().explain(traced).sites  # the same on every machine


@pytest.mark.parametrize(
    ("behind", "activation"),
    [((nn.GELU(),), "gelu"), ((nn.ReLU(inplace=True),), "relu"), ((nn.Softmax(-1),), None), ((), None)],
)
def test_the_activation_behind_a_layer_is_measured_with_it(behind, activation, monkeypatch):
    asked = []
    monkeypatch.setattr(
        packing, "fastest", lambda *given, **options: asked.append(options["activation"]) or ("plain", {})
    )
    traced = fxopt.trace(nn.Sequential(LAYER, *behind).eval(), (torch.ones(SHAPE),))
    assert not fxopt.PackLinears(tune=True).explain(traced).sites
    assert asked == [activation]


def test_a_layer_with_an_activation_has_a_row_of_its_own(cache):
    tuning.fastest(LAYER, SHAPE)
    tuning.fastest(LAYER, SHAPE, activation="gelu")
    keys = [*kept_in(cache)]
    assert [" and gelu " in key for key in keys] == [False, True]
    assert keys[0] == keys[1].replace(" and gelu ", " ")


def test_a_convolution_of_single_pixels_has_a_matrix_product():
    assert "matmul" in kernels_for(nn.Conv2d(8, 4, 1))
    for options in ({"kernel_size": 3}, {"stride": 2}, {"padding": 1}, {"groups": 2}):
        assert "matmul" not in kernels_for(nn.Conv2d(8, 4, **{"kernel_size": 1} | options))
