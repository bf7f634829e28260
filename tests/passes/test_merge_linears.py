"""MergeLinears: merged where the outputs stay the same, refused with a reason where they would not."""

import operator

import pytest
import torch
from torch import nn

import fxopt
from fxopt import MergeLinears, UndoError, undo
from fxopt.testing import randomise
from tests.before_after import fx_trace, fxopt_trace, refused, rewritten
from tests.modules import module


class Heads(nn.Module):
    """Three linear layers on one input, used as `use` says."""

    def __init__(self, use=None, width=(8, 8, 4), **options):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, size, **options) for size in width)
        self.use = use or (lambda model, x: (model.q(x), model.k(x), model.v(x)))

    def forward(self, x):
        return self.use(self, x)


X = torch.randn(2, 3, 8)


def attention(model, x):
    q = model.q(x).view(2, 3, 2, 4).transpose(1, 2)
    k = model.k(input=x).view(2, 3, 2, 4).transpose(1, 2)
    return (q @ k.transpose(-1, -2)).softmax(-1), model.v(x)


def test_merges_layers_on_the_same_input():
    after = rewritten(MergeLinears(), Heads(), X, sites=1)
    assert [n.target for n in after.graph.nodes if n.op == "call_module"] == ["fxopt_merged_q_k_v"]
    assert list(after.state_dict()) == ["fxopt_merged_q_k_v.weight", "fxopt_merged_q_k_v.bias"]


@pytest.mark.parametrize(
    "model",
    [
        Heads(attention),
        Heads(bias=False),
        Heads(lambda m, x: (m.q(x), m.k(x) + 1)),
        Heads(lambda m, x: {"q": m.q(x), "rest": [m.k(x), (m.v(x), x)]}),
        Heads(lambda m, x: (m.q(x)[..., 1:], m.k(x).unsqueeze(0), m.v(x).reshape(-1))),
        nn.Sequential(Heads()),
    ],
    ids=["attention", "no bias", "two of three", "nested output", "slices", "below a numeric name"],
)
def test_keeps_the_outputs(model):
    rewritten(MergeLinears(), model, X, sites=1)


def test_a_vector_as_input():
    rewritten(MergeLinears(), Heads(), torch.randn(8), sites=1)


def test_with_metadata_of_the_trace():
    def dynamic_view(m, x):
        return m.q(x).view(x.shape[0], x.shape[1], -1, 4), m.k(x)

    after = rewritten(MergeLinears(), Heads(dynamic_view), X, sites=1, trace=fxopt_trace)
    (node,) = MergeLinears().get_transformed_nodes(after)
    assert node.meta["val"].shape == (2, 3, 16)


def test_layers_with_different_parents():
    model = module(
        lambda m, x: (m.a(x), m.b[1](x)),
        a=nn.Sequential(nn.Linear(8, 2)),
        b=nn.Sequential(nn.ReLU(), nn.Linear(8, 3)),
    )
    after = rewritten(MergeLinears(), model, X, sites=1)
    assert "fxopt_merged_a_0_b_1" in dict(after.named_modules())


def test_groups_by_bias_and_gradients():
    model = Heads(lambda m, x: (m.q(x), m.k(x), m.v(x), m.o(x), m.p(x)))
    model.o, model.p = nn.Linear(8, 2, bias=False), nn.Linear(8, 3, bias=False)
    model.v.requires_grad_(False)
    after = rewritten(MergeLinears(), model, X, sites=1)
    (node,) = MergeLinears().get_transformed_nodes(after)
    assert node.target == "fxopt_merged_q_k_o_p"
    assert after.get_parameter("fxopt_merged_q_k_o_p.bias")[-5:].tolist() == [0] * 5


def test_training_would_give_a_bias_to_a_layer_without_one():
    model = Heads(lambda m, x: (m.q(x), m.k(x), m.o(x), m.p(x)))
    model.o, model.p = nn.Linear(8, 2, bias=False), nn.Linear(8, 3, bias=False)
    after = rewritten(MergeLinears(), model, X, sites=2, training=True)
    assert {n.target for n in MergeLinears().get_transformed_nodes(after)} == {
        "fxopt_merged_q_k",
        "fxopt_merged_o_p",
    }


def test_groups_by_training_flag():
    traced = fx_trace(Heads().eval(), [X])
    traced.v.train()
    assert [row[0] for row in MergeLinears().explain(traced).refusals] == ["v"]


def test_whisper_has_keys_without_a_bias():
    model = Heads()
    model.k = nn.Linear(8, 8, bias=False)
    after = rewritten(MergeLinears(), model, X, sites=1)
    with torch.no_grad():
        after.get_parameter("fxopt_merged_q_k_v.bias")[8] = 1
    with pytest.raises(UndoError, match=r"k had no bias, and .* is not zero any more"):
        undo(after)


