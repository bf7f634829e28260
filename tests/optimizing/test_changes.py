"""After a change of the model its graphs follow, or falls back to eager."""

import collections
import copy
import pickle
import types
import uuid
from typing import ClassVar, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxopt
from fxopt.capture import trace_method
from fxopt.optimizing import dispatch, prepare
from fxopt.optimizing.inputs import Inputs
from fxopt.optimizing.trial import Trial
from fxopt.submodules import GRAPHS
from fxopt.testing import randomise
from tests.modules import module
from tests.optimizing.graphs import NEEDS_KERNELS, reasons

pytestmark = [
    pytest.mark.filterwarnings("ignore:falls back to eager"),
    pytest.mark.usefixtures("no_timing"),
    NEEDS_KERNELS,
]
X = torch.randn(4, 16)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.norm(self.layer(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.last = Inner(), nn.Linear(16, 16)
        self.flag, self.scale = False, 2.0
        self.config = types.SimpleNamespace(negate=False, weights=torch.ones(16))
        self.register_buffer("shift", torch.zeros(16))

    def forward(self, x):
        y = self.last(self.inner(x)) * self.scale + self.shift
        y = torch.relu(y) if self.flag else y
        y = y * self.config.weights
        return -y if self.config.negate else y


def set_up():
    model = randomise(Model().eval())
    fast = fxopt.optimize(model, (X,), tune=False)
    with torch.no_grad():
        fast(X)
    return model, fast


def replaced(parent, name, value):
    setattr(parent, name, randomise(value.eval(), seed=5) if isinstance(value, nn.Module) else value)


CHANGES = {
    "a flag": lambda m: setattr(m, "flag", True),
    "a number": lambda m: setattr(m, "scale", 3.0),
    "a number, to an equal one of another type": lambda m: setattr(m, "scale", True),
    "the config": lambda m: setattr(m.config, "negate", True),
    "another config": lambda m: setattr(
        m, "config", types.SimpleNamespace(negate=True, weights=torch.ones(16))
    ),
    "an array in the config": lambda m: setattr(m.config, "weights", 2 * torch.ones(16)),
    "a buffer": lambda m: m.shift.add_(1),
    "another buffer": lambda m: setattr(m, "shift", torch.ones(16)),
    "another layer": lambda m: replaced(m, "last", nn.Linear(16, 16)),
    "another layer inside": lambda m: replaced(m.inner, "layer", nn.Sequential(nn.Linear(16, 16))),
    "another parameter": lambda m: replaced(m.inner.layer, "weight", nn.Parameter(torch.randn(16, 16))),
    "no bias": lambda m: setattr(m.inner.layer, "bias", None),
    "statistics": lambda m: m.inner.norm.running_mean.add_(1),
    "a hook": lambda m: m.inner.register_forward_hook(lambda module, args, output: output + 1),
    "a hook of a layer": lambda m: m.last.register_forward_hook(lambda module, args, output: output + 1),
    "a forward": lambda m: setattr(m.inner, "forward", lambda x: x),
    "assigned weights": lambda m: m.load_state_dict(
        {n: torch.rand_like(v) if v.is_floating_point() else v for n, v in m.state_dict().items()},
        assign=True,
    ),
    "other memory": lambda m: setattr(m.last.weight, "data", torch.randn(16, 16)),
    "weights from a vector": lambda m: nn.utils.vector_to_parameters(
        torch.rand(sum(p.numel() for p in m.parameters())), m.parameters()
    ),
    "a child there and back": lambda m: m.last.to(torch.float16).float(),
    "float64": lambda m: m.double(),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("of", ["fast", "model"])
@torch.no_grad()
def test_changes_are_followed(change, of):
    model, fast = set_up()
    subject = fast if of == "fast" else model
    CHANGES[change](subject)
    x = X.double() if change == "float64" else X
    wanted = Model.forward(fast, x)
    assert torch.allclose(fast(x), wanted, atol=1e-5)
    assert not torch.equal(wanted, Model.forward(set_up()[0], X).to(wanted.dtype)) or "equal" in change


CONTAINERS = {
    "a number in a dict": lambda m: m.scaling.update(a=3.0),
    "a name more in a dict": lambda m: m.scaling.update(b=3.0),
    "a number in a list in a tuple": lambda m: m.nested[0].append(3.0),
    "a number in a dict in a list": lambda m: m.deep[0].update(scale=3.0),
    "a number in a set": lambda m: m.kinds.add(3.0),
    "a tensor in a list": lambda m: m.tables[0].mul_(3),
    "another tensor in a list": lambda m: m.tables.__setitem__(0, torch.full((16,), 3.0)),
    "a tensor in a tuple in a dict": lambda m: m.deep[0]["tables"][0].mul_(3),
    "a number under a name that modules have": lambda m: m.deep[0]["training"].append(3.0),
    "the order of layers in a ModuleDict": lambda m: m.branches.update({"a": m.branches.pop("a")}),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("change", CONTAINERS)
@torch.no_grad()
def test_changes_in_containers_are_followed(change):
    def scaled(m, x):
        scale = sum(m.scaling.values()) + sum(m.kinds) + sum(m.nested[0]) + m.deep[0]["scale"]
        scale = scale + sum(m.deep[0]["training"])
        for branch in m.branches.values():
            x = branch(x)
        return m.layer(x) * scale * (2 * m.tables[0]) * (2 * m.deep[0]["tables"][0])

    model = module(
        scaled,
        layer=nn.Linear(16, 16),
        branches=nn.ModuleDict({"a": nn.ReLU(), "b": nn.Linear(16, 16)}),
        scaling={"a": 1.0},
        kinds={1.0},
        nested=([2.0],),
        deep=[{"scale": 1.0, "training": [1.0], "tables": (torch.ones(16),)}],
        tables=[torch.ones(16)],
    )
    fast = fxopt.optimize(model, tune=False)
    before = fast(X)
    CONTAINERS[change](model)
    wanted = scaled(model, X)
    assert (wanted - before).abs().max() > 0.1
    torch.testing.assert_close(fast(X), wanted)
    assert reasons(fast)[0] is None


def shifted(module, args, output):
    return output + 1


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "change", [name for name in CHANGES if "hook" not in name and name not in ("a forward", "float64")]
)
@torch.no_grad()
def test_copies_have_what_was_changed(change):
    _, fast = set_up()
    CHANGES[change](fast)
    fast.register_forward_hook(shifted)
    wanted = Model.forward(fast, X) + 1
    for copied in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert copied.last is not fast.last
        assert torch.allclose(copied(X), wanted, atol=1e-5)
        assert reasons(copied) == [None]
        CHANGES["a buffer"](copied)
        assert torch.allclose(copied(X), Model.forward(copied, X) + 1, atol=1e-5)


@pytest.mark.parametrize("change", ["float64", "assigned weights"])
@torch.no_grad()
def test_the_model_gets_the_tensors_of_the_outermost_module_too(change):
    model, fast = set_up()
    CHANGES[change](fast)
    assert fxopt.undo(fast) is model
    assert model.shift is fast.shift
    x = X.double() if change == "float64" else X
    torch.testing.assert_close(model(x), fast(x))


@torch.no_grad()
def test_what_the_model_has_compiled_is_no_detour():
    model = randomise(Model().eval())
    model.compile(backend="eager")
    model.inner.compile(backend="eager")
    fast = fxopt.optimize(model, (X,), tune=False)
    assert reasons(fast) == [None]
    fast.flag = True
    torch.testing.assert_close(fast(X), Model.forward(fast, X))
    assert model._compiled_call_impl is not None


@pytest.mark.parametrize("called", [False, True])
def test_adapters_that_are_put_in_later_have_gradients(called):
    model = randomise(Model().eval()).requires_grad_(False)
    fast = fxopt.optimize(model, (X,) if called else (), tune=False)
    adapter = randomise(nn.Linear(16, 16))
    fast.inner.layer = nn.Sequential(model.inner.layer, adapter)
    fast(X).sum().backward()
    assert adapter.weight.grad is not None


@torch.no_grad()
def test_a_child_in_training_mode_is_not_that_of_the_graph():
    model, fast = set_up()
    model.inner.train()
    torch.manual_seed(0)
    found = fast(X)
    assert (found != Model.forward(fast, X)).any()  # dropout draws
    model.inner.eval()
    assert torch.allclose(fast(X), model(X), atol=1e-5)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("fused", [False, True])
def test_training_of_the_module_is_followed(optimizer, fused):
    _, fast = set_up()
    step = optimizer(fast.parameters(), lr=1e-3, fused=fused)
    for _ in range(2):
        with torch.no_grad():
            before = fast(X)
        fast(X).square().sum().backward()
        step.step()
        step.zero_grad()
        with torch.no_grad():
            wanted = Model.forward(fast, X)
            assert (fast(X) - wanted).norm() < 1e-5 * wanted.norm()
            assert (fast(X) - before).norm() > 1e-4 * wanted.norm()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_a_step_that_leaves_the_last_number_of_a_weight_is_followed(optimizer):
    fast = fxopt.optimize(
        randomise(nn.Sequential(nn.ReLU(), nn.Linear(16, 16, bias=False))).eval(), (X,), tune=False
    )
    step, x = optimizer(fast.parameters(), lr=0.1, fused=True), X.clone()
    x[:, -1] = -1  # its gradient is 0
    with torch.no_grad():
        fast(X)
    fast(x).square().sum().backward()
    step.step()
    with torch.no_grad():
        torch.testing.assert_close(fast(X), fast[1](fast[0](X)))


@pytest.mark.parametrize("fused", [False, True])
def test_a_compiled_step_is_followed(fused):
    model, fast = set_up()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=fused)
    step = torch.compile(optimizer.step, backend="aot_eager")
    for _ in range(2):
        model(X).square().sum().backward()
        step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(fast(X), model(X))


@torch.no_grad()
@pytest.mark.parametrize(("length", "noticed"), [(1000, True), (1001, False)])
def test_lists_are_watched_up_to_a_length(length, noticed):
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.numbers = [1.0] * length

        def forward(self, x):
            return x * self.numbers[-1]

    model = Listed().eval()
    fast = fxopt.optimize(model, (X,), tune=False)
    model.numbers[-1] = 2.0
    assert torch.equal(fast(X), 2 * X) == noticed
    fast.refresh()
    assert torch.equal(fast(X), 2 * X)


@torch.no_grad()
def test_functional_call_takes_the_weights_it_is_given():
    _, fast = set_up()
    wanted, made = fast(X), list(fast.report)
    others = {name: torch.zeros_like(value) for name, value in fast.named_parameters()}
    assert not torch.func.functional_call(fast, others, (X,)).any()
    assert torch.equal(fast(X), wanted)
    assert all(one is other for one, other in zip(fast.report, made, strict=True)), "it is captured again"


@torch.no_grad()
def test_a_graph_is_not_of_weights_that_were_there_for_one_call(monkeypatch):
    monkeypatch.setattr(prepare, "speedup", lambda *_: 0.5)
    model = nn.Sequential(nn.Linear(16, 16)).eval()
    fast = fxopt.optimize(model, (X[0],))
    for _ in range(3):
        fast(X[0])  # there is no graph, and so it is not asked at each call if the model has changed
    monkeypatch.setattr(prepare, "speedup", lambda *_: 1.5)
    others = {name: torch.zeros_like(value) for name, value in fast.named_parameters()}
    assert not torch.func.functional_call(fast, others, (X,)).any()
    assert torch.allclose(fast(X), model(X), atol=1e-6)


@torch.no_grad()
def test_forward_mode_gradients_are_those_of_the_model():
    model, fast = set_up()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(X, torch.ones_like(X))
        found, wanted = (torch.autograd.forward_ad.unpack_dual(m(dual)).tangent for m in (fast, model))
    assert torch.allclose(found, wanted)


@torch.no_grad()
def test_not_a_number_stays_so():
    _, fast = set_up()
    fast.flag = True
    x = X.clone()
    x[0] = float("nan")
    assert fast(x)[0].isnan().all()
    assert not fast(x)[1:].isnan().any()
    assert {each.reason for each in fast.report} == {None}


@torch.no_grad()
def test_a_class_that_was_optimized_can_be_used_as_one():
    fast = fxopt.optimize(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), (X,))
    assert torch.equal(fast[:2](X), F.relu(fast[0](X)))
    assert str(fast[:1].report) == "no graph yet: call the module, or pass example inputs to optimize"
    made = type(fast)(nn.Linear(16, 2))
    assert made(X).shape == (4, 2)
    copy.deepcopy(made).double()


@torch.no_grad()
def test_an_attribute_called_report_stays():
    model = nn.Sequential(nn.Linear(16, 16)).eval()
    model.report = nn.Linear(2, 2)
    assert fxopt.optimize(model, (X,)).report is model.report


def test_what_has_no_forward_to_capture_is_refused():
    with pytest.raises(fxopt.TraceError, match="compiled by TorchScript"):
        fxopt.optimize(torch.jit.trace(nn.Linear(16, 16).eval(), X))

    class Doubling(nn.Module):
        def __call__(self, x):
            return super().__call__(x) * 2

    with pytest.raises(fxopt.TraceError, match=r"wrapped in OptimizedModule; pass what it wraps"):
        fxopt.optimize(torch.compile(nn.Linear(16, 16).eval()))
    with pytest.raises(fxopt.PassError, match="Doubling has a __call__ of its own"):
        fxopt.optimize(Doubling().eval())


@torch.no_grad()
def test_a_bias_that_is_broadcast_is_added():
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh()).eval()
    model[0].bias = nn.Parameter(torch.ones(1))
    fast = fxopt.optimize(model, (X,), tune=False)
    assert reasons(fast) == [None]
    torch.testing.assert_close(fast(X), model(X))


