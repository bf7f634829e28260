"""The result of one run of the forward; whoever compares or combines runs takes these and no more."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import sympy
import torch

from fxopt.capture.data_dependence.branch_decisions import Body, BranchAtLine
from fxopt.capture.fakes.fake_model import Changes, Written
from fxopt.capture.fakes.shape_env import CaptureShapeEnv
from fxopt.capture.fakes.size_constraints import Condition, DynamicDimensions
from fxopt.capture.nodes.size_nodes import SizeNodes
from fxopt.capture.recording.placeholders import Placeholders
from fxopt.capture.recording.property_reads import PropertyReads
from fxopt.capture.recording.request import Request


@dataclasses.dataclass(frozen=True, eq=False)
class RunResult:
    """A graph without the guard of its inputs, and all that the run assumed, read and left.

    Attributes:
        request: what the run was made for.
        graph: the nodes that it wrote.
        constants: the tensors of `get_attr` nodes that the model does not have, by name.
        made_by: the node that made a fake tensor.
        placeholders: the inputs.
        free: their dimensions that are free.
        shape_env: what it assumed of sizes.
        sizes: the nodes of sizes.
        reads: what Python read besides sizes and values.
        checks: the branches that the graph checks, one line each.
        branches: by line, the branches that were decided alike.
        drawn: how often random numbers were drawn.
        changes: what it changed in the state of the model, `state` all of that state, `hooks` the hooks of each module.
        written: the tensors of the user that it writes.
        originals: the real tensors behind fakes that stand for others than parameters and buffers, by identity.
        unchanged_buffers: the names of those that it does not write.
        changed_outside: what it changed outside of the model, in words, and whether it put a tensor there.
        moved: numbers in inputs and tensors that were taken for constants, though it changes them.
        keeps_tables: whether later calls read what the forward keeps of sizes and constants, tried at several sizes.
        left_out: by line, what is done after each branch there, and may be left out.
    """

    request: Request
    graph: torch.fx.Graph
    constants: Mapping[str, torch.Tensor]
    made_by: Callable[[torch.Tensor], torch.fx.Node | None]
    placeholders: Placeholders
    free: DynamicDimensions
    shape_env: CaptureShapeEnv
    sizes: SizeNodes
    reads: PropertyReads
    checks: Sequence[str]
    branches: Mapping[str, Sequence[BranchAtLine]]
    drawn: int
    changes: Changes
    state: Changes
    hooks: Mapping[str, Any]
    written: Written
    originals: Mapping[int, torch.Tensor]
    unchanged_buffers: Set[str]
    changed_outside: Mapping[str, bool]
    moved: Set[str]
    left_out: Mapping[str, Sequence[Body]] = dataclasses.field(default_factory=dict)
    keeps_tables: bool = False

    def relied_on(self) -> list[Condition]:
        """The conditions on sizes under which the forward makes the calls that it has made."""
        conditions = self.free.assumed()
        if self.reads.layout_read_at is not None:
            # Strides differ at sizes of 1, and asking for them leaves no guard.
            sizes = [symbol for symbol, free in self.free.roots() if free.dim is not None]
            conditions += [(sympy.Ne(symbol, 1), self.reads.layout_read_at) for symbol in sizes]
        return conditions


@dataclasses.dataclass(frozen=True)
class Unproved:
    """Why it could not be shown that a branch makes no difference."""

    reason: str
