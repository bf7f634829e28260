"""The entrance of a graph: the names of its inputs, and the check that refuses others than those it was captured for."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt.capture.runtime.traced_module import TracedModule
from fxopt.errors import GuardError
from fxopt.testing.free_sizes import input_guard
from fxopt.testing.observations import Call, raised


def entrance_fault(graph: nn.Module, candidate: nn.Module, given: Call) -> str:
    """How a graph that is judged takes other calls than the original graph; empty where it does not, or where one is no graph."""
    if not isinstance(graph, GraphModule) or not isinstance(candidate, GraphModule):
        return ""
    expected, actual = (_parameters(each) for each in (graph, candidate))
    if expected != actual:
        return f"its inputs are ({', '.join(actual)}), those of the original ({', '.join(expected)})"
    if not isinstance(candidate, TracedModule) or _checks(candidate):
        return ""  # another graph of the model, which may take more
    for what, change in (("a dimension", lambda t: t[None].clone()), ("a row", _longer)):
        strange = given.changed(change)
        if isinstance(raised(graph, strange), GuardError) and raised(candidate, strange) is None:
            return f"it takes inputs with {what} too many, which the graph of the original refuses"
    return ""


def _parameters(graph: GraphModule) -> list[str]:
    return [
        parameter.name + ("" if parameter.default is parameter.empty else "=...")
        for parameter in inspect.signature(graph.forward).parameters.values()
    ]


def _checks(graph: GraphModule) -> bool:
    guard = input_guard(graph)
    return any(graph.get_submodule(str(n.target)) is guard for n in graph.graph.find_nodes(op="call_module"))


def _longer(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor[:1]]) if tensor.ndim else tensor.clone()
