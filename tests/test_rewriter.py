"""The rewriter's log, played back: by rolling back after an error, and by undo beside other changes."""

import copy
import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxopt
from fxopt import (
    PassError,
    ReversibleRewrite,
    ReversibleTransformation,
    Transformation,
    UndoError,
    history,
    undo,
)
from fxopt.rewriting.fingerprint import fingerprint
from fxopt.rewriting.record import MARKS
from fxopt.rewriting.rewriter import Rewriter
from fxopt.rewriting.snapshot import Snapshot
from fxopt.rewriting.weights import Left
from fxopt.testing import assert_round_trip, randomise
from tests.modules import module
from tests.users_passes import pickled

X = torch.randn(3, 4)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.act = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU()

    def forward(self, x):
        a = self.first(x)
        b = self.second(a)
        return a + b, self.act(b), -a


def traced():
    return torch.fx.symbolic_trace(randomise(Model()))


def nodes_of(graph_module):
    return {node.name: node for node in graph_module.graph.nodes}


@dataclasses.dataclass(frozen=True)
class Changes(ReversibleRewrite):
    """Changes the graph as a function says, once."""

    change: Callable[..., Any]

    def match(self, graph_module):
        if not self.get_transformed_nodes(graph_module):
            yield graph_module.graph.output_node()

    def apply(self, rewriter, node):
        self.change(rewriter, nodes_of(rewriter.graph_module))
        return node


def test_what_a_node_does_not_have_is_an_error():
    rewriter = Rewriter(traced())
    with pytest.raises(TypeError, match="set changes op, target, args, kwargs and val, not taget"):
        rewriter.set(next(iter(rewriter.graph.nodes)), taget=torch.relu)


def use_second_for_first(rewriter, nodes):
    rewriter.replace_uses(nodes["first"], nodes["second"])


def wrap_first(rewriter, nodes):
    wrapped = rewriter.create("call_function", torch.relu, (nodes["first"],), before=nodes["second"])
    rewriter.replace_uses(nodes["first"], wrapped)


def read_first_in_two_ways(rewriter, nodes):
    read = rewriter.create("call_function", torch.relu, (nodes["first"],), before=nodes["second"])
    rewriter.set(nodes["neg"], args=(read,))
    rewriter.replace_uses(nodes["act"], read)


def drop_act(rewriter, nodes):
    rewriter.replace_uses(nodes["act"], nodes["second"])
    rewriter.erase(nodes["act"])


def drop_all_but_first(rewriter, nodes):
    rewriter.set(nodes["output"], args=(nodes["first"],))
    for name in ("neg", "act", "add", "second"):
        rewriter.erase(nodes[name])
    rewriter.remove_module("second")


def replace_act(rewriter, nodes):
    rewriter.replace_module("act", nn.SiLU())


def test_a_module_that_is_not_there_is_not_replaced():
    with pytest.raises(PassError, match="no module 'actt'; add_module adds one"):
        Rewriter(traced()).replace_module("actt", nn.SiLU())


def replace_act_again(rewriter, nodes):
    rewriter.replace_module("act", nn.GELU())


def replace_second(rewriter, nodes):
    rewriter.replace_module("second", nn.Linear(4, 4, bias=False))


def turn_add(rewriter, nodes):
    rewriter.set(nodes["add"], args=(*reversed(nodes["add"].args),))


def multiply(rewriter, nodes):
    rewriter.set(nodes["add"], target=operator.mul, args=(nodes["first"], 1))


def add_a_scale(rewriter, nodes):
    path = rewriter.add_module("", "scale", nn.Linear(4, 4))
    scaled = rewriter.create("call_module", path, (nodes["second"],), before=nodes["add"])
    rewriter.replace_input(nodes["add"], nodes["second"], scaled)


def read_the_scaled(rewriter, nodes):
    rewriter.replace_input(nodes["neg"], nodes["first"], nodes["scale"])


def double_the_scaled(rewriter, nodes):
    doubled = rewriter.create("call_function", operator.mul, (nodes["scale"], 2), before=nodes["output"])
    rewriter.erase(doubled)


def stop_returning_neg(rewriter, nodes):
    rewriter.set(nodes["output"], args=((nodes["add"], nodes["act"]),))


def erase_neg(rewriter, nodes):
    rewriter.erase(nodes["neg"])


