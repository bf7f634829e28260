"""ChangePrecision read the description of a view whose base is written into, which autograd forbids."""

import copy

import torch
from torch import nn

import fxopt
from fxopt.testing import assert_round_trip


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        row = y.unbind(0)[0]
        y.mul_(2)
        return y, row.shape[0]


traced = fxopt.trace(Model(), (torch.ones(3, 4),))
before = copy.deepcopy(traced)
change = fxopt.ChangePrecision()
assert change(traced).linear.weight.dtype == torch.bfloat16
assert_round_trip(before, change(traced, reverse=True))
