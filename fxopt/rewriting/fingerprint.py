"""The fingerprint of a graph module, by which undo checks that it has restored the earlier graph module."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator

from torch.fx import GraphModule
from torch.nn.parameter import is_lazy

from fxopt.rewriting.edits import ADDRESS, target_text
from fxopt.rewriting.record import PassRecord
from fxopt.rewriting.weights import options_of
from fxopt.torch_internals import buffers_of, parameters_of


def fingerprint(graph_module: GraphModule) -> str:
    """Compute three digests of a graph module, without the values of tensors; they are the same in every process.

    The first digest covers the nodes (names, order, operators, targets, arguments). The second covers the modules (names,
    types, options, training flags) with their parameters and buffers (names, shapes, dtypes, devices, `requires_grad`,
    and which of them are the same tensor). The third covers the order of modules, parameters and buffers.
    """
    nodes = [
        f"{n.name} {n.op} {target_text(n.target)} {n.args!r} {n.kwargs!r}" for n in graph_module.graph.nodes
    ]
    entries = [*_entries(graph_module)]
    order = [path for path, _, _ in entries]
    entries.sort(key=operator.itemgetter(0))
    first: dict[int, str] = {}  # the first name of each shared module or tensor
    modules = [f"{path} {text} {first.setdefault(identity, path)}" for path, identity, text in entries]
    return " ".join(map(_digest, (nodes, modules, order)))


def _digest(lines: list[str]) -> str:
    text = "\n".join(lines)
    text = ADDRESS.sub("", text) if " at 0x" in text else text
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _entries(graph_module: GraphModule) -> Iterator[tuple[str, int, str]]:
    """Yield path, identity and description of each module, and of each tensor in it."""
    for name, module in graph_module.named_modules(remove_duplicate=False):
        if isinstance(module, PassRecord):
            continue
        path, kind = (f".{name}", type(module).__name__) if name else ("", "")
        yield path, id(module), f"{kind} {module.training} {options_of(module)}"
        for name, tensor in (*parameters_of(module).items(), *buffers_of(module).items()):
            if tensor is not None:
                shape = () if is_lazy(tensor) else tensor.shape
                facts = type(tensor).__name__, shape, tensor.dtype, tensor.device, tensor.requires_grad
                yield f"{path}.{name}", id(tensor), repr(facts)
