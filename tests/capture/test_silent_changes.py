"""Ways in which a graph could differ from its model without an error; each is right, or refused."""

import collections
import copy
import enum
import gc
import itertools
import pickle
import random
import weakref

import numpy
import pytest
import torch
from torch import nn
from torch.export import Dim

import fxopt
from tests.capture.test_trace import assert_same

X = torch.randn(3, 4)
OUTSIDE = torch.zeros(4)


class Mode(enum.Enum):
    ADD = 1
    MULTIPLY = 2


def module(forward, **attributes):
    """A module with this forward; modules among the attributes become children."""
    made = type("Made", (nn.Module,), {"forward": forward})()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made.eval()


def test_fresh_tensors_in_containers_are_fresh_at_each_call():
    def forward(self, x):
        t = torch.tensor([1.0, 2.0])
        t[0] = 5
        s = torch.tensor([0.0, 0.0])
        torch._foreach_add_([s], 1.0)
        return t, {"x": torch.tensor([3.0]), "s": s}

    gm = fxopt.trace(module(forward), (X,))
    for _ in range(2):
        out = gm(X)
        assert out[0].tolist() == [5.0, 2.0]
        assert out[1]["x"].tolist() == [3.0]
        assert out[1]["s"].tolist() == [1.0, 1.0]
        out[1]["x"].add_(1)


def test_tensors_of_the_user_are_not_written_by_a_capture():
    def forward(self, x):
        self.state.add_(1)
        OUTSIDE.add_(1)
        return x + self.state.sum() + OUTSIDE.sum()

    model = module(forward, state=torch.zeros(4))
    gm = fxopt.trace(model, (X,))
    assert model.state.sum() == 0
    assert OUTSIDE.sum() == 0
    torch.testing.assert_close(gm(X), X + 8)
    assert OUTSIDE.sum() == 4  # a run writes, as the model's would
    OUTSIDE.zero_()


def test_inputs_are_not_touched_by_a_capture():
    def append(self, x, items):
        items.append(x)
        return x

    items = [1]
    for given in ([X], items):
        with pytest.raises(fxopt.TraceError, match="changes its input items"):
            fxopt.trace(module(append), (X, given))
    assert items == [1]
    with pytest.raises(fxopt.TraceError, match="input batch is a deque, which holds tensors"):
        fxopt.trace(module(lambda self, batch: batch[0] * 2), (collections.deque([X]),))


def test_constants_are_kept_as_they_were():
    items = [2]
    gm = fxopt.trace(module(lambda self, x, items: x * items[0]), (X, items))
    items[0] = 5
    with pytest.raises(fxopt.GuardError):
        gm(X, items)
    with pytest.raises(fxopt.GuardError):
        gm(X, [2.0])
    nan = fxopt.trace(module(lambda self, x, n: x * n), (X, float("nan")))
    assert nan(X, float("nan")).isnan().all()


@pytest.mark.parametrize(
    "layer", [nn.Linear(4, 4), nn.ReLU(), nn.LSTM(4, 4), nn.TransformerEncoderLayer(4, 2, 8)]
)
def test_a_layer_alone(layer):
    x = torch.randn(2, 3, 4)
    gm = fxopt.trace(layer.eval(), (x,))
    assert_same(gm(x), layer(x))


def test_a_bare_module_is_a_container():
    names = nn.Module()
    names.dense = nn.Linear(4, 4)
    model = module(lambda self, x: self.names.dense(x), names=names)
    gm = fxopt.trace(model, (X,))
    assert gm.names is not model.names
    assert gm.names.dense is model.names.dense


def swapped(self, x):
    return torch.func.functional_call(self.dense, {"weight": self.dense.weight * 2}, (x,))


def retrained(self, x):
    self.dropout.train()
    return self.dropout(x)


def reset(self, x):
    self.dropout.p = 0.9
    return self.dropout(x)


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
        return x if x.sum() > 0 else -x
    except Exception:
        return x


def caught_assignment(self, x):
    y = x * 1
    try:
        y.data = x * 2
    except Exception:
        return y
    return y


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (swapped, "changes weight of the layer 'dense'"),
        (retrained, "changes training of the layer 'dropout'"),
        (reset, "changes p of the layer 'dropout'"),
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
    model = module(forward, calls=0, cache=None, history=[], **attributes)
    with pytest.raises(fxopt.TraceError, match=message):
        fxopt.trace(model, (X,))
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


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand])
def test_random_numbers_of_python_are_refused(draw):
    state = random.getstate()
    with pytest.raises(fxopt.TraceError, match="draws random numbers from Python's '(numpy.)?random'"):
        fxopt.trace(module(lambda self, x: x * draw()), (X,))
    assert random.getstate() == state


