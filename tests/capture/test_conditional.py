"""`torch.cond` is a node with both branches as graphs, or one clear TraceError."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.export import Dim

import fxopt
from fxopt.capture.runtime.conditional import Conditional
from fxopt.testing import randomise

X = torch.randn(3, 4, dtype=torch.float64)


class Does(nn.Module):
    """Has two layers, and as its forward what is given."""

    def __init__(self, forward):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.noise = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(4)
        self._forward = forward

    def forward(self, *args):
        return self._forward(self, *args)


def does(forward):
    return randomise(Does(forward).double()).eval()


def positive(x):
    return x.sum() > 0


def nested(self, x):
    def inner(y):
        return torch.cond(y[0, 0] > 0, self.one, self.two, (y,))

    return torch.cond(positive(x), inner, lambda y: y.cos(), (x,))


def checked(self, x):
    if not x.isfinite().all():
        raise ValueError("not finite")
    return torch.cond(positive(x), self.one, self.two, (x,))


def twice(self, x):
    y = torch.cond(positive(x), self.one, self.two, (x,))
    return torch.cond(positive(y), torch.sin, torch.cos, (y,)) + torch.cond(
        positive(-y), torch.sin, torch.cos, (y,)
    )


RIGHT = {
    "layers": lambda self, x: torch.cond(positive(x), self.one, lambda y: self.two(y).relu(), (x,)),
    "functions": lambda self, x: torch.cond(positive(x), torch.sin, torch.cos, (x,)) * 2,
    "closures": lambda self, x: torch.cond(
        positive(x), lambda: x * x.mean(), lambda: x - torch.ones(4, dtype=x.dtype), ()
    ),
    "several results": lambda self, x: torch.cond(
        positive(x),
        lambda y: {"a": y * 3, "b": (-y, y + 1)},
        lambda y: {"a": y * 4, "b": (self.one(y), y * 2)},
        (x,),
    )["b"],
    "sizes": lambda self, x: torch.cond(
        positive(x), lambda y: y / y.shape[0], lambda y: y * y.shape[0] + len(x), (x,)
    ),
    "writes of its own": lambda self, x: torch.cond(
        positive(x), lambda y: y.clone().mul_(2), lambda y: torch.zeros_like(y).add_(y), (x,)
    ),
    "nested": nested,
    "twice": twice,
    "a normalisation": lambda self, x: torch.cond(positive(x), self.norm, lambda y: self.noise(y) * 1, (x,)),
    "a size decides": lambda self, x: torch.cond(x.shape[1] > 3, self.one, self.two, (x,)),
    "beside a branch that raises": checked,
}


@pytest.mark.sweep(11)
@pytest.mark.parametrize("case", RIGHT)
def test_each_branch_is_taken_as_the_model_takes_it(case):
    model = does(RIGHT[case])
    traced = fxopt.trace(model, (X,), dynamic_shapes={"args": ({0: Dim.AUTO},)})
    assert any(isinstance(n.target, Conditional) for n in traced.graph.nodes) == (
        "size" not in case or case == "sizes"
    )
    assert traced.state_dict().keys() == model.state_dict().keys()
    for graph in (traced, copy.deepcopy(traced), *([] if "raises" in case else [pickled(traced)])):
        for x in (X, -X, X.abs(), -X.abs(), X[:1].abs(), -X[:1].abs()):
            torch.testing.assert_close(graph(x), model(x), rtol=0, atol=1e-12)


def pickled(graph):
    return pickle.loads(pickle.dumps(graph))


@pytest.mark.parametrize("sign", [1, -1])
def test_the_gradients_of_a_branch_that_is_not_taken_are_zeros(sign):
    model = does(RIGHT["layers"])
    traced = fxopt.trace(model, (X,))
    found = []
    for module in (model, traced):
        x = (sign * X.abs()).requires_grad_()
        module(x).square().sum().backward()
        found.append([x.grad, *(p.grad for p in model.parameters())])
        model.zero_grad()
    assert len(found[0]) == len(found[1])
    for mine, its in zip(*found, strict=True):
        torch.testing.assert_close(mine, its)


def test_both_branches_are_graphs_with_what_they_use_as_operands():
    traced = fxopt.trace(does(RIGHT["layers"]), (X,))
    (node,) = (node for node in traced.graph.nodes if isinstance(node.target, Conditional))
    names = [argument.target for argument in node.args[2:]]
    assert names == ["one.weight", "one.bias", "two.0.weight", "two.0.bias", "two.1.weight", "two.1.bias"]
    calls = [n for n in node.target.false_branch.graph.nodes if n.op not in ("placeholder", "output")]
    assert [n.name.rstrip("_0123456789") for n in calls] == ["linear", "layer_norm", "relu"]
    assert list(calls[0].meta["nn_module_stack"])[-1] == "two.0"
    assert not [*node.target.true_branch.parameters(), *node.target.true_branch.buffers()]


def test_passes_work_around_a_cond_and_are_undone():
    def forward(self, x):
        y = torch.cond(positive(x), self.one, self.two, (self.norm(self.one(x)).contiguous(),))
        return (y / 2.0).contiguous() + self.noise(y)

    model = does(forward)
    traced = fxopt.trace(model, (X,))
    for each in (fxopt.FoldBatchNorms(), fxopt.ChangeTrueDivToMulByInverse(), fxopt.RemoveIdentity()):
        changed = each(copy.deepcopy(traced))
        for x in (X.abs(), -X.abs()):
            torch.testing.assert_close(changed(x), model(x), rtol=0, atol=1e-12)
        assert each(changed, reverse=True).code == traced.code


def test_a_cond_is_not_saved():
    with pytest.raises(fxopt.SaveError, match="a branch on a value, whose sides are graphs of their own"):
        fxopt.save(fxopt.trace(does(RIGHT["layers"]), (X,)), "never")


def keeps(self, x):
    made = []

    def one(y):
        made.append(y * 2)
        return made[0] + 1

    return torch.cond(positive(x), one, torch.sin, (x,)) + made[0]


def shares(self, x):
    made = []

    def one(y):
        made.append(y * 2)
        return made[0] + 1

    return torch.cond(positive(x), one, lambda y: y + made[0], (x,))


def without_gradients(y):
    with torch.no_grad():
        return y * 2


REFUSED = {
    "other shapes": (lambda self, x: torch.cond(positive(x), torch.sin, torch.mean, (x,)), "shapes"),
    "what it gets": (lambda self, x: torch.cond(positive(x), lambda y: y, torch.sin, (x,)), "return a clone"),
    "a part of it": (
        lambda self, x: torch.cond(positive(x), lambda y: y[:], torch.sin, (x,)),
        "return a clone",
    ),
    "no tensor": (lambda self, x: torch.cond(positive(x), lambda y: 1, lambda y: 2, (x,)), "no tensor"),
    "a decision": (
        lambda self, x: torch.cond(positive(x), lambda y: y * 2 if y.mean() > 0 else y, torch.sin, (x,)),
        "decides on",
    ),
    "a write": (
        lambda self, x: torch.cond(positive(x), lambda y: y.add_(1) * 2, torch.sin, (x.clone(),)),
        "writes into a tensor from outside",
    ),
    "a normalisation in training": (
        lambda self, x: torch.cond(positive(x), self.norm.train(), torch.sin, (x,)),
        "writes into a tensor from outside|assigns",
    ),
    "a mode": (
        lambda self, x: torch.cond(positive(x), without_gradients, torch.sin, (x,)),
        "switches a mode",
    ),
    "a size from values": (
        lambda self, x: torch.cond(positive(x), lambda y: y[y > 0].sum() * y, torch.sin, (x,)),
        "depends on values",
    ),
    "what a branch leaves": (keeps, "out of sight"),
    "what the other branch made": (shares, "the other one has made"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_branch_cannot_hold_is_a_trace_error(case):
    forward, message = REFUSED[case]
    with pytest.raises(fxopt.TraceError, match=message):
        fxopt.trace(does(forward), (X,), verify=False)
