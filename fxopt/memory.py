"""Finds the values of a graph that may share memory, and the nodes that write into it.

Answers are conservative: two values may share memory unless the opposite can be shown.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fxopt import effects, graph
from fxopt.objects import set_attributes, set_items
from fxopt.operators import Fact, facts_of, name_of
from fxopt.submodules import attribute, weights_of
from fxopt.torch_internals import storage_identity
from fxopt.torch_internals import version_of as writes_of


class Memory:
    """Find the values of a graph that may share memory, and the nodes that may write into them.

    `GraphIndex.memory` is an instance for the graph of the index.

    Args:
        graph_module: the graph module to describe.
        position: index of each node in graph order.
        called: function that returns the module that a node calls, and `None` for other nodes.
    """

    def __init__(
        self,
        graph_module: GraphModule,
        position: Mapping[Node, int],
        called: Callable[[Node], nn.Module | None],
    ) -> None:
        self._graph_module = graph_module
        self._position = position
        self._called = called

    def write_between(self, first: Node, last: Node, value: Node | None = None) -> str | None:
        """Return the reason against moving a computation from `first` to `last`, or from `last` to `first`.

        Args:
            first: the earlier node.
            last: the later node.
            value: a node whose tensor must not be written between the two. By default, only mode switches, such as
                `no_grad`, and other unknown side effects are reasons.

        Returns:
            A sentence that names the node between the two; `None` if no node prevents the move.
        """
        start = bisect.bisect(self._effects, self._position[first], key=lambda effect: effect[0])
        for position, node, written in itertools.islice(self._effects, start, None):
            if position >= self._position[last]:
                break
            if written is None:
                return f"{node.name} has a side effect between {first.name} and {last.name}"
            if value is not None and any(self.may_alias(value, target) for target in written):
                return f"{node.name} may write into {value.name} between {first.name} and {last.name}"
        return None

    def runs(self, nodes: Iterable[Node], value: Node) -> list[list[Node]]:
        """Split `nodes`, which all use `value`, into groups within which `write_between` finds no reason."""
        found: list[list[Node]] = []
        for node in nodes:
            if not found or self.write_between(found[-1][0], node, value):
                found.append([])
            found[-1].append(node)
        return found

    def writes(self, node: Node) -> bool:
        """Return True if `node` may write into a tensor or have another side effect."""
        return self.written_by(node) != ()

    def written_by(self, node: Node) -> tuple[Node, ...] | None:
        """List the values that `node` may write into; `None` means an unknown side effect."""
        values, module = self._written[node], self._called(node)
        if values is None or module is None or not self._reads:
            return values
        memory = {storage_of(tensor) for tensor in effects.written_parameters(module)}
        return (*values, *(read for storage in memory for read in self._reads.get(storage, ())))

    def writers(self, value: Node) -> list[Node]:
        """List the nodes that may write into the tensor of `value`, in graph order."""
        return self._writers.get(self._alias_sets[value], [])

    def written(self, value: Node) -> Node | None:
        """Return the first node of the graph that may write into the tensor of `value`; `None` if no node may."""
        return next(iter(self.writers(value)), None)

    def writer_of(self, value: nn.Module | Tensor) -> Node | None:
        """Return a node that may write into a parameter or buffer, or into those of a module; `None` if no node may."""
        writers = (self._memory_writers.get(storage_of(tensor)) for tensor in weights_of(value))
        return next(filter(None, writers), None)

    def may_alias(self, left: Node, right: Node) -> bool:
        """Return True if two values may share memory."""
        return self._alias_sets[left] == self._alias_sets[right]

    def aliases(self, value: Node) -> list[Node]:
        """List the values that may share memory with `value`, including `value`, in graph order."""
        return self._members[self._alias_sets[value]]

    def is_seen_after(self, value: Node, node: Node) -> bool:
        """Tell whether a later node, or the caller of the graph, may see a write of `node` into the memory of `value`."""
        earlier = (n for n in self.aliases(value) if self._position[n] < self._position[node])
        return any(
            alias.op in ("placeholder", "get_attr")
            or any(self._position[user] > self._position[node] for user in alias.users)
            for alias in earlier
        )

    def gives_new_memory(self, node: Node) -> bool:
        """Return True if the value of `node` shares no memory with the inputs of `node`."""
        # The operators `+` and `*` also join and repeat tuples; their result then contains the same tensors.
        return self._is_new(node) and (node.target not in _JOINING or node in self._tensor_nodes)

    def derived(self, value: Node, until: Collection[str] = ()) -> Iterator[Node]:
        """Yield `value`, and all values computed from it that may be views of it, or contain one.

        Args:
            value: the first value.
            until: names of operators to stop at: their values, and values computed from these, are left out.
        """

        def parts(value: Node) -> Iterator[Node]:
            users = (user for user in value.users if name_of(user) not in until)
            return (user for user in users if not self.gives_new_memory(user) and value in _viewed(user))

        return graph.reached([value], parts)

    @functools.cached_property
    def _written(self) -> dict[Node, tuple[Node, ...] | None]:
        """The values that each node may write into, without parameters of called modules."""
        return {node: effects.written_by(node, self._called(node)) for node in self._position}

    @functools.cached_property
    def _reads(self) -> dict[int, list[Node]]:
        """For each memory of parameters and buffers, the nodes that read it."""
        reads = (node for node in self._position if node.op == "get_attr")
        return graph.grouped((number, node) for node in reads for number in self._memory(node))

    def is_pure(self, node: Node) -> bool:
        """Return True if `node` computes its value from its inputs only, without side effects or random numbers."""
        if node.op == "call_method" and not self._is_surely_tensor(node.args[0]):
            return False  # perhaps a method of another object
        return node.op == "get_attr" or effects.is_pure(node, self._called(node))

    def _is_surely_tensor(self, value: object) -> bool:
        if not isinstance(value, Node):
            return False
        known = graph.value_of(value)
        return isinstance(known, Tensor) or (known is None and self._is_new(value))

    def is_returned(self, value: Node) -> bool:
        """Return True if the caller may see the memory of `value`: in an output, or in an object that the caller passed."""
        users = (user for alias in self.aliases(value) for user in alias.users)
        return any(user.op == "output" or user.target in (set_attributes, set_items) for user in users)

    @functools.cached_property
    def _effects(self) -> list[tuple[int, Node, tuple[Node, ...] | None]]:
        found = ((index, node, self.written_by(node)) for node, index in self._position.items())
        return [effect for effect in found if effect[2] != ()]

    @functools.cached_property
    def _writers(self) -> dict[int, list[Node]]:
        """For each set of values that may share memory, the nodes that may write into it."""
        found: dict[int, list[Node]] = {}
        for _, node, targets in self._effects:
            if targets is None:  # an unknown side effect; runtime checks of capture have none
                unknown = node.op == "call_function" and not effects.only_checks(node)
                targets = tuple(node.all_input_nodes) if unknown else ()
            for number in {self._alias_sets[target] for target in targets}:
                found.setdefault(number, []).append(node)
        return found

    @functools.cached_property
    def _memory_writers(self) -> dict[int, Node]:
        """For the memory of parameters and buffers, the first node that may write into it."""
        found: dict[int, Node] = {}
        for node in self._position:
            module = self._called(node)
            if module is not None:
                for tensor in effects.written_parameters(module):
                    found.setdefault(storage_of(tensor), node)
            elif node.op == "get_attr":
                writer = self.written(node)
                if writer is not None:
                    found |= {number: writer for number in self._memory(node) if number not in found}
        return found

    @functools.cached_property
    def _alias_sets(self) -> dict[Node, int]:
        """For each node the number of its set; nodes of different sets share no memory."""
        parent = list(range(len(self._position)))

        def root(index: int) -> int:
            while parent[index] != index:
                parent[index] = parent[parent[index]]
                index = parent[index]
            return index

        outside: dict[int, int] = {}  # two placeholders may be one tensor; two attributes may share a storage
        for node, index in self._position.items():
            if node.op in ("placeholder", "get_attr"):
                for number in self._memory(node):
                    parent[root(index)] = root(outside.setdefault(number, index))
            elif node.op != "output" and not self.gives_new_memory(node) and not _is_number(node):
                # A node that writes into a tensor returns that tensor; other nodes may return a view of any input.
                for value in self._written[node] or _viewed(node):
                    if not _is_number(value):
                        parent[root(index)] = root(self._position[value])
        return {node: root(index) for node, index in self._position.items()}

    @functools.cached_property
    def _members(self) -> dict[int, list[Node]]:
        """The nodes of each set of values that may share memory."""
        return graph.grouped((number, node) for node, number in self._alias_sets.items())

    @functools.cached_property
    def _tensor_nodes(self) -> set[Node]:
        """The nodes whose value is surely one tensor."""
        found: set[Node] = set()
        for node in self._position:
            if self._makes_tensor(node, found) or any(self._takes_tensor(user, node) for user in node.users):
                found.add(node)
        return found

    def _makes_tensor(self, node: Node, known: Collection[Node]) -> bool:
        """Tell whether the value of `node` is surely one tensor; `known` are earlier nodes with such a value."""
        value = node.meta.get("val", node.meta.get("tensor_meta"))
        if value is not None:
            return hasattr(value, "dtype")
        facts = facts_of(node, self._called(node))
        if Fact.SEVERAL in facts or not facts & (Fact.NEW | Fact.KEEPS_DTYPE | Fact.SMOOTH):
            return False
        if node.target in _JOINING or node.op == "call_method":
            return any(isinstance(a, float) or a in known for a in node.args)
        return self._is_new(node)

    def _takes_tensor(self, user: Node, value: Node) -> bool:
        """Tell whether `user` could not be called if `value` were a tuple or a list."""
        if not user.args or user.args[0] is not value:
            return False
        if user.op == "call_method":
            return not hasattr(list, str(user.target))
        return user.op == "call_module" and self._is_new(user)

    def _is_new(self, node: Node) -> bool:
        """Tell whether the value of `node` shares no memory with its inputs, if these are tensors."""
        module = self._called(node)
        facts = facts_of(node, module)
        several = isinstance(graph.first_argument(node), str) and len(node.all_input_nodes) > 1
        joins = name_of(node) == "einsum" and several
        if not (joins or Fact.NEW in facts) or self._written[node] != ():
            return False
        # The object of a method may not be a tensor, and the output of a recurrent layer may share tensors of a packed sequence.
        recurrent = module is not None and Fact.SEVERAL in facts and Fact.RANDOM in facts
        asks = node.op == "call_method" or recurrent
        first = graph.first_argument(node)
        return not asks or (isinstance(first, Node) and isinstance(graph.value_of(first), Tensor))

    def _memory(self, node: Node) -> list[int]:
        """The numbers of the memory of a placeholder or `get_attr` node; all placeholders have one number."""
        if node.op == "placeholder":
            return [0]
        value = attribute(self._graph_module, str(node.target))
        if isinstance(value, nn.Module):  # users of the module may do anything with its tensors
            return [id(value), *map(storage_of, weights_of(value))]
        return [storage_of(value) if isinstance(value, Tensor) else id(value)]


def _viewed(node: Node) -> Collection[Node]:
    """The inputs that the value of a node may be a view of; an index is not one, and indexing by tensors makes a copy."""
    if node.target is not operator.getitem or len(node.args) != 2:
        first, facts = graph.first_argument(node), facts_of(node)
        views_first = Fact.VIEW in facts and Fact.SEVERAL not in facts and isinstance(first, Node)
        # A first argument that is not known to be a tensor may be an object with a method of this name.
        return [first] if views_first and isinstance(graph.value_of(first), Tensor) else node.all_input_nodes
    index = node.args[1] if isinstance(node.args[1], tuple | list) else (node.args[1],)
    values = (graph.value_of(each) for each in index if isinstance(each, Node))
    chosen = any(isinstance(value, Tensor) and (value.dim() or value.dtype is torch.bool) for value in values)
    source = node.args[0]
    if not isinstance(source, Node) or (chosen and isinstance(graph.value_of(source), Tensor)):
        return ()
    return [source]  # also if the source is a list, where a tensor with one element is an index


def _is_number(node: Node) -> bool:
    """Tell whether the value of `node` is a number, a dtype or a shape, which has no memory to write into."""
    return isinstance(graph.value_of(node), graph.NUMBERS)


_JOINING: tuple[Any, ...] = (operator.add, operator.mul)


def storage_of(tensor: Tensor) -> int:
    """A number that is the same for all tensors that share memory, as long as these tensors exist."""
    try:
        return int(storage_identity(tensor.untyped_storage()))
    except (NotImplementedError, RuntimeError):  # a subclass without storage
        return id(tensor)


def version_of(tensor: Tensor) -> float:
    """The number of writes into a tensor; NaN, which equals nothing, for inference tensors, for which torch does not count."""
    return math.nan if tensor.is_inference() else writes_of(tensor)