def test_random_numbers_of_python_after_a_seed_are_known():
    def forward(self, x):
        numpy.random.seed(3)
        return x * numpy.random.rand()

    model = module(forward)
    assert torch.equal(fxopt.trace(model, (X,))(X), model(X))


class Shaken(nn.Module):
    def forward(self, x):
        return x * random.random()


def test_a_leaf_may_draw_random_numbers_of_python():
    model = module(lambda self, x: self.shaken(x), shaken=Shaken())
    gm = fxopt.trace(model, (X,), leaf_modules=[Shaken])
    random.seed(0)
    expected = model(X)
    random.seed(0)
    assert torch.equal(gm(X), expected)


def test_a_size_in_a_tensor_that_is_written_is_read_again():
    def forward(self, x):
        half = torch.div(x.shape[0], 2, rounding_mode="floor")
        half += 1
        return x[:half]

    gm = fxopt.trace(module(forward), (torch.randn(6, 4),), dynamic_shapes=({0: Dim.DYNAMIC},))
    for rows in (2, 6, 9):
        assert gm(torch.randn(rows, 4)).shape == (rows // 2 + 1, 4)


def test_an_index_in_a_tensor_that_is_written_is_not_taken_for_known():
    def forward(self, x):
        last = torch.div(x.shape[0], 2, rounding_mode="floor")
        last.sub_(1)
        return x[last] * 2

    with pytest.raises(fxopt.TraceError, match="decides on the value of a tensor"):
        fxopt.trace(module(forward), (torch.randn(6, 4),), dynamic_shapes=({0: Dim.DYNAMIC},))


def test_guards_with_functions_of_python():
    def forward(self, x):
        return x * 2 if abs(x.shape[0] - 5) > 2 else x * 3

    gm = fxopt.trace(module(forward), (torch.randn(9, 4),), dynamic_shapes=({0: Dim.DYNAMIC},))
    assert torch.equal(gm(torch.ones(8, 4)), torch.full((8, 4), 2.0))
    with pytest.raises(fxopt.GuardError, match="dimension 0 is 6"):
        gm(torch.ones(6, 4))


def test_a_complex_view_of_an_input_with_free_sizes():
    model = module(lambda self, x: torch.view_as_complex(x.reshape(-1, 2, 2)) * 2j)
    gm = fxopt.trace(model, (X,), dynamic_shapes=({0: Dim.DYNAMIC},))
    for x in (X, X[:2], torch.randn(5, 4)):
        assert torch.equal(gm(x), model(x))


def test_strides_that_the_forward_reads_are_those_of_the_example():
    model = module(lambda self, x: x * x.stride(1) + x.storage_offset())
    gm = fxopt.trace(model, (torch.randn(3, 8)[:, ::2],))
    other = torch.randn(3, 8)[:, ::2]
    assert torch.equal(gm(other), model(other))
    for other in (torch.randn(3, 12)[:, ::3], torch.randn(3, 8)[:, 1::2]):
        with pytest.raises(fxopt.GuardError, match="reads strides"):
            gm(other)


def test_a_dict_among_the_inputs_whose_keys_are_changed_is_refused():
    def forward(self, given):
        given["b"] = given.pop("a")
        return given["b"] + 1

    with pytest.raises(fxopt.TraceError, match="changes its input given"):
        fxopt.trace(module(forward), ({"a": X},))


@pytest.mark.parametrize("forward", [counted_without_use, kept_by_size, kept])
def test_state_that_might_alter_a_later_call_is_refused(forward):
    with pytest.raises(fxopt.TraceError, match="assigns to '(calls|cache)'"):
        fxopt.trace(module(forward, calls=0, cache=None), (X,))


def test_backward_hooks_of_containers_are_refused():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))
    model[0].register_full_backward_hook(lambda *args: None)
    with pytest.raises(fxopt.TraceError, match="'0' has backward hooks"):
        fxopt.trace(model, (X,))
    gm = fxopt.trace(model, (X,), leaf_modules=["0"])
    assert torch.equal(gm(X), model(X))


