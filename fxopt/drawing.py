"""`draw`: a graph as a picture, its nodes grouped by the modules that they come from."""

from __future__ import annotations

import itertools
import json
import os.path
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from html import escape

import torch
from torch.fx import GraphModule, Node

from fxopt.errors import FxoptError
from fxopt.graph import NUMBERS, check_graph_module, source_line
from fxopt.rewriting.record import MARKS, find_record

_STYLE = """\
  graph [fontname="Helvetica,Arial,sans-serif" fontsize=12 fontcolor="#334155" rankdir=TB
         nodesep=0.25 ranksep=0.35 bgcolor="white" labeljust=l style="rounded,filled" color="#94a3b8"]
  node [fontname="Helvetica,Arial,sans-serif" fontsize=11 shape=box style="rounded,filled" color="#94a3b8"
        fillcolor="white" fontcolor="#0f172a" margin="0.10,0.05" height=0.3]
  edge [fontname="Helvetica,Arial,sans-serif" fontsize=9 fontcolor="#64748b" color="#475569" arrowsize=0.6]
"""
_LEVELS = ("#f8fafc", "#eef2f7")
_COLLAPSED, _WEIGHTS, _LAYER = "#ddd6fe", "#bfdbfe", "#fed7aa"
_OTHERS = {"placeholder": "#cbd5e1", "output": "#cbd5e1", "get_attr": "#f1f5f9"}
_LONGEST = 36
_WRITTEN = (int, float, str, torch.dtype)
_Stack = tuple[tuple[str, str], ...]


def draw(graph_module: GraphModule, *, depth: int | None = None, format: str = "svg") -> str:
    """Draw a graph: modules as nested frames, layers and operations as boxes, tensors as labelled arrows.

    Sizes, devices and the guards on the inputs are left out. Boxes with a red border were rewritten by a pass.
    In a browser, the tooltip of a box gives the node and the model's line.

    Args:
        graph_module: any `torch.fx.GraphModule`; shapes are drawn if the trace recorded them in `node.meta`.
        depth: how many levels of modules are opened; a module further inside is one box. None opens all.
        format: `"svg"`, which needs Graphviz's program `dot`, or `"dot"`, the input of that program.

    Returns:
        The picture as text.

    Raises:
        FxoptError: `dot` is not installed, or fails.
        TypeError: `graph_module` is not a graph module.
        ValueError: `depth` is negative, or the format is unknown.

    Example:
        >>> import torch, fxopt
        >>> traced = fxopt.trace(torch.nn.Sequential(torch.nn.Linear(4, 2)).eval(), (torch.zeros(3, 4),))
        >>> print(fxopt.draw(traced, format="dot").splitlines()[0])
        digraph "Sequential" {
        >>> "3×4" in fxopt.draw(traced, format="dot")
        True
    """
    check_graph_module(graph_module, "draw takes")
    if format not in ("svg", "dot"):
        raise ValueError(f"format is {format!r}; it must be 'svg' or 'dot'")
    if depth is not None and depth < 0:
        raise ValueError(f"depth is {depth}; it must not be negative")
    find_record(graph_module)
    lines, boxes = _boxes(graph_module, depth)
    name = _quoted(type(graph_module).__name__)
    body = "".join(f"  {line}\n" for line in (*lines, *_arrows(boxes)))
    source = f"digraph {name} {{\n{_STYLE}{body}}}\n"
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


def _boxes(graph_module: GraphModule, depth: int | None) -> tuple[list[str], dict[Node, str]]:
    """Return the lines of frames and boxes, and the box of each drawn node; the nodes of one module call share a frame."""
    lines, boxes = list[str](), dict[Node, str]()
    opened: _Stack = ()
    drawn = [node for node in graph_module.graph.nodes if not _is_left_out(node)]
    for stack, group in itertools.groupby(drawn, key=lambda n: _stack(n, depth)):
        nodes, frames = list(group), stack[:depth]
        shared = len(os.path.commonprefix([opened, frames]))  # noqa: RUF071 - of pairs, not of paths
        lines += "}" * (len(opened) - shared)
        for level in range(shared, len(frames)):
            title, color = _title(stack, level), _LEVELS[level % len(_LEVELS)]
            lines.append(f'subgraph "cluster_{len(lines)}" {{ label={title} fillcolor="{color}"')
        opened = frames
        for part in [nodes] if stack != frames else ([node] for node in nodes):
            name, (label, tooltip, color) = part[0].name, _appearance(part[0], graph_module)
            if stack != frames:
                tooltip = f"{stack[-1][0]}: {len(nodes)} nodes"
                name, label, color = f"{stack[-1][0]} {name}", _title(stack, len(frames)), _COLLAPSED
            boxes |= dict.fromkeys(part, name)
            border = ' color="#dc2626" penwidth=2.5' if any(MARKS in node.meta for node in part) else ""
            facts = f'label={label} tooltip={_quoted(tooltip)} fillcolor="{color}"{border}'
            lines.append(f"{_quoted(name)} [{facts}]")
    return [*lines, *"}" * len(opened)], boxes


