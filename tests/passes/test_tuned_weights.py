"""After fine-tuning a rewritten model, undo gives the tuned weights under the names of the original model."""

import copy

import pytest
import torch
from torch import nn

import fxopt
from fxopt import FuseBiasInLinear, MergeLinears, applied, compose, history, undo
from fxopt.testing import RTOL_FLOAT64, assert_equivalent, compare
from tests.capture.test_transformers import bert


class Tied(nn.Module):
    """Three groups of layers to merge: one of them with tied weights, one called by keyword, one below another."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 6)
        self.k.weight = self.q.weight
        self.up, self.gate = nn.Linear(6, 5, bias=False), nn.Linear(6, 5, bias=False)
        self.first, self.second = nn.Linear(5, 2), nn.Linear(5, 2)

    def forward(self, x):
        hidden = self.v(x) + (self.q(x) * self.k(x)).sum(-1, keepdim=True)
        hidden = self.up(input=hidden) * self.gate(hidden)
        return self.first(hidden), self.second(hidden)


X = torch.randn(3, 4, dtype=torch.float64)


def tied():
    torch.manual_seed(0)
    return Tied().double(), {"x": X}


def small_bert():
    torch.manual_seed(0)
    ids = torch.randint(1, 50, (2, 5))
    return bert().double().eval(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def tuned(module, inputs, steps=3):
    """Train on fixed targets: SGD without momentum treats a weight alike, whether it is merged or not."""
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        output = module(**inputs)
        values = output if isinstance(output, tuple) else output.to_tuple()
        sum((value - 1).square().mean() for value in values).backward()
        optimizer.step()
    return module


def assert_same_state(expected, actual):
    assert expected.keys() == actual.keys()
    expected, actual = dict(expected), dict(actual)
    compare(expected, actual)
    difference = compare({n: t.double() for n, t in expected.items()}, actual, dtypes=False)
    assert difference.max_rel < 1e-7, difference


PASSES = pytest.mark.parametrize(
    "passes", [MergeLinears(), FuseBiasInLinear(), compose(MergeLinears(), FuseBiasInLinear())], ids=str
)


@PASSES
def test_bert_trained_while_rewritten_is_bert_trained(passes):
    model, inputs = small_bert()
    original = copy.deepcopy(model)
    start = copy.deepcopy(model.state_dict())
    graph_module = passes(fxopt.trace(model, kwargs=inputs))
    rewritten = tuned(graph_module, inputs)
    undone = undo(copy.deepcopy(rewritten), len(history(rewritten)))

    checkpoint = undone.state_dict()
    fresh, _ = small_bert()
    fresh.load_state_dict(checkpoint, strict=True)  # as a checkpoint of the model itself
    assert_equivalent(fresh, undone, kwargs=inputs, rtol=RTOL_FLOAT64)
    compare_outputs = compare(rewritten(**inputs), fresh(**inputs))
    assert compare_outputs.max_rel < RTOL_FLOAT64
    assert_same_state(tuned(original, inputs).state_dict(), checkpoint)
    merged = [name for name in checkpoint if "query" in name]
    assert merged
    assert not any(torch.equal(checkpoint[name], start[name]) for name in merged if "weight" in name)


def test_tied_weights_stay_tied():
    model, inputs = tied()
    graph_module = fxopt.trace(model, kwargs=inputs)
    with applied(graph_module, MergeLinears()), torch.no_grad():
        for parameter in graph_module.parameters():
            parameter.mul_(1.5)
    assert graph_module.k.weight is graph_module.q.weight
    assert torch.equal(graph_module.q.weight, tied()[0].q.weight * 1.5)
