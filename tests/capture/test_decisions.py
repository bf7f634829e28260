"""Decisions on values with default arguments: refused with the line, or settled where one side raises."""

import contextlib
import operator

import pytest
import torch
from torch import nn
from torch.export import Dim

import fxopt
from fxopt.capture.runs.forward_run import ForwardRun
from fxopt.capture.runtime.checks import check_outcome
from tests.capture.models import asserted
from tests.modules import module

X = torch.tensor([[1.0, -2.0, 3.0, 4.0], [0.5, 6.0, -7.0, 8.0], [1.0, 2.0, 3.0, -4.0]])
ROWS = ({0: Dim.AUTO},)


def checks(gm):
    return [node for node in gm.graph.nodes if node.target is check_outcome]


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


def captured_right_or_refused(model, examples, others):
    """Some releases of torch can capture `model`: then the graph computes what the model computes on `others`."""
    try:
        gm = fxopt.trace(model, examples)
    except fxopt.TraceError:
        return
    for inputs in (examples, *others):
        torch.testing.assert_close(gm(*inputs), model(*inputs), rtol=0, atol=0)


def branch(self, x):
    positive = self.dense(x).sum() > 0
    if positive:
        return x
    return [-x]


def branch_on_input(self, x):
    return x if x.bool().all() else [-x]


def branch_on_number(self, x):
    n = x.argmax().item()
    return x if n > 2 else [-x]


def branch_on_flag(self, x):
    return x if (x > 5).any().item() is True else [-x]


def branch_on_count(self, x):
    found = torch.nonzero(x > 0)
    return x if found.shape[0] > 2 else [-x]


