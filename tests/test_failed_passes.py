"""A pass, or an undo, that fails leaves the graph module as it was."""

import copy

import pytest
import torch
from torch import nn

import fxopt
from fxopt import FuseBiasInLinear, MergeLinears, PassError, ReversibleTransformation, Transformation, compose
from fxopt.testing import assert_round_trip
from tests.example_passes import ChangeMulToAdd


class Twins(nn.Module):
    def __init__(self):
        super().__init__()
        self.k, self.q = nn.Linear(4, 4), nn.Linear(4, 4)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.k(x) + self.q(x)
        return self.a(h), self.b(h) / 8


class BreaksAll(ReversibleTransformation):
    """Breaks all that a pass can break, and raises."""

    def transform(self, graph_module):
        graph_module.graph.erase_node(next(n for n in reversed(graph_module.graph.nodes) if n.op == "output"))
        del graph_module.k
        graph_module.q.weight = None
        graph_module.register_buffer("new", torch.ones(1))
        raise KeyboardInterrupt

    def reverse(self, graph_module):
        raise ValueError("cannot be undone")


class LeavesGarbage(Transformation):
    def transform(self, graph_module):
        del graph_module.k
        return graph_module


@pytest.mark.parametrize("trace", [torch.fx.symbolic_trace, lambda m: fxopt.trace(m, (torch.ones(1, 4),))])
@pytest.mark.parametrize(
    ("pass_", "error"),
    [
        (BreaksAll(), KeyboardInterrupt),
        (LeavesGarbage(), PassError),
        (compose(MergeLinears(), LeavesGarbage(), LeavesGarbage()), AttributeError),
        (compose(MergeLinears(), ChangeMulToAdd(), BreaksAll()), AttributeError),
    ],
)
def test_a_pass_that_fails_leaves_the_graph_module_as_it_was(pass_, error, trace):
    traced = trace(Twins())
    before = copy.deepcopy(traced)
    with pytest.raises(error):
        pass_(traced)
    assert_round_trip(before, traced)


class AddsTwo(Transformation):
    def __init__(self, fails):
        self.fails = fails

    def transform(self, graph_module):
        output = graph_module.graph.output_node()
        with graph_module.graph.inserting_before(output):
            for _ in range(2):
                graph_module.graph.call_function(torch.relu, output.args)
        if self.fails:
            raise KeyboardInterrupt
        return graph_module


def test_after_an_error_new_nodes_get_the_names_that_they_would_have_got():
    traced = torch.fx.symbolic_trace(lambda x: torch.relu(x))
    with pytest.raises(KeyboardInterrupt):
        AddsTwo(True)(traced)
    AddsTwo(False)(traced)
    assert [node.name for node in traced.graph.nodes] == ["x", "relu", "relu_1", "relu_2", "output"]


def test_an_undo_that_fails_leaves_the_graph_module_as_it_was():
    traced = MergeLinears()(torch.fx.symbolic_trace(Twins()))
    merged = next(name for name, _ in traced.named_children() if name.startswith("fxopt_merged_k"))
    traced.get_submodule(merged).bias = None
    before, x = copy.deepcopy(traced), torch.randn(2, 4)
    with pytest.raises(fxopt.UndoError):
        MergeLinears()(traced, reverse=True)
    assert_round_trip(before, traced)
    assert torch.equal(before(x)[0], traced(x)[0])
    assert len(MergeLinears().get_transformed_nodes(traced)) == 2


class AddsAConstant(ReversibleTransformation):
    """Its reverse fails."""

    def transform(self, graph_module):
        with graph_module.graph.inserting_before(next(iter(graph_module.graph.nodes))):
            graph_module.graph.call_function(abs, (1,))
        return graph_module

    def reverse(self, graph_module):
        raise ValueError("cannot be undone")


def test_a_composition_that_cannot_be_undone_stays_applied():
    inner = compose(MergeLinears(), FuseBiasInLinear())
    passes = compose(AddsAConstant(), inner)
    traced = torch.fx.symbolic_trace(Twins())
    unchanged = copy.deepcopy(traced)
    passes(traced)
    before = copy.deepcopy(traced)
    with pytest.raises(ValueError, match="cannot be undone"):
        passes(traced, reverse=True)
    assert_round_trip(before, traced)
    assert len(MergeLinears().get_transformed_nodes(traced)) == 2
    inner(traced, reverse=True)
    assert traced.state_dict().keys() == unchanged.state_dict().keys()
    assert [step.name for step in fxopt.history(traced)] == ["AddsAConstant()"]
