"""The fingerprint of a graph module: by it, undo knows that the graph that comes out is the one that went in."""

from __future__ import annotations

import hashlib
import operator

import torch
from torch.fx import GraphModule
from torch.nn.parameter import is_lazy

from fxopt.rewriting.edits import ADDRESS, target_text
from fxopt.rewriting.record import PassRecord
from fxopt.rewriting.weights import options_of
from fxopt.torch_internals import BUFFERS, MODULES, PARAMETERS


def fingerprint(graph_module: GraphModule) -> str:
    """Digests of a graph module but for the values of its tensors, the same in every process.

    The first is of the nodes (names, order, operators, targets, arguments), the second of the modules (names, types,
    options, training flags) with their parameters and buffers (names, shapes, dtypes, devices, `requires_grad`,
    and which of them are the same tensor), the third of their order.
    """
    nodes = [
        f"{n.name} {n.op} {target_text(n.target)} {n.args!r} {n.kwargs!r}" for n in graph_module.graph.nodes
    ]
    entries: list[tuple[str, int, str]] = []
    _describe("", graph_module, entries)
    order = [path for path, _, _ in entries]
    entries.sort(key=operator.itemgetter(0))
    first: dict[int, str] = {}  # what is one module or tensor has the least of its names
    modules = [f"{path} {text} {first.setdefault(identity, path)}" for path, identity, text in entries]
    return " ".join(map(_digest, (nodes, modules, order)))


def _digest(lines: list[str]) -> str:
    text = "\n".join(lines)
    text = ADDRESS.sub("", text) if " at 0x" in text else text
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _describe(path: str, module: torch.nn.Module, entries: list[tuple[str, int, str]]) -> None:
    """Append path, identity and description of a module, and of each module and tensor in it."""
    held = vars(module)
    kind = type(module).__name__ if path else ""
    entries.append((path, id(module), f"{kind} {module.training} {options_of(module)}"))
    for name, tensor in (*held[PARAMETERS].items(), *held[BUFFERS].items()):
        if tensor is not None:
            shape = () if is_lazy(tensor) else tensor.shape
            facts = type(tensor).__name__, shape, tensor.dtype, tensor.device, tensor.requires_grad
            entries.append((f"{path}.{name}", id(tensor), repr(facts)))
    for name, child in held[MODULES].items():
        if child is not None and not isinstance(child, PassRecord):
            _describe(f"{path}.{name}", child, entries)
