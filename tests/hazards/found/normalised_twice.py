"""FoldBatchNorms put a value that the site before it had erased in the place of a normalization."""

import copy

import torch
from torch import nn

import fxopt
from fxopt.testing import assert_round_trip, randomise


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.other = nn.BatchNorm1d(4)

    def forward(self, x):
        y = self.norm(self.first(x))
        return self.last(self.other(y)), y


model, x = randomise(Model()).eval().double(), torch.randn(3, 4).double()
before = fxopt.trace(model, (x,))
after = fxopt.FoldBatchNorms()(copy.deepcopy(before))
assert [step.sites for step in fxopt.history(after)] == [2]
for actual, expected in zip(after(x), model(x), strict=True):
    torch.testing.assert_close(actual, expected)
assert_round_trip(before, fxopt.undo(after))
