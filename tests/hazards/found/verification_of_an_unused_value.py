"""With verify=True, a fold whose value nothing uses was left alone: the layer was compared with itself, unfolded."""

import warnings

import torch
from torch import nn

import fxopt
from fxopt.testing import randomise


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        self.norm(self.linear(x))
        return x


traced = fxopt.trace(randomise(Model()).eval(), (torch.ones(3, 4),))
fold = fxopt.FuseBatchNorm1dInLinear()
with warnings.catch_warnings():
    warnings.simplefilter("error")
    assert fold.get_transformed_nodes(fold(traced, verify=True))
