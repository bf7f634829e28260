"""The result of one run of the forward, the only input of code that compares or combines runs."""

from __future__ import annotations

import contextvars
import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import sympy
import torch

from fxopt.capture.data_dependence.branch_decisions import Body, BranchAtLine
from fxopt.capture.fakes.fake_model import Written
from fxopt.capture.fakes.kept_state import Changes
from fxopt.capture.fakes.shape_env import CaptureShapeEnv
from fxopt.capture.fakes.size_constraints import Condition, DynamicDimensions, guards_of
from fxopt.capture.nodes.size_nodes import SizeNodes
from fxopt.capture.recording.placeholders import Placeholders
from fxopt.capture.recording.property_reads import PropertyReads
from fxopt.capture.recording.request import Request
from fxopt.capture.runtime.size_guards import SizeGuard
from fxopt.errors import TraceError


@dataclasses.dataclass(frozen=True, eq=False)
class RunResult:
    """A graph without its input guard, and everything that the run assumed, read and left."""

    request: Request  # what the run was made for
    graph: torch.fx.Graph
    # The tensors of `get_attr` nodes that the model does not have, by name.
    constants: Mapping[str, torch.Tensor]
    made_by: Callable[[torch.Tensor], torch.fx.Node | None]  # the node that made a fake tensor
    is_constant: Callable[[torch.Tensor], bool]  # whether a tensor is made only of numbers of the forward
    placeholders: Placeholders
    free: DynamicDimensions  # the dynamic dimensions of inputs
    shape_env: CaptureShapeEnv  # the assumptions about sizes
    sizes: SizeNodes
    reads: PropertyReads  # what Python read besides sizes and values
    checks: Sequence[str]  # the branches that the graph checks, one line each
    branches: Mapping[str, Sequence[BranchAtLine]]  # the branches that the script decides, by line
    drawn: int  # how often random numbers were drawn
    state: Changes  # the state of the model afterwards
    changes: Changes  # the part of this state that the run changed
    # By identity, the real tensors behind fakes in `state` that no call made, and the names of modules.
    own: Mapping[int, Any]
    hooks: Mapping[str, Any]  # the hooks of each module
    variables: Mapping[contextvars.ContextVar[Any], Any]  # the context variables that the forward set
    written: Written  # the user's tensors that the forward writes
    # By identity, the real tensors behind fakes that are not parameters or buffers.
    originals: Mapping[int, torch.Tensor]
    unchanged: Set[str]  # the names of the parameters and buffers that the forward does not write
    # Descriptions of changes outside of the model, and whether the forward put a tensor there.
    changed_outside: Mapping[str, bool]
    # Numbers in inputs and tensors that were assumed constant, although the forward changes them.
    moved: Set[str]
    # Attributes, by module and name, that a captured method assigns: it returns (result, tuple of their values).
    assigned: Sequence[tuple[str, str]]
    # By line, the writes after each branch there, which the model may skip.
    left_out: Mapping[str, Sequence[Body]] = dataclasses.field(default_factory=dict)
    # Later calls read state that the forward makes of sizes and constants; calls at several sizes proved it harmless.
    keeps_tables: bool = False

    def relied_on(self) -> list[Condition]:
        """Return the conditions on sizes under which the forward makes the recorded calls."""
        conditions = self.free.assumed()
        if "layout" in self.reads.read_at:
            # Strides differ at sizes of 1, and reading them adds no guard.
            sizes = [symbol for symbol, free in self.free.roots() if free.dim is not None]
            conditions += [(sympy.Ne(symbol, 1), self.reads.read_at["layout"]) for symbol in sizes]
        return conditions

    def guards(self) -> list[SizeGuard]:
        """Return the conditions of `relied_on` as guards."""
        return guards_of(self.relied_on(), self.shape_env.replace)

    def guards_asked(self) -> list[SizeGuard]:
        """Return the guards that `dynamic_shapes` states."""
        return guards_of(self.free.asked(), self.shape_env.replace)

    def hints(self) -> dict[str, int]:
        """Return the size in the example for each symbol."""
        return {str(symbol): int(free.hint) for symbol, free in self.free.roots()}


class UnprovedError(TraceError):
    """A branch could not be proved to make no difference."""
