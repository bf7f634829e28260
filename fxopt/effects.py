"""What one node does to memory: which values it writes into, and whether its own value is new.

Answers are conservative: a function that is not torch's own may write into everything it is given.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.nn.modules.batchnorm import _NormBase

from fxopt import graph, operators
from fxopt.operators import Fact, facts_of, hooks_of


def written_by(node: Node, module: nn.Module | None) -> tuple[Node, ...] | None:
    """The values that a node may write into; `None` for an effect of an unknown kind, as a mode switch has.

    Args:
        node: any node.
        module: what it calls, for a `call_module` node.
    """
    if module is not None:
        return _written_by_module(node, module)
    if node.op == "call_method":
        return _first_argument(node) if operators.is_write_name(str(node.target)) else _out(node)
    if node.op == "call_function":
        return _written_by_function(node)
    return ()


def gives_new_memory(node: Node, module: nn.Module | None) -> bool:
    """Tell whether the value of `node` surely shares no memory with its inputs; arguments as for `written_by`.

    The operators in `JOINING` do so only if they are called with tensors.
    """
    if node.op == "call_method" and not (
        isinstance(node.args[0], Node) and isinstance(graph.value_of(node.args[0]), Tensor)
    ):
        return False  # perhaps a method of another object
    return Fact.NEW in facts_of(node, module) and written_by(node, module) == ()


def is_pure(node: Node, module: nn.Module | None) -> bool:
    """Tell whether a node computes the same value of the same inputs, and surely does nothing else."""
    facts = facts_of(node, module)
    if (
        not facts
        or written_by(node, module) != ()
        or (module and any(True for _ in written_parameters(module)))
    ):
        return False
    return Fact.RANDOM not in facts or _is_inactive(node, module)


def _is_inactive(node: Node, module: nn.Module | None) -> bool:
    """Tell whether what may draw random numbers draws none: dropout outside of training."""
    if module is not None:
        return not any(part.training for part in module.modules())
    chances = [node.kwargs[name] for name in ("p", "dropout_p") if name in node.kwargs]
    training = _argument(node, "training")
    return training is False or chances == [0]


def makes_tensor(node: Node, module: nn.Module | None, known: Collection[Node]) -> bool:
    """Tell whether the value of `node` is surely one tensor, given the earlier nodes whose values are.

    The operators `+` and `*` also join and repeat tuples, and then their result holds what these hold.
    """
    value = node.meta.get("val", node.meta.get("tensor_meta"))
    if value is not None:
        return hasattr(value, "dtype")
    facts = facts_of(node, module)
    if Fact.SEVERAL in facts or not facts & (Fact.NEW | Fact.KEEPS_DTYPE | Fact.SMOOTH):
        return False
    if node.target in JOINING or node.op == "call_method":
        return any(isinstance(a, float) or a in known for a in node.args)
    return gives_new_memory(node, module)


JOINING: tuple[Any, ...] = (operator.add, operator.mul)


def written_parameters(module: nn.Module) -> Iterator[Tensor]:
    """The parameters and buffers that a call of a module of torch's own may write into."""
    for part in module.modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            yield part.weight
        elif isinstance(part, _NormBase) and part.training:
            yield from part.buffers()
        elif not operators.is_torch_module(part) or hooks_of(part) or hasattr(part, "parametrizations"):
            yield from (*part.parameters(), *part.buffers())


def _written_by_module(node: Node, module: nn.Module) -> tuple[Node, ...] | None:
    if getattr(module, "_is_impure", False):
        return None
    parts = list(module.modules())
    if not operators.is_torch_module(module) or any(hooks_of(part) for part in parts):
        return tuple(node.all_input_nodes)
    return _first_argument(node) if any(getattr(part, "inplace", False) for part in parts) else ()


def _written_by_function(node: Node) -> tuple[Node, ...] | None:
    target, name = node.target, graph.function_name(node)
    if Fact.STATISTICS in facts_of(node):
        return _written_statistics(node)
    if isinstance(target, torch._ops.OpOverload):
        return _written_by_schema(node, target)
    if isinstance(target, torch._ops.OpOverloadPacket):
        overloads = [getattr(target, name) for name in target.overloads()]
        return tuple(node.all_input_nodes) if any(op._schema.is_mutable for op in overloads) else ()
    if operators.is_container(target):
        return ()
    if not operators.is_torch_function(target):
        return None if node.is_impure() else tuple(node.all_input_nodes)
    if _argument(node, "max_norm") is not None:
        return tuple(node.all_input_nodes)  # an embedding normalises its weight in place
    dunder = f"__{name.strip('_')}__" if hasattr(operator, name) else ""  # `operator.iadd` is `__iadd__`
    if operators.is_write_name(name) or operators.is_write_name(dunder) or _argument(node, "inplace"):
        return _first_argument(node)
    if not _out(node) and node.is_impure(impure_random=False):
        return None
    return _out(node)


def _written_statistics(node: Node) -> tuple[Node, ...]:
    if not inspect.isfunction(node.target):  # `torch.batch_norm` and operators of aten have no signature
        return tuple(node.all_input_nodes)
    bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    values = bound.arguments
    if not values.get("training", values.get("use_input_stats", True)):
        return ()
    return tuple(v for v in (values["running_mean"], values["running_var"]) if isinstance(v, Node))


def _written_by_schema(node: Node, target: torch._ops.OpOverload) -> tuple[Node, ...]:
    written: list[Node] = []
    for index, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            torch.fx.node.map_arg(value, written.append)
    return tuple(written)


def _argument(node: Node, name: str) -> Any:
    """An argument of a call by its name; `None` where it was not given."""
    signature = _signature(node.target)
    if signature is None:
        return node.kwargs.get(name)
    try:
        return signature.bind(*node.args, **node.kwargs).arguments.get(name)
    except TypeError:  # arguments that it does not take
        return node.kwargs.get(name)


@functools.lru_cache(maxsize=1024)
def _signature(function: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without a signature
        return None


def _out(node: Node) -> tuple[Node, ...]:
    written: list[Node] = []
    torch.fx.node.map_arg(node.kwargs.get("out"), written.append)
    return tuple(written)


def _first_argument(node: Node) -> tuple[Node, ...]:
    """The tensor, or the list of tensors, that a call is about."""
    written: list[Node] = []
    torch.fx.node.map_arg(node.args[0] if node.args else dict(node.kwargs), written.append)
    return tuple(written) + _out(node)
