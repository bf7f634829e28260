"""The state of a model that its graphs have fixed, and whether it is that of now."""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxopt.torch_internals import COMPILED, FORWARD_HOOKS, REGISTRIES, version_of

_PLACED = (Tensor, nn.Parameter)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTENTS = (*REGISTRIES, *FORWARD_HOOKS)


class State:
    """The modules, weights, buffers, hooks, flags, numbers and strings of a model, as they are when this is made.

    Not seen is what changes inside of other attributes (objects but for `config`, dicts, lists of other things than numbers and
    strings), and writes into a tensor that leave its version and place as they were: through numpy or into `.data`.

    Args:
        model: the module to watch.
        places: the attributes and buffers that the forward changes, as far as known, each as a module and a name.
    """

    def __init__(self, model: nn.Module, places: Collection[tuple[str, str]] = ()) -> None:
        self.parameters = list(model.parameters())
        modules = list(model.modules())
        configs = {id(config): vars(config) for config in map(_config, modules) if config is not None}
        self._now = [*map(vars, modules), *configs.values()]
        self._before = [dict(attributes) for attributes in self._now]
        found = [vars(module).get(name) for module in modules for name in _CONTENTS]
        found = [each for each in found if isinstance(each, dict)]  # those of scripted modules are not
        # Lists of names and numbers: peft notes there which adapters it merges, through `.data`, into a weight.
        lists = (v for module in modules for v in vars(module).values() if type(v) is list)
        found += [each for each in lists if all(isinstance(item, _PLAIN) for item in each)]
        self._filled, self._empty = [each for each in found if each], [each for each in found if not each]
        self._contents = [each.copy() for each in self._filled]
        plain = (v for module in modules for v in vars(module).values() if isinstance(v, Tensor))
        tensors = [*self.parameters, *model.buffers(), *plain]
        self._tensors = [tensor for tensor in tensors if not tensor.is_inference()]
        self._seen = {id(tensor): version_of(tensor) for tensor in self._tensors}
        # Those that have their memory by `.data = ...` get others. The old memory is held, so that no other has its address.
        self._placed = [t for t in self._tensors if type(t) in _PLACED and t.layout is torch.strided]
        self._memory = [t.detach() for t in self._placed]
        self._addresses = [*map(Tensor.data_ptr, self._placed)]
        self.forgive(model, places)

    def forgive(self, model: nn.Module, places: Collection[tuple[str, str]]) -> None:
        """Count no other value of some attributes, and no write into some buffers, as a change: the forward makes it."""
        self.places, left_out, modules = places, set[int](), dict(model.named_modules())
        self._assigned = collections.defaultdict[int, set[str]](set)
        for path, name in places:
            if path in modules:
                self._assigned[id(vars(modules[path]))].add(name)
                left_out.add(id(getattr(modules[path], name, None)))
        self._tensors = [tensor for tensor in self._tensors if id(tensor) not in left_out]
        self._versions = sum(self._seen[id(tensor)] for tensor in self._tensors)

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
