"""Questions about nodes: their input, and what the trace says of their values."""

import operator

import torch
from torch import nn
from torch.fx.passes.shape_prop import ShapeProp

import fxopt
from fxopt import graph
from tests.modules import module


def test_input_of():
    model = module(lambda m, x: (m.linear(x), m.linear(input=x)), linear=nn.Linear(2, 2))
    traced = torch.fx.symbolic_trace(model)
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

    x, *getitems, _ = torch.fx.symbolic_trace(module(lambda m, x: operator.getitem(x, 1)[0])).graph.nodes
    x.meta["val"] = (torch.ones(1), (torch.ones(1, 1),))
    assert [graph.rank_of(node) for node in getitems] == [None, 2]
