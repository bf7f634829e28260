"""`draw`: a graph as a picture, its nodes grouped by the modules that they come from."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from fxopt.drawn_text import (
    class_name,
    colours,
    html_label,
    is_scalar,
    layer_options,
    may_hold_tensor,
    operation,
    quoted,
    shape,
    short,
    tooltip,
)
from fxopt.errors import FxoptError
from fxopt.rewriting.record import MARKS, find_record

_STYLE = """\
  graph [fontname="Helvetica,Arial,sans-serif" fontsize=12 fontcolor="#334155" rankdir=TB
         nodesep=0.25 ranksep=0.35 bgcolor="white" labeljust=l style="rounded,filled" color="#94a3b8"]
  node [fontname="Helvetica,Arial,sans-serif" fontsize=11 shape=box style="rounded,filled" color="#94a3b8"
        fillcolor="white" fontcolor="#0f172a" margin="0.10,0.05" height=0.3]
  edge [fontname="Helvetica,Arial,sans-serif" fontsize=9 fontcolor="#64748b" color="#475569" arrowsize=0.6]
"""
_LEVELS = ("#f8fafc", "#eef2f7")


def draw(graph_module: GraphModule, *, depth: int | None = None, format: str = "svg") -> str:
    """Draw a graph: modules as nested frames, layers and operations as boxes, tensors as labelled arrows.

    Sizes, devices and the guards on the inputs are left out. Boxes with a red border were rewritten by a pass.
    In a browser, the tooltip of a box gives the node and the model's line.

    Args:
        graph_module: any `torch.fx.GraphModule`; shapes are drawn where the trace left them in `node.meta`.
        depth: how many levels of modules are opened; a module further inside is one box. None opens all.
        format: `"svg"`, which needs Graphviz's program `dot`, or `"dot"`, the input for it.

    Returns:
        The picture as text.

    Raises:
        FxoptError: `dot` is not there, or fails.
        ValueError: `depth` is negative, or the format is unknown.

    Example:
        >>> import torch, fxopt
        >>> traced = fxopt.trace(torch.nn.Sequential(torch.nn.Linear(4, 2)).eval(), (torch.zeros(3, 4),))
        >>> print(fxopt.draw(traced, format="dot").splitlines()[0])
        digraph "Sequential" {
        >>> "3×4" in fxopt.draw(traced, format="dot")
        True
    """
    if format not in ("svg", "dot"):
        raise ValueError(f"format is {format!r}; it must be 'svg' or 'dot'")
    if depth is not None and depth < 0:
        raise ValueError(f"depth is {depth}; it must not be negative")
    find_record(graph_module)
    source = _Drawing(graph_module, depth).source()
    return source if format == "dot" else _rendered(source)


def _rendered(source: str) -> str:
    program = shutil.which("dot")
    if program is None:
        raise FxoptError(
            "drawing an SVG needs Graphviz's program `dot`, which is not on the PATH: install Graphviz "
            "(apt install graphviz, brew install graphviz), or take the text for it with format='dot'"
        )
    run = subprocess.run([program, "-Tsvg"], input=source.encode(), capture_output=True, check=False)
    if run.returncode != 0:
        raise FxoptError(f"Graphviz's `dot` failed: {run.stderr.decode(errors='replace').strip()}")
    return run.stdout.decode()


@dataclasses.dataclass
class _Frame:
    """One call of a module: its path and class, and what it did, in order."""

    path: str
    kind: str
    items: list[Node | _Frame] = dataclasses.field(default_factory=list)

    def nodes(self) -> Iterator[Node]:
        for item in self.items:
            if isinstance(item, _Frame):
                yield from item.nodes()
            else:
                yield item


class _Drawing:
    """The Graphviz source of one graph."""

    def __init__(self, graph_module: GraphModule, depth: int | None) -> None:
        self._graph_module = graph_module
        self._modules = dict(graph_module.named_modules())
        self._depth = depth
        # Node -> the name of the box that stands for it.
        self._boxes: dict[Node, str] = {}
        self._lines: list[str] = []

    def source(self) -> str:
        self._write_items(self._root(), 0)
        self._write_edges()
        name = quoted(self._graph_module.__class__.__name__)
        return "\n".join([f"digraph {name} {{", _STYLE, *self._lines, "}"]) + "\n"

    def _root(self) -> _Frame:
        """The graph as calls inside calls: what a call does stands together in a graph."""
        root = _Frame("", "")
        opened = [root]
        for node in self._graph_module.graph.nodes:
            if self._is_check(node) or not may_hold_tensor(node):
                continue
            stack = self._stack(node)
            shared = 1
            while shared < min(len(opened), len(stack) + 1) and opened[shared].path == stack[shared - 1][0]:
                shared += 1
            del opened[shared:]
            for path, kind in stack[shared - 1 :]:
                frame = _Frame(path, kind)
                opened[-1].items.append(frame)
                opened.append(frame)
            opened[-1].items.append(node)
        return root

    def _stack(self, node: Node) -> list[tuple[str, str]]:
        """The modules that a node stands in, outermost first, without the root and the layer that it calls."""
        entries = (node.meta.get("nn_module_stack") or {}).values()
        named = [(path, class_name(kind)) for path, kind in entries if path]
        return [entry for entry in named if node.op != "call_module" or entry[0] != node.target]

    def _is_check(self, node: Node) -> bool:
        """Tell whether a node only checks, and computes nothing: the guards on the inputs."""
        unused = node.op == "call_module" and not node.users
        return unused and getattr(self._module(node), "_is_impure", False)

    def _module(self, node: Node) -> torch.nn.Module:
        module: torch.nn.Module = self._modules[str(node.target)]
        return module

    # --- boxes

    def _write_items(self, frame: _Frame, level: int) -> None:
        indent = "  " * (level + 1)
        for item in frame.items:
            if isinstance(item, Node):
                self._boxes[item] = item.name
                self._lines.append(f"{indent}{quoted(item.name)} [{self._node_attributes(item)}]")
            elif self._depth is not None and level >= self._depth:
                self._write_collapsed(item, frame.path, indent)
            else:
                number = len(self._lines)
                title = html_label(item.path.removeprefix(f"{frame.path}."), item.kind, align="left")
                self._lines.append(f'{indent}subgraph "cluster_{number}" {{')
                colour = _LEVELS[level % len(_LEVELS)]
                self._lines.append(
                    f'{indent}  label={title} fillcolor="{colour}" tooltip={quoted(item.path)}'
                )
                self._write_items(item, level + 1)
                self._lines.append(f"{indent}}}")

    def _write_collapsed(self, frame: _Frame, parent: str, indent: str) -> None:
        nodes = list(frame.nodes())
        box = f"{frame.path} {nodes[0].name}"
        self._boxes.update(dict.fromkeys(nodes, box))
        label = html_label(frame.path.removeprefix(f"{parent}."), frame.kind)
        tooltip = f"{frame.path}: {len(nodes)} nodes"
        self._lines.append(
            f"{indent}{quoted(box)} [label={label} tooltip={quoted(tooltip)} peripheries=2 "
            f"{colours('collapsed', any(MARKS in node.meta for node in nodes))}]"
        )

    def _node_attributes(self, node: Node) -> str:
        marked = MARKS in node.meta
        kind = self._kind(node)
        attributes = f"tooltip={quoted(tooltip(node))} {colours(kind, marked)}"
        if kind == "input":
            attributes += " fontcolor=white"
        return f"label={self._label(node)} {attributes}"

    def _kind(self, node: Node) -> str:
        if node.op in ("placeholder", "output"):
            return "input"
        if node.op == "get_attr":
            return "constant"
        if node.op != "call_module":
            return "operation"
        module = self._module(node)
        if "Norm" in type(module).__name__:
            return "normalisation"
        return "weights" if next(module.parameters(), None) is not None else "layer"

    def _label(self, node: Node) -> str:
        if node.op == "call_module":
            module = self._module(node)
            return html_label(
                type(module).__name__, str(node.target).rpartition(".")[2], layer_options(module)
            )
        if node.op in ("placeholder", "output", "get_attr"):
            name = "output" if node.op == "output" else str(node.target)
            facts = "" if node.op == "output" else shape(node)
            return html_label(name.rpartition(".")[2], facts)
        scalars = ", ".join(
            [short(str(argument)) for argument in node.args if isinstance(argument, (int, float, str))]
            + [f"{key}={short(str(value))}" for key, value in node.kwargs.items() if is_scalar(value)]
        )
        return html_label(operation(node), short(scalars))

    # --- arrows

    def _write_edges(self) -> None:
        drawn: dict[tuple[str, str, str], None] = {}
        for node, box in self._boxes.items():
            for value in node.all_input_nodes:
                source = self._boxes.get(value)
                if source is None or source == box:
                    continue
                label = "" if value.op in ("placeholder", "get_attr") else shape(value)
                attributes = f" [label={quoted(' ' + label)}]" if label else ""
                drawn[quoted(source), quoted(box), attributes] = None
        self._lines += [f"  {source} -> {box}{attributes}" for source, box, attributes in drawn]
