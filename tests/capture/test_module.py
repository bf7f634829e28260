"""The captured module: it is copied, pickled, moved and loaded as the model would be."""

import copy
import io
import operator
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

import fxopt
from tests.capture.models import Buffers, Constants, Containers, Operators, Point, Setitem
from tests.capture.test_modes import Autocast, Cube, Custom, NoGrad
from tests.capture.test_trace import assert_same

X = torch.randn(3, 4)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.out = nn.Linear(4, 5, bias=False)
        self.out.weight = self.embed.weight
        self.spare = nn.Linear(2, 2)
        self.register_buffer("positions", torch.arange(5), persistent=False)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, ids):
        return self.out(self.embed(ids)) * self.scale + self.positions


class Dropped(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x, 0.5, training=self.training)


class ReadsDtype(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(4, 4)

    def forward(self, x):
        return self.dense(x.to(self.dense.weight.dtype))


def copies(gm):
    buffer = io.BytesIO()
    torch.save(gm, buffer)
    buffer.seek(0)
    return {
        "deepcopy": copy.deepcopy(gm),
        "pickle": pickle.loads(pickle.dumps(gm)),
        "torch.save": torch.load(buffer, weights_only=False),
        "pickled deepcopy": pickle.loads(pickle.dumps(copy.deepcopy(gm))),
    }


def listing(gm):
    return [(n.name, n.op, n.target, str(n.args), str(n.kwargs)) for n in gm.graph.nodes]


@pytest.mark.parametrize(
    "model",
    [Containers(), Setitem(), Constants(), NoGrad(), Autocast(), Custom(), Buffers()],
    ids=lambda m: type(m).__name__,
)
def test_copies_are_the_same_graph_under_the_same_names(model):
    gm = fxopt.trace(model.eval(), (X,))
    for how, again in copies(gm).items():
        assert isinstance(again, fxopt.TracedModule), how
        assert listing(again) == listing(gm), how
        assert again.code == gm.code, how
        torch.testing.assert_close(again(X), gm(X), rtol=0, atol=0)
        assert {n.name: n.meta["stack_trace"] for n in again.graph.nodes if "stack_trace" in n.meta} == {
            n.name: n.meta["stack_trace"] for n in gm.graph.nodes if "stack_trace" in n.meta
        }


@pytest.mark.long
def test_a_pickle_opens_in_another_process(tmp_path):
    torch.save(fxopt.trace(Containers().eval(), (X,)), tmp_path / "model.pt")
    script = f"import torch; gm = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False); print(gm(torch.ones(3, 4)).shape)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "torch.Size([3, 2])" in done.stdout


def test_a_target_that_cannot_be_imported_is_said_when_pickling():
    def local_function(x):
        return x

    gm = fxopt.trace(Setitem(), (X,))
    next(n for n in gm.graph.nodes if n.op == "call_function").target = local_function
    with pytest.raises(pickle.PicklingError, match="local_function.*cannot be imported"):
        pickle.dumps(gm)


def test_state_dict_fits_both_ways_with_ties_and_unused_parameters():
    model = Tied().eval()
    gm = fxopt.trace(model, (torch.tensor([1, 2, 3, 4, 0]),))
    assert list(gm.state_dict()) == list(model.state_dict())
    assert [n for n, _ in gm.named_buffers()] == [n for n, _ in model.named_buffers()]
    other = Tied().eval()
    gm = copy.deepcopy(gm)
    gm.load_state_dict(other.state_dict(), strict=True)
    assert torch.equal(gm(torch.arange(5)), other(torch.arange(5)))
    model.load_state_dict(gm.state_dict(), strict=True)
    for again in copies(gm).values():
        assert again.out.weight is again.embed.weight
        assert "positions" not in again.state_dict()
        assert "spare.weight" in again.state_dict()


def test_layers_are_shared_with_the_model():
    model = Containers().eval()
    gm = fxopt.trace(model, (X,))
    assert gm.get_submodule("blocks.0.dense") is model.blocks[0].dense
    assert copy.deepcopy(gm).get_submodule("blocks.0.dense") is not model.blocks[0].dense


def test_a_container_under_two_names_is_one():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Sequential(nn.Linear(4, 4))
            self.second = self.first

        def forward(self, x):
            return self.second(self.first(x))

    gm = fxopt.trace(Shared(), (X,))
    assert gm.first is gm.second
    assert copy.deepcopy(gm).first is not gm.first
    assert [n.target for n in gm.graph.nodes if n.op == "call_module"] == [
        "input_guard",
        "first.0",
        "first.0",
    ]


def test_constants_of_a_graph_in_a_graph_keep_their_names():
    inner = fxopt.trace(Constants(), (X,))

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self._tensor_constant1 = nn.Linear(4, 4)
            self.register_buffer("_tensor_constant0", torch.ones(4))

        def forward(self, x):
            return self._tensor_constant1(x) * torch.tensor([1.0, 2, 3, 4]) + self._tensor_constant0

    for model in (Outer(), inner):
        assert_same(fxopt.trace(model, (X,))(X), model(X))


def test_it_moves_to_another_device():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = nn.Linear(4, 4)

        def forward(self, x):
            mask = torch.arange(x.shape[0], device=x.device) > 1
            return self.dense(x) * mask[:, None] + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)

    gm = fxopt.trace(Masked(), (X,))
    moved = copy.deepcopy(gm).to("meta")
    assert moved(X.to("meta")).device.type == "meta"
    assert moved.device.type == "meta"
    assert gm.device.type == "cpu"
    assert gm.dtype == torch.float32


