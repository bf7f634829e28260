"""Passes in two functions: what they find, what they refuse, the proof of a rule, and undo."""

import copy
import dataclasses
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxopt
from fxopt import PassError, Pattern, UndoError
from fxopt.testing import assert_equivalent, assert_round_trip, randomise
from tests.modules import module


class RemoveRepeatedReLU(Pattern):
    def pattern(self, x):
        return torch.relu(torch.relu(x))

    def replacement(self, x):
        return torch.relu(x)


class FoldNumber(Pattern):
    def pattern(self, x, c: float, linear: nn.Linear):
        return linear(x * c)

    def refuses(self, x, c, linear):
        return "it is zero" if c == 0 else None

    def replacement(self, x, c, linear):
        folded = copy.deepcopy(linear)
        folded.weight.mul_(c)
        return folded(x)

    def inverse(self, new, c):
        old = copy.deepcopy(new)
        old.weight.div_(c)
        return old


class FuseConsecutive(Pattern):
    def pattern(self, x, first: nn.Linear, second: nn.Linear):
        return second(first(x))

    def replacement(self, x, first, second):
        fused = copy.deepcopy(second)
        bias = torch.zeros_like(first.weight[:, 0]) if first.bias is None else first.bias
        fused.in_features, fused.weight = first.in_features, nn.Parameter(second.weight @ first.weight)
        fused.bias = nn.Parameter(F.linear(bias, second.weight, second.bias))
        return fused(x)


class SplitNorm(Pattern):
    """One layer becomes two, of which one is new."""

    def pattern(self, x, norm: nn.LayerNorm):
        return norm(x)

    def replacement(self, x, norm):
        plain = copy.deepcopy(norm)
        plain.weight.fill_(1)
        plain.bias.fill_(0)
        scale = nn.Linear(norm.weight.numel(), norm.weight.numel()).to(norm.weight)
        scale.weight.copy_(norm.weight.diag())
        scale.bias.copy_(norm.bias)
        return scale.train(norm.training)(plain(x))

    def opens_sites(self, graph_module, sites):
        return False


X = torch.randn(3, 4)


def traced(forward, **layers):
    layers = layers or {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}
    return fxopt.trace(randomise(module(forward, **layers)).eval(), (X,))


def check(pass_, graph_module, sites=1):
    """Rewritten at so many places, equivalent, and undone exactly."""
    before = copy.deepcopy(graph_module)
    assert len(pass_.explain(graph_module).sites) == sites, pass_.explain(graph_module)
    after = pass_(graph_module, verify=True)
    wide = fxopt.trace(copy.deepcopy(before).double(), (X.double(),))
    assert_equivalent(before, after, (X,), float64=(wide, pass_(copy.deepcopy(wide))))
    for carried in (pickle.loads(pickle.dumps(after)), after):
        assert_round_trip(before, fxopt.undo(carried))


SPELLINGS = [
    lambda m, x: m.r(m.r2(x)),
    lambda m, x: F.relu(m.r(x)),
    lambda m, x: torch.relu(x).relu(),
    lambda m, x: F.relu(F.relu(x, inplace=False)),
    lambda m, x: m.r(torch.relu(x)) + x,
]


@pytest.mark.parametrize("forward", SPELLINGS)
def test_spellings_of_a_function_are_one(forward):
    check(RemoveRepeatedReLU(), traced(forward, r=nn.ReLU(), r2=nn.ReLU()))


class DoubleReLU(Pattern):
    def pattern(self, x):
        return torch.relu(x) + torch.relu(x)

    def replacement(self, x):
        return torch.relu(x) * 2


def once_for_both(m, x):
    value = torch.relu(x)
    return value + value


@pytest.mark.parametrize("forward", [once_for_both, lambda m, x: torch.relu(x) + torch.relu(x)])
def test_what_a_pattern_computes_twice_may_be_computed_once(forward):
    check(DoubleReLU(), traced(forward))


def test_places_that_overlap_are_rewritten_one_after_the_other():
    check(RemoveRepeatedReLU(), traced(lambda m, x: torch.relu(torch.relu(torch.relu(x)))), 2)


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: m.a(x * 0.5),
        lambda m, x: m.a(0.5 * x),
        lambda m, x: m.a(torch.mul(x, 0.5)),
        lambda m, x: m.a(x.mul(0.5)) + 1,
        lambda m, x: m.a(torch.mul(input=x, other=0.5)),
        lambda m, x: m.b(m.a(x * 0.5)),
        lambda m, x: m.a(x * 2),
    ],
)
def test_numbers_and_layers_are_found(forward):
    check(FoldNumber(), traced(forward))


