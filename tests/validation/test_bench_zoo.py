"""The benchmark of popular models: an engine gives what the model gives or is left out with a line, and a run that was cut goes on."""

import inspect
import math
import re
import shutil
import sys
import time

import pandas as pd
import psutil
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from tests.validation.small_workloads import SMALL
from validation.bench import capture, models, rows, zoo
from validation.bench.__main__ import app
from validation.bench.engines import AGAIN, EAGER, PRECISIONS, Prepared, eager, engines, tensors
from validation.bench.models import Workload, fresh, in_float64
from validation.bench.rows import compare, exactness

TWO_LAYERS = "two layers"


def everyone():
    """Each engine on a model of two layers, which takes seconds, and those that are quick on real ones as well."""
    for precision in PRECISIONS:
        for name in engines(precision):
            if name != "torch.compile bfloat16":  # as `torch.compile`, on the model of `eager bfloat16`
                yield precision, name, TWO_LAYERS
    yield from (("float32", "fxopt", "llama-decode"), ("bfloat16", "eager bfloat16", "llama-decode"))
    yield from (("float32", name, "llama-generate") for name in ("fxopt", "torch.compile"))
    yield "int8", "torch.ao int8", "bert"


@pytest.mark.sweep(8)
@pytest.mark.parametrize(("precision", "name", "model"), list(everyone()))
def test_an_engine_gives_what_the_model_gives(precision, name, model):
    if name == "torch.compile" and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("inductor needs a C++ compiler")
    if name.startswith("ONNX"):
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    if name.startswith("OpenVINO"):
        pytest.importorskip("openvino")
    workload = two_layers() if model == TWO_LAYERS else SMALL[model]()
    state = {key: value.clone() for key, value in workload.model.state_dict().items()}
    with torch.no_grad():
        prepared = engines(precision)[name](workload.model, workload.inputs, 1)
        with torch.compiler.set_stance("fail_on_recompile"):
            for _ in range(3):  # a cache has not grown meanwhile
                outputs = tensors(prepared.run(prepared.feed(workload.inputs)))
    error, cosine = exactness(outputs, in_float64(workload))
    assert error < {"float32": 1e-5, "bfloat16": 0.05, "int8": 0.2}[precision]
    assert cosine > 0.99
    after = workload.model.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in state.items())


def test_an_engine_that_is_not_installed_is_left_out_with_a_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    measured = _compared({EAGER: eager, AGAIN: eager, "OpenVINO": engines("float32")["OpenVINO"]})
    assert [row.engine for row in measured] == [EAGER, AGAIN, "OpenVINO"]
    assert measured[2].reason == "openvino is not installed (the extra `peers` brings it)"
    text = "\n".join(zoo.document(_table(measured)))
    assert "- resnet, OpenVINO: openvino is not installed" in text
    assert "| all, 0 | OpenVINO |  |  | 1 |" in text


def test_an_engine_that_gives_something_else_is_left_out():
    def shorter(model, inputs, threads):
        return Prepared(fresh, lambda feed: tensors(model(**feed))[:0])

    def not_a_number(model, inputs, threads):
        return Prepared(fresh, lambda feed: [t * math.nan for t in tensors(model(**feed))])

    measured = _compared({EAGER: eager, "shorter": shorter, "nan": not_a_number})
    assert "the outputs differ in structure" in measured[1].reason
    assert measured[2].error == math.inf


@pytest.fixture
def small(monkeypatch, tmp_path_factory):
    """Two small models in the place of the zoo, measured in this process."""
    entries = {name: models.Entry({"kind": "text", "unseen": name == "llama"}) for name in ("bert", "llama")}
    monkeypatch.setattr(models, "zoo", lambda: entries)
    monkeypatch.setattr(rows, "workload", lambda name, device: SMALL["bert"]())
    caches = str(tmp_path_factory.mktemp("caches"))
    for name in ("FXOPT_CACHE", "TORCHINDUCTOR_CACHE_DIR"):  # which `_measured` sets: put back after the test
        monkeypatch.setenv(name, caches)
    ran = []

    def measured(case, names, rounds, seconds, limit, device):
        ran.append(case)
        return rows._measured(case, names, rounds, seconds, device, caches)

    monkeypatch.setattr(rows, "of_case", measured)
    return ran


@pytest.mark.long
def test_a_run_that_was_cut_goes_on(tmp_path, small):
    options = [
        "zoo",
        *["--threads", "1", "--rounds", "2", "--seconds", "0", "--engines", "fxopt", "--out"],
        str(tmp_path),
    ]
    for arguments in (["--models", "be"], []):
        result = CliRunner().invoke(app, [*options, *arguments], catch_exceptions=False)
        assert result.exit_code == 0, result.output
    assert small == [("bert", "float32", 1), ("llama", "float32", 1)]
    table = pd.read_parquet(tmp_path / "zoo.parquet")
    assert list(table["engine"]) == [EAGER, AGAIN, "fxopt"] * 2
    assert (table["speedup"] > 0).all()
    text = (tmp_path / "zoo.md").read_text()
    assert all(f"| {label} | fxopt |" in text for label in ("all, 2", "seen, 1", "unseen, 1"))
    assert "| llama, unseen" in text
    picture = (tmp_path / "zoo.svg").read_text()
    assert all(f">{label}</text>" in picture for label in ("all, 2", "text, 2", "fxopt"))
    CliRunner().invoke(app, [*options, "--models", "bert", "--again"], catch_exceptions=False)
    assert small[2:] == [("bert", "float32", 1)]
    assert len(pd.read_parquet(tmp_path / "zoo.parquet")) == 6


