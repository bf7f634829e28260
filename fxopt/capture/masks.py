"""Masks that transformers leaves out for values that it does not read while it is traced.

Where padding hides nothing, transformers gives `scaled_dot_product_attention` no mask: attention is then causal or
not as its module declares. A graph has the mask. Both are the same where the module declares what
the mask says; where it does not, the eager model computes one thing for padded inputs and another for full ones.
The graph then computes a mask that lets through what the module declares if padding hides nothing.

A mask in both directions without padding hides nothing, whatever the values and sizes: a graph leaves it out, as the
eager model does. Some models rely on that, and could not use the mask if it were there.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch

from fxopt.capture.recorder import Recorder

_IMPLEMENTATION = "sdpa"  # the one of transformers' implementations that leaves masks out


def watch_masks(stack: contextlib.ExitStack, recorder: Recorder, active: Any) -> None:
    """Refuse, or decide, a mask that is not what the attention would do without it, if transformers is there."""
    masking, modeling = map(sys.modules.get, ("transformers.masking_utils", "transformers.modeling_utils"))
    if masking is None or modeling is None:
        return
    _leave_out_masks_without_padding(stack, masking, active)
    # What is registered for all; a user's own function in a registry goes before it, and stays.
    make_mask: Any = masking.AttentionMaskInterface._global_mapping[_IMPLEMENTATION]
    attend: Any = modeling.AttentionInterface._global_mapping[_IMPLEMENTATION]
    # For each mask that may be left out, whether it is causal, and what it was made from.
    made_from: dict[torch.fx.Node, tuple[bool, dict[str, Any]]] = {}

    # The masks that such attention gets in their place.
    replaced: dict[tuple[torch.fx.Node, bool], torch.Tensor | None] = {}

    @functools.cache
    def origins(mask: torch.fx.Node) -> list[tuple[bool, dict[str, Any]]]:
        return [made_from[node] for node in _sources(mask) if node in made_from]

    def mask(*args: Any, **options: Any) -> Any:
        made = make_mask(*args, **options)
        if active() and isinstance(made, torch.Tensor):
            is_causal = options.get("allow_is_causal_skip", True)
            if is_causal or options.get("allow_is_bidirectional_skip", False):
                made_from[recorder.writer.argument(made)] = is_causal, options
        return made

    def attention(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **options: Any
    ) -> Any:
        one_query = type(query.shape[2]) is int and query.shape[2] == 1  # it may see every key either way
        if active() and made_from and isinstance(attention_mask, torch.Tensor) and not one_query:
            given = options.get("is_causal")
            declared = bool(getattr(module, "is_causal", True) if given is None else given)
            node = recorder.writer.argument(attention_mask)
            for is_causal, made in origins(node):
                if is_causal == declared:
                    continue
                if node not in made_from or not _is_whole(made):
                    recorder.fail(_reason(type(module).__name__, declared))
                if (node, declared) not in replaced:
                    replaced[node, declared] = _as_declared(attention_mask, made, declared)
                attention_mask = replaced[node, declared]
        return attend(module, query, key, value, attention_mask, *args, **options)

    for interface, original, watched in (
        (masking.AttentionMaskInterface, make_mask, mask),
        (modeling.AttentionInterface, attend, attention),
    ):
        interface.register(_IMPLEMENTATION, watched)
        stack.callback(interface.register, _IMPLEMENTATION, original)


def _leave_out_masks_without_padding(stack: contextlib.ExitStack, masking: Any, active: Any) -> None:
    """While torch is said to be exporting, transformers would not."""
    original: Any = masking._ignore_bidirectional_mask_sdpa

    def ignore(padding_mask: Any, kv_length: Any, local_attention_size: Any = None) -> bool:
        hides_nothing = padding_mask is None and local_attention_size is None
        return (active() and hides_nothing) or bool(original(padding_mask, kv_length, local_attention_size))

    masking._ignore_bidirectional_mask_sdpa = ignore
    stack.callback(setattr, masking, original.__name__, original)


def _is_whole(made: dict[str, Any]) -> bool:
    """Whether a mask is left out for its padding alone: in a window, or with more keys than queries, it is not."""
    padding, keys = made.get("attention_mask"), made["kv_length"]
    whole = not made.get("local_size") and made["q_length"] == keys
    return bool(whole and (padding is None or padding.shape[-1] == keys))


def _as_declared(mask: torch.Tensor, made: dict[str, Any], is_causal: bool) -> torch.Tensor | None:
    """The mask (batch, 1 or heads, queries, keys) of an attention that is causal, or not, where padding hides nothing."""
    padding: torch.Tensor | None = made.get("attention_mask")
    if padding is None:
        return None
    if not is_causal:
        return mask | padding.all()
    position = torch.arange(made["kv_length"], device=mask.device)
    return mask & ((position[:, None] >= position) | ~padding.all())


def _reason(attention: str, declared: bool) -> str:
    with_mask, without = (
        ("in both directions", "causally") if declared else ("causally", "in both directions")
    )
    return (
        f"{attention} attends {with_mask} where the attention mask hides a token, and {without} where it hides none: "
        "transformers then leaves the mask out, and the module declares "
        f"is_causal={declared}. A graph cannot be both, for a mask of a window, of other keys than queries, or that the model "
        f"has changed: with attn_implementation='eager' the model always attends {with_mask}"
    )


def _sources(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """A mask and what it is made of; not what went into a layer that gives a part of it, such as a bias by position."""
    seen, left = {node}, [node]
    while left:
        yield (taken := left.pop())
        new = [source for source in taken.all_input_nodes if source not in seen and taken.op != "call_module"]
        seen.update(new)
        left.extend(new)