def test_a_write_to_the_input_splits_the_group():
    def use(m, x):
        h = x + 0
        q, k = m.q(h), m.k(h)
        h.add_(1)
        return q, k, m.v(h), m.o(h)

    model = Heads(use)
    model.o = nn.Linear(8, 2)
    rewritten(MergeLinears(), model, X, sites=2)


def between(statement):
    def use(m, x):
        h = x * 1
        view = h[0]
        q = m.q(h)
        statement(m, h, view)
        return q, m.k(h)

    return use


WRITES = {
    "method": lambda m, h, v: h.mul_(2),
    "through a view": lambda m, h, v: v.add_(1),
    "out": lambda m, h, v: torch.add(v, 1, out=h),
    "setitem": lambda m, h, v: operator.setitem(h, 0, 1.0),
    "inplace module": lambda m, h, v: m.act(h),
    "operator library": lambda m, h, v: torch.ops.aten.mul_.Tensor(h, 2),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_between_keeps_layers_apart(name):
    model = Heads(between(WRITES[name]))
    model.act = nn.ReLU(inplace=True)
    trace = fxopt_trace if name == "setitem" else fx_trace  # fx cannot trace it
    refused(MergeLinears(), model, X, reason="a write or side effect is between", trace=trace)


def test_a_write_elsewhere_does_not():
    rewritten(MergeLinears(), Heads(between(lambda m, h, v: (h * 2).add_(1))), X, sites=1)


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (lambda m, x: (m.q(x).view(-1), m.k(x)), "depends on the memory layout"),
        (lambda m, x: (m.q(x).transpose(0, 1).view(3, 16), m.k(x)), "depends on the memory layout"),
        (lambda m, x: (m.q(x).is_contiguous(), m.k(x)), "depends on the memory layout"),
        (lambda m, x: (torch.as_strided(m.q(x), (2,), (1,)), m.k(x)), "depends on the memory layout"),
        (lambda m, x: (fill(m.q(x)), m.k(x)), "a function whose use of the memory layout is unknown"),
        (lambda m, x: (in_order(m.q(x)), m.k(x)), "a function whose use of the memory layout is unknown"),
        (lambda m, x: (m.q(x).resize_(3, 8), m.k(x)), "may write into its output"),
        (lambda m, x: (m.q(x).mul_(3), m.k(x)), "may write into its output"),
        (lambda m, x: (m.q(x).transpose(0, 1).add_(1), m.k(x)), "may write into its output"),
    ],
)
def test_outputs_that_must_be_contiguous_or_are_written(use, reason):
    explanation = MergeLinears().explain(torch.fx.symbolic_trace(Heads(use, width=(8, 8, 8))))
    assert not explanation.sites, explanation
    assert any(reason in text for _, _, text in explanation.refusals), explanation


def fill(x):
    """Needs contiguous memory, under the name of a function of torch that does not."""
    return x.view(-1)


torch.fx.wrap("fill")


@torch.library.custom_op("fxopt_tests::in_order", mutates_args=())
def in_order(x: torch.Tensor) -> torch.Tensor:
    """Reads memory as kernels do that ask for no strides."""
    return x.as_strided((x.numel(),), (1,)).clone()


def test_a_module_that_may_need_contiguous_memory():
    class Flat(nn.Module):
        _is_impure = True

        def forward(self, x):
            return x.view(-1)

    def use(m, x):
        q, k = m.q(x), m.k(x)
        return m.flat(q), k

    model = Heads(use, width=(8, 8, 8))
    model.flat = Flat()
    reason = "a module whose use of the memory layout is unknown"
    refused(
        MergeLinears(),
        model,
        X,
        reason=reason,
        trace=lambda m, x: fxopt.trace(m, tuple(x), leaf_modules=["flat"]),
    )


def test_undo_gives_transposed_weights_their_strides():
    model = Heads()
    model.k.weight = nn.Parameter(torch.randn(8, 8).t())
    after = rewritten(MergeLinears(), model, X, sites=1)
    assert MergeLinears()(after, reverse=True).k.weight.stride() == (1, 8)


def test_layers_with_the_name_of_a_function():
    model = Heads(lambda m, x: (m.contiguous(m.q(x)).view(-1), m.k(x)), width=(8, 8, 8))
    model.contiguous = nn.Identity()
    refused(MergeLinears(), model, X, reason="depends on the memory layout")
    model = Heads(lambda m, x: (m.view(m.q(x)), m.k(x)), width=(8, 8, 8))
    model.view = nn.Identity()
    rewritten(MergeLinears(), model, X, sites=1)


