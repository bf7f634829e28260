"""A file of its own: code that compares with `int` has Python's, and so has all code that sees the same globals."""

import torch
from torch import nn

import fxopt

X = torch.randn(3, 4) * 100


class Chooses(nn.Module):
    def __init__(self, kind=int):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        return x.clamp(-5, 5) if self.kind is int else x.clamp(-50, 50)


def test_an_int_that_is_held_from_before_is_int():
    model = Chooses()
    assert torch.equal(fxopt.trace(model, (X,), verify=False)(X), model(X))
