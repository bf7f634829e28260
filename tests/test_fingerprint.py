"""The fingerprint of a graph module and the signature of a pass: alike for what is alike, else not."""

import copy
import pickle

import pytest
import torch
from torch import nn

from fxopt.rewriting.fingerprint import fingerprint
from fxopt.rewriting.signature import stable_text


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.first(x) + self.second(x) * 2), torch.relu(x), torch.sum(x, dim=0)


def first(graph_module, **wanted):
    return graph_module.graph.find_nodes(**wanted)[0]


def change_argument(gm):
    first(gm, op="call_function", target=torch.relu).args = (first(gm, op="call_module", target="first"),)


def change_number(gm):
    node = next(node for node in gm.graph.nodes if 2 in node.args)
    node.args = (node.args[0], 2.0)


def change_option(gm):
    first(gm, op="call_function", target=torch.sum).kwargs = {"dim": 1}


def change_function(gm):
    first(gm, op="call_function", target=torch.relu).target = torch.sigmoid


def change_module(gm):
    first(gm, op="call_module", target="first").target = "second"


def change_name(gm):
    node = first(gm, op="call_function", target=torch.relu)
    node.name = "another"


def change_order_of_nodes(gm):
    node = first(gm, op="call_function", target=torch.relu)
    gm.graph.output_node().prepend(node)


def change_order_of_modules(gm):
    gm._modules["first"] = gm._modules.pop("first")


def change_option_of_a_module(gm):
    gm.norm.eps = 0.1


def change_type_of_a_module(gm):
    gm.first.__class__ = nn.Bilinear


def change_shape(gm):
    gm.first.weight = nn.Parameter(torch.ones(4, 5))


def change_dtype(gm):
    gm.norm.running_mean = gm.norm.running_mean.double()


def change_device(gm):
    gm.first.to("meta")


def change_gradients(gm):
    gm.first.weight.requires_grad_(False)


def change_kind(gm):
    weight = gm.first.weight
    del gm.first.weight
    gm.first.register_buffer("weight", weight.detach().requires_grad_())


def change_mode(gm):
    gm.norm.eval()


def tie(gm):
    gm.second.weight = gm.first.weight


def tie_modules(gm):
    gm.second = gm.first


def drop_bias(gm):
    gm.first.bias = None


CHANGES = [value for name, value in list(globals().items()) if name.startswith(("change_", "tie", "drop_"))]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_gives_another_fingerprint(change):
    graph_module = torch.fx.symbolic_trace(Model())
    before = fingerprint(graph_module)
    change(graph_module)
    assert fingerprint(graph_module) != before


def test_copies_and_other_values_have_the_same_fingerprint():
    graph_module = torch.fx.symbolic_trace(Model())
    before = fingerprint(graph_module)
    assert fingerprint(copy.deepcopy(graph_module)) == before
    assert fingerprint(pickle.loads(pickle.dumps(graph_module))) == before
    with torch.no_grad():
        graph_module.first.weight.add_(1)
    assert fingerprint(graph_module) == before


def test_a_fingerprint_holds_no_address():
    prints = set()
    for _ in range(2):

        def option(x):
            return x

        graph_module = torch.fx.symbolic_trace(Model())
        graph_module.norm.functions = (option,)
        prints.add(fingerprint(graph_module))
    assert len(prints) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: torch.relu(x), lambda x: torch.sigmoid(x)),
        (lambda x, scale=1: x, lambda x, scale=2: x),
        (lambda x, *, scale=1: x, lambda x, *, scale=2: x),
        (lambda x: x + 1, lambda x: x + 1.0),
        (lambda x: [i + 1 for i in (1,)], lambda x: [i + 2 for i in (1,)]),
        ({"a": 1}, {"a": 1.0}),
        ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
        ((1, 2), (2, 1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(1000), torch.zeros(1000).index_fill(0, torch.tensor(500), 1)),
    ],
)
def test_values_that_differ_have_texts_that_differ(one, other):
    assert stable_text(one) != stable_text(other)


class Scale:
    def __init__(self, factor):
        self.factor = factor

    def apply(self, x):
        return x * self.factor


def test_methods_differ_by_their_objects():
    assert stable_text(Scale(1).apply) == stable_text(Scale(1).apply) != stable_text(Scale(2).apply)


def test_local_classes_differ_by_their_bases():
    def made(base):
        class Local(base):
            pass

        return Local

    assert stable_text(made(nn.ReLU)) == stable_text(made(nn.ReLU)) != stable_text(made(nn.SiLU))


def test_values_that_are_alike_have_one_text():
    def closure(number):
        return lambda x: x + number

    assert stable_text({"a": 1, "b": 2}) == stable_text({"b": 2, "a": 1})
    assert stable_text({1, 2, 30}) == stable_text({30, 2, 1})
    assert stable_text(closure(1)) == stable_text(closure(1)) != stable_text(closure(2))
    assert stable_text(torch.ones(3)) == stable_text(torch.ones(3))
