"""Modes that a forward switches (gradients, autocast, inference mode, attention backends), as nodes.

A node that switches a mode passes the previous mode to the node that restores it, so that a graph restores the mode of its
caller. torch.compile cannot trace separate calls of `__enter__` and `__exit__` of these contexts. It puts other functions
into its graph instead, so the functions here call those while they are compiled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import has_side_effect
from torch.nn.attention import SDPBackend, sdpa_kernel

from fxopt.capture import capture_internals as internals

_thread = threading.local()


@has_side_effect
def set_grad_enabled(mode: bool) -> bool:
    """Switch gradients on or off and return what was set before."""
    previous = torch.is_grad_enabled()
    internals.set_grad_enabled(mode)
    return previous


@has_side_effect
def enter_autocast(device_type: str, dtype: torch.dtype | None, enabled: bool, cache_enabled: bool) -> Any:
    """Enter `torch.autocast`; the result goes to `leave`."""
    if torch.compiler.is_dynamo_compiling():
        return internals.enter_autocast(device_type, dtype, enabled, cache_enabled)
    return _enter(torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled))


@has_side_effect
def enter_inference_mode(mode: bool) -> Any:
    """Enter `torch.inference_mode`; the result goes to `leave`."""
    if internals.INFERENCE_COMPILED and torch.compiler.is_dynamo_compiling():
        return internals.enter_inference_mode(mode)
    return _enter(torch.inference_mode(mode))


@has_side_effect
def enter_sdpa_kernel(backends: list[str], set_priority: bool) -> Any:
    """Enter `torch.nn.attention.sdpa_kernel` with backends by name; the result goes to `leave`."""
    chosen = [getattr(SDPBackend, name) for name in backends]
    if internals.SDPA_COMPILED and torch.compiler.is_dynamo_compiling() and not set_priority:
        previous = internals.sdpa_backends()
        internals.switch_sdpa_backends(chosen)
        return previous
    return _enter(sdpa_kernel(chosen, set_priority))


@has_side_effect
def leave(context: Any) -> None:
    """Leave a context that one of the `enter` functions returned."""
    if isinstance(context, list):
        internals.switch_sdpa_backends(context)
    elif torch.compiler.is_dynamo_compiling() and isinstance(context, torch.autocast):
        internals.exit_autocast(context)
    elif internals.INFERENCE_COMPILED and torch.compiler.is_dynamo_compiling():
        internals.exit_inference_mode(context)
    else:
        if context in _entered():  # not there when it was entered inside compiled code
            _entered().remove(context)
        context.__exit__(None, None, None)


# The targets of nodes that switch a mode.
SWITCHES = {set_grad_enabled, enter_autocast, enter_inference_mode, enter_sdpa_kernel, leave}


def idle(nodes: Iterable[Node]) -> Sequence[Node]:
    """Return the mode switches that have no effect if gradients and autocast are off; none if one may switch a mode on."""
    switches = [node for node in nodes if node.target in SWITCHES]
    return switches if all(map(_switches_off, switches)) else []


def _switches_off(node: Node) -> bool:
    if isinstance(node.args[0], Node):  # it restores what that node found
        return _switches_off(node.args[0])
    flags: dict[Any, int] = {set_grad_enabled: 0, enter_autocast: 2}
    # A mode that no node restores is still set after the graph.
    return node.target in flags and node.args[flags[node.target]] is False and bool(node.users)


def leave_all(depth: int = 0) -> None:
    """Leave the contexts that this thread entered, until `depth` of them remain."""
    while len(_entered()) > depth:
        _entered().pop().__exit__(None, None, None)


@contextlib.contextmanager
def restored_on_error() -> Iterator[None]:
    """Restore the caller's modes if the block raises between an `enter` and its `leave`."""
    grad_enabled = torch.is_grad_enabled()
    depth = len(_entered())
    try:
        yield
    except BaseException:
        leave_all(depth)
        internals.set_grad_enabled(grad_enabled)
        raise


@dataclasses.dataclass(frozen=True)
class ApplyFunction:
    """The target of a node that applies a `torch.autograd.Function`: fx would name its own `apply` as a function of torch.

    Attributes:
        function: the class.
        only_reads: True if it was observed to write into none of its arguments.
    """

    function: type
    only_reads: bool = dataclasses.field(default=False, compare=False)

    @property
    def __name__(self) -> str:
        return f"apply_{self.function.__name__}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)  # type: ignore[attr-defined]


def is_enabled(mode: str, device_type: str) -> bool:
    """Tell whether a global mode, `grad`, `autocast` or `inference_mode`, is on."""
    if mode == "inference_mode":
        return torch.is_inference_mode_enabled()
    return torch.is_grad_enabled() if mode == "grad" else torch.is_autocast_enabled(device_type)


def _enter(context: Any) -> Any:
    context.__enter__()
    _entered().append(context)
    return context


def _entered() -> list[Any]:
    if not hasattr(_thread, "entered"):
        _thread.entered = []
    entered: list[Any] = _thread.entered
    return entered
