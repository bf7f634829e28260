"""Undoing FuseBiasInLinear left the bias of a layer with one output with the strides of the wider weight."""

import torch
from torch import nn

import fxopt

fuse = fxopt.FuseBiasInLinear()
traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 1)))
restored = fuse(fuse(traced), reverse=True)
assert restored.get_parameter("0.bias").stride() == (1,)
assert restored.get_parameter("0.weight").stride() == nn.Linear(4, 1).weight.stride()
restored.get_parameter("0.bias").detach().view(torch.uint8)
