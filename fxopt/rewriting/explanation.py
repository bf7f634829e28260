"""Sites and refusals of a pass in a graph, as tables."""

from __future__ import annotations

import dataclasses
import os
from typing import NamedTuple, Protocol

from torch.fx import Node

from fxopt import graph
from fxopt.errors import PassError


class Site(Protocol):
    """A site that a pass can rewrite; tables list it under `node`. A pass may also yield plain nodes as sites."""

    @property
    def node(self) -> Node: ...


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A place that looks like a site but is not rewritten, with the reason.

    Example:
        >>> import torch
        >>> (node,) = torch.fx.symbolic_trace(torch.nn.Identity()).graph.find_nodes(op="placeholder", target="input")
        >>> Refusal(node, "it is an input").reason
        'it is an input'
    """

    node: Node
    reason: str

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str) or not self.reason:
            raise PassError(
                f"the refusal of {self.node} has the reason {self.reason!r}: give a text, or yield the site"
            )


class Row(NamedTuple):
    """A site (`reason` is `None`) or a refusal.

    Attributes:
        node: the name of the node.
        module: the module that the node calls or belongs to; empty if unknown.
        reason: why the pass refuses the node; None for a site.
        source: `file:line` of the model's code; empty if unknown.
    """

    node: str
    module: str
    reason: str | None
    source: str = ""

    @classmethod
    def of(cls, found: Site | Node | Refusal) -> Row:
        """Describe what `match` found."""
        node, reason = node_of(found), found.reason if isinstance(found, Refusal) else None
        return cls(node.name, graph.module_path(node), reason, graph.source_line(node))

    @property
    def place(self) -> str:
        """The node with its module and source line, as text for a message."""
        return graph.place_text(self.node, self.module, self.source)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The sites and refusals of a pass in a graph: `str()` gives a table.

    Attributes:
        name: the pass.
        rows: the sites and refusals, in the order of matching.
    """

    name: str
    rows: tuple[Row, ...]

    @property
    def sites(self) -> tuple[tuple[str, str], ...]:
        """Node and module of each site."""
        return tuple((row.node, row.module) for row in self.rows if row.reason is None)

    @property
    def refusals(self) -> tuple[tuple[str, str, str], ...]:
        """Node, module and reason of each refusal."""
        return tuple((row.node, row.module, row.reason) for row in self.rows if row.reason is not None)

    def __str__(self) -> str:
        head = f"{self.name}: {len(self.sites)} sites, {len(self.refusals)} refused"
        cells = [(r.node, r.module, os.path.basename(r.source), r.reason or "site") for r in self.rows]
        columns = [column for column in zip(*cells, strict=True) if any(column)]
        widths = [max(map(len, column)) for column in columns]
        lines = [
            "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in zip(*columns, strict=True)
        ]
        return "\n  ".join([head, *lines])

    __repr__ = __str__


def node_of(found: Site | Node | Refusal) -> Node:
    """The node under which a site or refusal is listed."""
    return found if isinstance(found, Node) else found.node
