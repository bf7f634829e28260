"""State that a forward leaves behind: left out where no later call reads it, and refused elsewhere."""

import contextvars
import copy
import decimal
import inspect
import itertools
import weakref

import pytest
import torch
from torch import nn
from torch.export import Dim

import fxopt
from tests.modules import module

X = torch.randn(3, 4)


def swapped(self, x):
    return torch.func.functional_call(self.dense, {"weight": self.dense.weight * 2}, (x,))


def retrained(self, x):
    self.dropout.train()
    return self.dropout(x)


def reset(self, x):
    self.dropout.p = 0.9
    return self.dropout(x)


def left_in_training(self, x):
    y = self.dropout(x)
    self.dropout.train()
    return y


def counted(self, x):
    self.calls += 1
    return x * self.calls


def cached(self, x):
    if self.cache is None:
        self.cache = x * 2
    return self.cache


def listed(self, x):
    self.history.append(x * 2)
    return x


def in_a_plain_list(self, x):
    return self.layers[0](x)


def hooked(self, x):
    y = self.dense(x)
    y.register_hook(lambda grad: grad * 10)
    return y


def saved(self, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * 2):
        return x * self.dense.weight.sum()


def seeded(self, x):
    torch.manual_seed(5)
    return x + torch.rand(4)


def default_dtype(self, x):
    torch.set_default_dtype(torch.float64)
    return x


def caught(self, x):
    try:
        return x if x.sum() > 0 else [-x]
    except Exception:
        return x


def caught_assignment(self, x):
    y = x * 1
    try:
        y.data = x * 2
    except Exception:
        return y
    return y


def reshaped(self, x):
    self.dense.bias.data.mul_(2)  # no shape
    self.scale.unsqueeze_(0)
    return x * self.scale.dim()


def reshaped_as_it_was(self, x):
    self.scale.contiguous().unsqueeze_(0)
    return x * self.scale.dim()


