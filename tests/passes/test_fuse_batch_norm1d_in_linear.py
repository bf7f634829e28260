"""FuseBatchNorm1dInLinear: before and after a linear layer, on two dimensions only."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from fxopt import FuseBatchNorm1dInLinear
from tests.before_after import fx_trace, fxopt_trace, refused, rewritten

X = torch.randn(5, 4)


def check(model, *inputs, sites, **options):
    return rewritten(FuseBatchNorm1dInLinear(), model, *inputs, sites=sites, trace=fxopt_trace, **options)


def refuse(model, *inputs, reason):
    refused(FuseBatchNorm1dInLinear(), model.eval(), *inputs, reason=reason, trace=fxopt_trace)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_folds(bias, affine, before):
    linear = nn.Linear(4, 3, bias=bias)
    norm = nn.BatchNorm1d(4 if before else 3, affine=affine)
    after = check(nn.Sequential(norm, linear) if before else nn.Sequential(linear, norm), X, sites=1)
    assert not [m for m in after.modules() if isinstance(m, nn.BatchNorm1d)]


def test_an_unknown_rank_is_refused():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval()
    refused(FuseBatchNorm1dInLinear(), model, X, reason="number of dimensions is unknown", trace=fx_trace)
    traced = torch.fx.symbolic_trace(model)
    FakeTensorProp(traced, FakeTensorMode(allow_non_fake_inputs=True)).propagate(X)
    assert "nobody checks it" in str(FuseBatchNorm1dInLinear().explain(traced))


class Use(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.linear, self.norm, self.use = nn.Linear(4, 4), nn.BatchNorm1d(4), use

    def forward(self, x):
        return self.use(self, x)


def output_used_twice(m, x):
    y = m.linear(x)
    return m.norm(y), y.relu()


def norm_used_twice(m, x):
    y = m.norm(x)
    return m.linear(y), y.relu()


def write_before_the_linear(m, x):
    x = x * 1
    y = m.norm(x)
    x.add_(1)
    return m.linear(y)


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (output_used_twice, "linear is also used by"),
        (norm_used_twice, "norm is also used by"),
        (write_before_the_linear, "may write into"),
    ],
)
def test_other_uses_are_refused(use, reason):
    refuse(Use(use), X, reason=reason)
