"""Masks that transformers leaves out depending on values, which it does not read during a capture.

If padding hides nothing, the eager model passes no mask to `scaled_dot_product_attention`: attention is then causal or not,
as its module declares. A graph always has the mask. If mask and declaration differ, padded and full inputs give different
results in the eager model. The graph then computes a mask that follows the declaration if padding hides nothing.

A changed mask (`if mask is not None: mask = mask & extra`) would be changed in the graph even if the eager model has no
mask. Such a mask is refused, or decided with `specialize=True`. A bidirectional mask without padding is left out, as in the
eager model: some models cannot use one.
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

# The attention implementation that leaves out causal masks, and the one whose functions are the models' own; both leave
# out bidirectional masks.
_SDPA, _EAGER = "sdpa", "eager"
# Calls that return a mask, or rows and columns of it, unchanged.
_KEEPS = {
    *("getitem", "expand", "unsqueeze", "squeeze", "view", "reshape", "repeat", "repeat_interleave"),
    *("to", "bool", "type", "type_as", "float", "contiguous", "clone", "detach", "narrow", "select"),
}
# Calls that keep numbers counting up.
_KEEPS_ORDER = {"arange", "add", "unsqueeze", "expand"}


@dataclasses.dataclass(frozen=True)
class _Made:
    """A mask that may be left out: its write count when made, whether it is causal, and the options it was made from."""

    mask: torch.Tensor
    writes: int
    is_causal: bool
    options: dict[str, Any]

    @property
    def is_whole(self) -> bool:
        """Tell whether only padding decides if the mask is left out: not for a window, or with more keys than queries."""
        padding, keys = self.options.get("attention_mask"), self.options["kv_length"]
        whole = not self.options.get("local_size") and self.options["q_length"] == keys
        return bool(whole and (padding is None or padding.shape[-1] == keys))

    @property
    def is_written(self) -> bool:
        return _writes(self.mask) != self.writes


def patch_masks(
    patch: Patches, writer: GraphWriter, specialised: bool, refuse: Callable[[str], None]
) -> None:
    """Refuse or decide masks that differ from attention without a mask, if transformers is imported."""
    masking, modeling = map(sys.modules.get, ("transformers.masking_utils", "transformers.modeling_utils"))
    if masking is None or modeling is None:
        return
    watch = _SkippableMasks(writer, specialised, patch.active, refuse)
    # Functions registered for all models; a user's own function in a registry takes precedence and stays.
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
        """Find one sequence if positions count up: transformers does not look while torch is traced."""
        return None if _counts_up(writer.argument(position_ids)) else original(position_ids)

    @patch(masking, "_ignore_bidirectional_mask_sdpa")
    def ignore(original: Any, padding_mask: Any, kv_length: Any, local_attention_size: Any = None) -> bool:
        """Leave out masks without padding: transformers keeps them while torch is exporting."""
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
    # The masks that replace those whose direction differs from the declaration of the attention.
    as_declared: dict[tuple[torch.fx.Node, bool], torch.Tensor | None] = dataclasses.field(
        default_factory=dict
    )

    def making(self, name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        """Record the masks that `make` creates, for the implementation with this name."""

        def mask(*args: Any, **options: Any) -> Any:
            padding = options.get("attention_mask")
            if self.active() and isinstance(padding, torch.Tensor):
                # Rows are found by index: too few raise an IndexError, except where the eager model leaves the mask out.
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
        """Watch attention that, without a mask, is causal or not as its module `declares`; eager attention sees every key."""

        def attention(
            module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **options: Any
        ) -> Any:
            mask, given = attention_mask, options.get("is_causal")
            declared = bool(getattr(module, "is_causal", True) if given is None else given)
            for made in self._unchanged(module, attention_mask):
                # Moonshine declares that it is not causal if it has a mask, which the eager model leaves out.
                declared = declared or (made.is_causal and bool(getattr(module, "is_causal", False)))
                if declares and made.is_causal != declared:
                    one_query = (
                        type(query.shape[2]) is int and query.shape[2] == 1
                    )  # one query may see every key in both cases
                    mask = mask if one_query else self._declared(module, attention_mask, made, declared)
            return attend(module, query, key, value, mask, *args, **options)

        return attention

    def _unchanged(self, module: Any, mask: Any) -> list[_Made]:
        """Return the recorded masks that `mask` consists of; raise TraceError for a change that the eager model may leave out."""
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
        """Return the mask for an attention whose declared direction differs from that of its mask."""
        node = self.writer.argument(mask)
        if node not in self.made or not made.is_whole:
            self.refuse(_reason(type(module).__name__, declared))
        if (node, declared) not in self.as_declared:
            self.as_declared[node, declared] = _as_declared(mask, made.options, declared)
        return self.as_declared[node, declared]


def _is_there(made: _Made) -> bool:
    """Tell whether the eager model has this mask too, according to the example inputs; the graph checks this."""
    padding: torch.Tensor | None = made.options.get("attention_mask")
    if padding is None or not made.is_whole:
        return False
    return not bool(padding.all())


def _is_part(mask: torch.fx.Node, made: Collection[torch.fx.Node]) -> bool:
    """Tell whether a mask is a recorded mask, or rows and columns of one, combined with nothing else."""
    while mask not in made:
        name = mask.target if isinstance(mask.target, str) else getattr(mask.target, "__name__", "")
        source = first_argument(mask)
        if name not in _KEEPS or not isinstance(source, torch.fx.Node):
            return False
        mask = source
    return True


def _counts_up(positions: torch.fx.Node) -> bool:
    """Tell whether numbers come from an `arange`, plus one number for all, and were never written."""
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
    """The number of writes to a mask; 0 under inference mode, where torch does not count."""
    return 0 if mask.is_inference() else version_of(mask)


def _as_declared(mask: torch.Tensor, made: dict[str, Any], is_causal: bool) -> torch.Tensor | None:
    """The mask (batch, 1 or heads, queries, keys) that follows the declared direction if padding hides nothing."""
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
        f"{attention} attends {with_mask} if the attention mask hides a token, and {without} if it hides none: "
        "transformers then leaves the mask out, and the module declares "
        f"is_causal={declared}. A graph cannot do both if the mask has a window or other keys than queries, or is part of "
        f"another mask: with attn_implementation='eager' the model always attends {with_mask}"
    )


def _changed(attention: str, origin: str) -> str:
    return (
        f"the forward changes the attention mask of {attention}. If padding hides no token, transformers leaves out the mask and "
        "thus the change, but a graph always has both. Capture with specialize=True and an example in which padding hides a "
        "token; or give the change to transformers as and_mask_function, with which the mask is always there. "
        f"The changed mask is {origin}"
    )


def _sources(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """A mask and the nodes it is made from; not the inputs of a layer that computes a part of it, such as a position bias."""
    return reached([node], lambda made: made.all_input_nodes if made.op != "call_module" else ())
