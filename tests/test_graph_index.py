"""Where modules are called, and which may be replaced."""

import pytest
import torch
from torch import nn

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
