"""A captured module under torch.compile, torch.export, ONNX export, autocast, torch.func and changes of dtype.

Each is compared with the eager model in the same place.
"""

import copy
import functools

import pytest
import torch
from torch import nn
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


@every_model
def test_compiled_in_one_piece(name):
    model, gm, inputs = captured(name)
    expected, actual = model(**inputs), torch.compile(gm, backend="aot_eager", fullgraph=True)(**inputs)
    assert type(actual) is type(expected)
    assert list(actual) == list(expected)
    torch.testing.assert_close(actual.logits, expected.logits, rtol=1e-6, atol=1e-6)


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
    for module in (model, torch.compile(gm, backend=backend, fullgraph=True)):
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
