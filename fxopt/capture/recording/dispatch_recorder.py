"""Records the operators that calls dispatch to, in place of the calls, if the calls use tensors that have no node."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.node import has_side_effect

from fxopt.capture.fakes.dynamic_shapes import is_backed
from fxopt.capture.nodes.graph_writer import GraphWriter
from fxopt.capture.nodes.source_location import makes_calls
from fxopt.capture.recording.indexing import squeeze_with_guard, unbind_with_guard
from fxopt.capture.runtime import modes
from fxopt.effects import is_write
from fxopt.torch_internals import TorchDispatchMode

aten = torch.ops.aten


class DispatchRecorder(TorchDispatchMode):
    """Records operators, as `torch.ops` names them."""

    def __init__(self, writer: GraphWriter) -> None:
        super().__init__()
        self._writer = writer
        self._grad_before = self._grad = torch.is_grad_enabled()
        self._switched: torch.fx.Node | None = None

    def restore_gradients(self) -> None:
        """Set the gradient mode from before the first operator."""
        self._switch_gradients(self._grad_before)

    def _switch_gradients(self, mode: bool) -> None:
        if mode != self._grad:
            self._grad = mode
            back = mode == self._grad_before  # back to the mode that the caller of the graph has set
            self._switched = self._writer.call(modes.set_grad_enabled, self._switched if back else mode)

    @makes_calls
    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = self._writer.faked((args, kwargs or {}))
        result: Any = None
        if operator.overloadpacket is aten.squeeze:
            list(squeeze_with_guard(is_backed, *args, **kwargs))
        if operator.overloadpacket is aten.unbind:
            result = unbind_with_guard(*args, **kwargs)
        if result is None:
            result = operator(*args, **kwargs)
        if is_write(operator):
            has_side_effect(operator)
        elif not self._writer.makes_something(result):
            return result
        self._switch_gradients(torch.is_grad_enabled())
        node_args, node_kwargs = self._writer.arguments(operator.__name__, args, kwargs)
        self._writer.create("call_function", operator, node_args, node_kwargs, result)
        return result
