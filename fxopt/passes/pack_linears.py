"""Makes linear layers compute with a weight that is packed for the processor."""

from __future__ import annotations

import dataclasses

from fxopt.packing import PackingLinears


@dataclasses.dataclass(frozen=True)
class PackLinears(PackingLinears):
    """Gives `torch.nn.Linear` layers on the CPU a kernel with packed weights: oneDNN's, or MKL's if that is missing.

    The fastest kernel depends on the shape and the processor. With `tune=True`, each distinct shape is timed once with each
    kernel, including torch's own, which takes some 0.1 s. The pass chooses the fastest kernel, and a file caches the times
    for later processes (`fxopt.tuning`). A packed layer stores its weight twice. It has the parameters of the old layer, so
    `state_dict` is the same and tied weights stay tied. It packs again after changes of the weight, and computes as before
    if gradients are recorded, under autocast and on other devices. Its outputs differ from those of the old layer by
    rounding errors, because kernels sum in another order.

    Args:
        tune: `True` measures, and skips layers for which torch's own kernel is as fast. `False` packs every layer. `"known"`
            measures nothing, and skips layers that earlier measurements on this machine found slower.
        alone: whether to leave out kernels that need the plain weight in addition to the packed one, such as MKL's.

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
