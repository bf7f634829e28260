"""The result of one run of the forward; whoever compares or combines runs takes these and no more."""

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
    """A graph without the guard of its inputs, and all that the run assumed, read and left."""

    request: Request  # what the run was made for
    graph: torch.fx.Graph
    # The tensors of `get_attr` nodes that the model does not have, by name.
    constants: Mapping[str, torch.Tensor]
    made_by: Callable[[torch.Tensor], torch.fx.Node | None]  # the node that made a fake tensor
    is_constant: Callable[[torch.Tensor], bool]  # it is made of numbers of the forward alone
    placeholders: Placeholders
    free: DynamicDimensions  # the dimensions of inputs that are free
    shape_env: CaptureShapeEnv  # what it assumed of sizes
    sizes: SizeNodes
    reads: PropertyReads  # what Python read besides sizes and values
    checks: Sequence[str]  # the branches that the graph checks, one line each
    branches: Mapping[str, Sequence[BranchAtLine]]  # by line, the branches that were decided alike
    drawn: int  # how often random numbers were drawn
    state: Changes  # the state of the model afterwards
    changes: Changes  # what it has changed of that
    own: Mapping[
        int, Any
    ]  # the real tensors behind fakes in it that no call has made, and modules' names, by identity
    hooks: Mapping[str, Any]  # the hooks of each module
    variables: Mapping[contextvars.ContextVar[Any], Any]  # the context variables that it has set
    written: Written  # the tensors of the user that it writes
    # The real tensors behind fakes that stand for others than parameters and buffers, by identity.
    originals: Mapping[int, torch.Tensor]
    unchanged: Set[str]  # the names of the parameters and buffers that it does not write
    # What it changed outside of the model, in words, and whether it put a tensor there.
    changed_outside: Mapping[str, bool]
    moved: Set[str]  # numbers in inputs and tensors that were taken for constants, though it changes them
    # Attributes, by module and name, whose values are a tuple beside the method's result.
    assigned: Sequence[tuple[str, str]]
    # By line, what is done after each branch there, and may be left out.
    left_out: Mapping[str, Sequence[Body]] = dataclasses.field(default_factory=dict)
    # Later calls read what the forward keeps of sizes and constants, as was tried at several sizes.
    keeps_tables: bool = False

    def relied_on(self) -> list[Condition]:
        """The conditions on sizes under which the forward makes the calls that it has made."""
        conditions = self.free.assumed()
        if "layout" in self.reads.read_at:
            # Strides differ at sizes of 1, and asking for them leaves no guard.
            sizes = [symbol for symbol, free in self.free.roots() if free.dim is not None]
            conditions += [(sympy.Ne(symbol, 1), self.reads.read_at["layout"]) for symbol in sizes]
        return conditions

    def guards(self) -> list[SizeGuard]:
        """The guards that these conditions are."""
        return guards_of(self.relied_on(), self.shape_env.replace)

    def guards_asked(self) -> list[SizeGuard]:
        """The guards that `dynamic_shapes` states."""
        return guards_of(self.free.asked(), self.shape_env.replace)

    def hints(self) -> dict[str, int]:
        """The size in the example for each symbol that is free."""
        return {str(symbol): int(free.hint) for symbol, free in self.free.roots()}


class UnprovedError(TraceError):
    """It could not be shown that a branch makes no difference."""