@pytest.mark.parametrize("bias", [False, True])
def test_two_layers_become_one(bias):
    first, second = nn.Linear(4, 7, bias=bias), nn.Linear(7, 4)
    check(FuseConsecutive(), traced(lambda m, x: m.second(m.first(x)).tanh(), first=first, second=second))


def test_one_layer_becomes_two():
    check(SplitNorm(), traced(lambda m, x: m.norm(x), norm=nn.LayerNorm(4)))


class Softmax(Pattern):
    def pattern(self, x, scale: float):
        return (x * scale).softmax(-1)

    def replacement(self, x, scale):
        return F.softmax(x.mul(scale), dim=-1)

    def opens_sites(self, graph_module, sites):
        return False


@pytest.mark.parametrize(
    ("forward", "sites"),
    [
        (lambda m, x: torch.softmax(x * 2, dim=-1), 1),
        (lambda m, x: m.s(2 * x), 1),
        (lambda m, x: F.softmax(x * 2, 1), 1),
        (lambda m, x: F.softmax(x * 2, 0), 0),
        (lambda m, x: F.softmax(x * 2, -1, dtype=torch.float64), 0),
        (lambda m, x: (x * x).softmax(-1), 0),
    ],
)
def test_options_have_to_be_equal_and_defaults_are_left_out(forward, sites):
    graph_module = traced(forward, s=nn.Softmax(-1))
    assert len(Softmax().explain(graph_module).sites) == sites


def hooked(forward):
    graph_module = traced(forward)
    graph_module.a.register_forward_hook(lambda *args: None)
    return graph_module


def tied(forward):
    graph_module = traced(forward)
    graph_module.b.weight = graph_module.a.weight
    return graph_module


@pytest.mark.parametrize(
    ("graph_module", "pass_", "reason"),
    [
        (hooked(lambda m, x: m.a(x * 2)), FoldNumber(), "hooks"),
        (tied(lambda m, x: m.a(x * 2) + m.b(x)), FoldNumber(), "shares memory with b.weight"),
        (traced(lambda m, x: m.a(m.a(x * 2))), FoldNumber(), "also called by"),
        (traced(lambda m, x: (lambda y: m.a(y) + y)(x * 2)), FoldNumber(), "also used by add"),
        (
            traced(lambda m, x: (lambda z: (lambda y: (z.add_(1), m.a(y))[1] + z)(z * 2))(x + 1)),
            FoldNumber(),
            "may write",
        ),
        (traced(lambda m, x: m.a(x * 0.0)), FoldNumber(), "it is zero"),
        (traced(lambda m, x: F.relu_(torch.relu(x))), RemoveRepeatedReLU(), "writes"),
        (
            torch.fx.symbolic_trace(nn.Sequential(nn.ReLU(), nn.ReLU())),
            RemoveRepeatedReLU(),
            "capture the model with fxopt.trace",
        ),
    ],
)
def test_places_that_are_not_safe_are_refused(graph_module, pass_, reason):
    explanation = pass_.explain(graph_module)
    assert not explanation.sites
    assert any(reason in said for *_, said in explanation.refusals), explanation
    code = graph_module.code
    assert pass_(graph_module).code == code


class SubLinear(nn.Linear):
    pass


def test_a_subclass_of_a_layer_is_another_layer():
    assert not FoldNumber().explain(traced(lambda m, x: m.a(x * 2), a=SubLinear(4, 4))).rows


class Odd(FoldNumber):
    def __init__(self, change):
        self.change = change

    def replacement(self, x, c, linear):
        return self.change(copy.deepcopy(linear), x, c)