def test_shapes_changed_in_place_while_sizes_are_free_are_refused():
    def forward(self, x):
        rows = x.shape[0]
        x.t_()
        return x * rows

    with pytest.raises(fxopt.TraceError, match="changes the shape of a tensor in place"):
        fxopt.trace(module(forward), (X.clone(),), dynamic_shapes=({0: Dim.AUTO},))
    gm = fxopt.trace(module(forward), (X.clone(),))
    assert torch.equal(gm(X.clone()), X.T * 3)


def test_a_global_mode_that_the_forward_reads_is_guarded():
    gm = fxopt.trace(module(lambda self, x: x * 2 if torch.is_grad_enabled() else x), (X,))
    assert torch.equal(gm(X), X * 2)
    with torch.no_grad(), pytest.raises(fxopt.GuardError, match="captured with grad on"):
        gm(X)
    gm = fxopt.trace(module(lambda self, x: x * 2 if torch.is_autocast_enabled("cpu") else x), (X,))
    with torch.autocast("cpu"), pytest.raises(fxopt.GuardError, match="captured with autocast off"):
        gm(X)


def test_inference_mode_that_the_forward_reads_is_guarded():
    gm = fxopt.trace(module(lambda self, x: x * 2 if torch.is_inference_mode_enabled() else x), (X,))
    assert torch.equal(gm(X), X)
    with torch.inference_mode(), pytest.raises(fxopt.GuardError, match="captured with inference_mode off"):
        gm(X)


def test_a_free_size_is_an_int_to_the_model():
    model = module(lambda self, x: x * 2 if isinstance(x.shape[0], int) else x)
    gm = fxopt.trace(model, (X,), dynamic_shapes=({0: Dim.DYNAMIC},))
    assert torch.equal(gm(X[:2]), X[:2] * 2)


@pytest.mark.parametrize("text", [str, "{}".format, lambda size: f"{size}"])
def test_a_size_as_text_is_guarded(text):
    model = module(lambda self, x: x * {"3": 3}.get(text(x.shape[0]), 7))
    gm = fxopt.trace(model, (X,), dynamic_shapes=({0: Dim.AUTO},))
    assert torch.equal(gm(X), X * 3)
    with pytest.raises(fxopt.GuardError, match="dimension 0 is 2"):
        gm(X[:2])


def test_whether_a_tensor_takes_gradients_is_guarded_where_the_forward_reads_it():
    gm = fxopt.trace(module(lambda self, x: x * 2 if (x + 1).requires_grad else x * 3), (X,))
    assert torch.equal(gm(X), X * 3)
    with pytest.raises(fxopt.GuardError, match="'x' has requires_grad=True"):
        gm(X.clone().requires_grad_())
    with torch.no_grad(), pytest.raises(fxopt.GuardError, match="captured with grad on"):
        gm(X)


def of_a_parameter(self, x):
    return x * 2 if self.dense.weight.requires_grad else x * 3


def of_a_result(self, x):
    return x * 2 if self.dense(x).requires_grad else x * 3


def graph_of_a_result(self, x):
    return x * 3 if self.dense(x).grad_fn is None else x * 2


def leaf(self, x):
    return x * 3 if self.dense(x).is_leaf else x * 2


@pytest.mark.parametrize("forward", [of_a_parameter, of_a_result, graph_of_a_result, leaf])
def test_whether_a_parameter_takes_gradients_is_checked_where_the_forward_reads_it(forward):
    model = module(forward, dense=nn.Linear(4, 4))
    gm = fxopt.trace(model, (X,))
    assert torch.equal(gm(X), X * 2)
    copied = pickle.loads(pickle.dumps(gm))
    for frozen in (gm.requires_grad_(False), copied.requires_grad_(False)):
        with pytest.raises(
            fxopt.GuardError, match=r"'dense.weight' .* has requires_grad=False, .*: it was True"
        ):
            frozen(X)
    gm.requires_grad_(True)
    assert torch.equal(gm(X), X * 2)
    model.requires_grad_(False)
    assert torch.equal(fxopt.trace(model, (X,))(X), X * 3)


def test_a_merged_parameter_is_checked_like_those_that_it_came_from():
    def forward(self, x):
        return self.a(x) * self.b(x) * (2 if self.a.weight.requires_grad else 3)

    gm = fxopt.trace(module(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), (X,))
    expected = gm(X)
    merged = fxopt.MergeLinears()(gm)
    torch.testing.assert_close(merged(X), expected)
    with pytest.raises(fxopt.GuardError, match="has requires_grad=False"):
        merged.requires_grad_(False)(X)


