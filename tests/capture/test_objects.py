"""Python objects among the inputs and outputs: opened, changed in place as the forward does, and made anew."""

import collections
import copy
import functools
import pickle

import pytest
import torch
from torch.export import Dim

import fxopt
from fxopt import objects
from tests.capture.test_odd_models import Does
from tests.modules import module

X = torch.randn(2, 3)


class Memory:
    """State that a forward keeps from call to call."""

    def __init__(self, kind="sum"):
        self.kind = kind
        self.seen = 0
        self.total = torch.zeros(2, 3)
        self.history = []
        self.named = {}


class Remembers(torch.nn.Module):
    """Changes its memory in all ways, and returns nothing of it."""

    def forward(self, x, memory):
        memory.seen += x.shape[0]
        old = memory.total
        memory.total = memory.total + x * memory.seen
        memory.history.append(old * 2)
        memory.named["last"] = x + 1
        memory.fresh = Memory("mean") if memory.kind == "sum" else None
        return x - 1


class Makes(torch.nn.Module):
    def forward(self, x):
        memory = Memory()
        memory.total = x * 2
        memory.history.append(memory.total)
        return memory


class Reads(torch.nn.Module):
    def forward(self, x, batch):
        return x + batch["y"]


class Counting:
    def __init__(self, calls):
        self.calls = calls


class Slots:
    __slots__ = ("value",)

    def __init__(self):
        self.value = X

    def __reduce__(self):
        return Slots, ()


def assert_same(mine, other):
    assert type(mine) is type(other)
    if torch.is_tensor(other):
        assert torch.equal(mine, other)
    elif isinstance(other, dict):
        assert mine.keys() == other.keys()
        for key, value in other.items():
            assert_same(mine[key], value)
    elif isinstance(other, list):
        assert len(mine) == len(other)
        for value, expected in zip(mine, other, strict=True):
            assert_same(value, expected)
    elif isinstance(other, Memory):
        assert_same(vars(mine), vars(other))
    else:
        assert mine == other


@pytest.mark.parametrize("again", [lambda gm: gm, copy.deepcopy, lambda gm: pickle.loads(pickle.dumps(gm))])
def test_an_object_comes_back_changed_though_nothing_of_it_is_returned(again):
    example = Memory()
    gm = again(fxopt.trace(Remembers(), (X, example), dynamic_shapes={"x": None, "memory": {}}))
    assert vars(example).keys() == vars(Memory()).keys()
    mine, eager = Memory(), Memory()
    mine.seen = eager.seen = 5
    history = mine.history
    assert torch.equal(gm(X, mine), Remembers()(X, eager))
    assert_same(mine, eager)
    assert mine.history is history
    assert mine.seen == 7


def test_each_run_makes_an_object_of_its_own():
    gm = fxopt.trace(Makes(), (X,))
    first, second = gm(X), gm(X + 1)
    assert_same(first, Makes()(X))
    assert first.history[0] is first.total
    assert first.history is not second.history
    first.named["added"] = 1
    assert gm(X).named == {}


def test_other_state_is_refused():
    gm = fxopt.trace(Remembers(), (X, Memory()))
    with pytest.raises(fxopt.GuardError, match="'memory.kind' is 'mean'; the graph was captured for 'sum'"):
        gm(X, Memory("mean"))
    moved = Memory()
    moved.seen = 2
    with pytest.raises(fxopt.GuardError, match="'memory.seen' is 2"):  # nothing was asked to be free
        gm(X, moved)
    with pytest.raises(fxopt.GuardError, match="'memory' is dict; the graph takes Memory there"):
        gm(X, {})


def test_what_cannot_be_opened_is_refused():
    with pytest.raises(fxopt.TraceError, match="input batch is a Slots, which is not equal to its copy"):
        fxopt.trace(Reads(), (X, Slots()))
    twice = Memory()
    twice.history, twice.named = [twice.history], {"same": twice.history}
    twice.named["same"] = twice.history
    with pytest.raises(fxopt.TraceError, match="one list is given twice"):
        fxopt.trace(Remembers(), (X, twice))


def test_a_dict_of_a_users_own():
    free = {"x": {0: Dim.AUTO}, "batch": {0: Dim.AUTO}}
    gm = fxopt.trace(Reads(), (X, collections.UserDict(y=X)), dynamic_shapes=free)
    more = torch.randn(5, 3)
    assert torch.equal(gm(more, collections.UserDict(y=more)), more + more)


class Adds(torch.nn.Module):
    def forward(self, x, memory):
        memory.total = memory.total + x
        return x * 3


class Around(torch.nn.Module):
    """Uses what was in the memory before a layer changed it, and what is there after."""

    def __init__(self):
        super().__init__()
        self.adds = Adds()

    def forward(self, x, memory):
        old = memory.total
        y = self.adds(x, memory)
        return y + old, memory.total * 2


def test_a_leaf_changes_an_object_between_two_reads():
    gm = fxopt.trace(Around(), (X, Memory()), leaf_modules="adds")
    mine, eager = Memory(), Memory()
    for _ in range(2):
        for actual, expected in zip(gm(X, mine), Around()(X, eager), strict=True):
            assert torch.equal(actual, expected)
    assert_same(mine, eager)


def test_a_number_that_changes_at_size_one_alone_makes_another_graph():
    class Branch(torch.nn.Module):
        def forward(self, x, memory):
            if x.shape[0] == 1:
                memory.seen += 1
            return x + 1

    gm = fxopt.trace(Branch(), (X, Memory()), dynamic_shapes=({0: Dim.AUTO}, {}))
    assert torch.equal(gm(torch.ones(5, 3), Memory()), torch.full((5, 3), 2.0))
    with pytest.raises(fxopt.GuardError, match="dimension 0 is 1"):
        gm(torch.ones(1, 3), Memory())