def scaled(linear, x, c):
    linear.weight.mul_(c)
    return linear(x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda linear, x, c: linear(x), "is wrong: for .*off by"),
        (lambda linear, x, c: linear(x) * c, "is wrong"),  # but for a bias of zero
        (lambda linear, x, c: scaled(linear, x, 2.0), "is wrong"),  # right for the number of the graph
        (lambda linear, x, c: scaled(linear, x, c).double(), "is wrong.*float64"),
        (lambda linear, x, c: scaled(linear, x, c)[:1], "is wrong"),
        (lambda linear, x, c: 3, "returned a int: it has to return one value"),
        (
            lambda linear, x, c: scaled(linear.train(), x, c),
            "training=True, and the old layers have training=False",
        ),
        (lambda linear, x, c: scaled(linear.requires_grad_(False), x, c), "requires_grad=False"),
    ],
)
def test_a_wrong_rule_is_an_error_before_anything_is_changed(change, message):
    graph_module = traced(lambda m, x: m.a(x * 2.0))
    nn.init.zeros_(graph_module.a.bias)
    before = copy.deepcopy(graph_module)
    with pytest.raises(PassError, match=message):
        Odd(change)(graph_module)
    assert_round_trip(before, graph_module)


def test_a_replacement_that_writes_into_the_layer_is_an_error():
    graph_module = traced(lambda m, x: m.a(x * 2.0))
    before = copy.deepcopy(graph_module)

    class Writes(FoldNumber):
        def replacement(self, x, c, linear):
            linear.weight.mul_(c)
            return linear(x)

    with pytest.raises(PassError, match="writes into a.weight"):
        Writes()(graph_module)
    assert_round_trip(before, graph_module)


def test_an_annotation_that_is_no_layer_is_an_error():
    class Texts(RemoveRepeatedReLU):
        def pattern(self, x: str):
            return torch.relu(x)

    with pytest.raises(PassError, match="the parameter x of Texts.pattern is annotated"):
        Texts().explain(traced(lambda m, x: torch.relu(x)))


def test_inverse_keeps_training():
    graph_module = traced(lambda m, x: m.a(x * 2.0))
    after = FoldNumber()(copy.deepcopy(graph_module))
    with torch.no_grad():
        after.a.weight.add_(1)
    restored = fxopt.undo(pickle.loads(pickle.dumps(after)))
    torch.testing.assert_close(restored.a.weight, graph_module.a.weight + 0.5)
    torch.testing.assert_close(restored(X), after(X))


def test_without_inverse_new_weights_are_not_lost():
    after = FuseConsecutive()(traced(lambda m, x: m.b(m.a(x))))
    with torch.no_grad():
        after.b.weight.add_(1)
    with pytest.raises(UndoError, match="have changed since"):
        fxopt.undo(after)


@dataclasses.dataclass(frozen=True)
class ToQuickGelu(Pattern):
    preserves_computation = False
    tolerance = 0.05

    def pattern(self, x):
        return F.gelu(x)

    def replacement(self, x):
        return x * torch.sigmoid(1.702 * x)


def test_an_approximation_is_held_to_its_tolerance():
    graph_module = traced(lambda m, x: m.g(m.a(x)), a=nn.Linear(4, 4), g=nn.GELU())
    assert len(fxopt.history(ToQuickGelu()(graph_module, verify=True))) == 1


def test_layers_of_other_threads_compute_as_ever():
    layer, stop, seen = nn.Linear(4, 4), threading.Event(), []

    def run():
        while not stop.is_set():
            seen.append(layer(X))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(20):
            FoldNumber()(traced(lambda m, x: m.a(x * 2.0)))
    finally:
        stop.set()
        thread.join()
    assert all(torch.equal(each, seen[0]) for each in seen)
    assert nn.Module.__call__.__name__ == "_wrapped_call_impl"


def rule(pattern, replacement, **others):
    return type("Rule", (Pattern,), {"pattern": pattern, "replacement": replacement, **others})()


def scaled_layer(self, x, c: float, l: nn.Linear):  # noqa: E741
    return l(x) * c


def of(function, *inputs, dynamic_shapes=None, **layers):
    inputs = inputs or (X,)
    forward = {
        1: lambda m, x: function(m, x),
        2: lambda m, x, y: function(m, x, y),
        3: lambda m, x, y, z: function(m, x, y, z),
    }
    model = randomise(module(forward[len(inputs)], **layers)).eval()
    return fxopt.trace(
        model, inputs, **({} if dynamic_shapes is None else {"dynamic_shapes": dynamic_shapes})
    )


def shared_copy(self, x, c, l):  # noqa: E741
    new = copy.copy(l)
    new.weight, new.bias = nn.Parameter(l.weight * c), nn.Parameter(l.bias * c)
    return new(x)


def scaled_copy(self, x, c, l):  # noqa: E741
    new = copy.deepcopy(l)
    new.weight.mul_(c)
    new.bias.mul_(c)
    return new(x)


