"""Modules that are right on the example, and on tame values of other sizes: the oracle sees what else is wrong with them."""

from __future__ import annotations

import collections
import copy
import dataclasses
import math
import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxopt
from fxopt.testing import Grade, Oracle, Verdict, randomise
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


def attends(layer: nn.Module, x: Tensor) -> Tensor:
    return (x @ x.transpose(-1, -2) / 2).softmax(-1) @ x


def assumes(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x.as_strided(x.shape, (x.shape[1], 1)))


def look_up(layer: nn.Module, x: Tensor, ids: Tensor) -> Tensor:
    return layer(x) + F.embedding(ids, TABLE.to(x))


def product(layer: nn.Module, table: Tensor, ids: Tensor) -> Tensor:
    return F.one_hot(ids, 8).to(table) @ table


def lookup(layer: nn.Module, table: Tensor, ids: Tensor) -> Tensor:
    return F.embedding(ids, table)


def first_less_second(layer: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return layer(x) - 2 * layer(y)


def second_less_first(layer: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return layer(y) - 2 * layer(x)


def writes_its_input(layer: nn.Module, x: Tensor) -> Tensor:
    out = layer(x)
    x.data.add_(1)
    return out


def writes_its_weight(layer: nn.Linear, x: Tensor) -> Tensor:
    out = layer(x)
    layer.weight.data.mul_(1 + 1e-5)
    return out


def rewrites_its_weight(layer: nn.Linear, x: Tensor) -> Tensor:
    layer.weight.copy_(layer.weight.clone())
    return layer(x)


ZEROS = torch.zeros(4, 4)
TABLE = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(4, 2, 5, 4, generator=torch.Generator().manual_seed(0))
MANY = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
OTHER = "with other values, output differs"
NAN = "with NaN and infinities, output is not NaN or infinite where the original is"
ANY = "differs by|NaN or infinite where"

DECEPTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Tensor, ...], str]] = {
    "a clamp beyond the values": (plain, lambda layer, x: layer(x).clamp(-1e3, 1e3), (X,), OTHER),
    "a clamp beyond the values that is lost": (lambda layer, x: layer(x).clamp(-1e3, 1e3), plain, (X,), OTHER),
    "a clamp at the limits of float16": (plain, lambda layer, x: layer(x).clamp(-65504, 65504), (X,), OTHER),
    "a clamp beyond what pixels give": (plain, lambda layer, x: layer(x).clamp(-1e3, 1e3), (X.sigmoid(),), OTHER),
    "NaN becomes zero": (plain, lambda layer, x: layer(x).nan_to_num(0, math.inf, -math.inf), (X,), NAN),
    "infinities become numbers": (plain, lambda layer, x: layer(x).nan_to_num(math.nan, 1e30, -1e30), (X,), NAN),
    "NaN becomes infinite": (
        plain,
        lambda layer, x: torch.where(layer(x) == layer(x), layer(x), math.inf),
        (X,),
        NAN,
    ),
    "NaN of one row reaches the others": (plain, lambda layer, x: layer(x) + 0 * x.sum(), (X,), NAN),
    "NaN becomes zero in attention": (
        attends,
        lambda layer, x: attends(layer, x).nan_to_num(),
        (IMAGES,),
        "with NaN",
    ),
    "NaN is clamped": (
        lambda layer, x: x.clamp(0, 1).amax(),
        lambda layer, x: x.nan_to_num().clamp(0, 1).amax(),
        (MANY,),
        NAN,
    ),
    "NaN is less than zero": (
        lambda layer, x: x.relu().amin(),
        lambda layer, x: torch.fmax(x, x.new_zeros(())).amin(),
        (MANY,),
        NAN,
    ),
    "only NaN changes the output": (
        lambda layer, x: (9 * x * x + 99).sigmoid(),
        lambda layer, x: torch.ones_like(x),
        (MANY,),
        NAN,
    ),
    "zero by zero": (lambda layer, x: x / x, lambda layer, x: torch.ones_like(x), (MANY,), NAN),
    # Only where the table is an input may it hold NaN.
    "a lookup loses NaN": (product, lookup, (TABLE, torch.tensor([5, 3, 4])), NAN),
    "a product with one-hot ids spreads NaN": (lookup, product, (TABLE, torch.tensor([1, 5, 2])), NAN),
    "a lookup of NaN gives zero": (
        product,
        lambda layer, table, ids: lookup(layer, table, ids).nan_to_num(0, math.inf, -math.inf),
        (TABLE, torch.tensor([0, 4])),
        "with NaN and infinities",
    ),
    "a lookup of infinity gives a number": (
        product,
        lambda layer, table, ids: lookup(layer, table, ids).nan_to_num(math.nan, 1e30, -1e30),
        (TABLE, torch.tensor([1, 2])),
        "with NaN and infinities",
    ),
    "a product with NaN gives zero": (
        product,
        lambda layer, table, ids: product(layer, table, ids).nan_to_num(0, math.inf, -math.inf),
        (TABLE, torch.tensor([0, 4])),
        "with NaN and infinities",
    ),
    "a lookup is zero beside NaN": (
        product,
        lambda layer, table, ids: lookup(layer, table, ids) * table.isfinite().all(),
        (TABLE, torch.tensor([3, 4])),
        "with NaN and infinities",
    ),
    "a weight is written": (plain, rewrites_its_weight, (X,), "it writes the parameter layer.weight, unlike the"),
    "a weight is written past autograd": (plain, writes_its_weight, (X,), "it writes the parameter layer.weight"),
    "an input is written past autograd": (plain, writes_its_input, (X,), "it writes its inputs, unlike the original"),
    "rows without gaps": (plain, assumes, (X,), "with other values, output is not NaN or infinite where"),
    "rows without gaps, of an example with gaps": (
        lambda layer, x: layer(x.view(4, 4)),
        assumes,
        (torch.randn(4, 8)[:, ::2],),
        "in float64, output is not NaN or infinite where",
    ),
    "a sparse output": (
        plain,
        lambda layer, x: layer(x).to_sparse(),
        (X,),
        "output: expected the layout torch.strided, got the layout torch.sparse_coo",
    ),
    "an output on another device": (
        plain,
        lambda layer, x: layer(x).to("meta"),
        (X,),
        "output: expected it on cpu, got it on meta",
    ),
    "an input in which torch does not compute": (
        lambda layer, x, i: layer(x) + i.to(x.dtype),
        lambda layer, x, i: layer(x),
        (X, torch.tensor([3, 1, 2, 0], dtype=torch.uint16)),
        ANY,
    ),
    "ids within the example": (
        lookup,
        lambda layer, table, ids: lookup(layer, table, ids.masked_fill(ids == 5, 0)),
        (TABLE, torch.tensor([1, 2, 6])),
        ANY,
    ),
    "a mask of ones hides nothing": (
        lambda layer, x, mask: layer(x).masked_fill(mask == 0, -1),
        lambda layer, x, mask: layer(x),
        (X, torch.ones(4, 4)),
        OTHER,
    ),
    "a mask of integers hides nothing": (
        lambda layer, x, mask: layer(x).masked_fill(mask == 0, -1),
        lambda layer, x, mask: layer(x),
        (X, torch.ones(4, 4, dtype=torch.long)),
        OTHER,
    ),
    "a mask of booleans hides nothing": (
        lambda layer, x, mask: layer(x).masked_fill(mask == 0, -1),
        lambda layer, x, mask: layer(x),
        (X, X == X),
        OTHER,
    ),
    "a mask that hides nothing, True where it hides": (
        lambda layer, x, mask: layer(x).masked_fill(mask, 0),
        lambda layer, x, mask: layer(x),
        (X, ZEROS.bool()),
        ANY,
    ),
    "a mask to add": (
        lambda layer, x, mask: (layer(x) + mask).softmax(-1),
        lambda layer, x, mask: layer(x).softmax(-1),
        (X, ZEROS),
        ANY,
    ),
    "a first state": (
        lambda layer, x, h: (layer(x) + h).tanh(),
        lambda layer, x, h: layer(x).tanh(),
        (X, ZEROS[0]),
        ANY,
    ),
    "all inputs are zeros": (plain, lambda layer, x: layer.bias.expand_as(x) * 1, (ZEROS,), ANY),
    "a temperature of 1": (
        lambda layer, x, t: layer(x) / t,
        lambda layer, x, t: layer(x) * 1,
        (X, torch.tensor(1.0)),
        ANY,
    ),
    "a flag": (
        lambda layer, x, flag: torch.where(flag, layer(x), x),
        lambda layer, x, flag: layer(x) * 1,
        (X, torch.tensor(True)),
        ANY,
    ),
    "types of tokens": (look_up, lambda layer, x, ids: layer(x) + TABLE[0].to(x), (X, ZEROS[0].long()), ANY),
    "a time": (look_up, lambda layer, x, ids: layer(x) + TABLE[7].to(x), (X, torch.tensor(7)), ANY),
    "a time for each row": (look_up, lambda layer, x, ids: layer(x) + TABLE[5].to(x), (X, torch.full((4,), 5)), ANY),
    "ids above those of the example": (
        look_up,
        lambda layer, x, ids: look_up(layer, x, ids.clamp(max=5)),
        (X, torch.tensor([1, 5, 0, 2])),
        ANY,
    ),
    "numbers below zero": (
        lambda layer, x: torch.remainder(x, 3),
        lambda layer, x: torch.fmod(x, 3),
        (X.abs(),),
        ANY,
    ),
    "integers below zero": (
        lambda layer, ids: torch.div(ids, 3, rounding_mode="trunc"),
        lambda layer, ids: torch.div(ids, 3, rounding_mode="floor"),
        (torch.arange(8),),
        ANY,
    ),
    "a row of zeros": (
        lambda layer, x: F.layer_norm(x, (4,), eps=1e-12),
        lambda layer, x: F.layer_norm(x, (4,), eps=0),
        (X,),
        ANY,
    ),
    "one of two that are largest": (
        lambda layer, x: x.argmax(-1),
        lambda layer, x: x.shape[-1] - 1 - x.flip(-1).argmax(-1),
        (X,),
        ANY,
    ),
    "inputs with the same numbers": (
        first_less_second,
        second_less_first,
        (X, X.clone()),
        ANY,
    ),
    "inputs of ones": (
        first_less_second,
        second_less_first,
        (ZEROS + 1, ZEROS + 1),
        ANY,
    ),
    "one tensor that is two inputs": (
        first_less_second,
        second_less_first,
        (X, X),
        ANY,
    ),
    "where a tensor begins in memory": (
        lambda layer, x: x * 2,
        lambda layer, x: x.as_strided(x.shape, x.stride(), 0) * 2,
        (torch.randn(6, 4)[2:],),
        ANY,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DECEPTIONS)
def test_a_deception_is_seen(name: str) -> None:
    right, wrong, inputs, reason = DECEPTIONS[name]
    verdict = judged(right, wrong, *inputs)
    assert verdict.grade is Grade.WRONG
    assert re.search(reason, verdict.reason)


SOUND: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Tensor, ...]]] = {
    "NaN reaches fewer places in a kernel": (
        attends,
        lambda layer, x: F.scaled_dot_product_attention(x, x, x),
        (IMAGES,),
    ),
    "values at which rounding decides": (
        lambda layer, x: (layer(x) * 1e9).sin(),
        lambda layer, x: (x @ layer.weight.T + layer.bias).mul(1e9).sin(),
        (X / 1e6,),
    ),
    "ill-conditioned": (
        lambda layer, x: torch.cos(6.28 * (x @ layer.weight)),
        lambda layer, x: torch.cos(x @ (6.28 * layer.weight)),
        (IMAGES,),
    ),
    "causal": (
        lambda layer, x: F.scaled_dot_product_attention(x @ layer.weight, x, x, is_causal=True),
        lambda layer, x: (
            (x @ layer.weight @ x.mT / 2 + torch.full((5, 5), -math.inf).triu(1)).softmax(-1) @ x
        ),
        (IMAGES,),
    ),
    "block diagonal": (
        lambda layer, x: torch.cat(
            [x[..., :2] @ layer.weight[:2, :2], x[..., 2:] @ layer.weight[2:, 2:]], -1
        ),
        lambda layer, x: x @ torch.block_diag(layer.weight[:2, :2], layer.weight[2:, 2:]),
        (IMAGES,),
    ),
    "a copy without gaps": (plain, lambda layer, x: layer(x.contiguous()), (X,)),
    "a read past autograd": (plain, lambda layer, x: layer(x.data), (X,)),
    "the device of an input": (plain, lambda layer, x: layer(x).to(x.device), (X,)),
    "slices of one tensor share no memory": (
        lambda layer, x: [part.clone() for part in layer(x).chunk(2, dim=1)],
        lambda layer, x: [*layer(x).chunk(2, dim=1)],
        (X,),
    ),
}


