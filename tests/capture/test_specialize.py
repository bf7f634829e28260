"""Decisions on values with `specialize=True`: taken on the example inputs, and checked."""

import copy
import pickle

import pytest
import torch
from torch import nn

import fxopt
from tests.capture.test_decisions import (
    ROWS,
    X,
    branch,
    branch_on_count,
    branch_on_input,
    branch_on_number,
    checks,
    not_too_small,
    right_or_refused,
)
from tests.modules import module


def numbers(self, x):
    n = int(x.argmax())
    scale = float(x.max())
    return x[:, : 1 + n % 3] * scale


def listed(self, x):
    return torch.cat([x[i : i + 1].repeat(n + 1, 1) for i, n in enumerate((x > 0).sum(1).tolist())])


def looped(self, x):
    for _ in range(x.argmax() % 3):
        x = x * 2
    return x


def looped_over_found(self, x):
    for index in torch.nonzero(x[0] > 0):
        x = x * 2 + index
    return x.new_ones(len(torch.unique(x))) + x.sum()


def compared(self, x):
    if torch.equal(x, x.abs()) or torch.allclose(x, x * 0):
        return x
    return -x if 3.0 in x else x * 3


def through_numpy(self, x):
    return x - torch.from_numpy((x > 0).long().numpy() * 2)


def sizes(self, x):
    found = x[x > 0]
    values = torch.unique(x)
    if found.shape[0] == values.shape[0]:
        return found
    return found * 2


def one_hot(self, x):
    return nn.functional.one_hot((x > 0).long())


@pytest.mark.parametrize(
    "forward",
    [
        branch,
        branch_on_input,
        branch_on_number,
        branch_on_count,
        numbers,
        looped,
        compared,
        sizes,
        through_numpy,
    ],
)
@pytest.mark.parametrize("free", [None, ROWS])
def test_a_decision_is_taken_on_the_example_inputs_and_checked(forward, free):
    torch.manual_seed(0)
    model = module(forward, dense=nn.Linear(4, 4))
    gm = fxopt.trace(model, (X,), dynamic_shapes=free, specialize=True)
    assert checks(gm)
    inputs = [
        -X,
        X * 0,
        X.abs(),
        torch.arange(1.0, 13).view(3, 4),
        *([X[:2], torch.cat([X, X])] if free else []),
    ]
    for again in (gm, copy.deepcopy(gm), pickle.loads(pickle.dumps(gm))):
        again.graph.eliminate_dead_code()
        again.recompile()
        assert right_or_refused(again, model, X) == [False]
        assert any(right_or_refused(again, model, *inputs))


def test_a_refusal_says_where_and_what_was_decided():
    gm = fxopt.trace(module(numbers), (X,), specialize=True)
    with pytest.raises(
        fxopt.GuardError,
        match=r"it was 7 when.*is 0 now.*test_specialize\.py:\d+: `n = int\(x\.argmax\(\)\)`",
    ):
        gm(-X + torch.eye(3, 4) * 10)
    assert "`scale = float(x.max())`" in repr(gm.input_guard)


def test_sizes_that_no_decision_fixes_stay_free():
    model = module(branch_on_input)
    gm = fxopt.trace(model, (X,), dynamic_shapes=ROWS, specialize=True)
    assert right_or_refused(gm, model, X[:1], X[:2], torch.cat([X, X])) == [False, False, False]


def test_a_number_that_only_becomes_an_argument_is_no_decision():
    model = module(lambda self, x: x * x.max().item() + x.argmax().item())
    gm = fxopt.trace(model, (X,), specialize=True)
    assert not checks(gm)
    assert right_or_refused(gm, model, X, -X) == [False, False]
    gm = fxopt.trace(module(listed), (X,), specialize=True)
    assert right_or_refused(gm, module(listed), X, -X) == [False, False]


def test_a_decision_between_writes_sees_the_values_of_its_time():
    def forward(self, x):
        y = x.clone()
        view = y[0]
        before = bool(y.sum() > 0)
        view.fill_(-100)
        after = bool(y.sum() > 0)
        return y if before and not after else -y

    gm = fxopt.trace(module(forward), (X,), specialize=True)
    assert [node.args[1] for node in checks(gm)] == [True, False]
    assert torch.equal(gm(X), module(forward)(X))


