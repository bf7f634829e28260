"""FuseMultiplyAdd: a product and a sum become one call."""

import copy

import pytest
import torch
from torch import nn

import fxopt
from fxopt import FuseMultiplyAdd
from fxopt.testing import assert_equivalent, assert_round_trip
from tests.modules import module

AUTO = torch.export.Dim.AUTO
X, Y, Z = torch.randn(2, 3, 4), torch.randn(4), torch.randn(3, 1)


@pytest.mark.parametrize(
    ("forward", "sites"),
    [
        (lambda self, x, y, z: x + y * z, 1),
        (lambda self, x, y, z: y * x + z, 1),
        (lambda self, x, y, z: y.mul(x).add(z), 1),
        (lambda self, x, y, z: x * y + z * y, 1),
        (lambda self, x, y, z: x * y + (x + y * z), 2),
        (lambda self, x, y, z: x * y + x * y, 1),
        (lambda self, x, y, z: (lambda p: p + p)(y * z), 0),
        (lambda self, x, y, z: x * 2 + y, 0),
        (lambda self, x, y, z: torch.add(x, y * z, alpha=2), 0),
    ],
)
def test_sums_of_products(forward, sites):
    model = module(forward).eval()
    traced = fxopt.trace(model, (X, Y, Z))
    before = copy.deepcopy(traced)
    fuse = FuseMultiplyAdd()
    fuse(traced, verify=True)
    assert len(traced.graph.find_nodes(op="call_function", target=torch.addcmul)) == sites
    assert_equivalent(model, traced, (X, Y, Z))
    assert_round_trip(before, fuse(traced, reverse=True))


@pytest.mark.parametrize(
    ("forward", "inputs", "reason"),
    [
        (lambda self, x, y, z: x + y * z, (X.double(), Y, Z), "not of one floating-point dtype"),
        (lambda self, x, y, z: x + y * z, (X.long(), Y.long(), Z.long()), "not of one floating-point dtype"),
        (lambda self, x, y, z: (lambda p: (x + p, p))(y * z), (X, Y, Z), "mul is also used by output"),
        (lambda self, x, y, z: (x * 1).add_(y * z), (X, Y, Z), "add_ writes"),
        (
            lambda self, x, y, z: (lambda p: (y.view(-1).zero_(), x + p)[1])(y * z),
            (X, Y, Z),
            "zero_ may write",
        ),
        # The first operand decides the layout: here it is the product.
        (lambda self, x, y, z: y * z + x, (X.mT.contiguous().mT, X, X), "another layout in memory"),
    ],
)
def test_what_one_call_would_change_is_refused(forward, inputs, reason):
    explanation = FuseMultiplyAdd().explain(fxopt.trace(module(forward).eval(), inputs))
    assert not explanation.sites
    assert reason in str(explanation.refusals)


def test_a_number_on_another_device_is_refused():
    values = [torch.empty(2, 3, device="meta"), torch.tensor(2.0)]
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(name) for name in "xy"]
    for node, value in zip(nodes, values, strict=True):
        node.meta["val"] = value
    assert "on one device" in FuseMultiplyAdd().refuses(nodes[0], nodes[0], nodes[1])


def test_lengths_behind_convolutions_of_a_free_length():
    """For five steps the length behind them would be negative."""
    layers = {name: nn.Conv1d(4, 4, 3, stride=2) for name in "abc"}
    model = module(lambda m, x: (lambda y: y + y.sin() * y.cos())(m.c(m.b(m.a(x)))), **layers).eval()
    traced = fxopt.trace(model, (torch.randn(2, 4, 64),), dynamic_shapes=({2: torch.export.Dim("steps")},))
    FuseMultiplyAdd()(traced, verify=True)
    assert traced.graph.find_nodes(op="call_function", target=torch.addcmul)
    assert_equivalent(model, traced, (torch.randn(2, 4, 33),))


def test_where_sizes_are_free_the_call_is_described():
    model = module(
        lambda m, x: m.layer(x * m.gain + m.layer.bias),
        layer=nn.Linear(8, 8),
        gain=nn.Parameter(torch.rand(8)),
    )
    traced = fxopt.trace(model.eval(), (torch.randn(2, 5, 8),), dynamic_shapes=({0: AUTO, 1: AUTO},))
    FuseMultiplyAdd()(traced)
    (fused,) = traced.graph.find_nodes(op="call_function", target=torch.addcmul)
    (x,) = traced.graph.find_nodes(op="placeholder")
    assert str(fused.meta["val"].shape) == str(x.meta["val"].shape)
    assert_equivalent(model, traced, (torch.randn(3, 1, 8),))
