"""Makes linear layers compute with weights, and mostly inputs, in int8."""

from __future__ import annotations

import dataclasses

from fxopt.packing import PackingLinears


@dataclasses.dataclass(frozen=True)
class QuantizeLinears(PackingLinears):
    """Gives `torch.nn.Linear` layers on the CPU a kernel with weights and inputs in int8.

    Each row of the weight has a scale. Each row of an input has a scale, too, which the call computes, so the result of a row
    does not depend on other rows. A layer that is packed for one row uses another kernel for a single row, with other
    rounding. On processors for which oneDNN has no code for products of int8 (AVX512-VNNI, AMX), only the weight is rounded,
    and the layer computes in bfloat16. A layer keeps the plain weight, too, so that undo is exact. `PackLinears` describes
    packed layers.

    Args:
        tune: `True` measures, and skips layers for which an exact kernel is as fast. `False` quantizes every layer. `"known"`
            measures nothing, and skips layers that earlier measurements on this machine found slower.

    Source: Dettmers et al., LLM.int8(), 2022, arXiv:2208.07339, sections 2.1 and 3.1 (absmax quantization by rows).

    Example:
        >>> import torch, fxopt
        >>> layers = torch.nn.Sequential(torch.nn.Linear(64, 32)).eval().requires_grad_(False)
        >>> x = torch.randn(1, 64)
        >>> quantized = QuantizeLinears()(fxopt.trace(layers, (x,)))
        >>> float(torch.nn.functional.cosine_similarity(quantized(x), layers(x))) > 0.999
        True
    """

    tolerance = 0.05
