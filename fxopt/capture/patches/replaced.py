"""Attributes of modules and classes, replaced for the length of a block."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


class Patches(contextlib.ExitStack):
    """Replaces attributes until it is closed. A patch is called while `active()` is true; otherwise the original is called.

    `in_forward()` is also true inside the calls of the forward, except where a transform of torch.func is recorded by
    operators.
    """

    def __init__(self, active: Callable[[], bool], in_forward: Callable[[], bool]) -> None:
        super().__init__()
        self.active, self.in_forward = active, in_forward

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute; `value` itself checks whether the patches are active."""
        # Not by `replaced`: each capture replaces some two hundred attributes.
        self.callback(setattr, owner, name, owner.__dict__[name])
        setattr(owner, name, value)

    def __call__(self, owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
        """Replace a function by the decorated one, which gets the original as its first argument."""
        original = owner.__dict__[name]

        def install(patch: Callable[..., Any]) -> None:
            @functools.wraps(original)
            def patched(*args: Any, **kwargs: Any) -> Any:
                return patch(original, *args, **kwargs) if self.active() else original(*args, **kwargs)

            self.set(owner, name, patched)

        return install
