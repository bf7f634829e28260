"""The targets of nodes that run one of two captured branches: `torch.cond`, and an `if` of Python on a value."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from fxopt.capture.capture_internals import cond
from fxopt.torch_internals import FakeTensor


@dataclasses.dataclass(frozen=True, eq=False)
class Conditional:
    """Runs one of two graphs, as `torch.cond` does: `target(predicate, *operands)` returns a tuple of tensors.

    All inputs of the branches, including parameters, are operands. So copies of the graph can share the branches.
    """

    true_branch: torch.fx.GraphModule
    false_branch: torch.fx.GraphModule

    __name__ = "cond"

    def __call__(self, predicate: torch.Tensor, *operands: Any) -> Any:
        return cond(predicate, self.true_branch, self.false_branch, operands)

    def __repr__(self) -> str:
        return f"cond(\n{self.true_branch.code}\n{self.false_branch.code})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Conditional) and self._calls() == other._calls()

    def __hash__(self) -> int:
        return hash((self.true_branch.code, self.false_branch.code))

    def _calls(self) -> Any:
        branches = self.true_branch, self.false_branch
        return [(branch.code, [node.target for node in branch.graph.nodes]) for branch in branches]


class IfElse(Conditional):
    """Runs one of two graphs, as `if` does: the other graph has no effect, and its operands have no gradients.

    Under torch.compile and on fake tensors, the call is a `torch.cond`, with the limits of that function.
    """

    def __call__(self, predicate: Any, *operands: Any) -> Any:
        if torch.compiler.is_compiling() or isinstance(predicate, FakeTensor):
            return super().__call__(predicate, *operands)
        if isinstance(predicate, torch.Tensor) and predicate.is_meta:
            return self.true_branch(*operands)  # nothing is computed
        return (self.true_branch if predicate else self.false_branch)(*operands)
