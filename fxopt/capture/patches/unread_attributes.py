"""Attributes of modules that are gone for one run, which tells by that whether the forward reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fxopt.capture.fakes.fake_model import FakeModel
from fxopt.capture.patches.replaced import Patches


def refuse_unread(patch: Patches, shell: FakeModel) -> None:
    """Refuse attributes of modules that the forward may not read, as attributes and in `__dict__`."""
    if not shell.unread:
        return
    original = torch.nn.Module.__getattr__

    def read(self: torch.nn.Module, name: str) -> Any:
        if patch.in_forward():
            shell.refuse_unread(self, name)
        return original(self, name)

    patch.set(torch.nn.Module, "__getattr__", read)
    for module in shell.model.modules():
        gone = [key for owner, key in shell.unread if owner == id(module)]
        if gone:
            module.__dict__ = _Attributes(module, gone, patch.in_forward, shell.refuse_unread)


class _Attributes(dict[str, Any]):
    """The `__dict__` of a module, for whoever looks into it past `getattr`."""

    def __init__(
        self,
        module: torch.nn.Module,
        gone: list[str],
        in_forward: Callable[[], bool],
        refuse: Callable[[torch.nn.Module, str], None],
    ) -> None:
        super().__init__(vars(module))
        self._watch = (module, gone, in_forward, refuse)


def _asking(name: str, one: bool) -> Callable[..., Any]:
    """A method of dict that refuses to tell of what is gone: of the key that it is given, or of all."""
    original = getattr(dict, name)

    def asking(self: _Attributes, *args: Any) -> Any:
        module, gone, in_forward, refuse = self._watch
        for key in gone:
            if (not one or args[0] == key) and not dict.__contains__(self, key) and in_forward():
                refuse(module, key)
        return original(self, *args)

    return asking


for _name in ("__contains__", "__getitem__", "get", "pop", "setdefault"):
    setattr(_Attributes, _name, _asking(_name, one=True))
for _name in (
    *("__eq__", "__iter__", "__len__", "__ne__", "__or__", "__repr__", "__reversed__", "__ror__"),
    *("copy", "items", "keys", "values"),
):
    setattr(_Attributes, _name, _asking(_name, one=False))
