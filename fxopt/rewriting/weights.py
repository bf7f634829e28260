"""Descriptions of the modules, parameters and buffers that a pass left, and the copies from which undo restores."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxopt.errors import UndoError
from fxopt.operators import hooks_of
from fxopt.submodules import digest, tensors_of, with_values, without_tensors
from fxopt.torch_internals import REGISTRIES, modules_of

PROVENANCE = "fxopt_rewritten_by"
"""The attribute of a rewritten module that holds the signatures of the passes that made it."""


_PLAIN = (bool, int, float, str, tuple, type(None), torch.dtype)
"""The types of attributes of modules that are compared as options."""


_NO_OPTIONS = ("training", PROVENANCE)


def options_of(module: nn.Module) -> str:
    """The options of a module as a text, without its training flag."""
    options = ((name, value) for name, value in vars(module).items() if isinstance(value, _PLAIN))
    return " ".join(f"{n}={v!r}" for n, v in options if n[0] != "_" and n not in _NO_OPTIONS)


def provenance(value: object) -> tuple[str, ...]:
    """The signatures of the passes that made a module."""
    found: tuple[str, ...] = getattr(value, "__dict__", {}).get(PROVENANCE, ())
    return found


@dataclasses.dataclass(frozen=True)
class Left:
    """A description of a module, parameter or buffer that a pass left, without values.

    Attributes:
        kind: the type.
        made_by: the provenance.
        tensors: shape, dtype, device and `requires_grad` of each tensor, by name.
        training: the training flag of a module.
        options: the other options of a module, and the kinds of its hooks, as a text.
    """

    kind: type
    made_by: tuple[str, ...]
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype, torch.device, bool]]
    training: bool
    options: str

    @classmethod
    def of(cls, value: Any) -> Left:
        """Describe a module or tensor."""
        facts = {n: (tuple(t.shape), t.dtype, t.device, t.requires_grad) for n, t in tensors_of({"": value})}
        options = f"{options_of(value)} {hooks_of(value)}" if isinstance(value, nn.Module) else ""
        return cls(type(value), provenance(value), facts, getattr(value, "training", False), options)

    def fits(self, value: Any) -> bool:
        """Tell whether `value` may be the described module or tensor; values, dtype and flags may have changed since."""
        mine, others = (
            (left.kind, left.made_by, left.options, {n: facts[0] for n, facts in left.tensors.items()})
            for left in (self, Left.of(value))
        )
        return mine == others

    def follow(self, restored: Any, now: Any) -> Any:
        """Apply to `restored` the changes of dtype, device and `requires_grad` that `now` has had since this description."""
        before, after = ([facts[1:] for facts in s.tensors.values()] for s in (self, Left.of(now)))
        if before != after:
            if before[0][:2] != after[0][:2] and (
                before[0][0].is_floating_point or before[0][1] != after[0][1]
            ):
                restored = restored.to(after[0][1], after[0][0])
            if [facts[2] for facts in before] != [facts[2] for facts in after]:
                flags = {name: facts[3] for name, facts in Left.of(now).tensors.items()}
                for name, tensor in tensors_of({"": restored}):
                    if isinstance(tensor, nn.Parameter):
                        tensor.requires_grad_(flags.get(name, any(flags.values())))
        return restored


Restore = Callable[[Mapping[str, Any], Mapping[str, Left]], Mapping[str, Any]]
"""Computes the value at each path before a pass from the present values, and descriptions of those that the pass left."""


@dataclasses.dataclass(frozen=True)
class Keep:
    """Puts copies back, and raises UndoError if the weights that replaced them have changed.

    Attributes:
        copies: a copy of the earlier value at each path.
        values: a digest of the tensors that replaced them.
    """

    copies: Mapping[str, Any]
    values: str

    @classmethod
    def of(cls, before: Mapping[str, Any], after: Mapping[str, Any]) -> Keep:
        """Copy the values that a pass replaces; shared modules and tensors stay shared."""
        return cls(copied({p: value for p, value in before.items() if value is not None}), digest(after))

    def __call__(self, now: Mapping[str, Any], left: Mapping[str, Left]) -> Mapping[str, Any]:
        if digest(now) != self.values:
            raise UndoError(
                f"the weights of {', '.join(now)} have changed since (by training, load_state_dict or a change of "
                "dtype), and undoing would lose that. Put the weights back, or keep the rewritten model"
            )
        restored = copied(self.copies)
        first = next(iter(now), None)  # None if nothing replaced them: the copies keep dtype and device
        like = {path: path if path in now else first for path in restored}
        return {p: v if (at := like[p]) is None else left[at].follow(v, now[at]) for p, v in restored.items()}


def copied(values: Mapping[str, Any], tensors: Mapping[int, Tensor] | None = None) -> dict[str, Any]:
    """Copy modules and tensors; shared ones stay shared.

    Args:
        values: modules, parameters and buffers by qualified name.
        tensors: the new tensors, by the id of the tensor that each replaces; by default, copies without gradients.
    """
    memo: dict[int, Any] = dict(tensors or {})
    if tensors is None:
        memo = {id(t): with_values(t, t.detach().clone()) for _, t in tensors_of(values)}
    return {path: _copy(value, memo) for path, value in values.items()}


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    of_torch = type(value).__module__.startswith("torch.nn.modules.")
    if id(value) in memo or not isinstance(value, nn.Module) or modules_of(value) or not of_torch:
        return copy.deepcopy(value, memo)
    shell = memo[id(value)] = without_tensors(
        value
    )  # deepcopy is slow, and fails for weights that `weight_norm` has computed
    for registry in REGISTRIES[:2]:
        tensors = getattr(value, registry)
        shell.__dict__[registry] = {n: None if t is None else memo[id(t)] for n, t in tensors.items()}
    return shell