def use_second_for_act(rewriter, nodes):
    rewriter.replace_uses(nodes["act"], nodes["second"])


def erase_act(rewriter, nodes):
    rewriter.erase(nodes["act"])


def erase_second(rewriter, nodes):
    rewriter.set(nodes["output"], args=(nodes["first"],))
    for name in ("neg", "act", "add", "second"):
        rewriter.erase(nodes[name])


def replace_uncalled_second(rewriter, nodes):
    rewriter.replace_module("second", nn.Linear(4, 4, bias=False))


def turn_second(rewriter, nodes):
    rewriter.set(nodes["second"], op="call_function", target=torch.tanh)


def drop_neg(rewriter, nodes):
    rewriter.set(nodes["output"], args=((nodes["add"], nodes["add"]),))
    rewriter.erase(nodes["neg"])


def use_first_for_neg(rewriter, nodes):
    rewriter.replace_uses(nodes["neg"], nodes["first"])
    rewriter.erase(nodes["neg"])


def describe_neg(rewriter, nodes):
    rewriter.set(nodes["neg"], val=torch.empty(3, 4, dtype=torch.bfloat16))


def fold_second_into_first(rewriter, nodes):
    rewriter.replace_module("first", nn.Linear(4, 4, bias=False))
    rewriter.replace_uses(nodes["second"], nodes["first"])


def replace_weight_of_second(rewriter, nodes):
    rewriter.swap({"second.weight": nn.Parameter(torch.ones(4, 4))})


def describe_second(rewriter, nodes):
    rewriter.set(nodes["second"], val=torch.empty(3, 4, dtype=torch.bfloat16))


CHANGES = [
    *(
        use_second_for_first,
        wrap_first,
        read_first_in_two_ways,
        drop_act,
        drop_all_but_first,
        replace_act,
        replace_second,
    ),
    *(turn_add, multiply, add_a_scale),
]


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_rolled_back_and_undone(change):
    before = traced()
    graph_module = copy.deepcopy(before)
    snapshot = Snapshot(graph_module)
    change(Rewriter(graph_module), nodes_of(graph_module))
    assert fingerprint(graph_module) != fingerprint(before)
    snapshot.roll_back()
    assert_round_trip(before, graph_module)

    changed = Changes(change)(copy.deepcopy(before))
    code = changed.code
    for carried in (copy.deepcopy(changed), pickled(changed)):
        restored = undo(carried)
        assert_round_trip(before, restored)
        assert Changes(change)(restored).code == code, "names are not free again"


def test_a_failed_undo_leaves_descriptions_of_values():
    def describe_neg_last(rewriter, nodes):
        rewriter.set(nodes["act"], op="call_function", target=torch.relu)
        describe_neg(rewriter, nodes)

    graph_module = Changes(describe_neg_last)(traced())
    (act,) = graph_module.graph.find_nodes(op="call_function", target=torch.relu)
    act.target = torch.sigmoid
    with pytest.raises(UndoError, match="act was changed since"):
        undo(graph_module)
    assert nodes_of(graph_module)["neg"].meta["val"].dtype == torch.bfloat16
    act.target = torch.relu
    assert "val" not in nodes_of(undo(graph_module))["neg"].meta


def test_a_node_comes_back_behind_its_inputs_where_the_one_before_it_is_gone():
    class Parallel(nn.Module):
        def forward(self, x):
            a = torch.sigmoid(x)
            b = -x
            return torch.relu(a) + b

    graph_module = torch.fx.symbolic_trace(Parallel())

    def drop_relu(rewriter, nodes):
        rewriter.replace_uses(nodes["relu"], nodes["sigmoid"])
        rewriter.erase(nodes["relu"])

    changed = Changes(drop_relu)(graph_module)
    nodes = nodes_of(changed)
    nodes["add"].args = (nodes["sigmoid"], nodes["x"])
    changed.graph.erase_node(nodes["neg"])
    changed.recompile()
    torch.testing.assert_close(undo(changed)(X), X.sigmoid().relu() + X)


def test_names_of_erased_nodes_stay_theirs():
    before = traced()
    changed = Changes(drop_act)(copy.deepcopy(before))
    with changed.graph.inserting_before(changed.graph.output_node()):
        added = changed.graph.create_node(
            "call_function", torch.sigmoid, (nodes_of(changed)["add"],), name="act"
        )
    assert added.name != "act"
    restored = undo(changed)
    restored.graph.erase_node(added)
    restored.recompile()
    assert_round_trip(before, restored)


