"""FuseAttention: attention that is written out becomes one call, and nothing else does."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from transformers import (
    BertConfig,
    BertModel,
    BloomConfig,
    BloomModel,
    SwinConfig,
    SwinModel,
    T5Config,
    T5EncoderModel,
)

import fxopt
from fxopt import FuseAttention
from fxopt.graph_index import GraphIndex
from fxopt.testing import assert_round_trip, randomise
from tests.before_after import fx_trace, fxopt_trace, refused, rewritten
from tests.modules import module

X = torch.randn(2, 5, 8)
PADDING = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])[:, None, None]
"""True at the keys that take part: (batch, 1, 1, keys)."""

BIAS = torch.randn(2, 1, 5, 5)
MIN = torch.finfo(torch.float32).min


class Attends(nn.Module):
    """A function of queries, keys and values with two heads, and of further inputs."""

    def __init__(self, function, flat=False):
        super().__init__()
        self.function, self.flat = function, flat
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.softmax, self.dropout = nn.Softmax(dim=-1), nn.Dropout(0.3)
        self.bias = nn.Parameter(torch.ones(2, 5, 5))
        self.register_buffer("hidden", torch.full((5, 5), -math.inf).triu(1))

    def forward(self, x, *others):
        layers = (self.query, self.key, self.value)
        q, k, v = (layer(x).view(2, 5, 2, 4).transpose(1, 2) for layer in layers)
        if self.flat:
            q, k, v = (each.reshape(4, 5, 4) for each in (q, k, v))
        return self.function(self, q, k, v, *others)


def scores(q, k):
    return q @ k.transpose(-1, -2)


def written(x):
    """Each is a view of `x` where that is contiguous."""
    x.reshape(2, -1).add_(1)
    x.flatten(1).mul_(3)
    x.contiguous().add_(2)
    return x.sum(-1)


def calls(graph_module):
    return graph_module.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)


SPELLINGS = {
    "operators": lambda m, q, k, v: (q @ k.transpose(-1, -2) / 2).softmax(-1) @ v,
    "no scale": lambda m, q, k, v: torch.matmul(torch.softmax(torch.matmul(q, k.mT), dim=-1), v),
    "a root": lambda m, q, k, v: F.softmax(scores(q, k) / math.sqrt(4), dim=-1).matmul(v),
    "scaled queries": lambda m, q, k, v: ((q * 0.3) @ k.transpose(-2, -1)).softmax(3) @ v,
    "divided queries": lambda m, q, k, v: ((q / 3) @ k.transpose(-2, -1)).softmax(3) @ v,
    "scaled twice": lambda m, q, k, v: (0.3 * scores(q * 0.7, k).div_(3)).softmax(-1) @ v,
    "a negative scale": lambda m, q, k, v: (-0.3 * scores(q, k)).softmax(-1) @ v,
    "modules": lambda m, q, k, v: m.dropout(m.softmax(scores(q, k) * 0.5)) @ v,
    "permuted keys": lambda m, q, k, v: (q @ k.permute(0, 1, 3, 2)).softmax(-1) @ v,
    "other permuted keys": lambda m, q, k, v: (q @ k.transpose(1, 2).permute(0, 2, 3, 1)).softmax(-1) @ v,
    "other strides": lambda m, q, k, v: (
        scores(q[:, :, :1].expand(2, 2, 5, 4), k[:, :, ::2].repeat_interleave(2, 2)[:, :, :5]).softmax(-1)
        @ v[:, :1].expand(2, 2, 5, 4)
    ),
    "dropout without effect": lambda m, q, k, v: (
        F.dropout(F.dropout(scores(q, k).softmax(-1), 0.3, training=False), 0.0, True) @ v
    ),
    "casts without effect": lambda m, q, k, v: (
        F.softmax(scores(q, k), dim=-1, dtype=q.dtype).to(q.dtype).type(v.dtype) @ v
    ),
    "einsum": lambda m, q, k, v: torch.einsum(
        "bhij,bhjd->bhid", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v
    ),
    "einsum with dots": lambda m, q, k, v: torch.einsum(
        "...ij, ...jd -> ...id", torch.einsum("...id, ...dj -> ...ij", [q, k.mT]).softmax(-1), v
    ),
    "a bias": lambda m, q, k, v: (scores(q, k) * 0.5 + m.bias).softmax(-1) @ v,
    "two biases": lambda m, q, k, v: (m.bias[1] + (scores(q, k) * 0.5 + m.bias[:1])).softmax(-1) @ v,
    "a bias for all rows": lambda m, q, k, v: (scores(q, k) + m.bias[0, 0]).softmax(-1) @ v,
    "a bias in place": lambda m, q, k, v: scores(q, k).add_(m.bias).softmax(-1) @ v,
    "views that are used as they are": lambda m, q, k, v: (
        (scores(q, k).softmax(-1) @ v).view(2, 2, 20).flatten(0, 1)
    ),
    "strides that pass on": lambda m, q, k, v: ((scores(q, k).softmax(-1) @ v) * 2).view(2, 40),
    "an output that has its strides": lambda m, q, k, v: (scores(q, k).softmax(-1) @ v).relu() + q,
    "followed by another": lambda m, q, k, v: (
        ((scores((scores(q, k).softmax(-1) @ v) * 0.4, k) * 0.4).softmax(-1) @ v).transpose(1, 2) + 1
    ),
}


def test_writes_into_what_was_a_view_are_seen():
    model = Attends(lambda m, q, k, v: written((scores(q, k).softmax(-1) @ v) * 2))
    rewritten(FuseAttention(), model, X, sites=1, trace=fxopt_trace)


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name):
    sites = 2 if name == "followed by another" else 1
    after = rewritten(FuseAttention(), Attends(SPELLINGS[name]), X, sites=sites, trace=fxopt_trace)
    assert not [node for node in after.graph.nodes if "softmax" in node.name or node.name == "matmul"]
    assert all(GraphIndex(after).memory.is_pure(call) for call in calls(after))
    kept = ("input_guard", "output", "x")
    assert not [node for node in after.graph.nodes if not node.users and node.name not in kept]


FLAT = {
    "bmm": lambda m, q, k, v: torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v),
    "scaled": lambda m, q, k, v: (torch.bmm(q * 0.5, k.transpose(1, 2)) / 3).softmax(2).bmm(v),
    "baddbmm": lambda m, q, k, v: torch.baddbmm(m.bias[:1], q, k.mT, beta=1, alpha=0.3).softmax(-1).bmm(v),
    "baddbmm of nothing": lambda m, q, k, v: (
        m.bias[:1].baddbmm(batch1=q, batch2=k.mT, beta=0, alpha=0.3).softmax(-1).bmm(v)
    ),
    "masks of each head": lambda m, q, k, v: (q.bmm(k.mT) + m.bias.repeat(2, 1, 1)).softmax(-1).bmm(v),
    "heads in between": lambda m, q, k, v: (
        ((q.bmm(k.mT).view(2, 2, 5, 5) + m.bias).view(4, 5, 5) + m.bias[:1])
        .softmax(-1)
        .view(2, 2, 5, 5)
        .reshape(4, 5, 5)
        .bmm(v)
        .view(2, 2, 5, 4)
        .transpose(1, 2)
    ),
    "masks of each head around heads": lambda m, q, k, v: (
        (q.bmm(k.mT) + m.bias.repeat(2, 1, 1)).unflatten(0, (2, -1)).softmax(-1).flatten(0, 1).bmm(v)
    ),
    "in two products": lambda m, q, k, v: (
        (q.bmm(k.mT).view(2, 2, 5, 5) + m.bias).softmax(-1) @ v.view(2, 2, 5, 4)
    ),
    "one in front": lambda m, q, k, v: (q @ k.mT).unsqueeze(0).softmax(-1).squeeze(0) @ v,
}


@pytest.mark.parametrize("name", FLAT)
def test_three_dimensions(name):
    rewritten(FuseAttention(), Attends(FLAT[name], flat=True), X, sites=1, trace=fxopt_trace)


def additive(takes_part):
    return torch.where(takes_part, 0.0, torch.finfo(torch.get_default_dtype()).min)


MASKS = {
    "added": (lambda m, q, k, v, p: (scores(q, k) / 2 + additive(p)).softmax(-1) @ v, PADDING),
    "added to a bias": (
        lambda m, q, k, v, p: (scores(q, k) / 2 + m.bias + additive(p)).softmax(-1) @ v,
        PADDING,
    ),
    "filled": (lambda m, q, k, v, p: scores(q, k).masked_fill(~p, MIN).softmax(-1) @ v, PADDING),
    "filled in place": (lambda m, q, k, v, p: scores(q, k).masked_fill_(~p, MIN).softmax(-1) @ v, PADDING),
    "filled after a bias": (
        lambda m, q, k, v, p: (scores(q, k) + m.bias).masked_fill(~p, MIN).softmax(-1) @ v,
        PADDING,
    ),
    "filled before a bias": (
        lambda m, q, k, v, p: (scores(q, k).masked_fill(~p, MIN) + m.bias).softmax(-1) @ v,
        PADDING,
    ),
    "chosen": (lambda m, q, k, v, p: torch.where(p, scores(q, k) / 3, MIN).softmax(-1) @ v, PADDING),
    "chosen the other way": (
        lambda m, q, k, v, p: torch.where(~p, MIN, scores(q, k) / 3).softmax(-1) @ v,
        PADDING,
    ),
    "added, of two": (
        lambda m, q, k, v, p: (
            (scores(q, k) + torch.where(torch.logical_and(p, m.bias > 0), 0.0, MIN).to(q.dtype)).softmax(-1)
            @ v
        ),
        PADDING,
    ),
    "chosen by a method": (lambda m, q, k, v, p: scores(q, k).where(p, MIN).softmax(-1) @ v, PADDING),
    "chosen from a constant": (
        lambda m, q, k, v, p: (
            torch.where(p, scores(q, k), torch.full([], MIN, dtype=q.dtype)).softmax(-1) @ v
        ),
        PADDING,
    ),
    "from outside": (lambda m, q, k, v, b: (scores(q, k) + b).softmax(-1) @ v, BIAS),
    "from outside, for each key": (
        lambda m, q, k, v, b: (scores(q, k) + b).softmax(-1) @ v,
        torch.randn(5),
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    function, mask = MASKS[name]
    sets_values = mask is PADDING and not name.startswith("added")
    pass_ = FuseAttention(each_row_has_a_key=sets_values)
    after = rewritten(pass_, Attends(function), X, mask, sites=1, trace=fxopt_trace)
    if sets_values:
        reason = (
            "would get gradients, which they do not have now. If no row is masked entirely, pass each_row"
        )
        refused(FuseAttention(), Attends(function), X, mask, reason=reason, trace=fxopt_trace)
    entirely = torch.zeros_like(PADDING)
    if mask.dtype == torch.bool:  # a row that is masked entirely
        expected = fxopt.undo(copy.deepcopy(after))(X, entirely)
        torch.testing.assert_close(after(X, entirely), expected)
        assert expected.isfinite().all()


@pytest.mark.parametrize(
    "mask",
    [
        lambda p: torch.where(p, 0.0, -1e4),
        additive,
        lambda p: (1 - p.float()) * -1000000000,
        lambda p: (p.float() - 1) * 1e9,
    ],
)
def test_in_training_mode_a_row_that_is_masked_entirely_keeps_its_gradients(mask):
    model = Attends(lambda m, q, k, v, p: (scores(q, k) / 2 + mask(p)).softmax(-1) @ v).train()
    refused(FuseAttention(), model, X, PADDING, reason="would differ if fused", trace=fxopt_trace)
    for pass_ in (FuseAttention(each_row_has_a_key=True), FuseAttention(inference=True)):
        assert pass_.explain(fxopt_trace(model, [X, PADDING])).sites


def test_two_masks_may_leave_a_row_without_a_number():
    model = Attends(
        lambda m, q, k, v, p: (scores(q, k) / 2 + additive(p) + additive(p.roll(1, -1))).softmax(-1) @ v
    ).eval()
    refused(FuseAttention(inference=True), model, X, PADDING, reason="add up to -inf", trace=fxopt_trace)
    assert FuseAttention(each_row_has_a_key=True).explain(fxopt_trace(model, [X, PADDING])).sites


def test_of_two_masks_one_may_leave_a_key_in_each_row():
    causal = torch.full((5, 5), MIN).triu(1)
    model = module(
        lambda m, q, p: (scores(q, q) / 2 + m.causal + additive(p)).softmax(-1) @ q, causal=nn.Buffer(causal)
    )
    traced = fxopt_trace(model.eval(), [torch.randn(2, 3, 5, 4), torch.ones(2, 1, 1, 5, dtype=torch.bool)])
    assert FuseAttention(inference=True).explain(traced).sites


REFUSED = {
    "rows with gaps": (
        lambda m, q, k, v: scores(q.mT.contiguous().mT, k).softmax(-1) @ v,
        "the rows of its queries, keys or values have gaps",
    ),
    "wide values": (
        lambda m, q, k, v: scores(q, k).softmax(-1) @ torch.cat([v, v], -1),
        "its values have another width than its queries",
    ),
    "weights are returned": (
        lambda m, q, k, v: ((w := scores(q, k).softmax(-1)) @ v, w),
        "softmax is also used by output",
    ),
    "scores are used": (
        lambda m, q, k, v: ((s := scores(q, k)).softmax(-1) @ v, s.sum()),
        "also used by sum",
    ),
    "two values": (lambda m, q, k, v: ((w := scores(q, k).softmax(-1)) @ v) + w @ k, "is also used by"),
    "another dimension": (lambda m, q, k, v: scores(q, k).softmax(-2) @ v, "not over the keys"),
    "a soft cap": (lambda m, q, k, v: (scores(q, k) / 9).tanh().softmax(-1) @ v, "tanh is between"),
    "masked and scaled": (
        lambda m, q, k, v: ((scores(q, k) + m.bias) * 0.5).softmax(-1) @ v,
        "scales what is masked",
    ),
    "added by parts": (
        lambda m, q, k, v: torch.add(scores(q, k), m.bias, alpha=2).softmax(-1) @ v,
        "add is between",
    ),
    "added to itself": (lambda m, q, k, v: ((s := scores(q, k)) + s).softmax(-1) @ v, "add is between"),
    "divided by scores": (lambda m, q, k, v: (2 / scores(q, k)).softmax(-1) @ v, "truediv is between"),
    "rounded": (
        lambda m, q, k, v: torch.div(scores(q, k), 2, rounding_mode="floor").softmax(-1) @ v,
        "div is between",
    ),
    "scaled by a parameter": (
        lambda m, q, k, v: (scores(q, k) * m.bias[0, 0, 0]).softmax(-1) @ v,
        "mul is between",
    ),
    "one number added": (lambda m, q, k, v: (scores(q, k) + m.bias[0, 0, 0]).softmax(-1) @ v, "one number"),
    "weights that are scaled": (
        lambda m, q, k, v: (scores(q, k).softmax(-1) * 2) @ v,
        "mul is between the softmax and the values",
    ),
    "values on the left": (
        lambda m, q, k, v: v.transpose(-1, -2) @ scores(q, k).softmax(-1),
        "not on the left",
    ),
    "weights with themselves": (lambda m, q, k, v: (w := scores(q, k).softmax(-1)) @ w, "not on the left"),
    "weights that are turned": (
        lambda m, q, k, v: scores(q, k).softmax(-1).transpose(-1, -2) @ v,
        " is between the softmax",
    ),
    "keys for all": (lambda m, q, k, v: scores(q, k[:1]).softmax(-1) @ v, "broadcast"),
    "values for all": (lambda m, q, k, v: scores(q, k).softmax(-1) @ v[:, :1], "broadcast"),
    "a mask of more": (
        lambda m, q, k, v: (scores(q[:1], k[:1]) + BIAS.to(q)).softmax(-1) @ v,
        "add changes the shape",
    ),
    "five dimensions": (
        lambda m, q, k, v: scores(q[None], k[None]).softmax(-1) @ v[None],
        "3 or 4 dimensions",
    ),
    "other views": (
        lambda m, q, k, v: scores(q, k).reshape(1, 2, 10, 5).softmax(-1).reshape(2, 2, 5, 5) @ v,
        "reshape changes the shape",
    ),
    "heads that are regrouped": (
        lambda m, q, k, v: scores(q, k).reshape(1, 4, 5, 5).softmax(-1).reshape(2, 2, 5, 5) @ v,
        "grouped in two ways",
    ),
    "a move": (
        lambda m, q, k, v: scores(q, k).to(torch.device("cpu")).softmax(-1) @ v,
        "may move the scores",
    ),
    "in less precision": (
        lambda m, q, k, v: scores(q, k).to(torch.bfloat16).softmax(-1).to(q.dtype) @ v,
        "is in torch.bfloat16",
    ),
    "in more precision": (
        lambda m, q, k, v: F.softmax(scores(q, k), dim=-1, dtype=torch.float64).to(q.dtype) @ v,
        "is in torch.float64",
    ),
    "masked by -inf": (
        lambda m, q, k, v: scores(q, k).masked_fill(m.bias > 0, -math.inf).softmax(-1) @ v,
        "masked scores are -inf",
    ),
    "-inf is added": (
        lambda m, q, k, v: (
            (scores(q, k) + torch.zeros_like(m.bias).masked_fill(m.bias > 0, -math.inf)).softmax(-1) @ v
        ),
        "may hold -inf",
    ),
    "-inf is written": (
        lambda m, q, k, v: (scores(q, k) + with_hidden(m.bias)).softmax(-1) @ v,
        "may hold -inf",
    ),
    "a buffer that holds -inf": (
        lambda m, q, k, v: (scores(q, k) + m.hidden).softmax(-1) @ v,
        "may hold -inf",
    ),
    "-inf by baddbmm": (
        lambda m, q, k, v: (
            torch.baddbmm(m.hidden[None], q.flatten(0, 1), k.flatten(0, 1).mT)
            .softmax(-1)
            .bmm(v.flatten(0, 1))
        ),
        "may hold -inf",
    ),
    "its output is written": (
        lambda m, q, k, v: (scores(q, k).softmax(-1) @ v).flatten(1).add_(1),
        "which the call keeps for gradients",
    ),
    "its values are written": (
        lambda m, q, k, v: ((r := scores(q, k).softmax(-1) @ v), v.relu_(), r + 1)[2],
        "which the call keeps for gradients",
    ),
    "a logarithm is added": (
        lambda m, q, k, v: (scores(q, k) + (m.bias > 0).to(q.dtype).log()).softmax(-1) @ v,
        "may hold -inf",
    ),
    "masked by little": (
        lambda m, q, k, v: scores(q, k).masked_fill(m.bias > 0, -1e4).softmax(-1) @ v,
        "too large to hide a score",
    ),
    "masked by a parameter": (
        lambda m, q, k, v: torch.where(m.bias > 0, scores(q, k), m.bias[0, 0, 0]).softmax(-1) @ v,
        "not known to be one small number",
    ),
    "written in between": (
        lambda m, q, k, v: ((w := scores(q, k).softmax(-1)), q.add_(1), w @ v)[2],
        "may write into",
    ),
    "a mask written in between": (
        lambda m, q, k, v: (
            (b := m.bias * 1),
            (w := (scores(q, k) + b).softmax(-1)),
            b.add_(1),
            w @ v,
        )[3],
        "may write into",
    ),
    "unscaled queries written in between": (
        lambda m, q, k, v: ((r := q * 0.5), q.add_(1), scores(r, k).softmax(-1) @ v)[2],
        "may write into",
    ),
    "written into a mask": (
        lambda m, q, k, v: (
            (b := m.bias * torch.ones_like(q[..., :1])),
            b.add_(scores(q, k)).softmax(-1) @ v,
        )[1],
        "no part of the attention",
    ),
    "an einsum of other dimensions": (
        lambda m, q, k, v: torch.einsum("bhid,bhjd->bhji", q, k).softmax(-1) @ v,
        "is not a product of the last dimensions",
    ),
    "without gradients": (lambda m, q, k, v: without_gradients(q, k) @ v, "side effect"),
    "the scores are but a shape": (
        lambda m, q, k, v: torch.ones(4, 5, 5).view_as(scores(q, k)).softmax(-1) @ v,
        "takes nothing but the shape of the scores",
    ),
    "the weights are but a shape": (
        lambda m, q, k, v: (m.bias * torch.ones(2, 2, 5, 5)).reshape_as(scores(q, k).softmax(-1)) @ v,
        "takes nothing but the shape of the scores",
    ),
}


def with_hidden(bias):
    mask = torch.zeros_like(bias)
    mask[:, :, 3:] = -math.inf
    return mask


def without_gradients(q, k):
    with torch.no_grad():
        return scores(q, k).softmax(-1)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_attention_stays(name):
    function, reason = REFUSED[name]
    refused(FuseAttention(), Attends(function), X, reason=reason, trace=fxopt_trace)


def test_the_output_of_an_attention_is_not_the_scores_of_another():
    model = Attends(lambda m, q, k, v: (scores(q, k).softmax(-1) @ v).softmax(-1) @ v[..., :4, :])
    explanation = FuseAttention().explain(fxopt_trace(model.eval(), [X]))
    assert len(explanation.sites) == 1
    assert "is the product of another attention" in explanation.refusals[0][2]
    rewritten(FuseAttention(), model, X, sites=1, trace=fxopt_trace)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_softmax_in_float32_stays_where_the_call_would_be_another(dtype):
    def function(m, q, k, v):
        return F.softmax(scores(q, k) / 2, dim=-1, dtype=torch.float32).to(v.dtype) @ v

    model, x = Attends(function).eval().to(dtype), X.to(dtype)
    traced = fxopt.trace(model, (x,))
    after = FuseAttention()(copy.deepcopy(traced))
    assert len(calls(after)) == (dtype != torch.float64)
    exact = copy.deepcopy(model).double()(x.double())
    errors = [(each(x).double() - exact).abs().max() for each in (traced, after)]
    assert errors[1] <= 2 * errors[0] + 1e-6


@pytest.mark.parametrize(
    ("dtype", "reason"),
    [
        (torch.float16, "in float16, a row that is masked entirely"),
        (torch.bfloat16, None),
        (torch.float64, None),
    ],
)
def test_masks_in_other_dtypes(dtype, reason):
    def function(m, q, k, v, p):
        mask = torch.zeros((), dtype=dtype).masked_fill(~p, torch.finfo(dtype).min)
        return (scores(q, k) + mask).softmax(-1) @ v

    traced = fxopt.trace(Attends(function).eval().to(dtype), (X.to(dtype), PADDING))
    explanation = FuseAttention().explain(traced)
    assert len(explanation.sites) == (reason is None)
    if reason:
        assert reason in explanation.refusals[0][2]
    after = FuseAttention()(copy.deepcopy(traced))
    for mask in (PADDING, torch.zeros_like(PADDING)):
        torch.testing.assert_close(after(X.to(dtype), mask), traced(X.to(dtype), mask), rtol=0.1, atol=0.05)


def test_infinite_masks_where_each_row_has_a_key():
    pass_ = FuseAttention(each_row_has_a_key=True)
    for name in ("masked by -inf", "-inf is added", "-inf is written", "a buffer that holds -inf"):
        model = Attends(REFUSED[name][0])
        model.bias.data = torch.randn(2, 5, 5)
        model.bias.data[..., 0] = -1
        traced = fxopt_trace(model.double().eval(), [X.double()])
        after = pass_(copy.deepcopy(traced))
        assert len(calls(after)) == 1
        torch.testing.assert_close(after(X.double()), traced(X.double()), rtol=1e-12, atol=1e-12)
        assert after(X.double()).isfinite().all()


@pytest.mark.parametrize(
    "function",
    [
        lambda m, q, k, v: (
            scores(q, k).masked_fill(~torch.ones(5, 5).tril().bool(), -math.inf).softmax(-1) @ v
        ),
        lambda m, q, k, v: torch.where(torch.ones(5, 5).tril() == 1, scores(q, k), MIN).softmax(-1) @ v,
        lambda m, q, k, v: (scores(q, k) + torch.full((5, 5), -math.inf).triu(1)).softmax(-1) @ v,
        lambda m, q, k, v: (
            (scores(q, k) + torch.full((5, 5), -math.inf).triu(1).type_as(q)).softmax(-1).type_as(q) @ v
        ),
        lambda m, q, k, v: (
            scores(q, k).masked_fill_(torch.ones(5, 5).triu(1).bool(), -math.inf).div(2).softmax(-1) @ v
        ),
    ],
)
def test_a_constant_mask_with_a_key_in_each_row(function):
    """As in minGPT: the mask is made of sizes, or is a table of the model."""
    rewritten(FuseAttention(), Attends(function), X, sites=1, trace=fxopt_trace)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, q, k, v: (scores(q, k) + torch.full((5, 5), -math.inf).triu(0)).softmax(-1) @ v,
        lambda m, q, k, v: (
            (scores(q, k) + torch.full((5, 5), -math.inf).triu(1))
            .masked_fill(torch.eye(5) == 1, -math.inf)
            .softmax(-1)
            @ v
        ),
    ],
)
def test_masks_that_may_leave_a_row_no_key(function):
    refused(FuseAttention(), Attends(function), X, reason="each_row_has_a_key", trace=fxopt_trace)


def test_with_buffers_that_stay_a_mask_in_one_is_a_constant():
    model = Attends(lambda m, q, k, v: (scores(q, k) + m.hidden).softmax(-1) @ v)
    traced = fxopt_trace(model.eval(), [X])
    assert not FuseAttention().explain(traced).sites
    assert len(calls(FuseAttention(inference=True)(traced))) == 1
    torch.testing.assert_close(traced(X), model(X))


LEAST = torch.finfo(torch.float32).min


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    ("function", "dtype", "reason"),
    [
        (
            lambda m, q, k, v: m.bias.type_as(q @ k.mT).softmax(-1) @ v,
            None,
            "nothing but the dtype of the scores",
        ),
        (
            lambda m, q, k, v: (
                scores(q, k).masked_fill(m.bias > 0, LEAST).add((m.bias - 1) + LEAST).softmax(-1) @ v
            ),
            None,
            "in a row that is masked entirely",
        ),
        (
            lambda m, q, k, v: (scores(q, k) + torch.full((5, 5), -1e4, dtype=q.dtype)).softmax(-1) @ v,
            torch.float16,
            "in float16",
        ),
    ],
)
def test_what_a_constant_mask_and_inference_do_not_excuse(function, dtype, reason, inference):
    traced = fxopt_trace(Attends(function).eval().to(dtype), [X.to(dtype)])
    explanation = FuseAttention(inference=inference).explain(traced)
    assert not explanation.sites
    assert reason in explanation.refusals[0][2]


def test_without_gradients_a_row_that_is_masked_entirely_counts_only_where_it_is_nan():
    model = Attends(lambda m, q, k, v, p: scores(q, k).masked_fill(~p, MIN).softmax(-1) @ v)
    assert not FuseAttention().explain(fxopt_trace(model.eval(), [X, PADDING])).sites
    traced = fxopt_trace(model.double(), [X.double(), PADDING])
    after = FuseAttention(inference=True)(copy.deepcopy(traced))
    assert len(calls(after)) == 1
    for mask in (PADDING, torch.zeros_like(PADDING)):
        torch.testing.assert_close(after(X.double(), mask), traced(X.double(), mask), rtol=1e-12, atol=1e-12)
    model = Attends(lambda m, q, k, v, p: scores(q, k).masked_fill(~p, -math.inf).softmax(-1) @ v)
    assert not FuseAttention(inference=True).explain(fxopt_trace(model.eval(), [X, PADDING])).sites


def test_a_mask_in_another_dtype_is_refused():
    model = Attends(lambda m, q, k, v, b: (scores(q, k) + b).softmax(-1) @ v)
    refused(FuseAttention(), model, X, BIAS.bfloat16(), reason="is in torch.bfloat16", trace=fxopt_trace)
    model = Attends(lambda m, q, k, v, b: scores(q, k).masked_fill(b, -1e39).softmax(-1) @ v)
    pass_ = FuseAttention(each_row_has_a_key=True)
    assert pass_.explain(fxopt_trace(model.double().eval(), [X.double(), PADDING])).sites


def test_active_dropout_is_refused():
    model = Attends(lambda m, q, k, v: m.dropout(scores(q, k).softmax(-1)) @ v)
    explanation = FuseAttention().explain(fxopt.trace(model.train(), (X,)))
    assert not explanation.sites
    assert "is active" in explanation.refusals[0][2]


def test_a_module_with_a_hook_is_called():
    model = Attends(lambda m, q, k, v: m.softmax(scores(q, k)) @ v).eval()
    model.softmax.register_forward_hook(lambda *_: None)
    traced = fxopt.trace(model, (X,), leaf_modules=["softmax"])
    assert not FuseAttention().explain(traced).sites


def test_gradients_are_those_of_before():
    model = randomise(Attends(MASKS["added to a bias"][0]))
    wide = copy.deepcopy(model).double().eval()
    traced = fxopt.trace(wide, (X.double(), PADDING))
    gradients = []
    for each in (traced, FuseAttention()(copy.deepcopy(traced))):
        each(X.double(), PADDING).square().sum().backward()
        gradients.append([p.grad for p in each.parameters()])
    torch.testing.assert_close(*gradients)


def test_without_shapes_it_is_refused_and_fake_tensor_prop_gives_them():
    class Plain(nn.Module):
        def forward(self, q, k, v):
            return torch.softmax(q @ k.transpose(-1, -2) * 0.5, -1) @ v

    inputs = [torch.randn(2, 2, 5, 4) for _ in range(3)]
    refused(FuseAttention(), Plain(), *inputs, reason="FakeTensorProp", trace=fx_trace)
    traced = torch.fx.symbolic_trace(Plain())
    FakeTensorProp(traced, FakeTensorMode()).propagate(*inputs)
    after = FuseAttention()(copy.deepcopy(traced))
    assert len(calls(after)) == 1
    torch.testing.assert_close(after(*inputs), traced(*inputs))


def test_views_of_sizes_that_nobody_checks_are_refused():
    class Plain(nn.Module):
        def forward(self, q, k, v):
            return q.bmm(k.mT).view(2, 2, 5, 5).softmax(-1).view(4, 5, 5).bmm(v)

    inputs = [torch.randn(4, 5, 4) for _ in range(3)]
    traced = torch.fx.symbolic_trace(Plain())
    FakeTensorProp(traced, FakeTensorMode()).propagate(*inputs)
    assert "changes the shape" in FuseAttention().explain(traced).refusals[0][2]


def test_a_step_that_drops_a_free_size_of_1_is_refused():
    class Squeezes(nn.Module):
        def forward(self, q, k, v):
            return scores(q, k).squeeze().softmax(-1) @ v

    free = ({2: torch.export.Dim("rows")}, None, None)
    traced = fxopt.trace(Squeezes(), [torch.randn(2, 2, 5, 4) for _ in range(3)], dynamic_shapes=free)
    assert "squeeze changes the shape" in FuseAttention().explain(traced).refusals[0][2]


def test_free_sizes_stay_free():
    class Free(nn.Module):
        def forward(self, x, mask):
            batch, length, _ = x.shape
            q, k, v = (x.view(batch, length, 2, 4).transpose(1, 2).reshape(-1, length, 4) for _ in range(3))
            added = q.bmm(k.transpose(1, 2)).view(batch, 2, length, length) + mask
            weights = added.view(batch * 2, length, length).softmax(-1)
            return weights.bmm(v).view(batch, 2, length, 4).transpose(1, 2).reshape(batch, length, 8)

    auto = torch.export.Dim.AUTO
    free = ({0: auto, 1: auto}, {0: auto, 2: auto, 3: auto})
    traced = fxopt.trace(Free(), (X, torch.zeros(2, 1, 5, 5)), dynamic_shapes=free)
    after = FuseAttention()(copy.deepcopy(traced))
    assert len(calls(after)) == 1
    for batch, length in ((2, 5), (1, 3), (4, 1)):
        x, mask = torch.randn(batch, length, 8), torch.randn(batch, 1, length, length)
        torch.testing.assert_close(after(x, mask), Free()(x, mask))


GROUPED = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2}
TEXT = {**GROUPED, "vocab_size": 60, "max_position_embeddings": 32}
MODELS = {
    "BERT": (BertModel, BertConfig(**TEXT), 2),
    "Bloom": (BloomModel, BloomConfig(vocab_size=60, hidden_size=16, n_layer=2, n_head=4), 2),
    "T5": (
        T5EncoderModel,
        T5Config(vocab_size=60, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4),
        2,
    ),
    "Swin": (
        SwinModel,
        SwinConfig(image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=2),
        2,
    ),
}


def small(name):
    cls, config, sites = MODELS[name]
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    config._attn_implementation = "eager"
    model = randomise(cls(config)).eval()
    if name == "Swin":
        return model, {"pixel_values": torch.randn(2, 3, config.image_size, config.image_size)}, sites
    ids = torch.randint(0, 60, (3, 7))
    mask = torch.ones_like(ids)
    mask[1, 4:] = mask[2, :2] = 0
    return model, {"input_ids": ids, "attention_mask": mask}, sites


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", MODELS)
def test_attention_of_transformers(name):
    model, inputs, sites = small(name)
    with torch.no_grad():
        traced = fxopt.symbolic_trace(model, list(inputs))
        after = FuseAttention()(copy.deepcopy(traced), verify=True)
        assert len(calls(after)) == sites
        assert not FuseAttention().explain(after).rows
        torch.testing.assert_close(
            after(**inputs).last_hidden_state, model(**inputs).last_hidden_state, rtol=1e-4, atol=1e-4
        )
        assert_round_trip(traced, fxopt.undo(after))
        if name not in ("Bloom", "Swin"):  # whose softmax is in float32 whatever the model is in
            wide = model.double()
            traced = fxopt.symbolic_trace(wide, list(inputs))
            after = FuseAttention()(copy.deepcopy(traced))
            assert len(calls(after)) == sites
            difference = after(**inputs).last_hidden_state - wide(**inputs).last_hidden_state
            assert difference.abs().max() < 1e-12


@pytest.mark.parametrize(("device", "count"), [("cpu", 1), ("meta", 0)])
def test_the_least_number_is_added_on_the_cpu_alone(device, count):
    """Measured on an H200: where a row is masked entirely, its kernel gives zeros in the place of the mean of the values."""
    with torch.device(device):
        model = Attends(MASKS["added"][0]).eval()
    traced = fxopt.trace(model, (X.to(device), PADDING.to(device)))
    explanation = FuseAttention().explain(traced)
    assert len(explanation.sites) == count
    if not count:
        assert "a row that is masked entirely would differ if fused" in explanation.refusals[0][2]
        assert len(FuseAttention(each_row_has_a_key=True).explain(traced).sites) == 1
    bias = Attends(lambda m, q, k, v: (scores(q, k) + m.bias).softmax(-1) @ v).eval().to(device)
    assert len(FuseAttention().explain(fxopt.trace(bias, (X.to(device),))).sites) == 1
