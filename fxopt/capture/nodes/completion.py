"""Completes a graph: valid names for its code; `val`, `nn_module_stack` and `stack_trace`, as torch.export has them."""

from __future__ import annotations

import ast
import itertools
import json
import keyword
import operator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fxopt.capture.capture_internals import custom_builtins, number_of_truth
from fxopt.capture.fakes.dynamic_shapes import SymbolicNumber
from fxopt.capture.nodes.size_nodes import ROUNDING
from fxopt.errors import TraceError

# Functions of these modules compute with symbols; Python's own functions would require a number.
_SYMBOLIC = (operator.add.__module__, "torch")
_NUMBERS = (bool, int, float, *SymbolicNumber)


def complete_metadata(graph: Graph, root: str) -> None:
    """Give every node `val`, `nn_module_stack` and `stack_trace`; `root` is the class of the model."""
    outside: tuple[Any, str] = ({"": ("", root)}, "")
    place = outside
    for node in reversed(graph.nodes):
        if node.op in ("placeholder", "output"):
            place = outside
        elif node.meta.get("nn_module_stack"):
            place = node.meta["nn_module_stack"], node.meta["stack_trace"]
        elif not node.users:  # a check of inputs or sizes
            node.meta["nn_module_stack"], node.meta["stack_trace"] = outside
            continue
        # A node that computes a size precedes the node that it was written for.
        node.meta["nn_module_stack"], node.meta["stack_trace"] = place
    for node in graph.nodes:
        if "val" not in node.meta:
            node.meta["val"] = _value(node)


def _value(node: Node) -> Any:
    """The value of a node that builds an output or computes a number; None for other nodes."""
    described: Any = map_arg((node.args, node.kwargs), lambda value: value.meta["val"])
    args, kwargs = described
    target: Any = node.target
    if node.op == "output":
        return args[0]
    if target == "size" and isinstance(args[0], torch.Tensor):
        return args[0].size(*args[1:])
    if isinstance(target, type) and not issubclass(target, _NUMBERS):
        return target(*args, **kwargs)
    if target is int and isinstance(args[0], torch.SymBool):
        return number_of_truth(args[0])
    symbolic = target in ROUNDING or getattr(target, "__module__", "") in _SYMBOLIC
    if symbolic and all(isinstance(value, _NUMBERS) for value in args):
        return target(*args, **kwargs)
    return None


def _is_read(graph: Graph, name: str) -> bool:
    """Tell whether the code of a graph uses an input's name again, after it assigns the input to another name."""
    parts = ast.walk(ast.parse(graph.python_code("self").src))
    return sum(isinstance(part, ast.Name) and part.id == name for part in parts) > 1


def check_names(graph: torch.fx.Graph) -> None:
    """Raise TraceError for names with which fx generates invalid Python: keywords, names with quotation marks."""
    inputs = [str(node.target).lstrip("*") for node in graph.nodes if node.op == "placeholder"]
    for node in graph.nodes:
        path = str(node.target)
        if node.op == "placeholder":
            name = path.lstrip("*")
            if not name.isidentifier() or keyword.iskeyword(name) or inputs.count(name) > 1:
                raise TraceError(
                    f"the input {name!r} has a name that is not valid in Python, or that another input has, so the forward "
                    "of a graph module cannot accept this input. Rename the input."
                )
            if name in custom_builtins and _is_read(graph, name):
                raise TraceError(
                    f"the input {name!r} has a name that code of torch.fx uses for something else ({custom_builtins[name].obj}); "
                    "give it another one."
                )
        elif node.op in ("call_module", "get_attr"):
            for name in path.split("."):
                if keyword.iskeyword(name) or json.dumps(name, ensure_ascii=False) != f'"{name}"':
                    raise TraceError(
                        f"the forward uses {path!r}, but torch.fx generates invalid Python for the name {name!r}. "
                        "Rename this attribute, or make the module that holds it a leaf (leaf_modules=...)."
                    )


def add_constant(constants: dict[str, torch.Tensor], tensor: torch.Tensor, model: torch.nn.Module) -> str:
    """Add a constant under an unused name, which no attribute of the model has either; return the name."""
    names = (f"_tensor_constant{number}" for number in itertools.count(len(constants)))
    name = next(n for n in names if n not in constants and not hasattr(model, n))
    constants[name] = tensor
    return name