def test_a_module_of_another_class_is_not_taken_for_the_one_that_was_put_there():
    changed = Changes(replace_act)(traced())
    changed.act.__class__ = nn.Mish
    with pytest.raises(UndoError, match="act was changed since"):
        undo(changed)


def test_weights_that_were_trained_are_not_thrown_away():
    changed = Changes(replace_second)(traced())
    with torch.no_grad():
        changed.second.weight.add_(1)
    output = changed(X)[0]
    with pytest.raises(UndoError, match="the weights of second have changed since"):
        undo(changed)
    assert torch.equal(changed(X)[0], output)


def test_what_undo_gives_back_belongs_to_one_graph_module():
    before = traced()
    changed = Changes(replace_second)(copy.deepcopy(before))
    other = copy.deepcopy(changed)
    restored = undo(changed)
    with torch.no_grad():
        restored.second.weight.add_(1)
    assert_round_trip(before, undo(other))


def test_what_undo_gives_back_is_as_it_was_when_the_pass_was_applied():
    model = randomise(Model())
    graph_module = torch.fx.symbolic_trace(model)
    before = copy.deepcopy(graph_module)
    changed = Changes(replace_second)(graph_module)
    with torch.no_grad():
        model.second.weight.add_(1)  # which the graph module shared
    assert_round_trip(before, undo(changed))


def test_only_a_change_of_requires_grad_is_followed():
    layer = nn.Linear(4, 4)
    layer.weight.requires_grad_(False)
    restored = Left.of(layer).follow(copy.deepcopy(layer), copy.deepcopy(layer).double())
    assert restored.weight.dtype == torch.float64
    assert not restored.weight.requires_grad
    assert restored.bias.requires_grad


def test_a_number_of_another_type_is_a_change():
    changed = Changes(multiply)(traced())
    node = nodes_of(changed)["add"]
    node.args = (node.args[0], 1.0)
    with pytest.raises(UndoError, match="add was changed since"):
        undo(changed)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        *(
            (replace_act, replace_act_again),
            (use_second_for_first, multiply),
            (turn_add, use_second_for_first),
        ),
        *((wrap_first, multiply), (multiply, wrap_first), (add_a_scale, read_the_scaled)),
        *((erase_second, replace_uncalled_second), (drop_act, describe_second)),
        *((drop_act, turn_second), (erase_second, replace_weight_of_second), (describe_neg, drop_neg)),
        *((drop_neg, fold_second_into_first), (drop_act, use_first_for_neg)),
        *((add_a_scale, double_the_scaled), (stop_returning_neg, erase_neg), (use_second_for_act, erase_act)),
    ],
)
def test_what_was_changed_again_is_undone_in_order(first, second):
    before = traced()
    changed = Changes(second)(Changes(first)(copy.deepcopy(before)))
    with pytest.raises(
        UndoError, match=rf"a later pass rewrote the same site. Undo Changes\(.*{second.__name__}"
    ):
        Changes(first)(changed, reverse=True)
    assert_round_trip(before, undo(changed, 2))


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x):
        self.block(x)
        return x * 2


def erase_the_block(rewriter, nodes):
    rewriter.erase(nodes["block_0"])


def replace_the_block(rewriter, nodes):
    rewriter.replace_module("block", nn.Sequential(nn.Linear(4, 4, bias=False)))


def test_a_module_around_the_one_that_an_erased_node_called_comes_back_first():
    before = torch.fx.symbolic_trace(Nested())
    changed = Changes(replace_the_block)(Changes(erase_the_block)(copy.deepcopy(before)))
    with pytest.raises(UndoError, match="a later pass rewrote the same site. Undo Changes"):
        Changes(erase_the_block)(changed, reverse=True)
    assert_round_trip(before, undo(changed, 2))


class WithoutLog(ReversibleRewrite):
    """Replaces a module of a class that cannot be pickled, and so what undo needs cannot be, either."""

    def match(self, graph_module):
        if "Local" in type(graph_module.act).__name__:
            yield nodes_of(graph_module)["act"]

    def apply(self, rewriter, node):
        rewriter.replace_module("act", nn.SiLU())


