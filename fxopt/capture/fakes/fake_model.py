"""A copy of the model that holds fake tensors and reports the calls of its modules; the user's model is never run."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from fxopt.capture.fakes.kept_state import Changes, Counted, KeptState, set_on, settings_of
from fxopt.capture.fakes.model_copy import STAND_IN, deepcopy_with_closures, uncopied
from fxopt.capture.fakes.module_tree import recorded_modules
from fxopt.capture.fakes.snapshots import Snapshot, SnapshotMaker
from fxopt.capture.fakes.unusable_number import CountedNumber, UnusableNumber, is_unusable
from fxopt.errors import FIRST_CALL, TraceError, error_text
from fxopt.memory import storage_of, version_of
from fxopt.objects import attributes
from fxopt.submodules import OWN_COMPILED
from fxopt.torch_internals import (
    COMPILED,
    FORWARD_HOOKS,
    MODULES,
    REGISTRIES,
    FakeTensor,
    FakeTensorMode,
    buffers_of,
    forward_hooks_of,
    forward_pre_hooks_of,
    modules_of,
    parameters_of,
)

# Represents a tensor that the forward made.
MADE = object()

_PLAIN = (bool, int, float, str)
_HOOKS = FORWARD_HOOKS[0]
# Attributes that every module has: parameters, children and hooks among them.
_OF_TORCH = vars(torch.nn.Module()).keys() | {COMPILED, OWN_COMPILED}


@dataclasses.dataclass(frozen=True)
class Written:
    """The user's tensors that a forward writes: parameters by name, and tensors from outside the model."""

    parameters: set[str]
    outside: list[torch.Tensor]