@torch.no_grad()
def test_a_write_into_a_tensor_that_is_no_buffer_is_followed():
    model = randomise(
        module(lambda m, x: m.layer(x) * m.scale, layer=nn.Linear(16, 16), scale=torch.ones(16))
    )
    fast = fxopt.optimize(model, (X,), tune=False)
    model.scale.mul_(3)
    torch.testing.assert_close(fast(X), model(X))


@torch.no_grad()
def test_a_model_that_is_another_one_at_each_call_runs_itself_and_says_so():
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU()).eval()
    fast = fxopt.optimize(model, (X,), tune=False)

    def change_and_call(count):
        for _ in range(count):
            model[0].weight.mul_(1.01)
            torch.testing.assert_close(fast(X), model(X))

    with pytest.warns(fxopt.FallbackWarning, match="changes often, last in a tensor: it gets") as caught:
        change_and_call(8)
    assert len(caught) == 1
    assert reasons(fast) == []
    calls = next(number for number in range(20_000) if fast(X) is not None and reasons(fast) == [None])
    assert calls > 2
    fast(input=X)  # the same graph takes it, without waiting
    assert [kind for kind, _ in getattr(fast, GRAPHS).made()] == [(1, (), ()), (0, ("input",), ())]


@pytest.mark.parametrize("name", ["requests", "log", "seen"])
@torch.no_grad()
def test_a_model_that_changes_often_says_in_what(name):
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU()).eval()
    model.requests, model.log, model.seen = 0, {"loss": 0.0}, []
    fast = fxopt.optimize(model, (X,), tune=False)
    changed = {"requests": "'requests'", "log": "'loss'", "seen": "a container"}[name]

    def change_and_call(number):
        model.requests += name == "requests"
        model.log["loss"] += name == "log"
        model.seen += [number] * (name == "seen")
        return fast(X)

    with pytest.warns(fxopt.FallbackWarning, match=f"changes often, last in {changed}: it gets"):
        any(change_and_call(number) is None for number in range(8))


