"""A forward that cannot be captured, or run, is one clear error: what, where, what to do."""

import logging
import re
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import fxopt
from fxopt.capture.nodes.source_location import is_model_code
from tests.capture.models import InputContainers, Keywords, Point
from tests.modules import module

X = torch.randn(3, 4)


class BranchOnValue(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x
        return [-x]


class BranchOnItem(nn.Module):
    def forward(self, x):
        n = x.argmax().item()
        return x if n > 2 else [-x]


class ReplacesTensor(nn.Module):
    def __init__(self):
        super().__init__()
        self.count = torch.zeros(())

    def forward(self, x):
        self.count = self.count + 1
        return x * self.count


class AssignsGrad(nn.Module):
    def forward(self, x):
        y = x * 2
        y.data = x
        return y


class ReturnsObject(nn.Module):
    def forward(self, x):
        return threading.Lock(), x


class Uncopyable(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = (step for step in ())

    def forward(self, x):
        return x


class Raises(nn.Module):
    def forward(self, x):
        return x @ torch.zeros(9, 9)


class LocalHook(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(4, 4)

    def forward(self, x):
        y = self.dense(x)
        hook = y.register_hook
        hook(lambda grad: grad)
        return y


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (BranchOnValue(), r"decides on the value of a tensor.*test_errors\.py:\d+: `if x\.sum\(\) > 0:`"),
        (BranchOnItem(), r"decides on the value of a tensor.*`return x if n > 2 else \[-x\]`"),
        (ReplacesTensor(), r"assigns to 'count'.*copy_"),
        (AssignsGrad(), r"assigns to the attribute 'data'.*`y\.data = x`"),
        (ReturnsObject(), r"lock"),
        (Uncopyable(), r"Uncopyable cannot be copied"),
        (Raises(), r"forward failed under capture.*`return x @ torch\.zeros\(9, 9\)`"),
        (
            module(lambda m, x: m.b(m.a(x)), a=nn.Linear(4, 4), b=nn.Linear(4, 4, device="meta")),
            r"several devices \(.*cpu.*meta",
        ),
        (LocalHook(), r"calls 'register_hook'"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_cannot_be_a_graph(model, message):
    with pytest.raises(fxopt.TraceError, match=message):
        fxopt.trace(model, (X,))


def test_example_inputs_that_do_not_fit_the_forward():
    with pytest.raises(fxopt.TraceError, match="do not fit Raises.forward.*too many positional"):
        fxopt.trace(Raises(), (X, X))
    with pytest.raises(fxopt.TraceError, match=r"args must be a tuple.*\(x,\)"):
        fxopt.trace(Raises(), X)
    with pytest.raises(
        fxopt.TraceError, match="kwargs must be a dict of example inputs by name, not a tuple"
    ):
        fxopt.trace(Raises(), (), (X,))


def test_options_of_another_kind():
    with pytest.raises(fxopt.TraceError, match=r"dynamic_shapes is True: give a dict .*\['input'\]"):
        fxopt.trace(nn.Linear(4, 4), (X,), dynamic_shapes=True)
    with pytest.raises(fxopt.TraceError, match="leaf_modules has 3, .* Give types"):
        fxopt.trace(nn.Sequential(nn.Linear(4, 4)), (X,), leaf_modules=[3])
    with pytest.raises(fxopt.TraceError, match="pass an instance, `Linear"):
        fxopt.symbolic_trace(nn.Linear)


def test_a_model_of_layers_of_torch_alone_has_no_line():
    """The line that calls `trace` is none of the forward."""
    with pytest.raises(
        fxopt.TraceError, match=r"under capture. In Linear\(in_features=5, .*bias=True\). RuntimeError"
    ):
        fxopt.trace(nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 4)), (X,))
    with pytest.raises(fxopt.TraceError, match="the forward fixes it to 4, at a layer of torch"):
        fxopt.trace(nn.Linear(4, 4), (X,), dynamic_shapes=({1: torch.export.Dim("features")},))


def test_a_child_whose_name_a_graph_module_needs():
    model = nn.Sequential()
    model.add_module("graph", nn.Linear(4, 4))
    with pytest.raises(fxopt.TraceError, match=r"names \['graph'\] of .* clash with .* rename them"):
        fxopt.trace(model, (X,))


def test_an_input_that_is_no_tensor_there():
    gm = fxopt.trace(nn.Linear(4, 4), (X,))
    with pytest.raises(fxopt.GuardError, match="'input' is list; the graph takes a tensor"):
        gm([1.0])
    with pytest.raises(
        fxopt.GuardError, match="'input' is torch.int64; the graph was captured with torch.float32"
    ):
        gm(torch.ones(3, 4, dtype=torch.long))
    with pytest.raises(fxopt.GuardError, match="'input' has 3 dimensions; the graph was captured with 2"):
        gm(torch.ones(1, 3, 4))


def test_a_constant_is_accepted_and_another_value_refused():
    gm = fxopt.trace(Keywords(), (X,), {"scale": 2.0, "extra": X})
    gm(X, scale=2.0, extra=X)
    with pytest.raises(fxopt.GuardError, match=r"'scale' is 3\.0; the graph was captured for 2\.0"):
        gm(X, scale=3.0, extra=X)


def test_a_constant_that_is_the_default_can_be_left_out():
    class Flag(nn.Module):
        def forward(self, x, flag=False):
            return -x if flag else x

    gm = fxopt.trace(Flag(), (X,), {"flag": False})
    assert torch.equal(gm(X), X)
    with pytest.raises(fxopt.GuardError, match="'flag' is True"):
        gm(X, flag=True)
    gm = fxopt.trace(Flag(), (X,), {"flag": True})
    with pytest.raises(TypeError, match="flag"):
        gm(X)


def test_a_container_of_another_form():
    gm = fxopt.trace(InputContainers(), ((X, [X]), {"a": X}, Point(X, X)))
    with pytest.raises(fxopt.GuardError, match=r"'pair\[1\]' has 2 entries; the graph was captured with 1"):
        gm((X, [X, X]), {"a": X}, Point(X, X))
    with pytest.raises(fxopt.GuardError, match=r"'named' has entries \['b'\]"):
        gm((X, [X]), {"b": X}, Point(X, X))
    with pytest.raises(fxopt.GuardError, match=r"'point' is tuple"):
        gm((X, [X]), {"a": X}, (X, X))
    with pytest.raises(fxopt.GuardError, match=r"'point\.y'.*dimension 0 is 2"):
        gm((X, [X]), {"a": X}, Point(X, torch.zeros(2, 4)))


@pytest.mark.parametrize("name", ["class", "None", 'a"b', "a\\b"])
@pytest.mark.parametrize("holder", ["model", "inner"])
def test_a_name_that_fx_cannot_write_is_an_error_that_names_it(name, holder):
    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Module()
            {"model": self, "inner": self.inner}[holder].add_module(name, nn.Linear(4, 4))

        def forward(self, x):
            return {"model": self, "inner": self.inner}[holder]._modules[name](x)

    path = name if holder == "model" else f"inner.{name}"
    with pytest.raises(fxopt.TraceError, match=re.escape(f"uses {path!r}")):
        fxopt.trace(Holds().eval(), (X,))


def test_a_parameter_that_fx_cannot_write_is_an_error_that_names_it():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_parameter("lambda", nn.Parameter(torch.ones(4)))

        def forward(self, x):
            return x * getattr(self, "lambda")

    with pytest.raises(fxopt.TraceError, match="uses 'lambda'"):
        fxopt.trace(Scaled(), (X,))
    model = nn.Sequential(Scaled())
    assert torch.equal(fxopt.trace(model, (X,), leaf_modules=[Scaled])(X), model(X))


@pytest.mark.parametrize("name", ["a b", "0x", "print", "self"])
def test_other_names_are_no_errors(name):
    model = nn.Sequential()
    model.add_module(name, nn.Linear(4, 4))
    assert torch.equal(fxopt.trace(model, (X,))(X), model(X))


@pytest.mark.parametrize("name", ["class", "a b"])
def test_an_input_that_is_no_name_is_an_error(name):
    class Takes(nn.Module):
        def forward(self, **inputs):
            return inputs[name] * 2

    with pytest.raises(fxopt.TraceError, match=f"the input '{name}' has a name that is not valid in Python"):
        fxopt.trace(Takes(), (), {name: X})


def test_an_input_with_the_name_of_another_is_an_error():
    class Takes(nn.Module):
        def forward(self, *inputs, **named):
            return inputs[0] * named["inputs"]

    with pytest.raises(fxopt.TraceError, match="the input 'inputs' has a name .* that another input has"):
        fxopt.trace(Takes(), (X,), {"inputs": X})


def test_an_error_is_raised_and_not_logged_as_well(monkeypatch):
    class Wrong(nn.Module):
        def forward(self, x):
            return x.topk(9).values

    logged = []
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "callHandlers", logged.append)
    with pytest.raises(fxopt.TraceError, match="k not in range"):
        fxopt.trace(Wrong(), (X,))
    assert logged == []


class Doubles(nn.Module):
    def forward(self, x):
        return x.relu() * 2


@pytest.mark.parametrize("used", ["nodes.call_targets._method", "recording.recorder.canonical"])
def test_an_error_of_the_capture_itself_is_not_blamed_on_the_model(used, monkeypatch):
    monkeypatch.setattr(f"fxopt.capture.{used}", None)
    with pytest.raises(
        fxopt.TraceError, match="fxopt itself fails on Doubles, with TypeError: 'NoneType' object is not"
    ):
        fxopt.trace(Doubles(), (X,))


def test_no_file_of_the_library_is_the_models():
    assert is_model_code(__file__)
    assert not any(is_model_code(str(file)) for file in Path(fxopt.__file__).parent.rglob("*.py"))


def test_a_model_that_calls_itself_without_end():
    model = module(lambda m, x: m(m.layer(x)), layer=nn.Linear(4, 4))
    with pytest.raises(fxopt.TraceError, match="the forward failed under capture.*RecursionError"):
        fxopt.trace(model, (X,))


class Holds(nn.Module):
    """Has something of each kind under a name."""

    def __init__(self, name, held):
        super().__init__()
        self.name = name
        if isinstance(held, torch.Tensor):
            self.register_buffer(name, held)
        else:
            self.add_module(name, held)

    def forward(self, x):
        held = getattr(self, self.name)
        return x * held if isinstance(held, torch.Tensor) else held(x)


@pytest.mark.parametrize("name", ["code", "graph", "meta", "config", "device"])
@pytest.mark.parametrize("held", [torch.ones(4), nn.Linear(4, 4)])
def test_a_name_that_a_graph_module_has_is_an_error(name, held):
    if isinstance(held, torch.Tensor) and name == "device":
        held = nn.ReLU()
    with pytest.raises(fxopt.TraceError, match=f"names \\['{name}'\\] of .* clash with"):
        fxopt.trace(Holds(name, held).eval(), (X,), verify=False)


def test_an_input_whose_name_the_code_uses_is_an_error():
    class Takes(nn.Module):
        def forward(self, inf, torch):
            return inf.masked_fill(inf > 0, float("inf")) + torch

    class Adds(nn.Module):
        def forward(self, inf, torch):
            return inf + torch

    with pytest.raises(fxopt.TraceError, match="the input 'inf' has a name that code"):
        fxopt.trace(Takes(), (X, X), verify=False)
    assert torch.equal(fxopt.trace(Adds(), (X, X))(X, X), X + X)


def test_the_guard_sees_the_inputs_before_the_graph_asks_for_their_devices():
    def forward(m, x, y):
        return torch.ones(3, device=x.device) + y

    traced = fxopt.trace(module(forward), (X, torch.ones(3)))
    nodes = [node.op for node in traced.graph.nodes]
    assert nodes[:3] == ["placeholder", "placeholder", "call_module"]
    with pytest.raises(fxopt.GuardError, match="input 'x'"):
        traced([1.0], torch.ones(3))
