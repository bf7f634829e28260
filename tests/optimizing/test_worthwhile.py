"""Folds and merges that `optimize` applies only where they pay."""

import pytest
import torch
from torch import nn

import fxopt
from fxopt.optimizing import prepare as prepare_module
from fxopt.optimizing import worthwhile
from fxopt.optimizing.worthwhile import FoldScaleBehindLayers, MergeFasterLinears
from fxopt.testing import randomise
from tests.before_after import fx_trace, fxopt_trace, refused, rewritten

X = torch.randn(2, 3, 16)


class Block(nn.Module):
    """Two layers on one input, a scale behind each, and one before another."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 24), nn.Linear(16, 24, bias=False), nn.Linear(24, 16)
        self.scale = nn.Parameter(torch.rand(16))

    def forward(self, x):
        return x + self.down(torch.relu(self.gate(x)) * self.up(x)) * self.scale


class Before(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(16, 4), nn.Parameter(torch.rand(16))

    def forward(self, x):
        return self.layer(x * self.scale)


def takes(monkeypatch, ratio):
    asked = []
    monkeypatch.setattr(worthwhile, "merged_time", lambda *args: asked.append(args) or ratio)
    return asked


def test_merges_what_is_faster(monkeypatch):
    asked = takes(monkeypatch, 0.9)
    rewritten(MergeFasterLinears(), Block(), X, sites=1, trace=fxopt_trace)
    layers, merged, shape = asked[0]
    assert [layer.out_features for layer in layers] == [24, 24]
    assert (merged.out_features, merged.bias is not None, tuple(shape)) == (48, True, (2, 3, 16))


def test_leaves_what_is_slower(monkeypatch):
    takes(monkeypatch, 0.98)
    refused(
        MergeFasterLinears(),
        Block().eval(),
        X,
        reason="merged, the layers take 0.98 of their time",
        trace=fxopt_trace,
    )


def test_without_shapes_nothing_is_merged(monkeypatch):
    takes(monkeypatch, 0.5)
    refused(MergeFasterLinears(), Block().eval(), X, reason="its time cannot be measured", trace=fx_trace)


def test_scales_behind_layers_alone():
    rewritten(FoldScaleBehindLayers(), Block(), X, sites=1, trace=fxopt_trace)
    refused(FoldScaleBehindLayers(), Before(), X, reason="would copy the weights", trace=fxopt_trace)


@pytest.mark.parametrize(("ratio", "merged"), [(0.5, True), (1.5, False)])
@torch.no_grad()
def test_in_optimize(monkeypatch, ratio, merged):
    takes(monkeypatch, ratio)
    monkeypatch.setattr(prepare_module, "speedup", lambda *_: 1.5)
    model = randomise(Block().eval())
    fast = fxopt.optimize(model, (X,))
    (report,) = fast.report
    assert report.reason is None, report.reason
    rewrites = {each.name: len(each.sites) for each in report.explanations}
    assert rewrites["FoldScaleAndShift"] == 1
    assert rewrites["MergeLinears"] == merged
    torch.testing.assert_close(fast(X), model(X), rtol=1e-5, atol=1e-6)
    assert list(fast.state_dict()) == list(model.state_dict())


@torch.no_grad()
def test_changed_weights_are_merged_anew(monkeypatch):
    takes(monkeypatch, 0.5)
    monkeypatch.setattr(prepare_module, "speedup", lambda *_: 1.5)
    model = randomise(Block().eval())
    fast = fxopt.optimize(model, (X,))
    fast(X)
    for parameter in (model.gate.weight, model.scale):
        parameter.mul_(2)
    torch.testing.assert_close(fast(X), model(X), rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_without_measuring_nothing_is_merged():
    fast = fxopt.optimize(Block().eval(), (X,), tune=False)
    assert "MergeLinears" not in [each.name for each in fast.report[0].explanations]
