"""Values as JSON, and back: what is no JSON of its own is an object with one key that says its kind.

`(1, nan)` is `{"tuple": [1, {"float": "nan"}]}`, a node `{"node": "add_1"}`, a tensor `{"tensor": "weight"}`.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import json
import math
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.fx.immutable_collections import immutable_dict, immutable_list

from fxopt.capture.runtime.input_specs import ConstantSpec, NumberSpec, StructureSpec, TensorSpec
from fxopt.capture.runtime.size_guards import SizeGuard
from fxopt.rewriting.edits import NodeEdit, NodeState, Redirect, Reference, Swapped
from fxopt.rewriting.record import Step
from fxopt.rewriting.transformation import Transformation
from fxopt.rewriting.weights import Keep, Left
from fxopt.saving.allowed import NameRefused, Names, qualified_name
from fxopt.saving.calls import check_name, check_node, check_path
from fxopt.saving.expressions import is_arithmetic

# The metadata that says where in the model a node comes from.
ORIGIN = ("nn_module_stack", "stack_trace")

# Classes of fxopt that are their fields.
_DATA = {
    cls.__name__: cls
    for cls in (
        *(TensorSpec, ConstantSpec, NumberSpec, StructureSpec, SizeGuard),
        *(Step, NodeEdit, NodeState, Reference, Redirect, Swapped, Left, Keep),
    )
}
_NAMED: dict[type, dict[str, Any]] = {
    kind: {str(value): value for value in vars(torch).values() if isinstance(value, kind)}
    for kind in (torch.dtype, torch.layout, torch.memory_format)
}
# The word of a type, and what makes JSON of its values, and values again.
_TEXTS: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    float: ("float", repr, {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}.__getitem__),
    bytes: ("bytes", bytes.hex, bytes.fromhex),
    torch.device: ("device", str, torch.device),
    type(Ellipsis): ("ellipsis", bool, lambda _: ...),
    **{kind: (kind.__name__, str, values.__getitem__) for kind, values in _NAMED.items()},
}
_OF_TEXTS = {word: make for word, _, make in _TEXTS.values()}


class NotData(Exception):
    """A value that is no data, or data that is no value, in words."""


class Values:
    """Writes values as JSON and reads them.

    Args:
        names: what may be named.
        tensor: gives the key of a tensor, for writing, or the tensor of a key.
        module: the same for modules and their numbers.
        node: the node of a name, for reading.
    """

    def __init__(
        self,
        names: Names,
        tensor: Callable[[Any], Any],
        module: Callable[[Any], Any],
        node: Callable[[str], Node] | None = None,
    ) -> None:
        self.names, self._tensor, self._module, self._node = names, tensor, module, node

    def write(self, value: Any) -> Any:
        """A value as JSON; NotData or NameRefused where it cannot be written."""
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float and math.isfinite(value):
            return value
        if kind in (list, immutable_list):
            return [self.write(item) for item in value]
        if kind in _CONTAINERS:
            return {_CONTAINERS[kind]: [self.write(item) for item in _items(value)]}
        if kind in (set, frozenset):
            return {kind.__name__: sorted(map(self.write, value), key=json.dumps)}
        if kind in _TEXTS:
            word, text, _ = _TEXTS[kind]
            return {word: text(value)}
        if isinstance(value, Node):
            return {"node": value.name}
        if isinstance(value, torch.Tensor):
            return {"tensor": self._tensor(value)}
        if isinstance(value, torch.nn.Module):
            return {"module": self._module(value)}
        if kind is functools.partial:
            name = qualified_name(self.names.restoring(qualified_name(value.func)))
            return {"partial": [name, self.write(value.args), self.write(value.keywords)]}
        if isinstance(value, enum.Enum):
            return {"enum": [self.names.of(kind), value.name]}
        if _DATA.get(kind.__name__) is kind or isinstance(value, Transformation):
            return {"data": [self._data_name(kind), self._fields(value)]}
        if any(cls.__name__ == "PreTrainedConfig" for cls in kind.__mro__):
            return {"config": self._config(value)}
        if callable(value):
            return {"name": self._name(value)}
        raise NotData(f"{_described(value)}, which is no data that fxopt can write")

    def read(self, data: Any) -> Any:
        """The value that `write` wrote; NotData or NameRefused where this is none."""
        if isinstance(data, list):
            return [self.read(item) for item in data]
        if not isinstance(data, dict):
            return data
        ((kind, content),) = data.items()
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](*[self.read(item) for item in content])
        if kind in _OF_TEXTS:
            return _OF_TEXTS[kind](content)
        if kind == "node" and self._node:
            return self._node(content)
        if kind == "tensor":
            return self._tensor(content)
        if kind == "module":
            return self._module(content)
        if kind == "name":
            return self.names.find(content)
        if kind == "enum":
            cls = self.names.find(content[0])
            if not issubclass(cls, enum.Enum):
                raise NotData(f"{content[0]}, which is no enumeration")
            return cls[content[1]]
        if kind == "data":
            return self._made(*content)
        if kind == "config":
            if content[0] not in self.names.trusted:  # its `from_dict` may ask a hub
                raise NameRefused(f"the configuration {content[0]}, which is not in `trusted`")
            return self.names.trusted[content[0]].from_dict(self.read(content[1]))
        raise NotData(f"a value of the kind {kind!r}, which is not known")

    def _config(self, value: Any) -> list[Any]:
        """A configuration of transformers by its class and content, if it comes back as it is."""
        content = self.write(value.to_dict())
        try:
            same = type(value).from_dict(self.read(content)).to_dict() == value.to_dict()
        except Exception:  # it runs the code of each class
            same = False
        if not same:
            raise NotData(f"{_described(value)}, which its `from_dict` does not make again of its `to_dict`")
        return [qualified_name(type(value)), content]

    def _name(self, value: Any) -> str:
        try:
            return self.names.of(value)
        except TypeError as error:  # it has no hash
            raise NotData(f"{_described(value)}, which is no data that fxopt can write") from error

    def _data_name(self, cls: type) -> str:
        return cls.__name__ if _DATA.get(cls.__name__) is cls else self.names.of(cls)

    def _fields(self, value: Any) -> dict[str, Any]:
        if not dataclasses.is_dataclass(value):
            if vars(value):  # a pass of a user, of which nothing says how it is made
                raise NotData(f"{_described(value)}, which has attributes and is no dataclass")
            return {}
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        if isinstance(value, Swapped) and isinstance(value.restore, types.FunctionType):
            fields["restore"] = functools.partial(value.restore)
        self._check(type(value), fields)
        if isinstance(value, Step) and not self._is_data(value.transformation):
            fields["transformation"] = None  # as in a pickle: its changes are known all the same
        if isinstance(value, NodeEdit):
            fields["meta"] = {key: meta for key, meta in value.meta.items() if key in ORIGIN}
        return {name: self.write(field) for name, field in fields.items()}

    def _is_data(self, value: Any) -> bool:
        try:
            self.write(value)
        except (NameRefused, NotData):
            return False
        return not isinstance(value, bytes)  # what a pickle left, which only unpickling can read

    def _made(self, name: str, content: Mapping[str, Any]) -> Any:
        cls = _DATA.get(name) or self.names.find(name)
        if cls not in _DATA.values() and not (isinstance(cls, type) and issubclass(cls, Transformation)):
            raise NotData(f"{name}, which is not made of data")
        restores = cls is Swapped and isinstance(content["restore"], dict) and "partial" in content["restore"]
        fields = {key: self.read(value) for key, value in content.items() if key != "restore" or not restores}
        if restores:  # nowhere else does a graph hold functions with arguments
            function, args, keywords = content["restore"]["partial"]
            restoring = functools.partial(self.names.restoring(function), *self.read(args))
            fields["restore"] = functools.partial(restoring, **self.read(keywords))
        if cls is Step and not isinstance(fields["transformation"], Transformation | None):
            raise NotData("a step of something else than a transformation")
        self._check(cls, fields)
        return cls(**fields)

    def _check(self, cls: type, fields: Mapping[str, Any]) -> None:
        """Raise NotData or NameRefused where the fields would make an object that runs more than it should."""
        if cls in (NodeEdit, Reference):
            check_name(fields["name"])
        elif cls is NodeState:
            check_node(self.names, fields["op"], fields["target"], fields["args"], fields["kwargs"])
        elif cls is Swapped:
            for path in fields["left"]:
                check_path(path)
            if not isinstance(fields["restore"], Keep | functools.partial | None):
                raise NotData(f"{_described(fields['restore'])}, by which nothing is undone")
        for text in _expressions(cls, fields):
            if not is_arithmetic(text):
                raise NotData(f"the condition {text!r}, which is more than arithmetic of sizes")


def _expressions(cls: type, fields: Mapping[str, Any]) -> list[Any]:
    """The expressions of which a guard makes functions of Python."""
    if cls is SizeGuard:
        return [fields["condition"]]
    sizes = fields["shape"] if cls is TensorSpec else [fields["value"]] if cls is NumberSpec else []
    return [size for size in sizes if type(size) is not int]


_CONTAINERS: dict[type, str] = {
    tuple: "tuple",
    dict: "dict",
    immutable_dict: "dict",
    collections.OrderedDict: "ordered",
    slice: "slice",
    range: "range",
    complex: "complex",
    torch.Size: "size",
}
_SEQUENCES: dict[str, Callable[..., Any]] = {
    "tuple": lambda *items: items,
    "dict": lambda *pairs: dict(pairs),
    "ordered": lambda *pairs: collections.OrderedDict(pairs),
    "slice": slice,
    "range": range,
    "complex": complex,
    "size": lambda *sizes: torch.Size(sizes),
    "set": lambda *items: set(items),
    "frozenset": lambda *items: frozenset(items),
}


def _items(value: Any) -> list[Any]:
    """The function that makes a container again."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, slice | range):
        return [value.start, value.stop, value.step]
    return [value.real, value.imag] if isinstance(value, complex) else list(value)


def _described(value: Any) -> str:
    return f"a {qualified_name(type(value))}"
