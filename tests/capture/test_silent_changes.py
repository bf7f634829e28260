"""Ways in which a graph could differ from its model without an error; each is right, or refused."""

import collections
import copy
import enum
import gc
import math
import random
import time
import weakref

import numpy
import pytest
import torch
from torch import nn
from torch.export import Dim

import fxopt
from tests.capture.test_trace import assert_same
from tests.modules import module

X = torch.randn(3, 4)
OUTSIDE = torch.zeros(4)


class Mode(enum.Enum):
    ADD = 1
    MULTIPLY = 2


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


def test_tensors_outside_that_a_model_writes_before_it_raises_are_as_they_were():
    def forward(self, x, rows):
        OUTSIDE.add_(1)
        return x[rows] + OUTSIDE

    with pytest.warns(UserWarning, match="the model raises IndexError"):
        fxopt.trace(module(forward), (X, torch.tensor([9])))
    assert OUTSIDE.sum() == 0


def test_inputs_are_not_touched_by_a_capture():
    def append(self, x, items):
        items.append(x)
        return x

    for items in ([X], [1], []):
        given, expected = list(items), list(items)
        traced = fxopt.trace(module(append), (X, given))
        assert len(given) == len(items)
        assert traced(X, given) is X
        append(None, X, expected)
        assert list(map(id, given)) == list(map(id, expected))
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


def drops_in_training(draw):
    """The layer drop of wav2vec2, VITS and others: the number is drawn in any mode, and used in training alone."""

    def forward(self, x):
        dropped = draw()
        return x * 2 if self.training and dropped < 0.5 else x * 3

    return module(forward)


DRAWS = [
    random.random,
    lambda: random.uniform(0, 1),
    lambda: random.randint(0, 1),
    numpy.random.rand,
    lambda: numpy.random.uniform(0, 1),
    lambda: numpy.random.randint(2),
]


@pytest.mark.parametrize("draw", [lambda: random.uniform(0, 1), lambda: numpy.random.uniform(0, 1)])
def test_a_number_that_is_drawn_and_not_used_is_harmless(draw):
    model = drops_in_training(draw)
    assert torch.equal(fxopt.trace(model.eval(), (X,))(X), model(X))
    states = random.getstate(), numpy.random.get_state()[1].tolist()
    with pytest.raises(
        fxopt.TraceError, match=r"draws random numbers.*`return x \* 2 if self.training and dropped"
    ):
        fxopt.trace(model.train(), (X,), specialize=True)
    assert states == (random.getstate(), numpy.random.get_state()[1].tolist())


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    "use",
    [
        lambda self, x, drawn: x * drawn,
        lambda self, x, drawn: drawn * x,
        lambda self, x, drawn: x + math.sqrt(drawn),
        lambda self, x, drawn: x + numpy.sqrt(drawn),
        lambda self, x, drawn: x + int(drawn),
        lambda self, x, drawn: x + x[round(drawn)],
        lambda self, x, drawn: x + x.shape[0] * drawn,
        lambda self, x, drawn: x if drawn else -x,
        lambda self, x, drawn: x if drawn in (0, 1) else -x,
        lambda self, x, drawn: x if drawn in {0, 1} else -x,
        lambda self, x, drawn: x if isinstance(drawn, float) else -x,
        lambda self, x, drawn: x if 0.5 > drawn else -x,  # noqa: SIM300  what is drawn stands on the right
        lambda self, x, drawn: x if drawn == 0.5 else -x,
        lambda self, x, drawn: x if f"{drawn:.1f}" == "0.5" else -x,
        lambda self, x, drawn: x if str(drawn) == "0.5" else -x,
        lambda self, x, drawn: x * drawn.real,
        lambda self, x, drawn: x * copy.copy(drawn),
        lambda self, x, drawn: (x, drawn),
        lambda self, x, drawn: {"x": x, "drawn": drawn},
        lambda self, x, drawn: self.leaf(x, drawn),
        lambda self, x, drawn: nn.functional.dropout(x, drawn),
        lambda self, x, drawn: torch.full_like(x, drawn),
        lambda self, x, drawn: x + torch.tensor([drawn]),
        lambda self, x, drawn: setattr(self, "drawn", drawn) or x,
        lambda self, x, drawn: self.seen.append(drawn) or x,
    ],
)
@pytest.mark.parametrize("draw", DRAWS)
def test_any_use_of_a_number_that_is_drawn_is_refused(draw, use):
    model = module(lambda self, x: use(self, x, draw()), leaf=Shaken(), seen=[])
    with pytest.raises(fxopt.TraceError):
        fxopt.trace(model, (X,), leaf_modules=["leaf"])


