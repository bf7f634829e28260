"""`fxopt.guards`: what a graph assumes, to be read."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.export import Dim

import fxopt
from tests.capture.test_transformers import bert


class Reads(nn.Module):
    def forward(self, x, y, scale, pair):
        if x.shape[0] > 5:
            x = x * 2
        if x.is_contiguous() and x.dtype == torch.float32 and torch.is_grad_enabled():
            x = x + 1
        return x * scale + y.sum() + pair["a"][: x.shape[0]]


def reads():
    inputs = torch.ones(7, 4), torch.ones(3), 2.0, {"a": torch.ones(7, 4)}
    free = {"x": {0: Dim("rows", max=64)}, "pair": {"a": {0: Dim.AUTO}}}
    return fxopt.trace(Reads(), inputs, dynamic_shapes=free | {"y": None, "scale": None})


def test_every_kind_of_assumption_is_listed():
    listed = {(guard.input, guard.dimension, guard.limit) for guard in fxopt.guards(reads())}
    assert listed >= {
        ("x", None, "a tensor of 2 dimensions, torch.float32"),
        ("x", None, "contiguous"),
        ("x", 1, "x.shape[1] == 4"),
        ("x", 0, "x.shape[0] <= 64"),
        ("y", None, "a tensor of 1 dimensions, torch.float32"),
        ("y", 0, "y.shape[0] == 3"),
        ("scale", None, "is 2.0"),
        ("pair", None, "a dict of ['a']"),
        ("", None, "grad is on"),
    }
    (needed,) = [g for g in fxopt.guards(reads()) if g.limit == "x.shape[0] > 5"]
    assert (needed.input, needed.dimension) == ("x", 0)
    assert "test_listing.py" in needed.source
    assert str(needed).startswith("x, dimension 0: x.shape[0] > 5  (")


def test_a_size_that_the_forward_fixes_has_its_line():
    gm = fxopt.trace(
        nn.Sequential(nn.Flatten(0), nn.Linear(12, 2)), (torch.ones(3, 4),), dynamic_shapes=[{0: Dim.AUTO}]
    )
    (fixed,) = [guard for guard in fxopt.guards(gm) if guard.dimension == 0]
    assert fixed.limit == "input.shape[0] == 3"
    assert fixed.source != "the example input"


def test_a_graph_that_holds_at_size_one_as_well_says_so():
    gm = fxopt.symbolic_trace(bert(), ["input_ids", "attention_mask"])
    limits = [guard.limit for guard in fxopt.guards(gm)]
    assert "input_ids.shape[1] <= 24" in limits
    assert "attention_mask.shape[1] == input_ids.shape[1]" in limits
    assert any(limit.startswith("or, ") and "(input_ids.shape[1] == 1)" in limit for limit in limits)
    assert all(guard.source for guard in fxopt.guards(gm))


def test_sizes_of_one_are_listed_in_the_order_of_the_inputs():
    class Asks(nn.Module):
        def forward(self, a, b, c, d, e):
            assert all(x.shape[0] != 1 or x.shape[1] == 3 for x in (a, b, c, d, e))
            return a.sum() + b.sum() + c.sum() + d.sum() + e.sum()

    inputs = [torch.ones(size, 3) for size in range(2, 7)]
    gm = fxopt.trace(Asks(), inputs, dynamic_shapes=[{0: Dim.AUTO}] * 5)
    (all_at_one,) = [guard.limit for guard in fxopt.guards(gm) if guard.limit.count(" == 1)") == 5]
    assert all_at_one.endswith(" and ".join(f"({name}.shape[0] == 1)" for name in "abcde"))


def test_copies_and_passes_keep_them():
    gm = reads()
    expected = fxopt.guards(gm)
    assert expected == fxopt.guards(copy.deepcopy(gm)) == fxopt.guards(pickle.loads(pickle.dumps(gm)))
    model = bert()
    gm = fxopt.symbolic_trace(model)
    expected = fxopt.guards(gm)
    assert fxopt.guards(fxopt.MergeLinears()(gm)) == expected


def test_a_graph_module_that_was_not_captured_has_none():
    assert fxopt.guards(torch.fx.symbolic_trace(nn.Linear(2, 2))) == []


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            Dim("n", min=8),
            None,
            r"contradict `dynamic_shapes: Dim\('n', min=8\)`: dimension 0 of input a is 3",
        ),
        (Dim.AUTO(max=2), None, "dimension 0 of input a is 3"),
        (Dim("n"), Dim("n"), "dimension 0 of input a is 3, dimension 0 of input b is 7"),
        (Dim("n"), 2 * Dim("n"), "dimension 0 of input a is 3, dimension 0 of input b is 7"),
        (Dim.AUTO, 2 * Dim("n"), "gives Dim.* to no dimension"),
        (5, None, "fixes dimension 0 of input a to 5; the example has 3"),
    ],
)
def test_dimensions_that_the_example_contradicts(first, second, message):
    spec = {"a": {0: first}, "b": {0: second}}
    with pytest.raises(fxopt.TraceError, match=message):
        fxopt.trace(Pairs(), (torch.ones(3), torch.ones(7)), dynamic_shapes=spec)


class Pairs(nn.Module):
    def forward(self, a, b):
        return a.sum() + b.sum()


def half(dim):
    return 2 * dim + 1


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        ({0: Dim("n", min=3, max=9)}, (3, 9), (2, 10)),
        ({0: Dim.AUTO}, (2, 50), ()),
        ({0: Dim.DYNAMIC, 1: Dim.STATIC}, (2, 50), ()),
        ((Dim.DYNAMIC, None), (2, 50), ()),
        ([Dim.AUTO, 4], (2, 50), ()),
        ({-2: Dim.DYNAMIC}, (2, 50), ()),
        ({0: 6, 1: 4}, (6,), (5,)),
        (None, (6,), (5,)),
        ({0: Dim.AUTO(min=3, max=9)}, (3, 9), (2, 10)),
        ({0: Dim.DYNAMIC(max=9)}, (2, 9), (10,)),
        ({0: Dim.STATIC}, (6,), (5,)),
    ],
    ids=str,
)
def test_the_forms_of_a_dimension(spec, good, bad):
    gm = fxopt.trace(nn.Linear(4, 4).eval(), (torch.ones(6, 4),), dynamic_shapes={"input": spec})
    for size in good:
        assert gm(torch.ones(size, 4)).shape == (size, 4)
    for size in bad:
        with pytest.raises(fxopt.GuardError, match=f"dimension 0 is {size}"):
            gm(torch.ones(size, 4))


def test_derived_dimensions():
    n = Dim("n", min=2, max=8)
    spec = {"a": {0: n}, "b": {0: half(n)}}
    gm = fxopt.trace(Pairs(), (torch.ones(3), torch.ones(7)), dynamic_shapes=spec)
    assert gm(torch.ones(5), torch.ones(11)) == 16
    for a, b in ((5, 10), (9, 19), (1, 3)):
        with pytest.raises(fxopt.GuardError):
            gm(torch.ones(a), torch.ones(b))


def test_a_size_that_the_forward_makes_a_multiple_of_another_is_checked():
    class Doubled(nn.Module):
        def forward(self, a, b):
            return a.repeat(2, 1) + b

    free = {"a": {0: Dim.AUTO}, "b": {0: Dim.AUTO}}
    gm = fxopt.trace(Doubled(), (torch.ones(3, 4), torch.ones(6, 4)), dynamic_shapes=free)
    assert gm(torch.ones(5, 4), torch.ones(10, 4)).shape == (10, 4)
    with pytest.raises(fxopt.GuardError, match=r"dimension 0 is 11; it must be 10 \(2\*a.shape\[0\]\)"):
        gm(torch.ones(5, 4), torch.ones(11, 4))
