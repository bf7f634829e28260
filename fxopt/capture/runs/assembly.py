"""Builds the graph module from one run, or from several runs merged into one graph."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from fxopt.capture.data_dependence.branch_decisions import Body, BranchAtLine
from fxopt.capture.fakes.module_tree import copy_tree
from fxopt.capture.nodes.completion import check_names, complete_metadata
from fxopt.capture.runs.run_result import RunResult
from fxopt.capture.runtime.checks import check_no_write
from fxopt.capture.runtime.input_guard import InputGuard
from fxopt.capture.runtime.size_guards import SizeGuard
from fxopt.capture.runtime.traced_module import ASSIGNED, TracedModule
from fxopt.objects import qualified_name


def assemble(run: RunResult, alternatives: list[list[SizeGuard]]) -> TracedModule:
    """Build the graph module of a run; its inputs must satisfy one of the sets of guards in `alternatives`."""
    checks = [*run.checks, *_write_checks(run)]
    check_names(run.graph)
    model = run.request.model
    root = torch.nn.Module()
    copy_tree(model, root, run.request.layers)
    for name, tensor in run.constants.items():
        root.register_buffer(name, tensor, persistent=False)
    placeholders = [node for node in run.graph.nodes if node.op == "placeholder"]
    guard_name = "input_guard"
    while hasattr(root, guard_name):
        guard_name = f"_{guard_name}"
    root.add_module(guard_name, InputGuard(run.placeholders.final(run.reads), alternatives, checks))
    root.get_submodule(guard_name).training = root.training
    if placeholders:
        with run.graph.inserting_after(placeholders[-1]):
            named = {str(node.target).lstrip("*"): node for node in placeholders}
            guard = run.graph.call_module(guard_name, (), named)
        # Earlier nodes read the device of an input, which may not be a tensor: they run after the guard.
        early = itertools.takewhile(lambda node: node is not guard, run.graph.nodes)
        for node in [node for node in early if node.op != "placeholder"][::-1]:
            guard.append(node)
    complete_metadata(run.graph, qualified_name(type(model)))
    traced = TracedModule(root, run.graph, type(model).__name__)
    traced.config = getattr(model, "config", None)
    traced.meta["forward_runs"] = run.request.running.runs
    traced.meta[ASSIGNED] = run.assigned
    _keep_reads(traced, run)
    return traced


def _keep_reads(traced: TracedModule, run: RunResult) -> None:
    """Store in the module what Python read of dtypes, modes and gradients."""
    reads = run.reads
    traced.dtypes_read_at = reads.dtypes_read_at
    read = [parameter for parameter in traced.parameters() if parameter.dtype in reads.dtypes_read_at]
    if read:
        smallest = min(read, key=torch.numel)  # the graph module keeps it alive
        traced.read_parameter = smallest, smallest.dtype
    traced.modes_read = reads.modes_read
    if "gradients" in reads.read_at:
        named = traced.named_parameters(remove_duplicate=False)
        flags = {name: parameter.requires_grad for name, parameter in named}
        traced.gradients_read = reads.read_at["gradients"], flags


def _write_checks(run: RunResult) -> list[str]:
    """Write the checks of the branches that the script decides by line; return one text for each."""
    written: list[str] = []
    for line, branches in run.branches.items():
        if line in run.left_out:
            written += _check_left_out(branches, run.left_out[line])
        else:
            written += _check_alike(branches)
    return written


def _check_alike(branches: Sequence[BranchAtLine]) -> Iterator[str]:
    """Check that all branches at a line have the same outcome: compare each branch with the one before it."""
    for one, next_one in itertools.pairwise(branches):
        next_one.node.update_arg(1, one.node)
        yield f"the forward decides all questions alike: {next_one.where}"
    if len(branches) == 1:
        branches[0].node.graph.erase_node(branches[0].node)


def _check_left_out(branches: Sequence[BranchAtLine], bodies: Sequence[Body]) -> Iterator[str]:
    """Check that the body after each branch writes nothing if the outcome differs from that of the capture."""
    for branch, body in reversed(list(zip(branches, bodies, strict=True))):
        for node, index in body:
            with node.graph.inserting_before(node):
                arguments = (branch.node, branch.answer, index, branch.where)
                node.graph.call_function(check_no_write, arguments).meta = dict(branch.node.meta)
            yield f"what it leaves out would write nothing: {branch.where}"
        if not branch.node.users:
            branch.node.graph.erase_node(branch.node)
