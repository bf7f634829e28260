"""RemoveRepeatedHeads: attention takes groups of heads, where their copies are made for it alone and stay as they are."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import fxopt
from fxopt import FuseAttention, RemoveRepeatedHeads
from tests.before_after import fx_trace, fxopt_trace, refused, rewritten

QUERY, KEY = torch.randn(2, 6, 5, 4), torch.randn(2, 2, 5, 4)
ATTEND = F.scaled_dot_product_attention


def repeated(x):
    return x[:, :, None, :, :].expand(2, 2, 3, 5, 4).reshape(2, 6, 5, 4)


class Attends(nn.Module):
    """A function of queries and keys."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.bias = nn.Parameter(torch.ones(2, 1, 5, 5))

    def forward(self, query, key):
        return self.function(self, query, key)


SPELLINGS = {
    "repeat_kv": lambda m, q, k: ATTEND(q, repeated(k), repeated(k * 2)),
    "other steps": lambda m, q, k: ATTEND(
        q,
        k[:, :, None].expand(-1, -1, 3, -1, -1).flatten(1, 2),
        (k * 2).unsqueeze(2).expand((2, 2, 3, 5, 4)).reshape((2, 6, 5, 4)),
    ),
    "dots": lambda m, q, k: ATTEND(q, repeated(k), k[..., None, :, :].expand(2, 2, 3, 5, 4).flatten(1, 2)),
    "keywords": lambda m, q, k: ATTEND(
        attn_mask=m.bias, value=repeated(k * 2), key=repeated(k), query=q, scale=0.3
    ),
    "a causal mask": lambda m, q, k: ATTEND(q, repeated(k), repeated(k * 2), None, 0.0, True),
    "keys that are the values": lambda m, q, k: (lambda both: ATTEND(q, both, both))(repeated(k)),
    "copies that are used elsewhere": lambda m, q, k: (
        lambda keys: ATTEND(q, keys, repeated(k * 2)) + keys.sum()
    )(repeated(k)),
    "an operator of aten": lambda m, q, k: torch.ops.aten.scaled_dot_product_attention.default(
        q, repeated(k), repeated(k * 2)
    ),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name):
    after = rewritten(RemoveRepeatedHeads(), Attends(SPELLINGS[name]), QUERY, KEY, sites=1, trace=fxopt_trace)
    copies = [node for node in after.graph.nodes if "expand" in node.name]
    assert len(copies) == ("elsewhere" in name)


NO_SITE = {
    "values alone": lambda m, q, k: ATTEND(q, q, repeated(k)),
    "other heads": lambda m, q, k: ATTEND(q, *(k[:, None].expand(2, 3, 2, 5, 4).reshape(2, 6, 5, 4),) * 2),
    "heads in another order": lambda m, q, k: ATTEND(
        q, *(k[:, [1, 0], None].expand(2, 2, 3, 5, 4).reshape(2, 6, 5, 4),) * 2
    ),
    "elements in another order": lambda m, q, k: ATTEND(
        q, *(k[:, :, None].expand(2, 2, 3, 5, 4).reshape(2, 3, 2, 5, 4).flatten(1, 2),) * 2
    ),
    "heads that take turns": lambda m, q, k: ATTEND(
        q[:, :4], *(k[:, None].expand(2, 2, 2, 5, 4).reshape(2, 4, 5, 4),) * 2
    ),
    "more keys": lambda m, q, k: ATTEND(
        q[:, :2], *(k[:, :, None].expand(2, 2, 3, 5, 4).reshape(2, 2, 15, 4),) * 2
    ),
    "fewer keys": lambda m, q, k: ATTEND(
        q, *(k[:, :, None, 1:].expand(2, 2, 3, 4, 4).reshape(2, 6, 4, 4),) * 2
    ),
    "something between": lambda m, q, k: ATTEND(q, repeated(k) * 2, repeated(k)),
}


