"""Modules of a graph module: their order, and copies of them."""

import torch
from torch import nn

from fxopt import submodules


def test_children_keep_their_order():
    traced = torch.fx.symbolic_trace(nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))))
    order = list(traced._modules)
    submodules.place(traced, "1", None)
    submodules.place(traced, "new", nn.ReLU())
    submodules.place(traced, "1", nn.ReLU())
    submodules.put_in_order(traced, "", order)
    assert list(traced._modules) == ["0", "1", "2", "new"]
    assert submodules.free_path(traced, "", "new") == "new_1"


def test_a_shell_shares_nothing_that_can_change():
    layer = nn.Linear(2, 2).eval()
    layer.note = "kept"
    shell = submodules.without_tensors(layer)
    shell.register_forward_hook(lambda *args: None)
    shell._parameters["weight"] = nn.Parameter(torch.zeros(1))
    assert not layer._forward_hooks
    assert layer.weight.shape == (2, 2)
    assert (shell.note, shell.training, shell.in_features) == ("kept", False, 2)
