"""What a pass is: a callable that rewrites a graph module, marks the nodes it touched, and is kept in a history."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule, Node

from fxopt.errors import PassError, UndoError
from fxopt.record import (
    MARKS,
    PassRecord,
    Snapshot,
    Step,
    carry_record,
    class_name,
    find_record,
    make_record,
    restore_marks,
    stable_text,
    store_marks,
)


class Transformation(abc.ABC):
    """A transformation of a `torch.fx.GraphModule`: write `transform`, then call the instance.

    Attributes:
        preserves_computation: whether the transformed graph gives the same outputs as the original.
        reversible: whether it can be undone.

    Example:
        >>> import operator, torch
        >>> class ChangeMulToAdd(Transformation):
        ...     def transform(self, graph_module):
        ...         for node in graph_module.graph.nodes:
        ...             if node.op == "call_function" and node.target == operator.mul:
        ...                 node.target = operator.add
        ...                 self.mark_as_transformed(node)
        ...         return graph_module
        >>> class Square(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x * x
        >>> transformed = ChangeMulToAdd()(torch.fx.symbolic_trace(Square()))
        >>> transformed(torch.tensor(5.0))
        tensor(10.)
        >>> ChangeMulToAdd().get_transformed_nodes(transformed)
        [mul]
    """

    preserves_computation: bool = False
    reversible: bool = False

    _listed = True
    """Whether the history lists it: not a composition, whose parts are listed, nor what changes nothing."""

    @abc.abstractmethod
    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Rewrite `graph_module` and return the transformed module (the same object, or a new one)."""

    def __call__(self, graph_module: GraphModule, lint_and_recompile: bool = True) -> GraphModule:
        """Apply the transformation.

        On an error the graph module gets back the nodes (as copies), modules, their attributes, parameters and
        buffers that it had. What was written into a tensor stays written; a note on the error names these tensors.

        Args:
            graph_module: the module to transform.
            lint_and_recompile: check the graph and generate its code again; `False` when several
                transformations follow each other and the last one does it.

        Returns:
            The transformed module.

        Raises:
            PassError: the transformation returned no graph module, left an invalid graph, or changed its
                own signature. An error of the transformation itself is raised as it is, with a note that
                names the transformation.
        """
        return _run(self, self.transform, graph_module, lint_and_recompile, _note_applied)

    @property
    def signature(self) -> str:
        """What identifies the transformation: its class and its options, the same in every process."""
        return f"{class_name(type(self))}({_options(self)})"

    def mark_as_transformed(self, node: Node) -> None:
        """Mark `node` as transformed by this transformation."""
        marks = node.meta.get(MARKS, ())
        if self.signature not in marks:
            node.meta[MARKS] = (*marks, self.signature)  # a new tuple: copies of a node share the old one

    def transformed(self, node: Node) -> bool:
        """Whether `node` was transformed by this transformation."""
        if node.graph.owning_module is not None:
            restore_marks(node.graph.owning_module)
        return self.signature in node.meta.get(MARKS, ())

    def get_transformed_nodes(self, graph_module: GraphModule) -> list[Node]:
        """The nodes of `graph_module` that were transformed by this transformation, in graph order."""
        restore_marks(graph_module)
        return [node for node in graph_module.graph.nodes if self.transformed(node)]

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({_options(self)})"


class ReversibleTransformation(Transformation):
    """A transformation that can be undone: write `transform` and `reverse`.

    Example:
        >>> import operator, torch
        >>> class SwapMulAndAdd(ReversibleTransformation):
        ...     def transform(self, graph_module):
        ...         return self.change(graph_module, operator.mul, operator.add)
        ...     def reverse(self, graph_module):
        ...         return self.change(graph_module, operator.add, operator.mul)
        ...     def change(self, graph_module, before, after):
        ...         for node in graph_module.graph.find_nodes(op="call_function", target=before):
        ...             node.target = after
        ...         return graph_module
        >>> class Square(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x * x
        >>> swap = SwapMulAndAdd()
        >>> swapped = swap(torch.fx.symbolic_trace(Square()))
        >>> swap(swapped, reverse=True)(torch.tensor(5.0))
        tensor(25.)
    """

    reversible = True

    @abc.abstractmethod
    def reverse(self, graph_module: GraphModule) -> GraphModule:
        """Undo all that the transformation did to `graph_module`, and return the module."""

    def reverse_steps(self, graph_module: GraphModule, steps: Sequence[Step]) -> GraphModule:
        """Undo some applications of the transformation: by default only all of them, and the last ones.

        Args:
            graph_module: the module that it was applied to.
            steps: its applications to undo, as the history has them, oldest first.

        Returns:
            The restored module.

        Raises:
            UndoError: other transformations followed, or `steps` are not all of its applications: `reverse`
                tells neither apart.
        """
        own, later = steps_of(self, graph_module), _followers(self, graph_module)
        if later:
            raise UndoError(f"{self!r} cannot be undone yet. Undo {', then '.join(later)} first")
        if len(own) > len(steps):
            raise UndoError(
                f"{self!r} was applied {len(own)} times, and its reverse() undoes them together: undo as many"
            )
        return self.reverse(graph_module)

    def __call__(
        self, graph_module: GraphModule, lint_and_recompile: bool = True, reverse: bool = False
    ) -> GraphModule:
        """Apply the transformation, or undo it if `reverse`; else as `Transformation.__call__`.

        Raises:
            UndoError: it cannot be undone exactly, or another transformation has to be undone first.
        """
        if not reverse:
            return super().__call__(graph_module, lint_and_recompile)
        return undo_steps(self, graph_module, None, lint_and_recompile)

    def mark_as_restored(self, node: Node) -> None:
        """Take the mark of this transformation off `node`.

        Raises:
            ValueError: the node was not transformed by this transformation.
        """
        if not self.transformed(node):
            raise ValueError(f"node {node.name!r} was not transformed by {self!r}, so it cannot be restored")
        node.meta[MARKS] = tuple(mark for mark in node.meta[MARKS] if mark != self.signature)
        if not node.meta[MARKS]:
            del node.meta[MARKS]


def steps_of(pass_: Transformation, graph_module: GraphModule) -> list[Step]:
    """The applications of a transformation that were not undone, oldest first."""
    record = find_record(graph_module)
    return [step for step in record.steps if step.signature == pass_.signature] if record else []


def undo_steps(
    pass_: ReversibleTransformation,
    graph_module: GraphModule,
    steps: Sequence[Step] | None = None,
    lint_and_recompile: bool = True,
) -> GraphModule:
    """Undo some applications of a transformation, by default all, and take them off the history."""
    check_graph_module(pass_, graph_module)
    undone = steps_of(pass_, graph_module) if steps is None else list(steps)
    reverse = functools.partial(pass_.reverse_steps, steps=undone)
    return _run(pass_, reverse, graph_module, lint_and_recompile, functools.partial(_note_undone, undone))


def _followers(pass_: Transformation, graph_module: GraphModule) -> list[str]:
    """What was applied after a transformation, in the order in which to undo it."""
    record, own = find_record(graph_module), steps_of(pass_, graph_module)
    if record is None or not own:
        return []
    later = record.steps[record.steps.index(own[0]) :]
    return list(dict.fromkeys(step.name for step in reversed(later) if step.signature != pass_.signature))


def _note_applied(pass_: Transformation, before: Snapshot, result: GraphModule) -> None:
    """Add an application to the history, if it changed something."""
    carry_record(before.graph_module, result)
    record, known = find_record(result), {entry.site for entry in before.entries}
    sites = {entry.site for entry in record.entries} - known if record else set()
    if record is not None:
        record.steps = _standing(before, record)
    marked = len(pass_.get_transformed_nodes(result)) - before.marked(pass_.signature)
    if sites or marked > 0 or not before.is_like(result):
        name, reversible = repr(pass_), pass_.reversible
        step = Step(name, pass_.signature, max(marked, 0), reversible, frozenset(sites), pass_)
        make_record(result).steps.append(step)


def _note_undone(
    undone: Sequence[Step], pass_: Transformation, before: Snapshot, result: GraphModule
) -> None:
    """Take applications off the history; the reverse of what was never applied is a step of its own."""
    if any(step not in undone for step in before.steps):
        carry_record(before.graph_module, result)
    record = find_record(result)
    if record is not None:
        record.steps = [step for step in _standing(before, record) if step not in undone]
    if not undone and not before.is_like(result):
        make_record(result).steps.append(Step(f"{pass_!r}, reversed", pass_.signature, 0, False))


def _standing(before: Snapshot, record: PassRecord) -> list[Step]:
    """The steps of before that were not undone. What a transformation applied inside is a part of it."""
    left = Counter(before.steps)
    standing = []
    for step in record.steps:
        if left[step] > 0:
            left[step] -= 1
            standing.append(step)
    return standing


def check_graph_module(pass_: Transformation, graph_module: GraphModule) -> None:
    """Raise a TypeError that says what to do if `graph_module` is none, most likely a model."""
    if not isinstance(graph_module, GraphModule):
        raise TypeError(
            f"{pass_!r} rewrites a torch.fx.GraphModule, got {type(graph_module).__name__}: "
            "trace the model first, for example with fxopt.symbolic_trace"
        )


def _run(
    pass_: Transformation,
    function: Callable[[GraphModule], GraphModule],
    graph_module: GraphModule,
    lint_and_recompile: bool,
    note: Callable[[Transformation, Snapshot, GraphModule], None],
) -> GraphModule:
    check_graph_module(pass_, graph_module)
    method = "transform" if note is _note_applied else "reverse"
    before, signature = Snapshot(graph_module), pass_.signature
    try:
        result = function(graph_module)
        if not isinstance(result, GraphModule):
            raise PassError(
                f"{type(pass_).__name__}.{method} returned {type(result).__name__}; "
                "it has to return the graph module"
            )
        if pass_.signature != signature:
            raise PassError(
                f"{type(pass_).__name__}.{method} changed its own signature, by which its marks are "
                "found again; keep results out of its attributes, or write a property `signature`"
            )
        if pass_._listed:
            note(pass_, before, result)
        store_marks(result)
        if lint_and_recompile:
            check_and_compile(pass_, result)
    except BaseException as error:
        written = before.written()
        before.restore()
        error.add_note(f"raised by {pass_!r} in {method}()")
        if written:
            error.add_note(
                f"written into before, and not restored: {', '.join(written)}. A pass must put new tensors "
                "in the place of the old ones"
            )
        raise
    return result


def check_and_compile(pass_: Transformation, graph_module: GraphModule) -> None:
    """Lint the graph that a transformation left, and generate its code again; PassError if it is invalid."""
    try:
        graph_module.graph.lint()
    except (RuntimeError, ValueError, AssertionError) as error:
        raise PassError(f"{pass_!r} left an invalid graph: {error}") from error
    graph_module.recompile()


def _options(pass_: Transformation) -> str:
    options: dict[str, Any]
    if dataclasses.is_dataclass(pass_):
        options = {field.name: getattr(pass_, field.name) for field in dataclasses.fields(pass_)}
        others = {name for name in vars(pass_) if name not in options and name != "preserves_computation"}
    else:
        options = {}
        others = set(vars(pass_))
    options |= {name: vars(pass_)[name] for name in sorted(others)}
    return ", ".join(f"{name}={stable_text(value)}" for name, value in options.items())
