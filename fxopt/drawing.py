"""`draw`: a graph as a picture, its nodes grouped by the modules that they come from."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    drawn, boxes = [node for node in graph_module.graph.nodes if not _is_left_out(node)], dict[Node, str]()
    name = _quoted(type(graph_module).__name__)
    lines = [*_frames(graph_module, drawn, depth, boxes), *_arrows(boxes)]
    body = "".join(f"  {line}\n" for line in lines)
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


def _frames(
    graph_module: GraphModule,
    nodes: Sequence[Node],
    depth: int | None,
    boxes: dict[Node, str],
    level: int = 0,
) -> Iterator[str]:
    """Yield the lines of frames and boxes of nodes in one module; add the box of each node to `boxes`."""
    for stack, group in itertools.groupby(nodes, key=lambda node: _stack(node)[: level + 1]):
        inside = list(group)
        if len(stack) <= level:  # nodes of the module itself
            for node in inside:
                yield _box([node], boxes, node.name, *_appearance(node, graph_module))
        elif level == depth:
            path = stack[-1][0]
            tooltip = f"{path}: {len(inside)} nodes"
            yield _box(inside, boxes, f"{path} {inside[0].name}", _title(stack), tooltip, _COLLAPSED)
        else:
            name, color = f"cluster_{level} {inside[0].name}", _LEVELS[level % len(_LEVELS)]
            yield f'subgraph "{name}" {{ label={_title(stack)} fillcolor="{color}"'
            yield from _frames(graph_module, inside, depth, boxes, level + 1)
            yield "}"


def _box(
    nodes: Sequence[Node], boxes: dict[Node, str], name: str, label: str, tooltip: str, color: str
) -> str:
    """Return the line of a box, and add the box of its nodes to `boxes`."""
    boxes |= dict.fromkeys(nodes, name)
    border = ' color="#dc2626" penwidth=2.5' if any(MARKS in node.meta for node in nodes) else ""
    return f'{_quoted(name)} [label={label} tooltip={_quoted(tooltip)} fillcolor="{color}"{border}]'


def _is_left_out(node: Node) -> bool:
    """Tell whether a node is not drawn: it only checks inputs, or computes a number, a size or a device."""
    if "val" in node.meta:
        checks = node.op == "call_module" and not node.users and node.is_impure()
        return checks or isinstance(node.meta["val"], NUMBERS)
    return node.target is getattr or node.target == "size"


def _stack(node: Node) -> _Stack:
    """The modules around a node, outermost first, without the root and the layer that the node calls."""
    entries = (node.meta.get("nn_module_stack") or {}).values()
    called = node.target if node.op == "call_module" else ""
    named = ((path, str(getattr(kind, "__qualname__", kind))) for path, kind in entries)
    return tuple((path, name.rpartition(".")[2]) for path, name in named if path not in ("", called))


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


def _title(stack: _Stack) -> str:
    """The label of the last module of a stack: its name in the module around it, and its class."""
    path, kind = stack[-1]
    outer = stack[-2][0] if len(stack) > 1 else ""
    return _html(path.removeprefix(f"{outer}."), kind)


def _html(title: str, *lines: str) -> str:
    """A Graphviz label: the title, and smaller lines below; long lines are cut."""
    short = (line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…" for line in lines if line)
    small = "".join(f'<br/><font point-size="9">{escape(line)}</font>' for line in short)
    return f"<<b>{escape(title)}</b>{small}>"


def _quoted(text: str) -> str:
    """Quote a text as a Graphviz string."""
    return json.dumps(text, ensure_ascii=False)