def _is_left_out(node: Node) -> bool:
    """Tell whether a node is not drawn: it only checks inputs, or computes a number, a size or a device."""
    if "val" in node.meta:
        checks = node.op == "call_module" and not node.users and node.is_impure()
        return checks or isinstance(node.meta["val"], NUMBERS)
    return node.target is getattr or node.target == "size"


def _stack(node: Node, depth: int | None) -> _Stack:
    """The modules around a node, outermost first, without the root, the layer that the node calls, and levels below `depth`."""
    entries = (node.meta.get("nn_module_stack") or {}).values()
    called = node.target if node.op == "call_module" else ""
    named = ((path, str(getattr(kind, "__qualname__", kind))) for path, kind in entries)
    stack = tuple((path, name.rpartition(".")[2]) for path, name in named if path not in ("", called))
    return stack if depth is None else stack[: depth + 1]


def _arrows(boxes: Mapping[Node, str]) -> Iterable[str]:
    drawn: dict[str, None] = {}
    for node, box in boxes.items():
        for value in node.all_input_nodes:
            source = boxes.get(value, box)
            label = "" if value.op in ("placeholder", "get_attr") else _shape(value)
            if source != box:
                attributes = f" [label={_quoted(' ' + label)}]" if label else ""
                drawn[f"{_quoted(source)} -> {_quoted(box)}{attributes}"] = None
    return drawn


def _appearance(node: Node, graph_module: GraphModule) -> tuple[str, str, str]:
    """The label, the tooltip and the color of a node."""
    rewritten = [f"rewritten by {mark}" for mark in node.meta.get(MARKS, ())]
    tooltip = "\n".join([str(node.format_node() or node.name), source_line(node), *rewritten])
    name = str(node.target).rpartition(".")[2]
    if node.op == "call_module":
        module = graph_module.get_submodule(str(node.target))
        options = re.sub(r"in_features=(\d+), out_features=(\d+), bias=\w+", r"\1 → \2", module.extra_repr())
        color = _WEIGHTS if any(True for _ in module.parameters()) else _LAYER
        return _html(type(module).__name__, name, options), tooltip, color
    if node.op in _OTHERS:
        return _html(name, _shape(node)), tooltip, _OTHERS[node.op]
    given = [("", value) for value in node.args] + [(f"{key}=", value) for key, value in node.kwargs.items()]
    written = ", ".join(f"{key}{value}" for key, value in given if isinstance(value, _WRITTEN))
    return _html(str(getattr(node.target, "__name__", node.target)), written), tooltip, "#ffffff"


def _shape(node: Node) -> str:
    """The dtype and shape of a node's tensor, such as `int64 2×7`; float32 is not written."""
    value = node.meta.get("val", node.meta.get("tensor_meta"))
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        return ""
    sizes = "×".join(map(str, shape)) or "scalar"
    return f"{dtype} {sizes}".removeprefix("torch.").removeprefix("float32 ")


def _title(stack: _Stack, level: int) -> str:
    """The label of a module: its name in the module around it, and its class."""
    (path, kind), outer = stack[level], stack[level - 1][0] if level else ""
    return _html(path.removeprefix(f"{outer}."), kind)


def _html(title: str, *lines: str) -> str:
    """A Graphviz label: the title, and smaller lines below; long lines are cut."""
    short = (line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…" for line in lines if line)
    small = "".join(f'<br/><font point-size="9">{escape(line)}</font>' for line in short)
    return f"<<b>{escape(title)}</b>{small}>"


def _quoted(text: str) -> str:
    """Quote a text as a Graphviz string."""
    return json.dumps(text, ensure_ascii=False)
