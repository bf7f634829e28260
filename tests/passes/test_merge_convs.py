"""MergeConvs: merged where options agree and slices will do, refused with a reason where they will not."""

import pytest
import torch
from torch import nn

from fxopt import MergeConvs
from tests.before_after import fx_trace, fxopt_trace, refused, rewritten

X = torch.randn(2, 4, 6, 5)


class Branches(nn.Module):
    """Two convolutions on one input, used as `use` says."""

    def __init__(self, left=None, right=None, use=None):
        super().__init__()
        self.left, self.right = left or nn.Conv2d(4, 3, 3), right or nn.Conv2d(4, 2, 3)
        self.use = use or (lambda m, x: (m.left(x).relu(), m.right(x) * 2))

    def forward(self, x):
        return self.use(self, x)


@pytest.mark.parametrize("trace", [fx_trace, fxopt_trace])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"stride": 2, "padding": 1, "dilation": 2},
        {"padding": "same", "padding_mode": "reflect"},
    ],
)
def test_merges(options, trace):
    model = Branches(nn.Conv2d(4, 3, 3, **options), nn.Conv2d(4, 2, 3, **options))
    after = rewritten(MergeConvs(), model, X, sites=1, trace=trace)
    assert after.fxopt_merged_left_right.out_channels == 5
    if trace is fxopt_trace:
        (merged,) = MergeConvs().get_transformed_nodes(after)
        assert merged.meta["val"].shape == merged.graph.owning_module.fxopt_merged_left_right(X).shape


@pytest.mark.parametrize(("kind", "x"), [(nn.Conv1d, X[0]), (nn.Conv3d, X[:, :, None].repeat(1, 1, 4, 1, 1))])
def test_of_other_dimensions_and_without_a_batch(kind, x):
    channels = x.shape[-kind(1, 1, 1).weight.ndim + 1]
    rewritten(MergeConvs(), Branches(kind(channels, 3, 3), kind(channels, 2, 3)), x, sites=1)


def test_only_some_have_a_bias():
    rewritten(MergeConvs(), Branches(right=nn.Conv2d(4, 2, 3, bias=False)), X, sites=1)


def test_memory_formats_come_back():
    model = Branches().to(memory_format=torch.channels_last)
    after = rewritten(MergeConvs(), model, X, sites=1)
    undone = MergeConvs()(after, reverse=True)
    assert undone.left.weight.stride() == model.left.weight.stride()


@pytest.mark.parametrize(
    "options",
    [
        {"stride": 2},
        {"padding": 1},
        {"dilation": 2},
        {"kernel_size": 1},
        {"padding": "same", "padding_mode": "reflect"},
    ],
)
def test_other_options_are_refused(options):
    right = nn.Conv2d(4, 2, **({"kernel_size": 3} | options))
    model = Branches(nn.Conv2d(4, 3, 3, padding="same") if "padding_mode" in options else None, right)
    refused(MergeConvs(), model, X, reason="training flag or options")


def test_undo_gives_weights_of_no_memory_format_their_strides():
    model = Branches(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    for conv in (model.left, model.right):
        conv.weight = nn.Parameter(torch.randn(4, 4, 3, 3).transpose(0, 1))
    after = rewritten(MergeConvs(), model, X, sites=1)
    assert MergeConvs()(after, reverse=True).left.weight.stride() == (9, 36, 3, 1)


def test_other_memory_formats_are_refused():
    model = Branches(right=nn.Conv2d(4, 2, 3).to(memory_format=torch.channels_last))
    refused(MergeConvs(), model, X, reason="training flag or options")


def test_groups_are_refused():
    model = Branches(nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 2, 3, groups=2))
    refused(MergeConvs(), model, X, reason="it has 2 groups")


def test_layers_whose_weight_alone_was_pruned_are_refused():
    pruned = Branches(nn.Conv2d(4, 3, 3, bias=False), nn.Conv2d(4, 3, 3, bias=False))
    pruned.left.weight = nn.Parameter(pruned.left.weight.detach()[:2].clone())
    refused(MergeConvs(), pruned, X, reason="does not have the weight and bias of a plain Conv2d")


def test_other_kinds_are_left_alone():
    model = Branches(nn.ConvTranspose2d(4, 3, 3), nn.ConvTranspose2d(4, 2, 3))
    assert not MergeConvs().explain(torch.fx.symbolic_trace(model)).rows
