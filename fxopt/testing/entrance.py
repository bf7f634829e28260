"""The entrance of a graph: the names of its inputs, and the guard that refuses inputs other than those of the capture."""

from __future__ import annotations

import inspect

from torch import nn
from torch.fx import GraphModule

from fxopt.capture.runtime.traced_module import TracedModule
from fxopt.testing.free_sizes import input_guard


def entrance_fault(graph: nn.Module, candidate: nn.Module) -> str:
    """Describe how a judged graph accepts other calls than the original; empty if it does not, or if one is not a graph."""
    if not isinstance(graph, GraphModule) or not isinstance(candidate, GraphModule):
        return ""
    expected, actual = (_parameters(each) for each in (graph, candidate))
    if expected != actual:
        return f"its inputs are ({', '.join(actual)}), those of the original ({', '.join(expected)})"
    # A graph that does not come from a capture may accept more.
    if isinstance(candidate, TracedModule) and _checks(graph) and not _checks(candidate):
        return "it does not check its inputs, and the graph of the original does"
    return ""


def _parameters(graph: GraphModule) -> list[str]:
    return [
        parameter.name + ("" if parameter.default is parameter.empty else "=...")
        for parameter in inspect.signature(graph.forward).parameters.values()
    ]


def _checks(graph: GraphModule) -> bool:
    guard = input_guard(graph)
    return any(graph.get_submodule(str(n.target)) is guard for n in graph.graph.find_nodes(op="call_module"))
