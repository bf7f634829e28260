"""The passes that were applied to a graph module, in order, and undoing them."""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Iterator

from torch.fx import GraphModule

from fxopt.errors import PassError, UndoError
from fxopt.rewriting import undoing
from fxopt.rewriting.composition import LintAndRecompile, leaves
from fxopt.rewriting.record import Step, steps_of
from fxopt.rewriting.transformation import Transformation, finished
from fxopt.submodules import original


class History(tuple[Step, ...]):
    """The steps of a graph module that were not undone, oldest first: a tuple whose `str()` is a table."""

    __slots__ = ()

    def __str__(self) -> str:
        width = max((len(step.name) for step in self), default=0)
        lines = [
            f"  {number}  {step.name:{width}}  {step.nodes} nodes{'' if step.reversible else ', cannot be undone'}"
            for number, step in enumerate(self, start=1)
        ]
        return "\n".join([f"{len(self)} applied", *lines])

    __repr__ = __str__


def history(graph_module: GraphModule) -> History:
    """List the steps that were applied to a graph module and not undone since, oldest first.

    A composition is listed as its parts; a transformation that calls others is listed as one step. Transformations that
    changed nothing are not listed, nor are `DeepCopy` and `LintAndRecompile`. Each step has `name`, `signature`,
    `nodes` (the number of nodes marked as transformed) and `reversible`. Like the marks, the history
    survives deepcopy, pickle, `torch.save` and `.to()`.

    Example:
        >>> import torch
        >>> from fxopt import FuseBiasInLinear, ReplaceActivation, compose, history
        >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.GELU())
        >>> traced = torch.fx.symbolic_trace(layers)
        >>> history(compose(FuseBiasInLinear(), ReplaceActivation())(traced))
        2 applied
          1  FuseBiasInLinear()                                    1 nodes
          2  ReplaceActivation(source='gelu', target='gelu_tanh')  1 nodes
    """
    return History(steps_of(graph_module))


def undo(graph_module: GraphModule, steps: int = 1) -> GraphModule:
    """Undo the last applications; the graph module changes in place.

    Args:
        graph_module: the transformed module; for a result of `fxopt.optimize`, `undo` returns its model.
        steps: the number of applications to undo, as `history` counts them: each part of a composition counts as
            one. Pass `len(history(graph_module))` to undo all.

    Returns:
        The module, or a copy if a hand-written `reverse` makes one.

    Raises:
        TypeError: `graph_module` is not a graph module.
        ValueError: `steps` is negative or not an integer.
        UndoError: fewer steps are recorded, a step is not reversible, or undoing a step would not be exact.
            The graph module stays unchanged.

    Example:
        >>> import torch
        >>> from fxopt import FuseBiasInLinear, undo
        >>> fused = FuseBiasInLinear()(torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 3))))
        >>> undo(fused).get_submodule("0")
        Linear(in_features=2, out_features=3, bias=True)
    """
    model: GraphModule = original(graph_module)
    if model is not graph_module:
        return model
    if not isinstance(graph_module, GraphModule):
        raise TypeError(
            f"undo takes a graph module, or what fxopt.optimize made of a model, not {type(graph_module).__name__}"
        )
    if not isinstance(steps, numbers.Integral) or steps < 0:
        raise ValueError(f"steps is {steps!r}; give the number of applications to undo")
    applied_steps = steps_of(graph_module)
    if steps > len(applied_steps):
        nothing = "" if applied_steps else "there is nothing to undo: "
        raise UndoError(
            f"{nothing}steps is {steps}, but {len(applied_steps)} are recorded: a pass that finds no site is not recorded, and delete_all_unused_submodules, "
            "copy.copy, retracing and GraphModule(module, graph) lose the record, which is a child module"
        )
    return finished(
        LintAndRecompile(),
        undoing.undo_steps(graph_module, applied_steps[len(applied_steps) - steps :]),
        True,
    )


@contextlib.contextmanager
def applied(graph_module: GraphModule, pipeline: Transformation) -> Iterator[GraphModule]:
    """Apply a transformation inside a `with` block, and undo it at the end of the block.

    Args:
        graph_module: the module to transform, in place.
        pipeline: a reversible transformation, or a composition of reversible ones.

    Yields:
        The graph module.

    Raises:
        UndoError: `pipeline` is not reversible, and nothing was changed; or the block applied or undid other
            transformations, so that `pipeline` can no longer be undone and stays applied.
        PassError: `pipeline` does not work in place.

    Example:
        >>> import torch
        >>> from fxopt import FuseBiasInLinear, applied
        >>> traced = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 3)))
        >>> with applied(traced, FuseBiasInLinear()):
        ...     print(traced.get_submodule("0"))
        Linear(in_features=3, out_features=3, bias=False)
        >>> print(traced.get_submodule("0"))
        Linear(in_features=2, out_features=3, bias=True)
    """
    plain = [part for part in leaves(pipeline) if not part.reversible]
    if plain:
        raise UndoError(
            f"{', '.join(map(repr, plain))} cannot be undone, so nothing was applied. Apply the pipeline to a "
            "copy.deepcopy of the graph module instead"
        )
    earlier = history(graph_module)
    result, roll_back = pipeline._applied(graph_module, False)
    if result is not graph_module:
        roll_back()
        graph_module.recompile()
        raise PassError(
            f"{pipeline!r} gives another graph module; what is applied for a while works in place"
        )
    own = history(finished(pipeline, (result, roll_back), True))[len(earlier) :]
    try:
        yield graph_module
    finally:
        now = history(graph_module)
        if own and now == (*earlier, *own):
            undo(graph_module, len(own))
        elif own and now != earlier:
            raise UndoError(
                f"{pipeline!r} cannot be undone, because the block applied or undid something else. "
                f"Reverse this in the block. The history is now: {now}"
            )
