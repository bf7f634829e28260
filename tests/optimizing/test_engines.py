"""`fxopt.optimize(engine=)`: an engine computes the tensors of a graph, is checked, and gives way to torch where it cannot."""

import copy
import logging
import pickle
import shutil
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import fxopt
from fxopt import engines
from fxopt.capture.runtime import modes
from fxopt.optimizing import dispatch, prepare, watching
from tests.capture.test_transformers import bert, resnet
from tests.modules import module

X, Y = torch.randn(4, 16), torch.randn(4, 16)


@pytest.fixture(autouse=True)
def no_timing(monkeypatch):
    """Count small models as faster, which is a matter of luck on a busy machine."""
    monkeypatch.setattr(prepare, "speedup", lambda *_: 1.5)


@pytest.fixture
def ran(monkeypatch):
    """An engine that runs the body as it is, and counts; a test may put another function in its place."""
    counts = {"made": 0, "run": 0, "function": lambda body, inputs: body(*inputs)}

    def make(body, inputs):
        counts["made"] += 1

        def run(*inputs):
            counts["run"] += 1
            return counts["function"](body, inputs)

        return run

    monkeypatch.setitem(engines.ENGINES, "openvino", (make, True))
    monkeypatch.setattr(prepare, "engines_for", lambda device: {"openvino": ""})
    return counts


def layers():
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).eval()


def small_llama():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=100)).eval()


def why_not(fast):
    return [report.engines.get("openvino") for report in fast.report]


@torch.no_grad()
def test_the_outputs_and_the_report(ran):
    model = layers()
    fast = fxopt.optimize(model, (X,), engine="openvino")
    assert fast.report[0].engine == "openvino"
    assert "engine    openvino" in str(fast.report)
    assert ran["made"] == 1
    before = ran["run"]
    torch.testing.assert_close(fast(Y), model(Y))
    assert ran["run"] == before + 1
    assert fxopt.undo(fast) is model


@torch.no_grad()
def test_what_is_not_a_tensor_stays_in_the_graph(ran):
    for model, inputs in (
        (bert(), {"input_ids": torch.arange(18).reshape(2, 9), "attention_mask": torch.ones(2, 9).long()}),
        (resnet(), {"pixel_values": torch.randn(2, 3, 32, 32)}),
    ):
        fast = fxopt.optimize(model, (), inputs, engine="openvino")
        assert fast.report[0].engine == "openvino", fast.report
        found, wanted = fast(**inputs), model(**inputs)
        assert type(found) is type(wanted)
        torch.testing.assert_close(found[0], wanted[0])
    with pytest.raises(fxopt.GuardError):  # the guard still checks the inputs
        fast._fxopt_graphs.caches[0].graphs[0].lowered(pixel_values=torch.randn(2, 3, 64, 64))


@torch.no_grad()
def test_decoding_with_a_cache_and_free_sizes(ran):
    model = small_llama()
    ids = torch.randint(0, 100, (2, 5))
    fast = fxopt.optimize(model, engine="openvino")
    found = fast.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(found, model.generate(ids, max_new_tokens=8, do_sample=False))
    assert {report.engine for report in fast.report} == {"openvino"}
    assert "?" in str(fast.report)


@torch.no_grad()
def test_a_cache_that_is_written_into_is_computed_by_torch(ran):
    model = small_llama()
    fast = fxopt.optimize(model, engine="openvino")
    ids = torch.randint(0, 100, (1, 5))
    with pytest.warns(fxopt.FallbackWarning, match="computed by torch, not by openvino: .* may write into"):
        fast(ids, past_key_values=StaticCache(config=model.config, max_cache_len=16))
    assert fast.report[0].engine == "torch"


class Casts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.first(x)
        return self.last(hidden.float())


class StaysInFloat32(Casts):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            hidden = self.first(x).relu()
        with torch.no_grad():
            scale = hidden.amax()
        return self.last(hidden / scale)


