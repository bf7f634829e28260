"""A saved graph module comes back as the same graph, with the same outputs to the last bit."""

import collections
import copy
import dataclasses
import json
import os
import pickle
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.export import Dim

import fxopt
from fxopt.testing import assert_round_trip, leaves, randomise
from tests import small_models
from tests.capture.models import Buffers, Constants, Containers, Point, Setitem
from tests.capture.test_caches import STEPS, cache_of, decoding, gemma3, greedy, llama
from tests.capture.test_generation import DECODER
from tests.capture.test_modes import Autocast, Cube, NoGrad
from tests.capture.test_module import Dropped, ReadsDtype, Tied
from tests.capture.test_transformers import groupvit
from tests.modules import module

X = torch.randn(3, 4)


@pytest.fixture(autouse=True)
def no_pickle(monkeypatch):
    """Loading unpickles nothing; saving pickles nothing."""
    monkeypatch.setattr(fxopt, "save", _without_pickle(fxopt.save))
    monkeypatch.setattr(fxopt, "load", _without_pickle(fxopt.load))


def _without_pickle(function):
    def called(*args, **kwargs):
        with pytest.MonkeyPatch.context() as patch:
            for module, name in ((pickle, "loads"), (pickle, "load"), (pickle, "Unpickler"), (torch, "load")):
                patch.setattr(module, name, _raise)
            return function(*args, **kwargs)

    return called


def _raise(*args, **kwargs):
    raise AssertionError("it unpickles")


def reloaded(gm, folder, trusted=()):
    fxopt.save(gm, folder / "saved", trusted=trusted)
    config = getattr(gm, "config", None)
    made = fxopt.load(folder / "saved", trusted=[*trusted, type(config)])
    assert type(made).__mro__[1:] == type(gm).__mro__[1:]
    assert type(made).__name__ == type(gm).__name__
    assert made.code == gm.code
    assert_round_trip(gm, made)
    assert fxopt.guards(made) == fxopt.guards(gm)
    return made


def stored_in(folder):
    (file,) = folder.glob("model-*.safetensors")
    return load_file(file)


def same_bits(one, other):
    one, other = list(leaves(one)), list(leaves(other))
    return [path for path, _ in one] == [path for path, _ in other] and all(
        torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b
        for (_, a), (_, b) in zip(one, other, strict=True)
    )


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in small_models.MODELS]
    + [("bert", torch.float16), ("resnet", torch.bfloat16)],
)
def test_models(name, dtype, tmp_path):
    model, inputs = small_models.MODELS[name]()
    model = model.eval().to(dtype)
    inputs = {key: x.to(dtype) if x.is_floating_point() else x for key, x in inputs.items()}
    gm = fxopt.symbolic_trace(model, list(inputs))
    made = reloaded(gm, tmp_path)
    expected, actual = model(**inputs), made(**inputs)
    assert type(actual) is type(expected)
    assert same_bits(gm(**inputs), actual)
    assert made.config.to_dict() == model.config.to_dict()
    assert type(made.config) is type(model.config)
    assert fxopt.load(tmp_path / "saved").config == model.config.to_dict()
    assert (made.dtype, made.device) == (gm.dtype, gm.device)
    model.load_state_dict(made.state_dict())
    for key in ("nn_module_stack", "stack_trace"):
        assert [n.meta[key] for n in made.graph.nodes] == [n.meta[key] for n in gm.graph.nodes]


def test_groupvit(tmp_path):
    model = groupvit()
    inputs = {"input_ids": torch.randint(1, 98, (2, 7)), "pixel_values": torch.randn(2, 3, 32, 32)}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    gm = fxopt.symbolic_trace(model, list(inputs))
    assert same_bits(gm(**inputs), reloaded(gm, tmp_path)(**inputs))


@pytest.mark.long
@pytest.mark.parametrize("make", [llama, gemma3])
def test_decoders_with_caches(make, tmp_path):
    from transformers import DynamicCache

    model = make()
    ids = torch.randint(0, DECODER["vocab_size"], (2, 3))
    prefill = fxopt.trace(model, (), {"input_ids": ids, "past_key_values": cache_of(DynamicCache, model)})
    graphs = [prefill, decoding(model, DynamicCache, 2), decoding(model, DynamicCache, 6)]
    loaded = [reloaded(gm, tmp_path / str(number)) for number, gm in enumerate(graphs)]
    expected = greedy(model, graphs[0], graphs[1:], ids, cache_of(DynamicCache, model))
    actual = greedy(model, loaded[0], loaded[1:], ids, cache_of(DynamicCache, model))
    assert torch.equal(expected[0], actual[0])
    assert expected[2] == actual[2]
    assert len(expected[0][0]) == STEPS + 1


