import copy

from own_models import nets
from own_models.passes import RemoveRepeatedReLU, is_relu

import fxopt
import fxopt.testing


def test_every_activation_that_repeats_the_one_before_is_removed():
    model, x = nets.example()
    traced = fxopt.trace(model.eval(), (x,))
    removed = RemoveRepeatedReLU()(copy.deepcopy(traced))
    assert sum(is_relu(traced, node) for node in traced.graph.nodes) == 6
    assert sum(is_relu(removed, node) for node in removed.graph.nodes) == 4
    fxopt.testing.assert_equivalent(traced, removed, (x,))
    assert fxopt.undo(removed).code == traced.code
