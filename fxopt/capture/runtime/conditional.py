"""The target of a node that calls `torch.cond` with two captured branches."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch


@dataclasses.dataclass(frozen=True, eq=False)
class Conditional:
    """Runs one of two graphs, as `torch.cond` does: `target(predicate, *operands)` gives a tuple of tensors.

    Whatever the branches compute with, parameters too, is an operand; so copies of the graph share them.
    """

    true_branch: torch.fx.GraphModule
    false_branch: torch.fx.GraphModule

    __name__ = "cond"

    def __call__(self, predicate: torch.Tensor, *operands: Any) -> Any:
        return torch.ops.higher_order.cond(predicate, self.true_branch, self.false_branch, operands)

    def __repr__(self) -> str:
        return f"cond(\n{self.true_branch.code}\n{self.false_branch.code})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Conditional) and self._calls() == other._calls()

    def __hash__(self) -> int:
        return hash((self.true_branch.code, self.false_branch.code))

    def _calls(self) -> Any:
        branches = self.true_branch, self.false_branch
        return [(branch.code, [node.target for node in branch.graph.nodes]) for branch in branches]