def test_a_decoder_that_makes_its_cache(tmp_path):
    gm = fxopt.symbolic_trace(llama(), ["input_ids"])
    ids = torch.randint(0, 90, (2, 5))
    expected, actual = gm(input_ids=ids), reloaded(gm, tmp_path)(input_ids=ids)
    assert type(actual.past_key_values) is type(expected.past_key_values)
    assert same_bits(vars(expected.past_key_values.layers[0]), vars(actual.past_key_values.layers[0]))


MODULES = {
    "constants": (Constants(), (X,)),
    "buffers": (Buffers(), (X,)),
    "containers": (Containers(), (X,)),
    "setitem": (Setitem(), (X,)),
    "no_grad": (NoGrad(), (X,)),
    "autocast": (Autocast(), (torch.randn(4, 4),)),
    "reads_dtype": (ReadsDtype(), (X,)),
    "tied": (Tied(), (torch.tensor([1, 2]),)),
    "lstm": (nn.LSTM(4, 3, num_layers=2, bidirectional=True), (X,)),
    "attention": (nn.MultiheadAttention(4, 2), (X, X, X)),
    "encoder": (nn.TransformerEncoderLayer(4, 2, 5), (X,)),
    "bag": (nn.EmbeddingBag(5, 3), (torch.tensor([[1, 2]]),)),
    "names as in open_clip": (
        nn.Sequential(collections.OrderedDict({"-1": nn.Linear(4, 4), "a-b": nn.ReLU()})),
        (X,),
    ),
    "string padding": (nn.Conv1d(3, 2, 3, padding="same", padding_mode="circular"), (X,)),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name, tmp_path):
    model, args = MODULES[name]
    gm = fxopt.trace(randomise(copy.deepcopy(model)).eval(), args)
    with torch.no_grad():
        assert same_bits(gm(*copy.deepcopy(args)), reloaded(gm, tmp_path)(*copy.deepcopy(args)))


def test_guards_hold_after_loading(tmp_path):
    rows = Dim("rows", min=2, max=64)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 2)).eval()
    made = reloaded(
        fxopt.trace(model, (torch.zeros(5, 3, 4),), dynamic_shapes=({0: rows},)), tmp_path, trusted=()
    )
    assert made(torch.zeros(7, 3, 4)).shape == (7, 2)
    with pytest.raises(fxopt.GuardError, match=r"dimension 0 is 65; it takes at most 64"):
        made(torch.zeros(65, 3, 4))
    with pytest.raises(fxopt.GuardError, match="captured in eval mode"):
        made.train()(torch.zeros(7, 3, 4))


def test_what_a_graph_reads_besides_sizes(tmp_path):
    made = reloaded(fxopt.trace(ReadsDtype().eval(), (X,)), tmp_path / "dtype")
    with pytest.raises(fxopt.GuardError, match="cannot change its dtype"):
        made.half()
    made = reloaded(fxopt.trace(Dropped().train(), (X,)), tmp_path / "mode")
    with pytest.raises(fxopt.GuardError, match="captured in training mode"):
        made.eval()(X)


def test_tensors_stay_tied_and_are_stored_once(tmp_path):
    gm = fxopt.trace(Tied().eval(), (torch.tensor([1, 2]),))
    gm.embed.weight.requires_grad_(False)
    made = reloaded(gm, tmp_path)
    assert made.embed.weight is made.out.weight
    assert not made.embed.weight.requires_grad
    assert set(made.state_dict()) == set(gm.state_dict())
    assert "positions" not in made.state_dict()
    stored = stored_in(tmp_path / "saved")
    assert {"embed.weight", "spare.weight", "scale", "positions"} <= set(stored)
    assert "out.weight" not in stored


class Laid(nn.Module):
    """Parameters that are views, lie across or are complex."""

    def __init__(self):
        super().__init__()
        whole = torch.randn(6, 4)
        self.whole = nn.Parameter(whole)
        self.register_buffer("part", self.whole.detach()[2:4])
        self.register_buffer("again", torch.from_numpy(whole.numpy()))  # another storage of the same memory
        self.across = nn.Parameter(torch.randn(5, 4).t())
        self.register_buffer("one", torch.ones(()).expand(4))
        self.register_buffer("turned", torch.polar(torch.ones(4), torch.arange(4.0)))
        self.register_buffer("wide", torch.randn(2, 4, dtype=torch.complex128).t())
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.conv = nn.Conv2d(1, 2, 3).to(memory_format=torch.channels_last)

    def forward(self, x):
        sums = (
            self.whole.sum()
            + self.part.sum()
            + self.again.sum()
            + self.nothing.sum()
            + self.conv.weight.sum()
        )
        return sums + x @ self.across + x.sum() * self.one.sum(), x * self.turned, self.wide


