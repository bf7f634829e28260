"""The modules of a graph module as data: classes by name, attributes as values, tensors and children by key."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from fxopt.capture.runtime.input_guard import InputGuard
from fxopt.capture.runtime.traced_module import TracedModule
from fxopt.errors import SaveError
from fxopt.rewriting.record import PassRecord, Step
from fxopt.saving.allowed import NameRefused, Names, qualified_name
from fxopt.saving.calls import check_path, check_value
from fxopt.saving.tensors import TensorTable
from fxopt.saving.values import NotData, Values
from fxopt.torch_internals import (
    BUFFERS,
    COMPILED,
    DERIVED_FROM_GRAPH,
    MODULES,
    NON_PERSISTENT,
    PARAMETERS,
    REGISTRIES,
    buffers_of,
    modules_of,
    non_persistent_of,
    parameters_of,
)

# Classes that their constructor makes again of these attributes; the others are made of all their attributes.
_CONSTRUCTED: dict[type, tuple[str, ...]] = {InputGuard: ("inputs", "alternatives", "decisions")}
_RECORD = ("steps", "orders")
# What a module has when it is made, and nothing more: hooks, above all.
_BARE = frozenset(vars(torch.nn.Module()))
# What torch.fx derives from a graph, or keeps for itself.
_DERIVED = frozenset(vars(GraphModule(torch.nn.Module(), torch.fx.Graph()))) | {
    *(*DERIVED_FROM_GRAPH, "_containers"),
}


class ModuleWriter:
    """Writes modules, each once; `written` are those so far, the first the root.

    Args:
        names: what may be named.
        tensors: takes the tensors.
        records: whether to write the record of passes, with what undo needs, too.
    """

    def __init__(self, names: Names, tensors: TensorTable, records: bool = True) -> None:
        self.written: list[Any] = []
        self.values = Values(names, tensors.key, self._number)
        self._names, self._tensors, self._records = names, tensors, records
        self._numbers: dict[int, int] = {}
        self._paths: dict[int, str] = {}
        self._alive: list[torch.nn.Module] = []

    def write_root(self, module: GraphModule) -> None:
        """Write a graph module and all that is in it but for its graph."""
        self._paths = {id(child): path for path, child in module.named_modules()}
        self._write(module)

    def _number(self, module: torch.nn.Module) -> int:
        return self._numbers[id(module)] if id(module) in self._numbers else self._write(module)

    def _write(self, module: torch.nn.Module) -> int:
        number = self._numbers[id(module)] = len(self.written)
        self._alive.append(module)  # so that no other takes its id
        self.written.append(None)
        where = self._paths.get(id(module), "")
        self.written[number] = {
            "class": self._class(module, where),
            "attributes": self._attributes(module, where),
            "parameters": self._entries(parameters_of(module), where),
            "buffers": self._entries(buffers_of(module), where),
            "not_persistent": sorted(non_persistent_of(module)),
            "children": {
                name: None if child is None else self._number(child)
                for name, child in modules_of(module).items()
                if self._records or not isinstance(child, PassRecord)
            },
        }
        return number

    def _class(self, module: torch.nn.Module, where: str) -> str:
        if isinstance(module, GraphModule) and where == "" and self.written == [None]:
            return kind_of(module)
        if torch.nn.utils.parametrize.is_parametrized(module):
            raise SaveError(
                f"{where} is parametrized, which makes it a class of its own: call "
                "torch.nn.utils.parametrize.remove_parametrizations before the capture."
            )
        try:
            return self._names.of(type(module))
        except NameRefused as error:
            raise SaveError(
                f"{where} is a {error}: fxopt saves layers of torch.nn and its own. Give the class in `trusted`, for save "
                "and for load, if all that it holds is data."
            ) from None

    def _attributes(self, module: torch.nn.Module, where: str) -> dict[str, Any]:
        state = module.__getstate__()
        for name in _BARE:
            if name.endswith("_hooks") and state.get(name):
                raise SaveError(
                    f"{where or 'the graph module'} has hooks ({name}), which are no data: remove them."
                )
        if isinstance(module, PassRecord):
            return {
                "steps": [self._step(step) for step in module.steps],
                "orders": self.values.write(module.orders),
                "training": module.training,
            }
        chosen = _CONSTRUCTED.get(type(module), list(state))
        skipped = _DERIVED if isinstance(module, GraphModule) else _BARE | {COMPILED}
        written = {"training": module.training}
        for name in chosen:
            if name in skipped:
                continue
            try:
                written[name] = self.values.write(state[name])
            except (NameRefused, NotData) as error:
                if name == "config" and isinstance(module, TracedModule):
                    continue  # the graph runs without it
                raise SaveError(
                    f"{where or 'the graph module'}.{name} is or holds {error}. Delete the attribute, or save before it is "
                    "set."
                ) from None
        return written

    def _step(self, step: Step) -> Any:
        modules, tensors = len(self.written), len(self._tensors.tensors)
        try:
            return self.values.write(step)
        except (NameRefused, NotData, SaveError) as error:
            if step.reversible and step.edits is not None:
                warnings.warn(
                    f"{step.name} cannot be undone after loading, because it holds {error}. Give classes and functions of "
                    "yours in `trusted`, for save and for load",
                    stacklevel=2,
                )
            del self.written[modules:]
            self._tensors.forget(tensors)
            self._numbers = {key: number for key, number in self._numbers.items() if number < modules}
            # It stays in the history. Undoing it says that what it did is not known any more.
            return self.values.write(dataclasses.replace(step, edits=None, transformation=None, parts=()))

    def _entries(self, held: Mapping[str, torch.Tensor | None], where: str) -> dict[str, str | None]:
        keys: dict[str, str | None] = {}
        for name, tensor in held.items():
            try:
                keys[name] = None if tensor is None else self._tensors.key(tensor)
            except NotData as error:
                raise SaveError(f"{where}{'.' if where else ''}{name} is {error}.") from None
        return keys


def kind_of(module: GraphModule) -> str:
    """`TracedModule` or `GraphModule`; SaveError for a class of somebody else's."""
    kind = next(c for c in type(module).__mro__ if not c.__qualname__.endswith("GraphModuleImpl"))
    if kind not in (TracedModule, GraphModule):
        raise SaveError(
            f"{qualified_name(kind)} is a class of its own, of which only the graph could be saved."
        )
    return kind.__name__


