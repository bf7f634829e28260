"""Names that the code of a graph can hold: of inputs, of modules, and of parameters and buffers."""

from __future__ import annotations

import json
import keyword

import torch

from fxopt.errors import TraceError


def check_names(graph: torch.fx.Graph) -> None:
    """Raise TraceError for a name that fx would write into code which Python cannot read.

    fx writes `self.dense`, or `getattr(self, "my dense")` where a name is none of Python's. It takes `class` for one of
    them, and a quotation mark for a part of the name.
    """
    for node in graph.nodes:
        path = str(node.target)
        if node.op == "placeholder":
            name = path.lstrip("*")
            if not name.isidentifier() or keyword.iskeyword(name):
                raise TraceError(
                    f"the input {name!r} has a name that is no name in Python, so that the forward of a graph module "
                    "cannot take it; give it another one."
                )
        elif node.op in ("call_module", "get_attr"):
            for name in path.split("."):
                if keyword.iskeyword(name) or json.dumps(name, ensure_ascii=False) != f'"{name}"':
                    raise TraceError(
                        f"the forward uses {path!r}, and torch.fx writes code that is wrong Python for the name {name!r} in "
                        "it. Rename it, or make the module that holds it a leaf (leaf_modules=...)."
                    )
