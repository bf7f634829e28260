"""A handler of a signal may raise while a graph is made, as at the end of a time limit: the caller gets that."""

import signal
import warnings

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import fxopt

X = torch.ones(2, 4)


class LateError(Exception):
    pass


class Interrupted(nn.Module):
    """Each of its forwards under capture gets a signal."""

    def __init__(self, branches):
        super().__init__()
        self.layer, self.branches = nn.Linear(4, 4), branches

    def forward(self, x):
        if self.branches and x.sum() > 0:
            x = x + self.layer(x)
        if isinstance(x, FakeTensor):
            signal.getsignal(signal.SIGUSR1)(
                signal.SIGUSR1, None
            )  # at once, as Python does it some lines later
        return self.layer(x)


@pytest.mark.parametrize("branches", [False, True])
@torch.no_grad()
def test_what_a_handler_of_a_signal_raises_reaches_the_caller(branches):
    limits = []

    def late(number, frame):
        if limits:
            raise limits.pop()

    before = signal.signal(signal.SIGUSR1, late)
    try:
        model = Interrupted(branches).eval()
        fast = fxopt.optimize(model, tune=False)
        limits.append(LateError())
        with pytest.raises(LateError):
            fast(X)
        assert torch.allclose(fast(X), model(X), atol=1e-6)
        assert fast.report[-1].reason is None
        limits.append(LateError())
        with pytest.raises(LateError):
            fxopt.trace(Interrupted(branches).eval(), (X,))
    finally:
        signal.signal(signal.SIGUSR1, before)


@torch.no_grad()
def test_the_reason_for_nested_tensors_is_told_once():
    fast = fxopt.optimize(nn.Linear(4, 4).eval(), tune=False)
    nested = torch.nested.nested_tensor([X, X], layout=torch.jagged)
    with pytest.warns(fxopt.FallbackWarning, match="such as a nested or sparse one"):
        assert fast(nested).is_nested
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxopt.FallbackWarning)
        assert fast(nested).is_nested
    assert "nested" in str(fast.report)
