"""Decisions on values in code that is not recorded: a layer or an `autograd.Function` is one node for all outcomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch

from fxopt.capture.data_dependence.operator_checks import is_model_error
from fxopt.errors import TraceError
from fxopt.memory import storage_of, version_of
from fxopt.objects import tensors_in
from fxopt.torch_internals import pytree

# Each decision doubles the number of calls.
_MOST_QUESTIONS = 5


def result_for_all_outcomes(
    shape_env: Any, where: str, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Make a call on fakes once for each outcome of its decisions on values, and return a result; `where` names the callee.

    Raises:
        TraceError: if the results differ in more than values. If there are too many decisions, the last one stays open.
    """
    outer, script, found = shape_env.decide, list[bool](), list[tuple[Any, list[str]]]()
    answers: dict[Any, bool] = {}
    given = [*tensors_in((args, kwargs))]
    # For inference tensors, torch does not count writes.
    uncounted = torch.is_inference_mode_enabled() or any(tensor.is_inference() for tensor in given)

    def decide(expression: Any) -> Any:
        known = outer(expression)
        if known is not None or uncounted or isinstance(expression, sympy.Expr):
            return known
        if expression not in answers:
            turn = len(answers) // 2
            if turn == len(script):
                if len(script) == _MOST_QUESTIONS:
                    return None
                script.append(False)
            answers[expression] = script[turn]
            answers[sympy.Not(expression)] = not answers[expression]
        return sympy.sympify(answers[expression])

    shape_env.decide = decide
    try:
        while True:
            answers.clear()
            versions = [version_of(tensor) for tensor in given]
            try:
                result = function(*args, **kwargs)
            except Exception as error:
                if not (script and is_model_error(error)):
                    raise
                failure = error
            else:
                if not script:
                    return result
                if len(answers) // 2 < len(script):
                    raise TraceError(f"{where} decides on a value, and not in each of its calls.")
                found.append((result, _described(result, given, [version_of(t) for t in given] != versions)))
                if found[-1][1] != found[0][1]:
                    raise TraceError(
                        f"{where} decides on a value, and its outputs differ in more than values: in a shape, strides, a dtype, the "
                        "input whose memory they share, or whether it writes into an input."
                    )
            while script and script[-1]:
                script.pop()
            if not script:
                break
            script[-1] = True
    finally:
        shape_env.decide = outer
    if not found:
        raise failure
    for tensor in tensors_in(found[0][0]):
        tensor.constant = None  # type: ignore[attr-defined]  # it is the constant of one outcome
    return found[0][0]


def _described(result: Any, given: Sequence[torch.Tensor], writes: bool) -> list[str]:
    """Describe a result without its values: structure, layout, and whether inputs are returned, share memory or are written."""
    leaves, structure = pytree.tree_flatten(result)
    known = [f"{structure} {writes}"]
    for leaf in leaves:
        known.append(f"{type(leaf)} {leaf}")
        if isinstance(leaf, torch.Tensor):
            shared = [(leaf is each, storage_of(leaf) == storage_of(each)) for each in given]
            known[-1] = (
                f"{leaf.shape} {leaf.stride()} {leaf.dtype} {leaf.device} {leaf.requires_grad} {shared}"
            )
    return known