IMPORTED = random.random, numpy.random.rand


@pytest.mark.parametrize(
    ("draw", "states"),
    [
        (IMPORTED[0], (random.getstate, "random.setstate")),
        (IMPORTED[1], (numpy.random.get_state, "numpy.random.set_state")),
        (lambda: random.sample(range(99), 1)[0], (random.getstate, "random.setstate")),
    ],
)
def test_a_number_that_is_drawn_before_the_state_is_restored_is_refused(draw, states):
    get_state, set_state = states

    def forward(self, x):
        state = get_state()
        drawn = draw()
        random.setstate(state) if set_state == "random.setstate" else numpy.random.set_state(state)
        return x + drawn

    before = random.getstate(), numpy.random.get_state()[1].tolist()
    with pytest.raises(fxopt.TraceError, match="draws random numbers from Python's '(numpy.)?random'"):
        fxopt.trace(module(forward), (X,))
    assert before == (random.getstate(), numpy.random.get_state()[1].tolist())


def test_a_seed_reaches_until_the_state_is_restored():
    def seeded(self, x):
        state = random.getstate()
        random.seed(3)
        drawn = random.random()
        random.setstate(state)
        return x + drawn

    def after(self, x):
        return seeded(self, x) * random.random()

    assert torch.equal(fxopt.trace(module(seeded), (X,))(X), module(seeded)(X))
    with pytest.raises(fxopt.TraceError, match="draws random numbers"):
        fxopt.trace(module(after), (X,))


def test_a_flag_that_is_written_through_data_is_asked_again():
    def forward(self, x, mask):
        flag = mask.any()
        if flag:
            raise ValueError("none may be hidden")
        data = flag.data
        data.fill_(True)
        return x * 2 if flag else x

    model, mask = module(forward), torch.zeros(3, dtype=torch.bool)
    for specialize in (False, True):
        assert_same(fxopt.trace(model, (X, mask), specialize=specialize)(X, mask), model(X, mask))


def test_a_constant_that_is_written_through_data_is_fresh_at_each_call():
    def forward(self, x):
        count = torch.tensor([1.0])
        count.data.add_(1)
        return x * count

    gm = fxopt.trace(module(forward), (X,))
    for _ in range(2):
        assert_same(gm(X), X * 2)


def test_a_refusal_of_a_number_that_is_drawn_may_not_be_caught():
    def forward(self, x):
        try:
            return x if random.random() < 0.5 else -x
        except fxopt.TraceError:
            return x

    with pytest.raises(fxopt.TraceError, match="draws random numbers"):
        fxopt.trace(module(forward), (X,))


@pytest.mark.parametrize("make", [torch.IntTensor, torch.LongTensor, torch.FloatTensor, torch.DoubleTensor])
def test_legacy_constructors_give_numbers_that_are_known(make):
    def forward(self, x):
        counter = make([1.0] if make([1]).is_floating_point() else [1])
        counter += 1
        first = torch.IntTensor([2])[0]
        return x[:, :first] * make([3]) + counter, make([[1, 2], [3, 4]]), x[:, first:]

    model = module(forward)
    gm = fxopt.trace(model, (X,), dynamic_shapes=({0: Dim.DYNAMIC},))
    for rows in (1, 3, 5):
        for _ in range(2):
            assert_same(gm(X.repeat(2, 1)[:rows]), model(X.repeat(2, 1)[:rows]))


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

    model = module(forward)
    gm = fxopt.trace(model, (torch.randn(6, 4),), dynamic_shapes=({0: Dim.DYNAMIC},))
    for rows in (6, 2, 9):
        x = torch.randn(rows, 4)
        assert gm(x).equal(model(x))


