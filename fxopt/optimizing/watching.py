"""The state of a model that its graphs have fixed, and whether it is that of now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxopt.testing.bits import bits_of
from fxopt.torch_internals import COMPILED, FORWARD_HOOKS, REGISTRIES, parameters_of, version_of

_PLACED = (Tensor, nn.Parameter)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTENTS = (*REGISTRIES, *FORWARD_HOOKS)


class State:
    """The modules, weights, buffers, hooks, flags, numbers and strings of a model, as they are when this is made.

    Other attributes are not seen (lists, objects but for `config`), and neither are writes into a tensor that leave its version and
    place as they were: through numpy, into `.data`, or by fused optimizers, unless `trained` is asked.

    Args:
        model: the module to watch.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        modules = list(model.modules())
        configs = {id(config): vars(config) for config in map(_config, modules) if config is not None}
        self._now = [*map(vars, modules), *configs.values()]
        self._before = [dict(attributes) for attributes in self._now]
        found = [vars(module)[name] for module in modules for name in _CONTENTS if name in vars(module)]
        self._filled, self._empty = [each for each in found if each], [each for each in found if not each]
        self._contents = [each.copy() for each in self._filled]
        self._assigned = dict[int, set[str]]()  # by the id of the attributes, what the forward assigns
        plain = (v for module in modules for v in vars(module).values() if isinstance(v, Tensor))
        tensors = [*self.parameters, *model.buffers(), *plain]
        self._tensors = [tensor for tensor in tensors if not tensor.is_inference()]
        self._versions = sum(map(version_of, self._tensors))
        # Those that have their memory by `.data = ...` get others. The old memory is held, so that no other has its address.
        self._placed = [t for t in self._tensors if type(t) in _PLACED and t.layout is torch.strided]
        self._memory = [t.detach() for t in self._placed]
        self._addresses = [*map(Tensor.data_ptr, self._placed)]
        self._sums: list[float] | None = None

    def is_gone(self) -> bool:
        """Tell whether a weight was written, or has other memory: this state does not come back."""
        return (
            sum(map(version_of, self._tensors)) != self._versions
            or [*map(Tensor.data_ptr, self._placed)] != self._addresses
        )

    def holds(self) -> bool:
        """Tell whether all is as it was; in a model as large as BERT-base, some 80 microseconds."""
        if self.is_gone() or any(self._empty) or not _equal(self._filled, self._contents):
            return False
        if _equal(self._now, self._before):  # fast, where all are the same objects
            return True
        pairs = zip(self._now, self._before, strict=True)
        if not all(_same(now, before, self._assigned.get(id(now), ())) for now, before in pairs):
            return False
        self._before = [dict(attributes) for attributes in self._now]
        return True

    def assigns(self, module: nn.Module, name: str) -> None:
        """Note that the forward assigns an attribute: another value of it is no change."""
        self._assigned.setdefault(id(vars(module)), set()).add(name)

    def mark(self) -> None:
        """Gradients are recorded: after that, `trained` tells whether weights have changed in a way that leaves their versions."""
        self._sums = self._sums or self._sums_now()

    def trained(self) -> bool:
        """Tell whether weights have changed since `mark`."""
        sums, self._sums = self._sums, None
        if sums is None or sums == self._sums_now():
            return False
        self._versions = -1  # it is gone
        return True

    def _sums_now(self) -> list[float]:
        """The sum of the bits of each tensor: a step of training may leave any single number as it is."""
        return [bits_of(t).sum().item() for t in self._placed if t.device.type != "meta"]


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


def _same(now: Mapping[str, Any], before: Mapping[str, Any], assigned: Any) -> bool:
    """Tell whether attributes are as they were, as far as they can matter to a graph."""
    for name in ({**before, **now}).keys() - {COMPILED, *assigned}:
        old, new = before.get(name), now.get(name)
        if old is new:
            continue
        if isinstance(new, _PLAIN) or isinstance(old, _PLAIN):
            if type(new) is not type(old) or new != old:
                return False
        elif isinstance(new, Tensor | nn.Module) or name in ("forward", "config", *_CONTENTS):
            return False
    return True


def _equal(now: Any, before: Any) -> bool:
    try:
        return bool(now == before)
    except (RuntimeError, ValueError):  # a tensor or an array is another one: compared by its elements
        return False