@pytest.mark.parametrize("name", SOUND)
def test_other_ways_to_the_same_values_are_right(name: str) -> None:
    one, other, inputs = SOUND[name]
    assert judged(one, other, *inputs).grade.passes
    assert judged(other, one, *inputs).grade.passes


def test_nan_is_asked_of_models_that_answer_alone():
    def refuses(layer: nn.Module, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise ValueError("no numbers")
        return x + 1

    def masks(layer: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
        assert ((mask == 0) | (mask == 1)).all()
        return x.masked_fill(mask == 0, 0)

    assert Oracle(Does(refuses), [X]).probes == ("the given inputs", "other values")
    assert "NaN and infinities" in Oracle(Does(masks), [X, (X > 0).float()]).probes
    looks = Does(lambda layer, ids: F.embedding(ids, TABLE))
    assert Oracle(looks, [torch.arange(8)]).probes == ("the given inputs", "other values")


@pytest.mark.parametrize("tied", [False, True])
def test_free_sizes_that_are_equal_in_the_example_are_told_apart(tied):
    model = module(lambda m, x: (x.sum(0) / x.shape[0]).sum(0) + (x.sum(1) / x.shape[1]).sum(0) * 2)
    inputs = [torch.randn(4, 4, 3)]
    free = {"x": {0: torch.export.Dim("a"), 1: torch.export.Dim("b")}}
    traced = fxopt.trace(model, inputs, dynamic_shapes=free)
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
    flat = module(lambda m, x: x.sum(1, keepdim=True).squeeze(1) * 2)
    free = {"x": {0: torch.export.Dim("batch")}}
    traced = fxopt.trace(flat, (X,), dynamic_shapes=free)
    oracle = Oracle(flat, [X], captured=copy.deepcopy(traced))
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


def test_inputs_stay_in_their_order():
    inputs, two = {"x": X, "y": X + 1}, module(lambda m, x, y: x - y)
    traced = fxopt.trace(two, kwargs=inputs)
    oracle = Oracle(two, kwargs=inputs, captured=copy.deepcopy(traced))
    assert oracle.judge(traced).grade is Grade.BIT_EXACT
    first, second = traced.graph.find_nodes(op="placeholder")
    first.prepend(second)
    traced.recompile()
    assert oracle.judge(traced).reason == "its inputs are (y, x), those of the original (x, y)"


def test_a_wider_capture_is_no_deception():
    model = nn.Linear(4, 4)
    fixed = fxopt.trace(model, (X[:, :4],))
    free = fxopt.trace(model, (X[:, :4],), dynamic_shapes={"input": {0: torch.export.Dim.AUTO}})
    for wider in (free, torch.fx.symbolic_trace(model)):
        assert Oracle(fixed, [X[:, :4]]).judge(wider).grade.passes


def test_views_that_become_tensors_are_wrong_but_for_other_values():
    views = Does(lambda layer, x: (y := x + 1, y.t()))
    copies = Does(lambda layer, x: (y := x + 1, y.t().clone(memory_format=torch.preserve_format)))
    oracle = Oracle(views, [X], strides=True)
    assert "shares no memory" in oracle.judge(copies).reason
    assert oracle.fault(oracle.observe(copies)) == ""


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


def test_a_reference_that_raises_with_an_infinity_alone_is_asked_for_nothing_more():
    def strict(layer: nn.Module, table: Tensor, ids: Tensor) -> Tensor:
        if table.isinf().any():
            raise ValueError("infinite")
        return product(layer, table, ids)

    assert "with NaN and infinities" in judged(strict, lookup, TABLE, torch.tensor([5, 3, 4])).reason


def test_a_table_of_one_row_is_asked_for_no_other() -> None:
    def look(layer: nn.Module, x: Tensor, ids: Tensor) -> Tensor:
        return layer(x) + F.embedding(ids, TABLE[:1].to(x))

    oracle = Oracle(Does(look), [X, ZEROS[0].long()])
    assert oracle.judge(Does(look)).grade is Grade.BIT_EXACT
    assert "other values" in oracle.probes


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (lambda layer, x: F.linear(x, layer.weight.detach(), layer.bias), "weight"),
        (lambda layer, x: F.linear(x, layer.weight, layer.bias.detach()), "bias"),
        (lambda layer, x: F.linear(x, 2 * layer.weight - layer.weight.detach(), layer.bias), "weight"),
    ],
)
def test_the_gradients_of_weights_are_compared_in_training(wrong: Callable[..., Tensor], name: str) -> None:
    reason = judged(plain, wrong, X, gradients=True).reason
    assert f"the gradient of the parameter layer.{name} is" in reason
    assert judged(plain, lambda layer, x: F.linear(x, *layer.parameters()), X, gradients=True).grade.passes


