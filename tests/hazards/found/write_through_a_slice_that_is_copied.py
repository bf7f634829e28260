"""MergeLinears allowed writes next to `reshape` and `contiguous`, which alias a whole output but copy a slice."""

import torch
from torch import nn

import fxopt


class Model(nn.Module):
    def __init__(self, view):
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.view = view

    def forward(self, x):
        y = self.one(x)
        z = self.view(y)
        z.add_(1)
        y.mul_(2)
        return self.other(x), y, z


VIEWS = {
    "contiguous": lambda y: y.contiguous(),
    "reshape": lambda y: y.reshape(-1),
    "flatten": lambda y: y.flatten(),
    "ravel": lambda y: y.ravel(),
}

x = torch.randn(3, 4)
for name, view in VIEWS.items():
    model = Model(view)
    traced = torch.fx.symbolic_trace(model)
    for actual, expected in zip(fxopt.MergeLinears()(traced)(x), model(x), strict=True):
        torch.testing.assert_close(actual, expected, msg=f"after {name}")
