"""The texts and colours of a drawn graph."""

from __future__ import annotations

import operator
from html import escape
from typing import Any

import torch
from torch.fx import Node

from fxopt.rewriting.record import MARKS

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
_LONGEST = 36
_PLAIN = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool, torch.device, torch.dtype, torch.Size)


def operation(node: Node) -> str:
    """The name of what a node calls."""
    if node.op == "call_method":
        return str(node.target)
    if node.target is getattr:
        return f".{node.args[1]}"
    if node.target is operator.getitem and not isinstance(node.args[1], (tuple, slice, Node)):
        return f"[{node.args[1]}]"
    return str(getattr(node.target, "__name__", node.target))


def shape(node: Node) -> str:
    """The dtype and shape of a node's tensor, such as `int64 2×7`; float32 goes without saying."""
    value = node.meta.get("val", node.meta.get("tensor_meta"))
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        return ""
    sizes = "×".join(str(size) for size in shape) or "scalar"
    return sizes if dtype == torch.float32 else f"{str(dtype).removeprefix('torch.')} {sizes}"


def may_hold_tensor(node: Node) -> bool:
    """Tell whether the value of a node may be, or hold, anything but a number or a device."""
    if "val" not in node.meta:
        return node.target is not getattr and node.target != "size"
    return not isinstance(node.meta["val"], _PLAIN)


def tooltip(node: Node) -> str:
    """The node as text, its line in the model, and the passes that rewrote it."""
    lines = [str(node.format_node() or node.name)]
    lines += str(node.meta.get("stack_trace") or "").strip().splitlines()[-2:]
    lines += [f"rewritten by {mark}" for mark in node.meta.get(MARKS, ())]
    return "\n".join(lines)


def colours(kind: str, marked: bool) -> str:
    """The attributes of a box for its fill and its border."""
    fill, border = _COLOURS[kind]
    return f'fillcolor="{fill}" color="{_TRANSFORMED if marked else border}"' + (
        " penwidth=2.5" if marked else ""
    )


def class_name(kind: Any) -> str:
    """The name of a class without where it stands."""
    name = kind.__qualname__ if isinstance(kind, type) else str(kind)
    return name.rpartition(".")[2]


def is_scalar(value: Any) -> bool:
    """Tell whether an argument is written into the box."""
    return isinstance(value, (int, float, str, torch.dtype))


def layer_options(module: torch.nn.Module) -> str:
    """The options of a layer, in short."""
    for one, other in (("in_features", "out_features"), ("in_channels", "out_channels")):
        if hasattr(module, one) and hasattr(module, other):
            kernel = getattr(module, "kernel_size", ())
            sizes = "×".join(map(str, kernel)) if isinstance(kernel, tuple) else str(kernel)
            return f"{getattr(module, one)} → {getattr(module, other)}" + (f", {sizes}" if sizes else "")
    return short(module.extra_repr())


def short(text: str) -> str:
    """The beginning of a long text."""
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def html_label(title: str, *lines: str, align: str = "center") -> str:
    """A Graphviz label: the title, and smaller lines under it."""
    end = f'<br align="{align}"/>'
    small = "".join(f'<font point-size="9">{escape(line)}</font>{end}' for line in lines if line)
    return f"<<b>{escape(title)}</b>{end}{small}>" if small else f"<<b>{escape(title)}</b>>"


def quoted(text: str) -> str:
    """A text as a string of Graphviz."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