def test_the_other_training_mode_is_refused():
    for training in (True, False):
        gm = fxopt.trace(Dropped().train(training), (X,))
        gm(X)
        gm.train(not training)
        with pytest.raises(fxopt.GuardError, match="was captured in"):
            gm(X)
        gm.train(training)
        gm(X)


def test_a_part_in_the_other_training_mode_is_refused():
    gm = fxopt.trace(Containers().eval(), (X,))
    gm.blocks.train()
    with pytest.raises(fxopt.GuardError, match=r"Containers\.blocks was captured in eval mode"):
        gm(X)


def test_training_mode_draws_the_same_random_numbers():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), Dropped()).train()
    gm = fxopt.trace(model, (X,))
    torch.manual_seed(3)
    expected = model(X)
    torch.manual_seed(3)
    assert torch.equal(gm(X), expected)


def test_a_dtype_that_the_forward_has_read_cannot_be_changed():
    gm = fxopt.trace(ReadsDtype(), (X,))
    with pytest.raises(fxopt.GuardError, match=r"reads a dtype at .*test_module\.py:\d+"):
        copy.deepcopy(gm).half()
    copy.deepcopy(gm).to("meta")
    with pytest.raises(
        fxopt.GuardError, match="'x' is torch.float64; the graph was captured with torch.float32"
    ):
        gm(X.double())


def test_a_dtype_that_nobody_read_can_be_changed():
    model = Containers().eval()
    gm = copy.deepcopy(fxopt.trace(model, (X,))).double()
    assert torch.equal(gm(X.double()), copy.deepcopy(model).double()(X.double()))


def test_gradients_reach_the_model():
    model = Containers()
    fxopt.trace(model, (X,))(X).sum().backward()
    expected = Containers()
    expected.load_state_dict(model.state_dict())
    expected(X).sum().backward()
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)


def test_rebuilding_marks_writes_as_impure_and_nothing_else():
    gm = fxopt.trace(Operators().eval(), (X,))
    pickle.loads(pickle.dumps(gm))
    impure = [n.target for n in copy.deepcopy(gm).graph.nodes if n.op == "call_function" and n.is_impure()]
    assert impure == []
    again = pickle.loads(pickle.dumps(fxopt.trace(Setitem(), (X,))))
    assert {n.target for n in again.graph.nodes if n.op == "call_function" and n.is_impure()} == {
        operator.setitem,
        torch.Tensor.add_,
    }


def test_imported_names():
    assert Cube.__module__ == "tests.capture.test_modes"
    assert Point.__module__ == "tests.capture.models"


class Guarded(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x, more, scale=2.0):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.layer(x) * scale
        return y[: x.shape[0]] + more


class Holds(torch.nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x, y):
        return self.part(x, y) * 2


def test_a_tracer_with_proxies_gets_the_nodes_of_the_graph():
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    traced = fxopt.trace(Guarded(), (x, y))
    again = torch.fx.symbolic_trace(traced)
    assert [n.op for n in again.graph.nodes if n.op != "placeholder"] == [
        n.op for n in traced.graph.nodes if n.op != "placeholder"
    ]
    inside = torch.fx.symbolic_trace(Holds(traced))
    assert torch.equal(inside(x, y), traced(x, y) * 2)
    with pytest.raises(fxopt.GuardError, match="dimension 0 is 5"):
        inside(torch.randn(5, 4), torch.randn(5, 4))


def test_fusing_of_torch_works_on_a_captured_graph():
    from torch.fx.experimental.optimization import fuse

    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.ReLU()).eval()
    x = torch.randn(1, 1, 8, 8)
    fused = fuse(fxopt.trace(model, (x,)))
    assert not any(isinstance(part, torch.nn.BatchNorm2d) for part in fused.children())
    torch.testing.assert_close(fused(x), model(x))
