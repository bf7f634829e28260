"""The request for an input: a model and its sizes, read from its documentation and config."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from .configs import IMAGE

GRID = 4
"""Patches along height and width of an image that comes as a list of patches."""


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


def dimension(name: str | int, request: Request) -> int:
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
