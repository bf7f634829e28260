"""Modules of a graph module: their paths, order and tensors, and functions that replace them."""

from __future__ import annotations

import copy
import hashlib
import itertools
import os.path
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt.torch_internals import PARAMETERS, buffers_of, modules_of, parameters_of, used_names

STANDS_FOR = "_fxopt_stands_for"
"""The attribute of an optimized module that contains the eager model."""

GRAPHS = "_fxopt_graphs"
"""The attribute of an optimized module that contains its graphs."""

OWN_FORWARD, OWN_COMPILED = "_fxopt_forward", "_fxopt_compiled"
"""The attributes of an optimized module for a forward that someone assigns, and for the result of `Module.compile`."""


def original(module: Any) -> Any:
    """Return the eager model of an optimized module; return any other object unchanged, even a proxy of an optimized module."""
    slot = getattr(type(module), STANDS_FOR, None)
    try:
        return module if slot is None else slot.__get__(module)
    except AttributeError:  # an instance that was made from the class, without a model
        return module


def split_path(path: str) -> tuple[str, str]:
    """Split `"encoder.layer.0"` into `("encoder.layer", "0")`."""
    parent, _, name = path.rpartition(".")
    return parent, name


def prefixes(path: str) -> list[str]:
    """List the prefixes of `"encoder.layer.0"`: `["encoder", "encoder.layer", "encoder.layer.0"]`."""
    return list(itertools.accumulate(path.split("."), "{}.{}".format))


def is_inside(path: str, names: Collection[str]) -> bool:
    """Tell whether a qualified name is one of `names`, or below one; fast if `names` is a set or a dict."""
    return any(prefix in names for prefix in prefixes(path))


def common_parent(paths: Iterable[str]) -> str:
    """The qualified name of the innermost module that contains all of `paths`.

    Example:
        >>> common_parent(["encoder.layer.0.query", "encoder.layer.0.key"]), common_parent(["query", "key"])
        ('encoder.layer.0', '')
    """
    parents = [split_path(path)[0].split(".") for path in paths]
    return ".".join(os.path.commonprefix(parents))  # noqa: RUF071 - of names, not of paths


def module_at(root: nn.Module, path: str) -> nn.Module:
    """The module at a qualified name; much faster than `get_submodule`."""
    found = root
    for name in path.split(".") if path else ():
        part = modules_of(found).get(name)
        if part is None:
            return root.get_submodule(path)  # raises an error that names the missing part
        found = part
    return found


def attribute(graph_module: GraphModule, path: str) -> Any:
    """The tensor or other object that a `get_attr` node reads at `path`."""
    owner, name = split_path(path)
    return getattr(module_at(graph_module, owner), name)


def merged_order(known: Sequence[str], names: Iterable[str]) -> list[str]:
    """Insert the new entries of `names` into `known`, each after the known entry that it follows in `names`.

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


def names_in(graph_module: GraphModule, parent: str) -> list[str]:
    """The names of the parameters, buffers and children of a module, in order."""
    module = module_at(graph_module, parent)
    return [*parameters_of(module), *buffers_of(module), *modules_of(module)]


def put_in_order(graph_module: GraphModule, parent: str, names: Iterable[str]) -> None:
    """Restore a recorded order of parameters, buffers and children; names that are not in `names` come last."""
    module, places = module_at(graph_module, parent), {name: place for place, name in enumerate(names)}
    for held in (parameters_of(module), buffers_of(module), modules_of(module)):
        for name in sorted(held, key=lambda name: places.get(name, len(places))):
            held[name] = held.pop(name)


def free_path(graph_module: GraphModule, parent: str, name: str) -> str:
    """Return `parent.name`, followed by a number if this name is in use."""
    owner = module_at(graph_module, parent)
    candidate, number = name, 0
    while hasattr(owner, candidate):
        number += 1
        candidate = f"{name}_{number}"
    return f"{parent}.{candidate}" if parent else candidate


def parts(module: nn.Module) -> list[nn.Module]:
    """A module and all modules below it; fast if there are none."""
    return list(module.modules()) if modules_of(module) else [module]


def tensors_of(values: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield given tensors, and the parameters and buffers of given modules, under each of their qualified names."""
    for path, value in values.items():
        if isinstance(value, Tensor):
            yield path, value
        elif isinstance(value, nn.Module):
            for part, module in value.named_modules(prefix=path, remove_duplicate=False):
                for name, tensor in (*parameters_of(module).items(), *buffers_of(module).items()):
                    if tensor is not None:
                        yield f"{part}.{name}".lstrip("."), tensor


def weights_of(value: Any) -> Iterator[Tensor]:
    """The tensor itself, or the parameters and buffers of a module."""
    return (tensor for _, tensor in tensors_of({"": value}))


