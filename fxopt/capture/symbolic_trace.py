"""`symbolic_trace`: capture a transformers model without giving inputs, at any batch size and sequence length."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.export import Dim

from fxopt.capture.runtime.input_guard import guard_of
from fxopt.capture.runtime.traced_module import TracedModule
from fxopt.capture.trace import check_model, trace
from fxopt.errors import GuardError, TraceError
from fxopt.objects import nested, tensors_in
from fxopt.torch_internals import FakeTensorMode

# Example sizes. Only shapes matter to a capture; these are unlikely to equal a size of the model.
_BATCH = 3
_SEQUENCE = 7
_DECODER_SEQUENCE = 5

_FREE_TOKENS = {0: Dim.AUTO, 1: Dim.AUTO}
_FIXED_IMAGES = {0: Dim.AUTO}
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
# Names of the cache as an input and as a field of the output: `cache` since transformers 5.24, the others before.
_CACHES = ("cache", "past_key_values", "cache_params")
_QUERIES = ("input_ids", "inputs_embeds", "position_ids", "token_type_ids")

Example = tuple[torch.Tensor, dict[int, Any]]


def symbolic_trace(
    model: torch.nn.Module,
    input_names: Iterable[str] | None = None,
    disable_check: bool = False,
    *,
    specialize: bool = False,
) -> TracedModule:
    """Capture a transformers model for any batch size and sequence length that it accepts.

    The signature is that of `transformers.utils.fx.symbolic_trace` in transformers 4.

    Args:
        model: a transformers model, in the training mode and dtype in which the graph will run.
        input_names: names of the tensor inputs of the graph, in any order; `None` means the model's main input
            (`input_ids`, `pixel_values`, ...). Other arguments of the forward keep their defaults. If the names include
            `cache`, the graph is one decoding step: its inputs are one token and the cache of the earlier tokens, which
            the graph updates as the model does. Without `cache`, the graph of a decoder returns a new cache. The names
            of the cache before transformers 5.24, `past_key_values` and `cache_params`, are accepted too.
        disable_check: skip the comparison of the graph with the model, as `verify=False` of `fxopt.trace` does. (In
            transformers 4, this flag skipped a check against a list of supported architectures.)
        specialize: as for `fxopt.trace`: keep the branch that the example inputs take, and check that later inputs
            decide alike. The example token ids, masks, embeddings and pixels are all 1, and class labels are 0, so
            masks mask nothing. If real inputs decide differently, pass real data to `fxopt.trace`.

    Returns:
        A `TracedModule` with dynamic batch and sequence sizes, within the limits of the model. A size outside
        raises `GuardError`, which names input, dimension and limit. Images have the `image_size` of the config. If
        the config has none (ResNet, for example), height and width are dynamic too, unless the graph would then refuse
        single images. For dynamic image sizes in other models, pass an example and `dynamic_shapes` to `fxopt.trace`.

    Raises:
        TraceError: if the forward has no input of a given name, if the config does not determine the shape of an
            input (use `fxopt.trace` with an example), or if a graph cannot represent the forward.

    Example:
        >>> import torch, fxopt
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
        >>> traced = fxopt.symbolic_trace(BertModel(config).eval(), input_names=["input_ids", "attention_mask"])
        >>> ids = torch.randint(0, 100, (2, 9))
        >>> traced(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state.shape
        torch.Size([2, 9, 32])
    """
    check_model(model)
    config = getattr(model, "config", None)
    if config is None:
        raise TraceError(
            f"{type(model).__name__} has no config to make example inputs from; "
            "use fxopt.trace(model, example_inputs) for modules that are not transformers models."
        )
    names = _input_names(model, input_names)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())

    def example(name: str) -> Example:
        return _example(name, config, dtype, device, type(model).__name__)

    examples = {name: example(name) for name in names if name not in (*_CACHES, "encoder_outputs")}
    kwargs: dict[str, Any] = {name: tensor for name, (tensor, _) in examples.items()}
    dimensions: dict[str, Any] = {name: free for name, (_, free) in examples.items()}
    if "encoder_outputs" in names:
        encoder: Any = model.get_encoder()  # type: ignore[operator]
        given, free = example(encoder.main_input_name)
        kwargs["encoder_outputs"] = _output_of(encoder, {encoder.main_input_name: given})
        dimensions["encoder_outputs"] = {"last_hidden_state": _FREE_TOKENS if 1 in free else free}
    for cache in (name for name in names if name in _CACHES):
        kwargs, dimensions = _decoding_step(model, cache, kwargs, dimensions)
    capture = functools.partial(trace, model, (), kwargs, specialize=specialize, verify=not disable_check)
    if len(dimensions.get("pixel_values", ())) > 1:
        # If dynamic heights and widths prevent the capture, or exclude single images, they become static.
        with contextlib.suppress(TraceError):
            traced = capture(dynamic_shapes=dimensions)
            if _takes(traced, {name: tensor[:1] for name, (tensor, _) in examples.items()}):
                return traced
        dimensions["pixel_values"] = _FIXED_IMAGES
    return capture(dynamic_shapes=dimensions)


def _decoding_step(
    model: torch.nn.Module, name: str, prefill: dict[str, Any], dimensions: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return example inputs for the token after those of `prefill`, and their dynamic dimensions.

    The cache, the input called `name`, is of the class that the model itself returns. A dimension of its tensors is dynamic
    if its size is the batch size or a length in `prefill`.
    """
    cache = _cache(model, name, prefill)
    sizes = {size for value in tensors_in(list(prefill.values())) for size in value.shape[:2]}

    def free_of(tensor: torch.Tensor) -> dict[int, Any]:
        return {dim: Dim.AUTO for dim, size in enumerate(tensor.shape) if size in sizes}

    inputs, free = {}, {}
    prefix = "decoder_" if getattr(model.config, "is_encoder_decoder", False) else ""
    for key, value in prefill.items():
        inputs[key], free[key] = value, dimensions[key]
        if key in [prefix + query for query in _QUERIES]:
            inputs[key], free[key] = value[:, :1], {0: Dim.AUTO}
        elif key == f"{prefix}attention_mask":
            inputs[key] = torch.cat([value, value[:, :1]], dim=1)
    inputs[name], free[name] = cache, nested(cache, free_of)
    order = list(inspect.signature(model.forward).parameters)
    return {key: inputs[key] for key in sorted(inputs, key=lambda key: _place(order, key))}, free


def _output_of(model: torch.nn.Module, inputs: dict[str, Any]) -> Any:
    """Return the output of a model with zeros in its tensors; the values are not computed."""
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
        _output_of(model, prefill | ({"use_cache": True} if "use_cache" in parameters else {})), name, None
    )
    if cache is None:
        raise TraceError(
            f"{type(model).__name__} returns no {name!r} for {list(prefill)}; there is no cache to go on from."
        )
    return cache


