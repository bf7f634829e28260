"""The first node that diverges is named: in planted wrong passes, in what real passes made, and not where all is right."""

from __future__ import annotations

import copy
import dataclasses
import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

import fxopt
from fxopt import (
    FoldNormWeights,
    FuseBatchNorm1dInLinear,
    FuseBiasInLinear,
    MergeLinears,
    RemoveIdentity,
    Rewriter,
    Transformation,
    compose,
)
from fxopt.rewriting.chosen_sites import AtSites
from fxopt.testing import Oracle, assert_equivalent, find_culprit, first_divergence, randomise
from tests.validation.wrong_passes import Deep, ForgetsBias, Parts, Wrong

AT = {
    "a clamp that the inputs do not reach is dropped": "norm",
    "a clamp is tighter": "clamp",
    "values above 50 are cut off": "planted",
    "a batch normalisation is dropped": "relu",
    "a bias is dropped": "second",
    "an epsilon is dropped": "norm",
    "a normalisation is left in training mode": "norm",
    "a constant is off by 1e-8": "truediv",
    "it rounds to float32 on the way": "planted",
    "it rounds to bfloat16, but not in float64": "planted",
    "an activation is another one": "planted",
    "it draws random numbers": "planted",
    "it remembers its first result": "planted",
    "it remembers a result for each shape": "planted",
    "it goes wrong at the second call": "planted",
    "a list becomes a tuple": "output",
    "two outputs change places": "output",
    "an output is lost": "output",
    "the dtype of an output is another": "double",
}


@pytest.fixture(scope="module")
def parts() -> GraphModule:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return fxopt.trace(randomise(Parts()).eval(), (torch.randn(5, 4),))


