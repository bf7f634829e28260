"""`draw`: a graph as a picture, its nodes grouped by the modules that they come from."""

from __future__ import annotations

import dataclasses
import html
import operator
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxopt.errors import FxoptError
from fxopt.rewriting.record import MARKS, find_record

_STYLE = """\
  graph [fontname="Helvetica,Arial,sans-serif" fontsize=12 fontcolor="#334155" rankdir=TB
         nodesep=0.25 ranksep=0.35 bgcolor="white" labeljust=l style="rounded,filled" color="#94a3b8"]
  node [fontname="Helvetica,Arial,sans-serif" fontsize=11 shape=box style="rounded,filled" color="#94a3b8"
        fillcolor="white" fontcolor="#0f172a" margin="0.10,0.05" height=0.3]
  edge [fontname="Helvetica,Arial,sans-serif" fontsize=9 fontcolor="#64748b" color="#475569" arrowsize=0.6]
"""
# Fill and border of a node, by what it is.
_COLOURS = {
    "input": ("#1e293b", "#1e293b"),
    "weights": ("#bfdbfe", "#3b82f6"),
    "normalisation": ("#bbf7d0", "#22c55e"),
    "layer": ("#fed7aa", "#f97316"),
    "constant": ("#e2e8f0", "#94a3b8"),
    "operation": ("#ffffff", "#94a3b8"),
    "collapsed": ("#ddd6fe", "#8b5cf6"),
}
_TRANSFORMED = "#dc2626"
_LEVELS = ("#f8fafc", "#eef2f7")
_LONGEST = 36
_PLAIN = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool, torch.device, torch.dtype, torch.Size)


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
        name = _quoted(self._graph_module.__class__.__name__)
        return "\n".join([f"digraph {name} {{", _STYLE, *self._lines, "}"]) + "\n"

    def _root(self) -> _Frame:
        """The graph as calls inside calls: what a call does stands together in a graph."""
        root = _Frame("", "")
        opened = [root]
        for node in self._graph_module.graph.nodes:
            if self._is_check(node) or not _may_hold_tensor(node):
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
        named = [(path, _class_name(kind)) for path, kind in entries if path]
        return [entry for entry in named if node.op != "call_module" or entry[0] != node.target]

    def _is_check(self, node: Node) -> bool:
        """Tell whether a node only checks, and computes nothing: the guards on the inputs."""
        return (
            node.op == "call_module" and not node.users and getattr(self._module(node), "_is_impure", False)
        )

    def _module(self, node: Node) -> torch.nn.Module:
        module: torch.nn.Module = self._modules[str(node.target)]
        return module

    # --- boxes

    def _write_items(self, frame: _Frame, level: int) -> None:
        indent = "  " * (level + 1)
        for item in frame.items:
            if isinstance(item, Node):
                self._boxes[item] = item.name
                self._lines.append(f"{indent}{_quoted(item.name)} [{self._node_attributes(item)}]")
            elif self._depth is not None and level >= self._depth:
                self._write_collapsed(item, frame.path, indent)
            else:
                number = len(self._lines)
                title = _html(item.path.removeprefix(f"{frame.path}."), item.kind, align="left")
                self._lines.append(f'{indent}subgraph "cluster_{number}" {{')
                colour = _LEVELS[level % len(_LEVELS)]
                self._lines.append(
                    f'{indent}  label={title} fillcolor="{colour}" tooltip={_quoted(item.path)}'
                )
                self._write_items(item, level + 1)
                self._lines.append(f"{indent}}}")

    def _write_collapsed(self, frame: _Frame, parent: str, indent: str) -> None:
        nodes = list(frame.nodes())
        box = f"{frame.path} {nodes[0].name}"
        self._boxes.update(dict.fromkeys(nodes, box))
        label = _html(frame.path.removeprefix(f"{parent}."), frame.kind)
        tooltip = f"{frame.path}: {len(nodes)} nodes"
        self._lines.append(
            f"{indent}{_quoted(box)} [label={label} tooltip={_quoted(tooltip)} peripheries=2 "
            f"{_colours('collapsed', any(MARKS in node.meta for node in nodes))}]"
        )

    def _node_attributes(self, node: Node) -> str:
        marked = MARKS in node.meta
        kind = self._kind(node)
        attributes = f"tooltip={_quoted(_tooltip(node))} {_colours(kind, marked)}"
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
            return _html(type(module).__name__, str(node.target).rpartition(".")[2], _facts(module))
        if node.op in ("placeholder", "output", "get_attr"):
            name = "output" if node.op == "output" else str(node.target)
            facts = "" if node.op == "output" else _shape(node)
            return _html(name.rpartition(".")[2], facts)
        scalars = ", ".join(
            [_short(str(argument)) for argument in node.args if isinstance(argument, (int, float, str))]
            + [f"{key}={_short(str(value))}" for key, value in node.kwargs.items() if _is_scalar(value)]
        )
        return _html(_operation(node), _short(scalars))

    # --- arrows

    def _write_edges(self) -> None:
        drawn: dict[tuple[str, str, str], None] = {}
        for node, box in self._boxes.items():
            for value in node.all_input_nodes:
                source = self._boxes.get(value)
                if source is None or source == box:
                    continue
                label = "" if value.op in ("placeholder", "get_attr") else _shape(value)
                attributes = f" [label={_quoted(' ' + label)}]" if label else ""
                drawn[_quoted(source), _quoted(box), attributes] = None
        self._lines += [f"  {source} -> {box}{attributes}" for source, box, attributes in drawn]