def _takes(traced: TracedModule, inputs: dict[str, torch.Tensor]) -> bool:
    """Tell whether these inputs, all inputs of the graph, satisfy its guards."""
    try:
        guard_of(traced)(**inputs)
    except GuardError:
        return False
    return True


def _input_names(model: torch.nn.Module, input_names: Iterable[str] | None) -> list[str]:
    """Return the names in the order of the forward's signature."""
    signature = inspect.signature(model.forward).parameters
    parameters = [name for name, parameter in signature.items() if parameter.kind not in _VARIADIC]
    if input_names is None:
        input_names = [getattr(model, "main_input_name", "input_ids")]
    if isinstance(input_names, str):
        raise TraceError(f'input_names must be a list of names: write ["{input_names}"].')
    names = list(input_names)
    unknown = [name for name in names if _place(parameters, name) < 0]
    if unknown:
        raise TraceError(f"{type(model).__name__}.forward has no input {unknown}; it takes {parameters}.")
    return sorted(names, key=lambda name: _place(parameters, name))


def _place(parameters: list[str], name: str) -> int:
    """Return the index of an input in the signature, where a cache may have another name; -1 if it is absent."""
    named = [name, *_CACHES] if name in _CACHES else [name]
    return next((parameters.index(each) for each in named if each in parameters), -1)


def _example(name: str, config: Any, dtype: torch.dtype, device: torch.device, model: str) -> Example:
    make = _EXAMPLES.get(name)
    if make is None:
        raise TraceError(
            f"no example of input {name!r} of {model} can be made from its config. Known are {sorted(_EXAMPLES)}. "
            f"Give an example yourself: fxopt.trace(model, kwargs={{{name!r}: ...}}, dynamic_shapes=...)."
        )
    tensor, free = make(config)
    return (tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)), free


def _tokens(length: int) -> Callable[[Any], Example]:
    """Token ids or masks, (batch, sequence)."""

    def make(config: Any) -> Example:
        longest = _read(config, "max_position_embeddings", "n_positions") or length
        return torch.ones(_BATCH, min(length, longest), dtype=torch.long), _FREE_TOKENS

    return make


def _embeddings(config: Any) -> Example:
    """Token embeddings, (batch, sequence, hidden size)."""
    hidden = _read(config, "embedding_size", "hidden_size", "d_model", "n_embd")
    return torch.ones(_BATCH, _SEQUENCE, hidden), _FREE_TOKENS


def _pixels(config: Any) -> Example:
    """Images, (batch, channels, height, width), of the size in the config; of dynamic size if the config has none."""
    size = _read(config, "image_size")
    free = _FIXED_IMAGES if size else {**_FIXED_IMAGES, 2: Dim.AUTO, 3: Dim.AUTO}
    height, width = size if isinstance(size, (tuple, list)) else (size or 224, size or 224)
    return torch.ones(_BATCH, _read(config, "num_channels") or 3, height, width), free


def _class_labels(config: Any) -> Example:
    """One class per example, (batch,)."""
    return torch.zeros(_BATCH, dtype=torch.long), {0: Dim.AUTO}


_EXAMPLES: dict[str, Callable[[Any], Example]] = {
    "input_ids": _tokens(_SEQUENCE),
    "attention_mask": _tokens(_SEQUENCE),
    "token_type_ids": _tokens(_SEQUENCE),
    "position_ids": _tokens(_SEQUENCE),
    "decoder_input_ids": _tokens(_DECODER_SEQUENCE),
    "decoder_attention_mask": _tokens(_DECODER_SEQUENCE),
    "inputs_embeds": _embeddings,
    "pixel_values": _pixels,
    "next_sentence_label": _class_labels,
}


def _read(config: Any, *names: str) -> Any:
    """Return the first of these attributes that the config, or its text, vision or encoder part, has."""
    parts = [config, *(getattr(config, part, None) for part in ("text_config", "vision_config", "encoder"))]
    for part in parts:
        for name in names:
            value = getattr(part, name, None)
            if value is not None:
                return value
    return None
