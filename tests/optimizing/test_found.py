"""Models of users: a graph computes them, or the report names the true reason; what the forward changes is as it leaves it."""

import collections
import copy
import functools
import time
import types
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import TorchFunctionMode
from transformers import BatchEncoding, ProphetNetConfig, ProphetNetForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

import fxopt
from fxopt import kernels as kernels_module
from fxopt import packed_operators
from fxopt.optimizing import prepare
from fxopt.optimizing.dispatch import Graphs
from fxopt.optimizing.lowering import Lowered
from fxopt.testing import randomise
from fxopt.torch_internals import is_transforming
from tests.capture.test_generation import gpt2, llama
from tests.capture.test_transformers import bert
from tests.modules import module

pytestmark = pytest.mark.filterwarnings("ignore:falls back to eager")
X = (torch.arange(1, 9) / 8).expand(2, 8)
DRAWS, HOOKS = "the forward draws random numbers", "a layer has hooks on its forward"


def fast_of(forward, **attributes):
    made = {
        name: each() if callable(each) and not isinstance(each, nn.Module) else each
        for name, each in attributes.items()
    }
    model = module(forward, **{"layer": nn.Linear(8, 8)} | made)
    return fxopt.optimize(model, tune=False), copy.deepcopy(model)


def reasons(fast):
    return [each.reason for each in fast.report]


def linear(m, x):
    return m.layer(x)


def cell(m, x):
    state = torch.zeros(x.shape[0], 8)
    for _ in range(3):
        state = m.layer(x, state)
    return state


def recurrent(m, x):
    x, zeros = x[:, None], torch.zeros(1, 1, 8)
    return m.layer(x, (zeros, zeros))[0] + m.gru(x, zeros)[0] + m.rnn(x)[0]


def fills(m, x):
    made = torch.zeros(2, 8)
    made[:, :4] = m.layer(x)[:, :4]
    return made


def copies(m, x):
    made = x.new_zeros(2, 8)
    made[:, 1] = m.layer(x)[:, 1]
    made[0].copy_(x[0])
    return made


def decides(m, x):
    return m.layer(x) if x.sum() > 0 else m.layer(x) * 2


def conditional(m, x):
    return torch.cond(x.sum() > 0, lambda x: m.layer(x), lambda x: m.layer(x) * 2, (x,))


def caches(m, x):
    m.cache[:2] += m.layer(x)
    return m.cache.sum(0)


def caches_by_index(m, x):
    m.cache.index_copy_(0, torch.tensor([0, 1]), m.layer(x))
    return m.cache @ m.layer.weight


def draws(m, x):
    return m.layer(x) + torch.bernoulli(torch.full((2, 8), 0.5)) + torch.empty(2, 8).normal_()


def loses(m, x):
    loss = F.cross_entropy(m.layer(x), torch.tensor([1, 2]))
    return torch.linalg.norm(loss + torch.linspace(0, 1, 8).softmax(0))


def quantized():
    layers = nn.Sequential(nn.Linear(8, 8)).eval()
    return torch.ao.quantization.quantize_dynamic(layers, {nn.Linear})


def scripted():
    return torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))


def inferred():
    with torch.inference_mode():
        return nn.Linear(8, 8)


def with_state_hooks():
    layer = nn.Linear(8, 8)
    layer.register_load_state_dict_pre_hook(lambda *_: None)
    layer.register_load_state_dict_post_hook(lambda *_: None)
    layer._register_state_dict_hook(lambda *_: None)
    layer.register_full_backward_hook(lambda *_: None)
    return layer


def with_forward_hook():
    layer = nn.Linear(8, 8)
    layer.register_forward_hook(hook)
    return layer


def hook(module, args, output):
    return output * 2


def plain_again():
    layer = parametrizations.weight_norm(nn.Linear(8, 8))
    parametrize.remove_parametrizations(layer, "weight")
    return layer


class Slots(nn.Module):
    __slots__ = ("scale",)

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 8), 2.0

    def forward(self, x):
        assert type(self) is Slots
        return self.layer(x) * self.scale