def test_views_strides_and_complex_numbers(tmp_path):
    gm = fxopt.trace(Laid(), (X,))
    made = reloaded(gm, tmp_path)
    assert same_bits(gm(X), made(X))
    with torch.no_grad():
        made.whole[2:4] = 7
    assert made.part.eq(7).all()
    assert made.again[2:4].eq(7).all()
    assert made.one.stride() == (0,)
    for name, tensor in gm.state_dict().items():
        assert made.state_dict()[name].stride() == tensor.stride(), name


def test_passes_and_their_record(tmp_path):
    model, inputs = small_models.bert()
    gm = fxopt.symbolic_trace(model.eval(), list(inputs))
    before = copy.deepcopy(gm)
    pipeline = fxopt.compose(
        fxopt.MergeLinears(),
        fxopt.FuseBiasInLinear(),
        fxopt.ReplaceActivation(),
        fxopt.RemoveIdentity(),
        fxopt.FoldConstants(),
        fxopt.EliminateCommonSubexpressions(),
        fxopt.ChangePrecision(keep_float32=("classifier", nn.LayerNorm)),
    )
    changed = pipeline(gm)
    expected = changed(**inputs)
    made = reloaded(changed, tmp_path)
    assert same_bits(expected, made(**inputs))
    assert fxopt.history(made) == fxopt.history(changed)
    assert len(fxopt.history(made)) >= 5
    assert [step.load() for step in fxopt.history(made)] == [step.load() for step in fxopt.history(changed)]
    again = reloaded(made, tmp_path)
    for steps in (made, again):
        undone = fxopt.undo(steps, len(fxopt.history(steps)))
        assert_round_trip(before, undone)
        assert undone.code == before.code
    assert_round_trip(before, pipeline(copy.deepcopy(changed), reverse=True))


@pytest.mark.parametrize("reversible", [True, False])
def test_folded_batch_norms(reversible, tmp_path):
    model, inputs = small_models.resnet()
    gm = fxopt.symbolic_trace(model.eval(), list(inputs))
    before = copy.deepcopy(gm)
    changed = fxopt.FuseBatchNorm2dInConv2d(reversible=reversible)(gm)
    made = reloaded(changed, tmp_path)
    assert same_bits(changed(**inputs), made(**inputs))
    if reversible:
        assert_round_trip(before, fxopt.undo(made))
    else:
        with pytest.raises(fxopt.UndoError, match="cannot be undone"):
            fxopt.undo(made)


@dataclasses.dataclass(frozen=True)
class Doubled(fxopt.ReversibleTransformation):
    """A pass of a user, that keeps what is no data."""

    def transform(self, graph_module):
        for node in graph_module.graph.nodes:
            if node.op == "call_function":
                node.args = (*node.args[:-1], node.args[-1] * 2)
        return graph_module

    def reverse(self, graph_module):
        for node in graph_module.graph.nodes:
            if node.op == "call_function":
                node.args = (*node.args[:-1], node.args[-1] / 2)
        return graph_module


def test_a_pass_of_a_user_is_undone_by_itself(tmp_path):
    gm = Doubled()(fxopt.trace(module(lambda m, x: x * 3.0), (X,)))
    with pytest.warns(UserWarning, match=r"cannot undo Doubled.*; Doubled.*reverse=True\) can"):
        made = reloaded(gm, tmp_path)
    assert len(fxopt.history(made)) == 1
    with pytest.raises(fxopt.UndoError, match=r"Undo it with Doubled\(\)\(gm, reverse=True\)"):
        fxopt.undo(made)
    assert torch.equal(Doubled()(made, reverse=True)(X), X * 3.0)
    fxopt.save(gm, tmp_path / "trusted", trusted=[Doubled])
    assert torch.equal(fxopt.undo(fxopt.load(tmp_path / "trusted", trusted=[Doubled]))(X), X * 3.0)


class WithoutIdentity(fxopt.ReversibleRewrite):
    """The pass of the guide: a class without fields, and no dataclass."""

    def match(self, graph_module):
        yield from graph_module.graph.find_nodes(op="call_module", target="1")

    def apply(self, rewriter, node):
        rewriter.replace_uses(node, node.all_input_nodes[0])
        rewriter.erase(node)


