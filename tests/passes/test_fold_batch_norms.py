"""FoldBatchNorms: every kind of layer, before and behind, and through views; refused where channels are not the same."""

import copy

import pytest
import torch
from torch import nn

from fxopt import FoldBatchNorms
from fxopt.testing import randomise
from tests.before_after import fx_trace, fxopt_trace, refused, rewritten
from tests.modules import module

NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}

CONV_OPTIONS = [
    {},
    {"bias": False},
    {"groups": 2, "stride": 2, "dilation": 2, "padding": 2},
    {"groups": 4, "padding": "same", "padding_mode": "circular"},
]
TRANSPOSED_OPTIONS = [
    {},
    {"bias": False},
    {"groups": 2, "stride": 2, "padding": 1, "output_padding": 1},
    {"stride": 3, "dilation": 2, "output_padding": 2},
]
CASES = [
    (kinds[dimensions], options)
    for kinds, several in ((CONVS, CONV_OPTIONS), (TRANSPOSED, TRANSPOSED_OPTIONS))
    for dimensions in NORMS
    for options in several
]


def dimensions_of(kind):
    return next(d for kinds in (CONVS, TRANSPOSED) for d in kinds if kinds[d] is kind)


def image(dimensions, channels=4):
    return torch.randn(2, channels, *[5] * dimensions)


def norms(graph_module):
    return [m for m in graph_module.modules() if isinstance(m, tuple(NORMS.values()))]


def check(model, x, sites=1, trace=fxopt_trace):
    after = rewritten(FoldBatchNorms(), model, x, sites=sites, trace=trace)
    assert not norms(after)
    return after


def refuse(model, x, reason, trace=fxopt_trace):
    refused(FoldBatchNorms(), randomise(model.eval()), x, reason=reason, trace=trace)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_behind_convolutions_of_every_kind(kind, options):
    dimensions = dimensions_of(kind)
    check(nn.Sequential(kind(4, 8, 3, **options), NORMS[dimensions](8)), image(dimensions))


@pytest.mark.parametrize(
    "options", [{}, {"groups": 2}, {"padding": 1, "padding_mode": "reflect", "bias": False}]
)
@pytest.mark.parametrize("dimensions", NORMS)
def test_before_convolutions_without_zeros(dimensions, options):
    if dimensions == 3:
        options = {**options, "padding_mode": "replicate"} if "padding" in options else options
    layer = CONVS[dimensions](4, 8, 3, **options)
    check(nn.Sequential(NORMS[dimensions](4), layer), image(dimensions))


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(4, 8, 3, padding="same"), nn.ConvTranspose2d(4, 8, 3)]
)
def test_before_layers_that_take_zeros_it_is_refused(layer):
    refuse(nn.Sequential(nn.BatchNorm2d(4), layer), image(2), "takes zeros beside its input")


@pytest.mark.parametrize("options", [{}, {"padding": "valid"}])
def test_a_convolution_without_padding_takes_no_zeros(options):
    check(nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 8, 3, **options)), image(2))


def test_several_layers_behind_one_normalization():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.q, self.k = nn.BatchNorm1d(4), nn.Linear(4, 3), nn.Linear(4, 2, bias=False)

        def forward(self, x):
            y = self.norm(x)
            return self.q(y), self.k(y)

    check(Heads(), torch.randn(5, 4))


class Flattened(nn.Module):
    """As LeViT has it: a linear layer in three dimensions, and a normalization in two."""

    def __init__(self, view, back, norm=None):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 6), norm or nn.BatchNorm1d(6)
        self.view, self.back = view, back

    def forward(self, x):
        y = self.linear(x)
        return self.back(self.norm(self.view(y)), y)


@pytest.mark.parametrize(
    ("view", "back"),
    [
        (lambda y: y.flatten(0, 1), lambda z, y: z.reshape_as(y)),
        (lambda y: y.reshape(-1, 6), lambda z, y: z.view(y.shape)),
        (lambda y: y.view(-1, 6), lambda z, y: z.view(y.size(0), y.size(1), 6)),
        (lambda y: y.unsqueeze(0).flatten(0, 2), lambda z, y: z * 2),
    ],
)
def test_through_views_behind_a_linear_layer(view, back):
    check(Flattened(view, back), torch.randn(2, 3, 4))


@pytest.mark.parametrize(
    ("view", "back", "reason"),
    [
        (lambda y: y.flatten(0, 1), lambda z, y: z.reshape_as(y) + y, "linear is also used by add"),
        (lambda y: y.flatten(0, 1), lambda z, y: (z, y), "linear is also used by output"),
    ],
)
def test_other_uses_of_what_is_viewed_are_refused(view, back, reason):
    refuse(Flattened(view, back), torch.randn(2, 3, 4), reason)


@pytest.mark.parametrize(
    ("view", "features"),
    [
        (lambda y: y.flatten(1), 18),
        (lambda y: y.mT.flatten(0, 1), 3),
        (lambda y: y.reshape(2, 18), 18),
        (lambda y: y.view(9, 4), 4),
        (lambda y: y[:, 0], 6),
    ],
)
def test_views_that_mix_the_channels_are_left_alone(view, features):
    model = Flattened(view, lambda z, y: z, nn.BatchNorm1d(features))
    traced = fxopt_trace(randomise(model.eval()), [torch.randn(2, 3, 4)])
    assert not FoldBatchNorms().explain(traced).sites


def test_one_dimensional_convolutions_need_a_batch():
    """Of a sequence alone, BatchNorm1d normalises the positions."""
    model = nn.Sequential(nn.Conv1d(4, 5, 1), nn.BatchNorm1d(5))
    refuse(model, torch.randn(4, 5), "the values have 2 dimensions")
    refuse(model, image(1), "number of dimensions is unknown", trace=fx_trace)


@pytest.mark.parametrize("kind", [nn.ConvTranspose2d, nn.Conv3d])
def test_without_metadata(kind):
    dimensions = dimensions_of(kind)
    check(nn.Sequential(kind(4, 8, 3), NORMS[dimensions](8)), image(dimensions), trace=fx_trace)


def test_transposed_convolutions_of_another_output_size_are_refused():
    model = nn.Sequential(nn.ConvTranspose2d(4, 8, 3, stride=2), nn.BatchNorm2d(8)).eval()

    sized = module(lambda m, x: m.layers[1](m.layers[0](x, output_size=(12, 12))), layers=model)

    after = rewritten(FoldBatchNorms(), sized, image(2), sites=1, trace=fxopt_trace)
    assert not norms(after)


def test_weights_that_would_be_too_small_are_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    model[0].weight.data.fill_(1e-3)
    model[1].weight.data.fill_(1e-3)
    refused(
        FoldBatchNorms(),
        model.half(),
        torch.randn(5, 4).half(),
        reason="too small for torch.float16",
        trace=fxopt_trace,
    )


@pytest.mark.parametrize(("kind", "shape"), [(nn.Conv2d, (-1, 1, 1, 1)), (nn.ConvTranspose2d, (1, -1, 1, 1))])
def test_the_weights_are_rounded_once(kind, shape):
    model = randomise(nn.Sequential(kind(4, 6, 3), nn.BatchNorm2d(6))).eval().bfloat16()
    weight = model[0].weight.double()
    folded = FoldBatchNorms()(torch.fx.symbolic_trace(model)).get_submodule("0").weight
    norm = copy.deepcopy(model[1]).double()
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    assert torch.equal(folded, (weight * scale.reshape(shape)).bfloat16())