@torch.no_grad()
def test_a_parameter_that_the_first_call_makes_is_named():
    def scaled(m, x):
        if m.scale is None:
            m.scale = nn.Parameter(torch.ones(x.shape[-1]))
        return m.layer(x) * m.scale

    model = module(scaled, layer=nn.Linear(16, 16))
    model.scale = None
    fast = fxopt.optimize(model, tune=False)
    with pytest.warns(
        fxopt.FallbackWarning, match="deletes 'scale', or puts a parameter, buffer or module in its place"
    ):
        fast(X)
    torch.testing.assert_close(fast(X), model(X))
    assert None in reasons(fast)


@torch.no_grad()
def test_what_some_inputs_leave_behind_ends_in_no_capture_for_each_request(monkeypatch):
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.shift = nn.Linear(16, 16), None

        def forward(self, x, image=None):
            if image is not None:
                self.shift = image.sum()
            return self.layer(x) + (0 if self.shift is None else self.shift)

    model, made = Keeps().eval(), []
    monkeypatch.setattr(dispatch, "prepare", lambda *args: made.append(1) or prepare.prepare(*args))
    fast, reference = fxopt.optimize(model, tune=False), copy.deepcopy(model)
    for image in (torch.randn(3) for _ in range(12)):
        for inputs in ((X, image), (X,), (X,), (X,)):
            torch.testing.assert_close(fast(*inputs), reference(*inputs))
    assert len(made) <= 12


