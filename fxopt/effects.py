"""The effects of one node: the values that it writes into, and the random numbers that it draws.

Answers are conservative: a function that is not torch's own may write into each of its inputs.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.fx import Node

from fxopt import graph, operators
from fxopt.operators import Fact, facts_of
from fxopt.submodules import parts, weights_of
from fxopt.torch_internals import FORWARD_HOOKS, OpOverload, OpOverloadPacket, schema_of, written_arguments


def written_by(node: Node, module: nn.Module | None) -> tuple[Node, ...] | None:
    """List the values that a node may write into; `None` for an unknown side effect, such as a mode switch.

    Args:
        node: any node.
        module: the module that a `call_module` node calls; `None` for other nodes.
    """
    if module is not None:
        return _written_by_module(node, module)
    if node.op == "call_method":
        return _first_argument(node) if operators.is_write_name(str(node.target)) else _out(node)
    if node.op == "call_function":
        return _written_by_function(node)
    return ()


def is_write(target: object) -> bool:
    """Tell whether a call target writes into an argument, by the schema of an operator or by the name of a function."""
    if isinstance(target, OpOverload):
        return bool(schema_of(target).is_mutable)
    return operators.is_write_name(getattr(target, "__name__", ""))


def is_pure(node: Node, module: nn.Module | None) -> bool:
    """Tell whether a node surely has no side effects, and computes the same value for the same inputs."""
    facts = facts_of(node, module)
    known = bool(facts) and written_by(node, module) == () and not draws(node, module)
    return known and (module is None or not any(True for _ in written_parameters(module)))


def only_checks(node: Node) -> bool:
    """Tell whether a node is a runtime check, which capture inserts where a branch depends on a value."""
    return getattr(node.target, "__module__", "") == "fxopt.capture.runtime.checks"


def draws(node: Node, module: nn.Module | None) -> bool:
    """Tell whether an operator of torch may draw random numbers; dropout outside of training does not."""
    branches = graph.branches_of(node.target)
    if branches:
        return any(draws(n, graph.called_module(b, n)) for b in branches for n in b.graph.nodes)
    if Fact.RANDOM not in facts_of(node, module):
        return False
    if module is not None:
        return any(part.training for part in parts(module))
    if operators.name_of(node) in ("lstm", "gru"):  # `training` follows `dropout`, the only float
        known = [(rate, training) for rate, training in itertools.pairwise(node.args) if type(rate) is float]
        return not known or all(known[0])
    if operators.name_of(node) == "scaled_dot_product_attention":
        return graph.argument(node, "dropout_p") not in (None, 0)
    return graph.argument(node, "training") is not False and 0 not in (
        node.kwargs.get("p"),
        node.kwargs.get("dropout_p"),
    )


def written_parameters(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers that a call of a module may write into."""
    for part in parts(module):
        if not operators.is_torch_module(part) or has_forward_hooks(part):
            yield from weights_of(part)
        elif isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            yield part.weight
        elif part.training:
            yield from part.buffers(recurse=False)


def has_forward_hooks(module: nn.Module) -> bool:
    """Tell whether a module has forward hooks, which may do anything; torch's hooks that compute a weight do not count."""
    return len(weight_hooks_of(module)) < len([*_forward_hooks(module)])


def weight_hooks_of(module: nn.Module) -> list[Any]:
    """List torch's hooks that compute a weight of a module before each call, such as `weight_norm` and pruning."""
    return [hook for hook in _forward_hooks(module) if type(hook).__module__.startswith("torch.nn.utils.")]


def has_hooks_of_users(module: nn.Module) -> bool:
    """Tell whether a module has forward hooks other than torch's weight hooks and those of transformers.

    Hooks of transformers do nothing unless transformers collects the outputs of layers.
    """
    homes = (str(getattr(hook, "__module__", type(hook).__module__)) for hook in _forward_hooks(module))
    return any(not home.startswith(("torch.nn.utils.", "transformers.")) for home in homes)


