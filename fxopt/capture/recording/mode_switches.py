"""Mode switches of a forward: the nodes that enter a mode, and the nodes that restore the previous mode."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from fxopt.capture.capture_internals import (
    dispatch_mode_stack,
    enter_autocast,
    function_mode_stack,
    pop_dispatch_mode,
    pop_function_mode,
    set_grad_enabled,
)
from fxopt.capture.nodes.graph_writer import GraphWriter
from fxopt.capture.runtime import modes
from fxopt.errors import TraceError

# Functions that return the stack of entered modes (the latest last) and that pop the latest mode.
_STACKS: tuple[tuple[Callable[[], list[Any]], Callable[[], Any]], ...] = (
    (function_mode_stack, pop_function_mode),
    (dispatch_mode_stack, pop_dispatch_mode),
)
_GRAD_CLASSES = (torch.no_grad, torch.enable_grad, torch.set_grad_enabled)
_GRAD_EXITS = {block.__exit__.__code__ for block in _GRAD_CLASSES}
_GRAD_BLOCKS = _GRAD_EXITS | {block.__enter__.__code__ for block in _GRAD_CLASSES}
_GRAD_BLOCKS.add(torch.set_grad_enabled.__init__.__code__)


class ModeSwitches:
    """Writes the nodes of one capture that switch modes; the node that leaves a block gets the node that entered it."""

    def __init__(self, writer: GraphWriter) -> None:
        self._writer = writer
        # Identity of each entered block -> the block, kept alive, and the node.
        self._blocks: dict[int, tuple[Any, torch.fx.Node]] = {}

    def enter(self, block: Any, function: Callable[..., Any], *args: Any) -> None:
        """Write the node that enters a mode; `leave(block)` restores the previous mode."""
        self._blocks[id(block)] = (block, self._writer.call(function, *args))

    def leave(self, block: Any) -> None:
        """Write the node that leaves the mode that `block` entered."""
        self._writer.call(modes.leave, self._blocks.pop(id(block))[1])

    def entered(self, block: Any) -> bool:
        """Tell whether `block` has entered a mode and not left it."""
        return id(block) in self._blocks

    def autocast(self, function: Any, args: tuple[Any, ...]) -> None:
        """Write the node for a call of `enter_autocast` or `_exit_autocast`."""
        # torch has switched the mode already; the frame that reports it is autocast's own method.
        block = _caller().f_locals["self"]
        if function is enter_autocast:
            device_type, dtype, enabled, cache_enabled = args
            self.enter(block, modes.enter_autocast, device_type, dtype, enabled, cache_enabled)
        else:
            self.leave(block)

    def set_grad_enabled(self, mode: bool) -> None:
        """Write the node that sets the gradient mode; the frames above tell which block sets it and restores it later."""
        set_grad_enabled(mode)
        frame = _caller()
        while frame.f_back is not None and frame.f_back.f_code in _GRAD_BLOCKS:
            frame = frame.f_back  # no_grad calls set_grad_enabled
        block = frame.f_locals["self"] if frame.f_code in _GRAD_BLOCKS else None
        if frame.f_code in _GRAD_EXITS and self.entered(block):
            previous = self._blocks.pop(id(block))[1]
            self._writer.call(modes.set_grad_enabled, previous)
            return
        node = self._writer.call(modes.set_grad_enabled, mode)
        if block is not None and not self.entered(block):
            self._blocks[id(block)] = (block, node)


@contextlib.contextmanager
def leave_open_modes() -> Iterator[None]:
    """Leave modes of torch that the block enters and does not leave, which are above those of the capture; raise TraceError."""
    entered = [mode for stack, _ in _STACKS for mode in stack()]
    left = []
    try:
        yield
    finally:
        for stack, pop in _STACKS:
            for mode in reversed(stack()):
                if not any(mode is known for known in entered):
                    left.append(type(mode).__name__)
                    pop()
    if left:
        raise TraceError(
            f"the forward enters {left[0]}, a mode of torch, and does not leave it. Use it in a `with` block."
        )


def _caller() -> FrameType:
    """The frame that makes the recorded call."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_name != "__torch_function__":
        frame = frame.f_back
    assert frame.f_back is not None
    return frame.f_back
