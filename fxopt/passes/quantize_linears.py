"""Linear layers compute products of int8."""

from __future__ import annotations

import dataclasses

from fxopt.packing import PackingLinears


@dataclasses.dataclass(frozen=True)
class QuantizeLinears(PackingLinears):
    """Gives `torch.nn.Linear` layers on the CPU a kernel with weights and inputs in int8.

    Each row of the weight has a scale, and so has each row of an input, which a call computes: the result of one row does
    not depend on the others. A layer that is packed for one row computes a single row by another kernel, which rounds otherwise. Processors for which oneDNN has no code for products of int8 (AVX512-VNNI, AMX) round the weight alone, and compute in
    bfloat16. A layer keeps its weight beside the rounded one, so that undoing is exact; for what else it keeps and follows
    see `PackLinears`.

    Args:
        tune: measure, and leave alone what another kernel computes as fast. Else every layer is quantized; with `"known"`, but
            for what earlier measurements on this machine found slower.

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
