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

from validation.architectures.configs import IMAGE, VOCABULARY

Inputs = dict[str, Tensor]


@dataclass
class Request:
    """What an input is made from.

    `sizes` are what an override says about dimensions, by the names that the documentation gives them.
    """

    model: nn.Module
    batch: int
    sequence: int
    generator: torch.Generator
    sizes: Mapping[str, Any] = field(default_factory=dict)

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


def _parts(config: Any) -> list[Any]:
    nested = [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    return [config, *(part for child in nested for part in _parts(child))]


def make_inputs(
    model: nn.Module, batch: int, sequence: int, seed: int, changes: Mapping[str, Any] | None = None
) -> Inputs:
    """Every input that the forward requires, its main input, and those that its architecture is about."""
    changes = changes or {}
    request = Request(model, batch, sequence, torch.Generator().manual_seed(seed), changes.get("sizes", {}))
    parameters = inspect.signature(model.forward).parameters
    required = {
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }
    main = getattr(model, "main_input_name", None)
    wanted = (
        required | (_WANTED | {main if isinstance(main, str) else "input_ids"}) | {*changes.get("with", ())}
    )
    if "input_ids" not in parameters and "attention_mask" not in required:
        wanted.discard("attention_mask")
    wanted -= {*changes.get("without", ())}
    return {name: _make(name, request) for name in parameters if name in wanted}


_WANTED = {"input_ids", "attention_mask", "decoder_input_ids", "pixel_values", "bbox"}


def _make(name: str, request: Request) -> Tensor:
    maker = _MAKERS.get(name)
    if maker is not None:
        return maker(request)
    shape, kind = documented(request.model, name)
    sizes = [_dimension(part, request) for part in shape]
    if "Long" in kind or "Int" in kind or name.endswith(("_ids", "mask")):
        return torch.ones(sizes, dtype=torch.long) if "mask" in name else request.integers(0, 2, *sizes)
    if "Bool" in kind:
        return torch.ones(sizes, dtype=torch.bool)
    return request.noise(*sizes)


def documented(model: nn.Module, name: str) -> tuple[list[str], str]:
    """The dimensions of an input as the forward's docstring names them, and the kind of tensor."""
    text = inspect.getdoc(model.forward) or ""
    found = re.search(rf"\b{re.escape(name)} \(`*([\w.]*)`*,? +of shape `\(+([^`]*?)\)+,?`", text)
    if found is None:
        raise LookupError(
            f"no rule makes input {name!r} of {type(model).__name__}, and it has no documented shape"
        )
    return [part.strip() for part in found.group(2).split(",") if part.strip()], found.group(1)


def _dimension(name: str, request: Request) -> int:
    """The size of a dimension by the name that the documentation gives it."""
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
    if name == "num_channels":
        return int(request.read("num_channels", "in_channels", default=3))
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
    size = r.sizes.get("image_size") or r.read("image_size", "img_size", default=IMAGE)
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


def _mask(r: Request) -> Tensor:
    """Ones; every row but the first ends in padding."""
    lengths = r.sequence - (r.sequence // 4) * torch.arange(r.batch).clamp(max=3)
    return (torch.arange(r.sequence) < lengths[:, None]).long()


def _pixels(r: Request) -> Tensor:
    try:
        shape, _ = documented(r.model, "pixel_values")
    except LookupError:
        shape = []
    if len(shape) == 4 and shape[0] == "batch_size":
        return r.noise(r.batch, r.read("num_channels", "in_channels", default=3), *image_size(r))
    return r.noise(*(_dimension(part, r) for part in shape))


def _audio(r: Request) -> Tensor:
    """Waveforms, with a channel dimension or without, or spectrograms, as documented."""
    shape, _ = documented(r.model, "input_values")
    sizes = [_dimension(part, r) for part in shape]
    return r.noise(*sizes) if "mel" in shape[-1] else r.noise(*sizes[:-1], audio_length(r))


def _features(r: Request) -> Tensor:
    """Spectrograms: (batch, mel, time) where the length is fixed as in Whisper, else as documented."""
    mel = r.read("num_mel_bins", "input_feat_per_channel", "feature_size", default=80)
    positions = r.read("max_source_positions")
    if positions is not None and r.read("input_feat_per_channel") is None:
        return r.noise(r.batch, mel, 2 * positions)
    return r.noise(r.batch, 8 * r.sequence, mel)


def _boxes(r: Request) -> Tensor:
    """(left, top, right, bottom), in thousandths of the page."""
    corners = r.integers(0, 40, r.batch, r.sequence, 2)
    return torch.cat([corners, corners + r.integers(1, 20, r.batch, r.sequence, 2)], dim=-1)


_MAKERS = {
    "input_ids": _tokens,
    "attention_mask": _mask,
    "decoder_input_ids": _tokens,
    "qformer_input_ids": _tokens,
    "pixel_values": _pixels,
    "input_features": _features,
    "input_values": _audio,
    "bbox": _boxes,
}
