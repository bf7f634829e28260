"""The smallest part of a graph on which passes are wrong."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from fxopt.capture.runtime.input_guard import InputGuard
from fxopt.compare import compare
from fxopt.outputs import mapped
from fxopt.rewriting.transformation import Transformation
from fxopt.testing.culprit import made
from fxopt.testing.observations import Call, run_call
from fxopt.testing.oracle import RTOL_FLOAT64


def minified(
    graph: GraphModule,
    passes: Sequence[Transformation],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    rtol: float = RTOL_FLOAT64,
) -> tuple[GraphModule, list[Any]] | None:
    """Cut a graph down as long as passes are wrong on it, with `functorch.compile.minifier`.

    Nodes at the end are left out, and others become inputs. The layers are those of the graph.

    Args:
        graph: the graph before the passes, best in float64; it stays as it is.
        passes: the passes, such as `Culprit.steps`.
        args: positional inputs.
        kwargs: keyword inputs.
        rtol: how far a right output may be off, relative to the largest value of its tensor.

    Returns:
        The smallest graph and its inputs, which are what flowed there; None where the passes raise, or are right on these
        inputs.

    Raises:
        Exception: what the graph itself raises on these inputs.

    Example:
        >>> import torch
        >>> from fxopt import ReplaceActivation
        >>> layers = [torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 4), torch.nn.Tanh()]
        >>> graph = torch.fx.symbolic_trace(torch.nn.Sequential(*layers).double())
        >>> small, inputs = minified(graph, [ReplaceActivation()], [torch.randn(2, 4).double()])
        >>> [node.name for node in small.graph.nodes], len(inputs)
        (['_0', '_1', 'output'], 1)
    """
    from functorch.compile import minifier  # type: ignore[import-untyped]  # only here: it imports the compiler

    call = Call.given(args, kwargs)
    bound = inspect.signature(graph.forward).bind(*call.args, **call.kwargs)
    bound.apply_defaults()

    def wrong(part: GraphModule, values: Sequence[Any]) -> bool:
        call = Call(tuple(values), {})
        try:
            found = compare(run_call(part, call), run_call(made(part, passes), call), dtypes=False)
        except Exception:  # of a part that does not run, or has nothing to compare: not what is looked for
            return False
        return found.max_rel > rtol

    values = [mapped(value, Tensor.clone) for value in bound.arguments.values()]
    run_call(graph, Call(tuple(values), {}))
    if not wrong(graph, values):
        return None
    with contextlib.redirect_stderr(io.StringIO()):  # it tells each step
        small, inputs = minifier(_without_guard(graph), values, wrong, dump_state=lambda *_: None)
    return small, list(inputs)


def _without_guard(graph: GraphModule) -> GraphModule:
    """A copy of a graph whose inputs are not checked, so that those that nothing needs can go."""
    copied = copy.deepcopy(graph)
    for node in copied.graph.find_nodes(op="call_module"):
        if isinstance(copied.get_submodule(str(node.target)), InputGuard) and not node.users:
            copied.graph.erase_node(node)
    copied.recompile()
    return copied