def digest(values: Mapping[str, Any]) -> str:
    """Compute a digest of the names, dtypes, shapes and numbers of tensors, and of the tensors in modules."""
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors_of(values):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        if not tensor.is_meta:
            flat = tensor.detach().cpu().contiguous().flatten()
            found.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return found.hexdigest()


M = TypeVar("M", bound=nn.Module)


def without_tensors(module: M) -> M:
    """Make a module of the same type with the same options and flags, whose parameters are all `None`."""
    shell = type(module).__new__(type(module))
    for name, value in vars(module).items():  # registries, such as those of hooks, must not be shared
        shell.__dict__[name] = value.copy() if isinstance(value, (dict, set)) else value
    shell.__dict__[PARAMETERS] = dict.fromkeys(parameters_of(module))
    return shell


def with_parameters(module: M, parameters: Mapping[str, Tensor | None]) -> M:
    """Make a module of the same type with the same options and flags, and with other parameters."""
    made = without_tensors(module)
    vars(made)[PARAMETERS] = dict(parameters)
    return made


def with_values(tensor: Tensor, values: Tensor) -> Tensor:
    """Make `values` a parameter with the same `requires_grad` if `tensor` is a parameter; otherwise return `values`."""
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


def weight_of(layer: nn.Module) -> Tensor:
    """The weight of a layer that has one; much faster than `get_parameter`."""
    weight: Tensor | None = parameters_of(layer)["weight"]
    assert weight is not None
    return weight


def layout_of(layer: nn.Module) -> dict[str, tuple[int, ...]]:
    """The strides that a copy of each parameter of a layer would have, by name."""
    held = parameters_of(layer).items()
    return {name: _strides(p) for name, p in held if p is not None}


def _strides(tensor: Tensor) -> tuple[int, ...]:
    return (tensor if tensor.is_contiguous() else torch.empty_like(tensor, device="meta")).stride()


def laid_out(values: Tensor, strides: Sequence[int]) -> Tensor:
    """Copy a tensor, with these strides."""
    empty = torch.empty_strided(values.shape, strides, dtype=values.dtype, device=values.device)
    return empty.copy_(values)


def is_plain(layer: nn.Module) -> bool:
    """Tell whether a layer has only a weight of the shape that its options define and, maybe, a bias for each channel."""
    if set(parameters_of(layer)) != {"weight", "bias"} or buffers_of(layer) or modules_of(layer):
        return False
    weight, bias = parameters_of(layer)["weight"], parameters_of(layer)["bias"]
    options: Any = layer  # the options may differ from the weight's shape: some tools prune only the weight
    if isinstance(layer, nn.Linear):
        given, taken, rest = layer.out_features, layer.in_features, ()
    else:
        given, taken, rest = options.out_channels, options.in_channels, options.kernel_size
    sizes = (taken, given) if getattr(layer, "transposed", False) else (given, taken)
    shape = (sizes[0], sizes[1] // getattr(layer, "groups", 1), *rest)
    return weight is not None and weight.shape == shape and (bias is None or bias.shape == (given,))


def find(graph_module: GraphModule, path: str) -> Any:
    """The module, parameter or buffer at `path`; None if there is none."""
    parent, name = split_path(path)
    owner = module_at(graph_module, parent)
    for registry in (modules_of(owner), parameters_of(owner), buffers_of(owner)):
        if name in registry:
            return registry[name]
    return None


def place(owner: nn.Module, path: str, value: Any) -> None:
    """Set a module, parameter or buffer of `owner` under the last part of `path`; None removes the existing one."""
    _, name = split_path(path)
    registries = {
        nn.Module: modules_of(owner),
        nn.Parameter: parameters_of(owner),
        Tensor: buffers_of(owner),
    }
    wanted = next((held for kind, held in registries.items() if isinstance(value, kind)), None)
    if wanted is None and value is not None:
        raise TypeError(f"{path} takes a module or a tensor, not a {type(value).__name__}")
    for held in registries.values():
        if held is not wanted:
            held.pop(name, None)
    if wanted is not None:
        wanted[name] = value


def place_all(graph_module: GraphModule, values: Mapping[str, Any]) -> None:
    """Set modules, parameters or buffers at qualified names, as `place` does."""
    for path, value in values.items():
        place(module_at(graph_module, split_path(path)[0]), path, value)


def sharing_copy(graph_module: GraphModule) -> GraphModule:
    """Copy a graph module deeply, but share parameters and buffers; names of erased nodes stay reserved in the copy."""
    copied = copy.deepcopy(graph_module, {id(tensor): tensor for tensor in weights_of(graph_module)})
    used_names(copied.graph).update(used_names(graph_module.graph))
    return copied
