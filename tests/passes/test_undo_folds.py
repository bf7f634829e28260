"""Undoing a fold of a batch normalization: bit for bit, or an error; nothing of training is lost."""

import copy
import io
import itertools

import pytest
import torch
from torch import nn

import fxopt
from fxopt import (
    FuseBatchNorm1dInLinear,
    FuseBatchNorm2dInConv2d,
    MergeLinears,
    ReversibleTransformation,
    UndoError,
    compose,
    history,
    undo,
)
from fxopt.rewriting.record import RECORD
from fxopt.testing import assert_round_trip, randomise
from tests.modules import module

BOTH = compose(FuseBatchNorm1dInLinear(), FuseBatchNorm2dInConv2d())


class Convs(nn.Module):
    """Three convolutions with their normalizations, in an odd order, and linear layers around another."""

    def __init__(self, layer_before=True):
        super().__init__()
        self.norm, self.a, self.b = nn.BatchNorm2d(4), nn.Conv2d(3, 4, 1, bias=False), nn.Conv2d(3, 4, 1)
        self.other = nn.BatchNorm2d(4)
        self.own, self.c, self.head_norm = nn.BatchNorm2d(4), nn.Conv2d(3, 4, 1), nn.BatchNorm1d(4)
        self.head, self.layer_before = nn.Linear(4, 4), layer_before

    def forward(self, x):
        a, b, c = self.a(x), self.b(x), self.c(x)
        image = self.norm(input=b) * 2 + self.own(c) + self.other(a)
        value = image.mean((2, 3))
        return self.head_norm(self.head(value)) if self.layer_before else self.head(self.head_norm(value))


X = torch.randn(2, 3, 5, 5)


def traced(layer_before=True, model=None):
    torch.manual_seed(0)
    return fxopt.trace(randomise(model or Convs(layer_before)).eval(), (X,))


def conv_norm():
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))


def metadata(graph_module):
    return {
        node.name: (node.meta["nn_module_stack"], node.meta["stack_trace"], node.meta["val"].shape)
        for node in graph_module.graph.nodes
        if node.op == "call_module" and node.target != "input_guard"
    }


@pytest.mark.parametrize("layer_before", [True, False])
def test_bit_for_bit_with_metadata(layer_before):
    graph_module = traced(layer_before)
    before, facts, plain = copy.deepcopy(graph_module), metadata(graph_module), graph_module(X)
    BOTH(graph_module)
    assert [step.nodes for step in history(graph_module)] == [1, 3]
    assert len([n for n in graph_module.graph.nodes if n.op == "call_module"]) == 5  # with the guard
    for undone in (BOTH(copy.deepcopy(graph_module), reverse=True), undo(graph_module, 2)):
        assert_round_trip(before, undone)
        assert torch.equal(undone(X), plain)
        assert metadata(undone) == facts


def test_nothing_is_added_to_the_state_dict():
    graph_module = BOTH(traced())
    assert not [name for name in graph_module.state_dict() if RECORD in name or "norm" in name]
    assert {name for name, _ in graph_module.named_parameters()} == set(graph_module.state_dict())


def test_the_record_does_not_follow_the_users_model():
    graph_module = traced()
    model = copy.deepcopy(graph_module)
    shared = fxopt.trace(model, (X,))
    BOTH(shared)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    BOTH(shared, reverse=True)
    assert torch.equal(shared.a.weight, graph_module.a.weight)
    assert torch.equal(shared.norm.running_var, graph_module.norm.running_var)


@pytest.mark.parametrize("to", [torch.float64, torch.bfloat16, torch.float16, "meta"])
def test_after_a_change_of_dtype_or_device_undo_gives_what_the_old_weights_become(to):
    graph_module = torch.fx.symbolic_trace(randomise(conv_norm()).eval())
    converted = copy.deepcopy(graph_module).to(to)
    assert_round_trip(converted, undo(FuseBatchNorm2dInConv2d()(graph_module).to(to)))


def trained(graph_module):
    optimizer = torch.optim.SGD(graph_module.parameters(), 0.1)
    graph_module(X).square().sum().backward()
    optimizer.step()


def only_a_bias(graph_module):
    with torch.no_grad():
        graph_module.c.bias[0] += 1e-3


def rounded(graph_module):
    graph_module.half().float()


def loaded(graph_module):
    state = {name: value + 1 for name, value in graph_module.state_dict().items()}
    graph_module.load_state_dict(state)


@pytest.mark.parametrize("change", [trained, only_a_bias, rounded, loaded])
def test_weights_that_changed_are_never_dropped(change):
    graph_module = BOTH(traced())
    change(graph_module)
    after = copy.deepcopy(graph_module)
    with pytest.raises(UndoError, match="the folded weights of .* have changed since"):
        BOTH(graph_module, reverse=True)
    assert_round_trip(after, graph_module)


def test_flags_follow_where_they_were_changed():
    graph_module = BOTH(traced())
    graph_module.requires_grad_(False)
    BOTH(graph_module, reverse=True)
    assert not any(parameter.requires_grad for parameter in graph_module.parameters())
    graph_module = FuseBatchNorm2dInConv2d()(torch.fx.symbolic_trace(randomise(conv_norm()).eval()))
    undo(graph_module.train())
    assert [module.training for module in graph_module.modules()] == [True] * 3


