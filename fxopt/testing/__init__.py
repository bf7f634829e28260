"""The oracle: checks that two modules compute the same, and that an undo restored everything.

Fresh weights hide faults (BatchNorm statistics are 0 and 1, biases 0), so call `randomise` first.
"""

from fxopt.compare import Difference, compare, ulps
from fxopt.float64 import in_float64
from fxopt.outputs import leaves
from fxopt.testing.assertions import Equivalence, assert_equivalent, first_divergence
from fxopt.testing.culprit import Culprit, find_culprit
from fxopt.testing.divergence import Divergence
from fxopt.testing.oracle import RTOL_FLOAT64, Oracle
from fxopt.testing.random_values import randomise
from fxopt.testing.round_trips import assert_round_trip
from fxopt.testing.verdicts import Grade, Verdict

__all__ = [
    "RTOL_FLOAT64",
    "Culprit",
    "Difference",
    "Divergence",
    "Equivalence",
    "Grade",
    "Oracle",
    "Verdict",
    "assert_equivalent",
    "assert_round_trip",
    "compare",
    "find_culprit",
    "first_divergence",
    "in_float64",
    "leaves",
    "randomise",
    "ulps",
]
