"""The state of a model that its graphs have fixed, and whether it is that of now."""

from __future__ import annotations

import collections
import itertools
import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxopt.optimizing.inputs import has_own_kernels
from fxopt.outputs import same_bits
from fxopt.submodules import tensors_of
from fxopt.torch_internals import (
    BUFFERS,
    DERIVED_FROM_GRAPH,
    FORWARD_HOOKS,
    MODULES,
    PARAMETERS,
    dict_version,
    version_of,
)

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINER = "a container"  # that has changed, where no name says more
_WATCHED = (list, dict, set)  # and their subclasses
_CONTAINERS = (*_WATCHED, tuple)
_BUILT_IN = (*_WATCHED, collections.OrderedDict)  # what has the methods of these; a subclass may have others
_STATISTICS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # the dtypes of those of norms
_LONGEST = 1000  # the most elements of a list, set or subclass of dict that is watched: LeViT keeps half a million numbers in lists
_MOST_LEFT = 256  # for how many values that calls leave it is known whether a graph holds
# Hooks on states and gradients are among these.
_OF_TORCH = vars(nn.Module()).keys() - {PARAMETERS, BUFFERS, MODULES, *FORWARD_HOOKS}


class State:
    """The modules, weights, buffers, hooks, flags, numbers and strings of a model, as they are when this is made.

    Lists, tuples, dicts and sets count, nested ones and subclasses, too. A tensor that a module keeps as an attribute may give way to one with the same
    shape, unless a graph reads it. Not seen is what changes in a list, set or subclass of dict of more than 1000
    elements and inside of other objects but for `config`, and writes into a tensor that leave its version and place as they were: through
    numpy or into `.data`. Writes of `batch_norm` are seen where an attribute of the module, such as `training`, was set since.

    Attributes:
        read: the attributes that graphs read, each by the id of the `__dict__` of its module, and its name.

    Args:
        model: the module to watch.
        places: the attributes and buffers that the forward changes, as far as known, each as a module and a name.
    """

    def __init__(self, model: nn.Module, places: Collection[tuple[str, str]] = ()) -> None:
        self.parameters = list(model.parameters())
        found: dict[int, Any] = {}
        for module in model.modules():
            _collect(vars(module), found)
        watched = [(each, _copied(each)) for each in found.values() if isinstance(each, _WATCHED)]
        held = [(each, copy) for each, copy in watched if type(each) is dict or len(copy) <= _LONGEST]
        self._empty = [each for each, copy in held if not copy and type(each) in _BUILT_IN]
        self._copies = [(each, copy) for each, copy in held if copy and type(each) is dict]
        self._dicts = [each for each, _ in self._copies]
        self._others = [(e, c) for e, c in held if type(e) is not dict and (c or type(e) not in _BUILT_IN)]
        self._versions = [*map(dict_version, self._dicts)]
        self._compared = sum(self._versions), 0
        self._held = [t for t in found.values() if isinstance(t, Tensor) and not t.is_inference()]
        self._writes = {id(tensor): version_of(tensor) for tensor in self._held}
        # Those that have their memory by `.data = ...` get others. The old memory is held, so that no other has its address.
        self._placed = [t for t in self._held if not has_own_kernels(t)]
        self._memory = [t.detach() for t in self._placed]
        self._addresses = [*map(Tensor.data_ptr, self._placed)]
        # `batch_norm` writes into its statistics past the versions.
        self._statistics = {
            id(t): t.detach().clone() for t in model.buffers() if t.dtype in _STATISTICS and t.dim() == 1
        }
        self.read: set[tuple[int, Any]] = set()
        self._changed = _CONTAINER
        self._replaced = False  # whether a list gave way to an equal one, which peft makes for each switch
        contents = (_parts(each) for each in found.values() if isinstance(each, _CONTAINERS))
        parts = (part for each in contents if len(each) <= _LONGEST for part in each.values())
        times = collections.Counter(id(part) for part in parts if isinstance(part, Tensor))
        self._twice = {key for key, count in times.items() if count > 1}
        self.forgive(model, places)

    def forgive(self, model: nn.Module, places: Collection[tuple[str, str]]) -> None:
        """Count no tensor in some attributes, and no write into some buffers, as a change: the forward makes it.

        Numbers, flags and texts in these attributes count as a change unless a call has left them (`note_left`).
        """
        self.places, modules = places, dict(model.named_modules())
        self._assigned: dict[Any, tuple[Any, set[tuple[Any, ...]]]] = {}
        left_out: dict[int, Any] = {}
        for path, name in places:
            if path in modules:
                attributes = vars(modules[path])
                self._assigned[id(attributes), name] = attributes, set()
                _collect(getattr(modules[path], name, None), left_out)
        for path, module in modules.items():  # a forward may assign a weight, too
            own = vars(module)
            for name, value in (*own.items(), *own[PARAMETERS].items(), *own[BUFFERS].items()):
                if (path, name) not in places:
                    left_out.pop(id(value), None)
        for key in left_out:
            self._statistics.pop(key, None)
        # Of all: graphs for other states of the model may make other changes.
        self._tensors = [tensor for tensor in self._held if id(tensor) not in left_out]
        self._written = sum(self._writes[id(tensor)] for tensor in self._tensors)

    def note_left(self) -> None:
        """Note the numbers, flags and texts that a call has left in the attributes that the forward assigns."""
        for (_, name), (attributes, left) in self._assigned.items():
            value = attributes.get(name)
            if isinstance(value, _PLAIN):
                left.add(_written(value))

    def is_gone(self) -> bool:
        """Tell whether a weight was written, or has other memory: this state does not come back."""
        return (
            sum(map(version_of, self._tensors)) != self._written
            or [*map(Tensor.data_ptr, self._placed)] != self._addresses
        )

    @property
    def changed(self) -> str:
        """The change that `holds` has found, in words."""
        return "a tensor" if self.is_gone() else self._changed

    def holds(self) -> bool:
        """Tell whether all is as it was; in a model as large as BERT-base, some 50 microseconds."""
        self._changed = _CONTAINER
        if self.is_gone() or any(self._empty):
            return False
        reads = len(self.read)  # while another graph is made, it grows
        if (sum(map(dict_version, self._dicts)), reads) != self._compared:  # versions only grow
            versions = [*map(dict_version, self._dicts)]
            changed = itertools.compress(self._copies, map(operator.ne, versions, self._versions))
            if not all(
                itertools.starmap(self._is_same, changed if reads == self._compared[1] else self._copies)
            ):
                return False
            if not self._replaced:  # else calls compare from now on: nobody watches the new list
                self._versions, self._compared = versions, (sum(versions), reads)
        return all(itertools.starmap(self._is_same, self._others))

    def _is_same(self, now: Any, before: Any) -> bool:
        """Tell whether a container or the attributes of a module are as they were, as far as they can matter to a graph."""
        if isinstance(now, list) and len(now) == len(before) and all(map(operator.is_, now, before)):
            return True  # at once
        then, current = _parts(before), _parts(now)
        for tensor in current[BUFFERS].values() if MODULES in current else ():
            if tensor is not None and not same_bits(tensor, self._statistics.get(id(tensor), tensor)):
                self._changed = "a tensor"
                return False
        if isinstance(now, dict) and MODULES not in now and [*then] != [*current]:
            return False  # a forward may iterate over a dict; over the attributes of a module hardly
        for key in then.keys() | current.keys():
            old, new = then.get(key, _PLAIN), current.get(key, _PLAIN)
            if old is new:
                continue
            _, left = self._assigned.get((id(now), key), (None, None))
            if MODULES in now and _are_equal(old, new):
                same = self._replaced = True
            elif isinstance(new, _PLAIN):
                same = _written(old) == _written(new) or _written(new) in (left or ())
            else:
                unread = MODULES in now and (id(now), key) not in self.read
                same = key in DERIVED_FROM_GRAPH or (
                    unread and (left is not None or (self._is_alone(old, new) and _is_alike(old, new)))
                )
            if not same:
                if isinstance(now, dict) and isinstance(key, str):
                    self._changed = repr(key)
                return False
        return True

    def _is_alone(self, old: Any, new: Any) -> bool:
        """Tell whether one tensor was in one place, and the other in none: a forward may ask whether two are one."""
        return id(old) not in self._twice and id(new) not in self._writes


