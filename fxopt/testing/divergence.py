"""Where a changed graph parts from the original, in words: a node, its place in the model, the pass that touched it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch.fx import Node

from fxopt import graph
from fxopt.rewriting.edits import NodeEdit, Redirect, Swapped
from fxopt.rewriting.record import Step
from fxopt.submodules import is_inside
from fxopt.testing.observations import GIVEN


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The first node of a changed graph that does what the original does not.

    Attributes:
        node: its name.
        module: the module of the model that it calls or belongs to; empty where the trace does not tell.
        source: `file:line` of the model's code; empty where the trace does not tell.
        fault: what is wrong there, in words.
        was: the call in the original graph that it stands for.
        now: the call in the changed graph; the same as `was` where the node is new, or as it was.
        step: the pass that touched it last; empty where none did, or the record does not tell.
        call: on which inputs.
        dtype: in which dtype the graphs were run; `None` where it is their own.
        error: how far the first value that the original has, too, is off, relative to the largest of its tensor.
        limit: how far it may be.
    """

    node: str
    module: str
    source: str
    fault: str
    was: str = ""
    now: str = ""
    step: str = ""
    call: str = GIVEN
    dtype: torch.dtype | None = None
    error: float = float("inf")
    limit: float = 0.0

    def __str__(self) -> str:
        where = [
            f"module {self.module}" if self.module else "",
            self.source,
            f"touched by {self.step}" if self.step else "",
        ]
        place = ", ".join(filter(None, where))
        run = [f"in {str(self.dtype).removeprefix('torch.')}" if self.dtype else ""]
        run = [*filter(None, [*run, f"with {self.call}" if self.call != GIVEN else ""]), ""]
        text = f"{', '.join(run)}it first parts at node {self.node}{f' ({place})' if place else ''}: {self.fault}"
        return text if self.was == self.now else f"{text}; it was `{self.was}` and is `{self.now}`"


def described(node: Node, was: Node | None, steps: Sequence[Step], fault: str, call: str) -> Divergence:
    """A node in words: its place in the model, what it was in the original graph, the last step that touched it."""
    known = graph.module_path(node) or graph.source_line(node)
    origin = node if known or was is None else was
    touched = [step.name for step in steps if _touches(step, node)]
    written = [_written(each) for each in (was or node, node)]
    if written[0] == written[1]:
        written = [_written(each, options=True) for each in (was or node, node)]
    return Divergence(
        node.name,
        graph.module_path(origin),
        graph.source_line(origin),
        fault,
        was=written[0],
        now=written[1],
        step=touched[-1] if touched else "",
        call=call,
    )


def _touches(step: Step, node: Node) -> bool:
    """Tell whether a pass changed a node, the module or tensor that it takes by name, or what it reads."""
    for edit in step.edits or ():
        if isinstance(edit, NodeEdit):
            found = edit.name == node.name
        elif isinstance(edit, Redirect):
            found = node.name in (edit.new, *edit.users)
        else:
            paths = edit.left if isinstance(edit, Swapped) else edit.after
            found = node.op in ("call_module", "get_attr") and is_inside(str(node.target), paths.keys())
        if found:
            return True
    return False


def _written(node: Node, options: bool = False) -> str:
    """A node as a call, of a layer by its name or with its options."""
    values = [*map(str, node.args), *(f"{name}={value}" for name, value in node.kwargs.items())]
    name = graph.function_name(node) or str(node.target)
    if options and node.op == "call_module" and node.graph.owning_module is not None:
        layer = node.graph.owning_module.get_submodule(name)
        name = f"{type(layer).__name__}({layer.extra_repr()})"
    return f"{name}({', '.join(values)})"
