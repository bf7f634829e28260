"""The request for an input: a model and its sizes, read from documentation and config."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
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
    """The model, sizes and random numbers for making an input."""

    model: nn.Module
    batch: int
    sequence: int
    generator: torch.Generator
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Any:
        return self.model.config

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def noise(self, *shape: int) -> Tensor:
        """Normal noise in float32."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).float()

    def read(self, *names: str, default: Any = None) -> Any:
        """The first of these attributes that the config or one of its nested configs has."""
        for name in names:
            for part in _parts(self.config):
                value = getattr(part, name, None)
                if value is not None:
                    return value
        return default

    def documented(self, name: str) -> tuple[list[Any], str]:
        """The dimension names of an input in the forward's docstring, and the type of the tensor."""
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
    """The size of a dimension with this name in the documentation."""
    if isinstance(name, int) or name.isdecimal():
        return int(name)
    if name in (sizes := request.changes.get("sizes", {})):
        return int(sizes[name])
    for pattern, size in _SIZES:
        if re.search(pattern, name):
            return int(size(request))
    value = request.read(name.removeprefix("config."))
    if isinstance(value, int):
        return value
    raise LookupError(f"no rule gives the size of dimension {name!r} of {type(request.model).__name__}")


_SIZES: tuple[tuple[str, Callable[[Request], Any]], ...] = (
    (r"^(batch_size|bs|num_images|num_images_or_videos|num_tiles|num_videos)$", lambda r: r.batch),
    (r"image_size|^(height|width|frame_size)$", lambda r: image_size(r)[0]),
    (r"^(audio_length|num_samples|time_steps)$", lambda r: audio_length(r)),
    (r"seq|^(episode_length|frames)$", lambda r: r.sequence),
    (r"^num_channels$", lambda r: r.read("num_channels", default=3)),
    (r"^(num|total)_patches$", lambda r: r.batch * GRID * GRID),
    (r"patches", lambda r: GRID * GRID),
    (r"^num_frames$", lambda r: r.read("num_frames", "frames_per_clip", default=2)),
    (r"^(audio_)?channels$", lambda r: r.read("audio_channels", default=1)),
)
"""The size of a dimension, by its name in the documentation; the first matching pattern decides."""


def image_size(r: Request) -> tuple[int, int]:
    size = r.read("image_size", "img_size", "input_size", default=IMAGE)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return int(height), int(width)


def audio_length(r: Request) -> int:
    """The number of audio samples that the convolutions reduce to `sequence` steps."""
    return 400 + 320 * r.sequence


def special_tokens(config: Any) -> set[int]:
    """Token ids with a special meaning, which random text must not contain."""
    found: set[int] = set()
    for part in _parts(config):
        for name, value in vars(part).items():
            if re.search(r"token_id|token_index|_token$", name):
                found.update(v for v in (value if isinstance(value, list) else [value]) if type(v) is int)
    return found
