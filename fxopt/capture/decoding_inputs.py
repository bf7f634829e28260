"""Example inputs for one step of decoding: a query of one token, and the cache of what came before it."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim

from fxopt.capture.trace import trace
from fxopt.errors import TraceError
from fxopt.objects import entries, is_open, tensors_in

# The names that caches have among the inputs, and as fields of the output.
CACHES = ("past_key_values", "cache_params")
_QUERIES = ("input_ids", "inputs_embeds", "position_ids", "token_type_ids")


def decoding_step(
    model: torch.nn.Module, name: str, prefill: dict[str, Any], dimensions: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs for the token after those of `prefill`, and what is free of their sizes.

    Args:
        model: a transformers decoder.
        name: the input that is the cache.
        prefill: example inputs without a cache, batch first.
        dimensions: what is free of their sizes.

    Returns:
        Example inputs and free dimensions, with a cache of the class that the model itself makes. Of its tensors, the
        dimensions are free that have the batch size or a length of `prefill`.

    Raises:
        TraceError: when the model returns no such cache.
    """
    cache = _cache(model, name, prefill)
    sizes = {size for value in tensors_in(list(prefill.values())) for size in value.shape[:2]}
    inputs, free = {}, {}
    prefix = "decoder_" if getattr(model.config, "is_encoder_decoder", False) else ""
    for key, value in prefill.items():
        inputs[key], free[key] = value, dimensions[key]
        if key in [prefix + query for query in _QUERIES]:
            inputs[key], free[key] = value[:, :1], {0: Dim.AUTO}
        elif key == f"{prefix}attention_mask":
            inputs[key] = torch.cat([value, value[:, :1]], dim=1)
    inputs[name], free[name] = cache, _free(cache, sizes)
    order = list(inspect.signature(model.forward).parameters)
    return {key: inputs[key] for key in sorted(inputs, key=order.index)}, free


def output_of(model: torch.nn.Module, inputs: dict[str, Any]) -> Any:
    """Give the output of a model with zeros for its tensors: nothing is computed."""
    with torch.no_grad():
        graph = trace(model, (), inputs, verify=False)
        with FakeTensorMode(allow_non_fake_inputs=True):
            output = graph(**inputs)
    zeros: dict[int, Any] = {
        id(tensor): torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        for tensor in tensors_in(output)
    }
    return copy.deepcopy(output, zeros)


def _cache(model: torch.nn.Module, name: str, prefill: dict[str, Any]) -> Any:
    parameters = inspect.signature(model.forward).parameters
    cache = getattr(
        output_of(model, prefill | ({"use_cache": True} if "use_cache" in parameters else {})), name, None
    )
    if cache is None:
        raise TraceError(
            f"{type(model).__name__} returns no {name!r} for {list(prefill)}; there is no cache to go on from."
        )
    return cache


def _free(value: Any, sizes: set[int]) -> Any:
    """The entry of `dynamic_shapes` for a cache."""
    if isinstance(value, torch.Tensor):
        return {dim: Dim.AUTO for dim, size in enumerate(value.shape) if size in sizes}
    if isinstance(value, (tuple, list)):
        return [_free(item, sizes) for item in value]
    if isinstance(value, dict) or is_open(value):
        return {key: _free(item, sizes) for key, item in entries(value).items()}
    return None