class Reads:
    """The attributes of modules whose values a graph holds, as they are when this is made: tensors with the memory of one of its own.

    Args:
        model: the model.
        traced: its graph, before any pass.
    """

    def __init__(self, model: nn.Module, traced: nn.Module) -> None:
        held = [tensor for _, tensor in tensors_of({"": traced})]
        held += [v for module in traced.modules() for v in vars(module).values() if isinstance(v, Tensor)]
        memory = {tensor.untyped_storage().data_ptr() for tensor in held if not has_own_kernels(tensor)}
        self._modules = dict(model.named_modules())
        self._found = {
            (path, name)
            for path, module in self._modules.items()
            for name, value in vars(module).items()
            if type(value) is Tensor and not has_own_kernels(value)
            if value.untyped_storage().data_ptr() in memory
        }

    def but_for(self, assigned: Iterable[tuple[str, str]]) -> set[tuple[int, str]]:
        """Those that calls do not assign, as `State.read` has them: one that they assign may be a view of a weight."""
        return {(id(vars(self._modules[path])), name) for path, name in self._found - {*assigned}}


class LeftByCalls:
    """The values that calls have left in the attributes that a graph assigns: the forward may read them, and a graph holds for some.

    Args:
        places: the module and the name of each attribute.
    """

    def __init__(self, places: Sequence[tuple[nn.Module, str]]) -> None:
        self.places = places
        # Whether the graph holds, for what was left: numbers, and tensors by their shapes.
        self._known: dict[Any, bool] = {}
        self.note(self.kinds(), True)

    def values(self) -> tuple[Any, ...]:
        """The values of the attributes."""
        return tuple(vars(module).get(name) for module, name in self.places)

    def kinds(self) -> tuple[Any, ...]:
        """The values of the attributes, tensors by their shapes and dtypes."""
        return tuple(map(_left, self.values()))

    def note(self, kinds: tuple[Any, ...], holds: bool) -> None:
        """Note whether the graph holds where this was left."""
        if len(self._known) < _MOST_LEFT:
            self._known[kinds] = holds

    def holds(self) -> bool | None:
        """Tell whether the graph holds for what is left now; None if that is not known."""
        return self._known.get(self.kinds())


