"""Modules that are right on the example, and on tame values of other sizes: the oracle sees what else is wrong with them."""

from __future__ import annotations

import copy
import math
import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

import fxopt
from fxopt.testing import Grade, Oracle, Verdict, assert_round_trip, compare, randomise
from tests.modules import module

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


class Does(nn.Module):
    """A layer of one's own, and a function of it and the inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.function = randomise(nn.Linear(4, 4)), function

    def forward(self, *args: Any) -> Any:
        return self.function(self.layer, *args)


def judged(right: Callable[..., Any], wrong: Callable[..., Any], *inputs: Tensor, **options: Any) -> Verdict:
    model, candidate = Does(right).eval(), Does(wrong).eval()
    oracle = Oracle(model, inputs or [X], **options)
    assert oracle.judge(Does(right)).grade is Grade.BIT_EXACT
    return oracle.judge(candidate)


def plain(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (plain, lambda layer, x: layer(x).clamp(-1e3, 1e3)),
        (lambda layer, x: layer(x).clamp(-1e3, 1e3), plain),
        (plain, lambda layer, x: layer(x).clamp(-65504, 65504)),
    ],
)
def test_values_are_far_beyond_what_clamps_allow(right, wrong):
    assert "with other values, output differs" in judged(right, wrong).reason
    pixels = X.sigmoid()
    assert "with other values, output differs" in judged(right, wrong, pixels).reason


@pytest.mark.parametrize(
    "wrong",
    [
        lambda layer, x: layer(x).nan_to_num(0, float("inf"), -float("inf")),
        lambda layer, x: layer(x).nan_to_num(float("nan"), 1e30, -1e30),
        lambda layer, x: torch.where(layer(x) == layer(x), layer(x), float("inf")),
        lambda layer, x: layer(x) + 0 * x.sum(),
    ],
)
def test_both_are_nan_and_infinite_at_the_same_places(wrong):
    reason = judged(plain, wrong).reason
    assert "with NaN and infinities, output is not NaN or infinite where the original is" in reason


def test_nan_may_reach_fewer_places_in_a_kernel():
    def attends(layer: nn.Module, x: Tensor) -> Tensor:
        return (x @ x.transpose(-1, -2) / 2).softmax(-1) @ x

    def fused(layer: nn.Module, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x)

    images = torch.randn(4, 2, 5, 4)
    assert judged(attends, fused, images).grade.passes
    assert "with NaN" in judged(attends, lambda layer, x: attends(layer, x).nan_to_num(), images).reason


def test_nan_is_asked_of_models_that_answer_alone():
    class Refuses(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.isnan().any():
                raise ValueError("no numbers")
            return x + 1

    class Masks(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            assert ((mask == 0) | (mask == 1)).all()
            return x.masked_fill(mask == 0, 0)

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 4)

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids)

    assert Oracle(Refuses(), [X]).probes == ("the given inputs", "other values")
    assert "NaN and infinities" in Oracle(Masks(), [X, (X > 0).float()]).probes
    assert Oracle(Looks(), [torch.arange(9)]).probes == ("the given inputs", "other values")


def test_values_at_which_rounding_decides_are_not_asked():
    def rounds(layer: nn.Module, x: Tensor) -> Tensor:
        return (layer(x) * 1e9).sin()

    assert judged(
        rounds, lambda layer, x: (x @ layer.weight.T + layer.bias).mul(1e9).sin(), X / 1e6
    ).grade.passes


class Means(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.sum(0) / x.shape[0] + y.sum(0) / y.shape[0]


class Lengths(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x.sum(0) / x.shape[0]).sum(0) + (x.sum(1) / x.shape[1]).sum(0) * 2


FREE = {
    Means: {"x": {0: torch.export.Dim("a")}, "y": {0: torch.export.Dim("b")}},
    Lengths: {"x": {0: torch.export.Dim("a"), 1: torch.export.Dim("b")}},
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("model", "inputs"), [(Means(), (X, X + 1)), (Lengths(), (torch.randn(4, 4, 3),))])
def test_free_sizes_that_are_equal_in_the_example_are_told_apart(model, inputs, tied):
    traced = fxopt.trace(model, inputs, dynamic_shapes=FREE[type(model)])
    oracle = Oracle(model, inputs, captured=copy.deepcopy(traced))
    assert oracle.judge(traced).grade is Grade.BIT_EXACT
    one, other = traced.graph.find_nodes(op="call_function", target=operator.truediv)
    sizes = one.args[1], other.args[1]
    for late in sizes:
        one.prepend(late)
    one.args, other.args = (one.args[0], sizes[1]), (other.args[0], sizes[1 if tied else 0])
    traced.recompile()
    assert re.search("with other (sizes|values), output differs", oracle.judge(traced).reason)


def test_a_batch_of_one_is_asked_where_it_is_allowed():
    class Flat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum(1, keepdim=True).squeeze(1) * 2

    free = {"x": {0: torch.export.Dim("batch")}}
    traced = fxopt.trace(Flat(), (X,), dynamic_shapes=free)
    oracle = Oracle(Flat(), [X], captured=copy.deepcopy(traced))
    assert oracle.judge(traced).grade is Grade.BIT_EXACT
    (squeeze,) = traced.graph.find_nodes(op="call_method", target="squeeze")
    squeeze.args = squeeze.args[:1]
    traced.recompile()
    assert "expected torch.float64 [1], got torch.float64 []" in oracle.judge(traced).reason


@pytest.mark.parametrize(
    ("right", "wrong", "reason"),
    [
        (lambda layer, x: x * 1, lambda layer, x: x, "output shares memory with input[0][0]"),
        (lambda layer, x: x.t().clone(), lambda layer, x: x.t(), "output shares memory with input[0][0]"),
        (
            lambda layer, x: (layer(x), layer(x)),
            lambda layer, x: (layer(x),) * 2,
            "output[1] shares memory with output[0]",
        ),
        (
            lambda layer, x: (layer(x), layer(x)[1:, ::2].clone()),
            lambda layer, x: (out := layer(x), out[1:, ::2]),
            "output[1] shares memory with output[0]",
        ),
        (
            lambda layer, x: layer.bias * 1,
            lambda layer, x: layer.bias,
            "output shares memory with what the module keeps",
        ),
        (
            lambda layer, x: layer.weight[0] * 1,
            lambda layer, x: layer.weight.detach()[0],
            "output shares memory with what the module keeps",
        ),
        (
            lambda layer, x: x.sum(0).repeat(3, 1),
            lambda layer, x: x.sum(0).expand(3, 4),
            "output shares memory with itself",
        ),
    ],
)
def test_memory_that_an_output_shares(right, wrong, reason):
    assert f"{reason}, unlike that of the original" in judged(right, wrong).reason
    assert judged(wrong, right).grade is Grade.BIT_EXACT  # no view was promised
    lost = judged(wrong, right, strides=True).reason
    assert reason.replace("shares memory", "shares no memory") in lost or "expected the strides" in lost


def test_slices_of_one_tensor_share_no_memory():
    def split(layer: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        return layer(x).chunk(2, dim=1)

    def apart(layer: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.clone() for part in split(layer, x))

    assert judged(apart, split).grade is Grade.BIT_EXACT


def test_memory_that_is_kept_under_no_name_is_seen():
    constant = torch.ones(4, dtype=torch.float64)
    assert (
        "what the module keeps" in judged(lambda layer, x: constant.clone(), lambda layer, x: constant).reason
    )


def test_weights_are_not_written_by_a_call():
    def writes(layer: nn.Linear, x: Tensor) -> Tensor:
        layer.weight.copy_(layer.weight.clone())
        return layer(x)

    assert "it writes the parameter layer.weight, unlike the original" in judged(plain, writes).reason


def test_inputs_need_not_be_without_gaps_in_memory():
    def assumes(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x.as_strided(x.shape, (x.shape[1], 1)))

    def copies(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x.contiguous())

    assert "with other values, output is not NaN or infinite where" in judged(plain, assumes).reason
    assert judged(plain, copies).grade is Grade.BIT_EXACT
    sliced = torch.randn(4, 8)[:, ::2]
    reason = judged(lambda layer, x: layer(x.view(4, 4)), assumes, sliced).reason
    assert "in float64, output is not NaN or infinite where" in reason


def test_ids_are_other_ids():
    class Looks(nn.Module):
        def __init__(self, known: int) -> None:
            super().__init__()
            self.table = nn.Embedding.from_pretrained(
                torch.arange(20.0)[:, None] * (torch.arange(20) != known)[:, None]
            )

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids)

    ids = torch.tensor([[1, 2, 12]])
    assert "with other values" in Oracle(Looks(0), [ids]).judge(Looks(11)).reason


@pytest.mark.parametrize("mask", [torch.ones(4, 4), torch.ones(4, 4, dtype=torch.long), X == X])
def test_a_mask_that_hides_nothing_in_the_example_hides_something(mask):
    def masks(layer: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
        return layer(x).masked_fill(mask == 0, -1)

    assert (
        "with other values, output differs" in judged(masks, lambda layer, x, mask: layer(x), X, mask).reason
    )


class Two(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x - y


def test_inputs_stay_in_their_order_and_are_checked():
    inputs = {"x": X, "y": X + 1}
    traced = fxopt.trace(Two(), kwargs=inputs)
    oracle = Oracle(Two(), kwargs=inputs, captured=copy.deepcopy(traced))
    assert oracle.judge(traced).grade is Grade.BIT_EXACT
    swapped, unchecked = copy.deepcopy(traced), copy.deepcopy(traced)
    first, second = swapped.graph.find_nodes(op="placeholder")
    first.prepend(second)
    swapped.recompile()
    assert oracle.judge(swapped).reason == "its inputs are (y, x), those of the original (x, y)"
    (check,) = unchecked.graph.find_nodes(op="call_module", target="input_guard")
    unchecked.graph.erase_node(check)
    unchecked.recompile()
    assert "it does not check its inputs" in oracle.judge(unchecked).reason


class OtherLinear(nn.Linear):
    pass


OtherLinear.__qualname__ = "Linear"


def _relu(x: Tensor) -> Tensor:
    return x.relu()


def _another() -> Callable[[Tensor], Tensor]:
    def _relu(x: Tensor) -> Tensor:
        return x.sigmoid()

    _relu.__qualname__ = "_relu"
    return _relu


class Config:
    def __init__(self, size: int) -> None:
        self.size = size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.size == other.size

    __hash__ = None  # type: ignore[assignment]


def layers() -> GraphModule:
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4)))
    (output,) = traced.graph.find_nodes(op="output")
    with traced.graph.inserting_before(output):
        output.args = (traced.graph.call_function(_relu, output.args),)
    traced.recompile()
    layer = traced.get_submodule("0")
    layer.activation, layer.config = _relu, Config(4)
    return traced


def last(traced: GraphModule) -> Any:
    return next(iter(traced.graph.find_nodes(op="output"))).args[0]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda traced: setattr(traced.get_submodule("0"), "activation", _another()), "0.activation differs"),
        (lambda traced: setattr(traced.get_submodule("0"), "config", Config(5)), "0.config differs"),
        (lambda traced: setattr(traced.get_submodule("0"), "__class__", OtherLinear), "0.class differs"),
        (lambda traced: setattr(last(traced), "target", _another()), "targets: "),
        (lambda traced: last(traced).meta.update(fxopt_marks=("Pass()",)), "marks: "),
    ],
)
def test_a_round_trip_leaves_no_other_function_class_or_mark(change, problem):
    before = layers()
    after = copy.deepcopy(before)
    assert_round_trip(before, after)
    change(after)
    after.recompile()
    with pytest.raises(AssertionError, match=problem):
        assert_round_trip(before, after)


SOUND = {
    "ill-conditioned": (lambda w, x: torch.cos(6.28 * (x @ w)), lambda w, x: torch.cos(x @ (6.28 * w))),
    "causal": (
        lambda w, x: F.scaled_dot_product_attention(x @ w, x, x, is_causal=True),
        lambda w, x: (
            ((x @ w) @ x.mT / x.shape[-1] ** 0.5 + torch.full((6, 6), -math.inf).triu(1)).softmax(-1) @ x
        ),
    ),
    "block diagonal": (
        lambda w, x: torch.cat([x[..., :4] @ w[:4, :4], x[..., 4:] @ w[4:, 4:]], -1),
        lambda w, x: x @ torch.block_diag(w[:4, :4], w[4:, 4:]),
    ),
}


class Weighed(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.linspace(-1, 2, 64).reshape(8, 8).sin())

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.weight, x)


@pytest.mark.parametrize("functions", SOUND.values(), ids=SOUND.keys())
def test_other_ways_to_the_same_values_are_right(functions):
    one, other = map(Weighed, functions)
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
    for reference, candidate in ((one, other), (other, one)):
        assert Oracle(reference, [x]).judge(candidate).grade.passes


def test_a_wider_capture_is_no_deception():
    model = nn.Linear(4, 4)
    fixed = fxopt.trace(model, (X[:, :4],))
    free = fxopt.trace(model, (X[:, :4],), dynamic_shapes={"input": {0: torch.export.Dim.AUTO}})
    for wider in (free, torch.fx.symbolic_trace(model)):
        assert Oracle(fixed, [X[:, :4]]).judge(wider).grade.passes


class Both(nn.Module):
    def __init__(self, copies):
        super().__init__()
        self.copies = copies

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + 1
        return y, y.t().clone(memory_format=torch.preserve_format) if self.copies else y.t()


def test_views_that_become_tensors_are_wrong_but_for_other_values():
    oracle = Oracle(Both(False), [X], strides=True)
    assert "shares no memory" in oracle.judge(Both(True)).reason
    assert oracle.fault(oracle.observe(Both(True))) == ""


def test_an_output_stays_on_its_device():
    model, fixed = Does(plain), Does(lambda layer, x: layer(x).to("meta"))
    assert "output: expected it on cpu, got it on meta" in Oracle(model, [X]).judge(fixed).reason
    follows = Does(lambda layer, x: layer(x).to(x.device))
    assert Oracle(model, [X]).judge(follows).grade is Grade.BIT_EXACT
    with pytest.raises(AssertionError, match=r"buffer\.mean: expected it on cpu, got it on meta"):
        compare({"mean": X}, {"mean": X.to("meta")}, path="buffer")


@pytest.mark.parametrize("scale", [1.0, 1e5])
def test_what_may_give_other_values_may_not_overflow(scale):
    def in_float16(layer: nn.Linear, x: Tensor) -> Tensor:
        low = copy.deepcopy(layer).half()
        return (low(x.half() * scale) / scale).float()

    oracle = Oracle(Does(lambda layer, x: layer(x * scale) / scale), [X])
    fault = oracle.fault(oracle.observe(Does(in_float16)))
    assert fault == ("output is not finite where the original is" if scale > 1 else "")


def test_a_change_of_precision_that_overflows_nowhere_is_right():
    model = Does(lambda layer, x: layer(x).relu()).eval()
    traced = fxopt.trace(model, (X,))
    low = fxopt.ChangePrecision(dtype=torch.float16)(copy.deepcopy(traced))
    assert low.layer.weight.dtype == torch.float16
    oracle = Oracle(model, [X], captured=traced)
    assert oracle.fault(oracle.observe(low)) == ""


class Described(fxopt.ReversibleTransformation):
    """Says of each value that it is in float16, and forgets that when it is undone, or not."""

    def __init__(self, key: str, forgets: bool) -> None:
        self.key, self.forgets = key, forgets

    def transform(self, graph_module: GraphModule) -> GraphModule:
        for node in graph_module.graph.nodes:
            node.meta["was"] = node.meta.get(self.key)
            node.meta[self.key] = torch.empty(4, dtype=torch.float16, device="meta")
            self.mark_as_transformed(node)
        return graph_module

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        for node in self.get_transformed_nodes(graph_module):
            if self.forgets:
                node.meta[self.key] = node.meta.pop("was")
            self.mark_as_restored(node)
        return graph_module


@pytest.mark.parametrize("key", ["val", "example_value", "tensor_meta"])
def test_a_round_trip_gives_back_what_metadata_describes(key):
    before = fxopt.trace(nn.Linear(4, 4), (X,))
    for node in before.graph.nodes:
        node.meta[key] = torch.empty(2, device="meta")
    right, wrong = Described(key, True), Described(key, False)
    assert_round_trip(before, right(right(copy.deepcopy(before)), reverse=True))
    with pytest.raises(AssertionError, match=f"metadata: .*'{key}'.*float32.* became .*float16"):
        assert_round_trip(before, wrong(wrong(copy.deepcopy(before)), reverse=True))


@pytest.mark.parametrize(
    "pass_", [fxopt.ChangePrecision(), fxopt.MergeLinears(), fxopt.FuseBiasInLinear()], ids=repr
)
def test_undo_gives_back_what_metadata_describes(pass_):
    model = module(lambda m, x: m.left(x) * m.right(x), left=nn.Linear(4, 4), right=nn.Linear(4, 4))
    before = fxopt.trace(model, (X,))
    values = [str(node.meta["val"]) for node in before.graph.nodes]
    for back in (lambda gm: pass_(gm, reverse=True), fxopt.undo):
        after = back(pass_(copy.deepcopy(before)))
        assert [str(node.meta["val"]) for node in after.graph.nodes] == values
        assert_round_trip(before, after)


def test_writes_past_autograd_are_seen():
    def into_input(layer: nn.Linear, x: Tensor) -> Tensor:
        out = layer(x)
        x.data.add_(1)
        return out

    def into_weight(layer: nn.Linear, x: Tensor) -> Tensor:
        out = layer(x)
        layer.weight.data.mul_(1 + 1e-5)
        return out

    assert "it writes its inputs, unlike the original" in judged(plain, into_input).reason
    assert "it writes the parameter layer.weight, unlike the original" in judged(plain, into_weight).reason
    assert judged(plain, lambda layer, x: layer(x.data)).grade is Grade.BIT_EXACT


IDS = torch.tensor([5, 3, 4])
TABLE = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


def product(layer: nn.Module, table: Tensor, ids: Tensor) -> Tensor:
    return F.one_hot(ids, 6).to(table) @ table


def lookup(layer: nn.Module, table: Tensor, ids: Tensor) -> Tensor:
    return F.embedding(ids, table)


@pytest.mark.parametrize("ids", [IDS, torch.tensor([0, 1, 2]), torch.tensor([1, 5, 2])])
def test_a_lookup_loses_nan_that_a_product_with_one_hot_ids_spreads(ids):
    """Only where the table is an input, and so may hold NaN."""
    for right, wrong in ((product, lookup), (lookup, product)):
        assert (
            "in float64, with NaN and infinities, output is not NaN"
            in judged(right, wrong, TABLE, ids).reason
        )


@pytest.mark.parametrize(
    ("ids", "wrong"),
    [
        ([0, 4], lambda layer, table, ids: lookup(layer, table, ids).nan_to_num(0, math.inf, -math.inf)),
        ([1, 2], lambda layer, table, ids: lookup(layer, table, ids).nan_to_num(math.nan, 1e30, -1e30)),
        ([0, 4], lambda layer, table, ids: product(layer, table, ids).nan_to_num(0, math.inf, -math.inf)),
        ([3, 4], lambda layer, table, ids: lookup(layer, table, ids) * table.isfinite().all()),
    ],
)
def test_numbers_in_the_place_of_nan_are_those_of_ordinary_inputs(ids, wrong):
    verdict = judged(product, wrong, TABLE, torch.tensor(ids))
    assert verdict.grade is Grade.WRONG
    assert "with NaN and infinities" in verdict.reason


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (lambda layer, x: x.clamp(0, 1).amax(), lambda layer, x: x.nan_to_num().clamp(0, 1).amax()),
        (lambda layer, x: x.relu().amin(), lambda layer, x: torch.fmax(x, x.new_zeros(())).amin()),
        (lambda layer, x: (9 * x * x + 99).sigmoid(), lambda layer, x: torch.ones_like(x)),
        (lambda layer, x: x / x, lambda layer, x: torch.ones_like(x)),  # but for 0
    ],
)
def test_nan_that_is_lost_is_seen(right, wrong):
    verdict = judged(right, wrong, torch.randn(6, 64, generator=torch.Generator().manual_seed(0)))
    assert verdict.grade is Grade.WRONG
    assert "with NaN and infinities, output is not NaN" in verdict.reason


def test_a_reference_that_raises_with_an_infinity_alone_is_asked_for_nothing_more():
    def strict(layer: nn.Module, table: Tensor, ids: Tensor) -> Tensor:
        if table.isinf().any():
            raise ValueError("infinite")
        return product(layer, table, ids)

    assert "with NaN and infinities" in judged(strict, lookup, TABLE, IDS).reason
