"""Every node says what flows through it and where it comes from, before and after every pass."""

import copy

import pytest
import torch
from torch import nn
from torch.fx import Interpreter

import fxopt
from fxopt import ReversibleTransformation
from tests import small_models
from tests.modules import module
from tests.small_models import MODELS


class Flow(Interpreter):
    """Runs a graph, and compares each value with what `val` says of it."""

    def run_node(self, node):
        result = super().run_node(node)
        agree(node, node.meta["val"], result)
        self.compared = getattr(self, "compared", 0) + isinstance(result, torch.Tensor)
        return result


def agree(node, described, value):
    if isinstance(value, torch.Tensor):
        assert isinstance(described, torch.Tensor), node.format_node()
        assert described.shape == value.shape, node.format_node()
        assert described.dtype == value.dtype, node.format_node()
    elif isinstance(value, dict):
        assert list(described) == list(value)
        for key in value:
            agree(node, described[key], value[key])
    elif isinstance(value, (tuple, list)):
        assert len(described) == len(value)
        for one, other in zip(described, value, strict=True):
            agree(node, one, other)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        assert described == value, node.format_node()


def assert_described(gm, inputs):
    for node in gm.graph.nodes:
        assert "val" in node.meta, node.format_node()
        stack, trace = node.meta["nn_module_stack"], node.meta["stack_trace"]
        assert stack, node.format_node()
        assert all(type(path) is str and type(kind) is str for path, kind in stack.values())
        if node.op not in ("placeholder", "output") and len(stack) > 1:
            assert "File" in trace, node.format_node()
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    flow = Flow(gm, garbage_collect_values=False)
    with torch.no_grad():
        flow.run(*(inputs.get(node.target) for node in placeholders))
    assert flow.compared > 3


def test_nodes_that_compute_sizes_stand_where_they_are_used():
    model, inputs = small_models.gpt2()
    free = {name: {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO} for name in inputs}
    gm = fxopt.trace(model.eval(), (), inputs, dynamic_shapes=free)
    computed = [node for node in gm.graph.nodes if isinstance(node.meta["val"], torch.SymInt)]
    assert {node.op for node in computed} == {"call_method", "call_function"}
    for node in computed:
        first = next(user for user in gm.graph.nodes if user in node.users)
        assert node.meta["nn_module_stack"] == first.meta["nn_module_stack"], node.format_node()
        assert node.meta["stack_trace"] == first.meta["stack_trace"]
        assert len(node.meta["nn_module_stack"]) > 1


class Attends(nn.Module):
    """Attention in three dimensions, with masks in two and four of them."""

    def forward(self, x):
        scores = x.bmm(x.transpose(1, 2)).view(2, 2, 3, 3) * 2 + x[0] + x[:1, :1]
        return scores.view(4, 3, 3).softmax(-1).bmm(x).view(12, 3)


def places(pass_):
    """A model in eval mode with places for a pass, and inputs."""
    if isinstance(pass_, (fxopt.FuseBatchNorm1dInLinear, fxopt.ChangeTrueDivToMulByInverse)):
        layers = {"linear": nn.Linear(4, 4), "norm": nn.BatchNorm1d(4)}
        return module(lambda m, x: m.norm(m.linear(x)) / 2.5, **layers), {"x": torch.randn(3, 4)}
    if isinstance(pass_, fxopt.FuseAttention):
        return Attends().eval(), {"x": torch.randn(4, 3, 3, dtype=torch.float64)}
    model, inputs = (
        small_models.resnet() if isinstance(pass_, fxopt.FuseBatchNorm2dInConv2d) else small_models.bert()
    )
    return model.eval(), inputs


PASSES = [
    fxopt.ChangePrecision(),
    fxopt.ChangeTrueDivToMulByInverse(),
    fxopt.FuseAttention(),
    fxopt.FuseBatchNorm1dInLinear(),
    fxopt.FuseBatchNorm2dInConv2d(),
    fxopt.FuseBiasInLinear(),
    fxopt.MergeLinears(),
    fxopt.ReplaceActivation(),
    fxopt.compose(fxopt.MergeLinears(), fxopt.FuseBiasInLinear(), fxopt.ChangePrecision()),
]


@pytest.mark.sweep(5)
@pytest.mark.parametrize("name", MODELS)
def test_captures_are_described(name):
    model, inputs = MODELS[name]()
    assert_described(fxopt.trace(model.eval(), (), inputs), inputs)


@pytest.mark.parametrize("pass_", PASSES, ids=repr)
def test_rewritten_graphs_are_described(pass_):
    model, inputs = places(pass_)
    gm = fxopt.trace(model, (), inputs)
    before = [(node.name, dict(node.meta)) for node in gm.graph.nodes]
    changed = pass_(copy.deepcopy(gm))
    assert pass_.get_transformed_nodes(changed)
    assert_described(changed, inputs)
    if isinstance(pass_, ReversibleTransformation):
        restored = pass_(changed, reverse=True)
        assert_described(restored, inputs)
        for (name, meta), node in zip(before, restored.graph.nodes, strict=True):
            assert node.name == name
            assert node.meta["nn_module_stack"] == meta["nn_module_stack"]
            assert node.meta["stack_trace"] == meta["stack_trace"]


def test_modules_are_named_as_torch_export_names_them():
    model, inputs = small_models.bert()
    model.eval()
    stacks = [
        {
            tuple(node.meta["nn_module_stack"].values())
            for node in graph.nodes
            if node.meta.get("nn_module_stack")
        }
        for graph in (
            torch.export.export(model, (), inputs, strict=False).graph,
            fxopt.trace(
                model, (), inputs, leaf_modules=["bert.encoder.layer.0.intermediate.intermediate_act_fn"]
            ).graph,
        )
    ]
    assert len(stacks[0]) > 20
    assert stacks[0] <= stacks[1]