@torch.no_grad()
def test_what_a_forward_without_a_graph_assigns_is_no_change():
    """The detectors of torchvision keep their anchors so, and decide on values."""

    class Decides(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells = [torch.ones(8)]

        def forward(self, x):
            self.cells = [cell.to(x.dtype) for cell in self.cells]
            for kind in x[:, 0].gt(0).unique():
                x = x * (1 if kind else 2)
            return x

    fast = fxopt.optimize(Decides().eval())
    for _ in range(8):
        fast(X)
    assert len(fast.report) <= 2
    assert "decides on the value" in fast.report[-1].reason


@torch.no_grad()
def test_a_number_that_the_forward_assigns_is_the_users_between_calls():
    def forward(m, x):
        y = m.layer(x).clamp(max=m.limit)
        m.limit = 10.0
        return y

    model = randomise(module(forward, layer=nn.Linear(8, 8), limit=10.0))
    fast, x = fxopt.optimize(model, tune=False), 50 * torch.ones(2, 8)
    for limit in (10.0, 10.0, 0.5):
        for value in (torch.zeros(2, 8), x, x):
            fast.limit = limit
            found = fast(value)
            fast.limit = limit
            torch.testing.assert_close(found, model(value))


@pytest.mark.parametrize("calls", [1, 4])
@torch.no_grad()
def test_a_forward_that_stops_changing_the_model_gets_a_graph(calls):
    def forward(m, x):
        if m.calls < calls:
            m.calls += 1
            m.layer.weight.mul_(0.5)
        return m.layer(x)

    model = randomise(module(forward, layer=nn.Linear(16, 8), calls=0))
    fast, reference = fxopt.optimize(model, tune=False), copy.deepcopy(model)
    for _ in range(8):
        torch.testing.assert_close(fast(X), reference(X))
    assert fast.report[0].reason is None


@torch.no_grad()
def test_constants_that_change_from_call_to_call_do_not_capture_for_ever():
    class Branches(nn.Module):
        def forward(self, x, power):
            return x * power if x.sum() > 0 else x

    fast = fxopt.optimize(Branches().eval())
    for number in range(40):
        fast(X, float(number))
    assert len(fast.report) <= 8


class Caches(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("cache", torch.zeros(8, 16), persistent=False)

    def forward(self, x):
        self.cache[: x.shape[0]] = self.layer(x)
        return self.cache[: x.shape[0]] + 1


@torch.no_grad()
def test_a_buffer_that_has_the_values_already_is_written_all_the_same():
    model = randomise(Caches().eval())
    model(X)
    fast = fxopt.optimize(model, (X,))
    assert reasons(fast) == [None]
    for x in (X * 2, X, X * 3):
        torch.testing.assert_close(fast(x), copy.deepcopy(model)(x))
    assert reasons(fast) == [None]


class CountsNoWrites(nn.Module):
    """torch raises no version of what these two write."""

    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(16), nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.data.add_(1)
        return self.layer(F.batch_norm(x, self.norm.running_mean, self.norm.running_var, training=True))


@torch.no_grad()
def test_timing_leaves_buffers_alone_whose_writes_torch_does_not_count():
    model = randomise(CountsNoWrites().eval())
    before = copy.deepcopy(model.state_dict())
    trial = Trial(model, trace_method(model, "forward", (X,), {}, None), Inputs((X,), {}))
    trial.own()
    assert {name for _, name in trial.places} == {"calls", "running_mean", "running_var"}
    for _ in range(3):
        trial.repeatable(model.forward)(X)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    again = copy.deepcopy(model)
    torch.testing.assert_close(fxopt.optimize(model, (X,))(X), again(X), rtol=1e-5, atol=1e-5)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, again.state_dict()[name])


class HoldsAGraph(nn.Module):
    """Its state is taken by compiling a graph anew, as e3nn does, and so does each copy."""

    def __init__(self):
        super().__init__()
        self.layer, self.steps = (
            nn.Linear(16, 16),
            torch.fx.symbolic_trace(nn.Sequential(nn.Linear(16, 16), nn.ReLU())),
        )

    def __getstate__(self):
        self.steps.recompile()
        return self.__dict__.copy()

    def forward(self, x):
        return self.steps(self.layer(x))


@torch.no_grad()
def test_a_graph_in_a_model_may_be_compiled_anew():
    model = randomise(HoldsAGraph().eval())
    fast = fxopt.optimize(model, (X,))
    assert reasons(fast) == [None]
    model.steps.recompile()
    torch.testing.assert_close(fast(X), model(X), rtol=1e-5, atol=1e-5)
    assert len(fast.report) == 1
    model.steps.graph.find_nodes(op="call_module", target="1")[0].target = "0"
    model.steps.recompile()
    torch.testing.assert_close(fast(X), model(X), rtol=1e-5, atol=1e-5)
    assert len(fast.report) == 2


def test_a_zero_of_another_sign_is_another_number():
    model = module(
        lambda self, x: torch.copysign(x.abs(), self.sign) + self.layer(x) * 0,
        layer=nn.Linear(16, 16),
        sign=0.0,
    )
    fast = fxopt.optimize(model, (X,))
    with torch.no_grad():
        assert torch.equal(fast(X), model(X))
        model.sign = -0.0
        assert torch.equal(fast(X), model(X))
    assert reasons(fast) == [None, None]


def test_weights_of_inference_mode_get_no_graph():
    """Torch counts no writes into them, so that a graph would keep the old ones."""
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(16, 16), nn.ReLU()).eval()
        fast = fxopt.optimize(model, (X,))
        model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
        assert torch.equal(fast(X), model(X))
    assert "torch.inference_mode()" in reasons(fast)[0]


