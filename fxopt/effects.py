"""What one node does to memory: which values it writes into, and whether its own value is new.

Answers are conservative: a function that is not torch's own may write into everything it is given.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node
from torch.nn.modules.batchnorm import _NormBase

from fxopt.objects import build_object, set_attributes, set_items


def written_by(node: Node, module: nn.Module | None) -> tuple[Node, ...] | None:
    """The values that a node may write into; `None` for an effect of an unknown kind, as a mode switch has.

    Args:
        node: any node.
        module: what it calls, for a `call_module` node.
    """
    if module is not None:
        return _written_by_module(node, module)
    if node.op == "call_method":
        return _first_argument(node) if is_write_name(str(node.target)) else _out(node)
    if node.op == "call_function":
        return _written_by_function(node)
    return ()


def gives_new_memory(node: Node, module: nn.Module | None) -> bool:
    """Whether the value of `node` surely shares no memory with its inputs; arguments as for `written_by`."""
    if module is not None:
        return type(module) in _FRESH_MODULES and not getattr(module, "inplace", False)
    return node.op == "call_function" and node.target in _FRESH_FUNCTIONS and "out" not in node.kwargs


def makes_tensor(node: Node, module: nn.Module | None, known: Collection[Node]) -> bool:
    """Whether the value of `node` is surely one tensor, given the earlier nodes whose values are.

    The operators `+` and `*` also join and repeat tuples, and then their result holds what these hold.
    """
    value = node.meta.get("val", node.meta.get("tensor_meta"))
    if value is not None:
        return hasattr(value, "dtype")
    if node.target in JOINING or node.op == "call_method":
        return any(isinstance(a, float) or a in known for a in node.args) and node.target not in _MAKES_TUPLES
    return gives_new_memory(node, module)


JOINING: tuple[Any, ...] = (operator.add, operator.mul)
_MAKES_TUPLES = {"split", "chunk", "unbind", "size", "tolist", "item", "max", "min", "sort", "topk"} | {
    *("tensor_split", "hsplit", "vsplit", "dsplit", "split_with_sizes", "unsafe_chunk", "unsafe_split"),
    *("median", "mode", "kthvalue", "cummax", "cummin", "aminmax", "nonzero", "unique", "frexp", "slogdet"),
    *("qr", "svd", "lu", "geqrf", "triangular_solve", "unique_consecutive", "nanmedian", "histogram"),
}


def is_container(target: object) -> bool:
    """Whether a call target only packs its arguments: into a tuple, a dict, a model output, an object."""
    if target in (build_object, set_attributes, set_items):
        return True
    return isinstance(target, type) and issubclass(target, tuple | list | dict)


def is_torch_module(module: nn.Module) -> bool:
    """Whether a module is one of torch's own layers, whose effects are known."""
    return all(type(part).__module__.startswith("torch.nn.") for part in module.modules())


def is_torch_function(target: object) -> bool:
    """Whether a call target belongs to torch or to Python itself, so that its name tells what it writes."""
    module = getattr(target, "__module__", None) or ""
    return module.split(".")[0] in _WELL_NAMED or isinstance(target, type(torch.Tensor.add))


def is_write_name(name: str) -> bool:
    """Whether a function of this name writes into its first argument, by torch's naming rule.

    Example:
        >>> [name for name in ("add_", "__iadd__", "__setitem__", "add", "and_") if is_write_name(name)]
        ['add_', '__iadd__', '__setitem__']
    """
    if name.startswith("__") and name.endswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NOT_AUGMENTED)
    return name.endswith("_") and not name.endswith("__") and name not in _KEYWORDS


# What has such a name and writes nothing; some functions of `operator` are named so for Python's keywords.
_NOT_AUGMENTED = {
    *("__inv__", "__invert__", "__index__", "__int__", "__init__", "__init_subclass__", "__iter__"),
    "__instancecheck__",
}
_KEYWORDS = {"and_", "or_", "not_", "is_"}