@pytest.mark.parametrize(
    ("forward", "line", "origin"),
    [
        (branch, "`if positive:`", r"the result 'gt', made in module 'the root', at .*test_decisions.py:\d+"),
        (branch_on_input, r"`return x if x\.bool\(\)\.all\(\) else \[-x\]`", "the result 'all_1'"),
        (branch_on_number, r"`return x if n > 2 else \[-x\]`", "the result 'item'"),
        (
            branch_on_flag,
            r"`return x if \(x > 5\)\.any\(\)\.item\(\) is True else \[-x\]`",
            "the result 'any_1'",
        ),
        (branch_on_count, r"`return x if found\.shape\[0\] > 2 else \[-x\]`", "the result 'nonzero'"),
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
        fxopt.trace(module(lambda self, x: x if x else [-x]), (torch.ones(()),))


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


def drawn_if_long(self, x, n):
    n = n.max().item()
    return torch.rand(n, generator=torch.Generator()) if n > 3 else x[:n] * 2


def drawn_if_positive(self, x, n):
    return torch.rand(3, generator=torch.Generator()) if (n > 3).any() else x[: n.max()] * 2


def test_of_numbers_the_side_that_can_be_captured_is_taken_and_checked():
    """As a guard is put on a free size; what is in other tensors is no number of a size."""
    x, short, long = torch.randn(5, dtype=torch.float64), torch.tensor([1, 3]), torch.tensor([4, 2])
    model = module(drawn_if_long)
    traced = fxopt.trace(model, (x, short))
    for n in (short, short - 1, short.flip(0)):
        assert torch.equal(traced(x, n), model(x, n))
    with pytest.raises(fxopt.GuardError, match=r"it was False.*if n > 3"):
        traced(x, long)
    with pytest.raises(fxopt.TraceError, match=r"if n > 3"):
        fxopt.trace(module(drawn_if_long), (x, long))
    with pytest.raises(fxopt.TraceError, match=r"if \(n > 3\).any\(\)"):
        fxopt.trace(module(drawn_if_positive), (x, short))


def test_an_assertion_of_torch_stays_in_the_graph():
    def forward(self, x):
        torch._assert((x > -100).all(), "too small")
        return x * 2

    gm = fxopt.trace(module(forward), (X,))
    assert torch.equal(gm(X), X * 2)
    with pytest.raises(AssertionError, match="too small"):
        gm(X - 1000)


def test_an_assertion_on_sizes_is_a_guard_and_no_node():
    def forward(self, x):
        torch._assert(x.dim() == 2, "not a matrix")
        torch._assert(x.shape[0] > 1, message="one row")
        return x * 2

    gm = fxopt.trace(module(forward), (X,), dynamic_shapes={"x": {0: torch.export.Dim.AUTO}})
    assert [node.target for node in gm.graph.nodes if node.op == "call_function"] == [operator.mul]
    assert torch.equal(gm(X), X * 2)
    with pytest.raises(fxopt.GuardError):
        gm(X[:1])
    with pytest.raises(fxopt.TraceError, match="not a matrix"):
        fxopt.trace(module(forward), (X[0],))


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


def test_a_side_that_asks_again_before_it_raises_is_left_out_with_one_of_its_errors():
    gm = fxopt.trace(module(nested), (X,))
    assert right_or_refused(gm, module(nested), X, X + 50) == [False, False]
    for x in (X + 200, X * 1e3):
        with pytest.raises(fxopt.GuardError, match="the model raises ValueError: (large|both)"):
            gm(x)


def test_both_sides_are_the_model_s_own():
    def fails_under_capture(self, x):
        return x.numpy() if x.sum() > 0 else x  # a limit of the capture, not an error of the model

    with pytest.raises(fxopt.TraceError, match=r"makes a numpy array of a tensor.*test_decisions\.py:\d+"):
        fxopt.trace(module(fails_under_capture), (X,))


@pytest.fixture
def captures(monkeypatch):
    """The captures that are made."""
    made, record = [], ForwardRun.record
    monkeypatch.setattr(ForwardRun, "record", lambda self: made.append(self) or record(self))
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


def test_an_error_whose_text_has_sizes_is_the_same_at_size_one():
    def forward(self, x):
        # By name: torch.compile, in another test of this process, turns the checks of all distributions off.
        return torch.distributions.Categorical(logits=x, validate_args=True).log_prob(x.argmax(-1))

    model = module(forward)
    traced = fxopt.trace(model, (torch.randn(2, 6, 8),), dynamic_shapes=({0: Dim.AUTO},))
    for rows in (1, 2, 5):
        x = torch.randn(rows, 6, 8)
        torch.testing.assert_close(traced(x), model(x))
    # From torch 2.15 on, the check of the distribution is a call in the graph.
    with pytest.raises(
        (fxopt.GuardError, RuntimeError), match="the model raises ValueError|Expected parameter"
    ):
        traced(torch.full((1, 6, 8), torch.nan))


def listed(self, x):
    found = x[x > 0][:, None]
    assert list(found.size()) == [x.shape[0] * 2, 1], "not half of them"
    return found * 2


def many_asserted(self, x):
    for number in range(60):
        assert (x > number - 1000).all(), f"layer {number}"
        x = x + 1
    return x


@pytest.mark.parametrize(("forward", "bad"), [(listed, -X.abs()), (many_asserted, X - 10_000)])
def test_an_assertion_costs_no_run(forward, bad):
    model, x = module(forward), torch.tensor([[1.0, -1, 2, -2]] * 3)
    traced = fxopt.trace(model, (x,))
    assert traced.meta["forward_runs"] == 1
    assert torch.equal(traced(x), model(x))
    with pytest.raises(AssertionError):
        model(bad)
    with pytest.raises(fxopt.GuardError, match="the model raises AssertionError"):
        traced(bad)


def asserted_among_others(self, x):
    assert x.sum() > 0 or x.max() > 3
    return x * 2


def asserted_not(self, x):
    assert not (x < -1000).any()
    return x * 2


def asserted_of_a_call(self, x):
    assert chosen(x) is not None
    return x * 2


def chosen(x):
    return x if (x > 0).all() else -x


def asserted_in_a_context(self, x):
    with contextlib.suppress(AssertionError):
        assert (x > 0).all()
        return x * 2
    return x * 3


def test_an_assertion_that_a_context_catches_is_a_branch():
    """The branch is not captured here: pytest has written another statement in its place."""
    with pytest.raises(fxopt.TraceError, match="decides on the value"):
        fxopt.trace(module(asserted_in_a_context), (torch.ones(2),))


def test_a_question_is_no_assertion_where_the_statement_asks_more():
    x = torch.tensor([[-9.0, 4.0]])
    with pytest.raises(fxopt.TraceError, match="decides on the value"):
        fxopt.trace(module(asserted_among_others), (x,))
    for forward in (asserted_not, asserted_of_a_call):
        model = module(forward)
        traced = fxopt.trace(model, (x,))
        assert torch.equal(traced(x), model(x))
        assert torch.equal(traced(x + 20), model(x + 20))


class Picks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2 if x.sum() > 0 else x + 1

    @staticmethod
    def backward(ctx, grad):
        return grad


def layer_that_decides(self, x):
    if x.sum() > 1e9:
        raise ValueError("too large")
    return x - 1 if (x > 0).any() and x.max() > 1 else torch.relu(x)


class Writes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if x.sum() > 0:
            return x * 5
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad


def calls_layer(self, x):
    y = x + 1
    z = self.layer(y)
    z.add_(1)
    return y * z


@pytest.mark.parametrize(
    "layer",
    [
        layer_that_decides,
        lambda self, x: Picks.apply(x),
        lambda self, x: Picks.apply(x).relu(),
    ],
)
@pytest.mark.parametrize("dynamic_shapes", [None, ROWS])
def test_a_layer_is_one_node_whatever_it_decides(layer, dynamic_shapes):
    model = module(calls_layer, layer=module(layer))
    traced = fxopt.trace(model, (X.clone(),), dynamic_shapes=dynamic_shapes, leaf_modules=["layer"])
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == [
        "input_guard",
        "layer",
    ]
    for x in (X, -X - 9, X / 9):
        torch.testing.assert_close(traced(x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (
            lambda self, x: x[:1] if x.sum() > 0 else x,
            "the layer 'layer' decides on a value, and its outputs differ",
        ),
        (
            lambda self, x: x if x.sum() > 0 else x * 2,
            "the layer 'layer' decides on a value, and its outputs differ",
        ),
        (
            lambda self, x: x[:] if x.sum() > 0 else x,
            "the layer 'layer' decides on a value, and its outputs differ",
        ),
        (
            lambda self, x: (x.mul_(2) if x.sum() > 0 else x) + 1,
            "the layer 'layer' decides on a value, and its outputs differ",
        ),
        (
            lambda self, x: (x, 1) if x.sum() > 0 else (x, 2),
            "the layer 'layer' decides on a value, and its outputs differ",
        ),
        (
            lambda self, x: (x + 1, x) if x.sum() > 0 else (x, x + 1),
            "the layer 'layer' decides on a value, and its outputs differ",
        ),
        (
            lambda self, x: x if any(x.sum() > i for i in range(9)) else x + 1,
            "decides on the value of a tensor",
        ),
    ],
)
def test_a_layer_whose_decisions_change_more_than_values_is_refused(layer, reason):
    model = module(lambda self, x: self.layer(x), layer=module(layer))
    with pytest.raises(fxopt.TraceError, match=reason):
        fxopt.trace(model, (X,), leaf_modules=["layer"])


def test_a_function_that_writes_its_input_for_one_outcome_is_refused():
    with pytest.raises(fxopt.TraceError, match="the autograd.Function Writes decides on a value"):
        fxopt.trace(module(lambda self, x: Writes.apply(x * 1)), (X,))


def test_under_inference_mode_a_layer_that_decides_is_refused():
    layer = module(lambda self, x: x[:1] * 2 if x.sum() < 0 else x * 5)
    model = module(lambda self, x: self.layer(x) + self.layer(x).shape[0], layer=layer)
    for x in (torch.ones(2, 3), -torch.ones(2, 3)):
        with torch.inference_mode(), pytest.raises(fxopt.TraceError, match="decides on the value"):
            fxopt.trace(model, (x,), leaf_modules=["layer"])


def test_a_number_that_a_decision_gives_is_not_known_afterwards():
    def forward(self, x):
        number = self.layer(x)
        return x * number if number > 1 else -x

    layer = module(lambda self, x: torch.tensor(1) if x.sum() > 0 else torch.tensor(2))
    model = module(forward, layer=layer)
    traced = fxopt.trace(model, (X,), leaf_modules=["layer"])
    for x in (X, -X - 9):
        torch.testing.assert_close(traced(x), model(x), rtol=0, atol=0)
