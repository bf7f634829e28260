"""A handler of a signal may raise while a graph is made, as at the end of a time limit: the caller gets that."""

import functools
import signal
import warnings

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import fxopt
from fxopt import engines

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


class Handler:
    def __call__(self, number, frame):
        raise LateError from ValueError("limit")


def late(text, number, frame):
    raise LateError from ValueError(text)


@pytest.mark.parametrize("handler", [Handler(), Handler().__call__, functools.partial(late, "limit")])
def test_handlers_of_every_kind_are_known(handler):
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(LateError) as caught:
            fxopt.trace(Interrupted(False).eval(), (X,))
        assert repr(caught.value.__cause__) == "ValueError('limit')"
        try:
            handler(signal.SIGUSR1, None)
        except LateError:  # a second try is no time limit
            fxopt.trace(nn.Sequential(nn.Linear(4, 4), Raises()).eval(), (X,), verify=False)
    finally:
        signal.signal(signal.SIGUSR1, before)


class Raises(nn.Module):
    """One side of its branch raises an error whose cause has that error as its own cause."""

    def forward(self, x):
        first, second = ValueError("first"), ValueError("second")
        first.__cause__, second.__cause__ = second, first
        if x.sum() > 100:
            raise first
        return x


@torch.no_grad()
def test_an_engine_that_is_interrupted_while_it_is_made(monkeypatch):
    def interrupted(body, inputs):
        signal.getsignal(signal.SIGUSR1)(signal.SIGUSR1, None)

    monkeypatch.setitem(engines.ENGINES, "inductor", (interrupted, True))
    before = signal.signal(signal.SIGUSR1, Handler())
    try:
        with pytest.raises(LateError):
            fxopt.optimize(nn.Linear(4, 4).eval(), (X,), engine="inductor", tune=False)
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
