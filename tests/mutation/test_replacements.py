"""Faults that no operator makes: with a wrong function in the place of a right one, a test must fail."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from fxopt import VerificationWarning, memory
from fxopt.graph_index import GraphIndex
from fxopt.obstacles import scaling
from fxopt.rewriting import signature
from tests import test_fingerprint, test_graph_index, test_memory
from tests.passes import test_fold_batch_norms


def calls_by_name(index):
    """Modules are told apart by their names."""
    return {id(index.module(node)): [node] for node in index.nodes if node.op == "call_module"}


def factor_of_mixed_groups(layer, values, behind):
    """The channels of one group get the factors of another."""
    weight, groups = scaling.weight_of(layer), scaling._groups(layer)
    factor = values.reshape(groups, -1).repeat(len(weight) // groups, 1)
    return factor.reshape(*factor.shape, *[1] * (weight.ndim - 2))


def code_without_names(code):
    """Functions that call others are alike."""
    return [code.co_code.hex(), code.co_consts]


@pytest.mark.parametrize(
    ("owner", "name", "wrong", "test"),
    [
        (memory, "storage_of", id, test_memory.test_buffers_share_memory_by_storage),
        (GraphIndex, "_calls", property(calls_by_name), test_graph_index.test_calls_are_found_by_identity),
        (
            scaling,
            "_factor",
            factor_of_mixed_groups,
            functools.partial(
                test_fold_batch_norms.test_behind_convolutions_of_every_kind,
                nn.ConvTranspose1d,
                {"groups": 2, "stride": 2},
            ),
        ),
        (
            signature,
            "_code",
            code_without_names,
            functools.partial(
                test_fingerprint.test_values_that_differ_have_texts_that_differ,
                lambda x: torch.relu(x),
                lambda x: torch.sigmoid(x),
            ),
        ),
    ],
    ids=["storage", "calls", "groups", "names"],
)
def test_a_wrong_function_is_seen(owner, name, wrong, test, monkeypatch):
    test()
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises((AssertionError, VerificationWarning)):
        test()