@pytest.mark.parametrize("name", NO_SITE)
def test_what_repeats_no_heads_is_left_alone(name):
    rewritten(RemoveRepeatedHeads(), Attends(NO_SITE[name]), QUERY, KEY, sites=0, trace=fxopt_trace)


def writes_between(m, q, k):
    own = k * 2
    copied = repeated(own)
    own.mul_(3)
    return ATTEND(q, copied, repeated(own))


def writes_into_the_copy(m, q, k):
    copied = repeated(k * 2)
    copied[0].mul_(3)
    return ATTEND(q, copied, repeated(k))


def writes_behind(m, q, k):
    own = k * 2
    out = ATTEND(q, repeated(own), repeated(own))
    own.mul_(3)
    return out, own


def without_gradients_between(m, q, k):
    with torch.no_grad():
        copied = repeated(k * 2)
    return ATTEND(q, copied, copied)


REFUSED = {
    "may write into": (writes_between, writes_into_the_copy),
    "keeps for gradients": (writes_behind,),
    "has a side effect": (without_gradients_between,),
    "broadcast": (lambda m, q, k: ATTEND(q[:1], repeated(k), repeated(k)),),
}


@pytest.mark.parametrize(("reason", "function"), [(r, f) for r, fs in REFUSED.items() for f in fs])
def test_refusals(reason, function):
    refused(RemoveRepeatedHeads(), Attends(function), QUERY, KEY, reason=reason, trace=fxopt_trace)


def test_refuses_sizes_that_nobody_checks():
    def described(model, inputs):
        traced = fxopt.trace(model, tuple(inputs))
        bare = torch.fx.GraphModule(traced, torch.fx.Graph())
        new = torch.fx.Graph()
        values = {}
        for node in traced.graph.nodes:
            if node.name != "input_guard":
                values[node] = new.node_copy(node, values.__getitem__)
        bare.graph = new
        return bare

    refused(
        RemoveRepeatedHeads(), Attends(SPELLINGS["repeat_kv"]), QUERY, KEY, reason="sizes", trace=described
    )


def test_refuses_other_devices():
    model, inputs = Attends(SPELLINGS["repeat_kv"]).to("meta"), (QUERY.to("meta"), KEY.to("meta"))
    explanation = RemoveRepeatedHeads().explain(fxopt.trace(model, inputs))
    assert not explanation.sites
    assert "other devices" in explanation.refusals[0][2]


def test_a_graph_without_shapes_has_no_site():
    rewritten(RemoveRepeatedHeads(), Attends(SPELLINGS["repeat_kv"]), QUERY, KEY, sites=0, trace=fx_trace)


@pytest.mark.long
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("config", "cls"), [(LlamaConfig, LlamaForCausalLM), (Qwen3Config, Qwen3ForCausalLM)]
)
def test_language_models_at_any_size(config, cls, implementation):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 60, "head_dim": 8}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = cls(config(**sizes, **heads, attn_implementation=implementation)).eval()
    free = {"input_ids": {0: Dim.AUTO, 1: Dim.AUTO}, "attention_mask": {0: Dim.AUTO, 1: Dim.AUTO}}

    def inputs(batch, length):
        mask = torch.ones(batch, length, dtype=torch.long)
        mask[0, :2] = 0
        return {"input_ids": torch.randint(0, 60, (batch, length)), "attention_mask": mask}

    traced = fxopt.trace(model, (), inputs(2, 7), dynamic_shapes=free)
    after = RemoveRepeatedHeads()(FuseAttention(each_row_has_a_key=True)(traced))
    assert (
        len(RemoveRepeatedHeads().explain(FuseAttention(True)(fxopt.trace(model, (), inputs(2, 7)))).sites)
        == 2
    )
    for batch, length in ((2, 7), (1, 4), (3, 12)):
        given = inputs(batch, length)
        with torch.no_grad():
            torch.testing.assert_close(after(**given).logits, model(**given).logits, atol=1e-5, rtol=1e-4)
