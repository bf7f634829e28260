"""Writes a module as JSON: its values, modules and nodes, each once."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.fx.node import map_aggregate

from fxopt.capture.runtime.input_guard import InputGuard
from fxopt.capture.runtime.traced_module import TracedModule
from fxopt.graph import origin_of, place
from fxopt.objects import qualified_name
from fxopt.rewriting.edits import NodeEdit, NodeState, Reference, Swapped
from fxopt.rewriting.record import MARKS, PassRecord, Step, orders_of, steps_of
from fxopt.rewriting.transformation import Transformation
from fxopt.rewriting.weights import Keep
from fxopt.saving.allowed import CONSTANTS, Names, Refused, within
from fxopt.saving.calls import check_node
from fxopt.saving.kinds import ANNOTATIONS, DATA, GRAPHS, MEMBERS, OF_GUARDS, PARTS, unsaved_attributes
from fxopt.saving.tensors import TensorTable
from fxopt.torch_internals import non_persistent_of


class Writer:
    """Writes a module and its content; raises Refused if it cannot be written.

    Args:
        names: the objects that may be named.
        root: the module; for a graph module, the record of its passes is written, too, so that undo works.
    """

    def __init__(self, names: Names, root: nn.Module) -> None:
        self.tensors = TensorTable(root)
        self._names, self._records = names, isinstance(root, GraphModule)
        self._numbers: dict[nn.Module, int] = {}
        self._modules: list[Any] = []
        # The origin of nodes in the model, each once.
        self._origins: dict[str, int] = {}
        self.write(root)

    def document(self) -> dict[str, list[Any]]:
        """Return the document without the tensors; the root is the first of the modules."""
        return {"origins": list(map(json.loads, self._origins)), "modules": self._modules}

    def write(self, value: Any) -> Any:
        """Convert a value to JSON."""
        kind: Any = dict if type(value) is immutable_dict else type(value)
        if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
            return value
        if kind in (list, immutable_list):
            return list(map(self.write, value))
        if kind in PARTS:
            parts = PARTS[kind](value)
            return {kind.__name__: self.write(parts if isinstance(parts, str) else list(parts))}
        if isinstance(value, Reference):
            return {"node": value.name}
        if isinstance(value, Tensor):
            return {"tensor": self.tensors.key(value)}
        if isinstance(value, nn.Module):
            return {"module": self._module(value)}
        if isinstance(value, enum.Enum):
            return {"enum": [self._names.of(kind), value.name]}
        if kind in DATA.values() or isinstance(value, Transformation):
            return {"data": self._data(value)}
        if any(cls.__name__ == "PreTrainedConfig" for cls in kind.__mro__):
            return {"config": [qualified_name(kind), self.write(value.to_dict())]}
        if callable(value) or isinstance(value, CONSTANTS):
            return {"name": self._names.of(value)}
        raise Refused(f"a {qualified_name(kind)}, which is no data that can be saved: delete it")

    def _members(self, members: Mapping[str, Any]) -> dict[str, Any]:
        written: dict[str, Any] = {}
        for name, value in members.items():
            with within(name):
                written[name] = self.write(value)
        return written

    def _module(self, module: nn.Module) -> int:
        if module not in self._numbers:
            self._numbers[module] = len(self._modules)
            entry: dict[str, Any] = {"class": self._class(module)}
            self._modules.append(entry)
            for word, (registry, _) in MEMBERS.items():
                members = vars(module)[registry].items()
                entry[word] = self._members({n: m for n, m in members if not isinstance(m, PassRecord)})
            entry["not_persistent"] = sorted(non_persistent_of(module))
            attributes = self._attributes(module)
            if isinstance(module, TracedModule):
                config = attributes.pop("config")  # the graph does not need it
                entry["config"] = None if self._refusal(config) else self.write(config)
            entry["attributes"] = self._members(attributes)
            if isinstance(module, GraphModule):
                entry |= self._graph(module)
        return self._numbers[module]

    def _class(self, module: nn.Module) -> str:
        if torch.nn.utils.parametrize.is_parametrized(module):
            raise Refused(
                "is parametrized, which makes it a class of its own: call "
                "torch.nn.utils.parametrize.remove_parametrizations before the capture"
            )
        kind = next(c for c in type(module).__mro__ if not c.__qualname__.endswith("GraphModuleImpl"))
        return kind.__name__ if kind in GRAPHS.values() else self._names.of(kind)

    def _attributes(self, module: nn.Module) -> dict[str, Any]:
        state: Any = module.__getstate__()
        skipped = unsaved_attributes(module)
        for name in skipped:
            if name.endswith("_hooks") and state.get(name):
                raise Refused(f"has hooks ({name}), which are no data: remove them")
        kept = ("training", *OF_GUARDS) if isinstance(module, InputGuard) else state.keys() - skipped
        return {name: value for name, value in state.items() if name in kept}

    def _graph(self, module: GraphModule) -> dict[str, Any]:
        steps = steps_of(module)  # also restores marks that pickling dropped
        return {
            "name": type(module).__name__,
            "nodes": list(map(self._node, module.graph.nodes)),
            "steps": [self._step(step) for step in steps if self._records],
            "orders": self.write(orders_of(module)),
        }

    def _node(self, node: Node) -> dict[str, Any]:
        with within(place(node)):
            state = vars(NodeState.of(node))
            check_node(self._names, **state)
            origin = json.dumps(self.write(_origin(node)))
            return {
                **self._members(state),
                "name": node.name,
                "type": next((name for name, kind in ANNOTATIONS.items() if kind is node.type), ""),
                "marks": self.write(node.meta.get(MARKS)),
                "origin": self._origins.setdefault(origin, len(self._origins)),
            }

    def _step(self, step: Step) -> Any:
        error = self._refusal(step)
        lost = error or (self._refusal(step.transformation) if step.by_hand and step.transformation else None)
        if lost and step.reversible and step.edits is not None:
            warnings.warn(
                f"fxopt.undo cannot undo {step.name} after loading, because it holds {lost}"
                + f"; {step.name}(gm, reverse=True) can" * (not error),
                stacklevel=2,
            )
        if error:
            # The step stays in the history; undo will report that its changes are no longer known.
            step = dataclasses.replace(step, edits=None, transformation=None, parts=())
        return self.write(step)

    def _refusal(self, value: Any) -> Refused | None:
        """Return the reason why a value cannot be written; None if it can."""
        try:
            Writer(self._names, nn.Module()).write(value)
        except Refused as error:
            return error
        return None

    def _data(self, value: Any) -> list[Any]:
        kind = type(value)
        name = kind.__name__ if kind in DATA.values() else self._names.of(kind)
        described = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
        fields = {field.name: getattr(value, field.name) for field in described if field.init}
        undone_by: list[Any] = []
        if vars(value) and not described:  # a pass of a user, whose constructor is unknown
            raise Refused(f"a {name}, which has attributes and is no dataclass")
        if isinstance(value, NodeEdit):
            fields["meta"] = _origin(value)
        elif isinstance(value, Step):
            made = value.transformation  # maybe bytes from a pickle; undo by the record does not need it
            known = isinstance(made, Transformation) and not self._refusal(made)
            fields["transformation"] = made if known else None
        elif isinstance(value, Swapped) and not isinstance(value.restore, Keep | None):
            call = functools.partial(value.restore)
            function = self._names.restoring(qualified_name(call.func))
            undone_by = [[qualified_name(function), self.write(call.args), self.write(call.keywords)]]
            fields["restore"] = None
        return [name, self._members(fields), *undone_by]


def _origin(node: Node | NodeEdit) -> dict[str, Any]:
    """The origin of a node in the model, with names of classes instead of classes, as in torch.export."""
    name: Any = lambda value: qualified_name(value) if isinstance(value, type) else value  # noqa: E731
    return {key: map_aggregate(value, name) for key, value in origin_of(node).items()}