class Slotted:
    __slots__ = ("__hidden", "calls", "state")

    def __init__(self, state, hidden=2.0):
        self.state, self.calls, self.__hidden = state, 0, hidden

    def hidden(self):
        return self.__hidden


def test_an_object_with_slots_is_changed():
    def forward(self, x, held):
        held.state = [x * 2, held.state]
        return held.state[1] + 1

    held, model = [Slotted(torch.randn(3, 4)) for _ in range(3)], Does(forward)
    traced = fxopt.trace(model, (torch.randn(3, 4), held[0]))
    assert isinstance(held[0].state, torch.Tensor)
    x = torch.randn(3, 4)
    held[2].state = held[1].state
    torch.testing.assert_close(traced(x, held[1]), model(x, held[2]))
    torch.testing.assert_close(held[1].state, held[2].state)


def test_private_slots_are_attributes():
    def forward(self, x, held):
        return Slotted(x, x + held.hidden())

    traced = fxopt.trace(Does(forward), (X, Slotted(X, X * 3)))
    assert torch.equal(traced(X, Slotted(X, X * 4)).hidden(), X * 5)


def changes_a_dict(self, x, held):
    if x.sum() > 0:
        held["more"] = x + 1
    return x * 2


def changes_a_list(self, x, held):
    y, mask = x.clone(), x > 0
    if mask.any():
        y[mask] = 0
        held.append(1)
    return y


def changes_an_object(self, x, held):
    if x.sum() > 0:
        held.calls += 1
    return x * 2


@pytest.mark.parametrize(
    ("forward", "make"),
    [
        (changes_a_dict, dict),
        (changes_a_list, list),
        (changes_an_object, functools.partial(Slotted, X)),
        (changes_an_object, functools.partial(Counting, 0)),
    ],
)
def test_a_branch_that_changes_an_input_is_no_branch_that_always_runs(forward, make):
    model = module(forward)
    with pytest.raises(fxopt.TraceError, match="decides on the value"):
        fxopt.trace(model, (X.abs(), make()))
    traced = fxopt.trace(model, (X.abs(), make()), specialize=True)
    with pytest.raises(fxopt.GuardError):
        traced(-X.abs(), make())


def test_a_dict_is_put_in_another_order():
    def forward(self, held):
        held["a"] = held.pop("a")
        return held["a"] + 1

    traced, held = fxopt.trace(Does(forward), ({"a": X, "b": X + 1},)), {"a": X, "b": X + 1}
    assert torch.equal(traced(held), X + 1)
    assert list(held) == ["b", "a"]


def test_a_list_in_a_tuple_is_for_the_example_what_it_was_before():
    def forward(self, *lists):
        lists[0][0] = -lists[0][0]
        return lists[0][0] * 2 if lists[0][0].sum() > 0 else lists[0][0]

    traced, given = fxopt.trace(Does(forward), ([-X.abs()],), specialize=True), [-X.abs()]
    assert torch.equal(traced(given), X.abs() * 2)
    assert torch.equal(given[0], X.abs())


@pytest.mark.parametrize("key", [torch.ones(2), Counting(1)], ids=["tensor", "object"])
def test_a_key_that_no_code_can_name_is_refused(key):
    with pytest.raises(fxopt.TraceError, match="as a key, which no code of a graph can name"):
        fxopt.trace(Does(lambda self, held: held[key] + 1), ({key: X},))
    with pytest.raises(fxopt.TraceError, match="as a key, which no code of a graph can name"):
        fxopt.trace(Does(lambda self, x: {key: x + 1}), (X,))


def test_a_leaf_that_changes_a_dict_is_refused():
    class Leaf(torch.nn.Module):
        def forward(self, x, held):
            held["y"] = x + 1
            return x

    def forward(self, x, held):
        return self.leaf(x, held)

    with pytest.raises(fxopt.TraceError, match="the layer 'leaf' changes a list or dict"):
        fxopt.trace(module(forward, leaf=Leaf()), (X, {}), leaf_modules=[Leaf], verify=False)


def test_a_defaultdict_keeps_its_factory():
    def forward(self, found):
        return found["a"] + 1, found

    model, given = Does(forward), collections.defaultdict(list, a=X)
    traced = fxopt.trace(model, (given,))
    _, returned = traced(given)
    assert (type(returned), returned.default_factory) == (collections.defaultdict, list)
    with pytest.raises(fxopt.GuardError, match="default_factory"):
        traced(collections.defaultdict(set, a=X))


def list_in_itself(x):
    made = [x]
    made.append(made)
    return made


def dict_in_itself(x):
    made = {"x": x}
    made["made"] = made
    return made


def called_at(depth, function):
    return called_at(depth - 1, function) if depth else function()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("make", [list_in_itself, dict_in_itself])
def test_what_holds_itself_is_one_clear_error(make):
    for model, args in (
        (Does(lambda self, held: self.linear.weight), (make(X),)),
        (Does(lambda self, x: make(x)), (X,)),
    ):
        for depth in range(4):  # where Python stops depends on how deep the caller is
            with pytest.raises(
                fxopt.TraceError, match="contains itself.*Remove the reference that leads back"
            ):
                called_at(depth, lambda model=model, args=args: fxopt.trace(model, args))


def test_a_graph_gives_no_attributes_to_what_is_called():
    """A forged graph would give a layer another `forward`."""
    for target in (
        torch.nn.ReLU(),
        torch.nn.ReLU,
        len.__class__,
        test_a_graph_gives_no_attributes_to_what_is_called,
    ):
        with pytest.raises(TypeError, match="gives no attributes"):
            objects.set_attributes(target, {"forward": print})
