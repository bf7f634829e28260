"""Inputs by rules: what a forward takes, from its signature, its documentation and the config of the model."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.exporters.utils import precompute_export_inputs

from .configs import IMAGE, VOCABULARY

Inputs = dict[str, Tensor]


@dataclass
class Request:
    """The numbers that an input is made from."""

    model: nn.Module
    batch: int
    sequence: int
    generator: torch.Generator
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sizes(self) -> Mapping[str, Any]:
        """Sizes of dimensions that an override gives, by the names of the documentation."""
        sizes: Mapping[str, Any] = self.changes.get("sizes", {})
        return sizes

    @property
    def config(self) -> Any:
        return self.model.config

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def noise(self, *shape: int) -> Tensor:
        """Normal noise in the dtype of the model."""
        dtype = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(dtype)

    def read(self, *names: str, default: Any = None) -> Any:
        """The first of these attributes that the config has, or one of its nested configs."""
        for name in names:
            for part in _parts(self.config):
                value = getattr(part, name, None)
                if value is not None:
                    return value
        return default

    def documented(self, name: str) -> tuple[list[Any], str]:
        """The dimensions of an input as the forward's docstring names them, and the kind of tensor."""
        text = inspect.getdoc(self.model.forward) or ""
        given = self.changes.get("shapes", {}).get(name)
        found = re.search(rf"\b{re.escape(name)} \(`*([\w.]*)`*,? +of shape `\(+([^`]*?)\)+,?`", text)
        if given is not None:
            return given, found.group(1) if found else ""
        if found is None:
            raise LookupError(
                f"no rule makes input {name!r} of {type(self.model).__name__}, and it has no documented shape"
            )
        return [part.strip() for part in found.group(2).split(",") if part.strip()], found.group(1)


