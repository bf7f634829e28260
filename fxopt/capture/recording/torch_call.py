"""A call of torch, as the recorder sees it, and the reason why no node can represent it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from fxopt.capture.capture_internals import side_effectful_functions
from fxopt.capture.nodes.source_location import makes_calls
from fxopt.effects import is_write
from fxopt.torch_internals import OpOverloadPacket

_REASONS = {
    **dict.fromkeys(
        ("register_hook", "register_post_accumulate_grad_hook"),
        "calls {name!r}: a graph cannot hold what it does to gradients.",
    ),
    **dict.fromkeys(
        ("_make_dual", "_unpack_dual"),
        "uses forward-mode AD (torch.autograd.forward_ad), whose levels a graph cannot hold: torch.func.jvp can be "
        "captured.",
    ),
    **dict.fromkeys(
        ("_is_view", "is_set_to", "is_shared"),
        "reads {name!r}, which may be another one at each call and which no guard holds.",
    ),
    "__set__": "assigns to the attribute {function.__self__.__name__!r} of a tensor, which a graph cannot hold.",
}
PACKED = (
    "a layer is given a packed sequence, whose lengths are values in a tensor and decide the sizes of other tensors: give it "
    "the padded sequence, and mask the positions after the lengths"
)
CHANGES_CONTAINER = (
    "changes a list or dict that it is given, which a graph cannot follow into a leaf: let it return the change, or make it "
    "no leaf"
)
_RESHAPES_IN_PLACE = {"squeeze_", "resize_", "resize_as_", "set_", "as_strided_"}


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of torch on fake tensors."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", "")

    @makes_calls
    def made(self) -> Any:
        """The value of the call."""
        return self.function(*self.args, **self.kwargs)


def with_schema(function: Any) -> Any:
    """Return the operator of a packet with only one overload, if it writes: torch.fx reads writes from its schema."""
    if isinstance(function, OpOverloadPacket) and len(function.overloads()) == 1:
        operator = getattr(function, function.overloads()[0])
        return operator if is_write(operator) else function
    return function


def has_packed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a packed sequence is among the arguments of a layer."""
    return any(isinstance(value, PackedSequence) for value in (*args, *kwargs.values()))


def refusal(call: Call, result: Any) -> str | None:
    """The reason why no node can represent a call with this `result`; None if one can."""
    name = call.name
    if name in _REASONS:
        return _REASONS[name].format(name=name, function=call.function)
    has_effect = is_write(call.function) or name == "retain_grad"
    if result is None and not has_effect and call.function not in side_effectful_functions:
        return f"calls {name!r}, which a graph cannot hold."
    if name in _RESHAPES_IN_PLACE and any(isinstance(size, torch.SymInt) for size in call.args[0].shape):
        return (
            f"changes the shape of a tensor in place ({name!r}), while its sizes are free: sizes that were read before "
            f"would be read from the changed tensor. Use {name.rstrip('_')!r}."
        )
    return None
