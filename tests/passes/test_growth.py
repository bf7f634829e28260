"""The work of a pass, and of its undo, grows with the graph and not with its square."""

import copy
import functools
import os
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxopt
from fxopt.passes import available

pytestmark = pytest.mark.long

OWN = os.path.dirname(fxopt.__file__) + os.sep


class Layer(nn.Module):
    """Something for each pass, and parameters that the graph reads itself."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.out = (nn.Linear(4, 4) for _ in range(3))
        self.act, self.norm, self.scale = nn.GELU(), nn.BatchNorm1d(4), nn.Parameter(torch.ones(4))

    def forward(self, x):
        x = self.norm(self.out(self.act(self.query(x) * self.key(x) * self.scale / 8)))
        rows = x[None] * 1
        heads = rows[None]
        twice = heads[:, :, None].expand(1, 1, 2, 2, 4).reshape(1, 2, 2, 4)
        rows = rows + F.scaled_dot_product_attention(heads.expand(1, 2, 2, 4), twice, twice)[:, 0]
        return ((rows @ rows.transpose(-1, -2) / 2 + self.scale[:2]).softmax(-1) @ rows)[0]


def calls_within(function, folder=OWN):
    """How many functions in a folder are called, or generators in it resumed."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(folder)

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@functools.cache
def captured(layers):
    return fxopt.trace(nn.Sequential(*(Layer() for _ in range(layers))).eval(), (torch.ones(2, 4),))


def calls_of(pass_, layers):
    graph_module = copy.deepcopy(captured(layers))
    apply = calls_within(lambda: pass_(graph_module))
    return apply, calls_within(lambda: pass_(graph_module, reverse=True))


@pytest.mark.sweep(day=4)
@pytest.mark.parametrize("name", available())
def test_four_times_the_layers_take_four_times_the_work(name):
    few, many = (calls_of(available()[name](), layers) for layers in (10, 40))
    assert all(large / small < 4.5 for small, large in zip(few, many, strict=True)), (few, many)


def test_the_first_call_of_an_optimized_model_takes_work_by_the_layer():
    def calls(layers):
        fast = fxopt.optimize(nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers))).eval(), tune=False)
        with torch.no_grad():
            return calls_within(lambda: fast(torch.ones(1, 8)), folder="")

    calls(2)  # what is imported at the first time
    few, many = calls(40), calls(160)
    assert many / few < 4.5, (few, many)
