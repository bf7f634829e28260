"""A replaced activation was called with the name that the old one gives its input: a TypeError at run time."""

import copy

import torch
from torch import nn

import fxopt
from fxopt.testing import assert_round_trip


class Ramp(nn.Module):
    def forward(self, values):
        return values.clamp(min=0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(input=x)


traced = torch.fx.symbolic_trace(Model())
before = copy.deepcopy(traced)
replace = fxopt.ReplaceActivation("relu", Ramp)
x = torch.randn(3, 4)
assert torch.equal(replace(traced)(x), x.relu())
assert_round_trip(before, replace(traced, reverse=True))
