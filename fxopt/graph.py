"""Questions about the nodes of a graph: their inputs and values, and where in the model they come from."""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import os
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from fxopt.submodules import module_at
from fxopt.torch_internals import (
    FakeTensor,
    enable_python_dispatcher,
    name_counts,
    pytree,
    statically_known_true,
    used_names,
)

T = TypeVar("T", bound=Hashable)
V = TypeVar("V")

NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool, torch.Size, torch.dtype, torch.device)
"""The types of values that neither are nor contain tensors: numbers, and properties of tensors."""


def check_graph_module(value: Any, what: str) -> None:
    """Raise a TypeError with advice if `value` is not a GraphModule; `what` begins the text, such as `draw takes`."""
    if not isinstance(value, GraphModule):
        raise TypeError(
            f"{what} a torch.fx.GraphModule, got {type(value).__name__}: "
            "trace the model first, for example with fxopt.symbolic_trace"
        )


def input_of(node: Node, module: nn.Module) -> Node | None:
    """The node that is the only argument of a module call, by position or by keyword; `None` if unclear."""
    names = positional(type(module).forward)[1:]  # the first one is self
    values = [*node.args, *node.kwargs.values()]
    if (
        len(values) != 1
        or (node.kwargs and names[:1] != list(node.kwargs))
        or not isinstance(values[0], Node)
    ):
        return None
    return values[0]


@functools.lru_cache(maxsize=1024)
def positional(function: Any) -> list[str]:
    """The names of the positional parameters of a function; empty if it has no signature, as many builtins."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def argument(node: Node, name: str) -> Any:
    """The value that a call passes for a parameter of this name, by position or keyword; `None` if there is none.

    Example:
        >>> x = torch.fx.Graph().placeholder("x")
        >>> argument(x.graph.call_function(torch.nn.functional.elu, (x, 1.0, True)), "inplace")
        True
    """
    if name in node.kwargs or node.op != "call_function":
        return node.kwargs.get(name)
    names = positional(node.target)
    position = names.index(name) if name in names else len(node.args)
    return node.args[position] if position < len(node.args) else None


def first_argument(node: Node) -> Any:
    """The first argument of a call, by position or as `input`; `None` if there is none."""
    return node.args[0] if node.args else node.kwargs.get("input")


def function_name(node: Node) -> str:
    """The name of the function or method that a node calls, without its overload; empty for other nodes."""
    if node.op not in ("call_function", "call_method"):
        return ""
    return str(getattr(node.target, "__name__", node.target)).split(".")[0]


def turns_autocast_on(node: Node) -> bool:
    """Tell whether a node enters an enabled autocast block, which chooses the dtypes of the computations in it."""
    return "enter_autocast" in function_name(node) and node.args[2:3] != (False,)


def use_obstacle(node: Node, users: Collection[Node]) -> str | None:
    """Return a reason that names the users of `node` that are not in `users`; `None` if there are none."""
    others = [user.name for user in node.users if user not in users]
    return f"{node.name} is also used by {', '.join(others)}" if others else None


def value_of(node: Node) -> Any:
    """A node's value as the trace recorded it, with fake tensors; `None` if unknown."""
    value = node.meta.get("val")
    if value is None and node.target is operator.getitem:
        whole, key = node.args
        parts = value_of(whole) if isinstance(whole, Node) else None
        if isinstance(parts, tuple | list) and isinstance(key, int):
            return parts[key]
    return value


def nodes_in(arguments: Any) -> list[Node]:
    """List the nodes in nested arguments, in order, with repetitions."""
    found: list[Node] = []
    map_arg(arguments, found.append)
    return found


def leaf_arguments(call: Any) -> list[Any]:
    """List the leaves of the arguments of a node, or of an object with its fields: nodes, numbers, dtypes and others."""
    found: list[Any] = []
    map_aggregate((call.args, call.kwargs), found.append)
    return found


def numbers_in(calls: Iterable[Any]) -> list[int | float]:
    """List the numbers in the arguments of nodes, or of objects with their fields, each once."""
    leaves = (leaf for call in calls for leaf in leaf_arguments(call))
    return list(dict.fromkeys(leaf for leaf in leaves if type(leaf) in (int, float)))


