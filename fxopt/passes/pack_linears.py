"""Linear layers compute with a weight that is packed for the processor."""

from __future__ import annotations

import dataclasses

from fxopt.packing import PackingLinears


@dataclasses.dataclass(frozen=True)
class PackLinears(PackingLinears):
    """Gives `torch.nn.Linear` layers on the CPU a kernel with packed weights: oneDNN's, or MKL's where that is missing.

    Which kernel is the fastest depends on the shape and the processor. With `tune=True`, each distinct shape is timed
    once with each kernel, torch's own among them, which takes some 0.1 s; the fastest one is taken, and the times
    are kept in a file for later processes (`fxopt.tuning`). A packed layer holds its weight twice. It has the parameters of the old layer, so that `state_dict` is the same and tied weights stay tied; it follows
    changes of them, and computes as before where gradients are recorded, under autocast and on other devices.
    It differs from the old layer by rounding errors: kernels add up in another order.

    Args:
        tune: measure, and leave alone what torch's own kernel computes as fast. Else every layer is packed; with `"known"`, but for what
            earlier measurements on this machine found slower.
        alone: leave out kernels that need the weight beside the packed one, as MKL's.

    Example:
        >>> import torch, fxopt
        >>> traced = fxopt.trace(torch.nn.Sequential(torch.nn.Linear(64, 32)), (torch.zeros(8, 64),))
        >>> packed = PackLinears()(traced)
        >>> type(packed.get_submodule("0")).__name__
        'PackedLinear'
        >>> PackLinears()(packed, reverse=True).get_submodule("0")
        Linear(in_features=64, out_features=32, bias=True)
    """

    preserves_computation = True