def test_the_gradient_of_a_table_may_be_sparse() -> None:
    tables = [
        nn.Embedding.from_pretrained(TABLE, freeze=False, sparse=sparse).train() for sparse in (True, False)
    ]
    oracle = Oracle(tables[0], [torch.tensor([1, 2])])
    assert all(oracle.judge(table).grade is Grade.BIT_EXACT for table in tables)


@dataclasses.dataclass(slots=True)
class Slots:
    states: Tensor


class Function:
    def __init__(self, states: Tensor) -> None:
        self.states = states

    def __call__(self) -> Tensor:
        return self.states


@pytest.mark.parametrize(
    "make",
    [
        Slots,
        Function,
        lambda x: collections.deque([x]),
        lambda x: x.to_sparse(),
        lambda x: x.to_sparse_csr(),
        lambda x: (x, x.to(torch.float8_e4m3fn)),
        lambda x: (x, x.to("meta")),
    ],
)
def test_outputs_of_every_kind_are_compared(make: Callable[[Tensor], Any]) -> None:
    wrong = judged(lambda layer, x: make(layer(x)), lambda layer, x: make(layer(x) + 1e-6), X)
    assert "differs by" in wrong.reason


def test_a_layer_with_one_new_weight_has_other_gradients():
    """The bias of the rewritten layer holds `2 * weight`, of which the weight gets no gradient."""
    model = module(lambda m, x: m.layer(x + 2), layer=nn.Linear(4, 4)).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    folded = fxopt.FoldScaleAndShift()(fxopt.trace(model, (x,)))
    assert len(folded.graph.find_nodes(op="call_module", target="layer")) == 1
    assert Oracle(model, (x,), float64=model, gradients=True).judge(folded, folded).grade.passes


class Remembers(Does):
    """Remembers results by what tensors are, not by what is in them."""

    def __init__(self, key: Callable[[Tensor], int]) -> None:
        super().__init__(plain)
        self.key, self.seen = key, dict[int, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        return self.seen.setdefault(self.key(x), self.layer(x)).clone()


@pytest.mark.parametrize("key", [id, Tensor.data_ptr])
def test_a_tensor_that_is_written_between_calls_is_another_input(key: Callable[[Tensor], int]) -> None:
    oracle = Oracle(Does(lambda layer, x: layer(x).clone()), [X])
    verdict = oracle.judge(Remembers(key))
    assert verdict.grade is Grade.WRONG
    assert "output is not NaN or infinite where the original is" in verdict.reason
