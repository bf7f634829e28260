"""The contract of a transformation: a callable that rewrites a graph module, marks the nodes it touched, and can be undone."""

from __future__ import annotations

import abc
import dataclasses

from torch.fx import GraphModule, Node

from fxopt import graph
from fxopt.errors import PassError, VerificationWarning, warn
from fxopt.rewriting import undoing
from fxopt.rewriting.attempt import Applied, Attempt
from fxopt.rewriting.edits import as_data
from fxopt.rewriting.record import MARKS, find_record, mark, marked_nodes, unmark
from fxopt.rewriting.signature import stable_text
from fxopt.rewriting.verification import Verifier, Verify


class Transformation(abc.ABC):
    """A transformation of a `torch.fx.GraphModule`: write `transform`, then call the instance.

    Attributes:
        preserves_computation: whether the transformed graph computes the same outputs as the original.
        tolerance: for a pass that does not preserve the computation, the largest error of an output, relative to its norm;
            `verify` and `fxopt validate` check it.
        reversible: whether the transformation can be undone.

    Example:
        >>> import operator, torch
        >>> class ChangeMulToAdd(Transformation):
        ...     def transform(self, graph_module):
        ...         for node in graph_module.graph.find_nodes(op="call_function", target=operator.mul):
        ...             node.target = operator.add
        ...             self.mark_as_transformed(node)
        ...         return graph_module
        >>> transformed = ChangeMulToAdd()(torch.fx.symbolic_trace(lambda x: x * x))
        >>> transformed(torch.tensor(5.0))
        tensor(10.)
        >>> ChangeMulToAdd().get_transformed_nodes(transformed)
        [mul]
    """

    preserves_computation: bool = False
    tolerance: float | None = None
    reversible: bool = False

    @abc.abstractmethod
    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Rewrite `graph_module` and return the transformed module (the same object, or a new one)."""

    def ensures(self, graph_module: GraphModule) -> str | None:
        """Return the reason why a transformed module breaks a promise of this transformation; None if it keeps them all."""
        return None

    def __call__(
        self, graph_module: GraphModule, lint_and_recompile: bool = True, *, verify: Verify = False
    ) -> GraphModule:
        """Apply the transformation; an error rolls the graph module back.

        After an error, erased nodes come back as copies. Writes of torch operators into tensors are rolled back, writes through
        numpy are not.

        Args:
            graph_module: the module to transform.
            lint_and_recompile: check the graph and generate its code again. Pass `False` if another transformation
                follows and does this.
            verify: run each site on random inputs, before and after the rewrite. If the outputs differ by more than rounding,
                or by more than `tolerance`, roll the site back and warn. A pass with neither `preserves_computation` nor
                `tolerance` is not verified, which is also a warning. Shapes and dtypes come from the metadata of the nodes,
                or from example inputs of the graph module, passed here as a tuple.

        Returns:
            The transformed module.

        Raises:
            PassError: the transformation did not return a graph module, left an invalid graph, broke the promise of
                `ensures`, or changed its own signature. An error raised inside the transformation is raised again, with
                a note that names the transformation.
        """
        graph.check_graph_module(graph_module, f"{self!r} rewrites")
        return finished(self, self._applied(graph_module, verify), lint_and_recompile)

    @property
    def signature(self) -> str:
        """A text that identifies the transformation: its class and its options, the same in every process."""
        return f"{stable_text(type(self))}({self._options()})"

    def mark_as_transformed(self, node: Node) -> None:
        """Mark `node` as transformed by this transformation."""
        mark(node, self.signature)

    def transformed(self, node: Node) -> bool:
        """Tell whether `node` was transformed by this transformation."""
        if node.graph.owning_module is not None:
            find_record(node.graph.owning_module)  # restores marks that a pickle dropped
        return self.signature in node.meta.get(MARKS, ())

    def get_transformed_nodes(self, graph_module: GraphModule) -> list[Node]:
        """The nodes of `graph_module` that were transformed by this transformation, in graph order."""
        return marked_nodes(graph_module, self.signature)

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({self._options()})"

    def _options(self) -> str:
        fields = [f.name for f in dataclasses.fields(self)] if dataclasses.is_dataclass(self) else list[str]()
        # A composition derives `preserves_computation` from its parts.
        others = sorted(name for name in vars(self) if name not in (*fields, "preserves_computation"))
        return ", ".join(f"{name}={stable_text(getattr(self, name))}" for name in (*fields, *others))

    def _applied(self, graph_module: GraphModule, verify: Verify) -> Applied:
        """Apply a hand-written `transform`, and find its changes by comparing with a snapshot."""
        with Attempt(self, graph_module) as attempt, graph.suppressing_guards(graph_module):
            verifier = Verifier(self, graph_module, verify)
            with attempt.writes:
                result = self.transform(graph_module)
            attempt.check(result)
            edits, reason = attempt.snapshot.edits(result), None
            if attempt.written and verifier.verifies:
                names = ", ".join(attempt.written)
                verifier.unverified[""] = (
                    f"it writes into {names}: put a layer with new weights in the old one's place"
                )
            if result is not graph_module and verifier.verifies:
                verifier.unverified[""] = "it gives another graph module"
            elif edits:
                made = {node.name: node for node in result.graph.nodes}
                reason = verifier.difference(edits, attempt.snapshot, made)
            if reason:
                attempt.roll_back()
                warn(f"{self!r} was rolled back: {reason}", VerificationWarning)
                return graph_module, lambda: None
            verifier.report()
            attempt.note(result, [as_data(edit, keep=False) for edit in edits])
        return result, attempt.roll_back


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
        >>> swap = SwapMulAndAdd()
        >>> swap(swap(torch.fx.symbolic_trace(lambda x: x * x)), reverse=True)(torch.tensor(5.0))
        tensor(25.)
    """

    reversible = True

    @abc.abstractmethod
    def reverse(self, graph_module: GraphModule) -> GraphModule:
        """Undo all changes of the transformation in `graph_module`, and return the module."""

    def __call__(
        self,
        graph_module: GraphModule,
        lint_and_recompile: bool = True,
        reverse: bool = False,
        *,
        verify: Verify = False,
    ) -> GraphModule:
        """Apply the transformation, or undo all its applications if `reverse`.

        Raises:
            UndoError: the transformation cannot be undone exactly, or another transformation has to be undone first.
        """
        if not reverse:
            return super().__call__(graph_module, lint_and_recompile, verify=verify)
        graph.check_graph_module(graph_module, f"{self!r} rewrites")
        return finished(self, self._reversed(graph_module), lint_and_recompile)

    def mark_as_restored(self, node: Node) -> None:
        """Remove the mark of this transformation from `node`.

        Raises:
            ValueError: the node was not transformed by this transformation.
        """
        if not self.transformed(node):
            raise ValueError(f"node {node.name!r} was not transformed by {self!r}, so it cannot be restored")
        unmark(node, self.signature)

    def _reversed(self, graph_module: GraphModule) -> Applied:
        return undoing.reverse_by_hand(self, graph_module, undoing.own_steps(self, graph_module))


def finished(pass_: Transformation, applied: Applied, lint_and_recompile: bool) -> GraphModule:
    """Check and compile the result of a transformation; an invalid result is rolled back and raises a PassError."""
    result, roll_back = applied
    if lint_and_recompile:
        try:
            check_and_compile(pass_, result)
        except BaseException:
            roll_back()
            raise
    return result


def check_and_compile(pass_: Transformation, graph_module: GraphModule) -> None:
    """Lint the graph that a transformation left, and generate its code again; raise a PassError if the graph is invalid."""
    try:
        graph_module.graph.lint()
    except (RuntimeError, ValueError, AssertionError) as error:
        raise PassError(f"{pass_!r} left an invalid graph: {error}") from error
    graph_module.recompile()
