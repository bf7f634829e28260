"""`fxopt.optimize`: the module stands for the model, is as exact, and computes by graphs where it can."""

import copy
import math
import pickle
import sys
import threading
import types
import warnings

import pytest
import torch
from torch import nn
from transformers import BertModel

import fxopt
from fxopt.kernels import kernels_for
from fxopt.optimizing import dispatch
from fxopt.optimizing import prepare as prepare_module
from fxopt.testing import randomise
from tests import modules
from tests.capture.test_transformers import bert, resnet

pytestmark = [
    pytest.mark.filterwarnings("error:falls back to eager"),
    pytest.mark.skipif(
        not kernels_for(nn.Linear(16, 16)), reason="this build of torch has no packed kernels"
    ),
]


@pytest.fixture(autouse=True)
def no_timing(monkeypatch):
    """Count small models as faster, which is a matter of luck on a busy machine; `test_slower` asks for it."""
    monkeypatch.setattr(prepare_module, "speedup", lambda *_: 1.5)


def text(batch=2, length=9):
    ids = torch.arange(batch * length).reshape(batch, length) % 80
    return {"input_ids": ids, "attention_mask": (ids != 3).long()}


IMAGE = {"pixel_values": torch.randn(2, 3, 32, 32)}


def reasons(module):
    return [each.reason for each in module.report]


@pytest.mark.parametrize(("make", "inputs"), [(bert, text()), (resnet, IMAGE)])
@torch.no_grad()
def test_as_exact_as_the_model(make, inputs):
    model = make()
    before = copy.deepcopy(model.state_dict())
    fast = fxopt.optimize(model, (), inputs, tune=False)
    assert reasons(fast) == [None]
    (report,) = fast.report
    assert report.kernels["onednn"] >= 4
    exact = copy.deepcopy(model).double()(
        **{n: v.double() if v.is_floating_point() else v for n, v in inputs.items()}
    )[0]
    mine, own = fast(**inputs)[0], model(**inputs)[0]
    assert (mine - exact).norm() <= 3 * (own - exact).norm() + 1e-6 * exact.norm()
    assert (mine - exact).norm() <= 1e-5 * exact.norm()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@torch.no_grad()
def test_it_stands_for_the_model(tmp_path):
    model = bert()
    fast = fxopt.optimize(model, (), text())
    assert isinstance(fast, BertModel)
    assert type(fast).__name__ == "BertModel"
    assert fast.config is model.config
    assert str(fast) == str(model)
    assert list(fast.state_dict()) == list(model.state_dict())
    assert fast.encoder is model.encoder
    assert fast.dtype == torch.float32
    fast.save_pretrained(tmp_path)
    loaded = BertModel.from_pretrained(tmp_path).eval()
    assert torch.allclose(loaded(**text())[0], fast(**text())[0], atol=1e-4)
    assert fxopt.undo(fast) is model
    fast.extra = nn.Linear(2, 2)
    assert model.extra is fast.extra


def test_the_report_has_free_sizes_and_all_warnings():
    model, x = nn.Sequential(nn.Linear(32, 32), nn.ReLU()).eval(), torch.randn(3, 32)
    dynamic = ({0: torch.export.Dim("rows", min=2, max=64)},)
    fast = fxopt.optimize(model, (x,), dynamic_shapes=dynamic, tune=False)
    assert fast.report[0].inputs == "input: ? x 32"
    with pytest.warns(fxopt.errors.FallbackWarning, match="gradients are recorded") as caught:
        fast(x)
    assert caught[0].filename == __file__
    assert "warned: gradients are recorded" in str(fast.report)
    other = fxopt.optimize(model)
    with pytest.warns(fxopt.errors.FallbackWarning, match="gradients are recorded"):
        other(x)
    other.append(nn.ReLU())
    assert str(other.report).startswith("no graph yet: gradients are recorded")


