"""A replaced activation was called with the name that the old one gives its input: a TypeError at run time."""

import copy

import torch
from torch import nn

import fxopt
from fxopt.testing import assert_round_trip
from tests.modules import module


class Ramp(nn.Module):
    def forward(self, values):
        return values.clamp(min=0)


traced = torch.fx.symbolic_trace(module(lambda m, x: m.act(input=x), act=nn.ReLU()))
before = copy.deepcopy(traced)
replace = fxopt.ReplaceActivation("relu", Ramp)
x = torch.randn(3, 4)
assert torch.equal(replace(traced)(x), x.relu())
assert_round_trip(before, replace(traced, reverse=True))
