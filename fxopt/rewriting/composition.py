"""Compositions of transformations, and two transformations that change no node: `DeepCopy` and `LintAndRecompile`."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator

from torch.fx import GraphModule, Node

from fxopt import submodules
from fxopt.rewriting import undoing
from fxopt.rewriting.attempt import Applied
from fxopt.rewriting.explanation import Explanation
from fxopt.rewriting.record import MARKS, orders_of, set_steps, steps_of
from fxopt.rewriting.rewrite import Rewrite
from fxopt.rewriting.transformation import ReversibleTransformation, Transformation, check_and_compile
from fxopt.rewriting.verification import Verify


def compose(*args: Transformation, inplace: bool = True) -> Composition:
    """Chain transformations into one; the graph is linted and recompiled once, at the end.

    The composition preserves the computation if all its parts do. It is reversible if all its parts are: `reverse=True`
    undoes only the steps that the composition applied, the last one first.

    Args:
        args: the transformations, in the order in which they are applied; compositions may be nested.
        inplace: `False` transforms a deep copy; the given module stays unchanged.

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
    """Transformations applied one after the other: the result of `compose`."""

    parts: tuple[Transformation, ...]
    inplace: bool = True

    def __post_init__(self) -> None:
        preserves = all(part.preserves_computation for part in self.parts)
        object.__setattr__(self, "preserves_computation", preserves)

    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Apply the parts in order."""
        return self._applied(graph_module, False)[0]

    def transformed(self, node: Node) -> bool:
        """Tell whether any part transformed `node`."""
        return super().transformed(node) or any(part.transformed(node) for part in self.parts)

    def get_transformed_nodes(self, graph_module: GraphModule) -> list[Node]:
        """The nodes that any part transformed, in graph order."""
        steps_of(graph_module)  # restores marks that a pickle dropped
        return [node for node in graph_module.graph.nodes if self.transformed(node)]

    def explain(self, graph_module: GraphModule, verify: Verify = False) -> tuple[Explanation, ...]:
        """List the sites and refusals of each part, after the parts before it; `graph_module` stays unchanged."""
        graph_module, found = submodules.sharing_copy(graph_module), list[Explanation]()
        for part in self.parts:
            if isinstance(part, Rewrite):
                found.append(part.explain(graph_module, verify))
            elif isinstance(part, Composition):
                found.extend(part.explain(graph_module, verify))
            graph_module = part(graph_module, verify=verify)
        return tuple(found)

    def __repr__(self) -> str:
        return f"compose({''.join(f'{part!r}, ' for part in self.parts)}inplace={self.inplace})"

    def _applied(self, graph_module: GraphModule, verify: Verify) -> Applied:
        result = graph_module if self.inplace else copy.deepcopy(graph_module)
        known, done = {step.key for step in steps_of(result)}, contextlib.ExitStack()
        for number, part in enumerate(self.parts):
            try:
                after, undo_part = part._applied(result, verify)
            except BaseException as error:
                done.close()
                result.recompile()
                error.add_note(f"applied before it: {', '.join(map(repr, self.parts[:number])) or 'nothing'}")
                raise
            done.callback(undo_part)
            if after is not result:
                result.recompile()  # the earlier parts changed the graph of this module
            result = after
        own = [
            s if s.key in known else dataclasses.replace(s, within=(*s.within, self.signature))
            for s in steps_of(result)
        ]
        set_steps(result, own, orders_of(result))
        return result, done.close


@dataclasses.dataclass(frozen=True, repr=False)
class ReversibleComposition(Composition, ReversibleTransformation):
    """A composition whose parts can all be undone."""

    def mark_as_restored(self, node: Node) -> None:
        """Remove the marks of the composition and of its parts from `node`."""
        if self.signature in node.meta.get(MARKS, ()) or not self.transformed(node):
            super().mark_as_restored(node)
        for part in self.parts:
            if isinstance(part, ReversibleTransformation) and part.transformed(node):
                part.mark_as_restored(node)

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        """Undo the steps that the composition applied, the last one first."""
        return self._reversed(graph_module)[0]

    def _reversed(self, graph_module: GraphModule) -> Applied:
        steps = steps_of(graph_module)
        own = [step for step in steps if self.signature in step.within]
        if not own:
            for part in leaves(self):
                if isinstance(part, Rewrite) and part.signature not in {step.signature for step in steps}:
                    undoing.check_no_trace(part, graph_module)
        copies = not self.inplace or any(isinstance(part, DeepCopy) for part in leaves(self))
        return undoing.undo_steps(copy.deepcopy(graph_module) if copies else graph_module, own)


def leaves(pass_: Transformation) -> Iterator[Transformation]:
    """Yield the parts of a composition, nested ones flattened; for any other transformation, the transformation itself."""
    if isinstance(pass_, Composition):
        for part in pass_.parts:
            yield from leaves(part)
    else:
        yield pass_


class _Unlisted(ReversibleTransformation):
    """A transformation that changes no node and is not listed in the history; its reverse applies it again."""

    preserves_computation = True

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        """Apply the transformation again."""
        return self.transform(graph_module)

    def _applied(self, graph_module: GraphModule, verify: Verify) -> Applied:
        return self.transform(graph_module), lambda: None

    def _reversed(self, graph_module: GraphModule) -> Applied:
        return self._applied(graph_module, False)


@dataclasses.dataclass(frozen=True)
class DeepCopy(_Unlisted):
    """Copies the graph module, so that later transformations leave the given one unchanged.

    Example:
        >>> import torch
        >>> traced = torch.fx.symbolic_trace(torch.nn.Linear(2, 2))
        >>> DeepCopy()(traced) is traced
        False
    """

    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Return a deep copy of `graph_module`, with its marks and undo data."""
        return copy.deepcopy(graph_module)


@dataclasses.dataclass(frozen=True)
class LintAndRecompile(_Unlisted):
    """Checks the graph and generates its code again.

    Example:
        >>> import torch
        >>> traced = torch.fx.symbolic_trace(torch.nn.Linear(2, 2))
        >>> LintAndRecompile()(traced, lint_and_recompile=False) is traced
        True
    """

    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Lint and recompile `graph_module`."""
        check_and_compile(self, graph_module)
        return graph_module
