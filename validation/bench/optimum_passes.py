"""Times the passes of `optimum.fx.optimization` on the same graphs, in an environment that has it; prints JSON.

It runs in a process of its own: optimum needs an older transformers than this project.
"""

from __future__ import annotations

import json
import sys

import torch
from optimum.fx import optimization

from .layered import times

NAMES = (
    "ChangeTrueDivToMulByInverse",
    "FuseBatchNorm1dInLinear",
    "FuseBatchNorm2dInConv2d",
    "FuseBiasInLinear",
    "MergeLinears",
)


def main() -> None:
    """Arguments: the number of rounds, then numbers of layers."""
    torch.set_num_threads(1)
    rounds, *layers = map(int, sys.argv[1:])
    passes = {name: getattr(optimization, name)() for name in NAMES}
    print(json.dumps(times(passes, layers, rounds)))


if __name__ == "__main__":
    main()
