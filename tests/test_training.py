"""A graph captured in training mode trains as the model does, and its weights go back into the model."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxopt
from fxopt import MergeLinears
from tests import small_models
from tests.small_models import MODELS, ids

LABELS = {
    "bert": torch.tensor([0, 1]),
    "resnet": torch.tensor([0, 2]),
    "gpt2": ids(7),
    "llama": ids(7),
    "t5": ids(5),
}


def trainable(name):
    """A model in float64 and in training mode, and inputs with labels."""
    model, inputs = MODELS[name]()
    model.config.problem_type = "single_label_classification"
    inputs = {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}
    return model.double().train(), inputs | {"labels": LABELS[name]}


def step(module, inputs, optimizer=None):
    """One step under one seed: the loss, and the gradients by parameter name."""
    module.zero_grad()
    torch.manual_seed(5)
    loss = module(**inputs).loss
    loss.backward()
    if optimizer:
        optimizer.step()
    return loss, {name: parameter.grad for name, parameter in module.named_parameters()}


def assert_same(expected, actual):
    assert list(expected) == list(actual)
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_fine_tuning_is_that_of_the_model(name):
    model, inputs = trainable(name)
    start = copy.deepcopy(model.state_dict())
    gm = fxopt.trace(copy.deepcopy(model), (), inputs)
    trained = []
    for module in (model, gm):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        losses = [step(module, inputs, optimizer)[0] for _ in range(2)]
        trained.append((losses, step(module, inputs)[1]))
    torch.testing.assert_close(trained[1][0], trained[0][0], rtol=1e-12, atol=1e-12)
    assert trained[0][0][0] != trained[0][0][1]
    assert_same(trained[0][1], trained[1][1])
    assert sum(gradient is not None for gradient in trained[0][1].values()) > 3
    # Weights, and BatchNorm's statistics, are those of the model, and fit it.
    assert_same(dict(model.named_buffers()), dict(gm.named_buffers()))
    assert_same(model.state_dict(), gm.state_dict())
    model.load_state_dict(start, strict=True)
    model.load_state_dict(gm.state_dict(), strict=True)
    assert_same(gm.state_dict(), model.state_dict())
    gm.load_state_dict(start, strict=True)
    assert_same(start, gm.state_dict())


def test_dropout_differs_from_seed_to_seed():
    model, inputs = trainable("gpt2")
    gm = fxopt.trace(model, (), inputs)
    torch.manual_seed(1)
    first = gm(**inputs).loss
    torch.manual_seed(2)
    assert gm(**inputs).loss != first


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_tied_weights_stay_tied(name):
    model, inputs = trainable(name)
    gm = fxopt.trace(copy.deepcopy(model), (), inputs)
    assert len(list(gm.parameters())) == len(list(model.parameters())) < len(model.state_dict())
    for copied in (gm, copy.deepcopy(gm)):
        assert (
            copied.lm_head.weight
            is copied.get_submodule("transformer.wte" if name == "gpt2" else "shared").weight
        )


def test_trained_weights_go_back_through_an_undone_pass():
    model, inputs = trainable("bert")
    gm = fxopt.trace(copy.deepcopy(model), (), inputs)
    step(model, inputs, torch.optim.SGD(model.parameters(), lr=0.1))
    merge = MergeLinears()
    merged = merge(gm)
    assert merge.get_transformed_nodes(merged)
    step(merged, inputs, torch.optim.SGD(merged.parameters(), lr=0.1))
    assert_same(model.state_dict(), merge(merged, reverse=True).state_dict())


def test_checkpointing_gives_the_same_gradients_and_says_that_it_is_lost():
    model, inputs = trainable("bert")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.warns(UserWarning, match="activation checkpointing is not captured"):
        gm = fxopt.trace(copy.deepcopy(model), (), inputs)
    expected, actual = step(model, inputs), step(gm, inputs)
    assert expected[0] == actual[0]
    assert_same(expected[1], actual[1])


class Checkpointed(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.linear, self.options = nn.Linear(4, 4), options

    def forward(self, x):
        return checkpoint(self.linear, x, **self.options)


def contexts():
    return torch.no_grad(), torch.no_grad()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_reentrant": False, "context_fn": contexts}, "context_fn.*Checkpointed"),
    ],
)
def test_checkpointing_that_would_change_values_is_refused(options, message):
    with pytest.raises(fxopt.TraceError, match=message):
        fxopt.trace(Checkpointed(**options), (torch.ones(2, 4, requires_grad=True),))


class Reentrant(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Dropout(0.5))

    def forward(self, x):
        x = checkpoint(self.first, x, use_reentrant=True)
        return checkpoint(lambda a, b: self.second(a) * b, x, x * 2, use_reentrant=True)


@pytest.mark.parametrize("takes_gradients", [True, False])
def test_reentrant_checkpoints_give_gradients_where_an_argument_takes_them(takes_gradients):
    model, x = Reentrant(), torch.randn(3, 4, requires_grad=takes_gradients)
    traced = fxopt.trace(copy.deepcopy(model), (x,))
    found = []
    for module in (model, traced):
        torch.manual_seed(0)
        y = module(x)
        if y.requires_grad:
            y.sum().backward()
        tensors = {"y": y.detach(), "x": x.grad} | {name: p.grad for name, p in module.named_parameters()}
        found.append({name: tensor for name, tensor in tensors.items() if tensor is not None})
        x.grad = None
    assert_same(*found)
    assert ("x" in found[0]) == takes_gradients
    with pytest.raises(fxopt.GuardError, match="requires_grad"):
        traced(x.detach().requires_grad_(not takes_gradients))


def test_a_reentrant_checkpoint_may_switch_gradients_off():
    def inner(x):
        with torch.no_grad():
            scale = x.mean()
        return x * scale

    class Scaled(torch.nn.Module):
        def forward(self, x):
            return checkpoint(inner, x, use_reentrant=True)

    outcomes = []
    for model in (Scaled(), fxopt.trace(Scaled(), (torch.ones(3, requires_grad=True),))):
        x = torch.arange(3.0, requires_grad=True)
        output = model(x)
        output.sum().backward()
        outcomes.append((output, x.grad))
    torch.testing.assert_close(outcomes[0], outcomes[1])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: (x * 2, x.detach() + 1), "without gradients"),
        (lambda x: {"doubled": x * 2}, "in a container"),
        (lambda x: [x * 2], "in a container"),
        (lambda x: x * 2 if torch.is_grad_enabled() else x, "reads whether gradients are on"),
    ],
)
def test_a_reentrant_checkpoint_whose_gradients_are_not_those_of_a_graph_is_refused(function, message):
    class Checkpointed(torch.nn.Module):
        def forward(self, x):
            return checkpoint(function, x, use_reentrant=True)

    with pytest.raises(fxopt.TraceError, match=f"{message}.*use_reentrant=False"):
        fxopt.trace(Checkpointed(), (torch.ones(2, requires_grad=True),), verify=False)


def test_a_reentrant_checkpoint_with_tensors_in_a_list_is_refused():
    class Nested(nn.Module):
        def forward(self, x):
            return checkpoint(lambda pair: pair[0] * 2, [x, x], use_reentrant=True)

    with pytest.raises(fxopt.TraceError, match="in containers.*use_reentrant=False"):
        fxopt.trace(Nested(), (torch.ones(2, requires_grad=True),))
    with torch.no_grad():
        traced = fxopt.trace(Nested(), (torch.ones(2),))
        assert torch.equal(traced(torch.ones(2)), torch.full((2,), 2.0))
    with pytest.raises(fxopt.GuardError, match="grad"):
        traced(torch.ones(2))


def test_checkpointing_works_in_models_after_a_capture():
    model, inputs = trainable("bert")
    gm = fxopt.trace(copy.deepcopy(model), (), inputs)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(step(model, inputs)[1], step(gm, inputs)[1])


def test_evaluating_a_graph_captured_in_training_mode_is_refused():
    gm = fxopt.trace(small_models.bert()[0].train(), (), small_models.bert()[1])
    with pytest.raises(fxopt.GuardError, match="captured in training mode"):
        gm.eval()(**small_models.bert()[1])