class Options(collections.OrderedDict):
    """A dict that is not made of items."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def __reduce__(self):
        return Options, (self.scale,)

    def copy(self):
        raise TypeError("not to be copied")


def checks_and_fills(m, x):
    if (x > 100).any():
        raise ValueError("too large")
    wide = torch.zeros(2, 16)
    wide[:, :8] = m.layer(x.abs())
    return BaseModelOutput(last_hidden_state=wide, hidden_states=(x,))


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 3, dtype=torch.complex64)

    def forward(self, x):
        return self.conv(x[:, None].to(torch.complex64)).abs()


MODELS = {
    "a recurrent cell": (cell, {"layer": nn.GRUCell(8, 8)}),
    "first states": (recurrent, {"layer": nn.LSTM(8, 8), "gru": nn.GRU(8, 8), "rnn": nn.RNN(8, 8)}),
    "eye": (lambda m, x: m.layer(x) @ torch.eye(8) + torch.ones(8, dtype=torch.float32), {}),
    "an item that is set": (fills, {}),
    "a copy into new memory": (copies, {}),
    "requires_grad_": (lambda m, x: m.layer(x) + torch.arange(8.0).requires_grad_(False), {}),
    "a parametrized LSTM": (
        lambda m, x: m.layer(x)[0],
        {"layer": parametrizations.weight_norm(nn.LSTM(8, 8), "weight_hh_l0")},
    ),
    "weight_norm": (linear, {"layer": parametrizations.weight_norm(nn.Linear(8, 8))}),
    "weight_norm that is removed": (linear, {"layer": plain_again}),
    "spectral_norm": (linear, {"layer": parametrizations.spectral_norm(nn.Linear(8, 8))}),
    "orthogonal": (linear, {"layer": parametrizations.orthogonal(nn.Linear(8, 8))}),
    "if": (decides, {}),
    "cond": (conditional, {}),
    "a scripted child": (
        lambda m, x: m.layer(m.script(x)),
        {"script": scripted},
    ),
    "a static cache": (caches, {"cache": nn.Buffer(torch.zeros(4, 8))}),
    "a static cache, by index": (caches_by_index, {"cache": nn.Buffer(torch.zeros(4, 8))}),
    "hooks on state": (linear, {"layer": with_state_hooks}),
    "attention": (lambda m, x: m.layer(x[None]), {"layer": nn.TransformerEncoderLayer(8, 2)}),
    "quantized": (linear, {"layer": quantized}),
    "lower dtypes": (lambda m, x: m.layer(x.half().float()) + x.to(torch.bfloat16), {}),
    "bits": (
        lambda m, x: m.layer(x) * m.table[0].view(torch.int32).view(torch.float32),
        {"table": [torch.randn(8)]},
    ),
    "a loss": (loses, {}),
    "a check before a write": (checks_and_fills, {}),
    "a complex convolution": (lambda m, x: m.complex(x), {"complex": Complex}),
    "a dict that cannot be copied": (lambda m, x: m.layer(x) * m.options.scale, {"options": Options(2)}),
}
REFUSED = {
    "dropout": (lambda m, x: F.dropout(m.layer(x), 0.1), DRAWS, {}),
    "noise": (lambda m, x: m.layer(x) + torch.randn(2, 8), DRAWS, {}),
    "draws": (draws, DRAWS, {}),
    "a choice by noise": (lambda m, x: F.gumbel_softmax(m.layer(x), hard=True), DRAWS, {}),
    "a hook on a forward": (linear, HOOKS, {"layer": with_forward_hook}),
}


def assert_same(fast, reference):
    for x in (X, -2 * X, X):
        torch.manual_seed(1)
        found = fast(x)
        torch.manual_seed(1)
        torch.testing.assert_close(found, reference(x), rtol=1e-4, atol=1e-4)
    for name, buffer in reference.named_buffers():
        torch.testing.assert_close(fast.get_buffer(name), buffer)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_models_that_graphs_compute(name):
    forward, attributes = MODELS[name]
    fast, reference = fast_of(forward, **attributes)
    assert_same(fast, reference)
    assert reasons(fast) == [None]


@pytest.mark.parametrize("name", REFUSED)
@torch.no_grad()
def test_models_that_run_themselves_for_the_reason_that_is_given(name):
    forward, reason, attributes = REFUSED[name]
    fast, reference = fast_of(forward, **attributes)
    assert_same(fast, reference)
    assert [each[: len(reason)] for each in reasons(fast)] == [reason]


@torch.no_grad()
def test_old_weight_norm_has_a_graph():
    layer = nn.utils.weight_norm(nn.Linear(8, 8))
    model = module(linear, layer=layer)  # cannot be copied
    wanted, fast = model(X), fxopt.optimize(model, tune=False)
    torch.testing.assert_close(fast(X), wanted)
    layer.weight_g.mul_(2)
    torch.testing.assert_close(fast(X) - layer.bias, 2 * (wanted - layer.bias))
    assert set(reasons(fast)) == {None}


def test_weights_that_were_made_for_inference_have_no_graph_and_a_true_reason():
    fast, _ = fast_of(linear, layer=inferred)
    with torch.inference_mode():
        torch.testing.assert_close(fast(X), F.linear(X, fast.layer.weight, fast.layer.bias))
    assert "made under torch.inference_mode()" in reasons(fast)[0]


@torch.no_grad()
def test_the_forward_finds_the_model_by_slots_and_identity():
    fast = fxopt.optimize(Slots().eval(), tune=False)
    torch.testing.assert_close(fast(X), 2 * fast.layer(X))
    known = {}
    fast, reference = fast_of(lambda m, x: m.layer(x) * known[id(m)])
    known[id(fxopt.undo(fast))] = known[id(reference)] = 3.0
    assert_same(fast, reference)


def item(m, x):
    y = m.layer(x)
    m.kept["loss"] = y.mean()
    return y


def element(m, x):
    y = m.layer(x)
    m.kept[0] = y
    return y


def cleared(m, x):
    y = m.layer(x)
    m.kept.clear()
    m.kept.append(y)
    return y


def appended(m, x):
    y = m.layer(x)
    m.kept.append(y)
    return y


def attribute(m, x):
    y = m.layer(x)
    m.kept.last = y
    return y


def updated(m, x):
    y = m.layer(x)
    m.kept.update(last=y)
    return y


def new_dict(m, x):
    y = m.layer(x)
    m.kept = {"loss": y.mean()}
    return y


def new_list(m, x):
    y = m.layer(x)
    m.kept, m.count = [y, y.detach()], x.shape[0]
    return y


KEPT = {
    "an item": (item, {}, "writes into 'kept', a dict"),
    "an element": (element, [None], "writes into 'kept', a list"),
    "a list that is filled anew": (cleared, [], "writes into 'kept', a list"),
    "a list that grows": (appended, [], "'kept'"),
    "an attribute": (attribute, types.SimpleNamespace(), "writes into 'kept', a SimpleNamespace"),
    "update": (updated, {}, "writes into 'kept', a dict"),
    "a new dict": (new_dict, {}, None),
    "a new list": (new_list, [], None),
}


@pytest.mark.parametrize(("forward", "kept", "reason"), KEPT.values(), ids=KEPT)
@torch.no_grad()
def test_what_the_forward_keeps_is_there_after_each_call(forward, kept, reason):
    fast, reference = fast_of(forward, kept=kept, count=0)
    for rows in (2, 2, 3, 4):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(fast(x), reference(x))
        assert fast.count == reference.count
        kept = (getattr(m.kept, "__dict__", m.kept) for m in (fast, reference))
        torch.testing.assert_close(*kept)
    assert all(each is None if reason is None else reason in each for each in reasons(fast))


@torch.no_grad()
def test_what_the_forward_appends_to_a_deque_is_there_after_each_call():
    fast, reference = fast_of(appended, kept=collections.deque(maxlen=3))
    for _ in range(2):
        torch.testing.assert_close(fast(X), reference(X))
    assert len(fast.kept) == 2


class Batch(nn.Module):
    """Reads a mapping, and sets an item in it, as the parts of SentenceTransformer do."""

    def __init__(self, kind="set"):
        super().__init__()
        self.embedding, self.layer, self.kind = nn.Embedding(50, 16), nn.Linear(16, 16), kind

    def forward(self, features):
        y = self.layer(self.embedding(features["ids"])).mean(1)
        if self.kind == "set":
            features["y"] = y
            return features
        if self.kind == "removed":
            del features["ids"]
        return y


@pytest.mark.parametrize("kind", [BatchEncoding, collections.UserDict, dict])
@torch.no_grad()
def test_a_mapping_is_an_input_that_comes_back_with_what_was_set(kind):
    model = randomise(Batch().eval())
    fast, reference = fxopt.optimize(model, tune=False), copy.deepcopy(model)
    for length in (5, 5, 7, 9):
        ids = torch.randint(0, 50, (2, length))
        features = kind({"ids": ids})
        assert fast(features) is features
        torch.testing.assert_close(features["y"], reference(kind({"ids": ids}))["y"])
        assert (list(features), features["ids"] is ids) == (["ids", "y"], True)
    assert reasons(fast) == [None] * 2, "one for the first size, and one for all"
    assert len(str(fast.report)) < 1000
    assert "tensor(" not in str(fast.report)


@torch.no_grad()
def test_what_the_forward_takes_out_of_a_mapping_is_gone():
    model = randomise(Batch("removed").eval())
    fast, reference = fxopt.optimize(model, tune=False), copy.deepcopy(model)
    for _ in range(2):
        one, other = (collections.UserDict(ids=torch.ones(2, 5, dtype=torch.long)) for _ in range(2))
        found, wanted = fast(one), reference(other)
        assert list(one) == list(other)
        torch.testing.assert_close(found, wanted)


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def encode(self, x, scale=1):
        return self.layer(x).relu() * scale

    def forward(self, x):
        return self.encode(x)


@torch.no_grad()
def test_numbers_in_outputs_are_judged_as_tensors_are():
    def forward(m, x):
        y = m.layer(x)
        return y.sum().item(), y[0].tolist()

    model = randomise(module(forward, layer=nn.Linear(8, 8)))
    fast = fxopt.optimize(model, tune=False)
    for x in (X, 2 * X):
        (total, row), (whole, first) = fast(x), model(x)
        assert [total, *row] == pytest.approx([whole, *first], rel=1e-4, abs=1e-5)
    assert not any(reasons(fast))


@torch.no_grad()
def test_methods_are_computed_by_graphs_or_named_in_the_report():
    model = Parts().eval()
    fast = fxopt.optimize(model, tune=False)
    torch.testing.assert_close(fast.encode(X), model.encode(X))
    assert "forward was not called, but 'encode'; name methods as optimize(..., methods=('encode',))" in str(
        fast.report
    )
    fast = fxopt.optimize(model, tune=False, methods=("encode",))
    for x in (X, 2 * X):
        torch.testing.assert_close(fast.encode(x, scale=2), model.encode(x, scale=2))
        torch.testing.assert_close(fast(x), model(x))
    assert reasons(fast) == [None] * 2
    model.layer.weight.mul_(2)
    torch.testing.assert_close(copy.deepcopy(fast).encode(X), model.encode(X))
    torch.testing.assert_close(fast.encode(X), model.encode(X))
    assert fxopt.optimize(model, methods="encode").report == ()
    for methods in (("decode",), ("forward",), "forward"):
        with pytest.raises(ValueError, match=r"methods of Parts other than forward, not '(decode|forward)'"):
            fxopt.optimize(model, methods=methods)


@pytest.mark.parametrize("make", [llama, gpt2])
@torch.no_grad()
def test_decoders_compute_in_bfloat16(make):
    model = make().float()
    fast = fxopt.optimize(model, precision="bfloat16", tune=False)
    ids = torch.randint(3, 90, (2, 6))
    own, found = (m(input_ids=ids).logits for m in (model, fast))
    assert 1e-4 < (found - own).norm() / own.norm() < 2e-2
    fast.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    assert reasons(fast) == [None] * 4
    for report in fast.report:
        (changed,) = (each for each in report.explanations if each.name.startswith("ChangePrecision"))
        assert changed.sites
        assert report.unused is None


@torch.no_grad()
def test_a_precision_that_is_not_used_and_a_cause_are_said_once():
    inputs = [torch.randn(rows, 8) for rows in (2, 3, 4)]
    fast = fxopt.optimize(nn.Sequential(nn.ReLU()).eval(), precision="bfloat16", tune=False)
    with pytest.warns(
        fxopt.FallbackWarning, match="computes in its own precision: bfloat16 is not used"
    ) as warned:
        _ = [*map(fast, inputs)]
    assert len(warned) == 1
    fast, _ = fast_of(lambda m, x: m.layer(x) + torch.randn(x.shape))
    with pytest.warns(fxopt.FallbackWarning, match=DRAWS) as warned:
        _ = [*map(fast, inputs)]
    assert len(warned) == 1


@torch.no_grad()
def test_a_precision_for_which_a_layer_is_too_small_is_refused_for_its_size(monkeypatch):
    kernels = packed_operators.available(nn.Linear)
    others = {name: kernel for name, kernel in kernels.items() if name != "int8"}  # as on an older processor
    monkeypatch.setattr(kernels_module, "available", lambda kind: others)
    fast = fxopt.optimize(nn.Sequential(nn.Linear(8, 8)).eval(), precision="int8", tune=False)
    with pytest.warns(fxopt.FallbackWarning, match=r"8 x 8, torch.float32, on cpu; .* multiple of 64"):
        fast(X)


@torch.no_grad()
def test_an_array_is_to_be_given_as_a_tensor():
    fast = fxopt.optimize(module(lambda m, x, y: m.layer(x) + torch.as_tensor(y), layer=nn.Linear(8, 8)))
    with pytest.warns(fxopt.FallbackWarning, match=r"input y is an array \(ndarray\): .*torch.as_tensor"):
        fast(X, X.numpy())


@torch.no_grad()
def test_sizes_that_the_forward_fixes_are_not_captured_one_after_the_other():
    def steps(m, x):
        state = x.new_zeros(8)
        for row in range(x.shape[0]):
            state = m.layer(x[row] + state)
        return state

    fast, reference = fast_of(steps)
    inputs = [torch.randn(rows, 8) for rows in range(2, 9)]
    with pytest.warns(
        fxopt.FallbackWarning, match=r"is valid for one size only, which the forward fixes at .*found.py"
    ):
        torch.testing.assert_close([*map(fast, inputs)], [*map(reference, inputs)])
    assert [each.inputs for each in fast.report] == ["x: 4 x 8", "x: 3 x 8", "x: 2 x 8"]


@torch.no_grad()
def test_sizes_that_cannot_be_free_get_two_more_graphs_and_the_reason(monkeypatch):
    trace = prepare.trace_method

    def only_fixed(*args):
        if args[-1] is not None:
            raise fxopt.TraceError("no such sizes")
        return trace(*args)

    monkeypatch.setattr(prepare, "trace_method", only_fixed)
    fast, reference = fast_of(lambda m, x: m.layer(x))
    inputs = [torch.randn(rows, 8) for rows in range(2, 9)]
    with pytest.warns(
        fxopt.FallbackWarning,
        match=r"is valid for one size only, because with free sizes it cannot be captured: no such sizes",
    ):
        torch.testing.assert_close([*map(fast, inputs)], [*map(reference, inputs)])
    assert [each.inputs for each in fast.report] == ["x: 4 x 8", "x: 3 x 8", "x: 2 x 8"]


class Many(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.long
@torch.no_grad()
def test_the_time_to_make_a_graph_grows_with_the_layers():
    def seconds(count):
        model = Many(count).eval()
        start = time.process_time()
        fast = fxopt.optimize(model, (X,), tune=False)
        assert reasons(fast) == [None]
        return time.process_time() - start

    seconds(10)  # not counted
    assert seconds(1600) < 16 * 2 * seconds(100)


def counted(function, counts):
    @functools.wraps(function)
    def run(*args, **kwargs):
        value = function(*args, **kwargs)
        counts[function.__name__] += 1
        return value

    return run


@pytest.mark.long
@torch.no_grad()
def test_a_service_that_generates_runs_by_graphs(monkeypatch):
    steps = collections.Counter()
    for where, name in ((Lowered, "__call__"), (Graphs, "run")):
        monkeypatch.setattr(where, name, counted(getattr(where, name), steps))
    model = llama(eos_token_id=None, pad_token_id=0).float()
    fast, draw = fxopt.optimize(model, tune=False), torch.Generator().manual_seed(0)
    for request in range(12):
        batch, length = torch.randint(2, 12, (2,), generator=draw).tolist()
        ids = torch.randint(5, 90, (batch % 4 + 1, length))
        mask = torch.ones_like(ids)
        if request % 2:
            mask[0, : length // 2] = 0
        text = {"input_ids": ids, "attention_mask": mask}
        options = {"max_new_tokens": 5, "do_sample": False}
        found = fast.generate(**text, **options)
        assert torch.equal(found, model.generate(**text, **options))
    assert steps["run"] == 12 * 5
    assert steps["__call__"] >= steps["run"] - 2


CHANGES = {
    "an object": lambda m: setattr(m.args, "scale", 3.0),
    "a dict": lambda m: m.options.__setitem__("scale", 3.0),
    "a list": lambda m: m.sizes.__setitem__(0, 3.0),
    "a tensor in a list": lambda m: m.tables[0].fill_(3.0),
    "a number that a bound method reads": lambda m: setattr(m, "temperature", 3.0),
    "data": lambda m: m.layer.weight.data.mul_(3),
    "a weak reference": lambda m: setattr(m.parent().args, "scale", 3.0),
}


def scaled(m, x):
    scale = m.args.scale * m.options["scale"] * m.sizes[0]
    return m.activation(m.layer(x)) * scale * (m.tables[0] * 2)


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_after_refresh_any_change_is_followed(change):
    model = module(
        scaled,
        layer=nn.Linear(8, 8, bias=False),
        args=types.SimpleNamespace(scale=1.0),
        options={"scale": 1.0},
        sizes=[1.0],
        tables=[torch.ones(8)],
        temperature=1.0,
    )
    model.parent = weakref.ref(model)
    model.activation = types.MethodType(lambda m, x: x * m.temperature, model)
    fast = fxopt.optimize(model, tune=False)
    before = fast(X)
    CHANGES[change](fast)
    fast.refresh()
    torch.testing.assert_close(fast(X), 3 * before)
    assert reasons(fast) == [None]


def blocks():
    return nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.GELU()), nn.Linear(8, 8)).eval()


@torch.no_grad()
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_of_blocks_run_once_a_call(before, kind):
    model, x, seen = blocks(), torch.randn(2, 8), []
    fast = None if before else fxopt.optimize(model, (x,), tune=False)
    getattr(model[0], kind)(lambda *given: seen.append(given))
    fast = fast or fxopt.optimize(model, (x,))
    assert torch.equal(fast(x), model(x))
    assert len(seen) == 2
    assert f"{HOOKS}, at 0" in reasons(fast)


@torch.no_grad()
def test_a_hook_that_steers_a_block_is_followed():
    model, x, state = blocks(), torch.randn(2, 8), {"alpha": 1.0}
    model[0].register_forward_hook(lambda module, args, output: output * state["alpha"])
    fast = fxopt.optimize(model, tune=False)
    for state["alpha"] in (1.0, 3.0):
        assert torch.equal(fast(x), model(x))


class ReturnsBoth(nn.Module):
    """Writes into a tensor of its own, checks a value, and returns an object that holds an input, too."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        wide = torch.zeros(x.shape[0], 80)
        wide[:, :64] = self.linear(x)
        if (wide > 1e6).any():
            raise ValueError("too large")
        return BaseModelOutput(last_hidden_state=wide, hidden_states=(x, torch.arange(3.0) * 2))


