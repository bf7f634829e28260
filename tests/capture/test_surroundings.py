"""State outside of a model that its forward changes: counters, caches, generators of random numbers."""

import collections
import copy
import functools
import os
import random
import secrets
import types
import uuid

import numpy
import pytest
import torch
from torch.export import Dim
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import fxopt
from fxopt.capture.fakes.snapshots import SnapshotMaker
from tests.modules import module

X = torch.randn(3, 4)

COUNTER = [0]
CALLS = 0
CACHE = {}
TENSORS = {}
NUMPY = numpy.random.default_rng(0)
OLD_NUMPY = numpy.random.RandomState(0)
PYTHON = random.Random(0)
UNSEEDED = secrets.SystemRandom()


class Counter:
    calls = 0

    def next(self):
        self.calls += 1
        return self.calls


COUNTS = Counter()


def in_a_list(self, x):
    COUNTER[0] += 1
    return x * COUNTER[0]


def in_a_global(self, x):
    global CALLS
    CALLS += 1
    return x * CALLS


def in_a_function_that_it_calls(self, x):
    return in_a_list(self, x)


def in_a_class(self, x):
    Counter.calls += 1
    return x * Counter.calls


def in_an_object(self, x):
    return x * COUNTS.next()


def in_its_own_class(self, x):
    type(self).calls = getattr(type(self), "calls", 0) + 1
    return x * type(self).calls


def in_a_default(self, x, calls=[0]):  # noqa: B006
    calls[0] += 1
    return x * calls[0]


def in_itself(self, x):
    in_itself.calls = getattr(in_itself, "calls", 0) + 1
    return x * in_itself.calls


def closure():
    calls = 0

    def in_a_closure(self, x):
        nonlocal calls
        calls += 1
        return x * calls

    return in_a_closure


def without_use(self, x):
    COUNTER[0] += 1
    return x if COUNTER[0] < 100 else -x


def a_tensor_in_a_cache(self, x):
    TENSORS.setdefault("ones", torch.ones(4))
    return x * 2


@pytest.mark.parametrize(
    ("forward", "name"),
    [
        (in_a_list, "'COUNTER' of .*test_surroundings"),
        (in_a_global, "'CALLS' of .*test_surroundings"),
        (in_a_function_that_it_calls, "'COUNTER'"),
        (in_a_class, "'calls' of .*Counter"),
        (in_an_object, "'COUNTS'"),
        (in_its_own_class, "'calls' of .*Made"),
        (in_a_default, "'default 0' of .*in_a_default"),
        (in_itself, "'calls' of .*in_itself"),
        (closure(), "'calls' of .*in_a_closure"),
        (without_use, "'COUNTER'"),
        (lambda self, x: x * NUMPY.random(), "'NUMPY'"),
        (lambda self, x: x * OLD_NUMPY.rand(), "'OLD_NUMPY'"),
        (lambda self, x: x * PYTHON.random(), "'PYTHON'"),
    ],
)
def test_state_outside_of_the_model_that_changes_is_refused(forward, name):
    with pytest.raises(fxopt.TraceError, match=f"the forward changes {name}.*outside of the model"):
        fxopt.trace(module(forward), (X,))


def test_tensors_kept_outside_of_the_model_are_refused():
    with pytest.raises(fxopt.TraceError, match="the forward changes 'TENSORS'"):
        fxopt.trace(module(a_tensor_in_a_cache), (X,))
    assert TENSORS == {}


@pytest.mark.parametrize("generator", [random.Random(0), numpy.random.default_rng(0)])
def test_generators_of_a_module_are_refused(generator):
    with pytest.raises(fxopt.TraceError, match="assigns to 'generator'"):
        fxopt.trace(module(lambda self, x: x * self.generator.random(), generator=generator), (X,))


@pytest.mark.parametrize(
    "draw",
    [
        lambda: os.urandom(1)[0],
        lambda: secrets.randbelow(100),
        lambda: uuid.uuid4().fields[0],
        lambda: UNSEEDED.random(),
        lambda: random.Random().random(),
        lambda: numpy.random.default_rng().random(),
        lambda: numpy.random.RandomState().rand(),
    ],
)
def test_random_numbers_of_the_operating_system_are_refused(draw):
    with pytest.raises(fxopt.TraceError, match="from the operating system"):
        fxopt.trace(module(lambda self, x: x * draw()), (X,))


KEPT = None
NESTED = {"tensors": []}
RECENT = collections.deque(maxlen=2)
BY_NAME = collections.defaultdict(list)


def kept_in_a_global(self, x):
    global KEPT
    KEPT = x * 2
    return x


def kept_in_a_class(self, x):
    Counter.kept = x * 2
    Counter.calls = x * 3
    return x