def test_a_log_that_cannot_be_pickled_is_left_out_and_undo_says_so():
    class Local(nn.ReLU):
        pass

    before = traced()
    before.act = Local()
    changed = WithoutLog()(Changes(replace_second)(copy.deepcopy(before)))
    loaded = pickled(changed)
    with pytest.raises(
        UndoError, match="its changes could not be pickled, or saved, together with the graph module"
    ):
        undo(loaded)
    with pytest.raises(UndoError, match=r"a later pass rewrote the same site. Undo WithoutLog\(\) first"):
        Changes(replace_second)(loaded, reverse=True)
    assert_round_trip(before, undo(changed, 2))


def test_a_pickle_that_spells_defaults_out_is_undone_exactly():
    model = module(lambda m, x: m.act(nn.functional.layer_norm(x, (4,))), act=nn.ReLU())
    before = torch.fx.symbolic_trace(model)
    nodes_of(before)["layer_norm"].kwargs = {}  # torch.fx writes them out when it loads
    before.recompile()
    loaded = pickled(Changes(replace_act)(copy.deepcopy(before)))
    assert_round_trip(before, undo(loaded))


def test_a_copy_is_pickled_with_its_own_marks():
    pass_ = Changes(replace_act)
    changed = pass_(traced())
    other = copy.deepcopy(changed)
    undo(changed)
    loaded = pickled(other)
    assert pass_.get_transformed_nodes(loaded)
    assert_round_trip(other, loaded)


class TwoCalls(nn.Module):
    def forward(self, x):
        a = torch.add(-x, x, alpha=2)
        return torch.relu(a), torch.relu(a)


def read_x(rewriter, nodes):
    rewriter.set(nodes["relu_1"], args=(nodes["x"],))


def read_x_elsewhere(rewriter, nodes):
    rewriter.set(nodes["relu_1"], target=torch.sigmoid, args=(nodes["x"],))


def swap_calls(one, other, output):
    one.prepend(other)


def swap_outputs(one, other, output):
    output.args = ((other, one),)


def swap_inputs(one, other, output):
    one.args, other.args = other.args, one.args


def change_alpha(one, other, output):
    (scaled,) = output.graph.find_nodes(op="call_function", target=torch.add)
    scaled.kwargs = {"alpha": 3}


def swap_operands(one, other, output):
    (scaled,) = output.graph.find_nodes(op="call_function", target=torch.add)
    scaled.args = (*reversed(scaled.args),)


@pytest.mark.parametrize("edit", [swap_calls, swap_outputs, swap_inputs, swap_operands, change_alpha])
@pytest.mark.parametrize("change", [read_x, read_x_elsewhere])
def test_what_a_user_edits_between_two_pickles_stays(change, edit):
    loaded = pickled(Changes(change)(torch.fx.symbolic_trace(TwoCalls())))
    *_, one, other, output = loaded.graph.nodes
    edit(one, other, output)
    loaded.recompile()
    edited = loaded(X)
    loaded = pickled(loaded)
    assert all(node.op != "placeholder" for node in Changes(change).get_transformed_nodes(loaded))
    loaded.recompile()
    for expected, actual in zip(edited, loaded(X), strict=True):
        assert torch.equal(actual, expected)


class ChangesOneCall(ReversibleRewrite):
    """Gives the second of two calls another input, or calls another function, and marks it."""

    def __init__(self, target, reads):
        self.target, self.reads = target, reads

    def match(self, graph_module):
        if not self.get_transformed_nodes(graph_module):
            yield nodes_of(graph_module)["relu_1"]

    def apply(self, rewriter, node):
        rewriter.set(node, target=self.target, args=(nodes_of(rewriter.graph_module)[self.reads],))
        return node


@pytest.mark.parametrize(("target", "reads"), [(torch.relu, "x"), (torch.sigmoid, "add")])
def test_marks_do_not_move_where_calls_are_swapped_between_two_pickles(target, reads):
    pass_ = ChangesOneCall(target, reads)
    loaded = pickled(pass_(torch.fx.symbolic_trace(TwoCalls())))
    *_, one, other, _ = loaded.graph.nodes
    swap_calls(one, other, None)
    loaded.recompile()
    loaded = pickled(loaded)
    for node in pass_.get_transformed_nodes(loaded):
        assert (node.target, node.args[0].name) == (target, reads)


def change_operator(rewriter, nodes):
    rewriter.set(nodes["relu"], target=torch.ops.aten.sigmoid.default)