def test_a_complex_view_of_an_input_with_free_sizes():
    model = module(lambda self, x: torch.view_as_complex(x.reshape(-1, 2, 2)) * 2j)
    gm = fxopt.trace(model, (X,), dynamic_shapes=({0: Dim.DYNAMIC},))
    for x in (X, X[:2], torch.randn(5, 4)):
        assert torch.equal(gm(x), model(x))


def test_a_dict_among_the_inputs_is_changed_and_returned():
    def forward(self, given):
        given["b"] = given.pop("a") + 1
        given["rows"] = len(given["b"])
        given["inside"]["c"] = given["b"] * 2
        return given

    model = module(forward)
    traced = fxopt.trace(
        model, ({"a": X, "inside": {}},), dynamic_shapes=({"a": {0: Dim.AUTO}, "inside": {}},)
    )
    for rows in (3, 5, 1):
        x = torch.randn(rows, 4)
        given, expected = {"a": x, "inside": {}}, {"a": x, "inside": {}}
        assert traced(given) is given
        model(expected)
        assert list(given) == list(expected)
        torch.testing.assert_close(given, expected)


def test_backward_hooks_of_containers_are_refused():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))
    model[0].register_full_backward_hook(lambda *args: None)
    with pytest.raises(fxopt.TraceError, match="'0' has backward hooks"):
        fxopt.trace(model, (X,))
    gm = fxopt.trace(model, (X,), leaf_modules=["0"])
    assert torch.equal(gm(X), model(X))


def test_sizes_are_those_from_before_a_shape_was_changed_in_place():
    def forward(self, x):
        rows = x.shape[0]
        x.t_()
        return x * rows

    for shapes in (None, ({0: Dim.AUTO},)):
        gm = fxopt.trace(module(forward), (X.clone(),), dynamic_shapes=shapes)
        assert gm(x := X.clone()).equal(X.T * 3)
        assert x.equal(X.T)
    assert gm(torch.ones(5, 4)).equal(torch.full((4, 5), 5.0))
    with pytest.raises(fxopt.TraceError, match="changes the shape of a tensor in place"):
        fxopt.trace(
            module(lambda self, x: x.clone().resize_(len(x), 2)), (X,), dynamic_shapes=({0: Dim.AUTO},)
        )


def test_a_free_size_is_an_int_to_the_model():
    model = module(lambda self, x: x * 2 if isinstance(x.shape[0], int) else x)
    gm = fxopt.trace(model, (X,), dynamic_shapes=({0: Dim.DYNAMIC},))
    assert torch.equal(gm(X[:2]), X[:2] * 2)


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: x * 2 if len(x) else x.sum(0),
        lambda self, x: x.sum(0) if x.shape[0] == 0 else x * 2,
        lambda self, x: x * 2 if x.numel() > 0 else x.sum(0),
        lambda self, x: x.sum(0) / max(len(x), 1),
        lambda self, x: x.new_ones(x[-1:].shape),  # torch itself takes it for one row
    ],
)
def test_a_free_size_is_not_0(forward):
    gm = fxopt.trace(module(forward), (X,), dynamic_shapes=({0: Dim("rows")},))
    assert_same(gm(X[:1]), module(forward)(X[:1]))
    with pytest.raises(fxopt.GuardError, match="input 'x', dimension 0 is 0; it takes at least 1"):
        gm(X[:0])
    assert "x, dimension 0: x.shape[0] >= 1  (as all free sizes)" in map(str, fxopt.guards(gm))


def test_a_size_of_0_may_be_fixed_but_is_no_example_of_a_free_one():
    def forward(self, x):
        return x * 2 if len(x) else x.sum(0)

    assert_same(fxopt.trace(module(forward), (X[:0],))(X[:0]), module(forward)(X[:0]))
    with pytest.raises(fxopt.TraceError, match="dimension 0 of input x is 0 in the example inputs"):
        fxopt.trace(module(forward), (X[:0],), dynamic_shapes=({0: Dim("rows")},))


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


@pytest.mark.parametrize("kept", ["attribute", "list", "made under inference mode"])
def test_a_tensor_that_is_no_buffer_under_inference_mode(kept):
    def forward(self, x):
        return x * (self.kept[0] if kept == "list" else self.kept)

    model = module(forward, kept=[torch.ones(4)] if kept == "list" else torch.ones(4))
    with torch.inference_mode():
        if kept == "made under inference mode":
            model.kept = torch.ones(4)
        assert torch.equal(fxopt.trace(model, (X,))(X), X)
    with torch.no_grad():
        assert torch.equal(fxopt.trace(model, (X,))(X), X)