def test_a_decision_inside_modes_is_that_of_eager():
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.dense(x)
            if (y == y.bfloat16()).all():
                x = x + 1
        with torch.no_grad():
            z = self.dense(x)
            if z.float().sum() > 1000:
                return x
        return self.dense(x)

    model = module(forward, dense=nn.Linear(4, 4))
    gm = fxopt.trace(model, (X,), specialize=True)
    assert [node.args[1] for node in checks(gm)] == [True, False]
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.equal(gm(X), model(X))
    assert gm(X).requires_grad


def test_running_the_example_changes_nothing_of_the_user():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.dropout = nn.Dropout(0.5)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            x.mul_(2)
            self.count += 1
            y = self.dropout(self.norm(x))
            return y if y.sum() > -1000 else x

    model = Model().train()
    x, state, before = X.clone(), torch.get_rng_state(), copy.deepcopy(model.state_dict())
    gm = fxopt.trace(model, (x,), specialize=True)
    assert torch.equal(x, X)
    assert torch.equal(state, torch.get_rng_state())
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    twin = copy.deepcopy(model)
    expected, given = X.clone(), X.clone()
    torch.manual_seed(0)
    result = gm(given)
    torch.manual_seed(0)
    assert torch.equal(result, twin(expected))
    assert torch.equal(given, expected)
    assert model.count == 1


def test_a_forward_that_writes_a_parameter_is_not_run_on_examples():
    def forward(self, x):
        with torch.no_grad():
            self.dense.weight.mul_(2)
        return x if x.sum() > 0 else -x

    model = module(forward, dense=nn.Linear(4, 4))
    weight = model.dense.weight.clone()
    with pytest.raises(fxopt.TraceError, match=r"writes into a parameter.*specialize=True is not possible"):
        fxopt.trace(model, (X,), specialize=True)
    assert torch.equal(model.dense.weight, weight)


def test_an_error_on_the_example_inputs_is_the_model_s():
    with pytest.raises(fxopt.TraceError, match="ValueError: too small"):
        fxopt.trace(module(not_too_small), (X - 1000,), specialize=True)


def test_a_tensor_that_is_written_through_a_view_is_asked_again():
    def forward(self, x):
        total = x.sum()
        before = bool(total)
        total.view(1).zero_()
        return x if before and not total else -x

    gm = fxopt.trace(module(forward), (X,), specialize=True)
    assert [node.args[1] for node in checks(gm)] == [True, False]
    assert torch.equal(gm(X), X)


class NamedExperts(nn.Module):
    """Finds a layer by a name that holds a number of a tensor."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleDict({f"expert_{i}": nn.Linear(4, 4) for i in range(3)})

    def forward(self, x):
        chosen = x[0].argmax()
        if x.sum() > 1000:
            raise ValueError(f"the sum is {x.sum()}")
        return self.experts[f"expert_{chosen}"](x)


def test_a_name_that_holds_a_value_is_a_decision():
    model = NamedExperts()
    first, same, other = torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(2, 4)
    first[0, 1] = same[0, 1] = other[0, 2] = 1.0
    with pytest.raises(fxopt.TraceError, match=r"test_specialize.py:\d+: `return self.experts\[.*'argmax'"):
        fxopt.trace(model, (first,))
    gm = fxopt.trace(model, (first,), dynamic_shapes=ROWS, specialize=True)
    assert right_or_refused(gm, model, first, same, other) == [False, False, True]


def test_a_value_in_the_message_of_an_error_is_no_decision():
    def forward(self, x):
        count = (x > 0).sum()
        torch._assert(count >= 0, f"{count} elements")
        return x * 2

    model = module(forward)
    for options in ({}, {"specialize": True}):
        gm = fxopt.trace(model, (X,), **options)
        assert not any(right_or_refused(gm, model, X, -X, X * 0))


def test_a_view_written_under_inference_mode_is_asked_again():
    def forward(self, x):
        with torch.inference_mode():
            flags = (x > 100) * 1.0
            first = flags[0, 0]
            before = bool(first)
            flags.add_(1)
            after = bool(first)
        return x * (1 + before * 2 + after * 4)

    model, x = module(forward), torch.ones(3, 4)
    assert torch.equal(fxopt.trace(model, (x,), specialize=True)(x), model(x))