def test_operators_of_aten_survive_a_pickle():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.create_node("call_function", torch.ops.aten.relu.default, (x,), name="relu"))
    before = torch.fx.GraphModule(nn.Module(), graph)
    changed = Changes(change_operator)(copy.deepcopy(before))
    assert_round_trip(before, undo(pickled(changed)))


class WithOptions(ReversibleRewrite):
    def __init__(self, target):
        self.target = target

    def match(self, graph_module):
        yield from graph_module.graph.find_nodes(op="call_function", target=operator.add)

    def apply(self, rewriter, node):
        rewriter.set(node, target=self.target)


def test_options_that_were_changed_after_applying_are_an_error():
    before = traced()
    pass_ = WithOptions(operator.mul)
    changed = pass_(copy.deepcopy(before))
    pass_.target = operator.sub
    with pytest.raises(
        UndoError,
        match=r"WithOptions\(target=_operator.sub\) was applied with other options, as WithOptions\(target=_operator.mul",
    ):
        pass_(changed, reverse=True)
    assert_round_trip(before, undo(changed))


def test_a_module_tells_of_all_passes_that_made_it_where_the_record_is_lost():
    changed = Changes(replace_act_again)(Changes(replace_act)(traced()))
    retraced = torch.fx.symbolic_trace(changed)
    for change in (replace_act, replace_act_again):
        with pytest.raises(
            UndoError, match="cannot be undone: it rewrote act, but the record of its changes is gone"
        ):
            Changes(change)(retraced, reverse=True)


def test_marks_stay_where_one_of_two_cannot_be_undone():
    changed = Changes(replace_second)(Changes(replace_act)(traced()))
    changed.act = nn.Mish()
    marks = [node.meta.get(MARKS) for node in changed.graph.nodes]
    with pytest.raises(UndoError, match="act was changed since"):
        undo(changed, 2)
    assert [node.meta.get(MARKS) for node in changed.graph.nodes] == marks
    assert len(history(changed)) == 2


class ForgetsTheModule(ReversibleTransformation):
    def transform(self, graph_module):
        graph_module.act = nn.SiLU()
        return graph_module

    def reverse(self, graph_module):
        return graph_module


def test_a_reverse_that_forgets_a_module_is_an_error():
    changed = ForgetsTheModule()(traced())
    with pytest.raises(UndoError, match="some changes are not undone by ForgetsTheModule.reverse"):
        undo(changed)
    assert len(history(changed)) == 1


class ReplacesByHand(ReversibleTransformation):
    def transform(self, graph_module):
        graph_module.act = nn.SiLU()
        return graph_module

    def reverse(self, graph_module):
        graph_module.act = nn.ReLU()
        return graph_module


def test_modules_that_were_replaced_by_hand_are_undone_in_order():
    before = traced()
    changed = Changes(replace_act_again)(ReplacesByHand()(copy.deepcopy(before)))
    with pytest.raises(UndoError, match="a later pass rewrote the same site. Undo Changes"):
        ReplacesByHand()(changed, reverse=True)
    assert_round_trip(before, undo(changed, 2))


class BreaksItsPromise(Transformation):
    def __init__(self, answer):
        self.answer = answer

    def transform(self, graph_module):
        return graph_module

    def ensures(self, graph_module):
        return self.answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("there is still a ReLU", r"broke its promise: there is still a ReLU. Applied before it: Changes\("),
        (False, "returned False: it has to return a text"),  # as `return not left` does
    ],
)
def test_a_promise_is_checked(answer, message):
    changed = Changes(turn_add)(traced())
    with pytest.raises(PassError, match=rf"BreaksItsPromise\(.*\) {message}"):
        BreaksItsPromise(answer)(changed)


def test_marks_go_where_the_graph_is_invalid():
    def read_too_early(rewriter, nodes):
        rewriter.create("call_function", torch.relu, (nodes["second"],), before=nodes["first"])

    graph_module = traced()
    before = copy.deepcopy(graph_module)
    with pytest.raises(PassError, match="left an invalid graph"):
        Changes(read_too_early)(graph_module)
    assert not any(MARKS in node.meta for node in graph_module.graph.nodes)
    assert_round_trip(before, graph_module)


