"""Questions about nodes: their input, and what the trace says of their values."""

import operator

import torch
from torch import nn
from torch.fx.passes.shape_prop import ShapeProp

import fxopt
from fxopt import graph


def test_input_of():
    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x):
            return self.linear(x), self.linear(input=x)

    traced = torch.fx.symbolic_trace(Calls())
    x, *calls, _ = traced.graph.nodes
    assert [graph.input_of(call, traced.linear) for call in calls] == [x, x]
    calls[0].args, calls[1].kwargs = (x, x), {"wrong": x}
    assert [graph.input_of(call, traced.linear) for call in calls] == [None, None]


def test_dtype_and_rank():
    traced = fxopt.trace(nn.Sequential(nn.Linear(2, 2)), (torch.ones(3, 2),))
    linear = next(n for n in traced.graph.nodes if n.op == "call_module" and n.users)
    assert (graph.dtype_of(linear), graph.rank_of(linear)) == (torch.float32, 2)
    bare = torch.fx.symbolic_trace(nn.Linear(2, 2))
    assert (
        {graph.dtype_of(n) for n in bare.graph.nodes}
        == {graph.rank_of(n) for n in bare.graph.nodes}
        == {None}
    )


def test_descriptions_of_shape_prop_and_of_nested_tuples():
    bare = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    ShapeProp(bare).propagate(torch.ones(3, 2))
    assert {(graph.dtype_of(n), graph.rank_of(n)) for n in bare.graph.nodes} == {(torch.float32, 2)}

    class Nested(nn.Module):
        def forward(self, x):
            return operator.getitem(x, 1)[0]

    x, *getitems, _ = torch.fx.symbolic_trace(Nested()).graph.nodes
    x.meta["val"] = (torch.ones(1), (torch.ones(1, 1),))
    assert [graph.rank_of(node) for node in getitems] == [None, 2]
