"""FuseBatchNorm2dInConv2d: folded, or refused with a reason."""

import copy

import pytest
import torch
from torch import nn

import fxopt
from fxopt import FuseBatchNorm2dInConv2d
from tests.before_after import refused, rewritten

X = torch.randn(2, 4, 5, 5)


class Blocks(nn.Module):
    """A convolution and a normalization, used as `use` says."""

    def __init__(self, use, conv=None, norm=None):
        super().__init__()
        self.conv = conv or nn.Conv2d(4, 6, 3)
        self.norm = norm or nn.BatchNorm2d(6)
        self.use = use

    def forward(self, x):
        return self.use(self, x)


def straight(m, x):
    return m.norm(m.conv(x))


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(4, 6, 3),
        nn.Conv2d(4, 6, 3, bias=False),
        nn.Conv2d(4, 6, (1, 3), padding=(0, 1), padding_mode="replicate", bias=False),
    ],
)
@pytest.mark.parametrize(
    "norm", [nn.BatchNorm2d(6), nn.BatchNorm2d(6, affine=False), nn.BatchNorm2d(6, eps=0.1, momentum=None)]
)
def test_folds(conv, norm):
    model = Blocks(straight, copy.deepcopy(conv), copy.deepcopy(norm))
    after = rewritten(FuseBatchNorm2dInConv2d(), model, X, sites=1)
    assert "norm" not in dict(after.named_modules())


def test_root_level_and_a_chain_of_norms():
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.BatchNorm2d(6), nn.ReLU())
    after = rewritten(FuseBatchNorm2dInConv2d(), model, X, sites=2)
    assert not [m for m in after.modules() if isinstance(m, nn.BatchNorm2d)]


def test_an_in_place_function_on_the_output():
    rewritten(FuseBatchNorm2dInConv2d(), Blocks(lambda m, x: m.norm(m.conv(x)).relu_()), X, sites=1)


def two_users(m, x):
    y = m.conv(x)
    return m.norm(y), y.relu()


def also_returned(m, x):
    y = m.conv(x)
    return m.norm(y), y


def scale_read(m, x):
    return m.norm(m.conv(x)), m.norm.weight * 2


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (two_users, "also used by relu"),
        (also_returned, "also used by output"),
        (scale_read, "reads norm.weight"),
        (lambda m, x: m.norm(m.norm(m.conv(x))), "also called by"),
    ],
)
def test_other_uses_are_refused(use, reason):
    refused(FuseBatchNorm2dInConv2d(), Blocks(use).eval(), X, reason=reason)


def test_a_weight_that_is_no_parameter_is_refused():
    model = Blocks(straight).eval()
    weight = model.norm.weight.detach().clone()
    del model.norm.weight
    model.norm.weight = weight
    refused(FuseBatchNorm2dInConv2d(), model, X, reason="otherwise than as parameters")


class BuffersAreRead(torch.fx.Tracer):
    proxy_buffer_attributes = True


def test_statistics_written_under_another_name_are_refused():
    def use(m, x):
        m.mean.add_(1)
        return m.norm(m.conv(x))

    model = Blocks(use)
    model.register_buffer("mean", model.norm.running_mean)

    def trace(model, inputs):
        return torch.fx.GraphModule(model, BuffersAreRead().trace(model))

    reason = "add_ may write into the statistics"
    refused(FuseBatchNorm2dInConv2d(), model.eval(), X, reason=reason, trace=trace)


def test_on_the_meta_device():
    model = Blocks(straight).eval().to("meta")
    assert fxopt.FuseBatchNorm2dInConv2d()(torch.fx.symbolic_trace(model)).conv.weight.is_meta


@pytest.mark.parametrize("features", [1, 3])
def test_a_model_that_cannot_run_is_not_made_one_that_can(features):
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(features)).eval()
    refused(FuseBatchNorm2dInConv2d(), model, X, reason="features, the layer has 6")