@pytest.mark.parametrize(
    ("pattern", "replacement", "graph", "message"),
    [
        (lambda s, x: x * 3, lambda s, x: x * torch.full((4,), 3.0), lambda: of(lambda m, x: x * 3), "gives a tensor to"),
        (scaled_layer, shared_copy, lambda: of(lambda m, x: m.a(x) * 2.0, a=nn.Linear(4, 4)), r"changed a\.weight without"),
        (scaled_layer, scaled_copy, lambda: of(lambda m, x: m.a(x) * 1e300, a=nn.Linear(4, 4)), "not finite"),
        (lambda s, x: x.abs(), lambda s, x: x + 0, lambda: of(lambda m, x: x.abs(), torch.tensor([-3, 2])), "is wrong"),
        (
            lambda s, x: x.mean(0),
            lambda s, x: x.sum(0) / 3,
            lambda: of(lambda m, x: x.mean(0), dynamic_shapes=({0: torch.export.Dim("rows")},)),
            r"is wrong: for x=torch.float32 \[5, 4\]",
        ),
        (
            lambda s, x: x.exp() + 1,
            lambda s, x: x.exp_() + 1,
            lambda: of(lambda m, x: (lambda y: (y.exp() + 1) * y)(x + 1)),
            "writes into its inputs",
        ),
        (lambda s, x, y: x * 2, lambda s, x, y: x * 2, lambda: of(lambda m, x: x * 2), "does not use y"),
        (lambda s, *x: x[0] * 2, lambda s, *x: x[0] * 2, lambda: of(lambda m, x: x * 2), "variadic"),
        (lambda s, x: x * 2, lambda s, y: y * 2, lambda: of(lambda m, x: x * 2), "takes other parameters than its pattern"),
        (
            lambda s, x: x * 2,
            lambda s, x: x * 3 if x.sum() > 1e9 else x * 2,
            lambda: of(lambda m, x: x * 2),
            "asks for a value or a shape",
        ),
        (lambda s, x: nn.Linear(4, 4)(x), lambda s, x: x, lambda: of(lambda m, x: x * 2), "calls a new Linear"),
        (lambda s, x: x * 2, lambda s, x: torch.nope(x), lambda: of(lambda m, x: x * 2), "replacement raises AttributeError"),
    ],
)  # fmt: skip
def test_a_rule_that_cannot_be_right_is_an_error(pattern, replacement, graph, message):
    graph_module = graph()
    before = copy.deepcopy(graph_module)
    with pytest.raises(PassError, match=message):
        rule(pattern, replacement)(graph_module)
    assert_round_trip(before, graph_module)


def test_a_layer_without_the_bias_that_a_rule_reads_is_refused_and_others_are_rewritten():
    def pattern(self, x, linear: nn.Linear):
        return linear(x) * 2.0

    def replacement(self, x, linear):
        assert linear.bias.numel()
        return linear(x) + linear(x)

    pass_ = rule(pattern, replacement, refuses=lambda self, **_: "")
    graph_module = of(
        lambda m, x: m.a(x) * 2.0 + m.b(x) * 2.0, a=nn.Linear(4, 4), b=nn.Linear(4, 4, bias=False)
    )
    explanation = pass_.explain(graph_module)
    assert len(explanation.sites) == len(explanation.refusals) == 1
    assert "'NoneType' object has no attribute 'numel'" in str(explanation)


def test_reasons_take_the_parameters_of_the_pattern():
    def pattern(self, x, c: float):
        return x * c

    graph_module = of(lambda m, x: x * 2)
    with pytest.raises(PassError, match=r"refuses of Rule takes other parameters .*'c'"):
        rule(pattern, lambda s, x, c: c * x, refuses=lambda s, x: None)(graph_module)
    named = rule(pattern, lambda s, x, c: c * x, refuses=lambda s, c, **_: "no")
    assert "no" in str(named.explain(graph_module))


@pytest.mark.parametrize(
    ("replacement", "right", "wrong"),
    [
        (lambda s, x, y: x.sum(-1) * y.mean(-1), (X, torch.randn(3, 1)), (X, X)),
        (lambda s, x, y: x.sum(-1), (X[:0], X[:0]), (X, X)),
    ],
)
def test_each_size_is_proved(replacement, right, wrong):
    pass_ = rule(lambda s, x, y: (x * y).sum(-1), replacement)
    pass_.explain(of(lambda m, x, y: (x * y).sum(-1), *right))
    with pytest.raises(PassError, match="is wrong"):
        pass_.explain(of(lambda m, x, y: (x * y).sum(-1), *wrong))


