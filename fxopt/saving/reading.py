"""Makes modules from a document of `Writer`, or of anyone else: everything that may do more than compute is refused."""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import has_side_effect

from fxopt.capture.runtime.input_guard import InputGuard
from fxopt.capture.runtime.input_specs import NumberSpec, TensorSpec
from fxopt.capture.runtime.size_guards import SizeGuard
from fxopt.capture.runtime.traced_module import TracedModule
from fxopt.effects import is_write
from fxopt.graph import ORIGIN
from fxopt.rewriting.edits import FIELDS, NodeState, Reference, Swapped
from fxopt.rewriting.record import MARKS, PassRecord, Step, set_steps
from fxopt.rewriting.transformation import Transformation
from fxopt.rewriting.weights import Keep
from fxopt.saving.allowed import Names, Refused, within
from fxopt.saving.calls import check_name, check_node, check_path, check_value, parts
from fxopt.saving.expressions import is_arithmetic
from fxopt.saving.kinds import (
    ANNOTATIONS,
    DATA,
    GRAPHS,
    MEMBERS,
    OF_GUARDS,
    OF_SEVERAL_PARTS,
    PARTS,
    unsaved_attributes,
)
from fxopt.torch_internals import NON_PERSISTENT, buffers_of, parameters_of

_KINDS: dict[str, Any] = {kind.__name__: kind for kind in PARTS}


