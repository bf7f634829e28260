"""`GraphIndex`: the module calls of a graph, and the reasons against rewriting them."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fxopt.graph import grouped, input_of, use_obstacle
from fxopt.memory import Memory, storage_of
from fxopt.operators import hooks_of
from fxopt.submodules import attribute, is_plain, prefixes, split_path, tensors_of
from fxopt.torch_internals import (
    accumulation_hooks_of,
    backward_hooks_of,
    buffers_of,
    compiled_call_of,
    global_hooks,
    modules_of,
    parameters_of,
)

ALL_MODULES = "torch has hooks for all modules (register_module_forward_hook and the like)"


class GraphIndex:
    """Find the module calls of one graph, and the reasons against rewriting them.

    A pass creates an index at the beginning of `match`. The index describes the graph at that time; create a new index after
    a change. Answers are conservative. A method named `…obstacle` returns a sentence for `Refusal` if a rewrite may change
    the outputs, and `None` if the rewrite is safe. The reasons are hooks, replaced forwards, further calls and names of
    a module, tied weights, and writes into memory.

    Args:
        graph_module: the graph module to describe.

    Attributes:
        graph_module: the graph module.
        nodes: list of all nodes, in graph order.
        position: index of each node in `nodes`.
        modules: every submodule by qualified name; a module with two names is listed twice.

    Example:
        >>> import torch
        >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.ReLU())
        >>> _ = layers[2].register_forward_hook(lambda module, args, output: output + 1)
        >>> index = GraphIndex(torch.fx.symbolic_trace(layers))
        >>> for node in index.calls_like(torch.nn.ReLU):
        ...     print(node.target, index.module(node), index.removing_obstacle(node))
        1 ReLU() None
        2 ReLU() the module has hooks (forward_hooks)
    """

    def __init__(self, graph_module: GraphModule) -> None:
        self.graph_module = graph_module
        self.nodes = list(graph_module.graph.nodes)
        self.position = {node: index for index, node in enumerate(self.nodes)}
        self.modules: dict[str, nn.Module] = dict(graph_module.named_modules(remove_duplicate=False))

    def module(self, node: Node) -> nn.Module:
        """Return the module that a `call_module` node calls."""
        return self.modules[str(node.target)]

    def called(self, node: Node) -> nn.Module | None:
        """Return the module that a node calls; `None` for nodes that call none."""
        return self.module(node) if node.op == "call_module" else None

    def calls_like(self, kind: type[nn.Module]) -> list[Node]:
        """List the nodes that call a module of type `kind` or of a subclass, in graph order."""
        return [n for n in self.nodes if n.op == "call_module" and isinstance(self.module(n), kind)]

    def calls_by_input(self, kind: type[nn.Module]) -> dict[Node, list[Node]]:
        """Group the calls of modules of type `kind` by their input value.

        Calls with several arguments, or with an argument that is not a node, are left out.
        """
        pairs = ((input_of(call, self.module(call)), call) for call in self.calls_like(kind))
        return grouped((value, call) for value, call in pairs if value is not None)

    @functools.cached_property
    def guard(self) -> Node | None:
        """Call of the module that checks the inputs of the graph; `None` if the graph has no such call.

        With a guard, the sizes in `node.meta["val"]` are valid in every run.
        """
        return next((n for n in self.calls_like(nn.Module) if hasattr(self.module(n), "checks_inputs")), None)

    def inexact(self, node: Node, kind: type[nn.Module]) -> str | None:
        """Return a reason if the module that `node` calls is not exactly a `kind`: a subclass may compute something else."""
        own = type(self.module(node))
        return None if own is kind else f"{node.target} is a {own.__name__}, not exactly a {kind.__name__}"

    def call_sites(self, module: nn.Module) -> list[Node]:
        """List the nodes that call `module`, under any of its names."""
        return self._calls.get(id(module), [])

    def names(self, module: nn.Module) -> list[str]:
        """List the qualified names of `module`."""
        return self._names[id(module)]

    def obstacle(self, node: Node, kind: type[nn.Module]) -> str | None:
        """Return the reason against replacing the layer that `node` calls at this call.

        The layer must be exactly a `kind`, with the weight and bias of a plain `kind`, and with one name and one call. The
        layer must have no hooks, and share no tensor with another module.
        """
        reason = self.replacing_obstacle(node, kind)
        if reason is None and not is_plain(self.module(node)):
            return f"it does not have the weight and bias of a plain {kind.__name__}"
        return reason

    def replacing_obstacle(self, node: Node, kind: type[nn.Module]) -> str | None:
        """Return the reason against replacing the layer that `node` calls at this call, ignoring its parameters.

        The layer must be exactly a `kind`, with one name and one call. The layer must have no hooks, and share no tensor
        with another module.
        """
        return self.inexact(node, kind) or self.place_obstacle(node) or self._unusual(self.module(node))

    def place_obstacle(self, node: Node) -> str | None:
        """Return the reason against replacing the module that `node` calls, whatever its type.

        The module must have one name and one call. No node may read or call a part of the module, and the module may share no
        tensor with another one.
        """
        module, path = self.module(node), str(node.target)
        names = self.names(module)
        if len(names) > 1:
            return f"the module has several names: {', '.join(names)}"
        if len(self.call_sites(module)) > 1:
            others = [other.name for other in self.call_sites(module) if other is not node]
            return f"the module is also called by {', '.join(others)}"
        for name, part in module.named_modules(prefix=path):
            if part is not module and self.call_sites(part):
                return f"{self.call_sites(part)[0].name} calls a part of it"
            if name in self.modules and (shared := self._shared(name)):
                return shared
        return self._foreign_parent(path)

    def joining_obstacle(self, first: Node, last: Node) -> str | None:
        """Return the reason against computing `first` and `last` as one node in the position of `last`.

        `last` must be the only user of `first`. No node between the two may have a side effect, or write into an input of
        `first`.

        Args:
            first: the earlier node.
            last: the later node, which uses `first`.
        """
        values = first.all_input_nodes or [first]
        reasons = (self.memory.write_between(first, last, each) for each in values)
        return use_obstacle(first, [last]) or next(filter(None, reasons), None)

    def keeping_obstacle(self, node: Node, value: Node) -> str | None:
        """Return the reason against a call at `node` that saves `value` for its gradients: a later write into `value`."""
        for writer in self.memory.writers(value):
            if self.position[writer] > self.position[node]:
                return f"{writer.name} may write into {value.name}, which the call keeps for gradients"
        return None

    def obstacle_everywhere(self, module: nn.Module) -> str | None:
        """Return the reason against replacing a module without tensors at all its names and calls."""
        unclear = [call.name for call in self.call_sites(module) if input_of(call, module) is None]
        if unclear:
            return f"{', '.join(unclear)} does not call it with one tensor alone"
        if getattr(module, "inplace", False):
            return "it writes into its input"
        if modules_of(module) or _tensors(module):
            return "the module has parameters, buffers or children"
        places = (self._foreign_parent(n) or self._read_directly(n) for n in self.names(module))
        return self._unusual(module) or next(filter(None, places), None)

    def obstacle_in_place(self, module: nn.Module) -> str | None:
        """Return the reason against replacing `module` under all its names by a copy with other weights."""
        places = (self._foreign_parent(name) for name in self.names(module))
        parts = (self._unusual(part) for part in module.modules())
        return next(filter(None, (*parts, *places)), None)

    def sharing(self, node: Node) -> Iterator[tuple[str, str]]:
        """Yield each tensor of the target of a `call_module` or `get_attr` node with every name that shares its memory.

        The first name is relative to the target, the second is a qualified name in the graph module.
        """
        target = str(node.target)
        value = attribute(self.graph_module, target)
        path = "" if isinstance(value, nn.Module) else split_path(target)[1]
        for name, tensor in tensors_of({path: value}):
            for _, other, _ in self._holders.get(storage_of(tensor), ()):
                yield name, other

    def removing_obstacle(self, node: Node) -> str | None:
        """Return the reason against removing the module call `node`, even if a pass reads the weights of the module first.

        The method checks the module: hooks, direct reads of its attributes, writes into its statistics and weights. It does
        not compare values: the caller makes sure that the new value equals that of `node`. `None` if `node` calls no module.
        """
        module = self.called(node)
        if module is None:
            return None
        writer = self.memory.writer_of(module)
        reason = self._unusual(module) or self._read_directly(str(node.target))
        if reason is None and writer:
            return f"{writer.name} may write into the statistics or weights of {node.target}"
        return reason

    def moving_obstacle(self, read: Node) -> str | None:
        """Return the reason against moving the tensor that a `get_attr` node reads into a layer for the user of the node.

        Nothing else may read, write or share the tensor.
        """
        path = str(read.target)
        tensor = attribute(self.graph_module, path)
        if any(global_hooks):
            return ALL_MODULES
        if len(read.users) > 1 or any(
            n is not read and n.target == path for n in self.nodes if n.op == "get_attr"
        ):
            return f"{path} is also read elsewhere"
        others = [other for _, other in self.sharing(read) if other != path]
        if others:
            return f"{path} shares memory with {others[0]}"
        writer = self.memory.writer_of(tensor)
        reason = _unusual_tensor(path, tensor) or self._foreign_parent(path)
        return reason or (f"{writer.name} may write into {path}" if writer else None)

    def removable(self, node: Node) -> bool:
        """Return True if the module that `node` calls can be deleted once no node calls it."""
        module, path = self.module(node), str(node.target)
        return self.names(module) == [path] and not (self._foreign_parent(path) or self._shared(path))

    @functools.cached_property
    def memory(self) -> Memory:
        """Memory of the values: which values share memory, and which nodes write into it."""
        return Memory(self.graph_module, self.position, self.called)

    def _is_container(self, path: str) -> bool:
        """Tell whether the module at `path` is a plain container that belongs to the graph module only."""
        return not path or not self._foreign_parent(f"{path}.x")

    def _first_call(self, path: str) -> Node | None:
        """The first node that calls the module at `path` or a module that contains `path`."""
        calls = map(self._first_calls.get, prefixes(path))
        return min(filter(None, calls), key=self.position.__getitem__, default=None)

    @functools.cached_property
    def _calls(self) -> dict[int, list[Node]]:
        """For the id of each module, the nodes that call the module."""
        return grouped((id(self.module(call)), call) for call in self.calls_like(nn.Module))

    @functools.cached_property
    def _names(self) -> dict[int, list[str]]:
        """For the id of each module, its names."""
        return grouped((id(module), name) for name, module in self.modules.items())

    @functools.cached_property
    def _first_calls(self) -> dict[str, Node]:
        """For each path of a module that is called, the first node that calls it."""
        return {str(call.target): call for call in reversed(self.calls_like(nn.Module))}

    def _unusual(self, module: nn.Module) -> str | None:
        hooks = hooks_of(module)
        if any(global_hooks):
            return ALL_MODULES
        if hooks:
            return f"the module has hooks ({', '.join(name.strip('_') for name in hooks)})"
        if "forward" in vars(module) or compiled_call_of(module) is not None:
            return "the forward of the module was replaced on the instance"
        reasons = (_unusual_tensor(f"its {name}", tensor) for name, tensor in _tensors(module).items())
        return next(filter(None, reasons), None)

    def _foreign_parent(self, path: str) -> str | None:
        for prefix in prefixes(path)[:-1]:
            parent = self.modules[prefix]
            if type(parent) is not nn.Module or self.call_sites(parent):
                return (
                    f"it is a part of {prefix} ({type(parent).__name__}), a module that the "
                    "graph module may share with the model it was traced from"
                )
        return None

    def _read_directly(self, path: str) -> str | None:
        found = (self._readers.get(path), *map(self._reads.get, prefixes(path)))
        return next((f"{node.name} reads {node.target}" for node in found if node), None)

    @functools.cached_property
    def _reads(self) -> dict[str, Node]:
        """For each path of a tensor or module that a `get_attr` node reads, one such node."""
        return {str(node.target): node for node in self.nodes if node.op == "get_attr"}

    @functools.cached_property
    def _readers(self) -> dict[str, Node]:
        """For each path, the first node that reads the attribute at this path or a part of it."""
        found: dict[str, Node] = {}
        for node in (node for node in self.nodes if node.op == "get_attr"):
            for prefix in prefixes(str(node.target)):
                found.setdefault(prefix, node)
        return found

    def _shared(self, path: str) -> str | None:
        direct = self._read_directly(path)
        if direct:
            return direct
        for name, tensor in _tensors(self.modules[path]).items():
            for other_path, where, other in self._holders.get(storage_of(tensor), ()):
                if other_path != path or other is not tensor:
                    return f"its {name} shares memory with {where}"
        return None

    @functools.cached_property
    def _holders(self) -> dict[int, list[tuple[str, str, Tensor]]]:
        """For each storage, its tensors, each with the path of its module and its qualified name."""
        return grouped(
            (storage_of(tensor), (path, f"{path}.{name}" if path else name, tensor))
            for path, module in self.modules.items()
            for name, tensor in _tensors(module).items()
        )


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module, without those of its children."""
    both = {**parameters_of(module), **buffers_of(module)}
    return {name: tensor for name, tensor in both.items() if tensor is not None}


def _unusual_tensor(name: str, tensor: Tensor) -> str | None:
    if isinstance(tensor, nn.Parameter) and type(tensor) is not nn.Parameter:
        return f"{name} is a {type(tensor).__name__}, not a plain parameter"
    return f"{name} has hooks" if backward_hooks_of(tensor) or accumulation_hooks_of(tensor) else None