def _parts(config: Any) -> list[Any]:
    nested = [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    return [config, *(part for child in nested for part in _parts(child))]


def make_inputs(
    model: nn.Module, batch: int, sequence: int, seed: int, changes: Mapping[str, Any] | None = None
) -> Inputs:
    """Every input that the forward requires, its main input, and those that its architecture is about.

    `changes` is what an override says: `with` and `without` are names of inputs, `shapes` replaces what the
    documentation says about their dimensions, and `sizes` gives the sizes of dimensions.
    """
    changes = changes or {}
    request = Request(model, batch, sequence, torch.Generator().manual_seed(seed), changes)
    parameters = inspect.signature(model.forward).parameters
    wanted = _wanted(model, parameters) | {*changes.get("with", ())}
    wanted -= {*changes.get("without", ())}
    others = {name: _make(name, request) for name in parameters if name in wanted - _TEXT}
    text = _text(request, others, wanted & _TEXT & set(parameters))
    inputs = {name: (others | text)[name] for name in parameters if name in wanted}
    return _precomputed(model, inputs)


def _precomputed(model: Any, inputs: Inputs) -> Inputs:
    """Add what follows from the grids of images alone, as transformers does before it exports a model.

    Computed in the forward, positions and lengths are decisions on the values of the grid, which no graph takes.
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
    if "pixel_values" in parameters and "pixel_values" in wanted:
        wanted |= _WITH_PIXELS
    return wanted & set(parameters)


_TEXT = {"input_ids", "attention_mask", "mm_token_type_ids"}
_WANTED = {"input_ids", "attention_mask", "decoder_input_ids", "pixel_values", "bbox"}
_WITH_PIXELS = {"image_grid_thw", "image_sizes", "mm_token_type_ids", "spatial_shapes"}


def _text(request: Request, others: Inputs, names: set[str]) -> Inputs:
    """Token ids and what goes with them; images have their places before the text."""
    images = _placeholders(request, others) if "input_ids" in names else 0
    length = request.sequence + images
    ids = _tokens(request)
    image_id = request.read("image_token_id", "image_token_index", default=0)
    text = {
        "input_ids": torch.cat([ids.new_full((request.batch, images), image_id), ids], dim=1),
        "attention_mask": _mask(request.batch, length, padding=request.sequence // 4),
        "mm_token_type_ids": (torch.arange(length) < images)
        .long()
        .expand(request.batch, length)
        .contiguous(),
    }
    return {name: text[name] for name in names}


def _placeholders(request: Request, others: Inputs) -> int:
    """How many tokens an image takes the place of: as many as the model makes features of it."""
    features = getattr(request.model, "get_image_features", None)
    if features is None or "pixel_values" not in others:
        return 0
    if request.read("image_token_id", "image_token_index") is None:
        return 0
    accepted = inspect.signature(features).parameters
    with torch.no_grad():
        output = features(**{name: value for name, value in others.items() if name in accepted})
    output = getattr(output, "pooler_output", output)
    parts = output if isinstance(output, (list, tuple)) else [output]
    count: int = sum(part.numel() // part.shape[-1] for part in parts)
    return count // request.batch


def _make(name: str, request: Request) -> Tensor:
    maker = _MAKERS.get(name)
    if maker is not None and name not in request.changes.get("shapes", {}):
        return maker(request)
    shape, kind = request.documented(name)
    sizes = [_dimension(part, request) for part in shape]
    if "Long" in kind or "Int" in kind or name.endswith(("_ids", "mask")):
        return torch.ones(sizes, dtype=torch.long) if "mask" in name else request.integers(0, 2, *sizes)
    if "Bool" in kind:
        return torch.ones(sizes, dtype=torch.bool)
    return request.noise(*sizes)


def _dimension(name: str | int, request: Request) -> int:
    """The size of a dimension by the name that the documentation gives it."""
    if isinstance(name, int):
        return name
    if name in request.sizes:
        return int(request.sizes[name])
    if name.isdecimal():
        return int(name)
    if name in ("batch_size", "bs"):
        return request.batch
    if "image_size" in name or name in ("height", "width", "frame_size"):
        return image_size(request)[0]
    if name in ("audio_length", "num_samples", "time_steps"):
        return audio_length(request)
    if "seq" in name or name == "episode_length":
        return request.sequence
    if name in ("num_images", "num_images_or_videos", "num_tiles", "num_videos"):
        return request.batch
    if name == "num_channels":
        return int(request.read("num_channels", "in_channels", default=3))
    if name in ("num_patches", "total_patches"):
        return request.batch * GRID * GRID
    if "patches" in name:
        return GRID * GRID
    if name == "frames":
        return request.sequence
    if name == "num_frames":
        return int(request.read("num_frames", "frames_per_clip", default=2))
    if name in ("channels", "audio_channels"):
        return int(request.read("audio_channels", default=1))
    if name in ("feature_dim", "feature_size", "mel_bins", "num_banks"):
        return int(
            request.read("num_mel_bins", "input_feat_per_channel", "feature_size", "input_dim", default=80)
        )
    value = request.read(name.removeprefix("config."))
    if isinstance(value, int):
        return value
    raise LookupError(f"no rule gives the size of dimension {name!r} of {type(request.model).__name__}")


def image_size(r: Request) -> tuple[int, int]:
    size = r.sizes.get("image_size") or r.read("image_size", "img_size", "input_size", default=IMAGE)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return int(height), int(width)


def audio_length(r: Request) -> int:
    """Samples of audio: `sequence` steps of what the convolutions make one of."""
    return 400 + 320 * r.sequence


def special_tokens(config: Any) -> set[int]:
    """Ids with a meaning, which random text must not hold."""
    found: set[int] = set()
    for part in _parts(config):
        for name, value in vars(part).items():
            if re.search(r"token_id|token_index|_token$", name):
                found.update(v for v in (value if isinstance(value, list) else [value]) if type(v) is int)
    return found


def _tokens(r: Request) -> Tensor:
    limit = min(VOCABULARY, r.read("vocab_size", default=VOCABULARY))
    special = special_tokens(r.config)
    plain = torch.tensor([i for i in range(limit) if i not in special and (i > 3 or limit < 8)])
    return plain[r.integers(0, len(plain), r.batch, r.sequence)]


def _mask(batch: int, length: int, padding: int) -> Tensor:
    """Ones; every row but the first ends in padding."""
    lengths = length - padding * torch.arange(batch).clamp(max=3)
    return (torch.arange(length) < lengths[:, None]).long()


GRID = 4
"""Patches along height and width of an image that comes as a list of patches."""


def _grid(r: Request) -> Tensor:
    """(time, height, width) of each image, in patches."""
    return torch.tensor([[1, GRID, GRID]]).repeat(r.batch, 1)


def _spatial_shapes(r: Request) -> Tensor:
    """(height, width) of each image, in patches."""
    return torch.tensor([[GRID, GRID]]).repeat(r.batch, 1)


def _patches(r: Request) -> Tensor:
    """Images as a list of flat patches, (patches of all images, values of a patch)."""
    channels = r.read("in_channels", "in_chans", "num_channels", default=3)
    depth = r.read("temporal_patch_size", default=1)
    side = r.read("patch_size")
    return r.noise(r.batch * GRID * GRID, channels * depth * side * side)


def _image_sizes(r: Request) -> Tensor:
    return torch.tensor([image_size(r)]).repeat(r.batch, 1)


def _pixels(r: Request) -> Tensor:
    if {"image_grid_thw", "grid_thw"} & set(inspect.signature(r.model.forward).parameters):
        return _patches(r)
    try:
        shape, _ = r.documented("pixel_values")
    except LookupError:
        shape = ["batch_size", "num_channels", "height", "width"]
    if len(shape) == 4 and shape[0] == "batch_size":
        return r.noise(r.batch, r.read("num_channels", "in_channels", default=3), *image_size(r))
    return r.noise(*(_dimension(part, r) for part in shape))


def _audio(r: Request) -> Tensor:
    """Waveforms, with a channel dimension or without, or spectrograms, as documented."""
    shape, _ = r.documented("input_values")
    sizes = [_dimension(part, r) for part in shape]
    return r.noise(*sizes) if "mel" in shape[-1] else r.noise(*sizes[:-1], audio_length(r))


def _features(r: Request) -> Tensor:
    """Spectrograms: (batch, mel, time) where the length is fixed as in Whisper, else (batch, time, mel)."""
    mel = r.read("num_mel_bins", "input_feat_per_channel", "feature_size", default=80)
    time = _feature_length(r)
    return r.noise(r.batch, mel, time) if _whisper(r) else r.noise(r.batch, time, mel)


def _features_mask(r: Request) -> Tensor:
    return torch.ones(r.batch, _feature_length(r), dtype=torch.long)


def _feature_length(r: Request) -> int:
    return 2 * int(r.read("max_source_positions")) if _whisper(r) else 8 * r.sequence


def _whisper(r: Request) -> bool:
    return r.read("max_source_positions") is not None and r.read("input_feat_per_channel") is None


def _merge_sizes(r: Request) -> Tensor:
    """How many patches along a side become one, by image."""
    return torch.full((r.batch,), 2)


def _boxes(r: Request) -> Tensor:
    """(left, top, right, bottom), in thousandths of the page."""
    corners = r.integers(0, 40, r.batch, r.sequence, 2)
    return torch.cat([corners, corners + r.integers(1, 20, r.batch, r.sequence, 2)], dim=-1)


_MAKERS = {
    "bbox": _boxes,
    "decoder_input_ids": _tokens,
    "grid_thw": _grid,
    "hidden_states": _patches,
    "image_grid_thw": _grid,
    "image_sizes": _image_sizes,
    "input_features": _features,
    "input_features_mask": _features_mask,
    "input_values": _audio,
    "image_merge_sizes": _merge_sizes,
    "merge_sizes": _merge_sizes,
    "pixel_values": _pixels,
    "qformer_input_ids": _tokens,
    "spatial_shapes": _spatial_shapes,
}
