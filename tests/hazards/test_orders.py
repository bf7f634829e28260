"""Passes twice, in every order, undone in every order, and after all that may happen in between."""

import copy
import itertools
import math
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxopt
from fxopt.kernels import packed_layer
from fxopt.passes import available
from fxopt.testing import assert_round_trip, randomise
from tests.hazards.sites import ROWS, SITES
from tests.users_passes import pickled, saved


class Meeting(nn.Module):
    """Sites of all passes, which share layers where passes can meet."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 3)
        self.act, self.drop = nn.GELU(), nn.Dropout()
        self.first, self.middle, self.last = nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.conv, self.norm = nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)
        self.other_conv, self.layer_norm, self.behind = nn.Conv2d(1, 2, 1), nn.LayerNorm(4), nn.Linear(4, 4)
        self.wide, self.table = nn.Linear(64, 4), nn.Parameter(torch.ones(4, 4))
        self.packed = packed_layer(nn.Linear(4, 4), "onednn", (5, 4))
        self.padded = nn.Conv2d(1, 2, 3)

    def forward(self, x):
        q, k = self.q(x) / 49, self.k(x)
        torch.relu(k)  # which nothing uses
        y = self.last(self.middle(self.first(self.act(self.drop(q)))))
        heads = y[None] + 1
        y = y + ((heads @ heads.transpose(-1, -2) / 7).softmax(-1) @ heads)[0]
        heads = heads[None]
        twice = heads[:, :, None].expand(1, 1, 2, 5, 4).reshape(1, 2, 5, 4)
        y = y + F.scaled_dot_product_attention(heads.expand(1, 2, 5, 4), twice, twice)[0, 0]
        y = y + torch.sin(x) * torch.sin(x) + (torch.arange(4) + 1) + self.wide(torch.cat([x] * 16, 1))
        y = y + self.behind(self.layer_norm(y)) + x @ self.table
        y = y + (y + 1).view(5, 2, 2).transpose(0, 1).contiguous().transpose(0, 1).reshape(5, 4)
        image = torch.relu(self.packed(y))[None, None]
        y = y + 0.5 * y * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (y + 0.044715 * torch.pow(y, 3.0))))
        image = self.norm(self.conv(image)) + self.other_conv(image) + self.padded(F.pad(image, (1, 1, 1, 1)))
        return y / 8, k, image + 1


PASSES = list(available().values())
PAIRS = list(itertools.permutations(PASSES, 2))
REFERENCE = fxopt.trace(randomise(Meeting().eval()), (ROWS,))


def traced():
    return copy.deepcopy(REFERENCE)


@pytest.mark.parametrize("cls", PASSES)
def test_every_pass_has_a_site(cls):
    assert cls().explain(REFERENCE).sites


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_every_order(first, second):
    """Outputs stay; undone in the right order it is exact, in the wrong one too, or an error names the right one."""
    one, two = first(), second()
    after = two(one(traced()))
    if one.preserves_computation and two.preserves_computation:
        with torch.no_grad():
            torch.testing.assert_close(after(ROWS), REFERENCE(ROWS), rtol=1e-4, atol=1e-5)
    code = after.code
    wrong = copy.deepcopy(after)
    assert_round_trip(REFERENCE, one(two(after, reverse=True), reverse=True))
    error = undo_error(one, wrong)
    if error is None:
        assert_round_trip(REFERENCE, two(wrong, reverse=True))
    else:
        assert f"Undo {two!r} first" in error
        assert wrong.code == code, "an error left the graph module changed"
        assert_round_trip(REFERENCE, one(two(wrong, reverse=True), reverse=True))


def undo_error(pass_, graph_module):
    try:
        pass_(graph_module, reverse=True)
    except fxopt.UndoError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (fxopt.MergeLinears(), fxopt.FuseBiasInLinear()),
        (fxopt.FuseBiasInLinear(), fxopt.ChangePrecision()),
        (fxopt.FuseBatchNorm1dInLinear(), fxopt.FuseBiasInLinear()),
        (fxopt.FuseBatchNorm1dInLinear(), fxopt.ChangePrecision()),
        (fxopt.FuseBatchNorm2dInConv2d(), fxopt.ChangePrecision(torch.float16)),
        (fxopt.ReplaceActivation("gelu", "silu"), fxopt.ReplaceActivation("silu", "relu")),
    ],
)
def test_a_second_pass_on_the_same_site(first, second):
    """The first cannot be undone before the second, whose name the error gives, also after a pickle."""
    once = first(traced())
    twice = second(copy.deepcopy(once))
    for carried in (twice, pickled(twice)):
        assert f"Undo {second!r} first" in str(undo_error(first, carried))
        assert_round_trip(once, second(carried, reverse=True))
        assert_round_trip(REFERENCE, first(carried, reverse=True))


def test_passes_that_do_not_meet_are_undone_in_any_order():
    merge, fold = fxopt.MergeLinears(), fxopt.FuseBatchNorm2dInConv2d()
    assert undo_error(merge, fold(merge(traced()))) is None


@pytest.mark.parametrize("cls", PASSES)
def test_a_second_application_and_a_second_undo_change_nothing(cls):
    pass_ = cls()
    once = pass_(traced())
    twice = cls()(copy.deepcopy(once))
    assert_round_trip(once, twice)
    undone = pass_(twice, reverse=True)
    assert_round_trip(REFERENCE, undone)
    assert_round_trip(REFERENCE, pass_(undone, reverse=True))


def without_dead_code(graph_module):
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    return graph_module


def loaded(graph_module):
    graph_module.load_state_dict(copy.deepcopy(graph_module.state_dict()))
    return graph_module


CARRIERS = {
    "deepcopy": copy.deepcopy,
    "pickle": pickled,
    "torch.save": saved,
    "dead code elimination": without_dead_code,
    "load_state_dict": loaded,
    "float64": lambda gm: gm.to(torch.float64),
    "in turn": lambda gm: saved(without_dead_code(copy.deepcopy(gm))),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("cls", PASSES)
def test_undo_after(cls, carrier):
    reference = without_dead_code(traced()) if carrier in ("dead code elimination", "in turn") else REFERENCE
    after = CARRIERS[carrier](cls()(copy.deepcopy(reference)))
    converted = carrier == "float64" and cls is not fxopt.ChangePrecision  # whose undo gives float32 back
    before = traced().double() if converted else reference
    assert_round_trip(before, cls()(after, reverse=True))


def test_undo_after_an_unused_part_was_removed_is_an_error():
    site = SITES["merge"]
    model = site.model(lambda m, x: (m.a(x), m.b(x))[0])
    after = without_dead_code(site.pass_(torch.fx.symbolic_trace(model)))
    code = after.code
    with pytest.raises(fxopt.UndoError, match="dead code"):
        site.pass_(after, reverse=True)
    assert after.code == code


UNDO = """
import pathlib, sys, torch, fxopt
from fxopt.kernels import packed_layer
from fxopt.passes import available
folder = pathlib.Path(sys.argv[1])
for name, cls in available().items():
    module = torch.load(folder / name, weights_only=False)
    assert fxopt.history(module), name
    torch.save(cls()(module, reverse=True), folder / name)
module = torch.load(folder / "all", weights_only=False)
torch.save(fxopt.undo(module, len(fxopt.history(module))), folder / "all")
"""


@pytest.mark.long
def test_undo_in_another_process_with_another_hash_seed(tmp_path):
    for name, cls in available().items():
        torch.save(cls()(traced()), tmp_path / name)
    torch.save(fxopt.compose(*(cls() for cls in PASSES))(traced()), tmp_path / "all")
    seed = "1" if os.environ.get("PYTHONHASHSEED") == "2" else "2"
    environment = os.environ | {"PYTHONHASHSEED": seed}
    subprocess.run([sys.executable, "-c", UNDO, str(tmp_path)], check=True, env=environment)
    for path in tmp_path.iterdir():
        assert_round_trip(REFERENCE, torch.load(path, weights_only=False))