def test_each_number_is_proved():
    def pattern(self, x, c: float):
        return x.exp() * c / c

    pass_ = rule(pattern, lambda s, x, c: x.exp() + 0)
    assert pass_.explain(of(lambda m, x: x.exp() * 2.0 / 2.0)).sites
    with pytest.raises(PassError, match="c=0.0"):
        pass_.explain(of(lambda m, x: x.exp() * 0.0 / 0.0))


def test_gradients_are_proved_in_training():
    pass_ = rule(lambda s, x: x * x, lambda s, x: x.pow(2).detach())
    graph_module = of(lambda m, x: x * x)
    assert pass_.explain(graph_module).sites
    with pytest.raises(PassError, match="the gradient of replacement"):
        pass_.explain(graph_module.train())


def changes_shape(m, x):
    y = x + 1
    y.t().t().unsqueeze_(0)
    return y


@pytest.mark.parametrize(
    ("pattern", "replacement", "graph", "reason"),
    [
        (
            lambda s, x: x.clone(),
            lambda s, x: x,
            lambda: of(lambda m, x: (lambda y: y.clone().add_(1) * y)(x + 1)),
            "is returned or written",
        ),
        (lambda s, x: x.t().t(), lambda s, x: x, lambda: of(changes_shape), "is returned or written"),
        (
            lambda s, x: x.relu().contiguous(),
            lambda s, x: x.relu(),
            lambda: of(lambda m, x: x.t().relu().contiguous().view(-1)),
            "another layout in memory",
        ),
        (lambda s, x: x * x, lambda s, x: F.silu(x), lambda: of(lambda m, x: x * x, torch.tensor([3])), "replacement raises"),
        (lambda s, x: F.dropout(x), lambda s, x: x + 0, lambda: of(lambda m, x: F.dropout(x)), "draws random numbers"),
    ],
)  # fmt: skip
def test_places_where_a_right_rule_would_show_are_refused(pattern, replacement, graph, reason):
    explanation = rule(pattern, replacement).explain(graph())
    assert not explanation.sites
    assert reason in str(explanation)


def residual(m, x):
    x = x + m.a(x).tanh()
    return x + m.b(x).tanh()


def residual_pattern(self, x, l: nn.Linear):  # noqa: E741
    return x + l(x).tanh()


@pytest.mark.parametrize(
    ("pattern", "replacement", "graph", "sites"),
    [
        (lambda s, x: x * torch.sigmoid(x), lambda s, x: F.silu(x), lambda: of(lambda m, x: (lambda y: y * y.sigmoid())(x * x.sigmoid())), 2),
        (residual_pattern, lambda s, x, l: x.sub(l(x).tanh().neg()), lambda: of(residual, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), 2),  # noqa: E741
        (
            lambda s, x, y: torch.cat([x, y], 1).exp(),
            lambda s, x, y: torch.cat([x.exp(), y.exp()], 1),
            lambda: of(lambda m, x, y: torch.cat((x, y), dim=1).exp(), X, X),
            1,
        ),
        (
            lambda s, x, y: torch.cat([x, y], -1).exp(),
            lambda s, x, y: torch.cat([x.exp(), y.exp()], -1),
            lambda: of(lambda m, x, y: torch.cat((x, y), dim=1).exp() + torch.cat((x, y), dim=0).exp().sum(), X, X),
            1,
        ),
        (lambda s, x: x[:, 1:3].exp().sum(1), lambda s, x: x.exp()[:, 1:3].sum(1), lambda: of(lambda m, x: x[:, 1:3].exp().sum(1) + x[:, 0:2].exp().sum(1)), 1),
        (lambda s, x: x.unsqueeze(-1).exp(), lambda s, x: x.exp().unsqueeze(-1), lambda: of(lambda m, x: x.unsqueeze(2).exp() + x.unsqueeze(1).exp()), 1),
        (lambda s, x: x / x.norm(), lambda s, x: x / x.pow(2).sum().sqrt(), lambda: of(lambda m, x: x / x.norm()), 1),
        (lambda s, x: x.transpose(-2, -1) * 2, lambda s, x: (x * 2).transpose(0, 1), lambda: of(lambda m, x: x.transpose(1, 0) * 2), 1),
        (lambda s, x: x.permute(1, 0) * 2, lambda s, x: (x * 2).permute(1, 0), lambda: of(lambda m, x: torch.permute(x, (1, 0)) * 2), 1),
        (
            lambda s, x, y, z: x * y + x * z,
            lambda s, x, y, z: x * (y + z),
            lambda: of(lambda m, x, y, z: y * x + z * x, X, X + 1, X + 2),
            1,
        ),
        (lambda s, x: x.float().pow(2).mean(-1), lambda s, x: x.pow(2).mean(-1), lambda: of(lambda m, x: x.float().pow(2).mean(-1)), 1),
        (lambda s, x: x * 1, lambda s, x: x + 0, lambda: of(lambda m, x: x * 1.0, torch.tensor([3])), 0),
    ],
)  # fmt: skip
def test_what_computes_the_same_is_found(pattern, replacement, graph, sites):
    graph_module = graph()
    before, pass_ = copy.deepcopy(graph_module), rule(pattern, replacement)
    assert len(pass_.explain(graph_module).sites) == sites
    after = pass_(graph_module, verify=True)
    args = tuple(torch.randn(3, 4) for node in after.graph.nodes if node.op == "placeholder")
    if sites:
        torch.testing.assert_close(after(*args), before(*args))
        assert_round_trip(before, fxopt.undo(after))


