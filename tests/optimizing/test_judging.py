"""A graph is used where its outputs are those of the model but for rounding."""

import contextlib
import copy
import functools

import pytest
import torch
from torch import nn

import fxopt
from fxopt.capture import trace_method
from fxopt.compare import unlike
from fxopt.optimizing import prepare
from fxopt.optimizing.inputs import Inputs
from fxopt.optimizing.trial import Trial, Unused
from fxopt.testing import randomise
from tests.modules import module
from tests.optimizing.graphs import NEEDS_KERNELS, reasons

pytestmark = [
    pytest.mark.filterwarnings("ignore:falls back to eager"),
    pytest.mark.usefixtures("no_timing"),
    NEEDS_KERNELS,
]
X = torch.randn(4, 16)


@torch.no_grad()
def test_a_graph_that_may_refuse_after_a_write_is_not_used():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x, buffer):
            buffer.add_(1)
            if (x > 100).any():
                raise ValueError("too large")
            return self.layer(x) + buffer

    model = randomise(Writes().eval())
    fast, buffer = fxopt.optimize(model), torch.zeros(16)
    for _ in range(2):
        fast(X, buffer)
    assert torch.equal(buffer, torch.full((16,), 2.0))
    with pytest.raises(ValueError, match="too large"):
        fast(X * 1e6, buffer)
    assert torch.equal(buffer, torch.full((16,), 3.0))
    assert "when it has already written into one of them" in str(fast.report)


@pytest.mark.parametrize(
    ("own", "found", "where"),
    [
        ({"a": torch.ones(2)}, {}, "the outputs differ in structure: 'output.a' is gone"),
        (
            {"a": torch.ones(2)},
            {"a": torch.ones(3)},
            "output.a: expected torch.float32 [2], got torch.float32 [3]",
        ),
        ({"a": torch.tensor([1, 2])}, {"a": torch.tensor([1, 3])}, "output.a: other numbers"),
        ([1.0, None], [1.0, 2], "output[1]: expected None, got 2"),
        ([1, None], [2, None], "output[0]: expected 1, got 2"),
        ([1.0, None], [2.0, None], ""),
        ({"a": torch.ones(2)}, {"a": torch.zeros(2)}, ""),
    ],
)
def test_outputs_must_be_alike_before_errors_are_compared(own, found, where):
    assert unlike(own, found) == where


def test_a_graph_with_another_number_is_not_used():
    exact = own = {"a": torch.tensor([3.0, 4.0]), "n": 2.0}
    prepare._judge(exact, own, {**own, "n": 2.0 * (1 + 1e-7)}, "float32", {}, lambda: own)
    with pytest.raises(Unused, match="less exact"):
        prepare._judge(exact, own, {**own, "n": 2.1}, "float32", {}, lambda: own)
    with pytest.raises(Unused, match="output.n: expected 2.0, got 200.0"):
        prepare._judge(exact, own, {**own, "n": 200.0}, "bfloat16", {}, lambda: own)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_graph_with_other_outputs_is_not_used(precision):
    exact = {"a": torch.tensor([3.0, 4.0, -1e30]).double(), "n": 2}
    own = {"a": torch.tensor([3.0, 4.0, -1e30]), "n": 2}
    prepare._judge(exact, own, {"a": own["a"] * (1 + 1e-7), "n": 2}, precision, {}, lambda: own)
    with pytest.raises(Unused, match="differ from eager's: output.n: expected 2, got 3"):
        prepare._judge(exact, own, {**own, "n": 3}, precision, {}, lambda: own)
    with pytest.raises(Unused, match="less exact|cosine"):  # beside what fills masked places
        prepare._judge(
            exact, own, {"a": torch.tensor([4.0, -3.0, -1e30]), "n": 2}, precision, {}, lambda: own
        )


def test_what_overflows_in_the_model_is_no_measure():
    exact, own = {"a": torch.ones(4).double()}, {"a": torch.tensor([1, 1, 1, float("inf")])}
    with pytest.raises(Unused, match="less exact than eager's"):
        prepare._judge(exact, own, {"a": torch.zeros(4)}, "float32", {}, lambda: own)


@pytest.mark.parametrize(
    ("spread", "wrong"), [(1e-4, 0.0), (1e-4, 1e-3), (1e-6, 0.0), (0.3, 0.0), (0.3, 1e-3)]
)
def test_an_output_that_nearly_cancels_is_judged_by_what_rounding_does_to_it(spread, wrong):
    """Eager happens to be exact; other rounding moves its first output by `spread`, and the graph's by a half of that."""
    exact = [torch.full((1,), 1e-3).double(), torch.ones(4).double()]
    own = [each.float() for each in exact]
    found = [own[0] * (1 + spread / 2), own[1] * (1 + wrong)]
    runs = iter([own, [own[0] * (1 - spread), own[1]], own, own])
    with pytest.raises(Unused, match="less exact than eager's") if wrong else contextlib.nullcontext():
        prepare._judge(exact, own, found, "float32", {}, lambda: next(runs))


@pytest.mark.parametrize(
    ("kind", "precision", "least", "most"),
    [
        ("matmul", "none", 0, 1e-5),
        ("matmul", "tf32", 1e-5, 1e-3),
        ("matmul", "bf16", 1e-4, 1e-2),
        ("conv", "tf32", 0, 1e-5),
    ],
)
def test_other_rounding_errors_are_those_of_a_copy(kind, precision, least, most, request):
    backend = getattr(torch.backends.mkldnn, kind)
    request.addfinalizer(functools.partial(setattr, backend, "fp32_precision", backend.fp32_precision))
    backend.fp32_precision = precision
    model, x = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)).eval(), torch.randn(3, 16)
    model[0].weight.data[0, 0] = 0.0
    state = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        trial = Trial(model, fxopt.trace(model, (x,)), Inputs((x,), {}))
        own, moved = model(x), [trial.moved() for _ in range(3)]
    assert all(least < (each - own).abs().max() < most for each in moved)
    assert not torch.equal(moved[0], moved[1])
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_other_rounding_errors_reach_what_the_forward_assigns():
    class Assigns(nn.Linear):
        def forward(self, x):
            self.auxiliary = super().forward(x) * 2
            return self.auxiliary + 1

    model, x = Assigns(16, 16).eval(), torch.randn(3, 16)
    with torch.no_grad():
        trial = Trial(model, trace_method(model, "forward", (x,), {}, None), Inputs((x,), {}))
        value, (assigned,) = trial.moved()
        assert torch.equal(value, assigned + 1)
        own = trial.own()
    assert 0 < (assigned - own[1][0]).abs().max() < 1e-5


def test_a_graph_that_computes_something_else_is_not_used():
    """Its run in float64 does the same, so that only the model itself can tell."""

    def forward(self, x):
        y = x.contiguous()
        return self.layer(y * 1.2 if y is x else y)  # `y is x` is no, for a capture

    model = randomise(module(forward, layer=nn.Linear(16, 16)))
    fast = fxopt.optimize(model, (X,))
    with torch.no_grad():
        assert torch.equal(fast(X), model(X))
    (reason,) = reasons(fast)
    assert reason.startswith("its graph computes something else than the model")
