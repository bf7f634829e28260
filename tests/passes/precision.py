"""Models and checks that tests of ChangePrecision share."""

import torch
from torch import nn

from fxopt import ChangePrecision
from fxopt.testing import compare
from tests.before_after import fxopt_trace, rewritten

X = torch.randn(2, 4)
HALF = [torch.bfloat16, torch.float16]


def changed(model, *inputs, **options):
    """The rewritten graph module of a model, checked for its outputs' dtypes and its way back."""
    after = rewritten(ChangePrecision(**options), model, *inputs, sites=1, trace=fxopt_trace)
    difference = compare(model(*inputs), after(*inputs))  # the same dtypes, too
    assert 0 < difference.max_rel < 0.05
    return after


def layers():
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))


class Use(nn.Module):
    def __init__(self, use, **modules):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.rand(4))
        self.register_buffer("shift", torch.rand(4))
        for name, module in modules.items():
            setattr(self, name, module)
        self.use = use

    def forward(self, x):
        return self.use(self, x)
