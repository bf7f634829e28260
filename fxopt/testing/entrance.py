"""The entrance of a graph: the names of its inputs, and the check that refuses others than those it was captured for."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt.capture.runtime.traced_module import TracedModule
from fxopt.errors import GuardError
from fxopt.testing.free_sizes import input_guard
from fxopt.testing.observations import Call, observe


def entrance_fault(graph: nn.Module, candidate: nn.Module, given: Call) -> str:
    """How a graph that is judged takes other calls than the original graph; empty where it does not, or where one is no graph."""
    if not isinstance(graph, GraphModule) or not isinstance(candidate, GraphModule):
        return ""
    expected, actual = (_parameters(each) for each in (graph, candidate))
    if expected != actual:
        return f"its inputs are ({', '.join(actual)}), those of the original ({', '.join(expected)})"
    if not isinstance(candidate, TracedModule) or _checks(candidate):
        return ""  # another graph of the model, which may take more
    for what, change in (("a dimension", _deeper), ("a row", _longer)):
        strange = given.changed(change)
        if _refused(graph, strange) and _answered(candidate, strange):
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


def _deeper(tensor: Tensor) -> Tensor:
    return tensor[None].clone()


def _longer(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor[:1]]) if tensor.ndim else tensor.clone()


def _refused(graph: GraphModule, call: Call) -> bool:
    guard = input_guard(graph)
    if guard is None:
        return False
    try:
        guard(**inspect.signature(graph.forward).bind(*call.args, **call.kwargs).arguments)
    except GuardError:
        return True
    except Exception:  # no call of this graph
        return False
    return False


def _answered(candidate: GraphModule, call: Call) -> bool:
    try:
        observe(candidate, [call])
    except Exception:  # whatever it raises, it is refused
        return False
    return True