@pytest.mark.parametrize("engine", ["torch", "openvino"])
@torch.no_grad()
def test_blocks_that_switch_off_what_is_off_cost_nothing(engine, ran, monkeypatch):
    model = StaysInFloat32().eval()
    fast = fxopt.optimize(model, (X,), tune=False, engine=engine)
    assert why_not(fast) == [None]
    assert fast.report[0].engine == engine
    expected, switched = model(X), []
    monkeypatch.setattr(modes, "_enter", switched.append)
    torch.testing.assert_close(fast(X), expected)
    assert not switched


@pytest.mark.parametrize("engine", ["torch", "openvino"])
def test_a_mode_that_the_forward_leaves_switched_off_stays_so(engine, ran):
    def forward(m, x):
        torch.set_grad_enabled(False)
        return m.layer(x).relu()

    model = module(forward, layer=nn.Linear(16, 16).requires_grad_(False))
    fast = fxopt.optimize(model, (X,), tune=False, engine=engine)
    try:
        with torch.enable_grad():
            fast(X)
            assert not torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)


@torch.no_grad()
def test_openvino_computes_no_float64():
    x = torch.randn(4, 16, dtype=torch.float64)
    with pytest.warns(fxopt.FallbackWarning, match="is not installed|it computes float64 in float32"):
        fast = fxopt.optimize(layers().double(), (x,), engine="openvino", tune=False)
    assert fast.report[0].engine == "torch"


@torch.no_grad()
def test_wrong_inputs_do_not_end_an_engine(ran):
    model = nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 4)).eval()
    ids = torch.tensor([[1, 2, 9]])
    fast = fxopt.optimize(model, (ids,), engine="openvino")
    with pytest.raises(IndexError):
        fast(ids + 1)
    before = ran["run"]
    torch.testing.assert_close(fast(ids), model(ids))
    assert ran["run"] == before + 1


