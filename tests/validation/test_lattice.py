"""A pass applied twice, and pairs in both orders: what is wrong fails, and what the order changes is said."""

from __future__ import annotations

import operator

import pandas as pd
import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from fxopt import ReversibleTransformation, Transformation
from fxopt.errors import PassError
from tests.validation.planted import Inverse, entry
from validation.checks.effect import AGAIN, COMPUTATION
from validation.judging.rewritten import computation
from validation.records import Case, Check, Outcome, Record
from validation.report.pipelines import orders
from validation.running.run import Runner
from validation.zoo.plan import pipelines


class AddsZero(ReversibleTransformation):
    """Puts `+ 0` behind the division, again at each application."""

    preserves_computation = True
    added, left = 0.0, 0

    def transform(self, graph_module: GraphModule) -> GraphModule:
        again = len(self.get_transformed_nodes(graph_module))
        (division,) = graph_module.graph.find_nodes(op="call_function", target=operator.truediv)
        with graph_module.graph.inserting_after(division):
            new = graph_module.graph.call_function(operator.add, (division, self.added * again))
        division.replace_all_uses_with(new, lambda user: user is not new)
        self.mark_as_transformed(new)
        return graph_module

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        nodes = self.get_transformed_nodes(graph_module)
        for node in nodes[: len(nodes) - self.left * (len(nodes) - 1)]:
            node.replace_all_uses_with(node.args[0])
            graph_module.graph.erase_node(node)
        return graph_module


class WrongTheSecondTime(AddsZero):
    added = 1e-3


class UndoesOneOfTwo(AddsZero):
    left = 1


class OtherForm(AddsZero):
    """Says that it changes values, and changes the dtype as well, at the second application."""

    preserves_computation = False

    def transform(self, graph_module: GraphModule) -> GraphModule:
        again = self.get_transformed_nodes(graph_module)
        graph_module = super().transform(graph_module)
        if again:
            node = again[0]
            with graph_module.graph.inserting_after(node):
                half = graph_module.graph.call_method("half", (node,))
            node.replace_all_uses_with(half, lambda user: user is not half)
        return graph_module


class Once(Inverse):
    def transform(self, graph_module: GraphModule) -> GraphModule:
        if self.get_transformed_nodes(graph_module):
            raise PassError("it is applied already")
        return super().transform(graph_module)


class BreaksTheSecondTime(Inverse):
    def transform(self, graph_module: GraphModule) -> GraphModule:
        if self.get_transformed_nodes(graph_module):
            raise KeyError("none left")
        return super().transform(graph_module)


class Shifts(Transformation):
    """Adds to the numerator of the division what another pass may have made of it: not the same in both orders."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        for node in graph_module.graph.find_nodes(op="call_function", target=operator.truediv):
            node.args = (node.args[0], 14.0)
            self.mark_as_transformed(node)
        return graph_module


def effect(*pipeline: type[Transformation]) -> Record:
    passes = {pass_.__name__: pass_() for pass_ in pipeline}
    return Runner([entry()], passes).run(Case("net", tuple(passes), "cpu", Check.EFFECT))


@pytest.mark.parametrize(
    ("pass_", "again"),
    [(Inverse, "nothing"), (AddsZero, "rewrites more"), (Once, "refused: it is applied already")],
)
def test_a_pass_that_is_right_twice_passes(pass_: type[Transformation], again: str) -> None:
    record = effect(pass_)
    assert record.outcome is Outcome.PASS, record.reason
    assert record.facts[AGAIN] == again


@pytest.mark.parametrize(
    ("pass_", "outcome", "reason"),
    [
        (WrongTheSecondTime, Outcome.FAIL, "applied twice, in float64, output.logits differs by"),
        (UndoesOneOfTwo, Outcome.FAIL, "applied twice, undoing both is not exact"),
        (OtherForm, Outcome.FAIL, "applied twice, output.logits: expected torch.float32"),
        (BreaksTheSecondTime, Outcome.ERROR, "none left"),
    ],
)
def test_a_pass_that_is_wrong_the_second_time_does_not(
    pass_: type[Transformation], outcome: Outcome, reason: str
) -> None:
    record = effect(pass_)
    assert record.outcome is outcome
    assert reason in record.reason


def test_a_pair_has_the_same_digest_in_both_orders_where_it_gives_the_same_graph() -> None:
    def found(*pipeline: type[Transformation]) -> str:
        return effect(*pipeline).facts[COMPUTATION]

    assert found(Inverse, Once) != ""
    assert found(Shifts, Inverse) != found(Inverse, Shifts)
    assert found(AddsZero, Shifts) == found(Shifts, AddsZero)


def test_a_digest_is_of_what_is_computed_and_not_of_names_or_order() -> None:
    class Two(nn.Module):
        def __init__(self, swapped: bool, scale: float = 2.0) -> None:
            super().__init__()
            self.swapped, self.scale = swapped, scale
            self.layer = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.swapped:
                late = torch.relu(x)
                return self.layer(x * self.scale) + late
            early = self.layer(x * self.scale)
            return early + torch.relu(x)

    torch.manual_seed(0)
    one = torch.fx.symbolic_trace(Two(False))

    def of(model: nn.Module, bias: float = 0.0) -> str:
        model.load_state_dict(one.state_dict())
        with torch.no_grad():
            model.layer.bias += bias
        return computation(torch.fx.symbolic_trace(model))

    assert of(Two(True)) == of(Two(False)) == computation(one)
    assert len({computation(one), of(Two(True), bias=1e-7), of(Two(True, scale=3.0))}) == 3


def test_the_report_says_which_orders_matter() -> None:
    rows = [
        *(
            ("m", "A+B", "x", 5, ""),
            ("m", "B+A", "x", 5, ""),
            ("n", "A+B", "y", 4, ""),
            ("n", "B+A", "z", 3, ""),
        ),
        *(("n", "A+C", "y", 4, ""), ("n", "A", "", 4, "nothing"), ("m", "A", "", 4, "rewrites more")),
    ]
    columns = ["model", "pipeline", COMPUTATION, "nodes_after", AGAIN]
    table = pd.DataFrame(rows, columns=columns).assign(device="cpu", check="effect")
    assert orders(table).to_dict("records") == [
        {"passes": "A → A", "models": 1, "for example": "m", "what": "rewrites more"},
        {"passes": "A → B", "models": 1, "for example": "n", "what": "4 nodes, 3 nodes in the other order"},
    ]
    assert orders(table.drop(columns=[COMPUTATION, AGAIN])).empty


def test_all_ordered_pairs_are_planned_and_twice_is_read_off_the_single_pass() -> None:
    passes = {"A": Inverse(), "B": Once()}
    assert {("A", "B"), ("B", "A")} <= {*pipelines(entry(sites={"A": 1, "B": 1}), passes)}