@pytest.mark.parametrize(
    ("inverse", "message"),
    [
        (lambda s, new, c: copy.deepcopy(new), "does not give a back as it was"),
        (lambda s, new, c: [new], "it has to return one layer for each of a"),
        (lambda s, new, c: nn.Linear(4, 5), "does not give a back as it was"),
        (lambda s, new, c: unscaled(new, c).train(), "does not give a back as it was"),
    ],
)
def test_a_wrong_inverse_is_an_error_before_anything_is_changed(inverse, message):
    graph_module = of(lambda m, x: m.a(x) * 2.0, a=nn.Linear(4, 4))
    before = copy.deepcopy(graph_module)
    with pytest.raises(PassError, match=message):
        rule(scaled_layer, scaled_copy, inverse=inverse)(graph_module)
    assert_round_trip(before, graph_module)


def unscaled(layer, c):
    layer = copy.deepcopy(layer)
    layer.weight.div_(c)
    layer.bias.div_(c)
    return layer


def test_undo_by_copies_is_exact_and_saved(tmp_path):
    before = traced(lambda m, x: m.a(x * 0.3))
    after = FoldNumber()(copy.deepcopy(before))
    fxopt.save(after, tmp_path, trusted=[FoldNumber])
    for carried in (fxopt.load(tmp_path, trusted=[FoldNumber]), after):
        assert_round_trip(before, fxopt.undo(carried))


