"""The reasons and the mark that tests of the graphs of `fxopt.optimize` share."""

import pytest
from torch import nn

from fxopt.kernels import kernels_for

NEEDS_KERNELS = pytest.mark.skipif(
    not kernels_for(nn.Linear(16, 16)), reason="this build of torch has no packed kernels"
)


def reasons(fast):
    """The reason of each entry of the report; None for a graph."""
    return [each.reason for each in fast.report]
