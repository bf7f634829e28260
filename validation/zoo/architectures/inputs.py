"""Inputs by rules: the inputs of a forward, from its signature, its documentation and the config of the model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.exporters.utils import precompute_export_inputs

from .configs import VOCABULARY
from .request import GRID, Request, audio_length, dimension, image_size, special_tokens

Inputs = dict[str, Tensor]


def make_inputs(model: nn.Module, batch: int, sequence: int, changes: Mapping[str, Any]) -> Inputs:
    """Every input that the forward requires, its main input, and the inputs typical of its architecture.

    `changes` is an override: `with` and `without` are names of inputs, `shapes` replaces documented shapes, and `sizes`
    gives sizes of dimensions.
    """
    request = Request(model, batch, sequence, torch.Generator().manual_seed(0), changes)
    parameters = inspect.signature(model.forward).parameters
    wanted = _wanted(model, parameters) | {*changes.get("with", ())}
    wanted -= {*changes.get("without", ())}
    others = {name: _make(name, request) for name in parameters if name in wanted - _TEXT}
    text = _text(request, others, wanted & _TEXT & set(parameters))
    inputs = {name: (others | text)[name] for name in parameters if name in wanted}
    return _precomputed(model, inputs)


def _precomputed(model: Any, inputs: Inputs) -> Inputs:
    """Add inputs that depend only on the grids of images, as transformers does before it exports a model.

    If the forward computed positions and lengths, it would branch on values of the grid, which a graph cannot contain.
    """
    grid = {"grid_thw": inputs["grid_thw"]} if "grid_thw" in inputs else {}
    if grid:
        precompute_export_inputs(model, grid)
        return inputs | {name: value for name, value in grid.items() if isinstance(value, Tensor)}
    if "image_grid_thw" not in inputs:
        return inputs
    inputs = dict(inputs)
    if hasattr(model, "get_rope_index"):
        precompute_export_inputs(model, inputs)
        inputs.pop("mm_token_type_ids", None)
    grid = {"grid_thw": inputs["image_grid_thw"]}
    precompute_export_inputs(model.get_encoder(modality="image"), grid)
    return inputs | {
        f"image_{name}": value
        for name, value in grid.items()
        if isinstance(value, Tensor) and name != "grid_thw"
    }


def _wanted(model: nn.Module, parameters: Mapping[str, inspect.Parameter]) -> set[str]:
    required = {
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }
    main = getattr(model, "main_input_name", None)
    wanted = required | _WANTED | {main if isinstance(main, str) else "input_ids"}
    if "input_ids" not in parameters and "attention_mask" not in required:
        wanted.discard("attention_mask")
    if "pixel_values" in parameters:
        wanted |= _WITH_PIXELS
    return wanted & set(parameters)


_TEXT = {"input_ids", "attention_mask", "mm_token_type_ids"}
_WANTED = {"input_ids", "attention_mask", "decoder_input_ids", "pixel_values", "bbox"}
_WITH_PIXELS = {"image_grid_thw", "image_sizes", "mm_token_type_ids", "spatial_shapes"}


def _text(request: Request, others: Inputs, names: set[str]) -> Inputs:
    """Token ids and related inputs; the places of images precede the text."""
    images = _placeholders(request, others) if "input_ids" in names else 0
    length = request.sequence + images
    ids = _tokens(request)
    image_id = request.read("image_token_id", "image_token_index", default=0)
    text = {
        "input_ids": torch.cat([ids.new_full((request.batch, images), image_id), ids], dim=1),
        "attention_mask": _mask(request.batch, length, padding=request.sequence // 4),
        "mm_token_type_ids": (torch.arange(length) < images).long().repeat(request.batch, 1),
    }
    return {name: text[name] for name in names}


def _placeholders(request: Request, others: Inputs) -> int:
    """The number of tokens that images replace: the number of features that the model computes from them."""
    features = getattr(request.model, "get_image_features", None)
    named = request.read("image_token_id", "image_token_index") is not None
    if features is None or "pixel_values" not in others or not named:
        return 0
    accepted = inspect.signature(features).parameters
    with torch.no_grad():
        output = features(**{name: value for name, value in others.items() if name in accepted})
    output = getattr(output, "pooler_output", output)
    parts = output if isinstance(output, (list, tuple)) else [output]
    return int(sum(part.numel() // part.shape[-1] for part in parts)) // request.batch


def _make(name: str, request: Request) -> Tensor:
    maker = _MAKERS.get(name)
    if maker is not None and name not in request.changes.get("shapes", {}):
        return maker(request)
    shape, kind = request.documented(name)
    sizes = [dimension(part, request) for part in shape]
    if "Long" in kind or name.endswith(("_ids", "mask")):
        return torch.ones(sizes, dtype=torch.long) if "mask" in name else request.integers(0, 2, *sizes)
    return request.noise(*sizes)


def _tokens(r: Request) -> Tensor:
    limit = min(VOCABULARY, r.read("vocab_size", default=VOCABULARY))
    special = special_tokens(r.config)
    plain = torch.tensor([i for i in range(limit) if i not in special and (i > 3 or limit < 8)])
    return plain[r.integers(0, len(plain), r.batch, r.sequence)]


def _mask(batch: int, length: int, padding: int) -> Tensor:
    """A mask of ones, in which every row except the first ends in padding."""
    lengths = length - padding * torch.arange(batch).clamp(max=3)
    return (torch.arange(length) < lengths[:, None]).long()


def _grid(r: Request) -> Tensor:
    """(time, height, width) of each image, in patches."""
    return torch.tensor([[1, GRID, GRID]]).repeat(r.batch, 1)


def _patches(r: Request) -> Tensor:
    """Images as a list of flat patches, (patches of all images, values of a patch)."""
    channels = r.read("in_channels", "in_chans", "num_channels", default=3)
    depth = r.read("temporal_patch_size", default=1)
    side = r.read("patch_size")
    return r.noise(r.batch * GRID * GRID, channels * depth * side * side)


def _pixels(r: Request) -> Tensor:
    if {"image_grid_thw", "grid_thw"} & set(inspect.signature(r.model.forward).parameters):
        return _patches(r)
    try:
        shape, _ = r.documented("pixel_values")
    except LookupError:
        shape = ["batch_size", "num_channels", "height", "width"]
    return r.noise(*(dimension(part, r) for part in shape))


def _audio(r: Request) -> Tensor:
    """Waveforms, with a channel dimension or without, or spectrograms, as documented."""
    shape, _ = r.documented("input_values")
    sizes = [dimension(part, r) for part in shape]
    return r.noise(*sizes) if "mel" in shape[-1] else r.noise(*sizes[:-1], audio_length(r))


def _features(r: Request) -> Tensor:
    """Spectrograms: (batch, mel, time) if the length is fixed as in Whisper, otherwise (batch, time, mel)."""
    mel, time = (
        r.read("num_mel_bins", "input_feat_per_channel", "feature_size", default=80),
        _feature_length(r),
    )
    return r.noise(r.batch, mel, time) if _whisper(r) else r.noise(r.batch, time, mel)


def _feature_length(r: Request) -> int:
    return 2 * int(r.read("max_source_positions")) if _whisper(r) else 8 * r.sequence


def _whisper(r: Request) -> bool:
    return r.read("max_source_positions") is not None and r.read("input_feat_per_channel") is None


def _boxes(r: Request) -> Tensor:
    """(left, top, right, bottom), in thousandths of the page."""
    corners = r.integers(0, 40, r.batch, r.sequence, 2)
    return torch.cat([corners, corners + r.integers(1, 20, r.batch, r.sequence, 2)], dim=-1)


_MAKERS: dict[str, Callable[[Request], Tensor]] = {
    "bbox": _boxes,
    "decoder_input_ids": _tokens,
    "grid_thw": _grid,
    "hidden_states": _patches,
    "image_grid_thw": _grid,
    "image_sizes": lambda r: torch.tensor([image_size(r)]).repeat(r.batch, 1),
    "input_features": _features,
    "input_features_mask": lambda r: torch.ones(r.batch, _feature_length(r), dtype=torch.long),
    "input_values": _audio,
    # The number of patches along a side that are merged to one, for each image.
    "merge_sizes": lambda r: torch.full((r.batch,), 2),
    "pixel_values": _pixels,
    "qformer_input_ids": _tokens,
    # (height, width) of each image, in patches.
    "spatial_shapes": lambda r: torch.tensor([[GRID, GRID]]).repeat(r.batch, 1),
}
