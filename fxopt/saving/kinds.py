"""The words of a saved folder: the kinds of values, and the parts of a module.

JSON that is no value by itself is an object with one key that says its kind: `(1, nan)` is `{"tuple": [1, {"float": "nan"}]}`,
a node `{"node": "add_1"}`, a tensor `{"tensor": "weight"}`, a function `{"name": "torch.add"}`.
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
"""The parts of which the types of Python and torch are made again."""
OF_SEVERAL_PARTS = (slice, range, complex)
"""Those whose parts are the arguments; the others take one, which has all of them."""

DATA: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        *(TensorSpec, ConstantSpec, NumberSpec, StructureSpec, SizeGuard),
        *(Step, NodeEdit, NodeState, Redirect, Swapped, Left, Keep),
    )
}
"""Classes of fxopt that are their fields."""

ANNOTATIONS = {kind.__name__: kind for kind in (bool, float, int, str, Tensor)}
"""The types of nodes. A node of any other type is written without it, which changes nothing."""

GRAPHS = {cls.__name__: cls for cls in (TracedModule, GraphModule)}
"""Modules with a graph."""

MEMBERS = {
    "parameters": (PARAMETERS, Tensor),
    "buffers": (BUFFERS, Tensor),
    "children": (MODULES, nn.Module),
}
"""Where a module keeps its members, and what they are."""

OF_GUARDS = ("inputs", "alternatives", "decisions")
"""The attributes of an `InputGuard` of which its constructor makes the others."""

_BARE = {*vars(nn.Module()), COMPILED} - {"training"}
_DERIVED = {*vars(GraphModule(nn.Module(), torch.fx.Graph())), *DERIVED_FROM_GRAPH, "_containers"}


def no_attributes(module: nn.Module) -> set[str]:
    """The names below which a module keeps its members and hooks, and what torch.fx derives from its graph."""
    return _BARE | _DERIVED - {"training"} if isinstance(module, GraphModule) else _BARE