@pytest.mark.parametrize("attributes", [{}, {"strength": 2}], ids=["plain", "with attributes"])
def test_a_pass_that_is_no_dataclass(tmp_path, attributes):
    """Where it has attributes, nothing says how it is made: its changes are known, and are undone all the same."""
    pass_ = WithoutIdentity()
    vars(pass_).update(attributes)
    traced = fxopt.trace(nn.Sequential(nn.Linear(4, 4), nn.Identity()).eval(), (X,))
    code = traced.code
    gm = pass_(traced)
    for number, trusted in enumerate([[], [WithoutIdentity]]):
        made = reloaded(gm, tmp_path / str(number), trusted=trusted)
        assert len(fxopt.history(made)) == 1
        assert fxopt.undo(made).code == code


class Scaled(nn.Module):
    """A layer of a user."""

    def __init__(self):
        super().__init__()
        self.scale = 2.0
        self.settings = {1: (float("nan"), -float("inf")), "b": [slice(1, None), ..., 1j, {3, 4}]}
        self.dense = nn.Linear(4, 4)

    def forward(self, x):
        return self.dense(x) * self.scale


Pair = collections.namedtuple("Pair", "first second")


class Users(nn.Module):
    def __init__(self):
        super().__init__()
        self.scaled = Scaled()

    def forward(self, x):
        return Point(x=self.scaled(x), y=Cube.apply(x, 2.0)), Pair(x, 1)


def test_classes_of_a_user_that_are_trusted(tmp_path):
    gm = fxopt.trace(Users(), (X,), leaf_modules=[Scaled])
    for trusted, missing in (
        ([], Scaled),
        ([Scaled], Cube),
        ([Scaled, Cube], Point),
        ([Scaled, Cube, Point], Pair),
    ):
        with pytest.raises(fxopt.SaveError, match=f"{missing.__qualname__}.*trusted"):
            fxopt.save(gm, tmp_path / "refused", trusted=trusted)
    made = reloaded(gm, tmp_path, trusted=[Scaled, Cube, Point, Pair])
    actual, expected = made(X), gm(X)
    assert (type(actual[0]), type(actual[1])) == (Point, Pair)
    assert torch.equal(actual[0].x, expected[0].x)
    assert torch.equal(actual[0].y, expected[0].y)
    assert repr(made.scaled.settings) == repr(gm.scaled.settings)
    with pytest.raises(fxopt.LoadError, match=r"Point|Cube|Scaled"):
        fxopt.load(tmp_path / "saved")


def test_a_graph_module_of_torch_fx(tmp_path):
    def forward(self, x, power=2):
        return {"out": self.dense(x).pow(power) / self.dense.weight.shape[0]}

    gm = torch.fx.symbolic_trace(module(forward, dense=nn.Linear(4, 2)))
    made = reloaded(gm, tmp_path)
    assert type(made).__mro__[1] is torch.fx.GraphModule
    assert same_bits(gm(X), made(X))
    assert same_bits(gm(X, 3), made(X, 3))
    assert made(X).keys() == {"out"}


def test_types_of_inputs_that_are_no_data_are_left_out(tmp_path):
    class Typed(nn.Module):
        def forward(self, x: torch.Tensor, sizes: list[int] | None = None) -> torch.Tensor:
            return x * 2

    gm = torch.fx.symbolic_trace(Typed())
    assert "list[int]" in gm.code
    fxopt.save(gm, tmp_path / "saved")
    made = fxopt.load(tmp_path / "saved")
    assert "x : torch.Tensor" in made.code
    assert same_bits(made(X), X * 2)


