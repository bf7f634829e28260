"""Modules of a graph module: where they are, in what order, what they hold, and how one takes the place of another."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule


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


def without_tensors(module: nn.Module) -> nn.Module:
    """A module of the same type with the same options and flags, whose parameters are all `None`."""
    shell = type(module).__new__(type(module))
    for name, value in vars(module).items():  # registries of hooks and such must not be shared
        shell.__dict__[name] = value.copy() if isinstance(value, dict | set) else value
    shell.__dict__["_parameters"] = dict.fromkeys(module._parameters)
    return shell


def with_values(tensor: Tensor, values: Tensor) -> Tensor:
    """`values` as what `tensor` is: a parameter with the same `requires_grad`, or a plain tensor."""
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


def is_plain_linear(layer: nn.Linear) -> bool:
    """Whether a `Linear` has a weight of the shape that it says, maybe a bias, and nothing else."""
    if set(layer._parameters) != {"weight", "bias"} or layer._buffers or layer._modules:
        return False
    shape, bias = (layer.out_features, layer.in_features), layer._parameters["bias"]
    return layer.weight.shape == shape and (bias is None or bias.shape == shape[:1])
