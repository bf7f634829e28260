"""The objects that a forward may change: the node of each, and its contents in the graph so far.

The node of an input object, such as a decoder's cache, is its placeholder. An object that the forward creates is built
where a node first needs it. Later changes are written back before a layer or the caller sees the object again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fxopt.capture.fakes.dynamic_shapes import SymbolicNumber
from fxopt.capture.runtime.input_specs import same_value
from fxopt.errors import TraceError
from fxopt.objects import (
    build_object,
    entries,
    find,
    is_found,
    is_mutable,
    is_open,
    key_kind,
    qualified_name,
    set_attributes,
    set_items,
)
from fxopt.torch_internals import root_of

Node = torch.fx.Node


@dataclasses.dataclass
class _Known:
    """A container with its node, and its contents when the graph and the forward last agreed."""

    container: Any
    node: Callable[[], Node]
    contents: dict[Any, Any]


@dataclasses.dataclass(eq=False)
class MutableObjects:
    """The open objects of one capture, with the lists and dicts inside them.

    `create` writes a node for a target and its arguments, and `argument` writes any other value as an argument. `bind`
    registers a value as an entry, with its kind and key, of the value of a node.
    """

    graph: torch.fx.Graph
    create: Callable[..., Node]
    argument: Callable[[Any], Any]
    bind: Callable[[Any, Callable[[], Node], str, Any], None]

    def __post_init__(self) -> None:
        self._known: dict[int, _Known] = {}
        # Objects being built, with lists and dicts inside the nodes that hold them; and containers being written back.
        self._building: set[int] = set()
        self._writing: set[int] = set()
        self._kept: list[Node] = []

    def add(self, container: Any, node: Callable[[], Node], bind: bool = False) -> None:
        """Register a container, and those inside it, as the value of `node()`; `bind` registers their tensors as well."""
        known = self._known[id(container)] = _Known(container, node, {})
        self._accept(known, entries(container), bind)

    def knows(self, container: Any) -> bool:
        """Tell whether this container has a node."""
        return id(container) in self._known

    def node(self, value: Any) -> Node:
        """The node of an open object, with its current contents written back."""
        if id(value) not in self._known:
            self._build(value)
        self.write_back(value)
        return self._known[id(value)].node()

    def write_back(self, container: Any) -> None:
        """Write what the forward has changed in a container, and in those inside it."""
        if id(container) in self._writing:
            raise TraceError(
                f"the forward puts a {type(container).__name__} into itself, which a graph cannot follow."
            )
        self._writing.add(id(container))
        known = self._known[id(container)]
        now = entries(container)
        changed = _changed(known, now)
        removed = [key for key in known.contents if key not in now]
        reordered = not is_open(container) and list(now) != list(known.contents)
        if changed or removed or reordered:
            self._keep([known.contents[key] for key in (*changed, *removed) if key in known.contents])
            if is_open(container):
                parts = {key: self._part(now[key]) for key in changed}
                self.create(set_attributes, known.node(), parts, *([removed] if removed else []))
            else:
                self.create(set_items, known.node(), self._contents(container))
            self._accept(known, now)
        for value in now.values():
            if id(value) in self._known:
                self.write_back(value)
        self._writing.remove(id(container))

    def any_in(self, arguments: Any) -> bool:
        """Tell whether there is an open object among the arguments of a call."""
        return next(self._reachable(arguments), None) is not None

    def before_call(self, arguments: Any) -> None:
        """Read the contents of the open objects among the arguments of a call, which may change them."""
        for known in self._reachable(arguments):
            self._keep(list(known.contents.values()))

    def after_call(self, arguments: Any) -> None:
        """Register the changes that a call has made to the open objects among its arguments."""
        with self.reading():
            for known in list(self._reachable(arguments)):
                self._accept(known, entries(known.container), bind=True)

    def erase_unused(self) -> None:
        """Erase nodes that read values before a call changed them, and that nothing uses."""
        for node in reversed(list(dict.fromkeys(self._kept))):
            if not node.users:
                self.graph.erase_node(node)

    def _accept(self, known: _Known, now: dict[Any, Any], bind: bool = False) -> None:
        """Record the current contents of a container as those in the graph; `bind` registers values that have no node yet."""
        changed = _changed(known, now)
        known.contents = now
        for key in changed:
            value = now[key]
            if not is_mutable(value):
                if bind:
                    self.bind(value, known.node, key_kind(known.container), key)
            elif id(value) not in self._known:
                self.add(value, self._entry(known, key), bind)

    def _entry(self, known: _Known, key: Any) -> Callable[[], Node]:
        """The node of the value at `key`, written when it is first used."""
        target = operator.getitem if key_kind(known.container) == "item" else getattr
        return functools.cache(lambda: self.create(target, known.node(), key))

    def _build(self, value: Any) -> None:
        self._begin(value)
        made = self.create(build_object, _importable_name(type(value)), self._contents(value))
        self.add(value, lambda: made)

    def _begin(self, value: Any) -> None:
        if id(value) in self._building:
            raise TraceError(
                f"a {type(value).__name__} that the forward makes is in two places of another object, or in itself, "
                "which a graph cannot make."
            )
        self._building.add(id(value))

    def _contents(self, container: Any) -> Any:
        if isinstance(container, list):
            return [self._part(item) for item in container]
        return {key: self._part(item) for key, item in entries(container).items()}

    def _part(self, value: Any) -> Any:
        """A value inside a container as an argument of a node."""
        if id(value) in self._known or is_open(value):
            return self.node(value)
        if type(value) in (list, dict):
            self._begin(value)
            return self._contents(value)
        if isinstance(value, (type, types.FunctionType)):
            return self.create(find, _importable_name(value))
        if isinstance(value, enum.Enum) and value.name in type(value).__members__:
            # torch.fx cannot write a member of an enumeration inside a dict.
            return self.create(find, f"{_importable_name(type(value))}.{value.name}")
        return self.argument(value)

    def _keep(self, values: list[Any]) -> None:
        """Read these values before they leave their container."""
        with self.reading():
            for value in values:
                if id(value) in self._known:
                    self._known[id(value)].node()
                elif isinstance(value, tuple):
                    self._keep(list(value))
                elif isinstance(value, (torch.Tensor, *SymbolicNumber)):
                    self.argument(value)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Mark the nodes written in the block: those without users are erased in the end."""
        last = root_of(self.graph).prev
        yield
        while last.next is not root_of(self.graph):
            last = last.next
            self._kept.append(last)

    def _reachable(self, value: Any) -> Iterator[_Known]:
        known = self._known.get(id(value))
        if known is not None:
            yield known
        if isinstance(value, (tuple, list, dict)) or is_open(value):
            for part in entries(value).values():
                yield from self._reachable(part)


def _changed(known: _Known, now: dict[Any, Any]) -> list[Any]:
    return [
        key
        for key, value in now.items()
        if key not in known.contents or not _same(value, known.contents[key])
    ]


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, SymbolicNumber) and isinstance(other, SymbolicNumber):
        return bool(value.node.expr == other.node.expr)
    if isinstance(value, (bool, int, float, str)):
        return same_value(value, other)
    return value is other


def _importable_name(value: Any) -> str:
    name = qualified_name(value)
    if not is_found(name, value):
        raise TraceError(
            f"{name} cannot be imported by that name, so no graph can make one. Define it at the top level of a module."
        )
    return name