class Reader:
    """Makes modules from a document; raises Refused, or any other error, if this is not possible.

    Args:
        names: the objects that may be named.
        document: the document that `Writer.document` returned.
        tensors: the tensors by key.

    Attributes:
        modules: the modules, the root first.
    """

    def __init__(self, names: Names, document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self._names, self._tensors, self._origins = names, tensors, document["origins"]
        entries = document["modules"]
        # Make all modules before filling any, because attributes may contain other modules.
        self.modules = [self._empty(entry) for entry in entries]
        for step in (self._fill, self._give_graph):
            for module, entry in zip(self.modules, entries, strict=True):
                with within(entry["class"]):
                    step(module, entry)

    def read(self, data: Any) -> Any:
        """Return the value that was written; raise Refused if `data` is not valid."""
        if isinstance(data, list):
            return list(map(self.read, data))
        if not isinstance(data, dict):
            return data
        ((kind, content),) = data.items()
        if kind in _KINDS and isinstance(content, str | list):
            made, parts = _KINDS[kind], self.read(content)
            return made(*parts) if made in OF_SEVERAL_PARTS else made(parts)
        match kind:
            case "node":
                check_name(content)  # the name is inserted into code
                return Reference(content)
            case "tensor":
                return self._tensors[content]
            case "module":
                return self.modules[content]
            case "name":
                return self._names.find(content)
            case "enum":
                cls = self._names.find(content[0])
                if not issubclass(cls, enum.Enum):
                    raise Refused(f"{content[0]}, which is no enumeration")
                return cls[content[1]]
            case "data":
                return self._data(*content)
            case "config":
                if content[0] not in self._names.trusted:  # its `from_dict` may ask a hub
                    raise Refused(f"the configuration {content[0]}, which is not in `trusted`")
                return self._names.trusted[content[0]].from_dict(self.read(content[1]))
        raise Refused(f"a value of the kind {kind!r}, which is not known")

    def _data(self, name: str, content: Mapping[str, Any], undone_by: Any = None) -> Any:
        cls = DATA.get(name) or self._names.find(name)
        if cls not in DATA.values() and not (isinstance(cls, type) and issubclass(cls, Transformation)):
            raise Refused(f"{name}, which is not made of data")
        fields = self._members(content)
        if cls is Swapped and undone_by is not None:
            # Only `Swapped.restore` may contain a function with arguments.
            function, args, keywords = undone_by
            restoring = functools.partial(self._names.restoring(function), *self.read(args))
            fields["restore"] = functools.partial(restoring, **self.read(keywords))
        self._check(cls, fields)
        return cls(**fields)

    def _check(self, cls: type, fields: Mapping[str, Any]) -> None:
        """Raise Refused if an object with these fields would run code that is not allowed."""
        if cls is NodeState:
            check_node(self._names, **fields)
        elif cls is Step:
            if not isinstance(fields["transformation"], Transformation | None):
                raise Refused("a step of something else than a transformation")
        elif cls is Swapped:
            for path in fields["left"]:
                check_path(path)
            if not isinstance(fields["restore"], Keep | functools.partial | None):
                raise Refused(f"a {type(fields['restore']).__name__}, by which nothing is undone")
        elif cls in _SIZES:
            sizes = fields[_SIZES[cls]]
            for size in sizes if isinstance(sizes, tuple) else (sizes,):
                if type(size) is not int and not is_arithmetic(size):
                    raise Refused(f"the condition {size!r}, which is more than arithmetic of sizes")

    def _empty(self, entry: Mapping[str, Any]) -> nn.Module:
        if entry["class"] in GRAPHS:
            check_name(entry["name"])
            return GRAPHS[entry["class"]](nn.Module(), Graph(), entry["name"])
        cls = self._names.find(entry["class"])
        # A record of passes must only be made from the steps of a graph module.
        refused = (GraphModule, PassRecord)
        if not isinstance(cls, type) or not issubclass(cls, nn.Module) or issubclass(cls, refused):
            raise Refused(f"{entry['class']}, which is no class of layers")
        module: nn.Module = cls.__new__(cls)
        nn.Module.__init__(module)
        return module

    def _fill(self, module: nn.Module, entry: Mapping[str, Any]) -> None:
        state: dict[str, Any] = {NON_PERSISTENT: set(entry["not_persistent"])}
        for word, (registry, kind) in MEMBERS.items():
            state[registry] = self._members(entry[word])
            for name, member in state[registry].items():
                check_path(name)
                if not isinstance(member, kind | None):
                    raise Refused(f"{name!r} among the {word}, which is a {type(member).__name__}")
        attributes = self._members(entry["attributes"])
        for value in attributes.values():
            check_value(self._names, value)
        if not unsaved_attributes(module).isdisjoint(attributes):
            raise Refused("a hook, or what torch.fx derives from a graph, among the attributes")
        if isinstance(module, TracedModule):
            attributes["config"] = self._config(entry["config"])
        if isinstance(module, InputGuard):
            InputGuard.__init__(module, *(attributes[name] for name in OF_GUARDS))
            module.training = attributes["training"]
        else:
            module.__setstate__(vars(module) | state | attributes)

    def _members(self, written: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.read(data) for name, data in written.items()}

    def _config(self, data: Any) -> Any:
        """The configuration of a model, or its content as a dict if its class is not trusted: the graph does not need it."""
        if isinstance(data, dict) and "config" in data and data["config"][0] not in self._names.trusted:
            data = data["config"][1]
        return self.read(data)

    def _give_graph(self, module: nn.Module, entry: Mapping[str, Any]) -> None:
        if not isinstance(module, GraphModule):
            return
        graph, made = Graph(), dict[str, Node]()
        modules = dict(module.named_modules(remove_duplicate=False))
        # The modules and attributes that nodes may call and read; attributes of classes are not among them.
        there = {
            "call_module": {*modules},
            "get_attr": {
                f"{path}.{name}".removeprefix(".")
                for path, owner in modules.items()
                for name, value in {**vars(owner), **parameters_of(owner), **buffers_of(owner)}.items()
                if name not in unsaved_attributes(owner)
                and not any(map(callable, parts(value)))  # a graph must not get callable objects as values
            },
        }
        for data in entry["nodes"]:
            with within(str(data["name"])):
                made[data["name"]] = node = self._node(graph, data, made)
                if node.op in there and node.target not in there[node.op]:
                    raise Refused(f"{node.target!r}, which is not there")
        module.graph = graph
        steps = list(map(self.read, entry["steps"]))
        if not all(isinstance(step, Step) for step in steps):
            raise Refused("a step of something else than a pass")
        set_steps(module, steps, self.read(entry["orders"]))

    def _node(self, graph: Graph, data: Mapping[str, Any], made: Mapping[str, Node]) -> Node:
        state = {field: self.read(data[field]) for field in FIELDS}
        check_node(self._names, **state)
        if state["op"] == "call_function" and is_write(state["target"]):
            has_side_effect(state["target"])
        state = NodeState(**state).resolved(made)
        node = graph.create_node(**state, name=data["name"], type_expr=ANNOTATIONS.get(data["type"]))
        if node.name != data["name"]:
            raise Refused("the name of another node, or no name")
        origin = self.read(self._origins[data["origin"]])
        marks = self.read(data["marks"])
        node.meta = {key: origin[key] for key in ORIGIN if key in origin} | ({MARKS: marks} if marks else {})
        return node


_SIZES: dict[type, str] = {SizeGuard: "condition", TensorSpec: "shape", NumberSpec: "value"}
"""The fields with expressions that a guard compiles to Python functions."""
