"""Wrong passes are caught, each by the check that is there for it; the right one that they come from passes."""

from __future__ import annotations

import dataclasses

import pytest
from torch.fx import GraphModule

from fxopt import Transformation
from tests.validation.wrong_passes import (
    ACCURACY,
    EFFECT,
    EQUIVALENCE,
    EXPORTED,
    ROUND_TRIP,
    SAID,
    USABLE,
    WAYS,
    Wrong,
    WrongAndInexact,
    WrongReverse,
)
from validation.records import Case, Check, Outcome, Record
from validation.running.run import Runner
from validation.zoo.entry import Entry

CASES = [
    *((Check.EQUIVALENCE, Wrong(name)) for name in EQUIVALENCE),
    *((Check.ACCURACY, WrongAndInexact(name)) for name in ACCURACY),
    *((Check.EFFECT, Wrong(name)) for name in EFFECT),
    *((Check.USABLE, Wrong(name)) for name in USABLE),
    *((Check.ROUND_TRIP, WrongReverse(name)) for name in ROUND_TRIP),
]


PARTS = {"model": "tests.validation.wrong_passes.Parts", "sizes": "fixed", "inputs": {"x": {"shape": [5, 4]}}}


def found(check: Check, pass_: Transformation, **fields: object) -> Record:
    entry = Entry.model_validate({"name": "wrong-parts", **(fields or PARTS)})
    return Runner([entry], {"Planted": pass_}).run(Case(entry.name, ("Planted",), "cpu", check))


@pytest.mark.sweep(6)
@pytest.mark.parametrize(("check", "pass_"), CASES, ids=[f"{check}: {pass_.name}" for check, pass_ in CASES])
def test_a_wrong_pass_is_caught(check: Check, pass_: Wrong | WrongReverse) -> None:
    record = found(check, pass_)
    assert record.outcome is Outcome.FAIL
    # A pass may be wrong in several ways: what it is planted for must be among them.
    said = {
        Check.ACCURACY: SAID.get(pass_.name, ""),
        Check.USABLE: WAYS.get(pass_.name, ""),
        Check.EFFECT: "that the graph shares with the user's model",
    }
    assert record.reason
    assert said.get(check, "") in record.reason


@pytest.mark.parametrize(
    "check", [Check.EQUIVALENCE, Check.ACCURACY, Check.EFFECT, Check.ROUND_TRIP, Check.USABLE]
)
def test_a_right_pass_is_not(check: Check) -> None:
    record = found(check, WrongReverse(""))
    assert record.outcome is Outcome.PASS, record.reason


@pytest.mark.long
@pytest.mark.parametrize("name", EXPORTED)
def test_what_a_pipeline_makes_must_be_compiled_and_exported(name: str) -> None:
    entry = Entry.model_validate({"name": "wrong-parts", **PARTS})
    for wrong, outcome in ((Wrong(name), Outcome.FAIL), (WrongReverse(""), Outcome.PASS)):
        runner = Runner([entry], {"Planted": wrong, "Right": WrongReverse("")})
        record = runner.run(Case(entry.name, ("all",), "cpu", Check.USABLE))
        assert record.outcome is outcome, record.reason
        assert ("export: " in record.reason) == (outcome is Outcome.FAIL)
        assert (outcome is Outcome.PASS) == (record.measurements["ways_used"] == 7)


BERT = {
    "model": "BertModel",
    "sizes": "dynamic",
    "config": {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "vocab_size": 20,
        "max_position_embeddings": 24,
    },
    "inputs": {
        "input_ids": {"shape": [2, 16], "integers": [1, 20]},
        "attention_mask": {"shape": [2, 16], "padding": True},
    },
}


@dataclasses.dataclass(frozen=True)
class Bakes(Transformation):
    """Builds the sizes of the example in."""

    preserves_computation = True

    def transform(self, graph_module: GraphModule) -> GraphModule:
        for node in graph_module.graph.find_nodes(op="call_method", target="size"):
            node.replace_all_uses_with({0: 2, 1: 16}[node.args[1]])  # type: ignore[arg-type, index]
        return graph_module


def test_a_pass_that_builds_batch_and_length_in_is_caught() -> None:
    record = found(Check.EQUIVALENCE, Bakes(), **BERT)
    assert record.outcome is Outcome.ERROR
    assert "(with other values)" in record.reason  # of a batch of one