@pytest.mark.long
def test_a_fresh_process_gives_the_same_bits(tmp_path):
    model, inputs = small_models.llama()
    gm = fxopt.MergeLinears()(fxopt.symbolic_trace(model.eval(), list(inputs)))
    fxopt.save(gm, tmp_path / "saved")
    torch.save((inputs, gm(**inputs).logits), tmp_path / "example.pt")
    code = """
import pickle, sys, torch
import fxopt
inputs, expected = torch.load("example.pt")
pickle.loads = pickle.load = pickle.Unpickler = torch.load = None
gm = fxopt.load("saved")
assert "transformers.models.bert" not in sys.modules
assert torch.equal(gm(**inputs).logits, expected)
assert len(fxopt.history(gm)) == 1 and fxopt.history(fxopt.undo(gm)) == ()
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_saved_folder_is_replaced_and_is_the_same_each_time(tmp_path):
    first, second = (fxopt.trace(nn.Linear(4, n), (X,)) for n in (2, 3))
    folder = tmp_path / "a" / "b"
    fxopt.save(first, folder)
    before = contents(folder)
    fxopt.save(second, folder)
    assert fxopt.load(folder)(X).shape == (3, 3)
    fxopt.save(first, str(folder))
    assert contents(folder) == before
    assert os.listdir(folder.parent) == ["b"]
    fxopt.save(fxopt.load(folder), folder)  # over the files that it came from
    assert torch.equal(fxopt.load(folder)(X), first(X))


def test_the_weights_go_to_a_device(tmp_path):
    gm = fxopt.trace(nn.Linear(4, 2), (X,))
    fxopt.save(gm, tmp_path / "saved")
    assert fxopt.load(tmp_path / "saved", device="meta").weight.is_meta
    facts = json.loads((tmp_path / "saved" / "graph.json").read_text())["tensors"]
    assert {entry["device"] for entry in facts.values()} == {"cpu"}


class WithoutData(fxopt.ReversibleRewrite):
    """Replaces an activation and remembers by a function of its own what stood there."""

    def match(self, graph_module):
        yield from (n for n in graph_module.graph.nodes if n.op == "call_module" and n.target == "1")

    def apply(self, rewriter, node):
        rewriter.swap({"1": nn.SiLU().eval()}, restore=lambda now, left: {"1": nn.ReLU().eval()})


def test_a_log_that_is_no_data_is_left_out_and_undo_says_so(tmp_path):
    gm = fxopt.trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), (X,))
    before = copy.deepcopy(gm)
    gm = WithoutData()(gm)
    made = reloaded(gm, tmp_path)
    assert fxopt.history(made) == fxopt.history(gm)
    for undo in (fxopt.undo, lambda made: WithoutData()(made, reverse=True)):
        with pytest.raises(
            fxopt.UndoError, match="its changes could not be pickled, or saved, together with"
        ):
            undo(made)
    assert_round_trip(before, fxopt.undo(gm))


def test_what_was_loaded_is_copied_pickled_and_trained(tmp_path):
    gm = fxopt.trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).train(), (X,))
    made = reloaded(gm, tmp_path)
    assert_round_trip(gm, pickle.loads(pickle.dumps(copy.deepcopy(made))))
    made(X).sum().backward()
    gm(X).sum().backward()
    assert torch.equal(made.get_parameter("0.weight").grad, gm.get_parameter("0.weight").grad)


class Packed(nn.Linear):
    """A layer that keeps its weight in another form as well, which it makes again."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.pack()

    def pack(self):
        self.form = object(), self.weight.detach().t().contiguous()

    def forward(self, x):
        return x @ self.form[1] + self.bias

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "form"}

    def __setstate__(self, state):
        super().__setstate__(state)
        self.pack()


def test_a_layer_says_itself_what_is_stored(tmp_path):
    gm = fxopt.trace(nn.Sequential(Packed(4, 2)), (X,), leaf_modules=[Packed])
    made = reloaded(gm, tmp_path, trusted=[Packed])
    assert same_bits(gm(X), made(X))
    assert list(stored_in(tmp_path / "saved")) == ["0.bias", "0.weight"]


def test_tensors_without_a_name_get_one_that_is_free(tmp_path):
    held = nn.Module()
    held.register_parameter("0", nn.Parameter(torch.zeros(2)))
    gm = fxopt.trace(nn.ReLU(), (X,))
    gm.add_module("fxopt", held)
    gm.table = {"a": torch.ones(3), "b": [torch.full((2,), 2.0)]}
    made = reloaded(gm, tmp_path)
    assert torch.equal(made.table["a"], torch.ones(3))
    assert torch.equal(made.table["b"][0], torch.full((2,), 2.0))
    assert torch.equal(made.get_parameter("fxopt.0"), torch.zeros(2))


def test_packed_layers_are_packed_anew(tmp_path):
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 4)
    )
    x = torch.randn(2, 3, 8, 8)
    pack = fxopt.compose(fxopt.PackConvs(), fxopt.PackLinears(), fxopt.FuseEpilogues())
    traced = fxopt.trace(layers.eval(), (x,))
    code, packed = traced.code, pack(traced)
    fxopt.save(packed, tmp_path / "packed")
    loaded = fxopt.load(tmp_path / "packed")
    with torch.no_grad():
        assert torch.equal(loaded(x), packed(x))
    assert [type(m).__name__ for m in loaded.modules()] == [type(m).__name__ for m in packed.modules()]
    assert fxopt.undo(loaded, len(fxopt.history(loaded))).code == code
    with pytest.raises(fxopt.SaveError, match="no graph to save"):
        fxopt.save(fxopt.optimize(layers), tmp_path / "fast")
    assert not (tmp_path / "fast").exists()
