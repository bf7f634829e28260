"""An optimized module and its model have one state, and graphs last as long as it does."""

import copy
import functools
import multiprocessing
import pickle
import threading
import time
import weakref

import pytest
import torch
from torch import nn

import fxopt
from fxopt.optimizing import dispatch
from fxopt.optimizing import prepare as prepare_module
from fxopt.submodules import GRAPHS
from tests.capture.test_transformers import bert, text
from tests.modules import module

pytestmark = pytest.mark.filterwarnings("ignore:falls back to eager")
X = torch.randn(2, 8)


@pytest.fixture(autouse=True)
def no_timing(monkeypatch):
    monkeypatch.setattr(prepare_module, "speedup", lambda *_: 1.5)


def graphs(fast):
    return [report for report in fast.report if report.reason is None]


class Named(dict):
    """As configurations are in diffusers and Lightning."""

    def __getattr__(self, name):
        if name not in self:
            raise AttributeError(name)
        return self[name]


REGISTERED = weakref.WeakKeyDictionary()


def registered(self, x):
    assert type(self).__mro__[1] is nn.Module
    return self.layer(x) * REGISTERED.get(self, 0)


def scaled(self, x):
    return self.layer(x) * self.hparams.scale


def remembered(self, x):
    self.layer(x)
    self.shared["mean"] = x.mean()
    return self.reader(x)


class Reader(nn.Module):
    def forward(self, x):
        return x * self.shared["mean"]


def kept_in_an_attribute(self, x):
    self.kept = self.layer(x)
    return self.kept * 2


@pytest.mark.filterwarnings("error:.*falls back to eager")
def test_tensors_that_are_kept_under_inference_mode():
    fast = fxopt.optimize(module(kept_in_an_attribute, layer=nn.Linear(8, 8)), tune=False)
    for rows, mode in enumerate((torch.inference_mode, torch.no_grad, torch.inference_mode), 2):
        with mode():
            y = fast(torch.randn(rows, 8))
        assert torch.equal(fast.kept * 2, y)
    assert graphs(fast)


def a_text(self, x):
    self.mode = "eval" if not self.training else "train"
    return self.layer(x)


def a_size(self, x):
    self.width = x.shape[-1]
    return self.layer(x)


def a_size_that_it_asks(self, x):
    if getattr(self, "length", None) != x.shape[0]:
        self.length = x.shape[0]
    return self.layer(x)


def a_tensor_on_a_layer(self, x):
    self.layer.last = self.layer(x)
    return self.layer.last * 2


def a_number_on_a_layer(self, x):
    self.layer.calls = 1
    return self.layer(x)


@pytest.mark.filterwarnings("error:.*falls back to eager")
@pytest.mark.parametrize(
    "forward", [a_text, a_size, a_size_that_it_asks, a_tensor_on_a_layer, a_number_on_a_layer]
)
@torch.no_grad()
def test_attributes_that_each_call_leaves_alike_for_these_inputs(forward):
    model = module(forward, layer=nn.Linear(8, 8))
    reference, fast = copy.deepcopy(model), fxopt.optimize(model, tune=False)
    for rows in (2, 3, 2, 4, 4):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(fast(x), reference(x))
        for name in ("mode", "width", "length"):
            assert getattr(model, name, None) == getattr(reference, name, None)
        for name in ("last", "calls"):
            torch.testing.assert_close(getattr(model.layer, name, None), getattr(reference.layer, name, None))
    assert 1 <= len(graphs(fast)) <= 3


def a_text_that_it_asks_first(self, x):
    y = self.layer(x)
    if self.mode == "double":
        y = y * 2
    self.mode = "eval"
    return y


@torch.no_grad()
def test_a_value_that_the_user_sets_is_seen_though_the_forward_assigns_to_it():
    model = module(a_text_that_it_asks_first, layer=nn.Linear(8, 8), mode="eval")
    fast = fxopt.optimize(model, tune=False)
    torch.testing.assert_close(fast(X), model.layer(X))
    model.mode = "double"
    torch.testing.assert_close(fast(X), model.layer(X) * 2)
    torch.testing.assert_close(fast(X), model.layer(X))
    assert len(graphs(fast)) == 1


