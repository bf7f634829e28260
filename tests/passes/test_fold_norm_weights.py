"""FoldNormWeights: the weight of a normalization in all linear layers behind it, or refused with a reason."""

import pytest
import torch
from torch import nn

from fxopt import FoldNormWeights
from fxopt.testing import randomise
from tests.before_after import fx_trace, fxopt_trace, refused, rewritten

X = torch.randn(2, 3, 4)


class Heads(nn.Module):
    """A normalization before two linear layers, used as `use` says."""

    def __init__(self, norm=None, use=None):
        super().__init__()
        self.norm, self.q, self.k = norm or nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 2, bias=False)
        self.use = use or (lambda m, y: (m.q(y), m.k(y)))

    def forward(self, x):
        return self.use(self, self.norm(x))


@pytest.mark.parametrize("trace", [fx_trace, fxopt_trace])
@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(4), nn.LayerNorm(4, eps=0.1, bias=False), nn.RMSNorm(4), nn.RMSNorm([4], eps=1e-3)]
)
def test_folds(norm, trace):
    after = rewritten(FoldNormWeights(), Heads(norm), X, sites=1, trace=trace)
    assert after.norm.weight is None
    assert repr(after.norm) == repr(type(norm)(norm.normalized_shape, norm.eps, elementwise_affine=False))
    assert (after.k.bias is not None) == (getattr(norm, "bias", None) is not None)


def test_shapes_are_read_by_others():
    use = lambda m, y: m.q(y).view(y.shape[0], -1)  # noqa: E731
    rewritten(FoldNormWeights(), Heads(use=use), X, sites=1, trace=fxopt_trace)


def test_in_training_mode():
    rewritten(FoldNormWeights(), Heads(), X, sites=1, training=True)


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (lambda m, y: m.q(y) + y, "norm is also used by add"),
        (lambda m, y: (m.q(y), y), "norm is also used by output"),
        (lambda m, y: (m.q(y), m.q(y * 2)), "norm is also used by mul"),
        (lambda m, y: (m.k(y), m.q(m.q(y))), "the module is also called by"),
        (lambda m, y: (m.q(y), m.norm(m.q(y))), "the module is also called by"),
        (lambda m, y: m.q(y) * m.norm.weight, "reads norm.weight"),
    ],
)
def test_other_uses_are_refused(use, reason):
    refused(FoldNormWeights(), randomise(Heads(use=use).eval()), X, reason=reason)


@pytest.mark.parametrize("norm", [nn.LayerNorm(4, elementwise_affine=False), nn.GroupNorm(3, 3)])
def test_others_are_left_alone(norm):
    assert not FoldNormWeights().explain(torch.fx.symbolic_trace(Heads(norm))).rows


def test_several_dimensions_are_refused():
    refused(FoldNormWeights(), Heads(nn.LayerNorm([3, 4])), X, reason="the last 2 dimensions together")


def test_dtypes_and_overflow_are_refused():
    model = Heads().bfloat16()
    model.norm.float()
    refused(
        FoldNormWeights(), model, X, reason="its weight is torch.float32 on cpu, the layer torch.bfloat16"
    )
    model = Heads().half()
    model.norm.weight.data.fill_(6e4)
    model.q.weight.data.fill_(6e4)
    refused(FoldNormWeights(), model, X.half(), reason="not finite in torch.float16")


def test_an_autocast_block_is_refused():
    def use(m, y):
        with torch.autocast("cpu", torch.bfloat16):
            return m.q(y)

    refused(FoldNormWeights(), Heads(use=use).eval(), X, reason="side effect", trace=fxopt_trace)


def test_undo_follows_the_dtype():
    after = FoldNormWeights()(torch.fx.symbolic_trace(Heads()))
    undone = FoldNormWeights()(after.bfloat16(), reverse=True)
    assert undone.norm.weight.dtype == torch.bfloat16
