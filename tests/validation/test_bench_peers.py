"""The benchmark of peers: who runs gives what the model gives, who cannot is left out with a line, and the reports say so."""

import math
import re
import shutil
import sys

import pandas as pd
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from tests.validation.small_workloads import SMALL
from validation.bench import engine_rows, machine, peers, workloads
from validation.bench.__main__ import app
from validation.bench.engine_rows import compare, exactness, in_float64
from validation.bench.engines import (
    AGAIN,
    EAGER,
    PRECISIONS,
    Prepared,
    eager,
    engines,
    fresh,
    tensors,
)
from validation.bench.peers import document
from validation.bench.workloads import Workload

TWO_LAYERS = "two layers"


def everyone():
    """Each engine on a model of two layers, which takes seconds, and those that are quick on real ones as well."""
    for precision in PRECISIONS:
        for name in engines(precision, 2):
            if name != "torch.compile bfloat16":  # as `torch.compile`, on the model of `eager bfloat16`
                yield precision, name, TWO_LAYERS
    yield from (("float32", "torch.jit", "bert"), ("float32", "torch.jit", "llama-decode"))
    yield from (("bfloat16", "eager bfloat16", "llama-decode"), ("int8", "torch.ao int8", "bert"))


@pytest.mark.sweep(8)
@pytest.mark.parametrize(("precision", "name", "model"), list(everyone()))
def test_an_engine_gives_what_the_model_gives(precision, name, model):
    if name == "torch.compile" and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("inductor needs a C++ compiler")
    if name in UNABLE:
        pytest.skip(f"{name} is not for this model: {UNABLE[name]}")
    for package in ("onnxruntime", "onnxscript", "openvino"):
        if name.lower().startswith(package[:4]):
            pytest.importorskip(package)
    workload = two_layers() if model == TWO_LAYERS else SMALL[model]()
    state = {key: value.clone() for key, value in workload.model.state_dict().items()}
    with torch.no_grad():
        prepared = engines(precision, 2)[name](workload.model, workload.inputs, 1)
        with torch.compiler.set_stance("fail_on_recompile"):
            for _ in range(3):  # a cache has not grown meanwhile
                outputs = tensors(prepared.run(prepared.feed(workload.inputs)))
    error, cosine = exactness(outputs, in_float64(workload))
    assert error < {"float32": 1e-5, "bfloat16": 0.05, "int8": 0.2}[precision]
    assert cosine > 0.99
    after = workload.model.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in state.items())


UNABLE = {"fxopt int8": "`fxopt.optimize` has no int8"}


def test_an_engine_that_is_not_installed_is_left_out_with_a_line(monkeypatch, hasty):
    monkeypatch.setitem(sys.modules, "openvino", None)
    rows = _compared({EAGER: eager, AGAIN: eager, "OpenVINO": engines("float32", 1)["OpenVINO"]})
    assert [row.engine for row in rows] == [EAGER, AGAIN, "OpenVINO"]
    assert rows[2].reason == "openvino is not installed (the extra `peers` brings it)"
    text = "\n".join(document(pd.DataFrame(map(vars, rows))))
    assert "- Left out: OpenVINO: openvino is not installed" in text
    assert "| OpenVINO" not in text


def test_an_engine_that_gives_something_else_is_left_out(hasty):
    def shorter(model, inputs, threads):
        return Prepared(fresh, lambda feed: tensors(model(**feed))[:0])

    def not_a_number(model, inputs, threads):
        return Prepared(fresh, lambda feed: [t * math.nan for t in tensors(model(**feed))])

    rows = _compared({EAGER: eager, "shorter": shorter, "nan": not_a_number})
    assert "the outputs differ in structure" in rows[1].reason
    assert rows[2].error == math.inf


def test_the_peak_of_matrix_products():
    assert 1e8 < machine.gemm_peak((256,), 3) < 1e14


@pytest.mark.long
def test_the_command_writes_its_reports(tmp_path, hasty, monkeypatch):
    chosen = {
        name: made for name, made in engines("float32", 1).items() if name in (EAGER, AGAIN, "torch.jit")
    }
    monkeypatch.setattr(peers, "engines", lambda precision, threads: chosen)
    for module in (peers, workloads):
        monkeypatch.setattr(module, "WORKLOADS", SMALL)
    arguments = ["peers", "--models", "res", "--threads", "1", "--rounds", "2", "--seconds", "0"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    table = pd.read_parquet(tmp_path / "peers.parquet")
    assert list(table["engine"]) == [EAGER, AGAIN, "torch.jit"]
    assert list(table["rounds"]) == [2, 2, 2]
    assert (table["speedup"] > 0).all()
    text = (tmp_path / "peers.md").read_text()
    assert "## resnet, float32, 1 thread" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "nothing"], "there is no model 'nothing'"),
        (["--precision", "float8"], "there is no precision 'float8'"),
        (["--threads", "0"], "numbers of threads, or `all`"),
    ],
)
def test_what_is_not_there_is_an_error(arguments, message):
    result = CliRunner().invoke(app, ["peers", *arguments], env={"COLUMNS": "300", "TERMINAL_WIDTH": "300"})
    assert result.exit_code != 0
    assert message in result.output


def two_layers():
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)).eval()
    return Workload(model, {"input": torch.rand(4, 16)})


@pytest.fixture
def hasty(monkeypatch):
    """Spares most of the matrix products."""
    monkeypatch.setattr(engine_rows, "gemm_peak", lambda: machine.gemm_peak((64,), 1))


def _compared(chosen):
    case = ("resnet", "float32", 1)
    return compare(case, SMALL["resnet"](), chosen, rounds=2, seconds=0.0, say=len)


def test_exactness_is_of_the_worst_output():
    exact = [torch.tensor([1.0, -4.0]).double(), torch.ones(2).double()]
    error, cosine = exactness([torch.tensor([2.0, -4.0]), torch.ones(2)], exact)
    assert (error, cosine) == (0.25, pytest.approx(18 / math.sqrt(20 * 17)))
    with pytest.raises(AssertionError, match="differ in structure"):
        exactness([torch.ones(2)], exact)


def test_the_report_marks_a_busy_machine_and_has_a_ratio_of_eager_to_itself(hasty):
    rows = _compared({EAGER: eager, AGAIN: eager})
    for busy, marks in ((1.5, 1), (0.0, 0)):
        table = pd.DataFrame(map(vars, rows)).assign(
            busy=busy, speedup=1.01, speedup_low=0.99, speedup_high=1.03
        )
        text = "\n".join(document(table))
        assert text.startswith("## resnet, float32, 1 thread")
        assert text.count("⚠️ **The machine was not idle**") == marks
        assert re.search(r"^\| eager, again \| [\d.]+ \| 1.01 \(0.99 to 1.03\) \|", text, re.M)