@torch.no_grad()
def test_an_object_that_holds_an_input_and_what_was_written():
    model, x = ReturnsBoth().eval(), torch.randn(8, 64)
    fast = fxopt.optimize(model, (x,), tune=False)
    assert fast.report[0].reason is None
    assert torch.allclose(fast(x).last_hidden_state, model(x).last_hidden_state, atol=1e-6)
    fast(x).hidden_states[1].zero_()  # each call returns a tensor of its own
    assert torch.equal(fast(x).hidden_states[1], torch.arange(3.0) * 2)


class Doubles(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        value = function(*args, **(kwargs or {}))
        return value * 2 if function is torch.nn.functional.linear else value


@torch.no_grad()
def test_a_function_mode_sees_the_functions_of_the_model():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU()).eval(), torch.randn(8, 64)
    fast = fxopt.optimize(model, (x,), tune=False)
    assert fast.report[0].reason is None
    with Doubles():
        assert torch.equal(fast(x), model(x))
    with torch.device("cpu"):  # a function mode, too, for which graphs run
        assert not is_transforming()


@torch.no_grad()
def test_a_hook_of_the_whole_model_is_no_obstacle():
    model, x, seen = blocks(), torch.randn(2, 8), []
    model.register_forward_hook(lambda *given: seen.append(given))
    fast = fxopt.optimize(model, (x,), tune=False)
    assert fast.report[0].reason is None
    torch.testing.assert_close(fast(x), model(x))
    assert len(seen) == 2


