"""Modules and undos that are right on what an example happens to be: inputs that are all zeros, or all alike, or the same tensor."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Tracer, symbolic_trace
from torch.utils._python_dispatch import TorchDispatchMode

import fxopt
from fxopt.memory import storage_of
from fxopt.objects import tensors_in
from fxopt.testing import Grade, Oracle, assert_round_trip
from fxopt.testing.observations import Call, observe
from fxopt.testing.probes import _unlike
from tests.test_deceptions import Does, X, judged, plain

ZEROS = torch.zeros(4, 4)
TABLE = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def look_up(layer: nn.Module, x: Tensor, ids: Tensor) -> Tensor:
    return layer(x) + F.embedding(ids, TABLE.to(x))


ALIKE: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "a mask that hides nothing, True where it hides": (
        lambda layer, x, mask: layer(x).masked_fill(mask, 0),
        lambda layer, x, mask: layer(x),
        (X, ZEROS.bool()),
    ),
    "a mask to add": (
        lambda layer, x, mask: (layer(x) + mask).softmax(-1),
        lambda layer, x, mask: layer(x).softmax(-1),
        (X, ZEROS),
    ),
    "a first state": (lambda layer, x, h: (layer(x) + h).tanh(), lambda layer, x, h: layer(x).tanh(), (X, ZEROS[0])),
    "all inputs are zeros": (plain, lambda layer, x: layer.bias.expand_as(x) * 1, (ZEROS,)),
    "a temperature of 1": (
        lambda layer, x, t: layer(x) / t,
        lambda layer, x, t: layer(x) * 1,
        (X, torch.tensor(1.0)),
    ),
    "a flag": (
        lambda layer, x, flag: torch.where(flag, layer(x), x),
        lambda layer, x, flag: layer(x) * 1,
        (X, torch.tensor(True)),
    ),
    "types of tokens": (look_up, lambda layer, x, ids: layer(x) + TABLE[0].to(x), (X, ZEROS[0].long())),
    "a time": (look_up, lambda layer, x, ids: layer(x) + TABLE[7].to(x), (X, torch.tensor(7))),
    "a time for each row": (look_up, lambda layer, x, ids: layer(x) + TABLE[5].to(x), (X, torch.full((4,), 5))),
    "ids above those of the example": (
        look_up,
        lambda layer, x, ids: look_up(layer, x, ids.clamp(max=5)),
        (X, torch.tensor([1, 5, 0, 2])),
    ),
    "numbers below zero": (
        lambda layer, x: torch.remainder(x, 3),
        lambda layer, x: torch.fmod(x, 3),
        (X.abs(),),
    ),
    "integers below zero": (
        lambda layer, ids: torch.div(ids, 3, rounding_mode="trunc"),
        lambda layer, ids: torch.div(ids, 3, rounding_mode="floor"),
        (torch.arange(8),),
    ),
    "a row of zeros": (
        lambda layer, x: F.layer_norm(x, (4,), eps=1e-12),
        lambda layer, x: F.layer_norm(x, (4,), eps=0),
        (X,),
    ),
    "one of two that are largest": (
        lambda layer, x: x.argmax(-1),
        lambda layer, x: x.shape[-1] - 1 - x.flip(-1).argmax(-1),
        (X,),
    ),
    "inputs with the same numbers": (
        lambda layer, x, y: layer(x) - 2 * layer(y),
        lambda layer, x, y: layer(y) - 2 * layer(x),
        (X, X.clone()),
    ),
    "inputs of ones": (
        lambda layer, x, y: layer(x) - 2 * layer(y),
        lambda layer, x, y: layer(y) - 2 * layer(x),
        (ZEROS + 1, ZEROS + 1),
    ),
    "one tensor that is two inputs": (
        lambda layer, x, y: layer(x) - 2 * layer(y),
        lambda layer, x, y: layer(y) - 2 * layer(x),
        (X, X),
    ),
    "where a tensor begins in memory": (
        lambda layer, x: x * 2,
        lambda layer, x: x.as_strided(x.shape, x.stride(), 0) * 2,
        (torch.randn(6, 4)[2:],),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ALIKE)
def test_what_is_alike_in_the_example_is_not_in_other_calls(name: str) -> None:
    right, wrong, inputs = ALIKE[name]
    verdict = judged(right, wrong, *inputs)
    assert verdict.grade is Grade.WRONG
    assert "differs by" in verdict.reason or "NaN or infinite where" in verdict.reason


def test_a_table_of_one_row_is_asked_for_no_other() -> None:
    def look(layer: nn.Module, x: Tensor, ids: Tensor) -> Tensor:
        return layer(x) + F.embedding(ids, TABLE[:1].to(x))

    oracle = Oracle(Does(look), [X, ZEROS[0].long()])
    assert oracle.judge(Does(look)).grade is Grade.BIT_EXACT
    assert "other values" in oracle.probes


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


def test_an_input_of_zeros_costs_no_object_for_each_of_them() -> None:
    started = time.perf_counter()
    assert _unlike(torch.zeros(10_000_000)).unique().numel() > 1000
    assert time.perf_counter() - started < 5


def test_weights_are_watched_without_copies_of_them() -> None:
    model, large = nn.Linear(300, 300), list[str]()

    class Watches(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            made = func(*args, **kwargs or {})
            for each in tensors_in(made):
                if each.numel() >= 300 * 300 and storage_of(each) != storage_of(model.weight):
                    large.append(str(func))
            return made

    with Watches():
        observe(model, [Call((torch.ones(1, 300),), {})])
    assert large == []


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


def test_the_layout_of_an_output_is_that_of_the_original() -> None:
    verdict = judged(plain, lambda layer, x: layer(x).to_sparse(), X)
    assert "output: expected the layout torch.strided, got the layout torch.sparse_coo" in verdict.reason


def test_numbers_that_torch_does_not_compute_with_are_inputs_as_they_are() -> None:
    ids = torch.tensor([3, 1, 2, 0], dtype=torch.uint16)
    verdict = judged(lambda layer, x, i: layer(x) + i.to(x.dtype), lambda layer, x, i: layer(x), X, ids)
    assert verdict.grade is Grade.WRONG


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def _hook(number: int | Function, module: nn.Module, *args: Any) -> None:
    pass


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.inner = nn.Linear(4, 4, bias=False), symbolic_trace(Inner())
        self.layer.register_forward_hook(functools.partial(_hook, 1))
        self.layer.register_forward_pre_hook(functools.partial(_hook, Function(X)))
        self.register_buffer("whole", torch.ones(8))
        self.register_buffer("part", self.whole[:4])

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.layer(x)) + self.part + (x.sum() * self.whole).sum()


class Leaves(Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, GraphModule) or super().is_leaf_module(m, module_qualified_name)


def _other_call(gm: GraphModule) -> None:
    inner = gm.get_submodule("inner")
    assert isinstance(inner, GraphModule)
    (call,) = [node for node in inner.graph.nodes if node.op == "call_function"]
    call.args = (call.args[0], 2)
    inner.recompile()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_other_call, "inner: nodes: "),
        (lambda gm: next(iter(gm.inner.graph.nodes)).meta.update(fxopt_marks=("P",)), "inner: marks: "),
        (lambda gm: gm.layer.register_buffer("left", None), "layer._buffers.left differs"),
        (lambda gm: gm.register_module("left", None), "_modules.left differs"),
        (
            lambda gm: gm.layer._forward_hooks.update(
                dict.fromkeys(gm.layer._forward_hooks, functools.partial(_hook, 2))
            ),
            "layer._forward_hooks.* differs",
        ),
    ],
)
def test_a_round_trip_gives_back_what_hardly_shows(change: Callable[[Any], object], problem: str) -> None:
    model = Outer()
    before = GraphModule(model, Leaves().trace(model))
    after = copy.deepcopy(before)
    assert_round_trip(before, after)
    change(after)
    with pytest.raises(AssertionError, match=problem):
        assert_round_trip(before, after)


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x + 2)


def test_a_layer_with_one_new_weight_has_other_gradients():
    """The bias of the rewritten layer holds `2 * weight`, of which the weight gets no gradient."""
    model, x = Shifted().double().eval(), torch.randn(3, 4, dtype=torch.float64)
    folded = fxopt.FoldScaleAndShift()(fxopt.trace(model, (x,)))
    assert len(folded.graph.find_nodes(op="call_module", target="layer")) == 1
    assert Oracle(model, (x,), float64=model, gradients=True).judge(folded, folded).grade.passes


def test_a_weight_that_was_folded_and_stays_for_others_has_no_gradient():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double().eval()
    model.again = nn.Sequential(model[1])
    model.forward = lambda x: model[1](model[0](x))
    x = torch.randn(3, 4, dtype=torch.float64)
    folded = fxopt.FoldBatchNorms()(fxopt.trace(model, (x,)))
    assert Oracle(model, (x,), float64=model, gradients=True).judge(folded, folded).grade.passes
