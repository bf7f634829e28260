"""Small configs by rules: for any config class of transformers, its defaults made small and kept consistent.

Three rules keep a config consistent. Widths are capped, never drawn, so sizes that were equal stay equal. Fields that a
config derives from others are left to the config. Equal token ids stay equal throughout a config.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig, ResNetConfig, TimmBackboneConfig

VOCABULARY = 256
"""Upper limit of token ids; special tokens above it get the highest ids below it, counted down."""

WIDTH = 64
HEADS = 4
HEAD_WIDTH = WIDTH // HEADS
LAYERS = 2
LAYER_KINDS = 4
"""Maximum number of kinds of layers that are kept."""
Tokens = dict[int, int]
"""Small special token ids by their original ids: equal ids stay equal."""
IMAGE = 64
"""Height and width of images in pixels, if the patch size allows it."""


def small_config(
    config: PreTrainedConfig, changes: Mapping[str, Any], tokens: Tokens | None = None
) -> PreTrainedConfig:
    """Make a small config of the same class as `config`, which has the defaults of its class.

    `changes` has values to use unchanged; a mapping for a nested config changes only the fields that it names.
    """
    tokens = {} if tokens is None else tokens
    values: dict[str, Any] = {}
    for name, value in _given(config).items():
        if isinstance(changes.get(name), Mapping) and isinstance(value, PreTrainedConfig):
            values[name] = small_config(value, changes[name], tokens)
        elif name not in changes:
            values[name] = _small(name, value, tokens)
    values = _consistent(values, config)
    nested = {name for name, value in values.items() if isinstance(value, PreTrainedConfig)}
    values |= {name: value for name, value in changes.items() if name not in nested}
    return type(config)(**values)


def _given(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields that define `config`, without those that its class computes from others."""
    defaults = vars(type(config)())
    given = {}
    for field in dataclasses.fields(config):
        if field.name in _GENERAL:
            continue
        stored = config.attribute_map.get(field.name, field.name)
        actual = vars(config).get(stored)
        declared = field.default
        # lists of widths and depths are computed too, but not from fields that get smaller
        computed = (
            declared is None
            and not isinstance(actual, PreTrainedConfig)
            and not re.search(_SCALES, field.name)
        )
        if actual is not None and not (computed and actual == defaults.get(stored)):
            given[field.name] = actual
    return given


_SCALES = r"^(depths|hidden_sizes|embed_dims|embed_dim_per_stage|hidden_dims|channels)$"
_GENERAL = {field.name for field in dataclasses.fields(PreTrainedConfig)}


def _small(name: str, value: Any, tokens: Tokens) -> Any:
    if isinstance(value, TimmBackboneConfig):  # the same network, without the package timm
        value = ResNetConfig(out_indices=[*range(1, 5)][-len(value.out_indices or [4]) :])
    if isinstance(value, PreTrainedConfig):
        return small_config(value, {}, tokens)
    if isinstance(value, bool):  # the cache is off, because no second call reads it
        return value and name != "use_cache"
    if isinstance(value, int):
        return _small_integer(name, value, tokens)
    if isinstance(value, (list, tuple)) and value and all(type(item) is int for item in value):
        return type(value)(_small_list(name, list(value), tokens))
    return value


def _small_integer(name: str, value: int, tokens: Tokens) -> int:
    if re.search(_TOKEN, name):
        return _small_token(value, tokens)
    if name == "window_size":  # small values are in patches, larger ones in pixels
        return 2 if value < 32 else value
    limits = (limit for pattern, limit in _LIMITS.items() if re.search(pattern, name))
    return min(value, next(limits, value))


def _small_token(original: int, tokens: Tokens) -> int:
    if original < VOCABULARY // 2:
        return original
    return tokens.setdefault(original, VOCABULARY - 1 - len(tokens))


_TOKEN = r"token_id$|token_index$|_token$|_idx$|(bos|eos|pad|sep|cls|mask|unk|image|video|audio)_id$"
_LIMITS = {
    r"vocab(ulary)?_size|vocab_size_": VOCABULARY,
    r"num_encoder_blocks|num_stages|num_queries|num_proposals": 8,
    r"mm_tokens_per_image": 4,
    r"codebook_dim$|quantization_hidden_dimension$": WIDTH,
    r"^(num|n)_filters$": 8,
    r"base_channels$": 32,
    r"initial_channel|d_latents|upsample_groups": WIDTH,
    r"num_groups$": 4,
    r"d_ssm$": 2 * WIDTH,
    r"hash.*_vocab$": VOCABULARY,
    r"(kv|key_value).*heads?$|heads?_(kv|key_value)$": 2,
    r"(num|n|nb).*heads?$|(^|_)heads$|^n_head$|attention_heads": HEADS,
    r"^rotary_dim$": HEAD_WIDTH // 2,
    r"head_(dim|size|width)|headdim|^d_kv$|^d_head$|(nope|rope|v)_head_dim|qk_.*dim": HEAD_WIDTH,
    r"lora_rank|_rank$": HEAD_WIDTH,
    r"experts?_per_tok|top_?k$|moe_k$|^num_selected": 2,
    r"shared_experts?$|offset": 1,
    r"(num|n)_.*experts$|^num_experts|experts?_num$": 4,
    r"n_group$|topk_group$": 1,
    r"first_k_dense|interval|every|frequency|_freq$|stride$|period$|_step$": 2,
    r"layers?$|^depth$|num_.*blocks?$|.*_depth$|n_layer$": LAYERS,
    r"source_positions|target_positions": WIDTH,
    r"(max|n|num)_.*positions?(_embeddings)?$|positions?$|_length$|seq_len": 512,
    r"hidden_(size|dim)|d_model|n_embd|embed_dim|embedding_(size|dim)|_width$|^dim$|projection_(dim|size)": WIDTH,
    r"intermediate|ffn|d_ff|mlp_dim|inner|mlp_hidden|feedforward|feed_forward_size": 2 * WIDTH,
    r"(channels|filters|_dim|_size|_features)$": 2 * WIDTH,
}
"""The largest integer of a field, by its name; the first pattern that is found decides."""


