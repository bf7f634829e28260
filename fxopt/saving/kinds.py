"""The vocabulary of a saved folder: the kinds of values, and the parts of a module.

A value that JSON does not have is an object with one key, its kind: `(1, nan)` is `{"tuple": [1, {"float": "nan"}]}`, a node
`{"node": "add_1"}`, a tensor `{"tensor": "weight"}`, a function `{"name": "torch.add"}`.
"""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt.capture.runtime.input_specs import ConstantSpec, NumberSpec, StructureSpec, TensorSpec
from fxopt.capture.runtime.size_guards import SizeGuard
from fxopt.capture.runtime.traced_module import TracedModule
from fxopt.rewriting.edits import NodeEdit, NodeState, Redirect, Swapped
from fxopt.rewriting.record import Step
from fxopt.rewriting.weights import Keep, Left
from fxopt.torch_internals import BUFFERS, COMPILED, DERIVED_FROM_GRAPH, MODULES, PARAMETERS

_ENDS = operator.attrgetter("start", "stop", "step")
PARTS: dict[type, Callable[[Any], Any]] = {
    tuple: list,
    torch.Size: list,
    bytes: list,
    float: repr,
    torch.device: str,
    dict: dict.items,
    collections.OrderedDict: dict.items,
    set: lambda items: sorted(items, key=repr),
    frozenset: lambda items: sorted(items, key=repr),
    slice: _ENDS,
    range: _ENDS,
    complex: operator.attrgetter("real", "imag"),
}
"""For types of Python and torch, the function that splits a value into the parts from which it is made again."""
OF_SEVERAL_PARTS = (slice, range, complex)
"""The types whose constructor takes each part as an argument; the others take one argument with all parts."""

DATA: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        *(TensorSpec, ConstantSpec, NumberSpec, StructureSpec, SizeGuard),
        *(Step, NodeEdit, NodeState, Redirect, Swapped, Left, Keep),
    )
}
"""Classes of fxopt whose objects consist of their fields only."""

ANNOTATIONS = {kind.__name__: kind for kind in (bool, float, int, str, Tensor)}
"""The types of nodes that are saved. Other types are dropped, which does not change what a node computes."""

GRAPHS = {cls.__name__: cls for cls in (TracedModule, GraphModule)}
"""Modules with a graph."""

MEMBERS = {
    "parameters": (PARAMETERS, Tensor),
    "buffers": (BUFFERS, Tensor),
    "children": (MODULES, nn.Module),
}
"""For each kind of member of a module, the name of its registry and the type of its values."""

OF_GUARDS = ("inputs", "alternatives", "decisions")
"""The attributes of an `InputGuard` that are saved: the constructor makes the others from these."""

_BARE = {*vars(nn.Module()), COMPILED} - {"training"}
_DERIVED = {*vars(GraphModule(nn.Module(), torch.fx.Graph())), *DERIVED_FROM_GRAPH, "_containers"}


def unsaved_attributes(module: nn.Module) -> set[str]:
    """The attributes that are not saved: registries of members and hooks, and values that torch.fx derives from the graph."""
    return _BARE | _DERIVED - {"training"} if isinstance(module, GraphModule) else _BARE
