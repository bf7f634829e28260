"""The proof of a `Pattern`: wrong rules are errors, and right ones are not."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxopt
from fxopt import PassError, Pattern
from tests.modules import module
from tests.test_pattern import X, of, rule, traced


class Rule(Pattern):
    """A rule of two functions, and a condition."""

    def __init__(self, pattern, replacement, refuses=lambda **values: None):
        self.functions = pattern, replacement, refuses

    def pattern(self, x, layer: nn.Linear):
        return self.functions[0](x, layer)

    def replacement(self, x, layer):
        return self.functions[1](x, layer)

    def refuses(self, **values):
        return self.functions[2](**values)


def without_bias(layer):
    copied = copy.deepcopy(layer)
    copied.bias.zero_()
    return copied


def has_bias(layer, **_):
    return "it has a bias" if layer.bias.any() else None


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        (lambda x, a: a(x).relu(), lambda x, a: absolute(a)(x).relu()),  # right for positive weights
        (lambda x, a: a(x) * 2, lambda x, a: a(x) * (2 if isinstance(x, torch.Tensor) else 3)),
        (lambda x, a: a(x) * 2, lambda x, a: a(x) * (3 if hasattr(x, "node") else 2)),
        (lambda x, a: a(x) * 2, lambda x, a: a(x) * (2 if a.bias.any() else 3)),
        (lambda x, a: a(x.clamp(-60, 60)), lambda x, a: a(x)),
    ],
)
def test_what_is_proved_is_what_is_written(pattern, replacement):
    layer = nn.Linear(4, 4)
    nn.init.uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    graph_module = of(lambda m, x: pattern(x, m.a), a=layer)
    with torch.no_grad():
        graph_module.a.weight.abs_()
        graph_module.a.bias.zero_()
    with pytest.raises(PassError, match="is wrong|other calls of these layers"):
        Rule(pattern, replacement)(graph_module)


def absolute(layer):
    copied = copy.deepcopy(layer)
    copied.weight.abs_()
    return copied


def test_a_condition_on_weights_is_one_of_the_proof():
    functions = lambda x, a: a(x).relu(), lambda x, a: without_bias(a)(x).clamp(min=0)
    graph_module = traced(lambda m, x: m.b(m.a(x).relu()).relu())
    nn.init.zeros_(graph_module.a.bias)
    explained = Rule(*functions, has_bias).explain(graph_module)
    assert len(explained.sites) == 1
    assert [reason for _, _, reason in explained.refusals] == ["it has a bias"]
    with pytest.raises(PassError, match="is wrong"):
        Rule(*functions)(graph_module)


def test_a_replacement_that_draws_is_refused():
    draws = Rule(lambda x, a: a(x) * 2, lambda x, a: (y := a(x)) + y + 0 * torch.rand_like(y))
    explained = draws.explain(of(lambda m, x: m.a(x) * 2, a=nn.Linear(4, 4)))
    assert [reason for _, _, reason in explained.refusals] == ["replacement draws random numbers"]


def test_a_new_layer_is_filled_without_gradients():
    def merged(x, layer):
        new = nn.Linear(4, 4)
        new.weight.copy_(layer.weight * 2)
        new.bias.copy_(layer.bias * 2)
        return new(x)

    graph_module = of(lambda m, x: m.a(x) * 2, a=nn.Linear(4, 4)).train()
    assert len(Rule(lambda x, a: a(x) * 2, merged).explain(graph_module).sites) == 1


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        (lambda s, x: x.masked_fill(x == 5, 0), lambda s, x: x + 0),
        (lambda s, x: x != 0, lambda s, x: torch.ones_like(x, dtype=torch.bool)),
    ],
)
def test_the_numbers_of_a_pattern_are_tried(pattern, replacement, verify):
    graph_module = of(lambda m, x: pattern(m, x), torch.arange(3))
    with pytest.raises(PassError, match="is wrong"):
        rule(pattern, replacement)(graph_module, verify=verify)


def test_a_size_of_1_is_tried_where_the_graph_takes_it():
    wrong = rule(lambda s, x: x.squeeze(0) + 1, lambda s, x: x + 1)
    free = {"x": {0: torch.export.Dim.AUTO}}
    graph_module = of(lambda m, x: x.squeeze(0) + 1, dynamic_shapes=free)
    assert graph_module(X[:1]).shape == X[0].shape
    with pytest.warns(fxopt.VerificationWarning, match="rolled back its rewrite"):
        wrong(graph_module, verify=True)


@pytest.mark.parametrize("length", [5, 6, 7])
def test_a_free_size_is_tried_at_others_than_that_of_the_example(length):
    wrong = rule(lambda s, x: x.mean(1, keepdim=True), lambda s, x: x.sum(1, keepdim=True) / length)
    free = {"x": {1: torch.export.Dim.AUTO}}
    mean = module(lambda m, x: x.mean(1, keepdim=True)).eval()
    with pytest.raises(PassError, match="is wrong"):
        wrong(fxopt.trace(mean, (torch.randn(2, length, 4),), dynamic_shapes=free))


def test_near_numbers_are_no_ties():
    pattern, replacement = (
        lambda s, x, y: (x - y).relu() * 2.0,
        lambda s, x, y: (torch.maximum(x, y) - y) * 2.0,
    )
    graph_module = of(lambda m, x, y: (x - y).relu() * 2.0, X, X + 1).train()
    assert len(rule(pattern, replacement).explain(graph_module).sites) == 1


def test_negative_and_complex_numbers_of_a_pattern_are_tried():
    with pytest.raises(PassError, match="is wrong"):
        rule(lambda s, x: torch.where(x == -200, 0, x), lambda s, x: x * 1)(
            of(lambda m, x: torch.where(x == -200, 0, x), torch.arange(12))
        )
    graph_module = of(lambda m, x: x * 2, torch.randn(3, 4, dtype=torch.complex64))
    assert len(rule(lambda s, x: x * 2, lambda s, x: x + x).explain(graph_module).sites) == 1


def test_a_replacement_may_read_the_layer_of_its_place():
    class Reads(Pattern):
        def pattern(self, x, layer: nn.PReLU):
            return layer(x)

        def replacement(self, x, layer):
            return F.leaky_relu(x, layer.weight.item())

    before = of(lambda m, x: m.a(x), a=nn.PReLU())
    after = Reads()(copy.deepcopy(before))
    torch.testing.assert_close(after(X), before(X))


def test_other_weights_are_asked_about_with_other_numbers():
    class DropClamp(Pattern):
        def pattern(self, x, c: float, layer: nn.Embedding):
            return layer(x).clamp_min(c)

        def replacement(self, x, c, layer):
            return layer(x)

        def refuses(self, x, c, layer):
            return "it clamps" if layer.weight.min() < c else None

    table = nn.Embedding.from_pretrained(torch.full((10, 4), 2.0))
    graph_module = fxopt.trace(
        module(lambda m, x: m.a(x).clamp_min(-10.0), a=table).eval(), (torch.arange(3),)
    )
    assert len(DropClamp().explain(graph_module).sites) == 1


def test_complex_weights_are_drawn():
    drops = Rule(lambda x, a: a(x).abs(), lambda x, a: without_bias(a)(x).abs())
    layer = nn.Linear(4, 4, dtype=torch.complex64)
    nn.init.zeros_(layer.bias)
    x = torch.randn(3, 4, dtype=torch.complex64)
    graph_module = fxopt.trace(module(lambda m, x: m.a(x).abs(), a=layer).eval(), (x,))
    with pytest.raises(PassError, match="is wrong"):
        drops(graph_module)


def test_the_proof_for_the_layer_of_a_place_is_one_of_memory_too():
    def replaced(x, layer):
        return x if layer.weight.eq(torch.eye(4)).all() and not layer.bias.any() else layer(x)

    layer = nn.Linear(4, 4)
    graph_module = of(lambda m, x: m.a(x), a=layer)
    with torch.no_grad():
        graph_module.a.weight.copy_(torch.eye(4))
        graph_module.a.bias.zero_()
    with pytest.raises(PassError, match="is returned or written, and the replacement is in other memory"):
        Rule(lambda x, a: a(x), replaced)(graph_module)
