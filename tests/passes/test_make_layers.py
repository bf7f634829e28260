"""MakeLayers: functions on parameters and buffers become layers, which take the tensors over."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import fxopt
from fxopt import MakeLayers, PackLinears
from fxopt.testing import assert_equivalent, assert_round_trip, randomise
from tests.modules import module


def P(*sizes):
    return nn.Parameter(torch.randn(*sizes))


def norm(channels=4):
    tensors = {"w": P(channels), "b": P(channels)}
    return tensors | {"mean": torch.randn(channels), "var": torch.rand(channels) + 0.5}


SITES = {
    "linear": (lambda m, x: F.linear(x, m.w, m.b), {"w": P(5, 4), "b": P(5)}, torch.randn(3, 4), nn.Linear),
    "addmm": (lambda m, x: torch.addmm(m.b, x, m.w), {"w": P(4, 5), "b": P(5)}, torch.randn(3, 4), nn.Linear),
    "@": (lambda m, x: x @ m.w, {"w": P(4, 5)}, torch.randn(2, 3, 4), nn.Linear),
    "@ of a vector": (lambda m, x: x.matmul(m.w), {"w": P(4, 5)}, torch.randn(4), nn.Linear),
    "mm": (lambda m, x: torch.mm(x, m.w), {"w": P(4, 5)}, torch.randn(3, 4), nn.Linear),
    "conv1d": (
        lambda m, x: F.conv1d(x, m.w, m.b, stride=2, padding=1),
        {"w": P(5, 4, 3), "b": P(5)},
        torch.randn(2, 4, 9),
        nn.Conv1d,
    ),
    "conv2d": (
        lambda m, x: torch.conv2d(x, m.w, m.b, (1, 2), 1, 1, 2),
        {"w": P(6, 2, 3, 3), "b": P(6)},
        torch.randn(2, 4, 9, 9),
        nn.Conv2d,
    ),
    "conv2d same": (
        lambda m, x: F.conv2d(x, m.w, padding="same"),
        {"w": P(6, 4, 3, 3)},
        torch.randn(2, 4, 9, 9),
        nn.Conv2d,
    ),
    "conv3d": (lambda m, x: F.conv3d(x, m.w), {"w": P(6, 4, 3, 3, 3)}, torch.randn(2, 4, 5, 5, 5), nn.Conv3d),
    "conv_transpose2d": (
        lambda m, x: F.conv_transpose2d(x, m.w, m.b, 2, 1, 1, 2),
        {"w": P(4, 3, 3, 3), "b": P(6)},
        torch.randn(2, 4, 5, 5),
        nn.ConvTranspose2d,
    ),
    "batch_norm": (
        lambda m, x: F.batch_norm(x, m.mean, m.var, m.w, m.b, False, 0.1, 1e-3),
        norm(),
        torch.randn(2, 4, 5, 5),
        nn.BatchNorm2d,
    ),
    "torch.batch_norm": (
        lambda m, x: torch.batch_norm(x, m.w, m.b, m.mean, m.var, False, 0.1, 1e-3, True),
        norm(),
        torch.randn(2, 4, 5),
        nn.BatchNorm1d,
    ),
    "layer_norm": (
        lambda m, x: F.layer_norm(x, (4,), m.w, m.b, 1e-6),
        {"w": P(4), "b": P(4)},
        torch.randn(2, 3, 4),
        nn.LayerNorm,
    ),
    "group_norm": (
        lambda m, x: F.group_norm(x, 2, m.w, m.b),
        {"w": P(4), "b": P(4)},
        torch.randn(2, 4, 5),
        nn.GroupNorm,
    ),
    "rms_norm": (lambda m, x: F.rms_norm(x, (4,), m.w, 1e-6), {"w": P(4)}, torch.randn(2, 3, 4), nn.RMSNorm),
    "embedding": (
        lambda m, x: F.embedding(x, m.w),
        {"w": P(9, 4)},
        torch.randint(0, 9, (2, 3)),
        nn.Embedding,
    ),
}


def model_of(forward, tensors):
    model = module(forward)
    for name, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter):
            setattr(model, name, nn.Parameter(tensor.detach().clone()))
        else:
            model.register_buffer(name, tensor.clone())
    return model.eval()


@pytest.mark.parametrize("name", SITES)
def test_a_function_becomes_a_layer_and_comes_back(name, tmp_path):
    forward, tensors, x, kind = SITES[name]
    model = model_of(forward, tensors)
    before, pass_ = fxopt.trace(model, (x,)), MakeLayers()
    wide_x = x.double() if x.is_floating_point() else x
    wide = fxopt.trace(copy.deepcopy(model).double(), (wide_x,))
    after = pass_(copy.deepcopy(before), verify=True)
    assert kind in {type(layer) for layer in after.modules()}
    assert not after.graph.find_nodes(op="get_attr")
    assert_equivalent(before, after, (x,), float64=(wide, pass_(copy.deepcopy(wide))))
    fxopt.save(after, tmp_path)
    for carried in (fxopt.load(tmp_path), pickle.loads(pickle.dumps(after)), after):
        assert_round_trip(before, fxopt.undo(carried))


def twice(m, x):
    return F.linear(F.linear(x, m.w), m.w)


REFUSED = {
    "options": (lambda m, x: torch.addmm(m.b, x, m.w, beta=2), {"w": P(4, 4), "b": P(4)}, "the layer has no such options: beta"),
    "training": (
        lambda m, x: F.batch_norm(x, m.mean, m.var, m.w, m.b, True),
        norm(),
        "it normalises by the statistics of the batch",
    ),
    "no statistics": (
        lambda m, x: F.batch_norm(x, m.mean, m.var, m.w),
        norm() | {"b": P(1)},
        "the rank of its input is unknown, or it lacks weights or statistics",
    ),
    "two reads": (twice, {"w": P(4, 4)}, "w is also read elsewhere"),
    "a bias for each row": (
        lambda m, x: torch.addmm(m.b, x, m.w),
        {"w": P(4, 4), "b": P(3, 4)},
        "the shapes of its weights are not those of the layer",
    ),
    "a vector": (lambda m, x: x @ m.w, {"w": P(4)}, "its weight is no matrix"),
    "a batch of matrices": (lambda m, x: x @ m.w, {"w": P(2, 4, 4)}, "its weight is no matrix"),
    "a computed option": (
        lambda m, x: F.layer_norm(x, (4,), m.w, m.b, x.shape[0] * 1e-6),
        {"w": P(4), "b": P(4)},
        "an option of the call is computed",
    ),
    "a buffer": (lambda m, x: F.linear(x, m.w), {"w": torch.ones(4, 4)}, "w is no floating parameter"),
    "integers": (
        lambda m, x: F.batch_norm(x, m.mean, m.var, m.w, m.b, False),
        norm() | {"mean": torch.ones(4, dtype=torch.int64)},
        "mean is no floating buffer",
    ),
    "a view of another": (lambda m, x: F.linear(x, m.w), {"w": P(4, 4)}, "shares memory with"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_other_calls_are_refused(name):
    forward, tensors, reason = REFUSED[name]
    model, x = model_of(forward, tensors), torch.randn(3, 4)
    if name == "a view of another":
        model.other = nn.Parameter(model.w.detach().t())
    dynamic = {"x": {0: torch.export.Dim.AUTO}} if name == "a computed option" else None
    graph = fxopt.trace(model, (x,), dynamic_shapes=dynamic) if dynamic else fxopt.trace(model, (x,))
    if name == "a view of another":
        graph.other = model.other
    explanation = MakeLayers().explain(graph)
    assert not explanation.sites
    assert any(reason in said for *_, said in explanation.refusals), explanation


@pytest.mark.parametrize(
    ("size", "forward"),
    [((4, 4), lambda m, x: F.conv1d(x, m.w)), ((4, 4, 3), lambda m, x: F.conv_transpose2d(x, m.w))],
)
def test_a_weight_of_other_dimensions_is_refused(size, forward):
    graph = torch.fx.symbolic_trace(model_of(forward, {"w": P(*size)}))
    assert "its weight has other dimensions" in str(MakeLayers().explain(graph))


def test_weights_with_hooks_or_of_other_types_are_refused():
    for change, reason in (
        (lambda w: w.register_hook(lambda g: g), "w has hooks"),
        (
            lambda w: setattr(w, "__class__", type("Odd", (nn.Parameter,), {})),
            "w is a Odd, not a plain parameter",
        ),
    ):
        graph = torch.fx.symbolic_trace(model_of(lambda m, x: F.linear(x, m.w), {"w": P(4, 4)}))
        change(graph.w)
        assert reason in str(MakeLayers().explain(graph))


def test_a_weight_that_is_written_is_refused():
    model = model_of(lambda m, x: (m.w.add_(1), F.linear(x, m.w))[1], {"w": torch.randn(4, 4)})
    assert not MakeLayers().explain(fxopt.trace(model, (torch.randn(3, 4),))).sites


def gpt2():
    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=50, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    return randomise(GPT2LMHeadModel(config)).eval()


IDS = torch.arange(8).reshape(1, 8)


def test_the_layers_of_gpt2_are_packed():
    before = fxopt.trace(gpt2(), (IDS,))
    assert not any(site for site in PackLinears().explain(before).sites if "attn" in site[0])
    after = MakeLayers()(copy.deepcopy(before), verify=True)
    assert len(fxopt.history(after)) == 1
    assert fxopt.history(after)[0].sites == 8
    packed = PackLinears()(copy.deepcopy(after))
    wide = fxopt.trace(gpt2().double(), (IDS,))
    wide.load_state_dict(before.state_dict())
    assert_equivalent(before, packed, (IDS,), float64=(wide, MakeLayers()(copy.deepcopy(wide))))
    assert_round_trip(before, fxopt.undo(packed, 2))


def test_undo_gives_trained_weights_back():
    before = fxopt.trace(gpt2(), (IDS,))
    after = MakeLayers()(copy.deepcopy(before))
    layer = after.get_submodule("transformer.h.0.attn.c_attn.linear")
    with torch.no_grad():
        layer.weight.add_(1)
    expected = after(IDS).logits
    restored = fxopt.undo(after)
    torch.testing.assert_close(restored(IDS).logits, expected)
    weight = before.get_parameter("transformer.h.0.attn.c_attn.weight")
    torch.testing.assert_close(restored.get_parameter("transformer.h.0.attn.c_attn.weight"), weight + 1)


def test_a_weight_comes_back_in_front_of_what_stood_behind_it():
    """As in the routers of Laguna, whose correction of scores is no bias."""
    model = nn.Linear(8, 4)
    del model.bias
    model.correction = nn.Parameter(torch.ones(4), requires_grad=False)
    model.register_buffer("bias", None)
    model = module(lambda m, x: F.linear(x, m.router.weight) + m.router.correction, router=model)
    traced = fxopt.trace(model.eval(), (torch.randn(2, 8),))
    before, make = copy.deepcopy(traced), fxopt.MakeLayers()
    undone = make(make(traced), reverse=True)
    assert [name for name, _ in undone.router.named_parameters()] == ["weight", "correction"]
    assert_round_trip(before, undone)
