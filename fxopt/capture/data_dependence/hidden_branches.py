"""Decisions on values in code that runs out of sight: a layer, and an `autograd.Function`, is one node whatever it decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch.utils._pytree import tree_flatten

from fxopt.capture.data_dependence.operator_checks import is_model_error
from fxopt.errors import TraceError
from fxopt.memory import storage_of
from fxopt.objects import tensors_in

# One call asks this much, and is made as often as there are outcomes.
_MOST_QUESTIONS = 8


def whatever_it_decides(
    shape_env: Any, where: str, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """The result of a call on fakes, made once for each outcome of its decisions on values; `where` names what is called.

    Raises:
        TraceError: the results differ in more than values. The decision stays open where there are too many.
    """
    outer, script, found = shape_env.decide, list[bool](), list[tuple[Any, Any, Any]]()
    answers: dict[Any, bool] = {}
    storages = {storage_of(tensor): place for place, tensor in enumerate(tensors_in((args, kwargs)))}

    def decide(expression: Any) -> Any:
        known = outer(expression)
        if known is not None or isinstance(expression, sympy.Expr):
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
            try:
                result = function(*args, **kwargs)
            except Exception as error:
                if not (script and is_model_error(error)):
                    raise
                failure = error
            else:
                if not script:
                    return result
                found.append(_described(result, storages))
            while script and script[-1]:
                script.pop()
            if not script:
                break
            script[-1] = True
    finally:
        shape_env.decide = outer
    if not found:
        raise failure
    # The one whose outputs share memory with inputs wherever those of any outcome do.
    most = max(found, key=lambda each: len(each[2]))
    if any(known != most[1] or not shared <= most[2] for _, known, shared in found):
        raise TraceError(
            f"{where} decides on a value, and its outputs differ in more than values: in a shape, strides, a dtype, or the input "
            "with which they share memory."
        )
    for tensor in tensors_in(most[0]):
        tensor.constant = None  # type: ignore[attr-defined]  # which is that of one outcome
    return most[0]


def _described(result: Any, storages: dict[int, int]) -> tuple[Any, Any, set[tuple[int, int]]]:
    """A result, what a graph knows of it but for values, and which of its tensors share memory with which inputs."""
    leaves, structure = tree_flatten(result)
    known, shared = [str(structure)], set()
    for place, leaf in enumerate(leaves):
        known.append(f"{type(leaf)} {leaf}")
        if isinstance(leaf, torch.Tensor):
            known[-1] = f"{leaf.shape} {leaf.stride()} {leaf.dtype} {leaf.device} {leaf.requires_grad}"
            if storage_of(leaf) in storages:
                shared.add((place, storages[storage_of(leaf)]))
    return result, known, shared
