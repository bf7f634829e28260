"""Linear layers compute with a weight in int8."""

from __future__ import annotations

import dataclasses

from fxopt.packing import PackingLinears


@dataclasses.dataclass(frozen=True)
class QuantizeLinears(PackingLinears):
    """Gives `torch.nn.Linear` layers on the CPU a kernel with the weight in int8, a scale for each row, and inputs in bfloat16.

    It pays where reading the weight is what takes time: for one or a few rows, as in a step of decoding. A layer keeps
    its weight beside the rounded one, so that undoing is exact; for what else it keeps and follows see `PackLinears`.

    Args:
        tune: measure, and leave alone what another kernel computes as fast. Else every layer is quantized; with `"known"`, but
            for what earlier measurements on this machine found slower.

    Source: Dettmers et al., LLM.int8(), 2022, arXiv:2208.07339, section 2.1 (absmax quantization, here by rows).

    Example:
        >>> import torch, fxopt
        >>> layers = torch.nn.Sequential(torch.nn.Linear(64, 32)).eval().requires_grad_(False)
        >>> x = torch.randn(1, 64)
        >>> quantized = QuantizeLinears()(fxopt.trace(layers, (x,)))
        >>> float(torch.nn.functional.cosine_similarity(quantized(x), layers(x))) > 0.999
        True
    """

    tolerance = 0.03