def a_counter_beside_a_tensor(self, x):
    self.last = self.layer(x)
    self.calls += 1
    return self.last


def a_history(self, x):
    y = self.layer(x)
    self.history = (y, *self.history[:1])
    return y


def a_buffer(self, x):
    self.memory = self.layer(x)
    return self.memory * 2


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (a_counter_beside_a_tensor, "assigns to 'calls'"),
        (
            a_history,
            "assigns to 'history'.*then holds the result .*test_one_state.py.*reads what an earlier call has left",
        ),
        (a_buffer, "replaces the buffer 'memory'"),
    ],
)
@torch.no_grad()
def test_what_calls_leave_that_no_graph_does_is_named(forward, reason):
    model = module(forward, layer=nn.Linear(8, 8), calls=0, history=())
    model.register_buffer("memory", torch.zeros(2, 8), persistent=False)
    with pytest.warns(fxopt.FallbackWarning, match=reason):
        fxopt.optimize(model, tune=False)(torch.randn(3, 8))


@pytest.mark.filterwarnings("error:.*a tensor was made out of sight")
@torch.no_grad()
def test_a_history_of_earlier_calls_is_refused_with_its_reason():
    model = module(a_history, layer=nn.Linear(8, 8), history=())
    fast = fxopt.optimize(model, tune=False)
    for rows in (2, 3, 4):
        fast(torch.randn(rows, 8))
    assert [each.shape[0] for each in model.history] == [4, 3]


@torch.no_grad()
def test_the_forward_runs_on_the_model_itself():
    model = module(registered, layer=nn.Linear(8, 8))
    REGISTERED[model] = 2
    torch.testing.assert_close(fxopt.optimize(model)(X), model(X))
    model = module(scaled, layer=nn.Linear(8, 8), hparams=Named(scale=2.0))
    fast = fxopt.optimize(model)
    torch.testing.assert_close(fast(X), model(X))
    assert fast.hparams is model.hparams
    assert graphs(fast)


@torch.no_grad()
def test_a_dict_that_model_and_layer_share_stays_one():
    shared = {"mean": torch.zeros(())}
    model = module(remembered, layer=nn.Linear(8, 8), reader=Reader(), shared=shared)
    model.reader.shared = shared
    fast = fxopt.optimize(model)
    for _ in range(3):
        x = torch.randn(2, 8)
        assert torch.equal(fast(x), x * x.mean())


@torch.no_grad()
def test_attributes_are_those_of_the_model():
    model = module(lambda m, x: m.layer(x) * m.scale, layer=nn.Linear(8, 8), scale=2.0)
    fast = fxopt.optimize(model)
    before = fast(X)
    model.scale = 3.0
    torch.testing.assert_close(fast(X), 1.5 * before)
    fast.scale = 4.0
    torch.testing.assert_close(model(X), 2 * before)
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fxopt.optimize(bert())))):
        assert fxopt.undo(other) is not other
    assert torch.equal(copy.deepcopy(fast)(X), fast(X))


class Leaves(nn.Module):
    """Leaves what it computes in attributes, its own and those of a layer."""

    def __init__(self):
        super().__init__()
        self.layer, self.inner = nn.Linear(8, 8), module(self.map, layer=nn.Linear(8, 8))
        self.loss, self.size = torch.zeros(()), None

    @staticmethod
    def map(inner, x):
        inner.kept = (inner.layer(x).softmax(-1), 2)
        return inner.kept[0] * x

    def forward(self, x):
        y = self.layer(x)
        self.loss, self.size = y.pow(2).mean(), x.shape[0]
        return self.inner(y)


@torch.no_grad()
def test_what_a_forward_leaves_is_left_by_the_graph():
    model = Leaves().eval()
    fast, reference = fxopt.optimize(model), copy.deepcopy(model)
    for rows in (2, 2, 3, 4, 3):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(fast(x), reference(x))
        torch.testing.assert_close(fast.loss, reference.loss)
        torch.testing.assert_close(model.inner.kept, reference.inner.kept)
        assert fast.size == rows
    assert len(graphs(fast)) == 2, "one for the first size, and one for all"


