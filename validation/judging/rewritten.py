"""A copy of a graph after a pipeline, and tests for intended and forbidden changes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt.outputs import same_bits
from fxopt.rewriting.composition import compose
from fxopt.rewriting.fingerprint import fingerprint
from fxopt.rewriting.history import history
from fxopt.rewriting.transformation import Transformation
from fxopt.testing.round_trips import attributes, differences
from fxopt.torch_internals import REGISTRIES, buffers_of, modules_of, parameters_of

Refusals = tuple[tuple[str, str, str], ...]


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """A copy of the graph after a pipeline.

    `sites` is the number of rewritten sites; for a single pass, as counted by `sites_of`. `tampered` names the tensors and
    modules of the original graph that a pass changed.
    """

    module: GraphModule
    sites: int
    tampered: tuple[str, ...]


def rewrite(traced: GraphModule, passes: Sequence[Transformation]) -> Rewritten:
    """Apply passes to a copy of a graph; several passes are composed, as users do."""
    module = copy.deepcopy(traced)
    # Keep the copy's objects, as a user's model would: a pass may replace them, but must not change them.
    kept = {name: (part, _members(part)) for name, part in module.named_modules()}
    if len(passes) == 1:
        module = passes[0](module)
        sites = sites_of(passes[0], traced, module)
    else:
        module = compose(*passes)(module)
        sites = sum(step.sites for step in history(module))
    return Rewritten(module, sites, tuple(_tampered(traced, kept)))


class Explained(NamedTuple):
    """The refusals of a pass in a graph, as (pass, node, reason), and the places of its sites as text."""

    refusals: Refusals = ()
    places: tuple[str, ...] = ()


def explained(traced: GraphModule, name: str, pass_: Transformation) -> Explained:
    """Explain a pass; a pass with only `transform` has no explanation."""
    if not (explain := getattr(pass_, "explain", None)):
        return Explained()
    module = copy.deepcopy(traced)
    found = explain(module)
    if differ(traced, module):
        raise AssertionError("explaining the pass changes the graph")
    refused = tuple((name, node, reason) for node, _, reason in found.refusals)
    return Explained(refused, tuple(dict.fromkeys(row.place for row in found.rows if row.reason is None)))


def sites_of(pass_: Transformation, before: GraphModule, after: GraphModule) -> int:
    """The number of sites that a pass rewrote according to its history; if none, 1 if the graph module changed."""
    steps = history(after)[len(history(before)) :]
    sites = sum(step.sites for step in steps if step.signature == pass_.signature)
    return sites or int(differ(before, after))


def differ(before: GraphModule, after: GraphModule) -> bool:
    """True if two graph modules differ in nodes, modules, or any value of parameters and buffers."""
    if fingerprint(before) != fingerprint(after):
        return True
    its = tensors(after)
    return any(not same_bits(tensor, its[name]) for name, tensor in tensors(before).items())


def tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module by name; tied ones appear under each name."""
    found = (module.named_parameters, module.named_buffers)
    return {name: tensor for named in found for name, tensor in named(remove_duplicate=False)}


def _tampered(traced: GraphModule, kept: Mapping[str, tuple[nn.Module, dict[str, object]]]) -> Iterator[str]:
    """Name the differences between the graph's modules and tensors and those of the copy that a pipeline rewrote."""
    for name, (module, members) in kept.items():
        origin, now = traced.get_submodule(name), _members(module)
        yield from differences(name, _members(origin), members)
        if isinstance(module, GraphModule) or type(module) is nn.Module:
            continue  # containers belong to the graph module
        yield from differences(name, *map(_options, (origin, module)))
        yield from (f"{name}.{key}" for key in members | now if members.get(key) is not now.get(key))


def _members(module: nn.Module) -> dict[str, object]:
    """The parameters, buffers and modules that a module itself holds."""
    return {**parameters_of(module), **buffers_of(module), **modules_of(module)}


def _options(module: nn.Module) -> dict[str, object]:
    """The other attributes of a module."""
    return {key: value for key, value in attributes(module).items() if key not in REGISTRIES[:3]}