class Unprintable:
    def __repr__(self):
        raise RuntimeError("do not print me")


def test_what_an_attribute_held_is_not_printed():
    model = module(lambda self, x: self.layer(x), layer=nn.Linear(16, 16), held=Unprintable())
    fast = fxopt.optimize(model, (X,))
    model.held = None
    with torch.no_grad():
        torch.testing.assert_close(fast(X), model(X))


class SetUpOnce(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(16, 16), nn.Parameter(torch.ones(16))
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, x):
        if not self.ready:
            with torch.no_grad():
                self.scale.copy_(x.std(0))
                self.ready.fill_(True)
        return self.layer(x) * self.scale


@torch.no_grad()
def test_a_model_that_sets_itself_up_gets_a_graph_each_time_that_it_is_ready():
    model = SetUpOnce().eval()
    twin, fast = copy.deepcopy(model), fxopt.optimize(model)
    for has_graph in (False, True, True):
        torch.testing.assert_close(fast(X), twin(X))
        assert (None in reasons(fast)) is has_graph
    for each in (model, twin):
        each.ready.fill_(False)
    for x in (-3 * X, X):
        torch.testing.assert_close(fast(x), twin(x))
        torch.testing.assert_close(model.scale, twin.scale, rtol=0, atol=0)


class OwnNorm(nn.Module):
    """Counts no calls, so that nothing but the statistics themselves tells that they were moved."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(16)), nn.Parameter(torch.zeros(16))
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("var", torch.ones(16))

    def forward(self, x):
        return F.batch_norm(x, self.mean, self.var, self.scale, self.shift, self.training)


class Pair(NamedTuple):
    scale: torch.Tensor
    shifts: list[float]


class OwnMethods(dict):
    """A dict whose methods tell nothing of what is in it."""

    def __iter__(self):
        return iter([object()])

    def __bool__(self):
        raise NotImplementedError


class AssignsWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(16, 16, bias=False), None

    def forward(self, x):
        y = self.layer(x)
        self.seen = y.mean(), self.layer.weight
        return y


class Registers(nn.Module):
    """Draws a name for each of its tables when it is first called, as einx does."""

    tables: ClassVar[dict[tuple[int, ...], str]] = {}

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        if x.shape not in self.tables:
            self.tables[x.shape] = uuid.uuid4().hex
        return self.layer(x)


@torch.no_grad()
@pytest.mark.parametrize("examples", [(), (X,)])
def test_what_the_first_call_sets_up_outside_of_the_model_is_captured_later(examples, monkeypatch):
    monkeypatch.setattr(Registers, "tables", {})
    model = Registers().eval()
    with pytest.raises(fxopt.TraceError, match="call the model once before the capture"):
        fxopt.trace(model, (X,))
    fast = fxopt.optimize(model, *([examples] if examples else []))
    for _ in range(2):
        torch.testing.assert_close(fast(X), model(X))
    assert reasons(fast) == [None]


def moved_statistics(model):
    model.train()
    model(5 * X + 3)
    model.eval()


UNCOUNTED = {
    "statistics of a norm without a counter": (
        lambda: nn.Sequential(nn.Linear(16, 16), OwnNorm()),
        moved_statistics,
    ),
    "a tensor in a NamedTuple": (
        lambda: module(lambda self, x: x * self.pair.scale, pair=Pair(torch.ones(16), [1.0])),
        lambda model: model.pair.scale.mul_(3),
    ),
    "a list in a NamedTuple": (
        lambda: module(lambda self, x: x + self.pair.shifts[0], pair=Pair(torch.ones(16), [1.0])),
        lambda model: model.pair.shifts.__setitem__(0, 4.0),
    ),
    "a defaultdict": (
        lambda: module(lambda self, x: x * self.of["k"], of=collections.defaultdict(float, k=2.0)),
        lambda model: model.of.update(k=5.0),
    ),
    "a Counter in a dict": (
        lambda: module(lambda self, x: x * self.of["a"]["k"], of={"a": collections.Counter(k=2)}),
        lambda model: model.of["a"].update(k=3),
    ),
    "a dict with methods of its own": (
        lambda: module(lambda self, x: x * self.of["k"], of=OwnMethods(k=2.0)),
        lambda model: model.of.update(k=5.0),
    ),
    "a weight that the forward assigns": (AssignsWeights, lambda model: model.layer.weight.mul_(2)),
}


@torch.no_grad()
@pytest.mark.parametrize(("make", "change"), UNCOUNTED.values(), ids=UNCOUNTED)
def test_a_change_that_no_version_tells_is_noticed(make, change):
    model = make().eval()
    twin, fast = copy.deepcopy(model), fxopt.optimize(model, tune=False)
    for each in (fast, fast, twin):
        each(X)
    for each in (model, twin):
        change(each)
    torch.testing.assert_close(fast(X), twin(X))
    assert None in reasons(fast)