@pytest.mark.long
def test_a_model_that_cannot_be_built_is_a_row():
    (row,) = rows.of_case(("nothing", "float32", 1), (), 1, 0.0, 60.0)
    assert row.reason.startswith("KeyError")


@pytest.mark.long
def test_a_benchmark_that_is_killed_computes_no_further():
    script = "import time; from validation.bench.rows import alone; alone(100.0, time.sleep, 100)"
    benchmark = psutil.Popen([sys.executable, "-c", script])
    while not any("spawn_main" in str(child.cmdline()) for child in benchmark.children()):
        time.sleep(0.1)
    children = benchmark.children()
    benchmark.kill()
    assert not psutil.wait_procs(children, timeout=60)[1]
    benchmark.wait()


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(models.entries(models.ZOO)))
def test_a_model_of_the_zoo_takes_its_inputs(name, monkeypatch):
    monkeypatch.setattr(models, "randomise", lambda model, seed: model)  # which meta tensors cannot be
    entry = models.entries(models.ZOO)[name]
    if entry.library != "transformers":
        pytest.importorskip(entry.library)
    with torch.device("meta"):
        model = entry.make()
        inputs = entry.inputs(model, entry.said.get("batch", 1))
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    inspect.signature(model.forward).bind(**(tensors if models.generates(inputs) else inputs))
    assert all(tensor.shape[0] == entry.said.get("batch", 1) for tensor in tensors.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "nothing"], "there is no model 'nothing'"),
        (["--precision", "float8"], "there is no precision 'float8'"),
        (["--engines", "nope"], "there is no engine 'nope': it is one of eager, "),
    ],
)
def test_what_is_not_there_is_an_error(arguments, message, tmp_path):
    result = CliRunner().invoke(
        app, ["zoo", "--out", str(tmp_path), *arguments], env={"COLUMNS": "300", "TERMINAL_WIDTH": "300"}
    )
    assert result.exit_code != 0
    assert message in result.output


def two_layers():
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)).eval()
    return Workload(model, {"input": torch.rand(4, 16)})


def _compared(chosen):
    return compare(("resnet", "float32", 1), SMALL["resnet"](), chosen, rounds=2, seconds=0.0)


def _table(measured):
    said = {
        "kind": "convolutional net",
        "unseen": False,
        "commit": "c",
        "machine": "m; 2 cores",
        "versions": "v",
    }
    return pd.DataFrame([said | vars(row) for row in measured])


def test_exactness_is_of_the_worst_output():
    exact = [torch.tensor([1.0, -4.0]).double(), torch.ones(2).double()]
    error, cosine = exactness([torch.tensor([2.0, -4.0]), torch.ones(2)], exact)
    assert (error, cosine) == (0.25, pytest.approx(18 / math.sqrt(20 * 17)))
    with pytest.raises(AssertionError, match="differ in structure"):
        exactness([torch.ones(2)], exact)


def test_the_page_marks_a_busy_machine_and_counts_what_is_slower_or_has_no_graph():
    measured = _compared({EAGER: eager, AGAIN: eager, "fxopt": engines("float32")["fxopt"]})
    for busy, marks in ((1.5, 1), (0.0, 0)):
        table = _table(measured).assign(
            busy=busy, speedup=[1.0, 1.01, 0.9], speedup_low=0.9, speedup_high=1.1
        )
        table.loc[2, "eager"] = "the graph is slower than eager"
        text = "\n".join(zoo.document(table))
        assert text.startswith("## float32, 1 thread, m\n1 model at c, v, m; 2 cores.")
        assert re.search(r"^\| resnet( ⚠️)? \|", text, re.M)[0].count("⚠️") == marks
        assert "| all, 1 | eager, again | 1.010 | 0.900 | 0 | 0 |" in text
        assert "| all, 1 | fxopt | 0.900 | 0.900 | 1 | 1 |" in text
        assert "- resnet, fxopt: the graph is slower than eager" in text


@pytest.mark.long
def test_captures_are_timed_by_model_and_by_layers(monkeypatch):
    monkeypatch.setattr(capture, "SUBJECTS", ("bert",))
    monkeypatch.setattr(capture, "workload", lambda name: SMALL[name]())
    monkeypatch.setattr(capture, "llama", lambda layers: SMALL["bert"]())
    result = CliRunner().invoke(
        app, ["capture", "--rounds", "1", "--layers", "1,2"], env={"COLUMNS": "200"}, catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    assert result.output.count("dynamic") == 3  # of two models, and a heading