def reshaped_in_a_list(self, x):
    self.scales[0].unsqueeze_(0)
    return x * self.scales[0].dim()


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (reshaped, "the shape of 'scale' in place"),
        (reshaped_as_it_was, "'unsqueeze_' changes the shape of a tensor that another call"),
        (reshaped_in_a_list, "the shape of 'a tensor that is no buffer' in place"),
        (left_in_training, "assigns to 'dropout.training'"),
        (counted, "assigns to 'calls'"),
        (cached, "assigns to 'cache'"),
        (listed, "assigns to 'history'"),
        (in_a_plain_list, "not in the model's tree of modules"),
        (hooked, "calls 'register_hook'"),
        (saved, "saved_tensors_hooks"),
        (seeded, r"torch\.manual_seed"),
        (default_dtype, "default dtype"),
        (caught, "decides on the value of a tensor"),
        (caught_assignment, "attribute 'data'"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_would_be_lost_is_refused(forward, message):
    attributes = {"dense": nn.Linear(4, 4), "dropout": nn.Dropout(0.5), "layers": [nn.Linear(4, 4)]}
    attributes |= {"scale": torch.ones(4), "scales": [torch.ones(4)]}
    model = module(forward, calls=0, cache=None, history=[], **attributes)
    with pytest.raises(fxopt.TraceError, match=message):
        fxopt.trace(model, (X,), verify=False)
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()


def last_seen(self, x):
    self.last = x * 2  # written, and never read
    return self.dense(x)


def started_anew(self, x):
    self.cache = None
    if self.cache is None:
        self.cache = x.new_zeros(x.shape)
    self.cache = self.cache + x
    return self.cache * 2


def moved(self, x):
    self.table = self.table.to(x.device)
    self.dense = self.dense.to(x.device)
    return self.dense.to(torch.float32)(x) + self.table


def remembered_size(self, x):
    self.rows = float(3)
    return self.dense(x)


@pytest.mark.parametrize("forward", [last_seen, started_anew, moved, remembered_size])
@pytest.mark.parametrize("free", [None, ({0: Dim.DYNAMIC},)])
def test_state_that_alters_no_later_call_is_left_out(forward, free):
    model = module(forward, dense=nn.Linear(4, 4), cache=None, table=torch.ones(4))
    gm = fxopt.trace(model, (X,), dynamic_shapes=free)
    for x in [X, X + 1, *([X[:2]] if free else [])]:
        assert torch.equal(gm(x), model(x))
    assert not hasattr(gm, "last")


def counted_without_use(self, x):
    self.calls += 1
    return x if self.calls < 10 else -x


def kept_by_size(self, x):
    if self.cache is None or self.cache.shape != x.shape:
        self.cache = torch.ones(x.shape)
    return x * 2


def kept(self, x):
    if self.cache is None:
        self.cache = torch.ones(x.shape)
    return x * 2


def counted_in_a_dict(self, x):
    self.held["calls"] = self.held.get("calls", 0) + 1
    return x * self.held["calls"]


def counted_in_an_object(self, x):
    self.held.calls = getattr(self.held, "calls", 0) + 1
    return x * self.held.calls


def counted_in_a_set(self, x):
    self.held.add(len(self.held))
    return x * len(self.held)


def counted_by_python(self, x):
    return x * next(self.held)


class Held:
    """A plain object."""


@pytest.mark.parametrize(
    ("forward", "held"),
    [
        (counted_in_a_dict, {}),
        (counted_in_an_object, Held()),
        (counted_in_a_set, set()),
        (counted_by_python, itertools.count(1)),
    ],
)
def test_state_in_objects_of_a_module_is_refused(forward, held):
    with pytest.raises(fxopt.TraceError, match="assigns to 'held'"):
        fxopt.trace(module(forward, held=held), (X,))


def test_what_a_forward_sets_anew_in_an_object_is_left_out():
    def forward(self, x):
        self.held.factor = 3
        self.table["rows"] = x.shape[1]
        return x * self.held.factor + self.table["rows"]

    model = module(forward, held=Held(), table={})
    assert torch.equal(fxopt.trace(model, (X,))(X), model(X))


def test_state_that_might_alter_a_later_call_is_refused():
    with pytest.raises(fxopt.TraceError, match="assigns to 'calls'"):
        fxopt.trace(module(counted_without_use, calls=0), (X,))


@pytest.mark.parametrize("forward", [kept_by_size, kept])
def test_what_is_kept_of_a_free_size_and_never_used_is_left_out(forward):
    model = module(forward, cache=None)
    traced = fxopt.trace(model, (X,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    for x in (X, X[:2], X):
        assert torch.equal(traced(x), x * 2)


class KeepsWhatItMade(nn.Module):
    """Keeps results of its layers, which nothing reads."""

    def __init__(self):
        super().__init__()
        self.dense, self.kept = nn.Linear(4, 4), {}

    def forward(self, x):
        self.last = self.dense(x)
        self.kept["mean"] = [self.last.mean()]
        return self.last * 2


def test_results_that_an_earlier_run_has_left_have_no_history():
    model = KeepsWhatItMade()
    model(X)
    kept = model.last, model.kept["mean"][0]
    traced = fxopt.trace(model, (X,))
    assert torch.equal(traced(X), model(X))
    assert all(tensor.grad_fn is not None for tensor in kept)


class KeepsForOneBranch(nn.Module):
    """Adds experts where they are hit, and keeps something that a call may read where one is not hit."""

    def __init__(self, reads):
        super().__init__()
        self.reads, self.kept = reads, "nothing"
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        if self.reads:
            y = torch.zeros_like(x) if self.kept is None else torch.zeros_like(x) + 1
            self.kept = None
        else:
            self.kept = x.dtype
            y = torch.zeros_like(x).to(self.kept)
        hit = (x > 0).sum(0)[:2].nonzero()
        for index in hit:
            (rows,) = torch.where(x[:, index[0]] > 0)
            y.index_add_(0, rows, self.experts[index[0]](x[rows]))
        return y


def test_what_no_call_reads_takes_a_second_call_for_each_outcome():
    model = KeepsForOneBranch(reads=False)
    x = X.abs()
    traced = fxopt.trace(model, (x,))
    assert torch.equal(traced(x), model(x))
    assert traced.meta["forward_runs"] == 7  # up to the loop; with its body, without, and in turn, twice each


def test_an_expert_that_is_not_hit_has_gradients_of_zero_in_a_graph_and_none_in_the_model():
    model, x = KeepsForOneBranch(reads=False).train(), -X.abs()
    assert not model(x).requires_grad
    assert torch.equal(fxopt.trace(model, (x,))(x), model(x))


def test_what_is_compared_with_none_alone_is_read():
    with pytest.raises(fxopt.TraceError):
        fxopt.trace(KeepsForOneBranch(reads=True), (X,), verify=False)


def counts_and_logs(self, x):
    self.calls += 1
    self.seen = self.seen * 0.9 + 0.1
    return x * 2


def counts_for_later(self, x):
    self.calls += 1
    return x * 2 if self.calls % 2 else x


def test_a_counter_that_nothing_else_reads_is_no_state():
    model = module(counts_and_logs, calls=0, seen=0.5)
    traced = fxopt.trace(model, (X,))
    assert torch.equal(traced(X), X * 2)
    assert torch.equal(traced(X), X * 2)
    with pytest.raises(fxopt.TraceError, match="calls"):
        fxopt.trace(module(counts_for_later, calls=0), (X,), verify=False)


def looked_up(self, x):
    factor = self.__dict__.get("kept", 1)
    self.kept = 2
    return x * factor


def made_once(self, x):
    if "kept" not in vars(self):
        self.kept = x.shape[0]
    return x * self.kept


def listed(self, x):
    names = [name for name in vars(self) if name == "kept"]
    self.kept = 2
    return x * (1 + len(names))


def taken_from_object(self, x):
    try:
        factor = object.__getattribute__(self, "kept")
    except AttributeError:
        factor = 1
    self.kept = 2
    return x * factor


def taken_from_module(self, x):
    try:
        factor = nn.Module.__getattribute__(self, "kept")
    except AttributeError:
        factor = 1
    self.kept = 2
    return x * factor


def taken_statically(self, x):
    factor = inspect.getattr_static(self, "kept", 1)
    self.kept = 2
    return x * factor


def taken_from_dict(self, x):
    factor = dict.get(self.__dict__, "kept", 1)
    self.kept = 2
    return x * factor


def taken_from_a_copy(self, x):
    factor = getattr(copy.copy(self), "kept", 1)
    self.kept = 2
    return x * factor


def there_or_not(self, x):
    factor = 2 if hasattr(self, "kept") else 1
    self.kept = None
    return x * factor


def called_or_not(self, x):
    try:
        y = self.kept(x)
    except (AttributeError, TypeError):
        y = x
    total = x.sum()
    self.kept = lambda t: t * total
    return y


@pytest.mark.parametrize(
    "forward",
    [
        *(
            looked_up,
            made_once,
            listed,
            taken_from_object,
            taken_from_module,
            taken_statically,
            taken_from_dict,
        ),
        *(taken_from_a_copy, there_or_not, called_or_not),
    ],
)
def test_what_is_read_past_getattr_is_read(forward):
    with pytest.raises(fxopt.TraceError, match="assigns to 'kept'"):
        fxopt.trace(module(forward), (X,), dynamic_shapes=({0: Dim.AUTO},), verify=False)


def in_a_slot(self, x):
    factor = 2 if hasattr(self, "slot") else 1
    self.slot = 1
    return x * factor


def test_what_is_in_slots_of_a_module_is_state():
    model = type("Made", (nn.Module,), {"forward": in_a_slot, "__slots__": ("slot",)})()
    with pytest.raises(fxopt.TraceError, match="assigns to 'slot'"):
        fxopt.trace(model, (X,), verify=False)


class ReadsAtOne(nn.Module):
    """Reads, in a batch of one, what calls of other sizes leave."""

    def __init__(self):
        super().__init__()
        self.factor = 1

    def forward(self, x):
        if x.shape[0] == 1:
            return x * self.factor
        self.factor = 2
        return x * 1


def test_what_is_read_at_size_one_alone_is_read():
    model = ReadsAtOne()
    traced = fxopt.trace(model, (X,), dynamic_shapes=({0: Dim.AUTO},))
    assert torch.equal(traced(X), model(X))
    with pytest.raises(fxopt.GuardError):
        traced(X[:1])


def swapped_children(self, x):
    y = self.first(x)
    self.first, self.second = self.second, self.first
    return y


def turned(self, x):
    y = self.order[0](x)
    self.order.reverse()
    return y


def bound(self, x):
    y = self.method(x)
    self.method = self.second.forward
    return y


def other_parameter(self, x):
    y = self.first(x)
    self.first.weight, self.second.weight = self.second.weight, self.first.weight
    return y


def other_tensor(self, x):
    y = x * 2 if self.now is self.table else x
    self.now = self.table
    return y


def other_forward(self, x):
    y = self.first(x)
    self.first.forward = torch.relu
    return y


def other_class(self, x):
    y = self.first(x)
    self.__class__ = nn.Module
    return y


def without_child(self, x):
    if hasattr(self, "second"):
        del self.second
        return self.first(x)
    return self.first(x) * 2


def hooked_for_good(self, x):
    self.first.register_forward_hook(lambda module, args, output: output * 2)
    return self.first(x)


def through_a_weak_reference(self, x):
    kept = self.reference()
    y = x * kept.factor
    kept.factor = 2
    return y


@pytest.mark.parametrize(
    "forward",
    [
        *(swapped_children, turned, bound, other_parameter, other_tensor, other_forward, other_class),
        *(without_child, hooked_for_good, through_a_weak_reference),
    ],
)
def test_which_modules_and_tensors_a_module_has_is_state(forward):
    first, second, held = nn.Linear(4, 4), nn.Linear(4, 4), Held()
    held.factor = 1
    model = module(forward, first=first, second=second, held=held, table=torch.ones(4), now=None)
    model.order, model.method, model.reference = [first, second], first.forward, weakref.ref(held)
    with pytest.raises(fxopt.TraceError, match="assigns to"):
        fxopt.trace(model, (X,), verify=False)
    assert held.factor == 1


def test_a_list_that_two_modules_share_stays_one():
    def writes(self, x):
        self.heads[0] = x * 2
        return x + 1

    def reads(self, x):
        return self.child(x) + self.heads[0]

    heads = [torch.ones(1)]
    model = module(reads, child=module(writes, heads=heads), heads=heads)
    traced = fxopt.trace(model, (X,))
    for x in (X, -X):
        assert torch.equal(traced(x), model(x))
    model.child.heads = [torch.ones(1)]  # now the model reads what nothing writes
    traced = fxopt.trace(model, (X,))
    assert torch.equal(traced(X), model(X))


def hooked_for_one_call(self, x):
    handle = self.first.register_forward_hook(lambda module, args, output: output * 2)
    y = self.first(x)
    handle.remove()
    return y


def test_a_hook_of_one_call_of_a_layer():
    model = module(hooked_for_one_call, first=nn.Linear(4, 4))
    traced = fxopt.trace(model, (X,), verify=False)
    for _ in range(2):
        assert torch.equal(traced(X), model(X))


def grown(self, x):
    self.extra = nn.Linear(4, 4)
    return self.extra(x)


def as_long_as_it_was_called(self, x):
    self.calls += 1
    return x * len([2] * self.calls)


@pytest.mark.parametrize(
    ("forward", "message"),
    [(grown, "adds the module 'extra'"), (as_long_as_it_was_called, "assigns to 'calls'")],
)
def test_a_reason_is_given(forward, message):
    with pytest.raises(fxopt.TraceError, match=message):
        fxopt.trace(module(forward, calls=0), (X,), verify=False)


VARIABLE = contextvars.ContextVar("VARIABLE", default=1)


def in_a_context_variable(self, x):
    y = x * VARIABLE.get()
    VARIABLE.set(2)
    return y


def in_a_context_variable_before_it_is_read(self, x):
    VARIABLE.set(2)
    return x * VARIABLE.get()


def in_a_context_variable_for_a_while(self, x):
    token = VARIABLE.set(3)
    try:
        return x * VARIABLE.get()
    finally:
        VARIABLE.reset(token)


UNSET = contextvars.ContextVar("UNSET", default=1)
COUNTED = contextvars.ContextVar("COUNTED", default=[0])  # noqa: B039 - the list that a forward may change
NUMBERS = (n for n in range(99))


def set_to_none(self, x):
    y = x if UNSET.get() is None else x * 2
    UNSET.set(None)
    return y


def counted_in_a_default(self, x):
    COUNTED.get()[0] += 1
    return x * COUNTED.get()[0]


def by_a_generator(self, x):
    return x * next(NUMBERS)


@pytest.mark.parametrize(
    ("forward", "name"),
    [(set_to_none, "variable 'UNSET'"), (counted_in_a_default, "'COUNTED'"), (by_a_generator, "'NUMBERS'")],
)
def test_state_behind_defaults_and_generators(forward, name):
    with pytest.raises(fxopt.TraceError, match=f"changes .*{name}"):
        fxopt.trace(module(forward), (X,), verify=False)
    assert COUNTED.get() == [0]


GROWN = {1: 1}
OVER_GROWN = iter(GROWN)


def grown_under_its_iterator(self, x):
    GROWN[2] = 2
    return x if OVER_GROWN is None else x * 2


def test_an_iterator_that_can_go_no_further_is_no_fault_of_the_capture():
    model = module(grown_under_its_iterator)
    assert torch.equal(fxopt.trace(model, (X,), verify=False)(X), model(X))


def test_the_context_of_decimal_numbers_is_no_state():
    def made_in_a_new_context():
        return fxopt.trace(module(lambda self, x: x * float(decimal.Decimal(1) / 4)), (X,), verify=False)

    assert contextvars.Context().run(made_in_a_new_context).meta["forward_runs"] == 1


def test_context_variables():
    with pytest.raises(fxopt.TraceError, match="changes the context variable 'VARIABLE'"):
        fxopt.trace(module(in_a_context_variable), (X,), verify=False)
    assert VARIABLE.get() == 1
    assert torch.equal(fxopt.trace(module(in_a_context_variable_for_a_while), (X,))(X), X * 3)
    assert torch.equal(fxopt.trace(module(in_a_context_variable_before_it_is_read), (X,))(X), X * 2)


@pytest.mark.parametrize("asked", ["is_shared()", "_is_view()", "is_set_to(x)"])
def test_properties_that_no_guard_holds(asked):
    forward = eval(f"lambda self, x: x * 2 if x.{asked} else x")
    with pytest.raises(fxopt.TraceError, match="no guard holds"):
        fxopt.trace(module(forward), (X,), verify=False)


class Counter:
    def __init__(self, count):
        self.count = count


def counts_in_the_last_of_many(self, x):
    self.counters[-1].count += 1
    return x * self.counters[-1].count


def test_each_of_many_objects_is_state():
    model = module(counts_in_the_last_of_many, counters=[Counter(n) for n in range(50)])
    with pytest.raises(fxopt.TraceError, match="counters"):
        fxopt.trace(model, (X,), verify=False)


class Schedule:
    """Steps as those of a diffusion scheduler, which counts them and keeps what it was given last."""

    def __init__(self):
        self.sigmas, self.step, self.history = torch.tensor([2.0, 1.0, 0.5, 0.0]), 0, []

    def next(self, output, x):
        change = self.sigmas[self.step + 1] - self.sigmas[self.step]
        self.history = [*self.history, output][-2:]
        self.step += 1
        return x + sum(self.history) * change


def samples(self, x):
    self.schedule.step, self.schedule.history = 0, []
    for _ in range(3):
        x = self.schedule.next(self.dense(x), x)
    return x


@pytest.mark.parametrize("free", [None, ({0: Dim.AUTO},)])
def test_an_object_is_set_anew_and_what_it_held_before_stays(free):
    model = module(samples, dense=nn.Linear(4, 4), schedule=Schedule())
    traced = fxopt.trace(model, (X,), dynamic_shapes=free)
    for x in (X, -X):
        assert torch.equal(traced(x), model(x))
    assert traced.meta["forward_runs"] == 2


def writes_what_an_object_held(self, x):
    self.schedule.step = 0
    self.schedule.sigmas.mul_(2)
    self.schedule.step += 1
    return x * self.schedule.sigmas[self.schedule.step]


def swaps_what_an_object_held(self, x):
    schedule = self.schedule
    schedule.sigmas, schedule.history = schedule.history or schedule.sigmas * 2, schedule.sigmas
    return x * schedule.sigmas[0]


@pytest.mark.parametrize("forward", [writes_what_an_object_held, swaps_what_an_object_held])
def test_what_an_object_held_before_is_another_value_at_each_call(forward):
    with pytest.raises(fxopt.TraceError):
        fxopt.trace(module(forward, schedule=Schedule()), (X,), verify=False)


def counts_and_keeps_a_shape(self, x):
    self.calls += 1
    self.shape = x.shape
    return x * 2


def test_a_shape_that_is_kept_and_not_read_takes_no_further_runs():
    model = module(counts_and_keeps_a_shape, calls=0, shape=None)
    traced = fxopt.trace(model, (X,), dynamic_shapes=({0: Dim.AUTO},))
    assert torch.equal(traced(X[:1]), X[:1] * 2)
    assert traced.meta["forward_runs"] == 3