def test_a_frozen_parameter_is_no_error_where_nobody_asks():
    gm = fxopt.trace(nn.Sequential(nn.Linear(4, 4)), (X,))
    expected = gm(X)
    assert torch.equal(gm.requires_grad_(False)(X), expected)


def test_an_integer_dtype_that_the_forward_reads_is_guarded():
    gm = fxopt.trace(
        module(lambda self, x: torch.arange(3, dtype=x.dtype) + x), (torch.ones(3, dtype=torch.long),)
    )
    with pytest.raises(fxopt.GuardError, match="is torch.int32"):
        gm(torch.ones(3, dtype=torch.int32))


def test_enums_ranges_and_named_results_come_back_as_they_are():
    def forward(self, x):
        return Mode.ADD, torch.max(x, 1), x[range(2)]

    gm = fxopt.trace(module(forward), (X,))
    mode, largest, rows = gm(X)
    assert mode is Mode.ADD
    assert torch.equal(largest.values, X.max(1).values)
    assert torch.equal(rows, X[0:2])


def test_a_capture_under_inference_mode():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval()
    with torch.inference_mode():
        gm = fxopt.trace(model, (X,))
    assert torch.equal(gm(X), model(X))


def test_a_forward_that_takes_gradients():
    def forward(self, x):
        y = self.second(self.first(x)).sum()
        return torch.autograd.grad(y, x)[0]

    model = module(forward, first=nn.Linear(4, 4), second=nn.Linear(4, 4))
    x = X.clone().requires_grad_()
    assert torch.equal(fxopt.trace(model, (x,))(x), model(x))


def test_free_sizes_in_padding_resizing_rounding_and_recurrence():
    def forward(self, x):
        rows = x.shape[1]
        padded = nn.functional.pad(x, (0, 0, 0, (8 - rows % 8) % 8))
        out, _ = self.lstm(x)
        part = x[:, : rows // 2]
        return padded, out, part, nn.functional.interpolate(x[None], size=(2 * rows, 7))

    model = module(forward, lstm=nn.LSTM(4, 5, batch_first=True))
    gm = fxopt.trace(model, (torch.randn(2, 6, 4),), dynamic_shapes=({1: Dim.AUTO},))
    for rows in (5, 8, 9):
        x = torch.randn(2, rows, 4)
        assert_same(gm(x), model(x))


def test_a_size_that_python_makes_a_number_is_guarded():
    gm = fxopt.trace(
        module(lambda self, x: x[: int(0.7 * x.shape[0])]),
        (torch.ones(6, 4),),
        dynamic_shapes=({0: Dim.AUTO},),
    )
    assert gm(torch.ones(7, 4)).shape == (4, 4)
    with pytest.raises(fxopt.GuardError, match="dimension 0 is 9"):
        gm(torch.ones(9, 4))


def test_a_guard_that_is_no_limit_is_not_called_one():
    gm = fxopt.trace(
        module(lambda self, x: x * 2 if x.shape[0] % 2 == 0 else x),
        (torch.ones(4, 4),),
        dynamic_shapes=({0: Dim.AUTO},),
    )
    with pytest.raises(
        fxopt.GuardError, match=r"dimension 0 is 5; it must satisfy \(x\.shape\[0\] % 2\) == 0"
    ):
        gm(torch.ones(5, 4))


def test_old_weight_norm_is_a_layer():
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4))).eval()
    gm = fxopt.trace(model, (X,))
    assert torch.equal(gm(X), model(X))


def test_leaf_modules_that_do_not_exist_are_named():
    with pytest.raises(fxopt.TraceError, match="leaf_modules has 'typo', which fits no module"):
        fxopt.trace(nn.Sequential(nn.Linear(4, 4)), (X,), leaf_modules=["typo"])


def test_nothing_is_kept_alive_by_a_capture():
    def capture():
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
        gm = fxopt.trace(model, (X,), dynamic_shapes=({0: Dim.AUTO},))
        copy.deepcopy(gm)
        return weakref.ref(model[0].weight), weakref.ref(gm)

    references = capture()
    gc.collect()
    assert [reference() for reference in references] == [None, None]
