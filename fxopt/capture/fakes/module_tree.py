"""The modules of a model: which are leaves, which are recorded, and the module tree of the graph module."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from fxopt.errors import TraceError
from fxopt.torch_internals import buffers_of, modules_of, non_persistent_of, parameters_of

Leaf = str | type[torch.nn.Module] | Callable[[str, torch.nn.Module], bool]
LeafModules = Leaf | Sequence[Leaf]

_CONTAINERS = (
    *(torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict),
    *(torch.nn.ParameterList, torch.nn.ParameterDict),
)


def leaves(model: torch.nn.Module, leaf_modules: LeafModules) -> set[int]:
    """The identities of the modules that become one `call_module` node: layers of torch.nn, modules compiled
    by TorchScript, and those that the caller names.

    Raises:
        TraceError: if an entry of `leaf_modules` matches no module.
    """
    named = [(name, module) for name, module in model.named_modules(remove_duplicate=False) if name]
    chosen = {id(module) for _, module in named if is_torch_layer(module)}
    for leaf in [leaf_modules] if isinstance(leaf_modules, str) or callable(leaf_modules) else leaf_modules:
        known = isinstance(leaf, str | type) or callable(leaf)
        fitting = {id(module) for name, module in named if known and _fits(leaf, name, module)}
        if not fitting:
            raise TraceError(
                f"leaf_modules has {leaf!r}, which fits no module of {type(model).__name__}. Give types of modules, "
                'qualified names or patterns of them ("model.layers.*"), or a function of name and module.'
            )
        chosen |= fitting
    return chosen


def _fits(leaf: Any, name: str, module: torch.nn.Module) -> bool:
    if isinstance(leaf, str):
        return name == leaf or fnmatch.fnmatchcase(name, leaf)
    return isinstance(module, leaf) if isinstance(leaf, type) else bool(leaf(name, module))


def is_torch_layer(module: torch.nn.Module) -> bool:
    """Tell whether a module is a leaf by default: a layer of torch.nn, or compiled by TorchScript."""
    if type(module) is torch.nn.Module or isinstance(module, _CONTAINERS):
        return False  # it only holds others
    if isinstance(module, torch.jit.ScriptModule):
        return True  # it runs outside of Python
    return type(module).__module__.startswith(("torch.nn.", "torch.ao.nn.", "fxopt.kernels"))


def recorded_modules(model: torch.nn.Module, layers: Collection[int]) -> list[tuple[str, torch.nn.Module]]:
    """The modules whose own forward is recorded, with their names: those that are inside no leaf."""
    inside = {id(part) for m in model.modules() if id(m) in layers for part in m.modules()}
    return [(name, module) for name, module in model.named_modules() if id(module) not in inside]


def copy_tree(source: torch.nn.Module, target: torch.nn.Module, layers: Collection[int]) -> None:
    """Give `target` the parameters, buffers, children and flags of `source`; only containers are created again, each once."""
    made: dict[int, torch.nn.Module] = {id(source): target}

    def fill(old: torch.nn.Module, new: torch.nn.Module) -> None:
        new.training = old.training
        for name, parameter in parameters_of(old).items():
            new.register_parameter(name, parameter)
        for name, buffer in buffers_of(old).items():
            new.register_buffer(name, buffer, persistent=name not in non_persistent_of(old))
        for name, child in modules_of(old).items():
            if child is None or id(child) in layers:
                new.add_module(name, child)
                continue
            if id(child) not in made:
                made[id(child)] = torch.nn.Module()
                fill(child, made[id(child)])
            new.add_module(name, made[id(child)])

    fill(source, target)