@pytest.mark.parametrize("kept", [torch.zeros(2, 8), (torch.zeros(2, 8),)], ids=["tensor", "tuple"])
@torch.no_grad()
def test_what_the_forward_assigns_for_some_inputs_is_no_constant_of_the_graph_of_others(kept):
    def forward(self, x, keep=False):
        if keep:
            self.kept = (self.layer(x),) if isinstance(self.kept, tuple) else self.layer(x)
        return self.layer(x) + self.kept[0]

    model = module(forward, layer=nn.Linear(8, 8), kept=kept)
    fast, reference = fxopt.optimize(model), copy.deepcopy(model)
    for keep in (False, True, False, True, False, False):
        x = torch.randn(2, 8)
        torch.testing.assert_close(fast(x, keep), reference(x, keep))


def measured(m, x):
    y = m.layer(x)
    m.width, m.rows = 2 * y.shape[-1], x.shape[0]
    return y[: m.rows] + m.width


@torch.no_grad()
def test_each_graph_assigns_what_the_forward_assigns_whatever_is_there():
    model = module(measured, layer=nn.Linear(8, 8), rows=2)
    fast, reference = fxopt.optimize(model), copy.deepcopy(model)
    for size in ((2, 3), (4, 3), (4, 5), (2, 3), (4, 3), (6, 7), (4, 3)):
        x = torch.randn(*size, 8)
        torch.testing.assert_close(fast(x), reference(x))
        assert (fast.rows, fast.width) == (size[0], 16)
    model.layer.weight.mul_(2)
    for rows in (4, 3, 4):
        fast(torch.randn(rows, 3, 8))
        assert (fast.rows, fast.width) == (rows, 16)
    assert len(graphs(fast)) == len(fast.report) > 1


@torch.no_grad()
def test_what_the_forward_assigns_no_more_is_read_as_it_is():
    def forward(m, x):
        if m.keeps:
            m.kept = m.layer(x)
        return m.layer(x) + m.kept

    model = module(forward, layer=nn.Linear(8, 8), kept=torch.zeros(2, 8), keeps=True)
    fast, reference = fxopt.optimize(model), copy.deepcopy(model)
    for keeps in (True, True, False, False, True, False):
        model.keeps = reference.keeps = keeps
        x = torch.randn(2, 8)
        torch.testing.assert_close(fast(x), reference(x))
    assert len(graphs(fast)) == len(fast.report)


@torch.no_grad()
def test_an_attribute_that_the_forward_deletes_is_gone():
    def forward(self, x):
        self.scratch = self.layer(x)
        y = self.scratch.relu()
        del self.scratch, self.extra
        return y

    model = module(forward, layer=nn.Linear(8, 8), extra=1)
    fast = fxopt.optimize(model)
    fast(X)
    assert not hasattr(fast, "extra")


class Wrapper(nn.Module):
    """Passes attributes on to what it wraps, as adapters do."""

    def __init__(self, wrapped):
        super().__init__()
        self.wrapped = wrapped

    def __getattr__(self, name):
        return (
            getattr(super().__getattr__("wrapped"), name) if name != "wrapped" else super().__getattr__(name)
        )

    def forward(self, x):
        return self.wrapped(x) + 1


@torch.no_grad()
def test_a_module_around_an_optimized_one_is_a_model_of_its_own():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    for around in (Wrapper(fxopt.optimize(model)), nn.Sequential(fxopt.optimize(model), nn.Linear(8, 8))):
        around.eval()
        wanted = around(X)
        torch.testing.assert_close(fxopt.trace(around, (X,))(X), wanted)
        torch.testing.assert_close(fxopt.optimize(around)(X), wanted)


def counted(function, calls):
    @functools.wraps(function)
    def run(*args, **kwargs):
        calls.append(args)
        return function(*args, **kwargs)

    return run


@torch.no_grad()
def test_a_wrapper_on_the_forward_wraps_the_fast_call():
    model, calls = nn.Sequential(nn.Linear(8, 8)).eval(), []
    fast = fxopt.optimize(model)
    fast.forward = counted(fast.forward, calls)
    torch.testing.assert_close(fast(X), model(X))
    assert (len(calls), len(graphs(fast))) == (1, 1)
    del fast.forward
    fast(X)
    assert (len(calls), len(graphs(fast))) == (1, 1)