def x(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", AT)
def test_the_planted_node_is_named(parts: GraphModule, name: str) -> None:
    found = first_divergence(parts, Wrong(name)(copy.deepcopy(parts)), [x(5, 4)])
    assert found is not None
    assert found.node == AT[name]
    assert found.step == repr(Wrong(name))


@pytest.mark.parametrize(
    ("name", "reason", "node"),
    [
        (
            "it reuses the memory of its result",
            "a later call changes the result that this one returned",
            None,
        ),
        ("it writes its input", "it writes its inputs, unlike the original", None),
        ("it writes a buffer", "it writes the buffer scale, unlike the original", "scale"),
    ],
)
def test_what_a_node_writes_is_in_the_reason(
    parts: GraphModule, name: str, reason: str, node: str | None
) -> None:
    """Values of nodes show it at most in the next call; the pass is named all the same."""
    changed = Wrong(name)(copy.deepcopy(parts))
    divergence = first_divergence(parts, changed, [x(5, 4)])
    assert (divergence and divergence.node) == node
    with pytest.raises(AssertionError, match=reason):
        assert_equivalent(parts, changed, [x(5, 4)])
    found = find_culprit(Oracle(parts, [x(5, 4)]), parts, [MergeLinears(), Wrong(name)])
    assert found is not None
    assert found.passes == (Wrong(name),)
    assert reason in found.reason


def test_a_node_has_its_layer_and_its_line(parts: GraphModule) -> None:
    found = first_divergence(parts, Wrong("a bias is dropped")(copy.deepcopy(parts)), [x(5, 4)])
    assert found is not None
    assert (found.module, found.limit) == ("second", 1e-9)
    assert "wrong_passes.py:" in found.source
    assert 1e-3 < found.error < 1
    assert "bias=True)(relu)" in found.was
    assert "bias=False)(relu)" in found.now


def test_a_node_that_raises_is_named(parts: GraphModule) -> None:
    changed = copy.deepcopy(parts)
    changed.second = nn.Linear(7, 6)
    found = first_divergence(parts, changed, [x(5, 4)])
    assert found is not None
    assert found.node == "second"
    assert "RuntimeError" in found.fault


class Layers(nn.Module):
    """Sites of passes that give new values to nodes of the original: merged, folded, without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.query, self.key = nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.last, self.statistics = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        hidden = torch.tanh(self.query(hidden)) * self.key(hidden)
        return torch.tanh(self.statistics(self.last(hidden)))


PASSES = (FoldNormWeights(), FuseBatchNorm1dInLinear(), MergeLinears())


def layers(*passes: Transformation) -> tuple[nn.Module, GraphModule, GraphModule]:
    """A model, its graph, and the graph after passes; in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = randomise(Layers()).double().eval()
    graph = fxopt.trace(model, (x(5, 6).double(),))
    return model, graph, compose(*passes)(copy.deepcopy(graph))


def test_right_passes_part_nowhere() -> None:
    _, before, after = layers(*PASSES, FuseBiasInLinear())
    assert len(fxopt.history(after)) == 4
    assert first_divergence(before, after, [x(5, 6).double()]) is None


def test_of_what_passes_made_the_wrong_layer_is_named() -> None:
    wrong = ForgetsBias(of=("last",))
    _, before, after = layers(*PASSES, wrong)
    found = first_divergence(before, after, [x(5, 6).double()])
    assert found is not None
    assert (found.node, found.module, found.step) == ("pad_1", "last", repr(wrong))
    assert "last, which follows, is" in found.fault


def test_a_layer_that_stands_for_a_fold_is_held_against_what_was_folded() -> None:
    """Its own value of before is another one, which is no fault."""
    _, before, after = layers(FuseBatchNorm1dInLinear())
    *_, node = after.graph.find_nodes(op="call_function", target=torch.tanh)
    node.target = torch.sigmoid
    after.recompile()
    found = first_divergence(before, after, [x(5, 6).double()])
    assert found is not None
    assert found.node == node.name


def test_an_assertion_about_a_model_says_where() -> None:
    model, _, after = layers(*PASSES, ForgetsBias(of=("last",)))
    with pytest.raises(AssertionError, match=r"it first diverges at node pad_1 \(module last, .*ForgetsBias"):
        assert_equivalent(model, after, [x(5, 6).double()])


def test_an_assertion_about_a_wrong_capture_says_where() -> None:
    model, graph, _ = layers()
    (node,) = graph.graph.find_nodes(op="call_function", target=operator.mul)
    node.target = operator.add
    graph.recompile()
    with pytest.raises(AssertionError, match=r"they diverge at node '%mul .*test_divergence.py"):
        assert_equivalent(model, graph, [x(5, 6).double()])


@pytest.fixture(scope="module")
def deep() -> tuple[Oracle, GraphModule]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = randomise(Deep()).double().eval()
    return Oracle(model, [x(5, 6).double()]), fxopt.trace(model, (x(5, 6).double(),))


@pytest.mark.parametrize("of", [("8",), ("0", "24"), ()])
def test_the_guilty_pass_and_its_sites_are_found(
    deep: tuple[Oracle, GraphModule], of: tuple[str, ...]
) -> None:
    wrong = ForgetsBias(of=of)
    found = find_culprit(*deep, [RemoveIdentity(), compose(MergeLinears(), wrong), FoldNormWeights()])
    if not of:
        assert found is None
        return
    assert found is not None
    assert found.passes == (wrong,)
    assert found.of == 13
    (site,) = found.sites  # one of them is enough
    assert site.removeprefix("_") in of
    assert found.divergence is not None
    assert found.divergence.module in of
    assert "differs by" in found.reason
    assert f"is wrong, already at 1 of its 13 sites ({site})" in str(found)
    assert isinstance(found.steps[0], AtSites)


@dataclasses.dataclass(frozen=True)
class WrongAfter(Transformation):
    """Wrong in a graph that another pass has changed."""

    preserves_computation = True

    def transform(self, graph_module: GraphModule) -> GraphModule:
        for node in graph_module.graph.find_nodes(op="call_function", target=nn.functional.pad):
            node.kwargs = {**node.kwargs, "value": 2.0}
        return graph_module


def test_passes_that_are_wrong_together_are_found(deep: tuple[Oracle, GraphModule]) -> None:
    passes = [RemoveIdentity(), FuseBiasInLinear(), MergeLinears(), WrongAfter(), FoldNormWeights()]
    found = find_culprit(*deep, passes)
    assert found is not None
    assert found.passes == (FuseBiasInLinear(), WrongAfter())
    assert str(found).startswith("WrongAfter() after FuseBiasInLinear() is wrong")
    assert found.divergence is not None
    assert found.divergence.node == "pad"


def test_a_pass_that_raises_is_found(deep: tuple[Oracle, GraphModule]) -> None:
    class Raises(FuseBiasInLinear):
        def apply(self, rewriter: Rewriter, site: Any) -> Node:
            if str(site.target) == "8":
                raise ZeroDivisionError("in vain")
            return super().apply(rewriter, site)

    found = find_culprit(*deep, [MergeLinears(), Raises()])
    assert found is not None
    assert found.reason == "ZeroDivisionError: in vain"
    assert found.sites == ("_8",)


def test_what_is_no_graph_has_no_nodes_to_compare() -> None:
    model = nn.Linear(2, 2)
    graph = torch.fx.symbolic_trace(nn.Sequential(model))
    for pair in ((model, graph), (graph, model)):
        with pytest.raises(
            TypeError, match=r"a Linear has no nodes: give graph modules, such as fxopt\.trace"
        ):
            first_divergence(*pair, [torch.ones(1, 2)])