@torch.no_grad()
@pytest.mark.parametrize(("device", "warns"), [("mps", True), ("meta", False)])
def test_a_model_on_another_device_falls_back_to_eager(device, warns, monkeypatch):
    model, x = nn.Linear(4, 4).eval(), torch.randn(2, 4)
    fast = fxopt.optimize(model)
    elsewhere = types.SimpleNamespace(device=torch.device(device), requires_grad=False)
    monkeypatch.setattr(model, "parameters", lambda: iter([elsewhere]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.equal(fast(x), model(x))
        with torch.autocast("cpu"):
            assert fast(x).shape == x.shape
    assert [str(each.message) for each in caught] == [
        f"Linear.forward falls back to eager: there are graphs for the CPU and CUDA, and the model is on {device}"
    ] * warns


@torch.no_grad()
def test_without_examples_the_first_call_makes_a_graph():
    model = bert()
    fast = fxopt.optimize(model)
    assert not fast.report
    assert "no graph yet" in str(fast.report)
    for length in (5, 9, 7, 12, 20, 24):
        assert torch.allclose(fast(**text(2, length))[0], model(**text(2, length))[0], atol=1e-4)
    # One for the first length, one for all others.
    assert [each.inputs for each in fast.report] == [
        "input_ids: 2 x ?, attention_mask: 2 x ?",
        "input_ids: 2 x 5, attention_mask: 2 x 5",
    ]
    fast(text()["input_ids"])
    fast(input_ids=text()["input_ids"])
    assert len(fast.report) == 3
    assert reasons(fast) == [None] * 3


@torch.no_grad()
def test_sizes_that_are_free_from_the_start():
    batch = torch.export.Dim("batch")
    model = randomise(nn.Sequential(nn.Linear(32, 32), nn.ReLU()).eval())
    fast = fxopt.optimize(model, (torch.randn(3, 32),), dynamic_shapes=({0: batch},))
    for size in (1, 2, 17):
        x = torch.randn(size, 32)
        assert torch.allclose(fast(x), model(x), atol=1e-5)
    assert len(fast.report) == 1


def powers():
    return modules.module(lambda m, x, power=1, **kinds: m.layer(x) ** power, layer=nn.Linear(8, 8))


@torch.no_grad()
def test_the_graph_that_was_called_longest_ago_goes():
    model, x = powers(), torch.randn(2, 8)
    fast = fxopt.optimize(model, max_graphs=2)
    for kind in "abaca":
        assert torch.equal(fast(x, **{kind: True}), fast(x, **{kind: True}))
    assert [report.inputs for report in fast.report] == ["x: 2 x 8, c: True", "x: 2 x 8, a: True"]


@pytest.mark.filterwarnings("default:.*falls back to eager")
@torch.no_grad()
def test_kinds_of_inputs_that_take_turns_do_not_capture_for_ever():
    model, x = powers(), torch.randn(2, 8)
    fast = fxopt.optimize(model, max_graphs=1)
    with pytest.warns(UserWarning, match="more than 1 kinds of inputs are in use"):
        _ = [fast(x, **{kind: True}) for kind in "ab" * 5]


@pytest.mark.filterwarnings("default:.*falls back to eager")
@torch.no_grad()
def test_a_number_that_varies_is_said_to_be_the_cause():
    model, x = powers(), torch.randn(2, 8)
    fast = fxopt.optimize(model)
    with pytest.warns(UserWarning, match="'power' differs from call to call: pass it as a tensor") as warned:
        found = [fast(x, power) for power in range(9)]
    assert len(warned) == 1
    for power, value in enumerate(found):
        torch.testing.assert_close(value, model(x, power), rtol=1e-3, atol=1e-5)


class Branches(nn.Module):
    """Cannot be captured: it computes with a number of Python."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x) * int(x.sum())


@pytest.mark.filterwarnings("default:.*falls back to eager")
@torch.no_grad()
def test_what_cannot_be_captured_runs_itself():
    model = Branches().eval()
    fast = fxopt.optimize(model)
    with pytest.warns(UserWarning, match="falls back to eager: it cannot be captured: .*x.sum"):
        fast(torch.ones(2, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for x in (torch.ones(2, 8), -torch.ones(2, 8), torch.ones(3, 8), torch.ones(4, 8)):
            assert torch.equal(fast(x), model(x))
    assert len(fast.report) <= 3


@pytest.mark.filterwarnings("default:.*falls back to eager")
def test_with_gradients_the_model_itself_runs():
    model = bert()
    fast = fxopt.optimize(model)
    with pytest.warns(UserWarning, match="gradients are recorded"):
        fast(**text())[0].sum().backward()
    assert model.encoder.layer[0].output.dense.weight.grad is not None
    with torch.inference_mode():
        fast(**text())
    assert reasons(fast) == [None]
    frozen = fxopt.optimize(randomise(bert()).requires_grad_(False))
    assert not frozen(**text())[0].requires_grad
    assert reasons(frozen) == [None]
    with pytest.warns(UserWarning, match="training mode"):
        fast.train()(**text())
    with pytest.warns(UserWarning, match="autocast"), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fast.eval()(**text())[0], model(**text())[0])


@torch.no_grad()
def test_new_weights_make_new_graphs():
    model = resnet()
    fast = fxopt.optimize(model, (), IMAGE)
    other = randomise(resnet(), seed=7)
    fast.load_state_dict(other.state_dict())
    assert torch.allclose(fast(**IMAGE).logits, other(**IMAGE).logits, atol=1e-4)
    for parameter in model.parameters():  # the model shares them
        parameter.mul_(0.5)
    assert torch.allclose(fast(**IMAGE).logits, model(**IMAGE).logits, atol=1e-4)
    fast.double()
    wide = {"pixel_values": IMAGE["pixel_values"].double()}
    assert fast(**wide).logits.dtype == torch.float64
    assert torch.allclose(fast(**wide).logits, model(**wide).logits)


@torch.no_grad()
def test_copies_and_pickles_are_optimized_too():
    model = bert()
    fast = fxopt.optimize(model, (), text())
    wanted = model(**text())[0]
    for copied in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert torch.allclose(copied(**text())[0], wanted, atol=1e-4)
        assert reasons(copied) == [None]
        assert copied.encoder is not model.encoder


@pytest.mark.long
@torch.no_grad()
def test_threads_share_the_graphs():
    model = bert()
    fast, found, errors = fxopt.optimize(model), {}, []

    def work(number):
        try:
            with torch.no_grad():
                for length in (5, 6, 7, 8):
                    found[number, length] = fast(**text(1 + number % 2, length))[0]
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for (number, length), value in found.items():
        assert torch.allclose(value, model(**text(1 + number % 2, length))[0], atol=1e-4)
    assert len(fast.report) <= 4


class Counter(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return self.layer(x)


@torch.no_grad()
def test_what_each_run_writes_is_written_once():
    model = Counter().eval()
    fast = fxopt.optimize(model, (torch.ones(2, 8),), tune=False)
    assert model.calls == 0
    assert reasons(fast) == [None]
    for _ in range(3):
        fast(torch.ones(2, 8))
    assert model.calls == 3


@torch.no_grad()
def test_a_layer_with_hooks_is_the_reason_that_is_given():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    model[0].register_forward_hook(lambda module, inputs, output: output * 2)
    with pytest.warns(UserWarning, match=r"falls back to eager: a layer has hooks on its forward, at 0"):
        fast = fxopt.optimize(model, (torch.ones(2, 8),), tune=False)
    assert torch.equal(fast(torch.ones(2, 8)), model(torch.ones(2, 8)))


@torch.no_grad()
def test_random_numbers_go_on_as_without_it():
    model = bert()
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    fxopt.optimize(model, (), text())
    assert torch.equal(torch.rand(3), wanted)


@torch.no_grad()
def test_hooks_of_the_model_run_once():
    model, seen = bert(), []
    model.register_forward_hook(lambda *_: seen.append("model"))
    fast = fxopt.optimize(model, (), text())
    seen.clear()
    fast(**text())
    assert seen == ["model"]


@torch.no_grad()
def test_what_hooks_of_the_model_compute_is_no_part_of_its_graph():
    model, x = randomise(nn.Sequential(nn.Linear(16, 16)).eval()), torch.randn(2, 16)
    model.register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    model.register_forward_hook(lambda module, args, output: output * 2)
    fast = fxopt.optimize(model, (x,))
    assert reasons(fast) == [None]
    torch.testing.assert_close(fast(x), model(x))


@pytest.mark.filterwarnings("default:.*falls back to eager")
@torch.no_grad()
def test_a_fault_of_ours_is_reported(monkeypatch):
    model = bert()

    def fails(*_):
        raise RuntimeError("of ours")

    monkeypatch.setattr(prepare_module, "run_in_float64", fails)
    with pytest.warns(
        UserWarning, match="RuntimeError while its graph was made. Please report this .* of ours"
    ):
        fast = fxopt.optimize(model, (), text())
    assert torch.equal(fast(**text())[0], model(**text())[0])


@pytest.mark.filterwarnings("default:.*falls back to eager")
@torch.no_grad()
def test_a_fault_of_the_capture_is_reported(monkeypatch):
    def fails(*_):
        raise RuntimeError("of ours.")

    monkeypatch.setattr(sys.modules["fxopt.capture.trace"], "capture_graph", fails)
    with pytest.warns(
        UserWarning,
        match=r"RuntimeError: of ours. Please report it. Until then, capture the parts around it.$",
    ):
        fxopt.optimize(modules.module(lambda self, x: x), (torch.ones(2, 8),))


@pytest.mark.filterwarnings("default:.*falls back to eager")
@torch.no_grad()
def test_slower_or_wrong_graphs_are_not_used(monkeypatch):
    model = bert()
    monkeypatch.setattr(prepare_module, "speedup", lambda *_: 0.5)
    with pytest.warns(UserWarning, match="the graph is slower than eager"):
        fast = fxopt.optimize(model, (), text())
    assert torch.equal(fast(**text())[0], model(**text())[0])
    assert "reason    the graph is slower than eager" in str(fast.report)
    monkeypatch.setattr(prepare_module, "speedup", lambda *_: 1.5)

    class Wrong(fxopt.RemoveIdentity):
        def match(self, graph_module):
            if not self.get_transformed_nodes(graph_module):
                yield from graph_module.graph.find_nodes(op="call_module", target="pooler.dense")

        def apply(self, rewriter, site):
            rewriter.set(site, op="call_function", target=torch.neg)

    monkeypatch.setattr(prepare_module, "RemoveIdentity", Wrong)
    with pytest.warns(UserWarning, match="less exact than eager's"):
        fast = fxopt.optimize(model, (), text())
    assert torch.equal(fast(**text())[0], model(**text())[0])


@torch.no_grad()
def test_calls_for_which_there_is_no_graph_are_described_once(monkeypatch):
    monkeypatch.setattr(prepare_module, "speedup", lambda *_: 0.5)
    described, describe = [], dispatch.structure_of
    monkeypatch.setattr(dispatch, "structure_of", lambda value: described.append(value) or describe(value))
    model = nn.Linear(4, 4).eval()
    fast = fxopt.optimize(model)
    inputs = [torch.randn(rows, 4) for rows in (2, 2, 3, 2, 3)]
    with pytest.warns(UserWarning, match="the graph is slower than eager"):
        outputs = [fast(x) for x in inputs]
    assert all(map(torch.equal, outputs, map(model, inputs)))
    x = inputs[-1]
    assert [len(value["input"]) for value in described] == [2, 3]
    assert torch.equal(fast(x.double().float()), model(x))
    model.bias.add_(1)  # a change: it tries again
    monkeypatch.setattr(prepare_module, "speedup", lambda *_: 1.5)
    for _ in range(16):  # not at each call
        assert torch.allclose(fast(x), model(x), atol=1e-6)
    assert fast.report[-1].reason is None


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
@torch.no_grad()
def test_precision(precision):
    model = bert(hidden_size=64, intermediate_size=128)
    fast = fxopt.optimize(model, (), text(), precision=precision, tune=False)
    assert reasons(fast) == [None]
    value, wanted = fast(**text())[0], model(**text())[0]
    assert value.dtype == torch.float32
    assert torch.allclose(value, wanted, atol=1e-4) == (precision == "float32")
    assert nn.functional.cosine_similarity(value.flatten(), wanted.flatten(), dim=0) > 0.99
    if precision == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert not fast.report[0].kernels
        return
    ((kernel, layers),) = fast.report[0].kernels.items()
    assert layers == 13
    assert kernel == "onednn" or (precision == "int8" and kernel in ("int8", "int8_weight"))


def test_bad_input_in_one_sentence():
    model = bert()
    with pytest.raises(fxopt.PassError, match=r"training mode.*call model\.eval\(\) before"):
        fxopt.optimize(model.train(), (), text())
    model.eval()
    with pytest.raises(ValueError, match="precision is 'float8'; give one of 'float32', 'bfloat16', 'int8'"):
        fxopt.optimize(model, precision="float8")
    with pytest.raises(
        TypeError, match="do not fit the forward of Branches: missing a required argument: 'x'"
    ):
        fxopt.optimize(Branches().eval(), (), {"y": 1})
    with pytest.raises(fxopt.TraceError, match="parameters without a shape yet .* Run the model once"):
        fxopt.optimize(nn.LazyLinear(2).eval())
    with pytest.raises(TypeError, match=r"dynamic_shapes names \['y'\]; the inputs are \['input'\]"):
        fxopt.optimize(nn.Linear(2, 2).eval(), (torch.ones(1, 2),), dynamic_shapes={"y": None})
    with pytest.raises(fxopt.PassError, match="on the meta device, which cannot be measured: load them"):
        fxopt.optimize(nn.Linear(2, 2, device="meta").eval(), (torch.ones(1, 2, device="meta"),))
    with pytest.raises(TypeError, match="write `.x,.`"):
        fxopt.optimize(model, torch.ones(1, 2))
    with pytest.raises(TypeError, match=r"not a dict: write `kwargs="):
        fxopt.optimize(model, {"input_ids": torch.ones(1, 2)})
    with pytest.raises(TypeError, match="takes a torch.nn.Module, not str"):
        fxopt.optimize("bert-base-uncased")
    with pytest.raises(fxopt.PassError, match="a graph module already"):
        fxopt.optimize(torch.fx.symbolic_trace(nn.Sequential(nn.ReLU())))
    with pytest.raises(fxopt.PassError, match="optimized already"):
        fxopt.optimize(fxopt.optimize(model))


def test_inputs_that_fake_tensors_alone_take_are_no_fault_of_ours():
    half, model = torch.ones(2, 4).half(), nn.Linear(4, 4).eval()
    with pytest.raises(RuntimeError, match="mat1 and"):
        fxopt.optimize(model, (half,))
    fast = fxopt.optimize(model)
    with torch.no_grad(), pytest.raises(RuntimeError, match="dtype"):
        fast(half)


def test_errors_of_the_model_stay_its_own():
    fast = fxopt.optimize(bert())
    with torch.no_grad(), pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        fast()
    with torch.no_grad(), pytest.raises(TypeError, match="unexpected keyword"):
        fxopt.optimize(Branches().eval())(y=1)


@torch.no_grad()
def test_inputs_that_the_model_refuses_count_for_no_failure():
    model = modules.module(
        lambda m, x: m.layer(x) + m.places[:, : x.shape[1]],
        layer=nn.Linear(16, 16),
        places=nn.Parameter(torch.randn(1, 8, 16)),
    ).eval()
    fast = fxopt.optimize(model)
    fast(torch.randn(2, 3, 16))
    for length in (9, 10, 11):
        with pytest.raises(RuntimeError, match="must match the size"):
            fast(torch.randn(2, length, 16))
    x = torch.randn(3, 5, 16)
    torch.testing.assert_close(fast(x), model(x))
    assert reasons(fast) == [None, None]


class Grows(nn.Module):
    """Keeps a table for the longest input, whose values depend on that length."""

    def __init__(self):
        super().__init__()
        self.layer, self.longest, self.table = nn.Linear(16, 16), 0, None

    def forward(self, x):
        length = x.shape[1]
        if length > self.longest:
            self.longest = length
            self.table = (torch.arange(length)[:, None] * torch.arange(16) / length).cos()
        return self.layer(x) * self.table[:length]


class MadeOnce(Grows):
    """Keeps a table that the first call makes."""

    def forward(self, x):
        if self.table is None:
            self.table = self.layer.weight.sum(0)
        return self.layer(x) * self.table


class Keyed(Grows):
    """Keeps the table of the last length."""

    def forward(self, x):
        if self.longest != x.shape[1]:
            self.longest, self.table = x.shape[1], torch.arange(x.shape[1])[:, None] / 3
        return self.layer(x) + self.table


@torch.no_grad()
def test_a_table_for_each_size_costs_no_graph(monkeypatch):
    captures, prepared = [], dispatch.prepare
    monkeypatch.setattr(dispatch, "prepare", lambda *args: captures.append(1) or prepared(*args))
    model = Keyed().eval()
    eager, fast = copy.deepcopy(model), fxopt.optimize(model)
    for length in (3, 5, 7, 3, 5, 3, 7, 5, 3, 7) * 3:
        x = torch.randn(2, length, 16)
        torch.testing.assert_close(fast(x), eager(x))
    assert len(captures) == 2


@pytest.mark.parametrize("make", [Grows, MadeOnce])
@torch.no_grad()
def test_what_a_call_of_another_size_leaves_is_read(make):
    model = make().eval()
    eager, fast = copy.deepcopy(model), fxopt.optimize(model)
    for length in (3, 4, 3, 5, 3, 4, 5, 6, 4):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fxopt.FallbackWarning)
            x = torch.randn(2, length, 16)
            torch.testing.assert_close(fast(x), eager(x))
        assert model.longest == eager.longest
    assert sum(reason is None for reason in reasons(fast)) >= 2


@torch.no_grad()
def test_a_buffer_that_one_mode_writes_is_watched_in_the_other():
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)).eval()
    fast, x = fxopt.optimize(model), torch.randn(8, 16)
    for _ in range(3):
        model[1].train()
        fast(torch.randn(8, 16) * 2 + 1)
        model[1].eval()
        torch.testing.assert_close(fast(x), model(x))
    model[1].running_mean.add_(1)
    torch.testing.assert_close(fast(x), model(x))


def test_a_model_that_is_frozen_later():
    model, x = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)).eval(), torch.randn(8, 16)
    fast = fxopt.optimize(model)
    with torch.no_grad():
        fast(x)
    model.requires_grad_(False)
    assert reasons(fast) == [None]
    assert not fast(x).requires_grad
    torch.testing.assert_close(fast(x), model(x))


@torch.no_grad()
def test_a_second_thread_finds_what_the_first_has_made(monkeypatch):
    calls = []
    prepared = dispatch.prepare
    monkeypatch.setattr(dispatch, "prepare", lambda *args: calls.append(1) or prepared(*args))
    fast = fxopt.optimize(bert())
    for _ in range(3):
        fast(**text())
    assert len(calls) == 1


def test_the_capture_of_an_optimized_model_is_that_of_the_model():
    model = bert()
    fast = fxopt.optimize(model, (), text())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fxopt.trace(fast, (), text()).code == fxopt.trace(model, (), text()).code


class ReturnsAWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        return self.layer(x), self.layer.weight


@torch.no_grad()
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
def test_a_weight_that_the_graph_reads_is_not_given_up(precision):
    model, x = ReturnsAWeight().eval(), torch.randn(8, 64)
    fast = fxopt.optimize(model, (x,), precision=precision)
    assert fast.report[0].reason is None
    torch.testing.assert_close(fast(x)[1], model.layer.weight, rtol=0.01, atol=0.01)


def padded_as_by_tensorflow(self, x):
    size = x.shape[-1]
    missing = max((math.ceil(size / 2) - 1) * 2 + 3 - size, 0)
    return self.layer(nn.functional.pad(x, (missing // 2, missing - missing // 2)))


@torch.no_grad()
def test_bfloat16_with_a_free_size_that_is_rounded():
    model = modules.module(padded_as_by_tensorflow, layer=nn.Conv1d(16, 16, 3, 2)).eval()
    fast = fxopt.optimize(model, (torch.randn(2, 16, 50),), precision="bfloat16")
    for length in (41, 50):
        x = torch.randn(2, 16, length)
        torch.testing.assert_close(fast(x), model(x), rtol=0.05, atol=0.05)
    assert [report.reason for report in fast.report] == [None, None]


@torch.no_grad()
def test_lists_of_numbers_are_told_apart_in_the_report():
    model = modules.module(lambda m, x, sizes: m.layer(x) * sizes[0], layer=nn.Linear(16, 16)).eval()
    fast = fxopt.optimize(model)
    for sizes in ([1, 2], [3, 4]):
        fast(torch.randn(2, 16), sizes)
    assert {report.inputs.partition("sizes: ")[2] for report in fast.report} == {"list(1, 2)", "list(3, 4)"}


@torch.no_grad()
def test_a_graph_module_in_the_model():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)).eval(), torch.randn(2, 8)
    model[0] = fxopt.trace(model[0], (x,))
    whole = nn.Sequential(model, nn.Tanh()).eval()
    fast = fxopt.optimize(whole, (x,))
    assert reasons(fast) == [None]
    torch.testing.assert_close(fast(x), model(x).tanh())
    # What it refuses is no failure of fxopt.
    with pytest.raises(fxopt.TraceError, match="the graph was captured for 2 alone"):
        fxopt.trace(whole, (torch.randn(3, 8),))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@torch.no_grad()
def test_a_recurrent_layer_alone_draws_no_random_numbers_in_eval(kind):
    model, x = kind(16, 8, 2, dropout=0.5).eval(), torch.randn(5, 2, 16)
    fast = fxopt.optimize(model, (x,), tune=False)
    assert fast.report[0].reason is None
    torch.testing.assert_close(fast(x), model(x))
