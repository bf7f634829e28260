"""A captured module under torch.compile, torch.export, ONNX export, autocast, torch.func and changes of dtype.

Each is compared with the eager model in the same place.
"""

import copy
import functools
import pickle
import shutil

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn.attention import SDPBackend, sdpa_kernel

import fxopt
from tests import small_models
from tests.small_models import MODELS, ids, mask


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@functools.cache
def captured(name):
    """The model in eval mode, a capture of a copy of it with fixed sizes, and inputs."""
    model, inputs = MODELS[name]()
    model.eval()
    return model, fxopt.trace(copy.deepcopy(model), (), inputs), inputs


@functools.cache
def captured_free():
    """BERT captured with free batch and sequence."""
    model, inputs = small_models.bert()
    model.eval()
    return model, fxopt.symbolic_trace(copy.deepcopy(model), list(inputs))


def logits(module, inputs):
    return module(**inputs).logits


def text(length, batch=2):
    return {"input_ids": ids(length, batch), "attention_mask": mask(length, batch)}


every_model = pytest.mark.parametrize("name", MODELS)

# --- torch.compile


@pytest.mark.long
@every_model
def test_compiled_in_one_piece(name):
    model, gm, inputs = captured(name)
    expected, actual = model(**inputs), torch.compile(gm, backend="aot_eager", fullgraph=True)(**inputs)
    assert type(actual) is type(expected)
    assert list(actual) == list(expected)
    torch.testing.assert_close(actual.logits, expected.logits, rtol=1e-6, atol=1e-6)


@pytest.mark.long
def test_compiled_for_free_sizes_it_keeps_its_guards():
    model, gm = captured_free()
    compiled = torch.compile(gm, backend="eager")
    for length, batch in [(7, 2), (9, 3), (1, 1), (7, 2)]:
        inputs = text(length, batch)
        assert torch.equal(logits(compiled, inputs), logits(model, inputs))
    with pytest.raises(fxopt.GuardError, match=r"25.* at most 24|25 .*min\(24, input_ids.shape\[1\]\)"):
        compiled(**text(25))
    with pytest.raises(fxopt.GuardError, match="'attention_mask', dimension 1 is 5; it must be 6"):
        compiled(**text(6) | {"attention_mask": mask(5)})
    with pytest.raises(fxopt.GuardError, match=r"'input_ids' is torch\.float32"):
        compiled(**text(6) | {"input_ids": ids(6).float()})


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize(
    "inputs", [text(25), text(6) | {"attention_mask": mask(5)}, text(6) | {"input_ids": ids(6).float()}]
)
def test_compiled_without_graph_breaks_it_keeps_its_guards(dynamic, inputs):
    compiled = torch.compile(captured_free()[1], backend="eager", fullgraph=True, dynamic=dynamic)
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match="GuardError.*input_ids|GuardError.*attention_mask"
    ):
        compiled(**inputs)


def test_compiled_it_refuses_the_other_training_mode():
    _, gm, inputs = captured("bert")
    compiled = torch.compile(copy.deepcopy(gm), backend="eager")
    compiled(**inputs)
    compiled.train()
    with pytest.raises(fxopt.GuardError, match="captured in eval mode"):
        compiled(**inputs)


