"""The state of a model that its graphs have fixed, and whether it is that of now."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from fxopt.torch_internals import COMPILED, FORWARD_HOOKS, REGISTRIES, version_of

_PLACED = (Tensor, nn.Parameter)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTENTS = (*REGISTRIES, *FORWARD_HOOKS)


class State:
    """The modules, weights, buffers, hooks, flags, numbers and strings of a model, as they are when this is made.

    Not seen is what changes inside of other attributes (lists, objects but for `config`), and writes into a tensor that leave its
    version and place as they were: through numpy or into `.data`.

    Args:
        model: the module to watch.
        assigned: what the forward assigns, as far as it is known.
    """

    def __init__(self, model: nn.Module, assigned: Mapping[int, Set[str]]) -> None:
        self.parameters = list(model.parameters())
        modules = list(model.modules())
        configs = {id(config): vars(config) for config in map(_config, modules) if config is not None}
        self._now = [*map(vars, modules), *configs.values()]
        self._before = [dict(attributes) for attributes in self._now]
        found = [vars(module).get(name) for module in modules for name in _CONTENTS]
        found = [each for each in found if isinstance(each, dict)]  # those of scripted modules are not
        self._filled, self._empty = [each for each in found if each], [each for each in found if not each]
        self._contents = [each.copy() for each in self._filled]
        self._model, self.assigned = model, assigned
        self.forgive(assigned)

    def forgive(self, assigned: Mapping[int, Set[str]]) -> None:
        """Take no other value of some attributes, and no write into some buffers, for a change: a forward makes it.

        Args:
            assigned: the names, by the id of the `vars` of a module.
        """
        modules, self.assigned = list(self._model.modules()), assigned
        plain = (v for module in modules for v in vars(module).values() if isinstance(v, Tensor))
        written = [
            vars(module)[registry].get(name)
            for module in modules
            for name in assigned.get(id(vars(module)), ())
            for registry in ("_parameters", "_buffers")
        ]
        tensors = [*self.parameters, *self._model.buffers(), *plain]
        left_out = {*map(id, written)}
        self._tensors = [t for t in tensors if not t.is_inference() and id(t) not in left_out]
        self._versions = sum(map(version_of, self._tensors))
        # Those that have their memory by `.data = ...` get others. The old memory is held, so that no other has its address.
        self._placed = [t for t in self._tensors if type(t) in _PLACED and t.layout is torch.strided]
        self._memory = [t.detach() for t in self._placed]
        self._addresses = [*map(Tensor.data_ptr, self._placed)]

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
        if not all(_same(now, before, self.assigned.get(id(now), ())) for now, before in pairs):
            return False
        self._before = [dict(attributes) for attributes in self._now]
        return True


def _config(module: nn.Module) -> Any:
    config = vars(module).get("config")
    return config if hasattr(config, "__dict__") else None


def _same(now: Mapping[str, Any], before: Mapping[str, Any], assigned: Any) -> bool:
    """Tell whether attributes are as they were, as far as they can matter to a graph."""
    for name in ({**before, **now}).keys() - {COMPILED, *assigned}:
        old, new = before.get(name), now.get(name)
        if old is new:
            continue
        if type(new) is not type(old) or not isinstance(new, _PLAIN) or new != old:
            return False
    return True


def _equal(now: Any, before: Any) -> bool:
    try:
        return bool(now == before)
    except (RuntimeError, ValueError):  # a tensor or an array is another one: compared by its elements
        return False
