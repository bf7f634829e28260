"""Errors of operators that a CPU reports as exceptions, while a GPU loses its context."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from fxopt.compare import rounds
from fxopt.torch_internals import TorchDispatchMode, pytree


def errors_of_the_host() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which operators on an accelerator raise the errors that they raise on the CPU."""
    return HostFirst() if torch.accelerator.is_available() else contextlib.nullcontext()


class HostFirst(TorchDispatchMode):  # type: ignore[misc]
    """While this mode is active, operators that read integers, draw random numbers or assert run on the CPU first.

    An index out of range, or a probability above 1, is an exception on the CPU. On a GPU it makes the device unusable
    for the rest of the process. An operator without a CPU kernel runs on its device only.
    """

    supports_higher_order_operators = True

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(tensor.device.type not in ("cpu", "meta") for tensor in given) and _may_end(operator, given):
            there_args, there_kwargs = pytree.tree_map(_on_the_host, (args, kwargs))
            try:
                operator(*there_args, **there_kwargs)
            except RuntimeError as error:
                if "not implemented" not in str(error) and not isinstance(error, NotImplementedError):
                    raise
        return operator(*args, **kwargs)


def _may_end(operator: Any, given: list[Tensor]) -> bool:
    if getattr(operator, "namespace", "") != "aten" or operator.is_view:
        return False
    return (
        torch.Tag.nondeterministic_seeded in operator.tags
        or operator.__name__.startswith(("_assert", "binary_cross_entropy."))
        or not all(map(rounds, given))
    )


def _on_the_host(leaf: Any) -> Any:
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    # A copy, because an operator may write into it.
    return leaf.to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf
