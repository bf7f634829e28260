"""Questions that passes ask about a graph, and how a pass puts its own module in the place of another.

A `GraphIndex` answers for the graph as it was when the index was made: make a new one after a change.
Answers are conservative: what cannot be shown to be harmless is reported as an obstacle, in words.
"""

from __future__ import annotations

import bisect
import functools
import inspect
import itertools
import operator
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn.modules import module as torch_module

from fxopt import effects


class GraphIndex:
    """Where modules are called, which tensors are shared, and what is written when, in one graph module.

    Example:
        >>> import torch
        >>> traced = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
        >>> index = GraphIndex(traced)
        >>> [(node.target, index.module(node)) for node in index.calls_like(torch.nn.ReLU)]
        [('1', ReLU())]
    """

    def __init__(self, graph_module: GraphModule) -> None:
        self.graph_module = graph_module
        self.nodes = list(graph_module.graph.nodes)
        self.position = {node: index for index, node in enumerate(self.nodes)}
        self.modules = dict(graph_module.named_modules(remove_duplicate=False))
        self._reads = [node for node in self.nodes if node.op == "get_attr"]
        self._calls: dict[int, list[Node]] = {}
        for node in self.nodes:
            if node.op == "call_module":
                self._calls.setdefault(id(self.module(node)), []).append(node)
        self._names: dict[int, list[str]] = {}
        for name, module in self.modules.items():
            self._names.setdefault(id(module), []).append(name)

    def module(self, node: Node) -> nn.Module:
        """The module that a `call_module` node calls."""
        module: nn.Module = self.modules[str(node.target)]
        return module

    def calls_like(self, kind: type[nn.Module]) -> list[Node]:
        """The nodes that call a module of this type or of a subclass, in graph order."""
        return [n for n in self.nodes if n.op == "call_module" and isinstance(self.module(n), kind)]

    def inexact(self, node: Node, kind: type[nn.Module]) -> str | None:
        """Why the module that `node` calls may compute something else than one of exactly this type."""
        own = type(self.module(node))
        return None if own is kind else f"{node.target} is a {own.__name__}, not exactly a {kind.__name__}"

    def call_sites(self, module: nn.Module) -> list[Node]:
        """The nodes that call `module`, under whatever name."""
        return self._calls.get(id(module), [])

    def names(self, module: nn.Module) -> list[str]:
        """All qualified names of `module`."""
        return self._names[id(module)]

    def obstacle(self, node: Node, own: Iterable[str] = ()) -> str | None:
        """Why the module that `node` calls cannot be replaced by another one at this one call; else `None`.

        Args:
            node: a `call_module` node.
            own: qualified names of modules that are replaced together with it, so that ties among them
                are no obstacle.
        """
        module, path = self.module(node), str(node.target)
        names = self._names[id(module)]
        if len(names) > 1:
            return f"the module has several names: {', '.join(names)}"
        if len(self.call_sites(module)) > 1:
            others = [other.name for other in self.call_sites(module) if other is not node]
            return f"the module is also called by {', '.join(others)}"
        return self._unusual(module) or self._foreign_parent(path) or self._shared(path, {path, *own})

    def obstacle_everywhere(self, module: nn.Module) -> str | None:
        """Why a module without tensors cannot be replaced at all its names and calls; `None` if it can."""
        if any(True for _ in itertools.chain(module.parameters(), module.buffers(), module.children())):
            return "the module has parameters, buffers or children"
        places = (self._foreign_parent(n) or self._read_directly(n) for n in self.names(module))
        return self._unusual(module) or next((reason for reason in places if reason), None)

    def obstacle_in_place(self, module: nn.Module) -> str | None:
        """Why a module cannot be replaced under all its names by a copy with other weights; else `None`."""
        places = (self._foreign_parent(name) for name in self.names(module))
        parts = (self._unusual(part) for part in module.modules())
        return next((reason for reason in (*parts, *places) if reason), None)

    def sharing(self, node: Node) -> Iterator[tuple[str, str]]:
        """The tensors of what a `call_module` or `get_attr` node names, with all names of their memory."""
        target = str(node.target)
        if node.op == "call_module":
            module = self.module(node)
            tensors = [*module.named_parameters(), *module.named_buffers()]
        else:
            tensors = [(split_path(target)[1], attribute(self.graph_module, target))]
        for name, tensor in tensors:
            for path, other, _ in self._holders.get(_storage(tensor), ()):
                yield name, f"{path}.{other}" if path else other

    def is_container(self, path: str) -> bool:
        """Whether the module at `path` only holds others, and belongs to the graph module."""
        return not path or not self._foreign_parent(f"{path}.x")

    def uses(self, path: str) -> bool:
        """Whether a node calls or reads what is at `path`, or something that holds it."""
        return is_inside(path, self._used)

    def first_call(self, path: str) -> Node | None:
        """The first node that calls a module which is at `path`, or holds what is there."""
        calls = (self._first_calls[prefix] for prefix in prefixes(path) if prefix in self._first_calls)
        return min(calls, key=self.position.__getitem__, default=None)

    @functools.cached_property
    def _used(self) -> set[str]:
        """The paths that nodes call or read."""
        return {str(node.target) for node in self.nodes if node.op in ("call_module", "get_attr")}

    @functools.cached_property
    def _first_calls(self) -> dict[str, Node]:
        """For each path of a module that is called, the first node that calls it."""
        return {str(node.target): node for node in reversed(self.nodes) if node.op == "call_module"}

    def reading_obstacle(self, node: Node) -> str | None:
        """Why a call of a module cannot be dropped after its weights were read; `None` if it can."""
        return self._unusual(self.module(node)) or self._read_directly(str(node.target))

    def removable(self, node: Node) -> bool:
        """Whether the module that `node` calls may be taken away once nothing calls it any more."""
        module, path = self.module(node), str(node.target)
        return self._names[id(module)] == [path] and not (
            self._foreign_parent(path) or self._shared(path, {path})
        )

    def write_between(self, first: Node, last: Node, value: Node | None = None) -> str | None:
        """What stands between two nodes that keeps them apart; `None` if nothing does.

        Args:
            first: the earlier node.
            last: the later node.
            value: a node whose tensor must not be written in between; without it only mode switches and
                other unknown side effects count.
        """
        start = bisect.bisect(self._effects, self.position[first], key=lambda effect: effect[0])
        for position, node, written in itertools.islice(self._effects, start, None):
            if position >= self.position[last]:
                break
            if written is None:
                return f"{node.name} has a side effect between {first.name} and {last.name}"
            if value is not None and any(self.may_alias(value, target) for target in written):
                return f"{node.name} may write into {value.name} between {first.name} and {last.name}"
        return None

    def writes(self, node: Node) -> bool:
        """Whether `node` may write into a tensor or have another side effect."""
        return self.written_by(node) != ()

    def written(self, value: Node) -> Node | None:
        """A node that may write into the tensor of `value`, anywhere in the graph."""
        return self._writers.get(self._alias_sets[value])

    @functools.cached_property
    def _writers(self) -> dict[int, Node]:
        """For each set of values that may share memory, the first node that may write into it."""
        found: dict[int, Node] = {}
        for _, node, targets in self._effects:
            if targets is None:  # a function with an effect of an unknown kind
                targets = tuple(node.all_input_nodes) if node.op == "call_function" else ()
            for target in targets:
                found.setdefault(self._alias_sets[target], node)
        return found

    def may_alias(self, left: Node, right: Node) -> bool:
        """Whether two values may share memory."""
        return self._alias_sets[left] == self._alias_sets[right]

    @functools.cached_property
    def _effects(self) -> list[tuple[int, Node, tuple[Node, ...] | None]]:
        found = ((index, node, self.written_by(node)) for index, node in enumerate(self.nodes))
        return [effect for effect in found if effect[2] != ()]

    def written_by(self, node: Node) -> tuple[Node, ...] | None:
        """The values that `node` may write into; `None` for an effect of an unknown kind."""
        if node.op != "call_module":
            return effects.written_by(node, None)
        module = self.module(node)
        values = effects.written_by(node, module)
        memory = {_storage(tensor) for tensor in effects.written_parameters(module)}
        own = tuple(read for read in self._reads if memory and self._memory(read) in memory)
        return None if values is None else (*values, *own)

    def writer_of(self, module: nn.Module) -> Node | None:
        """A node that may write into a parameter or buffer of `module`, under whatever name."""
        tensors = (*module.parameters(), *module.buffers())
        return next(
            (self._memory_writers[s] for s in map(_storage, tensors) if s in self._memory_writers), None
        )

    @functools.cached_property
    def _memory_writers(self) -> dict[int, Node]:
        """For the memory of parameters and buffers, the first node that may write into it."""
        found: dict[int, Node] = {}
        for node in self.nodes:
            if node.op == "get_attr":
                writer = self.written(node)
                if writer is not None:
                    found.setdefault(self._memory(node), writer)
            elif node.op == "call_module":
                for tensor in effects.written_parameters(self.module(node)):
                    found.setdefault(_storage(tensor), node)
        return found

    @functools.cached_property
    def _alias_sets(self) -> dict[Node, int]:
        """For each node the number of its set; nodes of different sets share no memory."""
        parent = list(range(len(self.nodes)))

        def root(index: int) -> int:
            while parent[index] != index:
                parent[index] = parent[parent[index]]
                index = parent[index]
            return index

        outside: dict[int, int] = {}  # the caller may pass one tensor twice; two names may share a storage
        for index, node in enumerate(self.nodes):
            if node.op in ("placeholder", "get_attr"):
                parent[root(index)] = root(outside.setdefault(self._memory(node), index))
            elif node.op != "output" and not self.gives_new_memory(node):
                # What writes into a tensor returns that tensor; anything else may return a view of any input.
                module = self.module(node) if node.op == "call_module" else None
                for value in effects.written_by(node, module) or node.all_input_nodes:
                    parent[root(index)] = root(self.position[value])
        return {node: root(index) for index, node in enumerate(self.nodes)}

    def _memory(self, node: Node) -> int:
        """What memory an input of the graph may share: one number for all placeholders."""
        if node.op == "placeholder":
            return 0
        value = attribute(self.graph_module, str(node.target))
        return _storage(value) if isinstance(value, Tensor) else id(value)

    def gives_new_memory(self, node: Node) -> bool:
        """Whether the value of `node` surely shares no memory with its inputs."""
        if node.target in effects.JOINING and node not in self._tensor_nodes:
            return False
        return effects.gives_new_memory(node, self.module(node) if node.op == "call_module" else None)

    @functools.cached_property
    def _tensor_nodes(self) -> set[Node]:
        found: set[Node] = set()
        for node in self.nodes:
            module = self.module(node) if node.op == "call_module" else None
            if effects.makes_tensor(node, module, found) or any(
                self._takes_tensor(user, node) for user in node.users
            ):
                found.add(node)
        return found

    def _takes_tensor(self, user: Node, value: Node) -> bool:
        """Whether `user` could not be called if `value` were a tuple or a list."""
        if not user.args or user.args[0] is not value:
            return False
        if user.op == "call_method":
            return not hasattr(list, str(user.target))
        return user.op == "call_module" and effects.gives_new_memory(user, self.module(user))

    def _unusual(self, module: nn.Module) -> str | None:
        hooks = effects.hooks_of(module)
        if any(vars(torch_module)[name] for name in _GLOBAL_HOOKS):
            return "torch has hooks for all modules (register_module_forward_hook and the like)"
        if hooks:
            return f"the module has hooks ({', '.join(name.strip('_') for name in hooks)})"
        if "forward" in vars(module) or module._compiled_call_impl is not None:
            return "the forward of the module was replaced on the instance"
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if isinstance(tensor, nn.Parameter) and type(tensor) is not nn.Parameter:
                return f"its {name} is a {type(tensor).__name__}, not a plain parameter"
            if tensor is not None and (tensor._backward_hooks or tensor._post_accumulate_grad_hooks):
                return f"its {name} has hooks"
        return None

    def _foreign_parent(self, path: str) -> str | None:
        for prefix in prefixes(path)[:-1]:
            if type(self.modules[prefix]) is not nn.Module or self.call_sites(self.modules[prefix]):
                return (
                    f"it is a part of {prefix} ({type(self.modules[prefix]).__name__}), a module that the "
                    "graph module may share with the model it was traced from"
                )
        return None

    def _read_directly(self, path: str) -> str | None:
        node = self._readers.get(path)
        return f"{node.name} reads {node.target}" if node else None

    @functools.cached_property
    def _readers(self) -> dict[str, Node]:
        """For each path that a node reads, or reads something below of, the first such node."""
        found: dict[str, Node] = {}
        for node in self._reads:
            for prefix in prefixes(str(node.target)):
                found.setdefault(prefix, node)
        return found

    def _shared(self, path: str, own: set[str]) -> str | None:
        direct = self._read_directly(path)
        if direct:
            return direct
        for name, tensor in _tensors(self.modules[path]).items():
            for other_path, other_name, other in self._holders.get(_storage(tensor), ()):
                if other_path not in own or other is not tensor:
                    where = f"{other_path}.{other_name}" if other_path else other_name
                    return f"its {name} shares memory with {where}"
        return None

    @functools.cached_property
    def _holders(self) -> dict[int, list[tuple[str, str, Tensor]]]:
        """For each storage, the tensors in it, with the module and the name under which it holds them."""
        holders: dict[int, list[tuple[str, str, Tensor]]] = {}
        for path, module in self.modules.items():
            for name, tensor in _tensors(module).items():
                holders.setdefault(_storage(tensor), []).append((path, name, tensor))
        return holders


_GLOBAL_HOOKS = (
    *("_global_forward_hooks", "_global_forward_pre_hooks"),
    *("_global_backward_hooks", "_global_backward_pre_hooks"),
)


def input_of(node: Node, module: nn.Module) -> Node | None:
    """The node that a one-input module is called with, by position or by keyword; `None` if unclear."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]  # the first one is self
    values = [*node.args, *node.kwargs.values()]
    if (
        len(values) != 1
        or (node.kwargs and names[:1] != list(node.kwargs))
        or not isinstance(values[0], Node)
    ):
        return None
    return values[0]


def value_of(node: Node) -> Any:
    """A node's value as the trace described it, with tensors without data; `None` if unknown."""
    value = node.meta.get("val")
    if value is None and node.target is operator.getitem:
        whole, key = node.args
        parts = value_of(whole) if isinstance(whole, Node) else None
        if isinstance(parts, tuple | list) and isinstance(key, int):
            return parts[key]
    return value


def dtype_of(node: Node) -> torch.dtype | None:
    """The dtype of a node's tensor, from the metadata of the trace; `None` if unknown."""
    dtype = getattr(_description(node), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else None


def rank_of(node: Node) -> int | None:
    """The number of dimensions of a node's tensor, from the metadata of the trace; `None` if unknown."""
    shape = getattr(_description(node), "shape", None)
    return None if shape is None else len(shape)


def _description(node: Node) -> Any:
    value = value_of(node)
    return node.meta.get("tensor_meta") if value is None else value  # that is what fx's ShapeProp writes


def module_path(node: Node) -> str:
    """The module that a node calls or belongs to; empty where the trace does not tell."""
    if node.op == "call_module":
        return str(node.target)
    stack = node.meta.get("nn_module_stack")
    return str(next(reversed(stack.values()))[0]) if stack else ""


def source_line(node: Node) -> str:
    """`file:line` of the model's code that a node stands for; empty where the trace does not tell."""
    frames = re.findall(r'File "(.+?)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [f"{file}:{line}" for file, line in frames if not file.startswith(_TORCH)]
    return own[-1] if own else ""


def place(node: Node) -> str:
    """A node with its module and its line in the model, as far as they are known, for a message."""
    path, line = module_path(node), source_line(node)
    where = [f"in {path}" if path else "", f"from {line}" if line else ""]
    text = ", ".join(filter(None, where))
    return f"{node.name} ({text})" if text else node.name


_TORCH = os.path.dirname(torch.__file__) + os.sep


def split_path(path: str) -> tuple[str, str]:
    """`"encoder.layer.0"` as `("encoder.layer", "0")`."""
    parent, _, name = path.rpartition(".")
    return parent, name


def prefixes(path: str) -> list[str]:
    """`"encoder.layer.0"` as `["encoder", "encoder.layer", "encoder.layer.0"]`."""
    return list(itertools.accumulate(path.split("."), "{}.{}".format))


def is_inside(path: str, names: Collection[str]) -> bool:
    """Whether a qualified name is one of `names`, or below one; fast where these are a set or a dict."""
    return any(prefix in names for prefix in prefixes(path))


def attribute(graph_module: GraphModule, path: str) -> Any:
    """The tensor, or whatever a `get_attr` node reads, at `path`."""
    owner, name = split_path(path)
    return getattr(graph_module.get_submodule(owner), name)


def has_module(graph_module: GraphModule, path: str) -> bool:
    """Whether there is a module at `path`; that of its parent is taken for granted."""
    parent, name = split_path(path)
    return name in graph_module.get_submodule(parent)._modules


def set_module(graph_module: GraphModule, path: str, module: nn.Module) -> None:
    """Put `module` at `path`, in the place of what is there, without touching the old object."""
    parent, name = split_path(path)
    graph_module.get_submodule(parent).add_module(name, module)


def remove_module(graph_module: GraphModule, path: str) -> None:
    """Take the name `path` away; the module object stays as it is."""
    parent, name = split_path(path)
    del graph_module.get_submodule(parent)._modules[name]


def child_names(graph_module: GraphModule) -> dict[str, list[str]]:
    """For the path of each module that has children, their names, in order."""
    return {path: list(module._modules) for path, module in graph_module.named_modules() if module._modules}


def merged_order(known: Sequence[str], names: Iterable[str]) -> list[str]:
    """`known` with the new ones of `names`, each behind the one that it follows there.

    Example:
        >>> merged_order(["a", "b"], ["new", "b", "last"])
        ['new', 'a', 'b', 'last']
    """
    behind: dict[str | None, list[str]] = {}
    previous, before = None, set(known)
    for name in names:
        if name in before:
            previous = name
        else:
            behind.setdefault(previous, []).append(name)
    return [*behind.get(None, []), *(each for name in known for each in (name, *behind.get(name, [])))]


def order_children(graph_module: GraphModule, parent: str, names: Iterable[str]) -> None:
    """Bring children back to a recorded order; those that are new since then come last."""
    modules = graph_module.get_submodule(parent)._modules
    recorded = dict.fromkeys(names)
    for name in [*(n for n in recorded if n in modules), *(n for n in modules if n not in recorded)]:
        modules[name] = modules.pop(name)


def free_path(graph_module: GraphModule, parent: str, name: str) -> str:
    """`parent.name`, or with a number behind it where that name is taken."""
    owner = graph_module.get_submodule(parent)
    candidate, number = name, 0
    while hasattr(owner, candidate):
        number += 1
        candidate = f"{name}_{number}"
    return f"{parent}.{candidate}" if parent else candidate


def erase(node: Node) -> None:
    """Erase a node and free its name, which fx would keep reserved, so that undo can give it to a node again."""
    node.graph.erase_node(node)
    node.graph._graph_namespace._used_names.discard(node.name)


def node_between(value: Node, name: str, users: Iterable[Node]) -> Node:
    """The node of this name, where it stands behind `value` and before its `users`; else `value` itself."""
    ends, node = {value.graph._root, *users}, value
    while node not in ends:
        if node.name == name:
            return node
        node = node.next
    return value


def without_tensors(module: nn.Module) -> nn.Module:
    """A module of the same type with the same options and flags, whose parameters are all `None`."""
    shell = type(module).__new__(type(module))
    for name, value in vars(module).items():  # registries of hooks and such must not be shared
        shell.__dict__[name] = value.copy() if isinstance(value, dict | set) else value
    shell.__dict__["_parameters"] = dict.fromkeys(module._parameters)
    return shell


def is_plain_linear(layer: nn.Linear) -> bool:
    """Whether a `Linear` has a weight of the shape that it says, maybe a bias, and nothing else."""
    if set(layer._parameters) != {"weight", "bias"} or layer._buffers or layer._modules:
        return False
    shape, bias = (layer.out_features, layer.in_features), layer._parameters["bias"]
    return layer.weight.shape == shape and (bias is None or bias.shape == shape[:1])


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers that a module itself holds."""
    both = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in both.items() if tensor is not None}


def _storage(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a subclass without storage
        return id(tensor)