def kept_in_a_nested_list(self, x):
    NESTED["tensors"].append(x * 2)
    return x


def kept_in_a_deque(self, x):
    RECENT.append(x * 2)
    return x


def kept_in_a_defaultdict(self, x):
    BY_NAME["kept"].append(x * 2)
    return x


def kept_in_itself(self, x):
    kept_in_itself.kept = x * 2
    return x


def kept_in_a_closure():
    kept = None

    def forward(self, x):
        nonlocal kept
        kept = x * 2
        return x

    return forward


@pytest.mark.parametrize(
    "forward",
    [
        *(in_a_global, in_a_class, in_its_own_class, in_itself, kept_in_a_global, kept_in_a_class),
        *(kept_in_a_nested_list, kept_in_a_deque, kept_in_a_defaultdict, kept_in_itself, kept_in_a_closure()),
    ],
)
def test_nothing_of_a_capture_is_left_outside_of_the_model(forward):
    def outside():
        cells = [cell.cell_contents for cell in forward.__closure__ or ()]
        held = (KEPT, CALLS, dict(vars(Counter)), NESTED, RECENT, BY_NAME, vars(forward), cells)
        return repr((held, getattr(type(model), "calls", None)))

    model = module(forward)
    before = outside()
    with pytest.raises(fxopt.TraceError, match="outside of the model"):
        fxopt.trace(model, (X,))
    assert outside() == before


class Vertex:
    def __init__(self):
        self.tensor, self.others = torch.ones(1), []


def test_objects_that_hold_each_other_are_described_once():
    vertices = [Vertex() for _ in range(6)]
    for vertex in vertices:
        vertex.others += vertices
    named = []
    contents = SnapshotMaker(lambda tensor: named.append(tensor))
    assert contents(vertices) == SnapshotMaker(lambda tensor: None)(copy.deepcopy(vertices))
    assert len(named) == 6


def test_another_thread_may_change_what_is_described():
    values, recent, tensors = {"tensor": X}, collections.deque([X]), {X}
    SnapshotMaker(lambda tensor: values.update(more=1))(values)
    SnapshotMaker(lambda tensor: recent.append(1))(recent)
    SnapshotMaker(lambda tensor: tensors.add(1))(tensors)


def test_what_is_outside_of_the_model_is_left_as_it_was():
    before = COUNTER[0], COUNTS.calls, len(CACHE)
    for forward in (in_a_list, in_an_object):
        with pytest.raises(fxopt.TraceError):
            fxopt.trace(module(forward), (X,))
    fxopt.trace(module(filled_once), (X,))
    assert before == (COUNTER[0], COUNTS.calls, len(CACHE))


