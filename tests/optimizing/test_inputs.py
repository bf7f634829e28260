"""Inputs of all kinds give what the model gives, by a graph where one holds for them."""

import collections

import pytest
import torch
from torch import nn

import fxopt
from fxopt.testing import randomise
from tests.modules import module
from tests.optimizing.graphs import NEEDS_KERNELS, reasons

pytestmark = [
    pytest.mark.filterwarnings("ignore:falls back to eager"),
    pytest.mark.usefixtures("no_timing"),
    NEEDS_KERNELS,
]
X = torch.randn(4, 16)


@torch.no_grad()
def test_sizes_that_must_be_equal_are_free_together():
    """As the batch of a mask that diffusers gives to each head: with sizes of their own, the mask fits no scores."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x, mask):
            scores = self.layer(x) @ x.mT
            masks = mask[:, None].repeat(2, 1, 1).view(len(x), 2, -1, mask.shape[1])
            return (scores[:, None] + masks).softmax(-1)

    model = randomise(Masked().eval())
    fast = fxopt.optimize(model)
    for batch, rows in [(2, 5), (3, 5), (4, 7), (5, 9), (6, 9)]:
        given = torch.randn(batch, rows, 16), torch.randn(batch, rows)
        assert torch.allclose(fast(*given), model(*given), atol=1e-5)
    assert reasons(fast) == [None] * 3, "for one size, with a free batch, and with all sizes free"
    assert fast.report.fallbacks == ()
    assert "x: ? x ? x 16" in str(fast.report)


@torch.no_grad()
def test_inputs_of_any_kind_get_what_the_model_gives():
    class Keys(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, *parts, **named):
            return self.layer(sum(parts) + named.get("x", 0))

    model = randomise(Keys().eval())
    fast = fxopt.optimize(model)
    for args, kwargs in [((X,), {}), ((X, X), {}), ((X,), {"x": X}), ((X,), {"x": 1.5})]:
        assert torch.allclose(fast(*args, **kwargs), model(*args, **kwargs), atol=1e-5)
    sparse = torch.eye(16).to_sparse()
    layer = randomise(nn.Linear(16, 16).eval())
    fast = fxopt.optimize(layer, (X,))
    assert torch.allclose(fast(sparse), layer(sparse), atol=1e-5)
    assert fxopt.optimize(layer, (sparse,)).report == (), "a graph knows no sparse tensors"
    assert torch.allclose(fast(X), layer(X), atol=1e-5)


@torch.no_grad()
def test_tensors_of_other_kinds_than_those_of_the_graph_get_what_the_model_gives():
    class Masked(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            value = super().__torch_function__(function, types, args, kwargs or {})
            return value * 0 + 7 if function is nn.functional.linear else value

    model = randomise(nn.Sequential(nn.Linear(16, 16), nn.Tanh()).eval())
    fast = fxopt.optimize(model, (X,), tune=False)
    assert reasons(fast) == [None]
    for x in (X.to_sparse(), X.as_subclass(Masked)):
        torch.testing.assert_close(fast(x), model(x))


@pytest.mark.parametrize("kind", ["sparse", "subclass", "nested"])
@torch.no_grad()
def test_tensors_of_other_kinds_inside_of_containers_get_what_the_model_gives(kind):
    class Own(torch.Tensor):
        pass

    def inputs(x):
        return [X], {"x": (x,)}

    model = randomise(
        module(lambda m, xs, named: (m.layer(xs[0]), m.layer(named["x"][0])), layer=nn.Linear(16, 16))
    )
    value = {
        "sparse": lambda: X.to_sparse(),
        "subclass": lambda: X.as_subclass(Own),
        "nested": lambda: torch.nested.nested_tensor([X, X]),
    }[kind]()
    for fast in (fxopt.optimize(model, inputs(X), tune=False), fxopt.optimize(model, tune=False)):
        left, right = fast(*inputs(value))[1], model(*inputs(value))[1]
        assert type(left) is type(right)
        if kind != "nested":
            torch.testing.assert_close(left, right)
        torch.testing.assert_close(fast(*inputs(X)), model(*inputs(X)))
    assert reasons(fast) == [None]


@torch.no_grad()
def test_a_graph_is_for_the_dtypes_that_it_was_made_for():
    model = randomise(module(lambda m, x: (m.layer(x.float()), x.float() + 1), layer=nn.Linear(16, 16)))
    fast = fxopt.optimize(model, (X,), tune=False)
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        torch.testing.assert_close(fast(X.to(dtype)), model(X.to(dtype)))
    assert reasons(fast) == [None] * 3


@torch.no_grad()
def test_arguments_of_all_kinds():
    class Arguments(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x, *others, flag=True, **named):
            return self.layer(x) + sum(others) + named["last"] if flag else x

    model = randomise(Arguments().eval())
    fast = fxopt.optimize(model, tune=False)
    for others in ((), (X, X)):
        torch.testing.assert_close(fast(X, *others, last=2 * X), model(X, *others, last=2 * X))
    assert reasons(fast) == [None] * 2


@torch.no_grad()
def test_the_order_of_keywords_counts_where_the_forward_goes_through_them():
    model = module(
        lambda m, **named: m.layer(sum(i * x for i, x in enumerate(named.values()))), layer=nn.Linear(16, 16)
    )
    fast, a, b = fxopt.optimize(model, tune=False), X, torch.randn(4, 16)
    for named in ({"a": a, "b": b}, {"b": b, "a": a}, {"a": a, "b": b}):
        torch.testing.assert_close(fast(**named), model(**named))
    assert reasons(fast) == [None] * 2


@pytest.mark.filterwarnings("ignore:.*falls back to eager")
@pytest.mark.parametrize("random", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("kind", [dict, collections.UserDict])
@torch.no_grad()
def test_a_mapping_gets_the_items_that_the_forward_sets(kind, random):
    class Sets(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, features):
            features["x"] = self.layer(features["x"])
            features["y"] = torch.dropout(features["x"], 1e-6, True) if random else features["x"] * 2
            return features

    model = Sets().eval()
    fast = fxopt.optimize(model, tune=False)
    for _ in range(2):
        x = torch.randn(2, 8)
        given, wanted = kind(x=x), kind(x=x)
        model.forward(wanted)
        assert fast(given) is given
        assert list(given) == list(wanted)
        for name in wanted:
            torch.testing.assert_close(given[name], wanted[name], atol=1e-5, rtol=1e-5)
    assert (reasons(fast)[0] is None) is not random


@torch.no_grad()
def test_outputs_have_the_layout_that_the_model_gives_them():
    model = randomise(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval())
    fast, image = fxopt.optimize(model, tune=False), torch.randn(2, 3, 8, 8)
    wide = torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last)
    for x in (image, image.to(memory_format=torch.channels_last), image, wide[:, :3], wide[:1, 1:, 1:]):
        assert fast(x).stride() == model(x).stride()
        torch.testing.assert_close(fast(x), model(x), atol=1e-5, rtol=1e-5)
    assert set(reasons(fast)) == {None}


@torch.no_grad()
def test_outputs_of_videos_have_the_layout_that_the_model_gives_them():
    model = randomise(nn.Sequential(nn.Conv3d(3, 4, 3), nn.ReLU()).eval())
    fast, video = fxopt.optimize(model, tune=False), torch.randn(2, 3, 6, 8, 8)
    for x in (video, video.to(memory_format=torch.channels_last_3d), video):
        assert fast(x).stride() == model(x).stride()
        torch.testing.assert_close(fast(x), model(x), atol=1e-5, rtol=1e-5)
    assert reasons(fast) == [None, None]


@torch.no_grad()
def test_images_in_containers_have_layouts_too(tmp_path):
    model = randomise(module(lambda m, images: m.layer(images["x"]), layer=nn.Conv2d(1, 4, 3)))
    fast, image = fxopt.optimize(model, tune=False), torch.randn(2, 1, 8, 8)
    turned = image.to(memory_format=torch.channels_last)
    outputs = [fast({"x": x}) for x in (image, turned, image)]
    fxopt.save(fast, tmp_path / "saved")
    loaded = fxopt.load(tmp_path / "saved")
    for x, output in zip((image, turned, image), outputs, strict=True):
        assert output.stride() == loaded({"x": x}).stride() == model({"x": x}).stride()
    assert reasons(fast) == [None, None]