def test_a_mode_switch_between():
    def use(m, x):
        q = m.q(x)
        with torch.no_grad():
            return q, m.k(x)

    refused(MergeLinears(), Heads(use), X, reason="side effect is between", trace=fxopt_trace)


def test_a_layer_under_two_names():
    traced = torch.fx.symbolic_trace(Heads())
    traced.alias = traced.q
    assert MergeLinears().explain(traced).refusals[0] == (
        "q",
        "q",
        "the module has several names: q, alias",
    )
    merged = MergeLinears()(traced)
    assert merged.q is merged.alias


def test_layers_tied_to_each_other_are_refused():
    model = Heads(lambda m, x: (m.q(x), m.k(x), m.v(x), m.o(x)))
    model.o = nn.Linear(8, 2)
    model.k.weight = model.q.weight  # training would pull the parts of a merged weight apart
    explanation = MergeLinears().explain(torch.fx.symbolic_trace(model))
    assert [node for node, *_ in explanation.refusals] == ["q", "k"]
    assert "shares memory with k.weight" in explanation.refusals[0][2]
    rewritten(MergeLinears(), model, X, sites=1)


def test_undo_keeps_training_and_dtype():
    model = randomise(Heads())
    merged = MergeLinears()(torch.fx.symbolic_trace(model))
    with torch.no_grad():
        merged.get_submodule("fxopt_merged_q_k_v").weight.mul_(2)
    restored = MergeLinears()(merged.half(), reverse=True)
    assert torch.equal(restored.k.weight, (model.k.weight * 2).half())
    assert restored.q.bias.dtype == torch.float16
    assert torch.equal(model.k.weight, randomise(Heads()).k.weight) is False


def test_plain_attributes_come_back():
    model = Heads()
    model.q.note = "kept"
    merged = MergeLinears()(torch.fx.symbolic_trace(model))
    restored = MergeLinears()(merged, reverse=True)
    assert restored.q.note == "kept"
    assert restored.q is not model.q
    assert restored.q._forward_hooks is not model.q._forward_hooks


def test_undo_after_dead_code_elimination_raises():
    merged = MergeLinears()(torch.fx.symbolic_trace(Heads(lambda m, x: (m.q(x), m.k(x), m.v(x))[:2])))
    merged.graph.eliminate_dead_code()
    with pytest.raises(UndoError, match="no longer has nodes that the pass made"):
        MergeLinears()(merged, reverse=True)


def test_a_shared_container_is_not_written_to():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 2), nn.Linear(8, 2)

        def forward(self, x):
            return x

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x):
            return self.block(x), self.block.a(x), self.block.b(x)

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m, name):
            return isinstance(m, Block | nn.Linear)

    model = Outer()
    traced = torch.fx.GraphModule(model, Tracer().trace(model))
    explanation = MergeLinears().explain(traced)
    assert not explanation.sites
    assert "may share with the model" in explanation.refusals[0][2]


def test_undo_gives_each_layer_memory_of_its_own():
    traced = torch.fx.symbolic_trace(Heads())
    restored = MergeLinears()(MergeLinears()(traced), reverse=True)
    memory = {p.untyped_storage().data_ptr() for p in restored.parameters()}
    assert len(memory) == 6
    assert len(MergeLinears().explain(restored).sites) == 1


def test_a_write_that_takes_the_output_of_another_layer_is_refused():
    model = module(lambda m, x: m.a(x).mul_(m.b(x)), a=nn.Linear(3, 3), b=nn.Linear(3, 3))
    x = torch.randn(2, 3)
    merged = MergeLinears()(fxopt.trace(model, (x,)))
    merged(x).sum().backward()  # autograd keeps what the write takes


def test_gradients_are_those_of_the_original():
    model = Heads(attention)
    merged = MergeLinears()(torch.fx.symbolic_trace(model))
    inputs = [X.clone().requires_grad_() for _ in range(2)]
    for graph, x in zip((model, merged), inputs, strict=True):
        sum(out.pow(2).sum() for out in graph(x)).backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    joined = torch.cat([layer.weight.grad for layer in (model.q, model.k, model.v)])
    torch.testing.assert_close(merged.fxopt_merged_q_k_v.weight.grad, joined)


def test_a_tie_to_a_layer_that_is_not_merged_with_it():
    model = Heads(lambda m, x: (m.q(x), m.k(x)), bias=True)
    model.k = nn.Linear(8, 8, bias=False)
    model.k.weight = model.q.weight
    refused(MergeLinears(), model, X, reason="shares memory")