def test_flags_are_kept_where_they_were_not():
    model = randomise(conv_norm())
    model[1].eval().weight.requires_grad_(False)
    graph_module = torch.fx.symbolic_trace(model)
    before = copy.deepcopy(graph_module)
    assert_round_trip(before, undo(FuseBatchNorm2dInConv2d()(graph_module)))


@pytest.mark.parametrize("pass_", [FuseBatchNorm1dInLinear(False), FuseBatchNorm2dInConv2d(reversible=False)])
def test_without_copies_it_is_a_plain_transformation(pass_):
    graph_module = pass_(traced())
    assert not isinstance(compose(pass_), ReversibleTransformation)
    assert [step.reversible for step in history(graph_module)] == [False]
    folded = copy.deepcopy(graph_module)
    with pytest.raises(UndoError, match=r"keeps no copy of the weights. Make it with reversible=True"):
        pass_(graph_module, reverse=True)
    with pytest.raises(UndoError, match="cannot be undone"):
        undo(graph_module)
    assert_round_trip(folded, graph_module)


def saved_bytes(*passes):
    graph_module = torch.fx.symbolic_trace(nn.Sequential(nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64)).eval())
    file = io.BytesIO()
    torch.save(compose(*passes)(graph_module), file)
    return file.tell()


def test_the_copies_cost_the_memory_of_the_layers_and_can_be_turned_off():
    weights = 64 * 64 * 9 * 4
    plain, without = saved_bytes(), saved_bytes(FuseBatchNorm2dInConv2d(reversible=False))
    assert abs(without - plain) < 10_000
    assert weights < saved_bytes(FuseBatchNorm2dInConv2d()) - without < weights + 20_000


@pytest.mark.parametrize(("name", "layer"), [("own", nn.BatchNorm2d(4)), ("c", nn.Conv2d(3, 4, 1))])
def test_a_layer_that_was_added_or_replaced_since(name, layer):
    graph_module = traced()
    FuseBatchNorm2dInConv2d()(graph_module)
    graph_module.add_module(name, layer)
    with pytest.raises(UndoError, match=f"{name} was changed since"):
        FuseBatchNorm2dInConv2d()(graph_module, reverse=True)


def test_a_chain_of_normalizations_comes_back_in_order():
    layers = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.BatchNorm2d(4))
    graph_module = traced(model=layers)
    before, facts = copy.deepcopy(graph_module), metadata(graph_module)
    assert len(FuseBatchNorm2dInConv2d()(graph_module).graph.find_nodes(op="call_module")) == 2
    assert_round_trip(before, undo(graph_module))
    assert metadata(graph_module) == facts


def test_a_layer_is_marked_until_its_last_fold_is_undone():
    layers = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4)).eval()
    graph_module = torch.fx.symbolic_trace(layers)
    fuse, last = FuseBatchNorm2dInConv2d(), graph_module.get_submodule("2")
    last.train()
    fuse(graph_module)
    last.eval()
    fuse(graph_module)
    assert len(history(graph_module)) == 2
    assert len(fuse.get_transformed_nodes(undo(graph_module))) == 1
    assert not fuse.get_transformed_nodes(undo(graph_module))


def test_children_come_back_in_order_whatever_is_undone_first():
    model = module(
        lambda m, x, y: (m.norm(m.conv(x)), m.first(y), m.second(y)),
        conv=nn.Conv2d(3, 4, 1),
        first=nn.Linear(4, 4),
        norm=nn.BatchNorm2d(4),
        second=nn.Linear(4, 4),
    )
    passes = [FuseBatchNorm2dInConv2d(), MergeLinears()]
    before = torch.fx.symbolic_trace(randomise(model))
    for applied, undone in itertools.product(itertools.permutations(passes), repeat=2):
        graph_module = compose(*applied)(copy.deepcopy(before))
        for pass_ in undone:
            pass_(graph_module, reverse=True)
        assert_round_trip(before, graph_module)


def test_a_layer_of_which_a_part_was_frozen_stays_so():
    model = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(3, 4, 3)).eval()
    graph = fxopt.FoldPadding()(fxopt.trace(model, (torch.randn(1, 3, 8, 8),)))
    graph.get_parameter("1.weight").requires_grad_(False)
    undo(graph)
    assert [parameter.requires_grad for parameter in graph.get_submodule("1").parameters()] == [False, True]


@pytest.mark.parametrize("before", [True, False])
def test_layers_are_frozen_or_trained_as_they_were_at_last(before):
    model = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    graph = fxopt.trace(model.eval().requires_grad_(before), (torch.randn(1, 3, 8, 8),))
    for pass_ in (fxopt.FoldPadding(), FuseBatchNorm2dInConv2d()):
        pass_(graph)
    graph.requires_grad_(not before)
    undo(graph, 2)
    assert {parameter.requires_grad for parameter in graph.parameters()} == {not before}