class ModuleReader:
    """Makes the modules that were written.

    Args:
        names: what may be named.
        written: what `ModuleWriter.written` was.
        tensors: the tensors by key.
    """

    def __init__(self, names: Names, written: Sequence[Any], tensors: Mapping[str, torch.Tensor]) -> None:
        self._names, self._written, self._tensors = names, written, tensors
        self.values = Values(names, tensors.__getitem__, lambda number: self.modules[number])
        # All are made before any is filled, because attributes may hold others.
        self.modules = [self._empty(data["class"]) for data in written]

    def fill(self) -> None:
        """Give the modules, but for the root, all that they hold."""
        for module, data in zip(self.modules, self._written, strict=True):
            registries = self._registries(data)
            attributes = data["attributes"]
            if module is self.modules[0]:
                module.__dict__.update(registries)
                module.training = attributes["training"]
            elif isinstance(module, PassRecord):
                PassRecord.__init__(module, attributes["training"])
                vars(module).update({name: self.values.read(attributes[name]) for name in _RECORD})
            elif type(module) in _CONSTRUCTED:
                arguments = [self.values.read(attributes[name]) for name in _CONSTRUCTED[type(module)]]
                type(module).__init__(module, *arguments)
                module.training = attributes["training"]
            else:
                if not _BARE.isdisjoint(attributes.keys() - {"training"}):
                    raise NotData("hooks of a layer among its attributes")
                read = {name: self.values.read(value) for name, value in attributes.items()}
                for value in read.values():
                    check_value(self._names, value)
                module.__setstate__(vars(module) | registries | read)

    def graph_module(self, graph: torch.fx.Graph, class_name: str) -> GraphModule:
        """The root, as the graph module that it was."""
        data = self._written[0]
        if data["class"] == "TracedModule":
            made: GraphModule = TracedModule(self.modules[0], graph, class_name)
        else:
            made = GraphModule(torch.nn.Module(), torch.fx.Graph(), class_name)
            vars(made).update({name: vars(self.modules[0])[name] for name in REGISTRIES})
            made.training = self.modules[0].training
            made.graph = graph
        for name, value in data["attributes"].items():
            if name in _DERIVED and name != "training":
                raise NotData(f"the attribute {name!r} of the graph module")
            if name != "training":
                if name == "config" and isinstance(value, dict) and "config" in value:
                    cls, content = value["config"]  # the graph runs without it
                    value = value if cls in self._names.trusted else content
                vars(made)[name] = read = self.values.read(value)
                check_value(self._names, read)
        return made

    def _empty(self, name: str) -> torch.nn.Module:
        if name in ("TracedModule", "GraphModule"):
            return torch.nn.Module()
        cls = self._names.find(name)
        if not isinstance(cls, type) or not issubclass(cls, torch.nn.Module) or issubclass(cls, GraphModule):
            raise NotData(f"{name}, which is no class of layers")
        module = cls.__new__(cls)
        torch.nn.Module.__init__(module)
        return module

    def _registries(self, data: Mapping[str, Any]) -> dict[str, Any]:
        for name in (*data["parameters"], *data["buffers"], *data["children"]):
            check_path(name)
        return {
            PARAMETERS: {n: None if k is None else self._tensors[k] for n, k in data["parameters"].items()},
            BUFFERS: {n: None if k is None else self._tensors[k] for n, k in data["buffers"].items()},
            MODULES: {n: None if k is None else self.modules[k] for n, k in data["children"].items()},
            NON_PERSISTENT: set(data["not_persistent"]),
        }