def _small_list(name: str, values: list[int], tokens: Tokens) -> list[int]:
    if re.search(r"depths|num_blocks|num_layers|layers?$", name):
        return [min(value, 1) for value in values]
    if re.search(r"heads", name):
        return [max(1, value // values[0]) for value in values]
    # The first stage has the width of the model.
    if re.search(r"embed_dim_per_stage|backbone_channel_list", name):
        return [value * WIDTH // max(WIDTH, min(values)) for value in values]
    if re.search(r"hidden_sizes|channels|dims?$|embed_dims|widths|stem_dims", name):
        return [value if value <= 4 else max(4, value // 4) for value in values]
    if re.search(r"token_id", name):
        return [_small_token(value, tokens) for value in values]
    return values


def _consistent(values: dict[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    """Make fields consistent that depend on each other."""
    original = vars(config)
    names = {field.name for field in dataclasses.fields(config)}
    for name, number in _NEEDED.items():
        if name in names and original.get(name) is None:
            values[name] = number
    _image(values)
    _outputs(values, config)
    _layers(values, config)
    heads = original.get("num_attention_heads")
    if "num_key_value_heads" in names and original.get("num_key_value_heads") in (heads, None):
        values["num_key_value_heads"] = values.get("num_attention_heads", HEADS)
    if "head_dim" in names and original.get("head_dim") is None and "hidden_size" in values:
        values["head_dim"] = values["hidden_size"] // values.get("num_attention_heads", HEADS)
    _sections(values, config)
    return values


_NEEDED = {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1, "vocab_size": VOCABULARY}
"""Values that some configs leave open although their models require them."""


def _image(values: dict[str, Any]) -> None:
    """Make images a whole number of patches."""
    patch = values.get("patch_size")
    for name in ("image_size", "img_size", "input_size"):
        if isinstance(values.get(name), int) and values[name] >= IMAGE:
            side = patch or 1
            values[name] = side * max(2, IMAGE // side)
        elif isinstance(values.get(name), (list, tuple)):
            values[name] = type(values[name])(IMAGE for _ in values[name])


def _layers(values: dict[str, Any], config: PreTrainedConfig) -> None:
    """Keep one layer of every kind in lists with one item a layer, and set the number of layers to match."""
    count_name = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    count = vars(config).get(count_name)
    if count_name not in values or values[count_name] == count:
        return
    lists = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, (list, tuple)) and len(value) == count
    }
    kinds = [tuple(map(str, items)) for items in zip(*lists.values(), strict=True)] if lists else []
    kept = [i for i, kind in enumerate(kinds) if kind not in kinds[:i]][:LAYER_KINDS]
    kept = kept if len(kept) >= values[count_name] else [*range(values[count_name])]
    values[count_name] = len(kept)
    for name, value in lists.items():
        values[name] = type(value)(value[i] for i in kept)


def _outputs(values: dict[str, Any], config: PreTrainedConfig) -> None:
    """Keep the number of feature maps of a backbone, from the layers that it still has."""
    indices = values.pop("_out_indices", None)
    layers = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    if indices is None:
        return
    if layers in values:
        values[layers] = max(values[layers], len(indices))
        indices = [*range(values[layers] + 1)][-len(indices) :]
    values["out_indices"] = [*indices]


def _sections(values: dict[str, Any], config: PreTrainedConfig) -> None:
    """Divide the frequencies of a head among time, height and width in multimodal rotary embeddings."""
    ignored = getattr(config, "ignore_keys_at_rope_validation", None) or ()
    rope = vars(config).get("rope_parameters") or {}
    if not rope or "mrope_section" not in {*ignored, *rope}:
        return
    head = HEAD_WIDTH
    frequencies = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
    third = frequencies // 3
    sections = {"mrope_section": [frequencies - 2 * third, third, third]}
    values["rope_parameters"] = {**rope, **sections}
