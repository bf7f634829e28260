"""Masks that transformers leaves out for values that it does not read while it is traced.

Where padding hides nothing, transformers gives `scaled_dot_product_attention` no mask: attention is then causal or not as its
module declares. A graph has the mask. Where that says something else, the eager model computes one thing for padded inputs
and another for full ones; the graph then computes a mask that lets through what the module declares if padding hides nothing.

A mask that the model changes (`if mask is not None: mask = mask & extra`) would be changed in the graph also where the eager
model has none; it is refused, or with `specialize=True` decided. A mask in both directions without padding is left out, as in
the eager model: some models could not use it if it were there.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from fxopt.capture.nodes.graph_writer import GraphWriter
from fxopt.capture.nodes.source_location import describe_origin
from fxopt.capture.patches.replaced import Patches
from fxopt.graph import first_argument, function_name, reached, value_of
from fxopt.torch_internals import version_of

# The one of transformers' implementations that leaves out causal masks, and the one whose functions are the models' own;
# both leave out masks in both directions.
_SDPA, _EAGER = "sdpa", "eager"
# What gives a mask, or rows and columns of it, as it is.
_KEEPS = {
    *("getitem", "expand", "unsqueeze", "squeeze", "view", "reshape", "repeat", "repeat_interleave"),
    *("to", "bool", "type", "type_as", "float", "contiguous", "clone", "detach", "narrow", "select"),
}
# Of numbers that count up, these make others that do.
_KEEPS_ORDER = {"arange", "add", "unsqueeze", "expand"}


@dataclasses.dataclass(frozen=True)
class _Made:
    """A mask that may be left out, how often it had been written then, whether it is causal, and what it was made from."""

    mask: torch.Tensor
    writes: int
    is_causal: bool
    options: dict[str, Any]

    @property
    def is_whole(self) -> bool:
        """Tell whether it is left out for its padding alone: in a window, or with more keys than queries, it is not."""
        padding, keys = self.options.get("attention_mask"), self.options["kv_length"]
        whole = not self.options.get("local_size") and self.options["q_length"] == keys
        return bool(whole and (padding is None or padding.shape[-1] == keys))

    @property
    def is_written(self) -> bool:
        return _writes(self.mask) != self.writes


def patch_masks(
    patch: Patches, writer: GraphWriter, specialised: bool, refuse: Callable[[str], None]
) -> None:
    """Refuse, or decide, a mask that is not what the attention would do without it, if transformers is there."""
    masking, modeling = map(sys.modules.get, ("transformers.masking_utils", "transformers.modeling_utils"))
    if masking is None or modeling is None:
        return
    watch = _SkippableMasks(writer, specialised, patch.active, refuse)
    # What is registered for all; a user's own function in a registry goes before it, and stays.
    masks, attentions = masking.AttentionMaskInterface, modeling.AttentionInterface
    for interface, name, watched in (
        (masks, _SDPA, watch.making),
        (masks, _EAGER, watch.making),
        (attentions, _SDPA, lambda name, attend: watch.attending(attend)),
    ):
        original = interface._global_mapping[name]
        interface.register(name, watched(name, original))
        patch.callback(interface.register, name, original)

    @patch(attentions, "get_interface")
    def get_interface(original: Any, self: Any, name: str, default: Any) -> Any:
        found = original(self, name, default)
        return watch.attending(found, declares=False) if name == _EAGER else found

    @patch(masking, "find_packed_sequence_indices")
    def find_packed(original: Any, position_ids: torch.Tensor) -> Any:
        """Find one sequence where positions count up: while torch is traced, transformers would not look."""
        return None if _counts_up(writer.argument(position_ids)) else original(position_ids)

    @patch(masking, "_ignore_bidirectional_mask_sdpa")
    def ignore(original: Any, padding_mask: Any, kv_length: Any, local_attention_size: Any = None) -> bool:
        """Leave out masks without padding: while torch is said to be exporting, transformers would not."""
        hides_nothing = padding_mask is None and local_attention_size is None
        return hides_nothing or bool(original(padding_mask, kv_length, local_attention_size))


@dataclasses.dataclass
class _SkippableMasks:
    """The masks of one capture that may be left out."""

    writer: GraphWriter
    specialised: bool
    active: Callable[[], bool]
    refuse: Callable[[str], None]
    made: dict[torch.fx.Node, _Made] = dataclasses.field(default_factory=dict)
    origins: dict[torch.fx.Node, list[_Made]] = dataclasses.field(default_factory=dict)
    # The masks that attention gets in the place of one that says something else than it declares.
    as_declared: dict[tuple[torch.fx.Node, bool], torch.Tensor | None] = dataclasses.field(
        default_factory=dict
    )

    def making(self, name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        """Take note of the masks that `make` makes, of the implementation with this name."""

        def mask(*args: Any, **options: Any) -> Any:
            padding = options.get("attention_mask")
            if self.active() and isinstance(padding, torch.Tensor):
                # Its rows are found by their numbers: too few raise an IndexError, but where the eager model leaves the mask out.
                few = "the attention mask has fewer rows than the batch; give it one for each"
                torch._check(padding.shape[0] >= options["batch_size"], lambda: few)
            made = make(*args, **options)
            if self.active() and isinstance(made, torch.Tensor):
                is_causal = options.get("allow_is_causal_skip", True)
                if (is_causal and name == _SDPA) or options.get("allow_is_bidirectional_skip", False):
                    node = self.writer.argument(made)
                    self.made[node] = _Made(made, _writes(made), is_causal, options)
            return made

        return mask

    def attending(self, attend: Callable[..., Any], declares: bool = True) -> Callable[..., Any]:
        """Watch attention that is causal or not, as its module `declares`, where it has no mask; eager attention sees every key."""

        def attention(
            module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **options: Any
        ) -> Any:
            mask, given = attention_mask, options.get("is_causal")
            declared = bool(getattr(module, "is_causal", True) if given is None else given)
            for made in self._unchanged(module, attention_mask):
                # Moonshine says that it is not causal where it has a mask, which the eager model leaves out.
                declared = declared or (made.is_causal and bool(getattr(module, "is_causal", False)))
                if declares and made.is_causal != declared:
                    one_query = (
                        type(query.shape[2]) is int and query.shape[2] == 1
                    )  # it may see every key either way
                    mask = mask if one_query else self._declared(module, attention_mask, made, declared)
            return attend(module, query, key, value, mask, *args, **options)

        return attention

    def _unchanged(self, module: Any, mask: Any) -> list[_Made]:
        """Give the masks that a mask is, or is a part of; TraceError for a change that the eager model may leave out with the mask."""
        if not (self.active() and self.made and isinstance(mask, torch.Tensor)):
            return []
        node = self.writer.argument(mask)
        if node not in self.origins:
            self.origins[node] = [self.made[source] for source in _sources(node) if source in self.made]
        for made in self.origins[node]:
            if (made.is_written or not _is_part(node, self.made)) and not (
                self.specialised and _is_there(made)
            ):
                self.refuse(_changed(type(module).__name__, describe_origin(node)))
        return self.origins[node]

    def _declared(self, module: Any, mask: torch.Tensor, made: _Made, declared: bool) -> torch.Tensor | None:
        """Give the mask for an attention that declares to be causal and whose mask is not, or the other way round."""
        node = self.writer.argument(mask)
        if node not in self.made or not made.is_whole:
            self.refuse(_reason(type(module).__name__, declared))
        if (node, declared) not in self.as_declared:
            self.as_declared[node, declared] = _as_declared(mask, made.options, declared)
        return self.as_declared[node, declared]


def _is_there(made: _Made) -> bool:
    """Tell whether the eager model has this mask too, as the example inputs decide and the graph checks."""
    padding: torch.Tensor | None = made.options.get("attention_mask")
    if padding is None or not made.is_whole:
        return False
    return not bool(padding.all())


def _is_part(mask: torch.fx.Node, made: Collection[torch.fx.Node]) -> bool:
    """Tell whether a mask is one of those that were made, or rows and columns of it, with nothing else joined to it."""
    while mask not in made:
        name = mask.target if isinstance(mask.target, str) else getattr(mask.target, "__name__", "")
        source = first_argument(mask)
        if name not in _KEEPS or not isinstance(source, torch.fx.Node):
            return False
        mask = source
    return True


def _counts_up(positions: torch.fx.Node) -> bool:
    """Tell whether numbers are those of an `arange`, plus one number for all, and were never written."""
    while function_name(positions) in _KEEPS_ORDER:
        value = value_of(positions)
        if value.dtype not in (torch.int32, torch.int64) or value.is_inference() or _writes(value):
            return False
        if positions.target is torch.arange:
            return len(positions.args) == 1
        given = [*positions.args, *positions.kwargs.values()]
        tensors = [n for n in given if isinstance(n, torch.fx.Node) and isinstance(value_of(n), torch.Tensor)]
        repeats = function_name(positions) == "expand" and given[-1] != -1  # perhaps the numbers of a row
        if len(tensors) != 1 or repeats:
            return False
        positions = tensors[0]
    return False


def _writes(mask: torch.Tensor) -> int:
    """How often a mask has been written; under inference mode, torch does not count."""
    return 0 if mask.is_inference() else version_of(mask)


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
        f"is_causal={declared}. A graph cannot be both, for a mask of a window, or of other keys than queries, or for a "
        f"part of one: with attn_implementation='eager' the model always attends {with_mask}"
    )


def _changed(attention: str, origin: str) -> str:
    return (
        f"the forward changes the attention mask that {attention} gets, which transformers leaves out where padding hides no "
        "token: the change is then left out as well, and a graph has both. Give the change to "
        "transformers as and_mask_function, with which the mask is always there; or capture with specialize=True and an "
        "example in which padding hides a token. The mask that it gets is "
        f"{origin}"
    )


def _sources(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """A mask and what it is made of; not what went into a layer that gives a part of it, such as a bias by position."""
    return reached([node], lambda made: made.all_input_nodes if made.op != "call_module" else ())