def called_module(root: nn.Module, node: Node) -> nn.Module | None:
    """The module that a node of a graph calls; `None` for nodes that call none."""
    return module_at(root, str(node.target)) if node.op == "call_module" else None


def called_with(call: Any, module: nn.Module | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a call, a node or an object with its fields, with other arguments; `module` is the module of a `call_module`."""
    if call.op == "call_method":
        return getattr(args[0], call.target)(*args[1:], **kwargs)
    function: Any = call.target if module is None else module
    return function(*args, **kwargs)


def branches_of(target: Any) -> list[Any]:
    """The two graph modules of a call target that runs one of them; empty for other targets."""
    sides = [getattr(target, side, None) for side in ("true_branch", "false_branch")]
    return [] if None in sides else sides


def free_name(graph: Graph, name: str) -> None:
    """Let a graph use a name again: restore its name counter to the state before the name was given."""
    used_names(graph).discard(name)
    counts, (base, _, number) = name_counts(graph), name.rpartition("_")
    if number.isdecimal():
        counts[base] = int(number) - 1


def reached(start: Iterable[T], following: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """Yield the items of `start`, and all items that `following` leads to from them, each once."""
    pending = list(dict.fromkeys(start))
    seen = {*pending}
    while pending:
        each = pending.pop()
        yield each
        new = [other for other in dict.fromkeys(following(each)) if other not in seen]
        seen.update(new)
        pending += new


def grouped(pairs: Iterable[tuple[T, V]]) -> dict[T, list[V]]:
    """Group the second entries of pairs by the first, in the order of the pairs.

    Example:
        >>> grouped([("a", 1), ("b", 2), ("a", 3)])
        {'a': [1, 3], 'b': [2]}
    """
    found: dict[T, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def holds(node: Node, condition: Callable[[Tensor], bool]) -> bool:
    """Tell whether the value of `node`, as the trace recorded it, is or contains a tensor that meets a condition."""
    return any(isinstance(leaf, Tensor) and condition(leaf) for leaf in pytree.tree_leaves(value_of(node)))


def dtype_of(node: Node) -> torch.dtype | None:
    """The dtype of a node's tensor, from the metadata of the trace; `None` if unknown."""
    dtype = getattr(_description(node), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else None


def is_floating(node: Node) -> bool:
    """Tell whether a value is surely a floating tensor, by the metadata of the trace."""
    dtype = dtype_of(node)
    return dtype is not None and dtype.is_floating_point


def rank_of(node: Node) -> int | None:
    """The number of dimensions of a node's tensor, from the metadata of the trace; `None` if unknown."""
    shape = getattr(_description(node), "shape", None)
    return None if shape is None else len(shape)


def shape_of(node: Node) -> tuple[int, ...] | None:
    """The shape of a node's tensor for the example inputs of the trace; `None` if unknown."""
    sizes = getattr(_description(node), "shape", None)
    if sizes is None or any(isinstance(size, torch.SymInt) and not size.node.has_hint() for size in sizes):
        return None
    return tuple(int(size.node.hint) if isinstance(size, torch.SymInt) else int(size) for size in sizes)


def unknown_shape(node: Node) -> str:
    """Return a reason that the shape of a value is unknown, with advice for the user."""
    if isinstance(_description(node), Tensor):
        return f"the shape of {node.name} depends on the values of an input"
    return (
        f"the shape of {node.name} is unknown: capture the model with fxopt.trace, or run "
        "torch.fx.passes.fake_tensor_prop.FakeTensorProp with FakeTensorMode(allow_non_fake_inputs=True)"
    )


def _description(node: Node) -> Any:
    value = value_of(node)
    return node.meta.get("tensor_meta") if value is None else value  # fx's ShapeProp writes `tensor_meta`


def module_path(node: Node) -> str:
    """The path of the module that a node calls or belongs to; empty if unknown."""
    if node.op == "call_module":
        return str(node.target)
    stack = node.meta.get("nn_module_stack")
    return str(next(reversed(stack.values()))[0]) if stack else ""


def source_line(node: Node) -> str:
    """`file:line` of the model's code that a node comes from; empty if unknown."""
    frames = re.findall(r'File "(.+?)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [f"{file}:{line}" for file, line in frames if not file.startswith(_TORCH)]
    return own[-1] if own else ""


ORIGIN = ("nn_module_stack", "stack_trace")
"""The keys of the metadata that tells where in the model a node comes from."""


def origin_of(node: Any) -> dict[str, Any]:
    """The metadata that tells where in the model a node, or an object with its `meta`, comes from."""
    return {key: node.meta[key] for key in ORIGIN if key in node.meta}


def place(node: Node) -> str:
    """Describe a node for a message: its name, and its module and line in the model, if known."""
    return place_text(node.name, module_path(node), source_line(node))


def place_text(name: str, path: str, line: str) -> str:
    """Describe a node for a message by its name, its module path and its source line."""
    where = [f"in {path}" if path else "", f"from {line}" if line else ""]
    text = ", ".join(filter(None, where))
    return f"{name} ({text})" if text else name


_TORCH = os.path.dirname(torch.__file__) + os.sep


def placed(module: nn.Module, graph_module: GraphModule, node: Node) -> nn.Module:
    """Move a new module to the device of a graph module, and to the floating dtype of `node`, if known."""
    floating = (parameter for parameter in graph_module.parameters() if parameter.is_floating_point())
    first = next(floating, value_of(node))
    if not isinstance(first, Tensor):
        return module
    dtype = dtype_of(node) or first.dtype
    return module.to(first.device, dtype if dtype.is_floating_point else None)


def like(described: Tensor, shape: Sequence[Any] | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Make a fake or meta tensor like `described`, with another shape or dtype."""
    dtype, on = dtype or described.dtype, "meta" if isinstance(described, FakeTensor) else described.device
    if shape is None:
        empty = torch.empty_strided(described.shape, described.stride(), dtype=dtype, device=on)
    else:
        empty = torch.empty(tuple(shape), dtype=dtype, device=on)
    # `described.new_empty` would go through the dispatcher, and take ten times as long.
    if isinstance(described, FakeTensor):
        empty = FakeTensor(described.fake_mode, empty, described.device)
    return empty


@contextlib.contextmanager
def describing(value: Tensor) -> Iterator[None]:
    """Compute with fake tensors like `value` in this block; questions about free sizes add no guards to the graph."""
    mode = value.fake_mode if isinstance(value, FakeTensor) else contextlib.nullcontext()
    shape_env = getattr(mode, "shape_env", None)
    with (
        mode,
        enable_python_dispatcher(),
        shape_env.suppress_guards() if shape_env else contextlib.nullcontext(),
    ):
        yield


def shape_env_of(graph_module: GraphModule) -> Any:
    """The `ShapeEnv` of the free sizes of the inputs; None if all sizes are fixed."""
    nodes = graph_module.graph.find_nodes(op="placeholder")
    leaves = (leaf for node in nodes for leaf in pytree.tree_leaves(value_of(node)))
    sizes: Iterator[Any] = (size for leaf in leaves if isinstance(leaf, Tensor) for size in leaf.shape)
    return next((size.node.shape_env for size in sizes if isinstance(size, torch.SymInt)), None)


def suppressing_guards(graph_module: GraphModule) -> contextlib.AbstractContextManager[None]:
    """Keep free sizes free in this block, even if a pass converts one to a number, as by `int`."""
    env = shape_env_of(graph_module)
    return contextlib.nullcontext() if env is None else env.suppress_guards()


def alike(sizes: Sequence[Any], others: Sequence[Any]) -> bool:
    """Tell whether sizes are the same in every run: as expressions, or by the facts that the trace recorded."""
    return len(sizes) == len(others) and all(
        str(size) == str(other) or statically_known_true(size == other)
        for size, other in zip(sizes, others, strict=True)
    )


def same_kind(left: Node, right: Node) -> bool:
    """Tell whether two values are tensors of the same dtype, and of the same shape in every run."""
    mine, its = value_of(left), value_of(right)
    if not isinstance(mine, Tensor) or not isinstance(its, Tensor):
        return False
    return mine.dtype == its.dtype and alike(mine.shape, its.shape)


def recast(described: Any, old: torch.dtype, new: torch.dtype) -> Any:
    """Change the dtype `old` to `new` in the fake tensors of a value."""

    def renewed(leaf: Any) -> Any:
        # Not by `to`: autograd may forbid reading a view that was written into.
        return like(leaf, dtype=new) if isinstance(leaf, Tensor) and leaf.dtype == old else leaf

    return pytree.tree_map(renewed, described)