@torch.no_grad()
def test_an_outer_model_collects_the_outputs_of_an_optimized_part():
    model, ids = bert(), torch.randint(1, 90, (2, 7))
    wanted = model(ids, output_hidden_states=True).hidden_states
    model.encoder = fxopt.optimize(model.encoder, tune=False)
    for _ in range(2):
        torch.testing.assert_close(model(ids).last_hidden_state, wanted[-1])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fxopt.FallbackWarning)
            found = model(ids, output_hidden_states=True).hidden_states
        torch.testing.assert_close(found, wanted)
    assert [report.reason for report in model.encoder.report] == [None]


@torch.no_grad()
def test_an_input_that_fails_costs_no_graph():
    model, bad, good = bert(), torch.full((2, 7), 10**6), torch.randint(1, 90, (2, 7))
    fast = fxopt.optimize(model, tune=False)
    with pytest.raises(IndexError):
        fast(bad)
    torch.testing.assert_close(fast(good), model(good))
    assert [report.reason for report in fast.report] == [None]


@torch.no_grad()
def test_hidden_states_may_be_asked_for_later():
    model, ids = bert(), torch.randint(1, 90, (2, 7))
    fast = fxopt.optimize(model, tune=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxopt.FallbackWarning)
        for options in ({}, {"output_hidden_states": True}, {}):
            torch.testing.assert_close(fast(ids, **options), model(ids, **options))
    assert not any(report.reason for report in fast.report)