def _operation(node: Node) -> str:
    if node.op == "call_method":
        return str(node.target)
    if node.target is getattr:
        return f".{node.args[1]}"
    if node.target is operator.getitem and not isinstance(node.args[1], (tuple, slice, Node)):
        return f"[{node.args[1]}]"
    return str(getattr(node.target, "__name__", node.target))


def _shape(node: Node) -> str:
    """The dtype and shape of a node's tensor, such as `int64 2×7`; float32 goes without saying."""
    value = node.meta.get("val", node.meta.get("tensor_meta"))
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        return ""
    sizes = "×".join(str(size) for size in shape) or "scalar"
    return sizes if dtype == torch.float32 else f"{str(dtype).removeprefix('torch.')} {sizes}"


def _may_hold_tensor(node: Node) -> bool:
    """Tell whether the value of a node may be, or hold, anything but a number or a device."""
    if "val" not in node.meta:
        return node.target is not getattr and node.target != "size"
    return not isinstance(node.meta["val"], _PLAIN)


def _tooltip(node: Node) -> str:
    lines = [str(node.format_node() or node.name)]
    lines += str(node.meta.get("stack_trace") or "").strip().splitlines()[-2:]
    lines += [f"rewritten by {mark}" for mark in node.meta.get(MARKS, ())]
    return "\n".join(lines)


def _colours(kind: str, marked: bool) -> str:
    fill, border = _COLOURS[kind]
    return f'fillcolor="{fill}" color="{_TRANSFORMED if marked else border}"' + (
        " penwidth=2.5" if marked else ""
    )


def _class_name(kind: Any) -> str:
    name = kind.__qualname__ if isinstance(kind, type) else str(kind)
    return name.rpartition(".")[2]


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (int, float, str, torch.dtype))


def _facts(module: torch.nn.Module) -> str:
    """The options of a layer, in short."""
    for one, other in (("in_features", "out_features"), ("in_channels", "out_channels")):
        if hasattr(module, one) and hasattr(module, other):
            kernel = getattr(module, "kernel_size", ())
            sizes = "×".join(map(str, kernel)) if isinstance(kernel, tuple) else str(kernel)
            return f"{getattr(module, one)} → {getattr(module, other)}" + (f", {sizes}" if sizes else "")
    return _short(module.extra_repr())


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _html(title: str, *lines: str, align: str = "center") -> str:
    """A Graphviz label: the title, and smaller lines under it."""
    end = f'<br align="{align}"/>'
    small = "".join(f'<font point-size="9">{html.escape(line)}</font>{end}' for line in lines if line)
    return f"<<b>{html.escape(title)}</b>{end}{small}>" if small else f"<<b>{html.escape(title)}</b>>"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