def test_numbers_of_a_forward_under_inference_mode():
    @torch.inference_mode()
    def forward(self, x):
        first, rate = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor(0.5)
        first += 1
        return x * first if rate > 0 else x, first

    model = module(forward)
    traced = fxopt.trace(model, (X,))
    for _ in range(2):
        assert_same(traced(X), model(X))


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
        (x,) = (node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder")
        return weakref.ref(model[0].weight), weakref.ref(gm), weakref.ref(x.fake_mode.shape_env)

    references = capture()
    gc.collect()
    assert [reference() for reference in references] == [None, None, None]


def test_a_dict_with_a_further_entry_is_refused():
    def forward(self, x, held):
        return x * held.get("b", 1)

    gm = fxopt.trace(module(forward), (X, {"a": X}))
    with pytest.raises(fxopt.GuardError, match=r"'held' has entries \['a', 'b'\]"):
        gm(X, {"a": X, "b": X})


def timed(self, x):
    start = time.perf_counter()
    y = x * 2
    self.elapsed = (time.perf_counter() - start) * 1000
    print(f"took {time.perf_counter() - start:.3f} s")
    print(float(time.perf_counter() - start), int(time.time()), round(time.time() - start, 2))  # as "%.2f"
    return y


def test_a_forward_may_tell_how_long_it_takes():
    model = module(timed, elapsed=0.0)
    traced = fxopt.trace(model, (X,), dynamic_shapes=({0: torch.export.Dim.AUTO},), verify=False)
    assert torch.equal(traced(X[:1]), X[:1] * 2)
    assert traced.meta["forward_runs"] == 2


@pytest.mark.parametrize("clock", ["time", "perf_counter", "monotonic_ns"])
@pytest.mark.parametrize(
    "use",
    [
        lambda self, x, now: x * now,
        lambda self, x, now: x + torch.tensor(now % 1),
        lambda self, x, now: x + math.sqrt(now),
        lambda self, x, now: x if now - self.start > 1 else -x,
        lambda self, x, now: x if f"{now}"[0] == "1" else -x,
        lambda self, x, now: (x, now),
        lambda self, x, now: torch.full_like(x, now),
        lambda self, x, now: self.seen.append(now) or x,
    ],
)
def test_any_use_of_a_clock_is_refused(clock, use):
    model = module(lambda self, x: use(self, x, getattr(time, clock)()), start=0.0, seen=[])
    with pytest.raises(fxopt.TraceError):
        fxopt.trace(model, (X,), verify=False)


def written_through_the_buffer(self, x):
    self.total.add_(x.sum(0))
    return x + self.views[0]


def written_through_the_view(self, x):
    self.views[0].add_(x.sum(0))
    return x + self.total


def read_through_a_view_of_a_parameter(self, x):
    with torch.no_grad():
        self.weight.mul_(0.5)
    return x + self.views[1]


@pytest.mark.parametrize(
    "forward",
    [written_through_the_buffer, written_through_the_view, read_through_a_view_of_a_parameter],
)
def test_views_of_the_model_in_a_list_share_its_memory(forward):
    def made():
        model = module(forward, weight=nn.Parameter(torch.ones(4)))
        model.register_buffer("total", torch.zeros(4))
        model.views = [model.total[:], model.weight.detach()[:]]
        return model

    model, traced = made(), fxopt.trace(made(), (X,), verify=False)
    for _ in range(2):
        assert_same(traced(X), model(X))


def test_a_leaf_that_writes_a_view_of_the_model_writes_none_of_it_in_a_capture():
    leaf = module(lambda self, x: x + self.views[0].add_(1).sum(), plain=torch.zeros(4))
    leaf.register_buffer("total", torch.zeros(4))
    leaf.views = [leaf.total[:], leaf.plain[:]]
    fxopt.trace(nn.Sequential(leaf), (X,), leaf_modules="0", verify=False)
    assert not leaf.total.any()
    leaf.views.reverse()
    fxopt.trace(nn.Sequential(leaf), (X,), leaf_modules="0", verify=False)
    assert not leaf.plain.any()
