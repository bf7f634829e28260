"""Decisions on values: refused with the line, settled where one side raises, or taken by the example inputs."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.export import Dim

import fxopt
from fxopt.capture.checks import check_decision
from fxopt.capture.forward import Capture
from tests.capture.models import asserted
from tests.capture.test_silent_changes import module

X = torch.tensor([[1.0, -2.0, 3.0, 4.0], [0.5, 6.0, -7.0, 8.0], [1.0, 2.0, 3.0, -4.0]])
ROWS = ({0: Dim.AUTO},)


def checks(gm):
    return [node for node in gm.graph.nodes if node.target is check_decision]


def right_or_refused(gm, model, *inputs):
    """Compare on each input; return for which of them the graph raised GuardError."""
    refused = []
    for x in inputs:
        try:
            result = gm(x)
        except fxopt.GuardError:
            refused.append(True)
        else:
            torch.testing.assert_close(result, model(x), rtol=0, atol=0)
            refused.append(False)
    return refused


# --- by default


def branch(self, x):
    positive = self.dense(x).sum() > 0
    if positive:
        return x
    return -x


def branch_on_input(self, x):
    return x if x.bool().all() else -x


def branch_on_number(self, x):
    n = x.argmax().item()
    return x if n > 2 else -x


def branch_on_count(self, x):
    found = torch.nonzero(x > 0)
    return x if found.shape[0] > 2 else -x


@pytest.mark.parametrize(
    ("forward", "line", "origin"),
    [
        (branch, "`if positive:`", r"the result 'gt', made in module 'the root', at .*test_decisions.py:\d+"),
        (branch_on_input, r"`return x if x\.bool\(\)\.all\(\) else -x`", "the result 'all_1'"),
        (branch_on_number, "`return x if n > 2 else -x`", "the result 'item'"),
        (branch_on_count, r"`return x if found\.shape\[0\] > 2 else -x`", "the result 'nonzero'"),
    ],
)
def test_a_decision_on_a_value_is_refused_with_its_line_and_origin(forward, line, origin):
    with pytest.raises(
        fxopt.TraceError,
        match=rf"decides on the value.*test_decisions\.py:\d+: {line}.*{origin}.*specialize=True",
    ):
        fxopt.trace(module(forward, dense=nn.Linear(4, 4)), (X,))


def test_a_question_about_an_input_names_it():
    with pytest.raises(fxopt.TraceError, match="The value is the input 'x'"):
        fxopt.trace(module(lambda self, x: x if x else -x), (torch.ones(()),))


def not_too_small(self, x):
    if not (x > -100).all():
        raise ValueError("too small")
    return x * 2


def counted(self, x):
    found = x[x > 0]
    if found.numel() < 1:
        raise ValueError(f"{found.numel()} found")
    return found * 2


@pytest.mark.parametrize(
    ("forward", "error"),
    [
        (not_too_small, "ValueError: too small"),
        (asserted, "AssertionError: too large"),
        (counted, "ValueError: .* found"),
    ],
)
@pytest.mark.parametrize("sizes", [None, ROWS])
def test_the_side_that_does_not_raise_is_taken_and_checked(forward, error, sizes):
    model = module(forward)
    gm = fxopt.trace(model, (X,), dynamic_shapes=sizes)
    assert torch.equal(gm(X), model(X))
    if sizes:
        assert torch.equal(gm(X[:2]), model(X[:2]))
        assert torch.equal(gm(X[:1]), model(X[:1]))
    bad = {"too small": X - 1000, "too large": X + 1e7, ".* found": -X.abs()}[error.split(": ")[1]]
    with pytest.raises((ValueError, AssertionError)):
        model(bad)
    with pytest.raises(fxopt.GuardError, match=rf"the model raises {error}.*\.py:\d+"):
        gm(bad)


def test_an_assertion_of_torch_stays_in_the_graph():
    def forward(self, x):
        torch._assert((x > -100).all(), "too small")
        return x * 2

    gm = fxopt.trace(module(forward), (X,))
    assert torch.equal(gm(X), X * 2)
    with pytest.raises(AssertionError, match="too small"):
        gm(X - 1000)


def several(self, x):
    if (x > 100).any():
        raise ValueError("large")
    for _ in range(3):
        if not (x > -100).all():
            raise ValueError("small")
        x = x + 1
    return x


def nested(self, x):
    if (x > 100).any():
        if (x < -100).any():
            raise ValueError("both")
        raise ValueError("large")
    return x


def test_several_questions_are_settled_one_after_the_other():
    gm = fxopt.trace(module(several), (X,))
    assert len(checks(gm)) == 4
    assert right_or_refused(gm, module(several), X, X + 50) == [False, False]
    with pytest.raises(fxopt.GuardError, match="ValueError: large"):
        gm(X + 200)
    with pytest.raises(fxopt.GuardError, match="ValueError: small"):
        gm(X - 200)


def test_a_side_that_asks_again_before_it_raises_is_not_taken_to_raise():
    with pytest.raises(fxopt.TraceError, match=r"`if \(x > 100\)\.any\(\):`"):
        fxopt.trace(module(nested), (X,))


def test_both_sides_are_the_model_s_own():
    def fails_under_capture(self, x):
        return x.numpy() if x.sum() > 0 else x  # a limit of the capture, not an error of the model

    with pytest.raises(fxopt.TraceError, match="decides on the value"):
        fxopt.trace(module(fails_under_capture), (X,))


@pytest.fixture
def captures(monkeypatch):
    """The captures that are made."""
    made, record = [], Capture.record
    monkeypatch.setattr(Capture, "record", lambda self: made.append(self) or record(self))
    return made


def test_a_question_for_which_torch_raises_takes_no_capture_of_its_own(captures):
    def forward(self, x, sizes):
        parts = [nn.functional.unfold(x[:, :, :h, :w], 2, stride=2).flatten(1) for h, w in sizes.tolist()]
        return torch.cat(parts, dim=1)

    x, model = torch.randn(1, 3, 8, 8), module(forward)
    gm = fxopt.trace(model, (x, torch.tensor([[4, 6], [2, 8]])))
    assert len(captures) == 1
    for sizes in ([[4, 6], [2, 8]], [[2, 2], [3, 5]]):
        assert torch.equal(gm(x, torch.tensor(sizes)), model(x, torch.tensor(sizes)))
    for sizes in ([[4, 6], [0, 8]], [[1, 2], [2, 2]]):
        with pytest.raises(RuntimeError):
            model(x, torch.tensor(sizes))
        with pytest.raises((fxopt.GuardError, RuntimeError)):
            gm(x, torch.tensor(sizes))


def test_a_capture_goes_on_where_the_other_side_raises(captures):
    gm = fxopt.trace(module(not_too_small), (X,))
    assert len(captures) == 3  # up to the question, and each answer
    with pytest.raises(fxopt.GuardError, match="the model raises ValueError: too small"):
        gm(X - 1000)


def test_a_question_that_is_asked_at_a_size_of_1_alone_ends_the_capture_there(captures):
    def forward(self, x):
        if x.shape[0] == 1 and x.sum() > 0:
            return x + 1
        return x * 2

    model = module(forward)
    gm = fxopt.trace(model, (X,), dynamic_shapes=ROWS)
    assert len(captures) == 2  # a graph for all other sizes has no check of an answer
    assert torch.equal(gm(X[:2]), model(X[:2]))
    with pytest.raises(fxopt.GuardError, match="dimension 0 is 1"):
        gm(X[:1])


@torch.library.custom_op("fxopt_tests::positive", mutates_args=())
def positive(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] > 5:
        raise ValueError("too many")
    return x[x > 0].clone()


@positive.register_fake
def _(x):
    number = torch.library.get_ctx().new_dynamic_size()
    torch._check(number <= x.shape[0])
    if x.shape[0] > 5:
        raise ValueError("too many")
    return x.new_empty(number)


def test_what_a_call_gives_where_it_is_tried_is_not_kept():
    def forward(self, x):
        for row in x[x[:, 0] > 0]:
            x = x * row
        return x

    model = module(forward)
    gm = fxopt.trace(model, (X,), specialize=True)
    assert right_or_refused(gm, model, X, X * 2, -X) == [False, False, True]


def test_a_call_that_asks_after_it_has_made_a_number(captures):
    model = module(lambda self, x: torch.ops.fxopt_tests.positive(x[x > -2]) + 1)
    gm = fxopt.trace(model, (torch.arange(9.0) - 6,))
    assert not any(capture.request.answers.settled for capture in captures)
    for x in (torch.arange(9.0) - 6, torch.arange(9.0) - 9):
        assert torch.equal(gm(x), model(x))
    with pytest.raises(fxopt.GuardError, match="the model raises ValueError: too many"):
        gm(torch.arange(9.0))


def different(x):
    return x[: 3 if x.shape[0] > 3 else 1].clone()


def never(x):
    raise ValueError("too many" if x.shape[0] > 3 else "too few")


@pytest.mark.parametrize("fake", [different, never])
def test_a_call_that_raises_for_neither_answer_or_for_both_is_left_open(fake):
    def copied(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    operator = torch.library.custom_op(f"fxopt_tests::{fake.__name__}", copied, mutates_args=())
    operator.register_fake(fake)
    with pytest.raises(fxopt.TraceError, match=r"test_decisions\.py:\d+.*x.shape\[0\] > 3"):
        fxopt.trace(module(lambda self, x: operator(x[x > 0])), (X,))


def test_a_caught_error_is_no_error_of_the_model():
    def forward(self, x):
        try:
            assert (x > 0).all()
        except AssertionError:
            return -x
        return x

    with pytest.raises(fxopt.TraceError, match="decides on the value"):
        fxopt.trace(module(forward), (X,))


# --- specialize=True


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
        fxopt.GuardError, match=r"it was 7 when.*is 0 now.*test_decisions\.py:\d+: `n = int\(x\.argmax\(\)\)`"
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
    with pytest.raises(fxopt.TraceError, match=r"test_decisions.py:\d+: `return self.experts\[.*'argmax'"):
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
