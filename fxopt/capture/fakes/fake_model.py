"""A copy of the model that holds fake tensors and reports the calls of its modules; the user's model is never run."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fxopt.capture.fakes.kept_state import UNREAD, Changes, Counted, KeptState, set_on, settings_of
from fxopt.capture.fakes.model_copy import deepcopy_with_closures
from fxopt.capture.fakes.module_tree import recorded_modules
from fxopt.capture.fakes.snapshots import Snapshot, SnapshotMaker
from fxopt.capture.fakes.unusable_number import CountedNumber, UnusableNumber, is_unusable
from fxopt.errors import TraceError

# Stands for a tensor that the forward has made.
MADE = object()

_PLAIN = (bool, int, float, str)
# Attributes that every module has: parameters, children and hooks among them.
_OF_TORCH = vars(torch.nn.Module()).keys() | {"_compiled_call_impl"}


@dataclasses.dataclass(frozen=True)
class Written:
    """The tensors of the user into which a forward writes: parameters by name, and tensors from outside of the model."""

    parameters: set[str]
    outside: list[torch.Tensor]


class FakeModel:
    """A copy of `model` with fake tensors in the place of real ones.

    `names` gives the qualified names of parameters and buffers by the identity of their fakes; `originals` the real
    tensors behind other fakes: plain attributes, and tensors from outside the model. `earlier` is state to start from:
    tensors in it that are not known are `stale`, no value of this call, and whoever uses a size that is not calls `refuse`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        fake_mode: FakeTensorMode,
        layers: Collection[int],
        earlier: KeptState,
        refuse: Callable[[], None],
    ) -> None:
        self._fake_mode, self._refuse = fake_mode, refuse
        self.names: dict[int, str] = {}
        self.originals: dict[int, torch.Tensor] = {}
        self._outside: dict[int, torch.Tensor] = {}
        memo: dict[int, Any] = {}
        tensors = dict(model.named_buffers(remove_duplicate=False))
        tensors |= model.named_parameters(remove_duplicate=False)
        self._model_tensors = tensors
        for name, tensor in tensors.items():
            if id(tensor) not in memo:
                memo[id(tensor)] = fake_mode.from_tensor(tensor, static_shapes=True)
                self.names[id(memo[id(tensor)])] = name
        self._tensors = {name: memo[id(tensor)] for name, tensor in tensors.items()}
        for module in model.modules():
            for value in module.__dict__.values():
                if isinstance(value, torch.Tensor) and id(value) not in memo:
                    memo[id(value)] = self.fake(value)
        self.model = self._copied(model, memo)
        originals = dict(model.named_modules())
        self._layers = {id(m) for name, m in self.model.named_modules() if id(originals[name]) in layers}
        self._settings = {id(module): settings_of(module) for module in self.model.modules()}
        self._held: dict[int, tuple[Any, ...]] = {}
        self._containers = recorded_modules(self.model, self._layers)
        self._given = {name: set(vars(module)) for name, module in self.model.named_modules()}
        self._own = {
            id(t): f"{n}.{key}"
            for n, m in self._containers
            for key, t in _attributes(m)
            if isinstance(t, torch.Tensor)
        }
        # Tensors that are in lists, dicts and objects at first: another one in their place is a change.
        snapshots = [value for value in self.state({}).values() if isinstance(value, Snapshot)]
        held = {id(tensor): tensor for snapshot in snapshots for tensor in snapshot.tensors}
        self._held |= {key: (f"tensor {n}", tensor) for n, (key, tensor) in enumerate(held.items())}
        self.stale: dict[int, torch.Tensor] = {}
        self.unread: set[tuple[int, str]] = set()  # attributes of modules
        self._leave(earlier)
        self._before = self.state({})
        self._versions = {name: buffer._version for name, buffer in self.model.named_buffers()}

    def _copied(self, model: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
        try:
            for name, tensor in self._model_tensors.items():
                vars(self._tensors[name]).update(deepcopy_with_closures(set_on(tensor), memo))
            return deepcopy_with_closures(model, memo)
        except Exception as error:
            raise TraceError(
                f"{type(model).__name__} cannot be copied by copy.deepcopy, which capture needs so as to "
                f"leave the model untouched: {type(error).__name__}: {error}{_uncopied(model, memo)}"
            ) from error

    def _leave(self, earlier: KeptState) -> None:
        """Leave in the copy what an earlier call has left."""
        for (name, key), value in earlier.changes.items():
            if isinstance(value, Snapshot):
                if value.in_closure and (value.tensors or value.sizes):
                    raise TraceError(
                        f"a function that {key!r} holds keeps a tensor or a size for a later call."
                    )
                stand_ins = self._stand_ins(value, earlier.known)
                value = copy.deepcopy(value.kept, stand_ins) if stand_ins else value.kept
            elif isinstance(value, Counted):
                value = CountedNumber(self._refuse, value.kind)
            elif value is UNREAD:
                module = self.model.get_submodule(name)
                vars(module).pop(key, None)
                self.unread.add((id(module), key))
                continue
            holder = self._tensors.get(name)
            if holder is not None or is_unusable(value):
                # `nn.Module` would ask what the number is
                vars(self.model.get_submodule(name) if holder is None else holder)[key] = value
            else:
                setattr(self.model.get_submodule(name), key, value)

    def refuse_unread(self, module: torch.nn.Module, name: str) -> None:
        """Refuse an attribute that is missing because this call may not read it."""
        if (id(module), name) in self.unread:
            self._refuse()

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake of a real tensor, the same one each time."""
        fake: torch.Tensor = self._fake_mode.from_tensor(tensor, static_shapes=True)
        self.originals[id(fake)] = tensor
        self._outside[id(fake)] = fake
        return fake

    def real(self, fake: torch.Tensor) -> tuple[str, torch.Tensor | None]:
        """The tensor of the model, or from outside, for which a fake stands, and its name where it has one."""
        name = self.names.get(id(fake), "")
        return self._own.get(id(fake), name), self.originals.get(id(fake), self._model_tensors.get(name))

    def report_to(self, recorder: Any) -> None:
        """Report calls of modules to a `Recorder`."""
        for name, module in self.model.named_modules():
            call = recorder.call_layer if id(module) in self._layers else recorder.call_container
            # nn.Module.__call__ prefers this attribute of the instance, which only the shell has.
            module._compiled_call_impl = _Call(call, name, module)

    def has_changed(self, layer: torch.nn.Module) -> bool:
        """Tell whether the forward has changed a layer, as `torch.func.functional_call` does for a call."""
        return any(self._settings.get(id(part)) != settings_of(part) for part in layer.modules())

    def keep_settings(self, layer: torch.nn.Module) -> None:
        """Take a layer as it is after a call of it: what it changes itself, it changes when the graph runs."""
        self._settings |= {id(part): settings_of(part) for part in layer.modules()}

    def state(self, aliases: Mapping[int, torch.Tensor]) -> Changes:
        """All that the modules hold besides each other, tensors of the model by name; `aliases` gives others that are the same."""

        def named(tensor: torch.Tensor) -> Any:
            key = id(aliases.get(id(tensor), tensor))
            return self._own.get(key) or self._held.get(key, (MADE,))[0]

        state: Changes = {}
        contents = SnapshotMaker(named)
        for name, module in self._containers:
            for key, value in _attributes(module):
                if is_unusable(value):
                    state[name, key] = contents(value)
                elif isinstance(value, _PLAIN):
                    state[name, key] = value
                elif isinstance(value, torch.Tensor):
                    own = named(value)
                    state[name, key] = Snapshot(MADE, value, (value,)) if own is MADE else own
                elif value is not None and key not in _OF_TORCH:
                    state[name, key] = contents(value)
        for name, tensor in self._tensors.items():
            state |= {(name, key): contents(value) for key, value in set_on(tensor).items()}
        # A layer that the forward has set otherwise, as by `dropout.train()`, and left so.
        for name, module in self.model.named_modules():
            if type(module).__module__.startswith("torch.nn."):
                plain = {key: value for key, value in vars(module).items() if isinstance(value, _PLAIN)}
                state |= {(name, key): value for key, value in plain.items()}
                added = vars(module).keys() - plain.keys() - self._given[name] - _OF_TORCH
                state |= {(name, key): contents(vars(module)[key]) for key in sorted(added)}
        return state

    def changes(self, aliases: Mapping[int, torch.Tensor]) -> Changes:
        """Give the attributes that the forward has changed, with their values now."""
        after = self.state(aliases)
        changed = sorted(
            key for key in self._before.keys() | after.keys() if self._before.get(key) != after.get(key)
        )
        return {key: after.get(key) for key in changed}

    def unchanged_buffers(self) -> set[str]:
        """The names of the buffers that the forward has neither replaced nor written."""
        after = self.model.named_buffers()
        return {n for n, b in after if self.names.get(id(b)) == n and self._versions.get(n) == b._version}

    def hooks(self) -> dict[str, Any]:
        """The hooks of each module, of which the forward may have added some; they are no state that it reads."""
        return {name: (m._forward_hooks, m._forward_pre_hooks) for name, m in self.model.named_modules()}

    def take_hooks(self, hooks: Mapping[str, Any]) -> None:
        """Give the modules the hooks that an earlier call has left."""
        for name, kinds in hooks.items():
            module = self.model.get_submodule(name)
            for own, left in zip((module._forward_hooks, module._forward_pre_hooks), kinds, strict=True):
                # Its own hooks write into this copy, those of the earlier call into the copy of that.
                hooks_now = {key: own.get(key, hook) for key, hook in left.items()}
                own.clear()
                own.update(hooks_now)

    def written(self) -> Written:
        """The parameters, and the tensors from outside of the model, into which the forward has written."""
        return Written(
            {
                name
                for name, parameter in self.model.named_parameters(remove_duplicate=False)
                if parameter.is_inference() or parameter._version
            },
            [self.originals[id(fake)] for fake in self._outside.values() if fake._version],
        )

    def _stand_ins(self, snapshot: Snapshot, known: Mapping[int, Any]) -> dict[int, Any]:
        """For the identity of each tensor and size that an earlier call left what a run gets."""
        tensors = {
            id(t): self.fake(known[id(t)]) if id(t) in known else self._stale() for t in snapshot.tensors
        }
        return tensors | {id(s): known.get(id(s), UnusableNumber(self._refuse)) for s in snapshot.sizes}

    def _stale(self) -> torch.Tensor:
        fake = self._fake_mode.from_tensor(torch.empty(()), static_shapes=True)
        self.stale[id(fake)] = fake
        return fake


def _uncopied(model: torch.nn.Module, memo: Mapping[int, Any]) -> str:
    """The attribute of the model that cannot be copied, in words."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            try:
                copy.deepcopy(value, dict(memo)) if key != "_modules" else None
            except Exception:
                return f" (the attribute {f'{name}.{key}'.lstrip('.')!r})"
    return ""


def _attributes(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for registry in (module.__dict__, module._parameters, module._buffers):
        for key, value in registry.items():
            if key not in ("_parameters", "_buffers", "_modules"):
                yield key, value


class _Call:
    """A module's call in the shell, reported to the recorder."""

    def __init__(self, call: Callable[..., Any], name: str, module: torch.nn.Module) -> None:
        self.call, self.name, self.module = call, name, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self.name, self.module, args, kwargs)
