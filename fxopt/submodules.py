"""Modules of a graph module: where they are, in what order, what they hold, and how one takes the place of another."""

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
"""The attribute of a module that `fxopt.optimize` made in which the model is."""

GRAPHS = "_fxopt_graphs"
"""That in which its graphs are."""

OWN_FORWARD, OWN_COMPILED = "_fxopt_forward", "_fxopt_compiled"
"""Those in which is what someone puts in the place of its forward, and what `Module.compile` makes of it."""


def original(module: Any) -> Any:
    """The model that an optimized module stands for; another object is itself, also one that passes its attributes on."""
    slot = getattr(type(module), STANDS_FOR, None)
    try:
        return module if slot is None else slot.__get__(module)
    except AttributeError:  # an instance that was made of the class
        return module


def split_path(path: str) -> tuple[str, str]:
    """`"encoder.layer.0"` as `("encoder.layer", "0")`."""
    parent, _, name = path.rpartition(".")
    return parent, name


def prefixes(path: str) -> list[str]:
    """`"encoder.layer.0"` as `["encoder", "encoder.layer", "encoder.layer.0"]`."""
    return list(itertools.accumulate(path.split("."), "{}.{}".format))


def is_inside(path: str, names: Collection[str]) -> bool:
    """Tell whether a qualified name is one of `names`, or below one; fast where these are a set or a dict."""
    return any(prefix in names for prefix in prefixes(path))


def common_parent(paths: Iterable[str]) -> str:
    """The qualified name of the innermost module that holds all of `paths`.

    Example:
        >>> common_parent(["encoder.layer.0.query", "encoder.layer.0.key"]), common_parent(["query", "key"])
        ('encoder.layer.0', '')
    """
    parents = [split_path(path)[0].split(".") for path in paths]
    return ".".join(os.path.commonprefix(parents))  # noqa: RUF071 - of names, not of paths


def module_at(root: nn.Module, path: str) -> nn.Module:
    """The module at a qualified name, as `get_submodule` finds it, in a small part of its time."""
    found = root
    for name in path.split(".") if path else ():
        part = modules_of(found).get(name)
        if part is None:
            return root.get_submodule(path)  # which says what is missing
        found = part
    return found


def attribute(graph_module: GraphModule, path: str) -> Any:
    """The tensor, or whatever a `get_attr` node reads, at `path`."""
    owner, name = split_path(path)
    return getattr(module_at(graph_module, owner), name)


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


def names_in(graph_module: GraphModule, parent: str) -> list[str]:
    """The names of the parameters, buffers and children of a module, in order."""
    module = module_at(graph_module, parent)
    return [*parameters_of(module), *buffers_of(module), *modules_of(module)]


def put_in_order(graph_module: GraphModule, parent: str, names: Iterable[str]) -> None:
    """Bring parameters, buffers and children back to a recorded order; those that are new since then come last."""
    module, places = module_at(graph_module, parent), {name: place for place, name in enumerate(names)}
    for held in (parameters_of(module), buffers_of(module), modules_of(module)):
        for name in sorted(held, key=lambda name: places.get(name, len(places))):
            held[name] = held.pop(name)


def free_path(graph_module: GraphModule, parent: str, name: str) -> str:
    """`parent.name`, or with a number behind it where that name is taken."""
    owner = module_at(graph_module, parent)
    candidate, number = name, 0
    while hasattr(owner, candidate):
        number += 1
        candidate = f"{name}_{number}"
    return f"{parent}.{candidate}" if parent else candidate


def parts(module: nn.Module) -> list[nn.Module]:
    """A module and all modules below it; fast where there are none."""
    return list(module.modules()) if modules_of(module) else [module]


def tensors_of(values: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of modules, and tensors themselves, by qualified name, under each of their names."""
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
    """A digest of the names, dtypes, shapes and numbers of the tensors of modules, and of tensors themselves."""
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors_of(values):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        if not tensor.is_meta:
            flat = tensor.detach().cpu().contiguous().flatten()
            found.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return found.hexdigest()


M = TypeVar("M", bound=nn.Module)


def without_tensors(module: M) -> M:
    """A module of the same type with the same options and flags, whose parameters are all `None`."""
    shell = type(module).__new__(type(module))
    for name, value in vars(module).items():  # registries of hooks and such must not be shared
        shell.__dict__[name] = value.copy() if isinstance(value, (dict, set)) else value
    shell.__dict__[PARAMETERS] = dict.fromkeys(parameters_of(module))
    return shell


def with_parameters(module: M, parameters: Mapping[str, Tensor | None]) -> M:
    """The same with other parameters."""
    made = without_tensors(module)
    vars(made)[PARAMETERS] = dict(parameters)
    return made


def with_values(tensor: Tensor, values: Tensor) -> Tensor:
    """`values` as what `tensor` is: a parameter with the same `requires_grad`, or a plain tensor."""
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


def weight_of(layer: nn.Module) -> Tensor:
    """The weight of a layer that holds one, in a small part of the time of `get_parameter`."""
    weight: Tensor | None = parameters_of(layer)["weight"]
    assert weight is not None
    return weight


def layout_of(layer: nn.Module) -> dict[str, tuple[int, ...]]:
    """The strides that copies of the parameters of a layer have, by name."""
    held = parameters_of(layer).items()
    return {name: _strides(p) for name, p in held if p is not None}


def _strides(tensor: Tensor) -> tuple[int, ...]:
    return (tensor if tensor.is_contiguous() else torch.empty_like(tensor, device="meta")).stride()


def laid_out(values: Tensor, strides: Sequence[int]) -> Tensor:
    """A copy with these strides."""
    empty = torch.empty_strided(values.shape, strides, dtype=values.dtype, device=values.device)
    return empty.copy_(values)


def is_plain(layer: nn.Module) -> bool:
    """Tell whether a layer has a weight of the shape that it says, maybe a bias for each channel, and nothing else."""
    if set(parameters_of(layer)) != {"weight", "bias"} or buffers_of(layer) or modules_of(layer):
        return False
    weight, bias = parameters_of(layer)["weight"], parameters_of(layer)["bias"]
    options: Any = layer  # which may be others than those of the weight: some tools prune that alone
    if isinstance(layer, nn.Linear):
        given, taken, rest = layer.out_features, layer.in_features, ()
    else:
        given, taken, rest = options.out_channels, options.in_channels, options.kernel_size
    sizes = (taken, given) if getattr(layer, "transposed", False) else (given, taken)
    shape = (sizes[0], sizes[1] // getattr(layer, "groups", 1), *rest)
    return weight is not None and weight.shape == shape and (bias is None or bias.shape == (given,))


def find(graph_module: GraphModule, path: str) -> Any:
    """The module, parameter or buffer at `path`; None where there is none."""
    parent, name = split_path(path)
    owner = module_at(graph_module, parent)
    for registry in (modules_of(owner), parameters_of(owner), buffers_of(owner)):
        if name in registry:
            return registry[name]
    return None


def place(owner: nn.Module, path: str, value: Any) -> None:
    """Put a module, parameter or buffer below `owner` under the last part of `path`; None takes away what is there."""
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
    """Put modules, parameters or buffers at qualified names, as `place` does."""
    for path, value in values.items():
        place(module_at(graph_module, split_path(path)[0]), path, value)


def sharing_copy(graph_module: GraphModule) -> GraphModule:
    """A deep copy that shares the parameters and buffers, in which the names of erased nodes stay reserved, too."""
    copied = copy.deepcopy(graph_module, {id(tensor): tensor for tensor in weights_of(graph_module)})
    used_names(copied.graph).update(used_names(graph_module.graph))
    return copied
