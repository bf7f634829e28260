"""Folds and merges that `optimize` applies only where they pay."""

import torch
from torch import nn

import fxopt
from fxopt.optimizing import prepare as prepare_module
from fxopt.optimizing.prepare import FoldScaleAndShift
from fxopt.testing import randomise
from tests.before_after import fxopt_trace, refused, rewritten
from tests.modules import module

X = torch.randn(2, 3, 16)


class Block(nn.Module):
    """Two layers on one input, a scale behind each, and one before another."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 24), nn.Linear(16, 24, bias=False), nn.Linear(24, 16)
        self.scale = nn.Parameter(torch.rand(16))

    def forward(self, x):
        return x + self.down(torch.relu(self.gate(x)) * self.up(x)) * self.scale


def test_scales_behind_layers_alone():
    rewritten(FoldScaleAndShift(), Block(), X, sites=1, trace=fxopt_trace)
    scale = nn.Parameter(torch.rand(16))
    before = module(lambda m, x: m.layer(x * m.scale), layer=nn.Linear(16, 4), scale=scale)
    refused(FoldScaleAndShift(), before, X, reason="would copy the weights", trace=fxopt_trace)


@torch.no_grad()
def test_in_optimize(monkeypatch):
    monkeypatch.setattr(prepare_module, "speedup", lambda *_: 1.5)
    model = randomise(Block().eval())
    fast = fxopt.optimize(model, (X,))
    (report,) = fast.report
    assert report.reason is None, report.reason
    rewrites = {each.name: len(each.sites) for each in report.explanations}
    assert rewrites["FoldScaleAndShift"] == 1
    torch.testing.assert_close(fast(X), model(X), rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_on_a_busy_machine_a_graph_is_timed_again(monkeypatch):
    found = iter([0.5, 0.7, 0.6, 1.1])
    monkeypatch.setattr(prepare_module, "speedup", lambda *_: next(found))
    (report,) = fxopt.optimize(Block().eval(), (X,)).report
    assert report.reason is None
    assert report.speedup == 1.1

    found = iter([0.5, 0.7, 0.6, 0.9, 1.1])
    (report,) = fxopt.optimize(Block().eval(), (X,)).report
    assert report.reason == "the graph is slower than eager"
    assert report.speedup == 0.9