def _left(value: Any) -> Any:
    if isinstance(value, tuple):
        return type(value), *map(_left, value)
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    return _written(value) if isinstance(value, _PLAIN) else id(value)


def _are_equal(old: Any, new: Any) -> bool:
    """Tell whether two lists or tuples have the same numbers, flags and texts."""
    if type(old) is not type(new) or type(old) not in (list, tuple) or len(old) != len(new):
        return False
    pairs = zip(old, new, strict=True)
    return len(old) <= _LONGEST and all(
        isinstance(one, _PLAIN) and _written(one) == _written(other) for one, other in pairs
    )


def _is_alike(old: Any, new: Any) -> bool:
    """Tell whether nothing but the values sets two tensors apart, none of which is a weight."""
    if type(old) is not Tensor or type(new) is not Tensor or has_own_kernels(old) or has_own_kernels(new):
        return False
    same = (_left(old), old.stride(), old.device) == (_left(new), new.stride(), new.device)
    return same and not (old.requires_grad or new.requires_grad or vars(old) or vars(new))


def _written(value: Any) -> tuple[Any, ...]:
    """A number, flag or text such that -0.0 is another one than 0.0, and NaN is itself."""
    return type(value), repr(value) if isinstance(value, float | complex) else value


def _collect(value: Any, found: dict[int, Any]) -> None:
    """Add a tensor, or a container with the tensors and containers in it, by their ids."""
    if isinstance(value, Tensor):
        found[id(value)] = value
    elif isinstance(value, _CONTAINERS) and id(value) not in found:
        found[id(value)] = value
        own = _OF_TORCH if isinstance(value, dict) and MODULES in value else ()
        for key, part in _parts(value).items():
            if key not in own:
                _collect(vars(part) if key == "config" and hasattr(part, "__dict__") else part, found)


def _copied(value: Any) -> Any:
    """A copy of a list, dict or set, without methods of a subclass."""
    if type(value) in _BUILT_IN:
        return value.copy()  # an OrderedDict has an order of its own
    return next(kind for kind in _WATCHED if isinstance(value, kind)).copy(value)


def _parts(value: Any) -> dict[Any, Any]:
    value = value if type(value) in _BUILT_IN or isinstance(value, tuple) else _copied(value)
    if isinstance(value, set):
        return {part: part for part in value}
    return value if isinstance(value, dict) else dict(enumerate(value))
