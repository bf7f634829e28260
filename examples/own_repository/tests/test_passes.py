import copy

import pytest
import torch
from own_models import nets
from own_models.passes import RemoveRepeatedReLU
from torch import nn

import fxopt
import fxopt.testing


def relus(graph_module):
    return len(fxopt.GraphIndex(graph_module).calls_like(nn.ReLU))


def test_every_activation_that_repeats_the_one_before_is_removed():
    model, x = nets.example()
    traced = fxopt.trace(model.eval(), (x,))
    removed = RemoveRepeatedReLU()(copy.deepcopy(traced))
    assert (relus(traced), relus(removed)) == (6, 4)
    fxopt.testing.assert_equivalent(traced, removed, (x,))
    assert fxopt.undo(removed).code == traced.code


def hooked_before():
    model = nn.Sequential(nn.ReLU(), nn.ReLU())
    model[1].register_forward_pre_hook(lambda module, args: (args[0] - 0.5,))
    return model


def hooked_behind():
    model = nn.Sequential(nn.ReLU(), nn.ReLU())
    model[0].register_forward_hook(lambda module, args, output: output - 0.5)
    return model


class Written(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.ReLU(), nn.ReLU()

    def forward(self, x):
        first = self.first(x)
        second = self.second(first)
        second.add_(1)
        return first * second


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (hooked_before(), "has hooks"),
        (hooked_behind(), "has hooks"),
        (Written(), "is also used by"),
        (nn.Sequential(nn.ReLU(inplace=True), nn.ReLU()), "works in place"),
    ],
)
def test_activations_that_only_look_repeated_stay(model, reason):
    traced = fxopt.trace(model.eval(), (torch.randn(3, 4),))
    assert reason in str(RemoveRepeatedReLU().explain(traced))
    assert relus(RemoveRepeatedReLU()(traced)) == 2
