"""`optimize` shows on a terminal what takes long, and leaves the model as it was when it is interrupted."""

import io
import time

import pytest
import torch
from torch import nn

import fxopt
from fxopt.optimizing import prepare
from fxopt.optimizing import progress as progress_module

X = torch.randn(4, 16)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def layers():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).eval()


@pytest.mark.parametrize(("shown", "terminal"), [(True, True), (True, False), (False, True)])
def test_what_takes_long_is_shown_on_a_terminal(shown, terminal, monkeypatch):
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(progress_module.sys, "stderr", stream)
    monkeypatch.setattr(progress_module, "_AFTER", 0.05)
    with progress_module.progress("optimize Net", shown) as enter:
        enter("capture")
        time.sleep(0.3)
    text = stream.getvalue()
    assert ("optimize Net: capture, 0 s" in text) == (shown and terminal)
    assert not text or text.endswith(progress_module._CLEAR)  # the line is gone at the end


def test_what_is_short_is_not_shown(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(progress_module.sys, "stderr", stream)
    with progress_module.progress("optimize Net", True) as enter:
        enter("capture")
    assert stream.getvalue() == ""


@pytest.mark.parametrize("stage", ["trace_method", "run_in_float64", "lowered", "speedup"])
@torch.no_grad()
def test_an_interrupt_leaves_the_model_as_it_was(stage, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    model = layers()
    state, attributes, wanted = dict(model.state_dict()), set(vars(model)), model(X)
    with monkeypatch.context() as context:
        context.setattr(prepare, stage, interrupted)
        with pytest.raises(KeyboardInterrupt):
            fxopt.optimize(model, (X,))
        fast = fxopt.optimize(model)
        with pytest.raises(KeyboardInterrupt):
            fast(X)
    assert set(vars(model)) == attributes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(X), wanted)
    torch.testing.assert_close(fast(X), wanted)
    assert len(fast.report) == 1