def _forward_hooks(module: nn.Module) -> Iterator[Any]:
    return (hook for name in FORWARD_HOOKS for hook in vars(module).get(name, {}).values())


def _written_by_module(node: Node, module: nn.Module) -> tuple[Node, ...] | None:
    if getattr(module, "_is_impure", False):
        return None
    if not operators.is_torch_module(module) or any(map(has_forward_hooks, parts(module))):
        return tuple(node.all_input_nodes)
    return _first_argument(node) if any(map(_works_in_place, parts(module))) else ()


def _works_in_place(module: nn.Module) -> bool:
    """Tell whether a module writes into its input; inactive dropout returns its input unchanged."""
    inactive = isinstance(module, nn.modules.dropout._DropoutNd) and not module.training
    return bool(getattr(module, "inplace", False)) and not inactive


def _written_by_function(node: Node) -> tuple[Node, ...] | None:
    target, name = node.target, graph.function_name(node)
    if Fact.STATISTICS in facts_of(node):
        return _written_statistics(node)
    if isinstance(target, OpOverload):
        return tuple(graph.nodes_in(written_arguments(target, node.args, node.kwargs)))
    if isinstance(target, OpOverloadPacket):
        overloads = [getattr(target, name) for name in target.overloads()]
        return tuple(node.all_input_nodes) if any(schema_of(op).is_mutable for op in overloads) else ()
    if operators.is_container(target):
        return ()
    branches = graph.branches_of(target)
    if branches:
        written = [written_by(n, graph.called_module(b, n)) for b in branches for n in b.graph.nodes]
        quiet = all(each is not None and all(map(_is_made_there, each)) for each in written)
        return () if quiet else tuple(node.all_input_nodes)
    if getattr(target, "only_reads", False):
        return ()
    if not (operators.is_torch_function(target) or operators.name_of(node)):
        return None if node.is_impure() else tuple(node.all_input_nodes)
    if graph.argument(node, "max_norm") is not None:
        return tuple(node.all_input_nodes)  # an embedding normalises its weight in place
    dunder = f"__{name.strip('_')}__" if hasattr(operator, name) else ""  # `operator.iadd` is `__iadd__`
    if operators.is_write_name(name) or operators.is_write_name(dunder) or graph.argument(node, "inplace"):
        return _first_argument(node)
    if not _out(node) and node.is_impure(impure_random=False):
        return None
    return _out(node)


def _is_made_there(value: Node) -> bool:
    """Tell whether the memory of a value was allocated by a call in the same graph."""
    facts, first = facts_of(value), graph.first_argument(value)
    if Fact.VIEW in facts and Fact.SEVERAL not in facts and isinstance(first, Node):
        return _is_made_there(first)
    return Fact.NEW in facts and written_by(value, None) == ()


def _written_statistics(node: Node) -> tuple[Node, ...]:
    """The statistics that a function of a normalization writes; all inputs if the names of its arguments are unknown."""
    given, names = graph.argument(node, "training"), graph.positional(node.target)
    # Outside of training, statistics are only read: the sixth argument of each such function tells.
    evaluates = False in (given, node.kwargs.get("use_input_stats"), *node.args[5:6])
    if evaluates or ("training" in names and given is None):
        return ()
    if "running_mean" not in names:
        return tuple(node.all_input_nodes)
    statistics = (graph.argument(node, name) for name in ("running_mean", "running_var"))
    return tuple(value for value in statistics if isinstance(value, Node))


def _out(node: Node) -> tuple[Node, ...]:
    return tuple(graph.nodes_in(node.kwargs.get("out")))


def _first_argument(node: Node) -> tuple[Node, ...]:
    """The tensor or tensors in the first argument of a call, and those passed as `out`."""
    return (*graph.nodes_in(node.args[0] if node.args else node.kwargs), *_out(node))