def test_beams_behind_a_greedy_search_get_graphs():
    config = ProphetNetConfig(
        hidden_size=32,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_encoder_layers=1,
        num_decoder_layers=1,
        num_encoder_attention_heads=4,
        num_decoder_attention_heads=4,
        vocab_size=60,
        max_position_embeddings=64,
        num_buckets=8,
        relative_max_distance=16,
        decoder_start_token_id=2,
    )
    model, ids = randomise(ProphetNetForConditionalGeneration(config)).eval(), torch.arange(5, 17).view(2, 6)
    fast = fxopt.optimize(model, tune=False)
    for options in ({}, {"num_beams": 3}):
        found, expected = (each.generate(ids, max_new_tokens=4, **options) for each in (fast, model))
        assert torch.equal(found, expected)
    assert len(fast.report) > 3
    assert not any(reasons(fast))


def test_the_report_names_the_parts_where_generate_calls_no_forward():
    class Composed(Parts):
        def generate(self, x):
            return self.encode(x)

    fast = fxopt.optimize(Composed().eval())
    fast.generate(X)
    assert "not called, but 'generate'; optimize the parts of the model that it calls" in str(fast.report)


class Scaled(torch.autograd.Function):
    """Has a backward of its own."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x, factor)
        return x * torch.sigmoid(x) * factor

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class ScaledInPlace(Scaled):
    """Writes its factor by a way that no version counts."""

    @staticmethod
    def forward(ctx, x, factor):
        return x * factor.data.mul_(0.5)


@pytest.mark.parametrize("function", [Scaled, ScaledInPlace])
def test_a_custom_autograd_function_may_take_a_constant_into_which_it_does_not_write(function):
    fast, model = fast_of(lambda self, x: function.apply(self.layer(x), torch.tensor(0.5)))
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fast(X), model(X))
    reason = "may write into a constant of the graph" if function is ScaledInPlace else "None"
    assert reason in str(reasons(fast)[0])


def test_a_graph_that_refuses_the_example_says_so():
    """Rows of zeros are written only where all rows are zeros: a graph does not know that before."""

    def forward(self, x):
        counts = self.layer(x).mul(0).long() + x.long()
        if counts.sum() == 0:
            counts[counts.sum(1).eq(0)] = 1
        return counts * x

    x = torch.zeros(2, 8)
    x[0] = 3.0
    fast, model = fast_of(forward)
    with torch.no_grad():
        assert torch.equal(fast(x), model(x))
    (report,) = fast.report
    assert report.reason.startswith(
        "its graph refuses these inputs: the forward decides on a value and skips a write"
    )
    assert report.reason.endswith("`if counts.sum() == 0:`.")


def test_a_branch_that_fills_memory_of_its_own_writes_into_no_constant():
    table = torch.randn(8)

    def forward(self, x):
        def filled(y):
            made = y.new_zeros(y.shape)
            made[:, :4] = (self.layer(y) + table)[:, :4]
            return made

        return torch.cond(x.sum() > 0, filled, lambda y: y.sin(), (x,))

    fast, model = fast_of(forward)
    with torch.no_grad():
        for x in (X, -X):
            torch.testing.assert_close(fast(x), model(x))
    assert reasons(fast) == [None]