class Doubles(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Watches(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def enters_a_mode(self, x, mode):
    mode.__enter__()
    return x * 2


def raises_in_a_mode(self, x, mode):
    mode.__enter__()
    raise ValueError("in a mode")


@pytest.mark.parametrize("mode", [Doubles, Watches, functools.partial(torch.device, "meta")])
@pytest.mark.parametrize("forward", [enters_a_mode, raises_in_a_mode])
def test_modes_that_a_forward_enters_are_left_behind_it(forward, mode):
    modes = _get_current_function_mode_stack, _get_current_dispatch_mode_stack
    before = [stack() for stack in modes]
    with pytest.raises(fxopt.TraceError, match="does not leave it|in a mode"):
        fxopt.trace(module(lambda self, x: forward(self, x, mode())), (X,), verify=False)
    assert [stack() for stack in modes] == before
    assert torch.get_default_device() == torch.device("cpu")


def test_a_default_device_is_refused_and_not_set():
    def forward(self, x):
        torch.set_default_device("cpu")
        torch.set_default_device("meta")
        return x * 2

    with pytest.raises(fxopt.TraceError, match="default device"):
        fxopt.trace(module(forward), (X,), verify=False)
    assert torch.get_default_device() == torch.device("cpu")


def test_generators_with_a_seed_draw_the_same_each_time():
    def forward(self, x):
        return x * random.Random(3).random() * numpy.random.default_rng(3).random()

    model = module(forward)
    assert torch.equal(fxopt.trace(model, (X,))(X), model(X))


def filled_once(self, x):
    if "factor" not in CACHE:
        CACHE["factor"] = 3
    return x * CACHE["factor"]


def test_a_cache_that_is_filled_once_makes_no_difference():
    model = module(filled_once)
    assert torch.equal(fxopt.trace(model, (X,))(X), model(X))


class Counts(torch.nn.Module):
    def forward(self, x):
        return in_a_list(self, x)


def test_a_leaf_may_change_what_is_outside_of_the_model():
    gm = fxopt.trace(module(lambda self, x: self.counts(x), counts=Counts()), (X,), leaf_modules=[Counts])
    calls = COUNTER[0]
    assert torch.equal(gm(X), X * (calls + 1))


@functools.lru_cache
def table(size):
    return torch.arange(4.0) * size


class Tables(torch.nn.Module):
    @staticmethod
    @functools.lru_cache
    def ones(size):
        return torch.ones(size)

    def forward(self, x):
        return x * table(x.shape[1]) + self.ones(4)


def test_no_fake_tensor_is_left_in_a_cache_of_functools():
    for sizes in (None, ({0: Dim.AUTO},)):
        gm = fxopt.trace(Tables(), (X,), dynamic_shapes=sizes)
        for x in (X, X[:1], X[:2]) if sizes else (X,):
            assert torch.equal(gm(x), Tables()(x))


class Registered(torch.nn.Module):
    """A layer that its class knows, as those of snntorch do."""

    instances = []  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.register_buffer("memory", torch.zeros(4), persistent=False)
        self.last = None
        self.instances.append(self)

    @classmethod
    def reset(cls):
        for each in cls.instances:
            each.memory = torch.zeros_like(each.memory)

    def forward(self, x):
        self.memory = 0.9 * self.memory + x.sum(0)
        return self.memory


class Table(torch.nn.Module):
    """A table that grows, in a module that is a global."""

    def __init__(self):
        super().__init__()
        self.table = torch.zeros(0)

    def forward(self, n):
        if len(self.table) < n:
            self.table = torch.arange(n).float()
        return self.table[:n]


REGISTRY, TABLE, imported = {}, None, None


def resets_a_registry(self, x):
    Registered.reset()
    return self.memory(x)


def writes_by_a_registry(self, x):
    REGISTRY["layer"].last = x * 2
    return x


def fails_after_a_write(self, x):
    REGISTRY["layer"].memory = x * 2
    return x.undefined


def branches_after_a_write(self, x):
    REGISTRY["layer"].memory = x.sum(0)
    return x + 1 if x.sum() > 0 else x - 1


def asks_a_global(self, x):
    return x + TABLE(len(x))[:, None]


def state_of(layer):
    return {**vars(layer), **layer._buffers}


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (resets_a_registry, "changes 'memory' of the Registered in 'instances' of .*Registered"),
        (writes_by_a_registry, "changes 'last' of the Registered in '"),
        (fails_after_a_write, "undefined"),
        (branches_after_a_write, "decides on the value"),
        (asks_a_global, "changes 'table' of the Table in 'TABLE' of .*test_surroundings"),
    ],
)
def test_modules_of_the_user_that_a_forward_reaches_by_name_stay_as_they_are(forward, message, monkeypatch):
    monkeypatch.setattr(Registered, "instances", [])
    layer, table = Registered(), Table()
    monkeypatch.setitem(REGISTRY, "layer", layer)
    monkeypatch.setitem(globals(), "TABLE", table)
    model = module(forward, memory=layer)
    before = state_of(layer), state_of(table)
    with pytest.raises(fxopt.TraceError, match=message):
        fxopt.trace(model, (X,))
    assert (state_of(layer), state_of(table)) == before


class Registry:
    def keep(self, x):
        BEHIND_METHODS.last = x


REGISTRY_OBJECT, BEHIND_METHODS = Registry(), Registered()


def test_a_module_behind_a_method_of_a_global_object_stays_as_it_is():
    before = state_of(BEHIND_METHODS)
    with pytest.raises(fxopt.TraceError, match="changes 'last' of the Registered in"):
        fxopt.trace(module(lambda self, x: REGISTRY_OBJECT.keep(x * 2) or x), (X,))
    assert state_of(BEHIND_METHODS) == before


def test_a_module_behind_an_imported_one_stays_as_it_is(monkeypatch):
    package = types.ModuleType("package_of_layers")
    package.OF_PACKAGE = table = Table()
    monkeypatch.setitem(globals(), "imported", package)
    before = state_of(table)
    with pytest.raises(fxopt.TraceError, match="'table' of the Table in 'OF_PACKAGE' of package_of_layers"):
        fxopt.trace(module(lambda self, x: x + imported.OF_PACKAGE(len(x))[:, None]), (X,))
    assert state_of(table) == before


def test_a_global_module_that_a_forward_only_calls_is_captured(monkeypatch):
    monkeypatch.setitem(globals(), "TABLE", table := Table())
    table.table = torch.arange(9.0)
    traced = fxopt.trace(module(asks_a_global), (X,))
    assert torch.equal(traced(X), X + table.table[: len(X), None])
