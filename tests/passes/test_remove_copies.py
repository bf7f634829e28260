"""RemoveCopies: copies go where nothing behind them depends on strides, and only there."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import fxopt
from fxopt import RemoveCopies
from fxopt.memory import storage_of
from tests.before_after import fxopt_trace, refused, rewritten

X = torch.randn(2, 5, 8)


class Uses(nn.Module):
    """A function of an input, behind a layer."""

    def __init__(self, function):
        super().__init__()
        self.function, self.layer = function, nn.Linear(8, 8)

    def forward(self, x):
        return self.function(self.layer(x))


def heads(x):
    return x.view(2, 5, 2, 4).transpose(1, 2)


def joined(x):
    return x.transpose(1, 2).reshape(2, 5, 8)


def attention(x):
    q = heads(x).contiguous()
    return F.scaled_dot_product_attention(q, q, q)


def through_three_dimensions(x):
    """As GroupViT does it: heads and batch are one dimension for a while."""
    q = heads(x).contiguous().view(4, 5, 4).unflatten(0, (2, 2))
    k = heads(x * 2).contiguous().view(4, 5, 4).unflatten(0, (2, 2))
    y = F.scaled_dot_product_attention(q, k, heads(x))
    return joined(y.flatten(0, 1).contiguous().view(2, 2, 5, 4)) + 1


def written_once(x):
    """The reshape becomes a view, which the second one would share."""
    y = attention(x)
    return joined(y).add_(100) * joined(y)


def returned_twice(x):
    y = attention(x)
    return joined(y), joined(y)


@pytest.mark.parametrize(
    ("function", "sites", "left"),
    [
        (lambda x: joined(attention(x)), 1, 0),
        (lambda x: joined(heads(x).contiguous()) + 1, 1, 0),
        (through_three_dimensions, 3, 0),
        (lambda x: F.scaled_dot_product_attention(heads(x), heads(x).contiguous(), heads(x)), 1, 0),
        (lambda x: heads(x).contiguous().flatten(1) + 1, 1, 0),
        (lambda x: heads(x).contiguous().permute(0, 2, 1, 3).flatten(2) + 1, 1, 0),
        (
            lambda x: heads(x).contiguous(memory_format=torch.channels_last).transpose(1, 2).flatten() + 1,
            1,
            0,
        ),
    ],
)
def test_copies_go(function, sites, left):
    after = rewritten(RemoveCopies(), Uses(function), X, sites=sites, trace=fxopt_trace)
    assert len([node for node in after.graph.nodes if node.target == "contiguous"]) == left


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (attention, "output (output) may depend on its strides"),
        (written_once, "may write into reshape, which may become a view"),
        (returned_twice, "reshape and reshape_1 may share memory that the graph returns"),
        (lambda x: joined(heads(x).contiguous()), "the graph returns it or a view of it"),
        (lambda x: heads(x).contiguous(), "the graph returns it or a view of it"),
        (lambda x: heads(x).contiguous().view(2, 10, 4) + 1, None),
        (lambda x: heads(x).contiguous() * 2, "may depend on its strides"),
        (lambda x: heads(x).contiguous().reshape(2, 2, 5, 2, 2) + 1, "reshape would have other strides"),
        (lambda x: joined(heads(x).contiguous().add_(1)), "may write into"),
        (lambda x: (lambda v: joined(v.contiguous()) + v.mul_(2).sum())(heads(x)), "may write into"),
        (
            lambda x: F.scaled_dot_product_attention(*[heads(x).transpose(2, 3).contiguous()] * 3) + 1,
            "one after the other",
        ),
        (lambda x: torch.as_strided(heads(x).contiguous(), (2, 4), (1, 2)) + 1, "may depend on its strides"),
    ],
)
def test_copies_stay(function, reason):
    if reason is None:
        assert not RemoveCopies().explain(fxopt.trace(Uses(function), (X,))).sites
    else:
        refused(RemoveCopies(), Uses(function), X, reason=reason, trace=fxopt_trace)


def test_what_becomes_a_view_is_described_as_one():
    traced = RemoveCopies()(fxopt.trace(Uses(lambda x: joined(attention(x)) + 1), (X,)))
    memory = fxopt.GraphIndex(traced).memory
    (reshape,) = (node for node in traced.graph.nodes if node.target == "reshape")
    assert memory.may_alias(reshape, reshape.args[0])
    assert storage_of(reshape.meta["val"]) == storage_of(reshape.args[0].meta["val"])


def test_strides_behind_a_copy_are_described():
    traced = RemoveCopies()(fxopt.trace(Uses(lambda x: joined(attention(x))), (X,)))
    seen = {}

    class Interpreter(torch.fx.Interpreter):
        def run_node(self, n):
            seen[n.name] = (super().run_node(n), n.meta.get("val"))
            return seen[n.name][0]

    Interpreter(traced).run(X)
    for name, (value, described) in seen.items():
        if isinstance(value, torch.Tensor) and name != "output":
            assert value.stride() == described.stride(), name


def test_free_sizes_gain_no_guards():
    def function(x):
        q = x.view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2).contiguous()
        y = F.scaled_dot_product_attention(q, q, q)
        return y.transpose(1, 2).reshape(x.shape[0], x.shape[1], 8)

    model = Uses(function).double()
    traced = fxopt.trace(model, (X.double(),), dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO},))
    sizes = traced.graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode.shape_env
    before = [str(guard) for guard in sizes.guards]
    removed = RemoveCopies()(traced)
    assert "contiguous" not in removed.code
    assert [str(guard) for guard in sizes.guards] == before
    for batch, length in ((1, 1), (2, 5), (3, 1), (1, 7)):
        x = torch.randn(batch, length, 8).double()
        torch.testing.assert_close(removed(x), model(x), rtol=1e-12, atol=1e-12)


def test_what_drops_a_free_size_of_1_stays():
    class Squeezes(nn.Module):
        def forward(self, x):
            return x.transpose(1, 2).contiguous().squeeze().flatten(1) * 2

    traced = fxopt.trace(Squeezes(), (torch.randn(6, 5, 2, 4),), dynamic_shapes=({0: Dim("n")},))
    expected = traced(torch.ones(1, 5, 2, 4))
    torch.testing.assert_close(RemoveCopies()(traced)(torch.ones(1, 5, 2, 4)), expected)


def test_without_a_guard_nothing_is_known_to_be_alike():
    traced = torch.fx.symbolic_trace(Uses(lambda x: joined(heads(x).contiguous()) + 1))
    FakeTensorProp(traced, FakeTensorMode(allow_non_fake_inputs=True)).propagate(X)
    assert not RemoveCopies().explain(traced).sites
