"""Rewritten graphs and optimized modules go on to torch.compile, torch.export and ONNX."""

import copy
import operator

import pytest
import torch
from torch import nn

import fxopt
from fxopt.testing import randomise
from tests import small_models

EXACT = (
    *(fxopt.RemoveIdentity(), fxopt.EliminateCommonSubexpressions(), fxopt.FoldConstants()),
    *(fxopt.FuseBatchNorm2dInConv2d(), fxopt.MergeLinears(), fxopt.ChangeTrueDivToMulByInverse()),
    *(fxopt.FuseAttention(each_row_has_a_key=True), fxopt.RemoveRepeatedHeads(), fxopt.EliminateDeadCode()),
)
MODELS = {
    "bert": lambda: small_models.bert(attn_implementation="eager"),
    "llama": small_models.llama,
    "resnet": small_models.resnet,
}
TOLERANCE = {"atol": 1e-5, "rtol": 1e-4}


@pytest.fixture(params=MODELS)
def rewritten(request):
    """A graph that passes have rewritten, inputs in order, and what the model makes of them."""
    model, inputs = MODELS[request.param]()
    with torch.no_grad():
        wanted = model.eval()(**inputs)[0]
    traced = fxopt.compose(*EXACT)(fxopt.trace(model, (), inputs))
    assert len(fxopt.history(traced)) >= 2
    return traced, inputs, wanted


@pytest.fixture(autouse=True)
def reset():
    yield
    torch._dynamo.reset()


@pytest.mark.sweep(3)
@torch.no_grad()
def test_rewritten_graphs_are_compiled_whole(rewritten):
    traced, inputs, wanted = rewritten
    fast = torch.compile(traced, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(fast(**inputs)[0], wanted, **TOLERANCE)


@torch.no_grad()
def test_any_number_of_graphs_and_of_their_changes_is_compiled():
    x = torch.randn(2, 4)
    for size in range(10):  # torch.compile takes eight versions of one function
        model = nn.Sequential(nn.Linear(4, 4 + size), nn.Dropout(), nn.ReLU()).eval()
        traced = fxopt.trace(model, (x,))
        fast = torch.compile(traced, backend="eager", fullgraph=True)
        torch.testing.assert_close(fast(x), model(x))
    for number in range(10):
        before = torch.compile(traced, backend="eager", fullgraph=True)(x)
        last = traced.graph.output_node().args[0]
        with traced.graph.inserting_after(last):
            traced.graph.output_node().args = (traced.graph.call_function(operator.add, (last, number)),)
        traced.recompile()
        after = torch.compile(traced, backend="eager", fullgraph=True)(x)
        torch.testing.assert_close(after, before + number)


@pytest.mark.sweep(3)
@torch.no_grad()
def test_rewritten_graphs_are_exported(rewritten):
    traced, inputs, wanted = rewritten
    exported = torch.export.export(traced, (), inputs)
    torch.testing.assert_close(exported.module()(**inputs)[0], wanted, **TOLERANCE)


@pytest.mark.long
@torch.no_grad()
def test_rewritten_graphs_go_to_onnx(rewritten):
    onnxruntime = pytest.importorskip("onnxruntime", reason="an engine to run it")
    pytest.importorskip("onnxscript", reason="torch.onnx needs it")
    traced, inputs, wanted = rewritten
    program = torch.onnx.export(traced, (), kwargs=inputs, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    named = {each.name: inputs[each.name].numpy() for each in session.get_inputs()}
    torch.testing.assert_close(torch.from_numpy(session.run(None, named)[0]), wanted, **TOLERANCE)


@pytest.mark.long
@torch.no_grad()
def test_an_optimized_module_is_compiled_and_exported_as_its_model():
    model, inputs = small_models.bert()
    fast = fxopt.optimize(randomise(model.eval()), (), inputs, tune=False)
    assert fast.report[0].reason is None
    graphs = []

    def seen(graph_module, example_inputs):
        graphs.append(graph_module)
        return graph_module

    compiled = torch.compile(fast, backend=seen)
    exported = torch.export.export(fast, (), inputs).module()
    for each in (compiled, exported):
        torch.testing.assert_close(each(**inputs)[0], copy.deepcopy(model)(**inputs)[0], **TOLERANCE)
    assert len(graphs) == 1