class Heads(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attention, self.options = nn.MultiheadAttention(4, 2, batch_first=True), options

    def forward(self, x):
        return torch.amax(self.attention(x, x, x, **self.options)[1])


class PeakOfHeads(fxopt.Pattern):
    def pattern(self, x, attention: nn.MultiheadAttention):
        return torch.amax(attention(x, x, x, average_attn_weights=False)[1])

    def replacement(self, x, attention):
        return torch.amax(attention(x, x, value=x, average_attn_weights=False)[1].flatten())


@pytest.mark.parametrize(
    ("options", "sites"),
    [
        ({}, 0),
        ({"average_attn_weights": True}, 0),
        ({"average_attn_weights": False, "need_weights": True}, 1),
    ],
)
def test_keyword_arguments_of_a_layer_are_those_of_its_forward(options, sites):
    model, x = Heads(**options).eval(), torch.randn(3, 5, 4)
    graph = fxopt.trace(model, (x,))
    assert len(PeakOfHeads().explain(graph).sites) == sites
    torch.testing.assert_close(PeakOfHeads()(graph)(x), model(x))


@pytest.mark.parametrize(
    "pattern",
    [
        lambda self, x: torch.clamp(x, max=50),
        lambda self, x: torch.clamp(x, min=-500),
        lambda self, x: x.to(torch.int8).to(torch.int64),
        lambda self, x: torch.clamp(x, max=2),
    ],
)
def test_wrong_rules_on_integers_far_from_zero_are_found(pattern):
    graph = fxopt.trace(module(lambda self, x: pattern(self, x) * 2), (torch.arange(9),))
    with pytest.raises(PassError, match="is wrong"):
        rule(pattern, lambda self, x: x.clone())(graph)


def test_a_replacement_with_fewer_digits_is_refused():
    """Both functions give the same in float64."""
    graph = fxopt.trace(module(lambda self, x: x * torch.sigmoid(x) * 2), (torch.randn(3, 4),))
    half = rule(
        lambda self, x: x * torch.sigmoid(x), lambda self, x: F.silu(x.to(torch.bfloat16)).to(torch.float32)
    )
    (refusal,) = half.explain(graph).refusals
    assert "by rounding" in refusal[2]
    whole = rule(lambda self, x: x * torch.sigmoid(x), lambda self, x: F.silu(x))
    assert len(whole.explain(graph).sites) == 1


def written_out(self, x):
    powers = x.double().exp()
    return powers / powers.sum(-1, keepdim=True)


def test_a_right_rule_that_overflows_on_integers_far_from_zero_is_kept():
    graph = fxopt.trace(module(lambda self, x: written_out(self, x) * 2), (torch.arange(6).view(2, 3),))
    folded = rule(written_out, lambda self, x: torch.softmax(x.double(), -1))(graph, verify=True)
    assert len(fxopt.history(folded)) == 1


def test_a_result_of_integers_with_fewer_digits_is_refused():
    graph = fxopt.trace(module(lambda self, x: x * 1 + 2), (torch.arange(6),))
    rounds = rule(lambda self, x: x * 1, lambda self, x: x.to(torch.bfloat16).long())
    assert len(rounds.explain(graph).sites) == 0


class UseElu(Pattern):
    """Wrong but for layers with this activation."""

    def pattern(self, x, layer: nn.TransformerEncoderLayer):
        return layer(x)

    def replacement(self, x, layer):
        new = copy.deepcopy(layer)
        new.activation, new.is_done = nn.functional.elu, True
        return new(x)

    def refuses(self, x, layer):
        return "done" if hasattr(layer, "is_done") else None


def test_a_proof_holds_for_all_that_a_layer_is_made_of():
    def graph(*activations):
        layers = [nn.TransformerEncoderLayer(4, 2, 8, activation=a, batch_first=True) for a in activations]
        return fxopt.trace(nn.Sequential(*layers).eval(), (torch.randn(2, 3, 4),))

    gm = graph(nn.functional.elu)
    UseElu()(gm)
    assert len(fxopt.history(gm)) == 1
    for activations in ([nn.functional.elu, torch.tanh], [torch.tanh]):
        with pytest.raises(PassError, match="is wrong"):
            UseElu()(graph(*activations))


class Bounded(Pattern):
    def pattern(self, x, layer: nn.Hardtanh):
        return layer(x)

    def replacement(self, x, layer):
        return x.clamp(-1, 1)


def test_a_layer_for_which_none_comes_is_given_back():
    model = nn.Sequential(nn.Linear(4, 4), nn.Hardtanh()).eval()
    graph = Bounded()(fxopt.trace(model, (torch.randn(2, 4),)))
    assert "clamp" in graph.code
    assert isinstance(fxopt.undo(graph).get_submodule("1"), nn.Hardtanh)


def test_a_number_in_a_slice_is_a_parameter():
    class Narrow(Pattern):
        def pattern(self, x, c: int):
            return x[:, :c].exp().sum(1)

        def replacement(self, x, c):
            return x.exp()[:, :c].sum(1)

    explained = Narrow().explain(of(lambda m, x: x[:, :2].exp().sum(1) * x[:, :3].exp().sum(1)))
    assert len(explained.sites) == 2


class Halve(Pattern):
    preserves_computation = True

    def pattern(self, x, layer: nn.Linear):
        return layer(x) / 2

    def replacement(self, x, layer):
        new = copy.deepcopy(layer)
        new.weight.div_(2)
        new.bias.div_(2)
        return new(x)

    def inverse(self, new):
        old = copy.deepcopy(new)
        old.weight.mul_(2)
        old.bias.mul_(2)
        old.weight[0, 0] *= 1 + 1e-3
        return old


def test_one_wrong_weight_of_a_large_layer_is_a_wrong_inverse():
    model = module(lambda m, x: m.layer(x) / 2, layer=nn.Linear(1024, 1024))
    nn.init.constant_(model.layer.weight, 0.01)
    with pytest.raises(PassError, match="inverse of .* does not give layer back"):
        Halve()(fxopt.trace(model, (torch.randn(2, 1024),)))