@torch.no_grad()
def test_the_graph_of_a_state_is_found_again():
    def forward(self, x):
        return self.layer(x) + self.adapters[self.active](x)

    adapters = nn.ModuleDict({name: nn.Linear(8, 8) for name in "ab"})
    model = module(forward, layer=nn.Linear(8, 8), adapters=adapters, active="a")
    fast = fxopt.optimize(model)
    for active in "abababab" * 3:
        fast.active = active
        torch.testing.assert_close(fast(X), model(X))
    assert len(graphs(fast)) == 2
    adapters["a"].weight.mul_(2)
    torch.testing.assert_close(fast(X), model(X))
    assert len(graphs(fast)) == 1, "those of weights that are gone are dropped"


@torch.no_grad()
def test_a_state_that_changes_with_each_call_is_not_captured_for_ever(monkeypatch):
    def forward(self, x):
        self.calls += 1
        return self.layer(x) + self.calls

    asked = []
    monkeypatch.setattr(dispatch, "prepare", counted(dispatch.prepare, asked))
    model = module(forward, layer=nn.Linear(8, 8), calls=0)
    fast = fxopt.optimize(model)
    for number in range(1, 40):
        torch.testing.assert_close(fast(X), model.layer(X) + number)
    assert max(len(asked), len(getattr(fast, GRAPHS).caches)) <= 8


@torch.no_grad()
def test_refresh_follows_what_is_not_watched():
    model = module(
        lambda m, x: m.layer(x) * m.options["scale"], layer=nn.Linear(8, 8), options={"scale": 1.0}
    )
    fast = fxopt.optimize(model.eval())
    before = fast(X)
    fast.options["scale"] = 2.0
    fast.refresh()
    torch.testing.assert_close(fast(X), 2 * before)


@pytest.mark.parametrize("wait", [True, False])
def test_a_cold_start_of_threads_makes_one_graph_for_each_structure(wait):
    model = bert()
    fast, barrier, found = fxopt.optimize(model, tune=False, wait=wait), threading.Barrier(6), {}
    inputs = [text(2, 5 + number) for number in range(6)]

    def work(number):
        barrier.wait()
        with torch.no_grad():
            found[number] = fast(**inputs[number])[0]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with torch.no_grad():
        for number, value in found.items():
            torch.testing.assert_close(value, model(**inputs[number])[0], rtol=1e-4, atol=1e-4)
    assert len(graphs(fast)) <= 2


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_that_is_forked_during_a_capture_can_call():
    fast = fxopt.optimize(bert(), tune=False)

    def call(length, queue=None):
        if queue:  # OpenMP has threads in the parent alone
            torch.set_num_threads(1)
        with torch.no_grad():
            shape = fast(**text(1, length))[0].shape
        if queue:
            queue.put(shape)

    context = multiprocessing.get_context("fork")
    queue, thread = context.Queue(), threading.Thread(target=call, args=(5,))
    thread.start()
    time.sleep(0.1)
    child = context.Process(target=call, args=(7, queue), daemon=True)
    child.start()
    assert queue.get(timeout=60)[1] == 7
    thread.join()
    child.join()


@pytest.mark.filterwarnings("ignore:.*falls back to eager")
@torch.no_grad()
def test_a_trial_puts_back_a_buffer_that_the_forward_replaces():
    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("total", torch.zeros(4))

        def forward(self, x):
            self.total = self.total + x.sum(0)
            return self.layer(x) + self.total

    model = nn.Sequential(Sums()).eval()
    own, fast, x = copy.deepcopy(model), fxopt.optimize(model, tune=False), torch.ones(2, 4)
    for _ in range(3):
        torch.testing.assert_close(fast(x), own(x))
        torch.testing.assert_close(model[0].total, own[0].total)
    assert "the forward replaces the buffer '0.total'" in str(fast.report)


class WithClassMethod(nn.Linear):
    @classmethod
    def _name(cls):
        return cls.__name__


def test_methods_of_the_class_are_those_of_the_models_class():
    fast = fxopt.optimize(WithClassMethod(2, 2).eval())
    assert pickle.loads(pickle.dumps(fast.__class__._name)) == WithClassMethod._name
    assert fast._name() == "WithClassMethod"
