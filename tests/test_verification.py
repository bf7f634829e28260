"""`verify=True`: a site that computes something else is found by running it, rolled back and named."""

import copy
import dataclasses
import operator
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from transformers import LlamaConfig, LlamaModel

import fxopt
from fxopt import (
    ChangeTrueDivToMulByInverse,
    EliminateCommonSubexpressions,
    FuseBatchNorm1dInLinear,
    FuseBatchNorm2dInConv2d,
    FuseBiasInLinear,
    MergeLinears,
    Transformation,
    UnverifiedWarning,
    VerificationWarning,
    compose,
    history,
)
from fxopt.obstacles.foldable import Fold
from fxopt.passes import available, fold_batch_norms
from fxopt.rewriting.verification import Verifier
from fxopt.testing import assert_round_trip, randomise
from tests.hazards.sites import Use
from tests.modules import module
from tests.small_models import MODELS


class Thirteen(nn.Module):
    """Thirteen linear layers, one after the other, with divisions between them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(13))

    def forward(self, x):
        for layer in self.layers:
            x = F.gelu(layer(x)) / 3
        return x


X = torch.randn(3, 4)


def thirteen():
    return fxopt.trace(randomise(Thirteen()).eval(), (X,))


class ForgetsABias(FuseBiasInLinear):
    """Forgets the bias at one site of thirteen."""

    def apply(self, rewriter, site):
        node = super().apply(rewriter, site)
        if node.target == "layers.7":
            with torch.no_grad():
                rewriter.graph_module.get_submodule("layers.7").weight[:, -1] = 0
        return node


def test_a_forgotten_bias_is_found_and_named():
    graph_module = thirteen()
    expected = graph_module(X)
    with pytest.warns(
        VerificationWarning, match=r"layers_7 \(in layers.7, from .*\): layers_7 differs by"
    ) as caught:
        ForgetsABias()(graph_module, verify=True)
    assert caught[0].filename == __file__
    assert len(ForgetsABias().get_transformed_nodes(graph_module)) == 12
    assert graph_module.get_submodule("layers.7").bias is not None
    torch.testing.assert_close(graph_module(X), expected)
    before = thirteen()
    fxopt.undo(graph_module)
    assert graph_module.code == before.code


def test_explain_lists_it_as_a_refusal_and_changes_nothing():
    graph_module = thirteen()
    before = copy.deepcopy(graph_module)
    with pytest.warns(VerificationWarning):
        explanation = ForgetsABias().explain(graph_module, verify=True)
    assert len(explanation.sites) == 12
    assert [row[0] for row in explanation.refusals] == ["layers_7"]
    assert_round_trip(before, graph_module)
    with pytest.warns(VerificationWarning):
        explanations = compose(MergeLinears(), ForgetsABias()).explain(graph_module, verify=True)
    assert [(e.name, len(e.sites), len(e.refusals)) for e in explanations] == [
        ("MergeLinears", 0, 0),
        ("ForgetsABias", 12, 1),
    ]
    assert_round_trip(before, graph_module)


class DividesTwice(ChangeTrueDivToMulByInverse):
    """Wrong in float64 only by what float32 would round away."""

    def apply(self, rewriter, site):
        node = super().apply(rewriter, site)
        rewriter.set(node, args=(node.args[0], node.args[1] * (1 + 1e-8)))
        return node


def test_errors_that_float32_would_hide_are_found():
    with pytest.warns(VerificationWarning, match="differs by 1e-08"):
        assert DividesTwice()(thirteen(), verify=True) is not None


class ForgetsEpsilon(FuseBatchNorm2dInConv2d):
    def apply(self, rewriter, site):
        norm = rewriter.graph_module.get_submodule(site.node.target)
        norm.eps, eps = 0.0, norm.eps
        scale, shift = fold_batch_norms.scale_and_shift(norm)
        norm.eps = eps
        return super().apply(rewriter, dataclasses.replace(site, scale=scale, shift=shift))


def test_a_forgotten_epsilon_is_found():
    layers = randomise(nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3))).eval()
    layers[1].eps = 1e-4
    image = torch.randn(1, 2, 4, 4)
    with pytest.warns(VerificationWarning, match="_1 "):
        ForgetsEpsilon()(fxopt.trace(layers, (image,)), verify=True)


class DropsTheUser(FuseBatchNorm1dInLinear):
    """Blind to a second user of the layer."""

    def match(self, graph_module):
        for norm in graph_module.graph.find_nodes(op="call_module", target="norm"):
            (layer,), module = norm.args, graph_module.get_submodule("norm")
            scale_and_shift = fold_batch_norms.scale_and_shift(module)
            yield Fold((layer,), norm, True, *scale_and_shift, 0, {"norm": None})


def test_another_user_of_a_value_that_changes_is_seen():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x):
            y = self.layer(x)
            return self.norm(y), torch.relu(y)

    with pytest.warns(VerificationWarning, match="relu differs by"):
        DropsTheUser()(fxopt.trace(randomise(Model()).eval(), (X,)), verify=True)


class HardtanhToNothing(Transformation):
    """Hand-written, and wrong for large values alone."""

    preserves_computation = True

    def transform(self, graph_module):
        for node in graph_module.graph.find_nodes(op="call_function", target=F.hardtanh):
            node.replace_all_uses_with(node.args[0])
            graph_module.graph.erase_node(node)
        return graph_module


@pytest.mark.parametrize(
    "use",
    [
        lambda m, x: F.hardtanh(x + 1, -6.0, 6.0) * 2,
        lambda m, x: F.hardtanh(x, -6.0, 6.0) * 2,
        lambda m, x: F.hardtanh(m.layer(x), -12.0, 12.0),
    ],
)
def test_a_hand_written_transformation_is_one_site(use):
    graph_module = fxopt.trace(randomise(Use(use, layer=nn.Linear(4, 4)).eval()), (torch.randn(40, 4),))
    code = graph_module.code
    with pytest.warns(VerificationWarning, match=r"HardtanhToNothing\(\) was rolled back: "):
        HardtanhToNothing()(graph_module, verify=True)
    assert graph_module.code == code
    assert history(graph_module) == ()


@dataclasses.dataclass(frozen=True)
class Drops(fxopt.Rewrite):
    """Leaves a function out: `hardtanh` is wrong for large values alone."""

    function: Any

    preserves_computation = True

    def match(self, graph_module):
        yield from graph_module.graph.find_nodes(op="call_function", target=self.function)

    def apply(self, rewriter, node):
        rewriter.replace_uses(node, node.args[0])
        rewriter.erase(node)


@pytest.mark.parametrize(
    ("use", "label"),
    [
        (lambda m, x: F.hardtanh(x) + 1, "x"),
        (lambda m, x: F.hardtanh(m.layer(x), -6.0, 6.0), "layer"),  # a mixture, that gets no multiples of 6
    ],
)
def test_what_takes_the_place_of_a_value_is_compared_on_large_numbers(use, label):
    said = verified(Drops(F.hardtanh), use, torch.randn(40, 4), layer=nn.Linear(4, 4))
    assert f": {label} differs" in str(said)


def test_a_layer_that_takes_the_place_of_another_call_is_run():
    said = verified(
        EliminateCommonSubexpressions(),
        lambda m, x: (m.layer(x).exp(), m.layer(x).tanh()),
        X,
        layer=nn.Linear(4, 4),
    )
    assert isinstance(said, torch.fx.GraphModule), said
    assert len(said.graph.find_nodes(op="call_module", target="layer")) == 1


class DividesAnything(ChangeTrueDivToMulByInverse):
    """Blind to what follows, and to what is divided."""

    def match(self, graph_module):
        yield from graph_module.graph.find_nodes(op="call_function", target=operator.truediv)


def verified(pass_, use, *inputs, **layers):
    """Apply a pass to a model with verification; returns the graph module, or the warning."""
    graph_module = fxopt.trace(randomise(Use(use, **layers).eval()), inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            return pass_(graph_module, verify=True)
        except (VerificationWarning, UnverifiedWarning) as warning:
            return str(warning)


WHOLE = torch.randn(40, 12)


@pytest.mark.parametrize("x", [X, WHOLE])
@pytest.mark.parametrize(
    ("use", "says"),
    [
        (lambda m, x: (x / 49).floor(), "floor differs"),
        (lambda m, x: (x / 49 >= 1).any(), "ge differs"),
        (lambda m, x: 1 / ((x / 49).abs() - 1), "differs"),
        (lambda m, x: (z := x * 0, z.t().copy_((x / 49).t()), z.floor())[2], "floor differs"),
        (lambda m, x: x.long() / 49, "truediv differs"),
    ],
)
def test_rounding_that_what_follows_makes_more_of_is_seen(use, says, x):
    assert says in verified(DividesAnything(), use, x)


@pytest.mark.parametrize(
    "use",
    [
        lambda m, x: m.layer(x / 49).floor(),
        lambda m, x: (x / 49 - x / 7 / 7).tanh(),
        lambda m, x: (x / 49).sum().exp(),
        lambda m, x: torch.linalg.cholesky(x[:, :3] / 49),
        lambda m, x: torch.rand_like(x / 49),
    ],
)
def test_rounding_that_stays_small_is_no_difference(use):
    assert isinstance(verified(DividesAnything(), use, X, layer=nn.Linear(4, 4)), torch.fx.GraphModule)


def test_what_follows_a_mixture_may_round():
    model = module(
        lambda m, x: m.norm(m.conv(x)).floor(), conv=nn.Conv2d(1, 3, 1), norm=nn.BatchNorm2d(3, eps=0.305)
    )
    nn.init.constant_(model.conv.bias, 1.305**0.5)  # where x is 0, the norm gives 1 or a little less
    graph_module = fxopt.trace(model, (torch.ones(1, 1, 4, 4),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FuseBatchNorm2dInConv2d()(graph_module, verify=True)


class Reuses(fxopt.Rewrite):
    """Takes the first result of a function for all others, whatever was written in between."""

    preserves_computation = True

    def match(self, graph_module):
        first, *others = graph_module.graph.find_nodes(op="call_method", target="tanh")
        yield from ((first, other) for other in others)

    def apply(self, rewriter, site):
        rewriter.replace_uses(site[1], site[0])
        rewriter.erase(site[1])


@pytest.mark.parametrize(
    ("write", "is_right"),
    [
        (lambda h: h.t().add_(1), False),
        (lambda h: h.__setitem__(0, 5.0), False),
        (lambda h: torch.einsum("ij->ji", h).mul_(2), False),
        (lambda h: h.exp().add_(1), True),
    ],
)
def test_writes_between_the_nodes_of_a_site_are_run(write, is_right):
    @dataclasses.dataclass
    class Pair:
        node: torch.fx.Node
        other: torch.fx.Node

    class ReusesPairs(Reuses):
        def match(self, graph_module):
            yield from (Pair(*nodes) for nodes in super().match(graph_module))

        def apply(self, rewriter, site):
            super().apply(rewriter, (site.node, site.other))

    said = verified(ReusesPairs(), lambda m, x: (h := x * 1, h.tanh(), write(h), h.tanh() + 1)[1:], X)
    assert isinstance(said, torch.fx.GraphModule) == is_right, said


class Overwrites(fxopt.Rewrite):
    preserves_computation = True

    def match(self, graph_module):
        yield from graph_module.graph.find_nodes(op="call_method", target="tanh")

    def apply(self, rewriter, node):
        rewriter.set(node, target="tanh_")


def test_a_write_into_an_input_is_seen():
    assert "x differs" in verified(Overwrites(), lambda m, x: x.tanh(), X)


class DropsContiguous(fxopt.Rewrite):
    preserves_computation = True

    def match(self, graph_module):
        yield from graph_module.graph.find_nodes(op="call_method", target="contiguous")

    def apply(self, rewriter, node):
        rewriter.set(node, target="positive")


def test_the_layout_that_what_follows_needs_is_seen():
    said = verified(DropsContiguous(), lambda m, x: x.t().contiguous().view(-1), X)
    assert "view no longer runs" in said
    said = verified(DropsContiguous(), lambda m, x: x.t().contiguous() + 1, X)
    assert isinstance(said, torch.fx.GraphModule)


class Narrows(fxopt.Rewrite):
    preserves_computation = True

    def match(self, graph_module):
        yield from graph_module.graph.find_nodes(op="call_method", target="long")

    def apply(self, rewriter, node):
        rewriter.set(node, target="int")


class Removes(fxopt.ReversibleRewrite):
    """Gives the input of a function in the place of its result, which is wrong of negative numbers."""

    preserves_computation = True

    def __init__(self, name):
        self.name = name

    def match(self, gm):
        yield from (node for node in gm.graph.nodes if node.name == self.name)

    def apply(self, rewriter, node):
        rewriter.replace_uses(node, node.args[0])
        rewriter.erase(node)


class Indexes(Removes):
    """Looks rows up by `index_select`, which takes no negative index; right for what is an index."""

    def apply(self, rewriter, node):
        table, index = node.args
        chosen = rewriter.create("call_function", torch.index_select, (table, 0, index), before=node)
        rewriter.replace_uses(node, chosen)
        rewriter.erase(node)


@pytest.mark.parametrize(
    ("function", "pass_", "says"),
    [
        (lambda self, x, i: x[:6] + torch.abs(i - i[0]), Removes("abs_1"), "sub differs"),
        (lambda self, x, i: x[(i - 3).clamp(min=0)], Removes("clamp"), "sub differs"),
        (lambda self, x, i: x.gather(0, i.clamp(min=0)), Removes("clamp"), "gather no longer runs"),
        (lambda self, x, i: x[i], Indexes("getitem"), ""),
        (
            lambda self, x, i: F.one_hot(i.clamp(min=0, max=127), 128),
            Removes("clamp"),
            "one_hot no longer runs",
        ),
    ],
)
@pytest.mark.parametrize("rows", [200, 400])
def test_integers_of_both_signs_are_drawn_where_they_are_no_indices(function, pass_, says, rows):
    inputs = torch.randn(rows), torch.arange(6)
    traced = fxopt.trace(module(function), inputs)

    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always", VerificationWarning)
        pass_(traced, verify=True)

    assert bool(raised) == bool(says)
    assert says in "".join(str(warning.message) for warning in raised)
    assert len(history(traced)) == (0 if says else 1)


def test_the_same_numbers_of_another_dtype_are_seen():
    said = verified(Narrows(), lambda m, x: x.long(), X)
    assert "long is torch.int32 [3, 4], it was torch.int64 [3, 4]" in str(said)


class OnlyFloat32(nn.Module):
    def forward(self, x):
        assert x.dtype == torch.float32
        return x * 3


class Calls(fxopt.Rewrite):
    """Calls a layer with the input times a factor."""

    preserves_computation = True

    def __init__(self, factor):
        self.factor = factor

    def match(self, graph_module):
        yield from graph_module.graph.find_nodes(op="call_module", target="layer")

    def apply(self, rewriter, node):
        scaled = rewriter.create("call_function", operator.mul, (node.args[0], self.factor), before=node)
        rewriter.set(node, args=(scaled,))


def test_what_knows_no_float64_is_run_in_its_own_dtype():
    # Fused attention on a GPU rounds by 1e-5 of the largest value.
    for factor, is_right in ((1.0, True), (1.00001, True), (1.00002, False), (1.001, False)):
        graph_module = fxopt.trace(
            Use(lambda m, x: m.layer(x), layer=OnlyFloat32()), (X,), leaf_modules=["layer"]
        )
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            Calls(factor)(graph_module, verify=True)
        wanted = [] if is_right else [VerificationWarning]
        assert [w.category for w in said] == wanted, [str(w.message) for w in said]


class WithoutThousand(fxopt.Rewrite):
    """Leaves out adding and subtracting 1000 in float32, and multiplies by a factor instead."""

    preserves_computation = True

    def __init__(self, factor):
        self.factor = factor

    def match(self, graph_module):
        yield from graph_module.graph.find_nodes(op="call_function", target=operator.sub)

    def apply(self, rewriter, node):
        added = node.args[0]
        converted = added.args[0]
        scaled = rewriter.create("call_function", operator.mul, (converted.args[0], self.factor), before=node)
        rewriter.replace_uses(node, scaled)
        for each in (node, added, converted):
            rewriter.erase(each)


@pytest.mark.parametrize(("factor", "is_right"), [(1.0, True), (1.001, False)])
def test_a_graph_that_names_float32_may_round_as_the_one_before(factor, is_right):
    # The first graph rounds by 6e-5, and runs in float64 only if the named dtype becomes float64.
    said = verified(WithoutThousand(factor), lambda m, x: (x.to(torch.float32) + 1000.0) - 1000.0, X)
    assert isinstance(said, torch.fx.GraphModule) == is_right, said


class DropsTheMask(fxopt.Rewrite):
    """Drops a cast, and the mask behind it."""

    preserves_computation = True

    def match(self, graph_module):
        yield from graph_module.graph.find_nodes(op="call_method", target="masked_fill")

    def apply(self, rewriter, node):
        converted = node.args[0]
        rewriter.replace_uses(node, converted.args[0])
        rewriter.erase(node)
        rewriter.erase(converted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_mask_of_minus_infinity_is_no_rounding(dtype):
    forward = lambda m, x: (x * 2).to(dtype).masked_fill(x > 0, -torch.inf).softmax(-1, dtype=torch.float32)  # noqa: E731
    said = verified(DropsTheMask(), forward, X.to(dtype))
    assert isinstance(said, str), said


@dataclasses.dataclass
class Held:
    value: torch.Tensor


class Holds(nn.Module):
    def forward(self, x):
        return Held(x * 3)


@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_tensors_in_an_object_are_compared(factor):
    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m, module_qualified_name):
            return isinstance(m, Holds)

    model = Use(lambda m, x: m.layer(x), layer=Holds())
    graph_module = torch.fx.GraphModule(model, Tracer().trace(model))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        Calls(factor)(graph_module, verify=(X,))
    assert [w.category for w in said] == ([VerificationWarning] if factor > 1 else [])


def test_complex_numbers_are_computed_in_complex128():
    layers = {name: nn.Linear(4, 4, dtype=torch.complex64) for name in ("a", "b")}
    x = torch.randn(3, 4, dtype=torch.complex64)
    graph_module = fxopt.trace(Use(lambda m, x: (m.a(x), m.b(x).conj()), **layers), (x,))
    with warnings.catch_warnings():
        warnings.simplefilter("error", VerificationWarning)
        MergeLinears()(copy.deepcopy(graph_module), verify=True)
    graph_module = fxopt.trace(Use(lambda m, x: torch.conj(m.a(x)) * 2, **layers), (x,))
    with pytest.warns(VerificationWarning, match="conj"):
        Drops(torch.conj)(graph_module, verify=True)


@pytest.mark.parametrize("shapes", ["none", "example inputs", "FakeTensorProp"])
def test_shapes_come_from_metadata_or_from_example_inputs(shapes):
    graph_module = torch.fx.symbolic_trace(randomise(Thirteen()).eval())
    if shapes == "FakeTensorProp":
        FakeTensorProp(graph_module, FakeTensorMode(allow_non_fake_inputs=True)).propagate(X)
    verify = (X,) if shapes == "example inputs" else True
    category = UnverifiedWarning if shapes == "none" else VerificationWarning
    text = "run torch.fx.passes.fake_tensor_prop.FakeTensorProp, or give example inputs"
    with pytest.warns(category, match=text if shapes == "none" else "layers.7"):
        ForgetsABias()(graph_module, verify=verify)


@pytest.mark.long
@pytest.mark.parametrize("name", ["bert", "resnet", "llama", "t5"])
def test_right_passes_are_found_right(name):
    model, inputs = MODELS[name]()
    graph_module = fxopt.trace(randomise(model).eval(), (), inputs)
    for cls in available().values():
        with warnings.catch_warnings():
            warnings.simplefilter("error", VerificationWarning)
            warnings.simplefilter("error", UnverifiedWarning)
            checked = cls()(copy.deepcopy(graph_module), verify=True)
        assert checked.code == cls()(copy.deepcopy(graph_module)).code


@dataclasses.dataclass(frozen=True)
class Doubled(fxopt.Rewrite):
    """Twice the number in each multiplication, and in each division so many times that of before."""

    divided: float

    preserves_computation = True

    def match(self, graph_module):
        yield graph_module.graph.output_node()

    def apply(self, rewriter, _):
        for target, factor in ((operator.mul, 2), (operator.truediv, self.divided)):
            for node in rewriter.graph.find_nodes(op="call_function", target=target):
                rewriter.set(node, args=(node.args[0], factor * node.args[1]))


@pytest.mark.parametrize("divided", [2, 3])
@pytest.mark.parametrize(
    ("use", "is_right"),
    [
        (lambda m, x: m.layer(x * 3) / 5, True),
        (lambda m, x: m.layer(m.layer(x * 3).relu()) / 5, True),
        (lambda m, x: m.layer((x * 3).relu_()) / 5 + 1, True),
        (lambda m, x: (m.layer(x * 3) / 5).exp().floor(), True),
        (lambda m, x: ((y := m.layer(x * 3)) / 5, y), False),
        (lambda m, x: (x * 3).sigmoid() / 5, False),
        (lambda m, x: m.with_bias(x * 3) / 5, False),
        (lambda m, x: ((y := x * 3), (z := m.layer(y)), z.add_(1), z / 5)[3], False),
        (lambda m, x: ((y := x * 3), (z := m.layer(y)), z[0].fill_(1), z / 5)[3], False),
        (lambda m, x: ((y := x * 3), (z := m.layer(y)), z[0].floor_(), z / 5)[3], False),
    ],
)
def test_untouched_nodes_between_changed_ones_are_run_with_them(use, is_right, divided):
    layers = {"layer": nn.Linear(4, 4, bias=False), "with_bias": nn.Linear(4, 4)}
    said = verified(Doubled(divided), use, X, **layers)
    if is_right and divided == 2:
        assert isinstance(said, torch.fx.GraphModule), said
    else:
        assert "differs by" in said


def test_untouched_nodes_among_which_others_write_are_not_run(monkeypatch):
    pieces, compared = [], Verifier._compared
    monkeypatch.setattr(
        Verifier, "_compared", lambda self, piece: pieces.append(piece) or compared(self, piece)
    )
    layers = {"layer": nn.Linear(4, 4, bias=False)}
    verified(Doubled(2), lambda m, x: m.layer(x * 3) / 5, X, **layers)
    assert [len(piece.between) for piece in pieces] == [0, 1]
    pieces.clear()
    verified(Doubled(2), lambda m, x: ((z := m.layer(x * 3)), z.t().add_(1), z / 5)[2], X, **layers)
    assert [len(piece.between) for piece in pieces] == [0]


@dataclasses.dataclass(frozen=True)
class AlmostTheSame(fxopt.Rewrite):
    """A call becomes one that gives nearly the same, and each multiplication is spelled in another way."""

    target: Any
    options: Any

    preserves_computation = True

    def match(self, graph_module):
        yield graph_module.graph.output_node()

    def apply(self, rewriter, _):
        for node in rewriter.graph.find_nodes(op="call_function", target=self.target):
            rewriter.set(node, **self.options)
        for node in rewriter.graph.find_nodes(op="call_function", target=operator.mul):
            rewriter.set(node, target=torch.mul)


@pytest.mark.parametrize(
    ("use", "target", "options"),
    [
        (lambda m, x: F.gelu(x).round() * 2, F.gelu, {"kwargs": {"approximate": "tanh"}}),
        (lambda m, x: (F.gelu(x) > 0.3) * x, F.gelu, {"kwargs": {"approximate": "tanh"}}),
        (lambda m, x: F.gelu(x).to(torch.int32) * 2, F.gelu, {"kwargs": {"approximate": "tanh"}}),
        (lambda m, x: m.layer(torch.where(x > 3, x, x / 2)) * 2, operator.gt, {"target": operator.ge}),
    ],
)
def test_untouched_nodes_between_do_not_hide_a_small_fault(use, target, options):
    said = verified(AlmostTheSame(target, options), use, X, layer=nn.Linear(4, 4))
    assert "differs by" in said


class SixTimes(fxopt.Rewrite):
    """Six times in the place of three times."""

    preserves_computation = True

    def match(self, graph_module):
        yield from graph_module.graph.find_nodes(op="call_function", target=operator.mul)

    def apply(self, rewriter, site):
        if site.args[1] == 3:
            rewriter.set(site, args=(site.args[0], 6))


@pytest.mark.parametrize(
    "use",
    [
        lambda m, x: ((y := x * 3), m.layer(y), y.fill_(7.0) / 5)[1:],
        lambda m, x: ((y := x * 3), m.layer(y[0]), y.fill_(7.0) / 5)[1:],
        lambda m, x: ((y := x * 3), y.softmax(-1), y.zero_(), y / 5)[1:],
        lambda m, x: ((y := x * 3), m.layer(y.detach()), y.copy_(torch.ones(3, 4)))[1:],
    ],
)
def test_what_is_read_before_it_is_overwritten_is_compared_as_it_was_read(use):
    layer = nn.Linear(4, 4)
    assert "differs by" in verified(SixTimes(), use, X, layer=layer)


@dataclasses.dataclass(frozen=True)
class Promises(FuseBiasInLinear):
    limit: int = 0

    def ensures(self, graph_module):
        count = len(graph_module.graph.find_nodes(op="call_function", target=F.pad))
        return f"there are {count} pads" if count > self.limit else None


def test_a_promise_that_is_broken_names_the_pass_and_those_before_it():
    graph_module = thirteen()
    before = copy.deepcopy(graph_module)
    passes = compose(ChangeTrueDivToMulByInverse(), Promises(20), Promises(3))
    with pytest.raises(
        fxopt.PassError, match=r"Promises\(limit=3\) broke its promise: there are 13 pads.*Applied"
    ):
        compose(Promises(20), Promises(3))(Promises(20)(thirteen()))
    with pytest.raises(fxopt.PassError, match=r"Applied before it: .*ChangeTrueDivToMulByInverse\(\)"):
        compose(ChangeTrueDivToMulByInverse(), Promises(3))(graph_module)
    assert_round_trip(before, graph_module)
    passes.parts[0](graph_module)


class HardCodes(Removes):
    """Divides a sum by the length of the example."""

    def apply(self, rewriter, node):
        length = int(node.args[0].meta["val"].shape[1])
        total = rewriter.create("call_function", torch.sum, (node.args[0], 1), before=node)
        mean = rewriter.create("call_function", operator.truediv, (total, length), before=node)
        rewriter.replace_uses(node, mean)
        rewriter.erase(node)


class Squeezes(Removes):
    """Removes all dimensions of size 1, in the place of one of them."""

    def apply(self, rewriter, node):
        squeezed = rewriter.create("call_method", "squeeze", (node.args[0],), before=node)
        rewriter.replace_uses(node, squeezed)
        rewriter.erase(node)


@pytest.mark.parametrize(
    ("function", "pass_", "says"),
    [
        (lambda self, x: x.mean(1) * 2, HardCodes("mean"), "truediv differs"),
        (lambda self, x: x[:, :1].squeeze(1) * 2, Squeezes("squeeze"), "squeeze_1 is"),
    ],
)
@pytest.mark.parametrize("length", [3, 40])
def test_free_sizes_are_others_than_in_the_example(function, pass_, says, length):
    free = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    traced = fxopt.trace(module(function), (torch.randn(2, length),), dynamic_shapes=({**free},))
    size = traced.graph.find_nodes(op="placeholder")[0].meta["val"].shape[1]
    with pytest.warns(VerificationWarning, match=says):
        pass_(traced, verify=True)
    assert not history(traced)
    assert not isinstance(size, int)
    assert size.node.expr.is_Symbol, "a pass that asks for a number has fixed it"
    pass_(traced)
    assert size.node.expr.is_Symbol


class Unclamps(Removes):
    """Right, where no position is beyond the limit of the clamp."""


@pytest.mark.parametrize(("most", "is_right"), [(16, True), (64, False)])
def test_sizes_that_a_graph_refuses_are_not_tried(most, is_right):
    function = lambda self, x: x + torch.arange(x.shape[0]).clamp(max=15)[:, None]  # noqa: E731
    free = {0: torch.export.Dim("rows", max=most)}
    traced = fxopt.trace(module(function), (torch.randn(10, 3),), dynamic_shapes=(free,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", VerificationWarning)
        Unclamps("clamp")(traced, verify=True)
    assert len(history(traced)) == is_right


class Compares(Removes):
    """Compares a mask with another number, which integers far from zero do not show."""

    def apply(self, rewriter, node):
        other = rewriter.create("call_function", operator.eq, (node.args[0], 77777), before=node)
        rewriter.replace_uses(node, other)
        rewriter.erase(node)


def test_integers_near_zero_are_tried_as_well():
    inputs = torch.randn(2, 5), torch.ones(2, 5, dtype=torch.long)
    traced = fxopt.trace(module(lambda self, x, m: x.masked_fill(m == 0, -1.0)), inputs)
    with pytest.warns(VerificationWarning, match="eq_1"):
        Compares("eq")(traced, verify=True)


class LowRank(fxopt.Pattern):
    """It factors its own factors, too, as far as the tolerance allows."""

    preserves_computation, tolerance = False, 0.5

    def pattern(self, x, linear: nn.Linear):
        return linear(x)

    def refuses(self, x, linear):
        return "it is small" if min(linear.weight.shape) < 8 else None

    def replacement(self, x, linear):
        rank = min(linear.weight.shape) * 3 // 4
        left, values, right = torch.linalg.svd(linear.weight)
        down, up = nn.Linear(linear.in_features, rank, bias=False), copy.deepcopy(linear)
        down.weight.copy_(right[:rank])
        up.weight = nn.Parameter(left[:, :rank] * values[:rank])
        up.in_features = rank
        return up(down(x))


@pytest.mark.parametrize("seed", range(4))
def test_what_was_put_back_is_verified_with_the_next_site(seed):
    torch.manual_seed(seed)
    layers = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh())))
    traced = fxopt.trace(layers, (torch.randn(2, 32),))
    before = copy.deepcopy(traced)
    with pytest.warns(fxopt.VerificationWarning, match="rolled back its rewrite"):
        LowRank()(traced, verify=True)
    assert fxopt.history(traced)
    assert_round_trip(before, fxopt.undo(traced))


def test_constants_made_of_rounded_values_are_kept_in_a_float64_graph():
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    model = LlamaModel(LlamaConfig(vocab_size=90, **sizes)).eval().double()  # its angles are in float32
    inputs = {"input_ids": torch.randint(1, 90, (2, 9)), "use_cache": False}
    traced = fxopt.trace(model, (), inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error", VerificationWarning)
        folded = fxopt.FoldConstants()(copy.deepcopy(traced), verify=True)
    assert "FoldConstants" in str(history(folded))
    with torch.no_grad():
        assert torch.equal(folded(**inputs)[0], traced(**inputs)[0])
