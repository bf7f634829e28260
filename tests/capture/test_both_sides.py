"""An `if` of Python on a value: where both sides do something, a node of the graph holds both, and runs one."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.export import Dim

import fxopt
from fxopt.capture.runs.forward_run import ForwardRun
from fxopt.capture.runtime.conditional import IfElse
from fxopt.testing import randomise

X = torch.randn(3, 4, dtype=torch.float64)
ROWS = {"args": ({0: Dim.AUTO},)}
# Of these, each side of each branch below takes some.
CALLS = [X, -X, X.abs(), -X.abs(), X[:1], -X[:1], X[:1].abs(), torch.randn(7, 4).double(), X * 1e3, X * 0]


class Does(nn.Module):
    """Has layers, and as its forward what is given."""

    def __init__(self, forward):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.noise, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(4)
        self.first, self.second = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        self._forward = forward
        self.calls, self.table = 0, None

    def forward(self, *args):
        return self._forward(self, *args)


def does(forward):
    return randomise(Does(forward).double()).eval()


def nodes(traced):
    return [node for node in traced.graph.nodes if isinstance(node.target, IfElse)]


def layers_in_sides(graph):
    for node in graph.nodes:
        for side in vars(node.target).values() if isinstance(node.target, IfElse) else ():
            yield from side.graph.find_nodes(op="call_module")
            yield from layers_in_sides(side.graph)


def left(module, parameters, *inputs):
    """The outputs of a call, its inputs afterwards and all gradients; or the text of its error."""
    inputs = [x.clone() for x in inputs]
    floating = [x.requires_grad_() for x in inputs if x.is_floating_point()]
    for parameter in parameters:
        parameter.grad = None
    torch.manual_seed(0)
    try:
        outputs = torch.utils._pytree.tree_leaves(module(*inputs))
    except ValueError as error:
        return str(error)
    except fxopt.GuardError as error:
        return str(error).partition("ValueError: ")[2].partition(".")[0]
    losses = [output.square().sum() for output in outputs if output.requires_grad]
    if losses:
        sum(losses).backward()
    return [*outputs, *inputs, *(x.grad for x in floating), *(parameter.grad for parameter in parameters)]


def assert_as_model(traced, model, calls):
    """Compare outputs, and gradients, which a side that was not taken has none of."""
    for call in calls:
        found = [left(module, list(model.parameters()), *call) for module in (model, traced)]
        if isinstance(found[0], str):
            assert found[1] == found[0]
            continue
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-11, equal_nan=True)


def kept(self, x):
    h = self.one(x)
    if x.sum() > 0:
        h = x
    return h + x


def replaced(self, x):
    h = x
    if x.sum() > 0:
        h = self.one(x)
    return self.two(h + x)


def early(self, x):
    if x.sum() > 0:
        return self.one(x), x
    y = self.two(x)
    return y, y * 2


def nested(self, x):
    if x.sum() > 0:
        if x[0, 0] > 0:
            return self.one(x)
        return self.two(x)
    return x * 3


def one_after_the_other(self, x):
    x = self.one(x) if x.sum() > 0 else self.two(x)
    x = x * 2 if x.mean() > 0 else x - 1
    return self.one(x)


def in_each_layer(self, x):
    for layer in self.layers:
        x = layer(x) if x.sum() > 0 else layer(x).neg() + 1
    return x


def tables(self, x):
    table = torch.tensor([1.0, 2, 3, 4]) if x.sum() > 0 else torch.tensor([4.0, 3, 2, 1])
    return x * table + torch.tensor([7.0, 7, 7, 7])


def raises_on_one_side(self, x):
    if x.sum() > 0:
        if x.abs().max() > 100:
            raise ValueError("large")
        return self.one(x)
    return x


def raises_first(self, x):
    if x.abs().max() > 100:
        raise ValueError("large")
    return self.one(x) if x.sum() > 0 else x


def one_answer_twice(self, x):
    found = (x > 0).any().item()
    y = self.two(self.one(x) if found else self.two(x))
    return y * 2 if found else y


def without_gradients(self, x):
    if x.sum() > 0:
        with torch.no_grad():
            x = self.one(x)
    return x * 2


def mode_from_a_value(self, x):
    with torch.set_grad_enabled(bool(x.sum() > 0)):
        y = self.one(x)
    return y + x


def writes_of_its_own(self, x):
    if x.sum() > 0:
        y = x.clone()
        y[0] = 0
        y.mul_(2)
    else:
        y = x - 1
    return y


def counted(self, x):
    n = 0
    if x.sum() > 0:
        n += 1
    if x.mean() > 0.1:
        n += 1
    return x * n


def draws(self, x):
    y = x + torch.rand(4) if x.sum() > 0 else x
    return y * torch.rand(4)


def chosen_later(self, x):
    positive = bool(x.sum() > 0)
    y, z = self.one(x), x * 2
    return y if positive else z


def size_of_a_side(self, x):
    y = x[x > 0] if x.sum() > 0 else torch.masked_select(x, x < 0)
    return x.new_ones(y.shape[0]).sum() + y.sum() * x


def counts(self, x):
    self.calls += 1
    return self.one(x) if x.sum() > 0 else x * 2


def asserted(self, x):
    if x.sum() > 0:
        assert x.shape[0] < 50
        return self.one(x)
    return x * 2


def asserted_otherwise(self, x):
    if x.sum() > 0:
        return self.one(x)
    assert x.shape[0] < 50
    return x * 2


def turned_before(self, x):
    y = x[x > 0]
    n = len(y)
    y.unsqueeze_(0)
    return x * 2 if x.sum() > 0 else x * n


RIGHT = {
    "sizes from before a write": (turned_before, 1),
    "an answer of Python": (lambda self, x: x * 2 if torch.equal(x, x.abs()) else self.one(x), 1),
    "values of later": (chosen_later, 1),
    "a size of a side": (size_of_a_side, 1),
    "a power of a negative number": (
        lambda self, x: (-1) ** torch.arange(4) * x if x.sum() > 0 else x * (-2.0) ** x,
        1,
    ),
    "a counter": (counts, 1),
    "a limit of one side": (asserted, 1),
    "a limit of the other side": (asserted_otherwise, 1),
    "layers": (lambda self, x: self.one(x) if x.sum() > 0 else self.two(x).relu(), 1),
    "a value that is there": (kept, 1),
    "a value that is made": (replaced, 1),
    "return": (early, 1),
    "nested": (nested, 1),
    "one after the other": (one_after_the_other, 2),
    "in each layer": (in_each_layer, 3),
    "numbers": (lambda self, x: self.one(x) * (2 if x.sum() > 0 else 3), 1),
    "parameters": (lambda self, x: self.one(x) * (self.first if x.sum() > 0 else self.second), 1),
    "constants": (tables, 1),
    "sizes that values decide": (lambda self, x: (y := x[x > 0] if x.sum() > 0 else x[x < 0]).sum() + y, 1),
    "free sizes": (lambda self, x: (x / len(x) if x.sum() > 0 else x * x.shape[0]).reshape(-1), 1),
    "other dtypes": (lambda self, x: (x.float() if x.sum() > 0 else x).double(), 1),
    "other shapes": (lambda self, x: (x.sum() if x.sum() > 0 else x).sum(), 1),
    "a dict": (lambda self, x: {"x": x, "y": x * 2 if x.sum() > 0 else x * 3}, 1),
    "an error on one side": (raises_on_one_side, 1),
    "an error before": (raises_first, 1),
    "one answer twice": (one_answer_twice, 1),
    "a number": (lambda self, x: self.one(x) if (n := x.sum().item()) > 0 else x * n, 1),
    "any number": (lambda self, x: self.one(x) if x.sum() else x, 1),
    "without gradients": (without_gradients, 1),
    "writes of its own": (writes_of_its_own, 1),
    "a count": (counted, 1),
    "random numbers": (draws, 1),
    "layers that do nothing": (lambda self, x: self.noise(x) if x.sum() > 0 else self.norm(x), 1),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("case", RIGHT)
def test_each_side_is_taken_as_the_model_takes_it(case):
    forward, joined = RIGHT[case]
    model = does(forward)
    traced = fxopt.trace(model, (X,), dynamic_shapes=ROWS)
    assert len(nodes(traced)) == joined
    assert traced.state_dict().keys() == model.state_dict().keys()
    assert not list(layers_in_sides(traced.graph))
    assert_as_model(traced, model, [(x,) for x in CALLS])
    copied = copy.deepcopy(model), pickle.loads(pickle.dumps(traced))
    assert_as_model(
        copy.deepcopy(traced).requires_grad_(False), copied[0].requires_grad_(False), [(X,), (-X,)]
    )
    assert_as_model(copied[1].requires_grad_(False), copied[0], [(X,), (-X,)])


def test_no_run_is_repeated(monkeypatch):
    scripts, record = [], ForwardRun.record

    def recorded(self):
        answers = self.request.answers
        scripts.append(([(each.answer, each.otherwise) for each in answers.settled], dict(answers.at_lines)))
        return record(self)

    monkeypatch.setattr(ForwardRun, "record", recorded)
    traced = fxopt.trace(does(lambda self, x: x * self.first if x.sum() > 0 else x - 1), (X,))
    assert nodes(traced)
    assert all(scripts.count(each) == 1 for each in scripts)


def test_layers_of_a_side_are_recorded_call_by_call_and_the_others_stay_layers():
    def forward(self, x):
        return self.norm(self.one(x) if x.sum() > 0 else self.two(x))

    traced = fxopt.trace(does(forward), (X,))
    assert [node.target for node in traced.graph.find_nodes(op="call_module")] == ["input_guard", "norm"]
    (first,) = nodes(traced)
    names = [argument.target for argument in first.args if argument.op == "get_attr"]
    assert names == ["one.weight", "one.bias", "two.0.weight", "two.0.bias", "two.1.weight", "two.1.bias"]
    calls = [n.name for n in first.target.false_branch.graph.nodes if n.op not in ("placeholder", "output")]
    assert calls == ["linear", "layer_norm"]
    for side in (first.target.true_branch, first.target.false_branch):
        assert not [*side.parameters(), *side.buffers()]


def test_a_capture_of_a_branch_checks_what_else_decides_and_lists_it():
    traced = fxopt.trace(does(raises_on_one_side), (X,))
    with pytest.raises(fxopt.GuardError, match="the model raises ValueError: large"):
        traced(X.abs() * 1e3)
    (check,) = [line for line in map(str, fxopt.guards(traced)) if "decides" in line]
    assert "x.abs().max() > 100" in check


@pytest.mark.parametrize("forward", [asserted, asserted_otherwise])
def test_a_limit_of_either_side_is_checked_for_both(forward):
    traced = fxopt.trace(does(forward), (X,), dynamic_shapes=ROWS)
    for sign in (1, -1):
        with pytest.raises(fxopt.GuardError, match="at most 49"):
            traced(torch.full((60, 4), 1.0 * sign).double())


@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_that_one_side_checks_is_checked(sign):
    def forward(self, x):
        n = (x > 0).sum().item()
        if x.sum() * sign > 0:
            return x * 2
        torch._check(n < 9)
        return x * 3

    traced = fxopt.trace(does(forward), (-X.abs(),))
    assert torch.equal(traced(-X.abs()), -X.abs() * (3 if sign > 0 else 2))
    many = torch.ones(3, 4).double()
    many[0, 0] = -100 * sign
    with pytest.raises(fxopt.GuardError, match="the graph assumes"):
        traced(many)


def assumes_in_a_side(self, x):
    if x.sum() > 0:
        return x[0, :3] * 2
    y = x[x > 0]
    return (y + torch.ones(3)) * len(y)


def assumes_behind(self, x):
    y = x[x > 0] if x.sum() > 0 else x[x > 0] * 2
    return (y + torch.ones(3)) * len(y)


@pytest.mark.parametrize("forward", [assumes_in_a_side, assumes_behind])
def test_sizes_of_values_that_a_side_assumes_are_checked(forward):
    model = does(forward)
    three, one = torch.tensor([[[1, 2, 3, -9]], [[1, -2, -3, -4]]], dtype=torch.float64)
    traced = fxopt.trace(model, (three,))
    torch.testing.assert_close(traced(three), model(three), rtol=0, atol=0)
    with pytest.raises(fxopt.GuardError, match="assumes"):
        traced(one)  # which is broadcast


def test_passes_work_around_both_sides_and_are_undone():
    def forward(self, x):
        y = self.norm(self.one(x))
        y = self.two(y) if y.sum() > 0 else y.contiguous()
        return (y / 2.0).contiguous() + self.noise(y)

    model = does(forward)
    traced = fxopt.trace(model, (X,))
    for each in (fxopt.FoldBatchNorms(), fxopt.ChangeTrueDivToMulByInverse(), fxopt.RemoveIdentity()):
        changed = each(copy.deepcopy(traced))
        for x in (X, -X, X.abs(), -X.abs()):
            torch.testing.assert_close(changed(x), model(x), rtol=0, atol=1e-11)
        assert each(changed, reverse=True).code == traced.code


class Chooses(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.one(x) if x.sum() > 0 else self.two(x).relu()
        return y * 2


@pytest.mark.parametrize("compiled", [False, True])
def test_a_compiler_and_an_export_see_torch_cond(compiled):
    model = randomise(Chooses().double()).eval()
    traced = fxopt.trace(model, (X,))
    if compiled:
        made = torch.compile(traced, fullgraph=True, backend="aot_eager")
    else:
        made = torch.export.export(traced, (X,), strict=False).module()
    for x in (X.abs(), -X.abs()):
        torch.testing.assert_close(made(x), model(x), rtol=0, atol=1e-12)


def test_both_sides_are_not_saved(tmp_path):
    with pytest.raises(fxopt.SaveError, match="graphs of their own"):
        fxopt.save(fxopt.trace(does(early), (X,)), tmp_path / "never")


def writes_outside(self, x):
    y = x * 1
    if x.sum() > 0:
        y += 1
    else:
        y -= 1
    return y


def trains(self, x):
    return self.norm.train()(x) if x.sum() > 0 else x


def remembers(self, x):
    self.last = 1 if x.sum() > 0 else 2
    return x


def keeps_a_table(self, x):
    """A call on the one side reads the table that one on the other has made."""
    if x.sum() > 0:
        self.table = torch.arange(4.0) if self.table is None else self.table
        return x + self.table
    self.table = torch.arange(4.0) * 2 if self.table is None else self.table
    return x + self.table * 1


def many(self, x):
    for layer in (*self.layers, *self.layers):
        x = layer(x) if x.sum() > 0 else layer(x).neg() + 1
    return x


def changes_an_input(self, x, given):
    y = x
    if x.sum() > 0:
        y = given["x"] = x * 2
    return y + 1


REFUSED = {
    "a write": writes_outside,
    "a normalisation in training": trains,
    "state": remembers,
    "a table": keeps_a_table,
    "outputs of other kinds": lambda self, x: x if x.sum() > 0 else (x, x),
    "outputs of other dtypes": lambda self, x: x.float() if x.sum() > 0 else x,
    "a number that comes out": lambda self, x: (x, bool(x.sum() > 0)),
    "as many values as values decide": lambda self, x: x if x[x > 2] else -x,
    "several values": lambda self, x: x if torch.linspace(0, 1, 3) * x.sum() else -x,
    "a mode that stays": lambda self, x: [torch.set_grad_enabled(False) if x.sum() > 0 else None, x * 2][1],
    "an object that is changed": lambda self, x: [(d := {"x": x}), d.update(y=x) if x.sum() > 0 else 0][0],
    "too many": many,
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_both_sides_cannot_hold_is_refused_with_the_line_of_the_branch(case):
    with pytest.raises(fxopt.TraceError, match=r"decides on the value of a tensor.*test_both_sides.py:\d+"):
        fxopt.trace(does(REFUSED[case]), (X,))
    assert torch.is_grad_enabled()


def test_a_side_that_changes_a_dict_is_refused():
    with pytest.raises(fxopt.TraceError, match="decides on the value of a tensor"):
        fxopt.trace(does(changes_an_input), (X, {"x": X.clone()}))


def test_constants_of_a_side_have_names_that_the_model_has_not():
    model = does(tables)
    model.register_buffer("_tensor_constant2", torch.ones(2))
    traced = fxopt.trace(model, (X,))
    torch.testing.assert_close(traced.state_dict(), model.state_dict())
    assert_as_model(traced, model, [(x,) for x in (X, X.abs(), -X.abs())])


def test_a_leaf_that_one_side_calls_is_refused():
    with pytest.raises(fxopt.TraceError, match="decides on the value of a tensor"):
        fxopt.trace(does(RIGHT["layers"][0]), (X,), leaf_modules="two")