class Writes(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.use = use
        self.register_buffer("count", torch.zeros(16))

    def forward(self, *inputs):
        return self.use(self, *inputs)


REFUSED = {
    "an input is written": (Writes(lambda m, x: x.add_(1) * 2), "may write into"),
    "a buffer is written": (Writes(lambda m, x: m.count.add_(1) + x), "may write into"),
    "a view is written later": (
        Writes(lambda m, x: ((h := x * 2), h.t().flatten(), h.mul_(3))[1:]),
        "may write into",
    ),
    "an output is written": (
        Writes(lambda m, x: ((h := x * 2), h.clamp_(max=5.0), h + 1)[1:]),
        "may write into",
    ),
    "an input is written by an index": (
        Writes(lambda m, x: (x.__setitem__(x > 1000, 5.0), x @ x.t())[1]),
        "may write into",
    ),
    "a number is read before a write": (
        Writes(lambda m, x: ((h := (x @ x.t()).sum()), h.item(), h.clamp_(max=1000.0))[1:]),
        "may write into",
    ),
    "autocast is switched on": (Casts(), "switches a mode"),
    "nothing is computed": (Writes(lambda m, x: x[:, :3]), "computes no tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
@torch.no_grad()
def test_what_no_engine_takes(name, ran):
    model, reason = REFUSED[name]
    twin = copy.deepcopy(model.eval())
    with pytest.warns(fxopt.FallbackWarning):
        fast = fxopt.optimize(model, (X.clone(),), engine="openvino")
    assert ran["made"] == 0
    if why_not(fast) != [None]:  # what is written may keep the model eager
        assert reason in why_not(fast)[0]
    for _ in range(2):
        torch.testing.assert_close(fast(X.clone()), twin(X.clone()))


@torch.no_grad()
def test_views_are_made_of_what_the_engine_computes(ran):
    def use(m, x):
        h = (x @ x.t()).tanh()
        written = (x @ x.t()).mul_(2)
        written[0].add_(1)
        return h, h.t(), h[:1].tanh(), x[:2], h.t().flatten(), written.sum(0)

    fast = fxopt.optimize(Writes(use).eval(), (X,), engine="openvino")
    assert fast.report[0].engine == "openvino"
    found, wanted = fast(Y), use(None, Y)
    for mine, own in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, own)
    assert found[0].data_ptr() == found[1].data_ptr()
    assert found[3].data_ptr() == Y.data_ptr()


@torch.no_grad()
def test_of_several_results_the_engine_gives_those_that_are_used(ran):
    lstm = nn.LSTM(16, 8)

    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = lstm

        def forward(self, x):
            values, places = (x * 2).topk(3)
            out, (h, _) = self.lstm(values.repeat(1, 6)[:, :16])
            left, right = out.chunk(2)
            return {"places": places, "h": h, "left": left, "right": right}

    model = Several().eval()
    fast = fxopt.optimize(model, (X,), engine="openvino")
    assert fast.report[0].engine == "openvino"
    (graph,) = fast._fxopt_graphs.caches[0].graphs
    outer = graph.lowered.function.args[0]
    assert not [n for n in outer.graph.nodes if n.target in ("lstm", "topk")]
    found, wanted = fast(Y), model(Y)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def by_index(h):
    h[h > 1000] = 5.0
    return h


def by_slice(h):
    h[:, 3:5] = h[:, 3:5].clamp(max=1000.0)
    return h


HIDDEN = {
    "an index is written": lambda m, x: by_index(x * 2) @ x.t(),
    "a slice is written": lambda m, x: by_slice(x * 2).softmax(-1) + 1,
    "a constant is returned": lambda m, x: (x @ x.t(), m.count * 2 + 1),
    "an attribute is returned": lambda m, x: (x @ x.t(), m.count),
}


@pytest.mark.parametrize("engine", ["openvino", pytest.param("inductor", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", HIDDEN)
@torch.no_grad()
def test_effects_that_the_example_inputs_do_not_show(name, engine):
    real(engine)
    model = Writes(HIDDEN[name]).eval()
    twin = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxopt.FallbackWarning)
        fast = fxopt.optimize(model, (X,), engine=engine)
    assert fast.report[0].engine == engine, fast.report
    for inputs in (X * 1e4, X, X.t().contiguous().t(), X[torch.arange(4).flip(0)]):
        found, wanted = fast(inputs.clone()), twin(inputs.clone())
        torch.testing.assert_close(found, wanted)
        if isinstance(found, tuple) and "constant" in name:
            found[1].add_(1)  # the next call does not see it


@torch.no_grad()
def test_large_integers_are_computed_by_torch():
    real("openvino")
    model = Writes(lambda m, x: x * 3 + 1).eval()
    fast = fxopt.optimize(model, (torch.arange(4),), engine="openvino")
    assert fast.report[0].engine == "openvino"
    for large in (torch.tensor([2**40, 1, 2, -(2**50)]), torch.full((4,), -(2**63))):
        with pytest.warns(fxopt.FallbackWarning, match="computes integers in 32 bits"):
            assert torch.equal(fast(large), model(large))
    assert torch.equal(fast(torch.arange(4, 8)), model(torch.arange(4, 8)))


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@torch.no_grad()
def test_a_query_whose_keys_are_all_masked_gets_zeros(dtype, engine):
    real(engine)

    def attend(m, x, mask):
        mask = mask if dtype is torch.bool else torch.zeros(4, 4).masked_fill(~mask, -torch.inf)
        x = x.view(1, 1, 4, 16)
        return F.scaled_dot_product_attention(x, x * 2, x + 1, mask) * 3

    model, all_seen = Writes(attend).eval(), torch.ones(4, 4, dtype=torch.bool)
    fast = fxopt.optimize(model, (X, all_seen), engine=engine)
    assert fast.report[0].engine == engine, fast.report
    for mask in (all_seen.tril(), all_seen.tril(-1), ~all_seen):
        torch.testing.assert_close(fast(X, mask), model(X, mask))


@torch.no_grad()
def test_layers_with_attention_of_their_own_are_computed_by_torch_if_they_get_a_mask():
    real("openvino")
    layer = nn.TransformerDecoderLayer(16, 2, 32, batch_first=True)
    model = Writes(lambda m, x, y, mask: layer(x, y, memory_key_padding_mask=mask) * 2).eval()
    model.layer = layer
    x, y, seen = torch.randn(2, 3, 16), torch.randn(2, 4, 16), torch.zeros(2, 4, dtype=torch.bool)
    with pytest.warns(fxopt.FallbackWarning, match="if memory_key_padding_mask hides all keys"):
        fast = fxopt.optimize(model.eval(), (x, y, seen), engine="openvino")
    seen[1] = True
    torch.testing.assert_close(fast(x, y, seen), model(x, y, seen))


@torch.no_grad()
def test_buffers_made_under_inference_mode(ran):
    model = module(lambda self, x: torch.maximum(self.layers(x), self.least), layers=layers())
    with torch.inference_mode():
        model.register_buffer("least", torch.tensor(0.1))
    with pytest.warns(fxopt.FallbackWarning, match="was made under inference_mode"):
        fxopt.optimize(model, (X,), engine="openvino")


def off_by_a_thousandth(body, inputs):
    return tuple(each * 1.001 for each in body(*inputs))


def other_dtype(body, inputs):
    return tuple(each.double() for each in body(*inputs))


def fails(body, inputs):
    raise RuntimeError("no such kernel\nand a trace")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (off_by_a_thousandth, "less exact than eager's"),
        (other_dtype, "differ from eager's"),
        (fails, "RuntimeError: no such kernel"),
    ],
)
@torch.no_grad()
def test_an_engine_that_is_wrong_or_fails_is_not_used(function, reason, ran):
    ran["function"] = function
    model = layers()
    with pytest.warns(fxopt.FallbackWarning, match="is computed by torch, not by openvino") as warned:
        fast = fxopt.optimize(model, (X,), engine="openvino")
    assert reason in why_not(fast)[0]
    assert "\n" not in why_not(fast)[0]
    assert reason in str(warned[0].message)
    assert fast.report[0].engine == "torch"
    torch.testing.assert_close(fast(Y), model(Y))


@torch.no_grad()
def test_an_engine_that_fails_later_gives_way_to_torch(ran):
    model = layers()
    fast = fxopt.optimize(model, (X,), engine="openvino")
    ran["function"] = fails
    with pytest.warns(fxopt.FallbackWarning, match="in the place of openvino: RuntimeError") as caught:
        torch.testing.assert_close(fast(Y), model(Y))
    assert caught[0].filename == __file__


@pytest.mark.parametrize("moves", [True, False])
@torch.no_grad()
def test_other_threads(moves, ran, monkeypatch):
    monkeypatch.setitem(engines.ENGINES, "openvino", (engines.ENGINES["openvino"][0], moves))
    model, found = layers(), []
    fast = fxopt.optimize(model, (X,), engine="openvino")
    before = ran["run"]

    def call():
        with torch.no_grad():
            found.append(fast(Y))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    torch.testing.assert_close(found[0], model(Y))
    assert ran["run"] - before == moves


@torch.no_grad()
def test_the_fastest_is_taken(ran, monkeypatch):
    for name in ("torch", "openvino"):
        monkeypatch.setattr(prepare, "fastest", lambda functions, inputs, name=name: name)
        fast = fxopt.optimize(layers(), (X,), engine="auto")
        assert (fast.report[0].engine, why_not(fast)) == (name, [None])
    assert fast.report[0].kernels == {}
    ran["function"] = fails
    monkeypatch.undo()


@torch.no_grad()
def test_weights_of_now_copies_and_saving(ran, tmp_path):
    model = layers()
    fast = fxopt.optimize(model, (X,), engine="openvino")
    model[0].weight.mul_(2)
    torch.testing.assert_close(fast(X), model(X))
    assert fast.report[0].engine == "openvino"
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        torch.testing.assert_close(other(X), model(X))
        assert other.report[0].engine == "openvino"
    fxopt.save(fast, tmp_path / "saved")
    torch.testing.assert_close(fxopt.load(tmp_path / "saved")(X), model(X))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.scale, self.calls = layers(), 2.0, None

    def forward(self, x, cache=None, note=False):
        if note:
            self.calls = x + 1
        if cache is not None:
            cache["last"] = x
        return self.layers(x) * self.scale


@pytest.fixture
def events(monkeypatch):
    """An engine with constant weights, as those of torch.compile, on a device that computes while Python goes on."""
    found = []

    def make(body, inputs):
        constant = copy.deepcopy(body)
        return lambda *inputs: found.append("run") or constant(*inputs)

    holds = watching.State.holds
    monkeypatch.setattr(watching.State, "holds", lambda state: found.append("asked") or holds(state))
    monkeypatch.setitem(engines.ENGINES, "openvino", (make, True))
    monkeypatch.setattr(prepare, "engines_for", lambda device: {"openvino": ""})
    monkeypatch.setattr(dispatch, "_LAUNCHING", ("cpu",))
    return found


@torch.no_grad()
def test_a_device_computes_while_the_weights_are_asked_for(events):
    model = Scaled().eval()
    fast = fxopt.optimize(model, (X,), engine="openvino")
    events.clear()
    fast(X)
    assert events == ["run", "asked"]
    for change in (
        lambda: model.layers[0].weight.mul_(2),
        lambda: setattr(model, "scale", 3.0),
        lambda: setattr(model, "scale", 2.0),
        lambda: model.load_state_dict(Scaled().state_dict()),
    ):
        change()
        for x in (Y, X[:3]):
            torch.testing.assert_close(fast(x), model(x))
    assert fast.report[0].engine == "openvino"


@pytest.mark.parametrize("options", [{"cache": {}}, {"note": True}])
@torch.no_grad()
def test_what_a_call_changes_is_changed_once_alone(options, events):
    model = Scaled().eval()
    fast = fxopt.optimize(model, (X,), options, engine="openvino")
    assert fast.report[0].engine == "openvino", fast.report
    events.clear()
    fast(Y, **options)
    assert events[0] == "asked"


@torch.no_grad()
def test_bfloat16_is_checked_and_int8_is_left_to_torch(ran):
    model = layers()
    assert fxopt.optimize(model, (X,), engine="openvino", precision="bfloat16").report[0].engine == "openvino"
    with pytest.warns(fxopt.FallbackWarning, match="it does not compute int8"):
        fxopt.optimize(model, (X,), engine="openvino", precision="int8")


@torch.no_grad()
def test_an_engine_that_is_not_here(monkeypatch):
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: None)
    with pytest.warns(
        fxopt.FallbackWarning, match="not by openvino: it is not installed: pip install openvino"
    ):
        fast = fxopt.optimize(layers(), (X,), engine="openvino")
    torch.testing.assert_close(fast(X), fast(X))
    with pytest.warns(fxopt.FallbackWarning, match="not by cudagraphs: it does not compute on cpu"):
        fxopt.optimize(layers(), (X,), engine="cudagraphs")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "tvm"}, "engine is 'tvm'; give one of 'torch', 'auto', 'inductor'"),
        ({"engine": "openvino", "keep_model": False}, "keep_model=False keeps a graph for torch"),
        ({"engine": "auto", "tune": False}, "engine='auto' takes what is measured"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        fxopt.optimize(layers(), (X,), **options)


class Joined(nn.Module):
    def forward(self, left, right):
        return left[:, ::2, None] + right[:, None]


@torch.no_grad()
def test_a_function_that_has_baked_in_a_size_is_found():
    free = {"left": {1: torch.export.Dim.AUTO}, "right": {1: torch.export.Dim.AUTO}}
    inputs = (torch.randn(2, 8), torch.randn(2, 4))
    traced = fxopt.trace(Joined().eval(), inputs, dynamic_shapes=free)
    _, engine = engines.with_engine(traced, "openvino")
    engines._probe(engine.body, inputs, engine.body)

    def baked(left, right):
        (value,) = engine.body(left, right)
        return (value[:, :, :4].expand(*value.shape[:2], 4),)

    with pytest.raises(engines.Unfit, match="where a free size is 8, which is 4 in the example"):
        engines._probe(engine.body, inputs, baked)

    def of_equal_sizes(left, right):
        (value,) = engine.body(left, right)
        return (value if value.shape[1] == value.shape[2] else value * 2,)

    with pytest.raises(engines.Unfit, match="gives another result"):
        engines._probe(engine.body, inputs, of_equal_sizes)


def real(name):
    if name != "inductor":
        for package in engines._PACKAGES[name]:
            pytest.importorskip(package)
    elif not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("inductor needs a C++ compiler")


@pytest.mark.long
@pytest.mark.parametrize("name", ["inductor", "openvino", "onnxruntime"])
@torch.no_grad()
def test_real_engines(name):
    real(name)
    model = bert()
    for length in (5, 9, 7):  # the second graph has a free length
        inputs = {
            "input_ids": torch.randint(0, 80, (2, length)),
            "attention_mask": torch.ones(2, length).long(),
        }
        with warnings.catch_warnings():
            warnings.simplefilter("error", fxopt.FallbackWarning)
            if length == 5:
                fast = fxopt.optimize(model, (), inputs, engine=name)
            found = fast(**inputs)
        torch.testing.assert_close(found[0], model(**inputs)[0], rtol=1e-4, atol=1e-5)
    assert [report.engine for report in fast.report] == [name] * 2
    outputs, inputs = [], {**inputs, "input_ids": inputs["input_ids"].flip(0)}

    def call():
        with torch.no_grad():
            outputs.append(fast(**inputs)[0])

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in outputs:
        torch.testing.assert_close(each, model(**inputs)[0], rtol=1e-4, atol=1e-5)
    assert len(outputs) == 3


@pytest.mark.long
@torch.no_grad()
def test_weights_stay_constants_after_a_reset_of_torch_compile():
    real("inductor")
    model, frozen = layers(), []
    fast = fxopt.optimize(model, (X,), engine="inductor")
    torch._dynamo.reset()

    @torch._dynamo.callback.on_compile_start
    def note(_):
        frozen.append(torch._inductor.config.freezing)

    try:
        torch.testing.assert_close(fast(Y), model(Y))
    finally:
        torch._dynamo.callback.callback_handler.remove_start_callback(note)
    assert frozen == [True]


@pytest.mark.long
@pytest.mark.parametrize("name", ["inductor", "openvino", "onnxruntime"])
@torch.no_grad()
def test_real_engines_decode(name):
    real(name)
    model = small_llama()
    ids = torch.randint(0, 100, (2, 5))
    fast = fxopt.optimize(model, engine=name)
    found = fast.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(found, model.generate(ids, max_new_tokens=6, do_sample=False))
    assert {report.engine for report in fast.report} == {name}, fast.report


def test_the_log_of_the_onnx_exporter_is_silent_meanwhile(monkeypatch):
    logger, heard = logging.getLogger("torch.onnx"), []
    level = logger.level

    def export(exported, verbose):
        heard.append(logging.getLogger("torch.onnx.exporter").isEnabledFor(logging.WARNING))
        raise ValueError(exported)

    monkeypatch.setattr(torch.onnx, "export", export)
    with pytest.raises(ValueError, match="a graph"):
        engines._onnx("a graph")
    assert heard == [False]
    assert logger.level == level


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
@torch.no_grad()
def test_one_image_at_a_time_after_a_batch(engine):
    """The graph with a free batch is made for a batch of 1, which torch.export takes for fixed."""
    pytest.importorskip(engine)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)).eval()
    fast = fxopt.optimize(model, engine=engine)
    for batch in (4, 1, 2, 1):
        images = torch.randn(batch, 3, 8, 8)
        torch.testing.assert_close(fast(images), model(images), atol=1e-5, rtol=1e-4)
    assert [report.engine for report in fast.report] == [engine] * 2
