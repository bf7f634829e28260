"""Where the tensors of a capture come from, and the memory that they share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fxopt.effects import written_by
from fxopt.errors import TraceError
from fxopt.graph import called_module
from fxopt.memory import storage_of
from fxopt.objects import build_object, set_attributes, set_items, tensors_in
from fxopt.operators import Fact, facts_of


def memory_of(nodes: Iterable[torch.fx.Node]) -> set[int]:
    """The memory of the tensors in the values of nodes."""
    return {storage_of(tensor) for node in nodes for tensor in tensors_in(node.meta.get("val"))}


class OutOfSightError(TraceError):
    """A tensor is used that no recorded call has made."""


@dataclasses.dataclass
class Origin:
    """The origin of a tensor: a node, written when first needed, and the path from its result to the tensor."""

    source: torch.fx.Node | Callable[[], torch.fx.Node]
    path: tuple[tuple[str, Any], ...] = ()

    @property
    def node(self) -> torch.fx.Node:
        return self.source if isinstance(self.source, torch.fx.Node) else self.source()


class SharedMemory:
    """The memory of the tensors of one capture; `values` is the writer's growing list of values that have a node."""

    def __init__(self, model: torch.nn.Module, values: Sequence[Any]) -> None:
        self._model = model
        self._values = values
        # Memory -> the tensors in it, among the first `_indexed` values; and the memory of the model's own tensors.
        self._sharing: dict[int, set[int]] = {}
        self._indexed = 0
        self._models: set[int] = set()

    def is_sole_view(self, tensor: torch.Tensor, node: torch.fx.Node | None) -> bool:
        """Tell whether `node` made this tensor, and nothing that a later call or the caller can see shares its memory."""
        if node is None or not self._is_new(node):
            return False
        if any(user.target in (build_object, set_attributes, set_items) for user in node.users):
            return False  # an object has it already
        if not self._models:
            self._models = {storage_of(t) for t in (*self._model.parameters(), *self._model.buffers())}
        for value in self._values[self._indexed :]:
            for t in tensors_in(value):
                self._sharing.setdefault(storage_of(t), set()).add(id(t))
        self._indexed = len(self._values)
        memory = storage_of(tensor)
        return memory not in self._models and self._sharing[memory] == {id(tensor)}

    def _is_new(self, node: torch.fx.Node) -> bool:
        """Tell whether a node's value has its own memory for all inputs: `x.float()`, for one, may return `x`."""
        module = called_module(self._model, node)
        if node.args and node.args[0] in (written_by(node, module) or ()):
            return self._is_new(node.args[0])  # type: ignore[arg-type]  # what is written is a node
        return Fact.NEW in facts_of(node, module)
