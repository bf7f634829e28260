"""`verify=True`: a site that computes something else is found by running it, taken back and named."""

import copy
import dataclasses
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import fxopt
from fxopt import (
    ChangeTrueDivToMulByInverse,
    FuseBatchNorm1dInLinear,
    FuseBatchNorm2dInConv2d,
    FuseBiasInLinear,
    MergeLinears,
    Transformation,
    UnverifiedWarning,
    VerificationWarning,
    compose,
    history,
)
from fxopt.batch_norm import folded
from fxopt.passes import available
from fxopt.passes.batch_norm_folding import Fold
from fxopt.testing import assert_round_trip, randomise
from tests.small_models import MODELS


class Thirteen(nn.Module):
    """Thirteen linear layers, one after the other, with divisions between them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(13))

    def forward(self, x):
        for layer in self.layers:
            x = F.gelu(layer(x)) / 3
        return x


X = torch.randn(3, 4)


def thirteen():
    return fxopt.trace(randomise(Thirteen()).eval(), (X,))


class ForgetsABias(FuseBiasInLinear):
    """Forgets the bias at one site of thirteen."""

    def apply(self, rewriter, site):
        node = super().apply(rewriter, site)
        if node.target == "layers.7":
            with torch.no_grad():
                rewriter.graph_module.get_submodule("layers.7").weight[:, -1] = 0
        return node


def test_a_forgotten_bias_is_found_and_named():
    graph_module = thirteen()
    expected = graph_module(X)
    with pytest.warns(
        VerificationWarning, match=r"layers_7 \(in layers.7, from .*\) alone: layers_7 differs by"
    ):
        ForgetsABias()(graph_module, verify=True)
    assert len(ForgetsABias().get_transformed_nodes(graph_module)) == 12
    assert graph_module.get_submodule("layers.7").bias is not None
    torch.testing.assert_close(graph_module(X), expected)
    before = thirteen()
    fxopt.undo(graph_module)
    assert graph_module.code == before.code


def test_explain_lists_it_as_a_refusal_and_changes_nothing():
    graph_module = thirteen()
    before = copy.deepcopy(graph_module)
    with pytest.warns(VerificationWarning):
        explanation = ForgetsABias().explain(graph_module, verify=True)
    assert len(explanation.sites) == 12
    assert [row[0] for row in explanation.refusals] == ["layers_7"]
    assert_round_trip(before, graph_module)
    with pytest.warns(VerificationWarning):
        explanations = compose(MergeLinears(), ForgetsABias()).explain(graph_module, verify=True)
    assert [(e.name, len(e.sites), len(e.refusals)) for e in explanations] == [
        ("MergeLinears", 0, 0),
        ("ForgetsABias", 12, 1),
    ]
    assert_round_trip(before, graph_module)


class DividesTwice(ChangeTrueDivToMulByInverse):
    """Wrong in float64 only by what float32 would round away."""

    def apply(self, rewriter, site):
        node = super().apply(rewriter, site)
        rewriter.set(node, args=(node.args[0], node.args[1] * (1 + 1e-8)))
        return node


def test_errors_that_float32_would_hide_are_found():
    with pytest.warns(VerificationWarning, match="differs by 1e-08"):
        assert DividesTwice()(thirteen(), verify=True) is not None


class ForgetsEpsilon(FuseBatchNorm2dInConv2d):
    def match(self, graph_module):
        for site in super().match(graph_module):
            layer, norm = map(graph_module.get_submodule, (site.layer.target, site.node.target))
            norm.eps, eps = 0.0, norm.eps
            yield dataclasses.replace(site, fused=folded(layer, norm, behind=True))
            norm.eps = eps


def test_a_forgotten_epsilon_is_found():
    layers = randomise(nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3))).eval()
    layers[1].eps = 1e-4
    image = torch.randn(1, 2, 4, 4)
    with pytest.warns(VerificationWarning, match="_1 "):
        ForgetsEpsilon()(fxopt.trace(layers, (image,)), verify=True)


class DropsTheUser(FuseBatchNorm1dInLinear):
    """Blind to a second user of the layer."""

    def match(self, graph_module):
        for norm in graph_module.graph.find_nodes(op="call_module", target="norm"):
            (layer,) = norm.args
            fused = folded(*map(graph_module.get_submodule, (layer.target, norm.target)), behind=True)
            yield Fold(layer, norm, fused, True)


def test_another_user_of_a_value_that_changes_is_seen():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x):
            y = self.layer(x)
            return self.norm(y), torch.relu(y)

    with pytest.warns(VerificationWarning, match="layer differs by"):
        DropsTheUser()(fxopt.trace(randomise(Model()).eval(), (X,)), verify=True)


class HardtanhToNothing(Transformation):
    """Hand-written, and wrong for large values alone."""

    preserves_computation = True

    def transform(self, graph_module):
        for node in graph_module.graph.find_nodes(op="call_function", target=F.hardtanh):
            node.replace_all_uses_with(node.args[0])
            graph_module.graph.erase_node(node)
        return graph_module


def test_a_hand_written_transformation_is_one_site():
    class Clamped(nn.Module):
        def forward(self, x):
            return F.hardtanh(x + 1, -6.0, 6.0) * 2

    graph_module = fxopt.trace(Clamped(), (X,))
    code = graph_module.code
    with pytest.warns(VerificationWarning, match=r"HardtanhToNothing\(\) was taken back: "):
        HardtanhToNothing()(graph_module, verify=True)
    assert graph_module.code == code
    assert history(graph_module) == ()


@pytest.mark.parametrize("shapes", ["none", "example inputs", "FakeTensorProp"])
def test_shapes_come_from_metadata_or_from_example_inputs(shapes):
    graph_module = torch.fx.symbolic_trace(randomise(Thirteen()).eval())
    if shapes == "FakeTensorProp":
        FakeTensorProp(graph_module, FakeTensorMode(allow_non_fake_inputs=True)).propagate(X)
    verify = (X,) if shapes == "example inputs" else True
    category = UnverifiedWarning if shapes == "none" else VerificationWarning
    text = "run torch.fx.passes.fake_tensor_prop.FakeTensorProp, or give example inputs"
    with pytest.warns(category, match=text if shapes == "none" else "layers.7"):
        ForgetsABias()(graph_module, verify=verify)


@pytest.mark.parametrize("name", ["bert", "resnet", "llama", "t5"])
def test_right_passes_are_found_right(name):
    model, inputs = MODELS[name]()
    graph_module = fxopt.trace(randomise(model).eval(), (), inputs)
    for cls in available().values():
        with warnings.catch_warnings():
            warnings.simplefilter("error", VerificationWarning)
            warnings.simplefilter("error", UnverifiedWarning)
            checked = cls()(copy.deepcopy(graph_module), verify=True)
        assert checked.code == cls()(copy.deepcopy(graph_module)).code


@dataclasses.dataclass(frozen=True)
class Promises(FuseBiasInLinear):
    limit: int = 0

    def ensures(self, graph_module):
        count = len(graph_module.graph.find_nodes(op="call_function", target=F.pad))
        return f"there are {count} pads" if count > self.limit else None


def test_a_promise_that_is_broken_names_the_pass_and_those_before_it():
    graph_module = thirteen()
    before = copy.deepcopy(graph_module)
    passes = compose(ChangeTrueDivToMulByInverse(), Promises(20), Promises(3))
    with pytest.raises(
        fxopt.PassError, match=r"Promises\(limit=3\) broke its promise: there are 13 pads.*Applied"
    ):
        compose(Promises(20), Promises(3))(Promises(20)(thirteen()))
    with pytest.raises(fxopt.PassError, match=r"Applied before it: .*ChangeTrueDivToMulByInverse\(\)"):
        compose(ChangeTrueDivToMulByInverse(), Promises(3))(graph_module)
    assert_round_trip(before, graph_module)
    passes.parts[0](graph_module)
