"""The state of a model that its graphs have fixed, and whether it has changed since they were made."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxopt.testing.bits import bits_of
from fxopt.torch_internals import COMPILED, parameters_of, version_of

_PLACED = (Tensor, nn.Parameter)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_ADDRESS = operator.methodcaller("data_ptr")


class Watched:
    """The modules, weights, buffers, hooks, flags and options of a model, as they are when this is made.

    Not seen are changes of other attributes (lists, objects but for `config`), and of tensors in ways that leave their
    version and place as they were: writes into `.data` or through numpy, and steps of fused optimizers, unless `trained` is
    asked.

    Args:
        model: the module to watch.
    """

    def __init__(self, model: nn.Module) -> None:
        self._seen = [(vars(module), _copied(vars(module))) for module in model.modules()]
        self._configs = [
            (vars(config), dict(vars(config)))
            for config in {id(c): c for c in map(_config, model.modules()) if c is not None}.values()
        ]
        plain = (v for attributes, _ in self._seen for v in attributes.values() if isinstance(v, Tensor))
        tensors = [*model.parameters(), *model.buffers(), *plain]
        self._tensors = [tensor for tensor in tensors if not tensor.is_inference()]
        self._versions = self._sum_of_versions()
        self._place = self._place_now()
        # Those that have their memory by `.data = ...` get others. The old memory is held, so that no other has its address.
        self._placed = [t for t in self._tensors if type(t) in _PLACED and t.layout is torch.strided]
        self._memory = [t.detach() for t in self._placed]
        self._addresses = [*map(_ADDRESS, self._placed)]
        self._sums = self._sums_now()

    def changed(self) -> bool:
        """Tell whether something is not as it was."""
        if self._sum_of_versions() != self._versions:
            return True
        if self._place_now() != self._place or [*map(_ADDRESS, self._placed)] != self._addresses:
            return True
        if any(not _equal(now, before) for now, before in self._configs):
            return True
        return any(not _same(now, before) for now, before in self._seen)

    def trained(self) -> bool:
        """Tell whether weights have changed in a way that leaves their versions as they were; slower than `changed`."""
        return self._sums_now() != self._sums

    def _sums_now(self) -> list[float]:
        """The sum of the bits of each tensor: a step of training may leave any single number as it is."""
        return [bits_of(t).sum().item() for t in self._placed if t.device.type != "meta"]

    def _place_now(self) -> list[object]:
        """The dtype and device of the first tensor, which go with those of all others."""
        return [(tensor.dtype, tensor.device) for tensor in self._tensors[:1]]

    def _sum_of_versions(self) -> int:
        return sum(map(version_of, self._tensors))


def swapped(model: nn.Module) -> bool:
    """Tell whether parameters are other tensors for the time being, as in `torch.func.functional_call`."""
    for module in model.modules():
        for parameter in parameters_of(module).values():
            if parameter is not None and not isinstance(parameter, nn.Parameter):
                return True
    return False


def _config(module: nn.Module) -> Any:
    config = vars(module).get("config")
    return config if hasattr(config, "__dict__") else None


def _copied(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes, with the registries of a module as they are now."""
    copied = {n: v.copy() for n, v in attributes.items() if n[0] == "_" and isinstance(v, dict)}
    return {**attributes, **copied}


def _same(now: Mapping[str, Any], before: dict[str, Any]) -> bool:
    """Tell whether the attributes of a module are as they were, as far as they can matter to its graph."""
    if _equal(now, before):  # fast, where everything is the same object
        return True
    for name in {**before, **now}:
        old, new = before.get(name), now.get(name)
        if old is new or name in (COMPILED,):
            continue
        if name.startswith("_") and isinstance(new, dict) and isinstance(old, dict):
            if [*map(id, old.values())] != [*map(id, new.values())] or [*old] != [*new]:
                return False
        elif isinstance(new, _PLAIN) or isinstance(old, _PLAIN):
            if type(new) is not type(old) or new != old:
                return False
        elif isinstance(new, Tensor | nn.Module) or name in ("forward", "config"):
            return False
    return True


def _equal(now: Mapping[str, Any], before: dict[str, Any]) -> bool:
    try:
        return bool(now == before)
    except (RuntimeError, ValueError):  # a tensor or an array is another one: compared by its elements
        return False