_AUGMENTED = {
    getattr(operator, name)
    for name in ("iadd", "iand", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow")
} | {operator.irshift, operator.isub, operator.itruediv, operator.ixor, operator.setitem, operator.delitem}

_FRESH_MODULES: set[type[nn.Module]] = {
    *(nn.Linear, nn.Bilinear, nn.Embedding, nn.LayerNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d),
    *(nn.BatchNorm3d, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.GELU),
    *(nn.ReLU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Softmax, nn.MaxPool2d, nn.AvgPool2d),
}
_FRESH_FUNCTIONS: set[Any] = {
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod),
    *(operator.pow, operator.matmul, operator.neg, operator.eq, operator.ne, operator.lt, operator.le),
    *(operator.gt, operator.ge, torch.add, torch.sub, torch.mul, torch.div, torch.matmul, torch.bmm),
    *(torch.cat, torch.stack, torch.relu, torch.sigmoid, torch.tanh, torch.exp, torch.sqrt, torch.rsqrt),
    *(torch.softmax, F.softmax, F.gelu, F.linear, F.layer_norm, F.scaled_dot_product_attention),
}

# Modules whose functions write into their arguments only where their name, `out` or `inplace` says so.
_WELL_NAMED = ("torch", "_operator", "operator", "math", "builtins")


def _written_by_module(node: Node, module: nn.Module) -> tuple[Node, ...] | None:
    if getattr(module, "_is_impure", False):
        return None
    parts = list(module.modules())
    if not is_torch_module(module) or any(hooks_of(part) for part in parts):
        return tuple(node.all_input_nodes)
    return _first_argument(node) if any(getattr(part, "inplace", False) for part in parts) else ()


def hooks_of(module: nn.Module) -> list[str]:
    """The kinds of hooks of a module, which may do anything to what it is called with."""
    return [name for name, value in vars(module).items() if name.endswith("_hooks") and value]


def written_parameters(module: nn.Module) -> Iterator[Tensor]:
    """The parameters and buffers that a call of a module of torch's own may write into."""
    for part in module.modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            yield part.weight
        elif isinstance(part, _NormBase) and part.training:
            yield from part.buffers()
        elif not is_torch_module(part) or hooks_of(part) or hasattr(part, "parametrizations"):
            yield from (*part.parameters(), *part.buffers())


def _written_by_function(node: Node) -> tuple[Node, ...] | None:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return _written_by_schema(node, target)
    if isinstance(target, torch._ops.OpOverloadPacket):
        overloads = [getattr(target, name) for name in target.overloads()]
        return tuple(node.all_input_nodes) if any(op._schema.is_mutable for op in overloads) else ()
    if target in _TRAINING_FLAG:
        return _written_statistics(node, _TRAINING_FLAG[target])
    if target in (torch.batch_norm, torch.instance_norm):
        return tuple(node.all_input_nodes)
    if target in _MAX_NORM and _argument(node, "max_norm") is not None:
        return tuple(node.all_input_nodes)  # it normalises the weight in place
    name = getattr(target, "__name__", "")
    if is_container(target):
        return ()
    if not is_torch_function(target):
        return None if node.is_impure() else tuple(node.all_input_nodes)
    if target in _AUGMENTED or is_write_name(name) or _argument(node, "inplace"):
        return _first_argument(node)
    if not _out(node) and node.is_impure(impure_random=False):
        return None
    return _out(node)


_MAX_NORM = (F.embedding, F.embedding_bag)

# Which argument says that running statistics are updated.
_TRAINING_FLAG: dict[Any, str] = {F.batch_norm: "training", F.instance_norm: "use_input_stats"}


def _written_statistics(node: Node, flag: str) -> tuple[Node, ...]:
    target: Any = node.target
    bound = inspect.signature(target).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    if bound.arguments[flag] is False:
        return ()
    statistics = (bound.arguments["running_mean"], bound.arguments["running_var"])
    return tuple(value for value in statistics if isinstance(value, Node))


def _written_by_schema(node: Node, target: torch._ops.OpOverload) -> tuple[Node, ...]:
    written: list[Node] = []
    for index, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            torch.fx.node.map_arg(value, written.append)
    return tuple(written)


def _argument(node: Node, name: str) -> Any:
    """An argument of a call by its name; `None` where it was not given."""
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # a builtin without a signature
        return node.kwargs.get(name)
    return bound.arguments.get(name)


def _out(node: Node) -> tuple[Node, ...]:
    written: list[Node] = []
    torch.fx.node.map_arg(node.kwargs.get("out"), written.append)
    return tuple(written)


def _first_argument(node: Node) -> tuple[Node, ...]:
    """The tensor, or the list of tensors, that a call is about."""
    written: list[Node] = []
    torch.fx.node.map_arg(node.args[0] if node.args else dict(node.kwargs), written.append)
    return tuple(written) + _out(node)
