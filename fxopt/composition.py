"""Transformations that consist of others, and the two that change nothing: a copy, and generating the code."""

from __future__ import annotations

import copy
import dataclasses

from torch.fx import GraphModule, Node

from fxopt.record import MARKS
from fxopt.transformation import ReversibleTransformation, Transformation, check_and_compile


def compose(*args: Transformation, inplace: bool = True) -> Composition:
    """Chain transformations into one; the graph is linted and recompiled once, at the end.

    The composition preserves the computation if all its parts do. It is reversible if all are, and is undone
    in reverse order.

    Args:
        args: the transformations, in the order in which they are applied; compositions may be nested.
        inplace: `False` transforms a deep copy and leaves the given module as it is.

    Returns:
        The composition; a `ReversibleTransformation` if all parts are.

    Raises:
        TypeError: an argument is not a `Transformation` instance.

    Example:
        >>> import torch
        >>> from fxopt import FuseBiasInLinear, MergeLinears, compose
        >>> passes = compose(MergeLinears(), FuseBiasInLinear(), inplace=False)
        >>> passes.preserves_computation
        True
        >>> traced = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 3)))
        >>> passes(traced).get_submodule("0")
        Linear(in_features=3, out_features=3, bias=False)
        >>> traced.get_submodule("0")
        Linear(in_features=2, out_features=3, bias=True)
    """
    for argument in args:
        if not isinstance(argument, Transformation):
            hint = f"; write {argument.__name__}()" if isinstance(argument, type) else ""
            raise TypeError(f"compose takes Transformation instances, got {argument!r}{hint}")
    if all(part.reversible for part in args):
        return ReversibleComposition(args, inplace)
    return Composition(args, inplace)


@dataclasses.dataclass(frozen=True, repr=False)
class Composition(Transformation):
    """Transformations applied one after the other: what `compose` returns."""

    parts: tuple[Transformation, ...]
    inplace: bool = True

    _listed = False

    def __post_init__(self) -> None:
        preserves = all(part.preserves_computation for part in self.parts)
        object.__setattr__(self, "preserves_computation", preserves)

    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Apply the parts in order."""
        if not self.inplace:
            graph_module = copy.deepcopy(graph_module)
        for number, part in enumerate(self.parts):
            try:
                graph_module = _left_whole(graph_module, part(graph_module, lint_and_recompile=False))
            except Exception as error:
                error.add_note(f"applied before it: {', '.join(map(repr, self.parts[:number])) or 'nothing'}")
                raise
        return graph_module

    def transformed(self, node: Node) -> bool:
        """Whether any part transformed `node`."""
        return super().transformed(node) or any(part.transformed(node) for part in self.parts)

    def __repr__(self) -> str:
        return f"compose({''.join(f'{part!r}, ' for part in self.parts)}inplace={self.inplace})"


@dataclasses.dataclass(frozen=True, repr=False)
class ReversibleComposition(Composition, ReversibleTransformation):
    """A composition whose parts can all be undone."""

    def mark_as_restored(self, node: Node) -> None:
        """Take the marks of the composition and of its parts off `node`."""
        if self.signature in node.meta.get(MARKS, ()) or not self.transformed(node):
            super().mark_as_restored(node)
        for part in self.parts:
            assert isinstance(part, ReversibleTransformation)
            if part.transformed(node):
                part.mark_as_restored(node)

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        """Undo the parts, the last one first."""
        if not self.inplace:
            graph_module = copy.deepcopy(graph_module)
        for part in reversed(self.parts):
            assert isinstance(part, ReversibleTransformation)
            result = part(graph_module, lint_and_recompile=False, reverse=True)
            graph_module = _left_whole(graph_module, result)
        return graph_module


@dataclasses.dataclass(frozen=True)
class DeepCopy(ReversibleTransformation):
    """Copies the graph module, so that what follows leaves the given one as it is.

    Example:
        >>> import torch
        >>> traced = torch.fx.symbolic_trace(torch.nn.Linear(2, 2))
        >>> DeepCopy()(traced) is traced
        False
    """

    preserves_computation = True
    _listed = False

    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Return a deep copy of `graph_module`, with its marks and undo data."""
        return copy.deepcopy(graph_module)

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        """Return a deep copy as well."""
        return copy.deepcopy(graph_module)


@dataclasses.dataclass(frozen=True)
class LintAndRecompile(ReversibleTransformation):
    """Checks the graph and generates its code again.

    Example:
        >>> import torch
        >>> traced = torch.fx.symbolic_trace(torch.nn.Linear(2, 2))
        >>> LintAndRecompile()(traced, lint_and_recompile=False) is traced
        True
    """

    preserves_computation = True
    _listed = False

    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Lint and recompile `graph_module`."""
        check_and_compile(self, graph_module)
        return graph_module

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        """Lint and recompile `graph_module` as well."""
        return self.transform(graph_module)


def _left_whole(graph_module: GraphModule, result: GraphModule) -> GraphModule:
    """`result`; where it is another module, what was applied to the old one has to show in its code."""
    if result is not graph_module:
        graph_module.recompile()
    return result
