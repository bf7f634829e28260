"""Where modules are called, and which may be replaced."""

import pytest
import torch
from torch import nn

import fxopt
from fxopt.graph_index import GraphIndex


def test_calls_are_found_by_identity():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    traced = torch.fx.symbolic_trace(model)
    traced.alias = traced.get_submodule("0")
    with traced.graph.inserting_before(list(traced.graph.nodes)[-1]):
        other = traced.graph.call_module("alias", (next(iter(traced.graph.nodes)),))
    index = GraphIndex(traced)
    assert index.call_sites(traced.alias) == [list(traced.graph.nodes)[1], other]
    assert index.names(traced.alias) == ["0", "alias"]
    assert not index.removable(other)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.weight.register_hook(lambda g: g),
        lambda layer: layer.weight.register_post_accumulate_grad_hook(lambda p: None),
        lambda layer: layer.register_full_backward_hook(lambda *a: None),
        lambda layer: layer.register_state_dict_pre_hook(lambda *a: None),
        lambda layer: layer.compile(),
        lambda layer: setattr(layer, "weight", type("Odd", (nn.Parameter,), {})(torch.ones(2, 2))),
    ],
)
def test_unusual_modules_are_not_replaced(change):
    model = nn.Sequential(nn.Linear(2, 2))
    change(model[0])
    index = GraphIndex(torch.fx.symbolic_trace(model))
    assert index.obstacle(index.nodes[1], nn.Linear)


class Joined(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.a, self.b, self.use = nn.Linear(2, 2), nn.Linear(2, 2), use

    def forward(self, x):
        return self.use(self, x)


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (lambda m, x: m.b(m.a(x)), None),
        (lambda m, x: (m.a(x) + 1, m.b(m.a(x)))[1] + x, None),
        (lambda m, x: (lambda h: m.b(h) + h)(m.a(x)), "a is also used by add"),
        (lambda m, x: (lambda h: (x.add_(1), m.b(h)))(m.a(x)), "add_ may write into x between a and b"),
    ],
)
def test_why_two_calls_cannot_be_joined(use, reason):
    index = GraphIndex(torch.fx.symbolic_trace(Joined(use)))
    b = next(node for node in index.nodes if node.target == "b")
    (first,) = b.all_input_nodes
    assert index.joining_obstacle(first, b) == reason


def test_calls_by_what_they_take():
    index = GraphIndex(torch.fx.symbolic_trace(Joined(lambda m, x: (m.a(x), m.b(input=x), m.a(x + 1)))))
    x, a, b, add, again = index.nodes[:5]
    assert index.calls_by_input(nn.Linear) == {x: [a, b], add: [again]}


def test_a_layer_that_is_not_plain():
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].out_features = 3
    index = GraphIndex(torch.fx.symbolic_trace(model))
    assert (
        index.obstacle(index.nodes[1], nn.Linear) == "it does not have the weight and bias of a plain Linear"
    )
    assert "not exactly a Conv2d" in index.obstacle(index.nodes[1], nn.Conv2d)


def writes(module):
    """May write into all that a module holds."""


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.held = nn.Module()
        self.held.layer, self.held.norm, self.other = nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)


@pytest.mark.parametrize("path", ["held", "held.layer"])
def test_a_module_that_a_node_reads_keeps_its_layers(path):
    graph = torch.fx.Graph()
    x, module = graph.placeholder("x"), graph.get_attr(path)
    one, two = graph.call_module("held.layer", (x,)), graph.call_module("other", (x,))
    graph.output((graph.call_module("held.norm", (one,)), two, graph.call_function(len, (module,))))
    traced = torch.fx.GraphModule(Holder().eval(), graph)
    for pass_ in (fxopt.MergeLinears(), fxopt.FuseBiasInLinear()):
        assert f"reads {path}" in str(pass_.explain(traced))
    assert not fxopt.FoldConstants().explain(traced).sites
    index = GraphIndex(traced)
    assert index.memory.writer_of(index.modules["held.layer"]) is None
    graph.output_node().args[0][2].target = writes
    assert GraphIndex(traced).memory.writer_of(index.modules["held.layer"]) is not None
