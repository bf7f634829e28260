"""EliminateDeadCode: what nothing uses goes, unless it does something."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxopt
from fxopt.passes.eliminate_dead_code import EliminateDeadCode
from tests.before_after import fx_trace, fxopt_trace, rewritten

X = torch.randn(3, 4)


class Ignores(nn.Module):
    """Computes something of its input, and returns something else."""

    def __init__(self, function):
        super().__init__()
        self.function, self.layer, self.norm = function, nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.scaled = nn.Embedding(5, 4, max_norm=0.1)

    def forward(self, x):
        y = x + 1
        self.function(self, y)
        return y * 2


@pytest.mark.parametrize("trace", [fx_trace, fxopt_trace])
@pytest.mark.parametrize(
    ("function", "sites"),
    [
        (lambda m, x: torch.sum(torch.exp(m.layer(x))), 3),
        (lambda m, x: torch.t(x), 1),
        (lambda m, x: torch.reshape(F.dropout(m.norm(x), training=False), (-1,)), 3),
        (lambda m, x: torch.split(x, 2, 1)[0] @ m.layer.weight[:2], 4),
    ],
)
def test_values_that_nothing_uses_go(function, sites, trace):
    gone = rewritten_nodes(function, trace)
    assert gone >= sites


def rewritten_nodes(function, trace):
    traced = trace(Ignores(function).eval(), [X])
    sites = len(EliminateDeadCode().explain(traced).sites)
    rewritten(EliminateDeadCode(), Ignores(function), X, sites=sites, trace=trace)
    return sites


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x.mul_(2),
        lambda m, x: x[0].add_(1),
        lambda m, x: torch.add(x, 1, out=x),
        lambda m, x: F.relu(x, inplace=True),
        lambda m, x: m.scaled(torch.tensor([0, 1])),
        lambda m, x: torch.rand(4) + torch.randn_like(x),
        lambda m, x: F.dropout(x, 0.5, training=True),
        lambda m, x: torch._assert(x.sum() < 1000, "large"),
    ],
)
def test_what_writes_draws_or_checks_stays(function):
    model = Ignores(function).eval()
    traced = fxopt.trace(model, (X,))
    kept = [node.name for node in traced.graph.nodes if node.op.startswith("call")]
    changed = EliminateDeadCode()(traced)
    left = {node.name for node in changed.graph.nodes}
    effects = [name for name in kept if name not in left]
    assert len(effects) <= 1, effects  # an addition of two draws
    for draw in ("rand", "randn_like", "dropout", "_assert", "scaled"):
        assert (draw in kept) == (draw in left)
    torch.manual_seed(0)
    expected = model(X.clone())
    torch.manual_seed(0)
    torch.testing.assert_close(changed(X.clone()), expected)


def test_statistics_are_updated_in_training():
    traced = torch.fx.symbolic_trace(Ignores(lambda m, x: m.norm(x)).train())
    assert not EliminateDeadCode().explain(traced).sites


def test_methods_of_objects_stay():
    class Sorts(nn.Module):
        def forward(self, x, numbers):
            numbers.sort()
            return x * numbers[0]

    assert not EliminateDeadCode().explain(torch.fx.symbolic_trace(Sorts())).sites