class Modes(nn.Module):
    """Every mode that a graph switches by itself."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        with torch.no_grad():
            constant = self.linear(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = self.linear(x)
            with sdpa_kernel(SDPBackend.MATH):
                low = nn.functional.scaled_dot_product_attention(low, low, low)
            low = self.linear(low)
        with torch.inference_mode():
            size = self.linear(x).shape[-1]
        return constant * self.linear(x), low, self.linear(x) * size


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_modes_keep_their_meaning_when_compiled(backend):
    model = Modes().eval()
    x = torch.randn(1, 2, 3, 4, requires_grad=True)
    gm = fxopt.trace(model, (x,))
    results = []
    fullgraph = torch.__version__ >= (2, 13)  # older ones break the graph at inference_mode
    for module in (model, torch.compile(gm, backend=backend, fullgraph=fullgraph)):
        outputs = module(x)
        gradient = torch.autograd.grad(sum(output.float().sum() for output in outputs), x)
        results.append([*outputs, *gradient])
    assert [t.dtype for t in results[0]] == [torch.float32, torch.bfloat16, torch.float32, torch.float32]
    for expected, actual in zip(*results, strict=True):
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert torch._C._get_flash_sdp_enabled()


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_compiled_by_inductor():
    model, x = nn.Sequential(nn.Linear(4, 3), nn.GELU()).eval(), torch.randn(2, 4)
    compiled = torch.compile(fxopt.trace(model, (x,)), fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)


# --- torch.export and ONNX


@pytest.mark.long
@every_model
def test_exported(name):
    model, gm, inputs = captured(name)
    expected = torch.export.export(model, (), inputs, strict=False).module()(**inputs)
    exported = torch.export.export(gm, (), inputs, strict=False)
    actual = exported.module()(**inputs)
    assert type(actual) is type(expected)
    assert torch.equal(actual.logits, expected.logits)
    assert {*exported.state_dict} == {*gm.state_dict()}


def test_exported_with_dynamic_shapes_it_keeps_its_guards():
    model, gm = captured_free()
    batch, length = Dim("batch"), Dim("length", max=24)
    shapes = {name: {0: batch, 1: length} for name in text(7)}
    exported = torch.export.export(gm, (), text(7), strict=False, dynamic_shapes=shapes).module()
    for size in (2, 9, 24):
        assert torch.equal(logits(exported, text(size, 3)), logits(model, text(size, 3)))
    wider = {name: {0: batch, 1: Dim("longer", max=30)} for name in text(7)}
    with pytest.raises(Exception, match=r"longer.*24"):
        torch.export.export(gm, (), text(7), strict=False, dynamic_shapes=wider)


@pytest.mark.long
@pytest.mark.parametrize("name", ["bert", "resnet", "llama"])
def test_exported_to_onnx(name):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, gm, inputs = captured(name)
    program = torch.onnx.export(gm, (), kwargs=inputs, dynamo=True, verbose=False)
    session = runtime.InferenceSession(program.model_proto.SerializeToString())
    feeds = {given.name: inputs[given.name].numpy() for given in session.get_inputs()}
    assert {*feeds} == {*inputs}
    actual = torch.from_numpy(session.run(None, feeds)[0])
    torch.testing.assert_close(actual, logits(model, inputs).detach(), rtol=1e-5, atol=1e-5)


# --- modes of the caller, torch.func


@every_model
@pytest.mark.parametrize(
    "mode",
    [
        torch.no_grad,
        torch.inference_mode,
        functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16),
        functools.partial(torch.autocast, "cpu", dtype=torch.float16),
    ],
    ids=["no_grad", "inference_mode", "autocast bfloat16", "autocast float16"],
)
def test_in_a_mode(name, mode):
    model, gm, inputs = captured(name)
    with mode():
        expected, actual = logits(model, inputs), logits(gm, inputs)
    assert actual.dtype == expected.dtype
    assert actual.requires_grad == expected.requires_grad
    assert actual.is_inference() == expected.is_inference()
    assert torch.equal(actual, expected)


@every_model
def test_functional_call_and_its_gradient(name):
    model, gm, inputs = captured(name)
    weights = {name: weight.detach() * 1.1 for name, weight in model.named_parameters()}

    def loss(weights, module):
        return torch.func.functional_call(module, weights, (), inputs).logits.square().mean()

    expected, actual = (torch.func.grad_and_value(loss)(weights, module) for module in (model, gm))
    assert torch.equal(actual[1], expected[1])
    assert actual[1] != logits(model, inputs).square().mean()
    for name in weights:
        assert torch.equal(actual[0][name], expected[0][name])


@pytest.mark.parametrize("name", ["bert", "resnet", "t5"])
def test_vmap_over_weights_and_over_inputs(name):
    model, gm, inputs = captured(name)
    weights = {name: torch.stack([w.detach(), w.detach() * 1.1]) for name, w in model.named_parameters()}
    first = next(iter(inputs))
    stacked = torch.stack([inputs[first], inputs[first].flip(0)])
    results = []
    for module in (model, gm):
        by_weights = torch.vmap(lambda w, m=module: torch.func.functional_call(m, w, (), inputs).logits)
        by_inputs = torch.vmap(lambda x, m=module: m(**inputs | {first: x}).logits)
        results.append((by_weights(weights), by_inputs(stacked)))
    for expected, actual in zip(*results, strict=True):
        assert torch.equal(actual, expected)


# --- changes of dtype


def test_a_graph_that_read_no_dtype_is_converted():
    model, gm, inputs = captured("resnet")
    for dtype in (torch.bfloat16, torch.float64):
        converted = {name: x.to(dtype) for name, x in inputs.items()}
        expected = logits(copy.deepcopy(model).to(dtype), converted)
        assert torch.equal(logits(copy.deepcopy(gm).to(dtype), converted), expected)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5"])
def test_a_graph_that_read_a_dtype_must_be_captured_again(name):
    model, gm, inputs = captured(name)
    with pytest.raises(
        fxopt.GuardError, match=r"cannot change its dtype to torch\.bfloat16.*capture it again"
    ):
        copy.deepcopy(gm).bfloat16()
    low = copy.deepcopy(model).bfloat16()
    assert torch.equal(logits(fxopt.trace(low, (), inputs), inputs), logits(low, inputs))


@pytest.mark.parametrize("renew", [lambda gm: gm, copy.deepcopy, lambda gm: pickle.loads(pickle.dumps(gm))])
def test_converting_the_model_that_shares_its_layers_is_noticed(renew):
    model, inputs = small_models.bert()
    model.eval()
    gm = fxopt.trace(model, (), inputs)
    renewed = renew(gm)
    logits(renewed, inputs)
    model.half()
    if renewed is not gm:
        logits(renewed, inputs)  # a copy of its own
        torch.nn.Module._apply(
            renewed, lambda tensor: tensor.half() if tensor.is_floating_point() else tensor
        )
    with pytest.raises(
        fxopt.GuardError,
        match=r"captured in torch\.float32.*reads at .*:\d+; its parameters are torch\.float16",
    ):
        renewed(**inputs)
    model.float()
    logits(gm, inputs)