class FakeModel:
    """A copy of `model` with fake tensors in place of real ones.

    All dicts have identities of fakes as keys. `names` has the qualified names of parameters and buffers. `outside` has the
    fakes of other tensors (plain attributes, tensors from outside the model), and `originals` their real tensors. The copy
    starts from the state `earlier`: tensors of unknown value are `stale`, and any use of an unknown size calls `refuse`.
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
        self.outside: dict[int, torch.Tensor] = {}
        memo: dict[Any, Any] = {}
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
        # Views of these tensors, in lists and objects, share their memory.
        known = {storage_of(tensor) for tensor in [*tensors.values(), *self.originals.values()]}
        memo[STAND_IN] = lambda tensor: self.fake(tensor) if storage_of(tensor) in known else None
        self.model = self._copied(model, memo)
        originals = dict(model.named_modules())
        self._layers = {id(m) for name, m in self.model.named_modules() if id(originals[name]) in layers}
        self._settings = {id(module): settings_of(module) for module in self.model.modules()}
        self._held: dict[int, tuple[Any, ...]] = {}
        self._containers = recorded_modules(self.model, self._layers)
        self._modules = dict(self.model.named_modules())
        self._places = {id(module): name for name, module in self._modules.items()}
        self._assigned: set[tuple[str, str]] = set()
        self._given = {name: set(vars(module)) for name, module in self._modules.items()}
        self._hooks = {key for m in self._modules.values() for hooks in _hooks_of(m) for key in hooks}
        self._own = self.names | {
            id(t): f"{n}.{key}"
            for n, m in self._containers
            for key, t in _attributes(m)
            if isinstance(t, torch.Tensor)
        }
        # Tensors in lists, dicts and objects before the forward: replacing one of them is a change.
        snapshots = [value for value in self.state({}).values() if isinstance(value, Snapshot)]
        held = {id(tensor): tensor for snapshot in snapshots for tensor in snapshot.tensors}
        self._held |= {key: (f"tensor {n}", tensor) for n, (key, tensor) in enumerate(held.items())}
        self.stale: dict[int, torch.Tensor] = {}
        self._leave(earlier)
        self.computed = {id(self.fake(tensor)) for tensor in earlier.computed}
        self._before = self.state({})
        self._versions = {name: version_of(tensor) for name, tensor in self._weights()}

    def _copied(self, model: torch.nn.Module, memo: dict[Any, Any]) -> torch.nn.Module:
        try:
            for name, tensor in self._model_tensors.items():
                vars(self._tensors[name]).update(deepcopy_with_closures(set_on(tensor), memo))
            return deepcopy_with_closures(model, memo)
        except Exception as error:
            raise TraceError(
                f"{type(model).__name__} cannot be copied by copy.deepcopy, which capture needs so as to "
                f"leave the model untouched: {error_text(error)}{uncopied(model, memo)}"
            ) from error

    def _leave(self, earlier: KeptState) -> None:
        """Set the state that earlier calls left."""
        copies: dict[int, Any] = {}  # a list that two modules share stays one
        # Deletions first: the deleted value may have moved to another place in the module.
        for (name, key), value in sorted(earlier.changes.items(), key=lambda change: change[1] is not None):
            if key == _HOOKS:
                continue
            holder: Any = self._tensors.get(name, self._modules.get(name))
            if isinstance(value, Snapshot):
                value = self._left(value, earlier.known, copies)
            elif isinstance(value, Counted):
                value = CountedNumber(self._refuse, value.kind)
            elif value is None:
                delattr(holder, key)
                continue
            registries = (
                [] if isinstance(holder, torch.Tensor) else [parameters_of(holder), buffers_of(holder)]
            )
            for registry in (registry for registry in registries if key in registry):
                registry[key] = value
                break
            else:
                # `nn.Module.__setattr__` would inspect the value.
                object.__setattr__(holder, key, value)

    def _left(self, snapshot: Snapshot, known: Mapping[int, Any], copies: dict[int, Any]) -> Any:
        """Copy an object that an earlier call left, with stand-ins for tensors, sizes and modules; `copies` is the memo."""
        stand_ins = self._stand_ins(snapshot, known)
        if not stand_ins:
            return snapshot.kept
        if isinstance(snapshot.kept, types.FunctionType):
            # A default argument, because a closure would be searched as state of the model.
            return lambda *args, _refuse=self._refuse, **kwargs: _refuse()
        if snapshot.in_closure:
            raise TraceError("a function in an object keeps a tensor, a size or a module for a later call.")
        if not {id(module) for module in snapshot.modules} <= known.keys():
            raise TraceError("a module that is made in a call is kept for a later one.")
        for key, stand_in in stand_ins.items():
            copies.setdefault(key, stand_in)
        return copy.deepcopy(snapshot.kept, copies)

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake of a real tensor, the same object each time."""
        fake: torch.Tensor = self._fake_mode.from_tensor(tensor, static_shapes=True)
        if id(fake) not in self.names:
            self.originals[id(fake)] = tensor
            self.outside[id(fake)] = fake
        return fake

    def holds(self, tensor: torch.Tensor) -> bool:
        """Tell whether a real tensor is in a list, dict or object of the model."""
        return id(tensor) in self._held and not isinstance(tensor, FakeTensor)

    def real(self, fake: torch.Tensor) -> tuple[str, torch.Tensor | None]:
        """Return the name of the real tensor of a fake ("" if it has none), and the real tensor (None if unknown)."""
        name = self.names.get(id(fake), "")
        return self._own.get(id(fake), name), self.originals.get(id(fake), self._model_tensors.get(name))

    def report_to(self, recorder: Any) -> None:
        """Report calls of modules to a `Recorder`."""
        for name, module in self._modules.items():
            call = recorder.call_layer if id(module) in self._layers else recorder.call_container
            # nn.Module.__call__ prefers this attribute of the instance, which only the copy has.
            setattr(module, COMPILED, _Call(call, name, module))

    def has_changed(self, layer: torch.nn.Module) -> bool:
        """Tell whether the forward has changed a layer, as `torch.func.functional_call` does for a call."""
        return any(self._settings.get(id(part)) != settings_of(part) for part in layer.modules())

    def keep_settings(self, layer: torch.nn.Module) -> None:
        """Accept the settings that a layer has after its call: the layer changes them itself when the graph runs."""
        self._settings |= {id(part): settings_of(part) for part in layer.modules()}

    def state(self, aliases: Mapping[int, torch.Tensor]) -> Changes:
        """The contents of all modules, with names for modules and known tensors; `aliases` maps other tensors to known ones."""
        if new := [name for name, module in self.model.named_modules() if id(module) not in self._places]:
            raise TraceError(
                f"the forward adds the module {new[0]!r}: add it before the capture{FIRST_CALL}."
            )

        def named(tensor: torch.Tensor) -> Any:
            key = id(aliases.get(id(tensor), tensor))
            return self._own.get(key) or self._held.get(key, (MADE,))[0]

        state: Changes = {}
        contents = SnapshotMaker(named, placed=lambda module: self._places.get(id(module), MADE))
        for name, module in self._containers:
            state[name, MODULES] = contents(modules_of(module))
            state[name, "__class__"] = Snapshot(type(module), type(module))
            for key, value in _attributes(module):
                if not is_unusable(value) and isinstance(value, _PLAIN):
                    state[name, key] = value
                elif key not in _OF_TORCH:
                    state[name, key] = contents(value)
        for name, tensor in self._tensors.items():
            state |= {(name, key): contents(value) for key, value in set_on(tensor).items()}
        # Layers whose settings the forward has changed for good, as by `dropout.train()`.
        for name, module in self._modules.items():
            if any(_hooks_of(module)):
                state[name, _HOOKS] = contents(tuple(map(self._described, _hooks_of(module))))
            if type(module).__module__.startswith("torch.nn."):
                plain = {key: value for key, value in vars(module).items() if isinstance(value, _PLAIN)}
                state |= {(name, key): value for key, value in plain.items()}
                added = sorted(vars(module).keys() - plain.keys() - self._given[name] - _OF_TORCH)
                held = parameters_of(module) | buffers_of(module) | {key: vars(module)[key] for key in added}
                state |= {(name, key): contents(value) for key, value in held.items()}
        return state

    def _described(self, hooks: Mapping[int, Any]) -> tuple[Any, ...]:
        """Describe hooks: the module's own by number, added ones by function, because their numbers differ in each run."""
        return tuple(
            key if key in self._hooks else (hash(getattr(hook, "__code__", None)), hook)
            for key, hook in hooks.items()
        )

    def note_assigned(self, module: torch.nn.Module, key: str) -> None:
        """Note that the forward assigns to an attribute, even if the value stays the same."""
        if id(module) in self._places:
            self._assigned.add((self._places[id(module)], key))

    def assigned(
        self, held: Mapping[tuple[str, str], Any], earlier: Collection[tuple[str, str]]
    ) -> dict[tuple[str, str], Any]:
        """The attributes that this forward or an `earlier` one assigned, by module and name; `held` has their values before."""
        now = self.held_by_name()
        found = {place for place, value in now.items() if held.get(place, self) is not value}
        found |= self._assigned.union(earlier)
        values = {(name, key): vars(self._modules[name]).get(key, _OF_TORCH) for name, key in sorted(found)}
        return {
            place: value
            for place, value in values.items()
            if place[1] not in _OF_TORCH and value is not _OF_TORCH
        }

    def held_by_name(self) -> dict[tuple[str, str], Any]:
        """The attributes of the modules whose forward is recorded, by module and name."""
        return {
            (name, key): value
            for name, module in self._containers
            for key, value in vars(module).items()
            if key not in _OF_TORCH
        }

    def changes(self, after: Changes) -> Changes:
        """Return the attributes that the forward changed, with their values in the state `after` it."""
        for fake in (*self._tensors.values(), *self.outside.values()):
            _, real = self.real(fake)
            if real is not None and fake.shape != real.shape:
                name = self._own.get(id(fake), "a tensor that is no buffer").lstrip(".")
                raise TraceError(
                    f"the forward changes the shape of {name!r} in place, so a later call finds another shape. Change "
                    "the shape of a view, or make the module that does this a leaf."
                )
        changed = sorted(
            key for key in self._before.keys() | after.keys() if self._before.get(key) != after.get(key)
        )
        return {key: after.get(key) for key in changed}

    def own(self, state: Changes, aliases: Mapping[int, torch.Tensor]) -> dict[int, Any]:
        """Map the identities of state that existed before the run to real tensors or names.

        Names represent modules, and tensors in objects that the forward has not written.
        """
        tensors = [t for value in state.values() if isinstance(value, Snapshot) for t in value.tensors]
        real = {id(t): self.real(aliases.get(id(t), t))[1] for t in tensors}
        written = {id(tensor) for tensor in self.written().outside}
        held = {key: name for key, (name, _) in self._held.items() if key not in written}
        return held | {key: tensor for key, tensor in real.items() if tensor is not None} | self._places

    def unchanged(self) -> set[str]:
        """The names of the parameters and buffers that the forward has neither replaced nor written."""
        after = self._weights()
        return {n for n, t in after if self.names.get(id(t)) == n and self._versions.get(n) == version_of(t)}

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return itertools.chain(self.model.named_parameters(), self.model.named_buffers())

    def hooks(self) -> dict[str, Any]:
        """The hooks of each module, with hooks that the forward added."""
        return {name: _hooks_of(module) for name, module in self._modules.items()}

    def take_hooks(self, hooks: Mapping[str, Any]) -> None:
        """Set the hooks that an earlier call left."""
        for name, kinds in hooks.items():
            for own, left in zip(_hooks_of(self._modules[name]), kinds, strict=True):
                # Own hooks write into this copy, the hooks in `left` into the copy of the earlier call.
                hooks_now = {key: own.get(key, hook) for key, hook in left.items()}
                own.clear()
                own.update(hooks_now)

    def written(self) -> Written:
        """The parameters and outside tensors that the forward wrote, according to torch's version counters."""
        return Written(
            {
                name
                for name, parameter in self.model.named_parameters(remove_duplicate=False)
                if version_of(parameter)
            },
            [self.originals[id(fake)] for fake in self.outside.values() if version_of(fake)],
        )

    def _stand_ins(self, snapshot: Snapshot, known: Mapping[int, Any]) -> dict[int, Any]:
        """Map the identity of each tensor, module and size that an earlier call left to its stand-in for this run."""
        held = dict(self._held.values())
        tensors = {id(t): self._stand_in(known.get(id(t)), held) for t in snapshot.tensors}
        modules = {id(m): self._modules[known[id(m)]] for m in snapshot.modules if id(m) in known}
        sizes = {id(s): known.get(id(s), UnusableNumber(self._refuse)) for s in snapshot.sizes}
        for shape in (size for size in snapshot.sizes if isinstance(size, torch.Size)):
            if all(type(n) is int or id(n) in known for n in shape):
                del sizes[id(shape)]  # all known: deepcopy copies it with its numbers
        return tensors | modules | sizes

    def _stand_in(self, known: torch.Tensor | str | None, held: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if isinstance(known, str):
            return held[known]
        if known is not None:
            return self.fake(known)
        fake: torch.Tensor = self._fake_mode.from_tensor(torch.empty(()), static_shapes=True)
        self.stale[id(fake)] = fake
        return fake


def _attributes(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for registry in (attributes(module), parameters_of(module), buffers_of(module)):
        for key, value in registry.items():
            if key not in REGISTRIES:
                yield key, value


def _hooks_of(module: torch.nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """The forward hooks and forward pre-hooks of a module, by number."""
    return forward_hooks_of(module), forward_pre_hooks_of(module)


class _Call:
    """The call of a module in the fake model, reported to the recorder."""

    def __init__(self, call: Callable[..., Any], name: str, module: torch.nn.Module) -> None:
        self.call, self.name, self.module = call, name, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self.name, self.module, args, kwargs)