class Misuses(ReversibleRewrite):
    """Does one thing with the first layer that a pass may not do, or that changes nothing."""

    def __init__(self, do):
        self.do = do

    signature = "misuses"

    def match(self, graph_module):
        yield from graph_module.graph.find_nodes(op="call_module", target="1")

    def apply(self, rewriter, node):
        return self.do(rewriter, node)


def erases_twice(rewriter, node):
    rewriter.replace_uses(node, node.args[0])
    rewriter.erase(node)
    rewriter.erase(node)


@pytest.mark.parametrize(
    ("do", "message"),
    [
        (erases_twice, "the node _1, which was erased"),
        (
            lambda r, n: r.replace_uses(n, torch.fx.Graph().placeholder("q")),
            "the node q, which is of another",
        ),
        (lambda r, n: r.set(n, args=(torch.fx.Graph().placeholder("q"),)), "the node q, which is of another"),
        (lambda r, n: "_1", r"(?s)returned a str: it has to return the nodes to mark.* was rewriting _1"),
        (lambda r, n: [n, 3], r"(?s)returned a int: it has to return the nodes to mark.* was rewriting _1"),
    ],
)
def test_what_a_pass_may_not_do_is_an_error_and_taken_back(do, message):
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.Identity(), nn.ReLU()))
    before = copy.deepcopy(traced)
    with pytest.raises(PassError, match=message):
        Misuses(do)(traced)
    assert_round_trip(before, traced)


def test_a_change_that_no_rewriter_knows_of_is_an_error():
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.Identity(), nn.ReLU()))
    with pytest.raises(PassError, match=r"changed args of the node \w+ without its rewriter"):
        Misuses(lambda rewriter, node: node.replace_all_uses_with(node.args[0]))(traced)


def test_a_pass_that_only_marks_is_undone():
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.Identity()))
    before, marks = copy.deepcopy(traced), Misuses(lambda rewriter, node: node)
    assert [step.nodes for step in history(marks(traced))] == [1]
    assert not marks.get_transformed_nodes(marks(traced, reverse=True))
    assert_round_trip(before, traced)


class ToBuffer(fxopt.ReversibleRewrite):
    """A parameter becomes a buffer of the same name."""

    def match(self, graph_module):
        reading = graph_module.graph.find_nodes(op="get_attr", target="a")
        yield from (node for node in reading if isinstance(graph_module.a, nn.Parameter))

    def apply(self, rewriter, node):
        rewriter.swap({"a": rewriter.graph_module.a.detach().clone()})
        return node


def test_undo_brings_back_a_parameter_that_became_a_buffer_in_its_place():
    a, b = nn.Parameter(torch.ones(4), False), nn.Parameter(torch.ones(4), False)
    graph_module = fxopt.trace(
        module(lambda self, x: x * self.a + self.b, a=a, b=b).eval(), (torch.ones(2, 4),)
    )
    before = copy.deepcopy(graph_module)
    ToBuffer()(graph_module)
    assert [name for name, _ in graph_module.named_buffers()] == ["a"]
    assert_round_trip(before, fxopt.undo(graph_module))


class Observer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x):
        self.largest.copy_(torch.maximum(self.largest, x.abs().max()))
        return x


@dataclasses.dataclass
class Observe(ReversibleRewrite):
    """Puts an observer in front of each linear layer."""

    gives_up: bool

    def match(self, graph_module):
        yield from (
            n for n in fxopt.GraphIndex(graph_module).calls_like(nn.Linear) if not self.transformed(n)
        )

    def apply(self, rewriter, node):
        restore = (lambda now, left: {}) if self.gives_up else None
        path = rewriter.add_module("", f"{node.name}_observer", Observer(), restore)
        observed = rewriter.create("call_module", path, (node.args[0],), before=node)
        rewriter.replace_input(node, node.args[0], observed)
        return node


@pytest.mark.parametrize("gives_up", [True, False])
def test_a_new_module_whose_buffers_have_changed_is_undone_with_a_restore(gives_up):
    traced = fxopt.trace(nn.Sequential(nn.Linear(4, 4)).eval(), (torch.randn(2, 4),))
    observed = Observe(gives_up)(copy.deepcopy(traced))
    observed(torch.randn(2, 4))
    if gives_up:
        assert fxopt.undo(observed).code == traced.code
    else:
        with pytest.raises(UndoError, match="the weights of _0_observer have changed"):
            fxopt.undo(observed)
