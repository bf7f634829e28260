"""The state of a model that its graphs depend on, and whether the model is still in that state."""

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
_CONTAINER = "a container"  # what has changed, if no name is known
_WATCHED = (list, dict, set)  # and their subclasses
_CONTAINERS = (*_WATCHED, tuple)
_BUILT_IN = (*_WATCHED, collections.OrderedDict)  # a subclass may override their methods
_STATISTICS = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)  # the dtypes of running statistics
_LONGEST = 1000  # elements; longer lists, sets and subclasses of dict are not watched: LeViT has lists of half a million
_MOST_LEFT = 256  # values in assigned attributes that a graph remembers
# Attributes of every module that graphs do not depend on, such as hooks on state dicts and gradients.
_OF_TORCH = vars(nn.Module()).keys() - {PARAMETERS, BUFFERS, MODULES, *FORWARD_HOOKS}


class State:
    """The modules, weights, buffers, hooks, flags, numbers and strings of a model, as they are when this is made.

    Lists, tuples, dicts and sets belong to the state, nested ones and subclasses, too. An attribute that is a tensor may
    become another tensor of the same shape, unless a graph reads it. These changes go unnoticed:

    - in a list, set or subclass of dict of more than 1000 elements, and inside of other objects except `config`;
    - writes through numpy or into `.data`, which change neither the version nor the address of a tensor;
    - writes of `batch_norm` into its statistics, unless an attribute of the module, such as `training`, was set since.

    Attributes:
        read: the attributes that graphs read, each as the id of the `__dict__` of its module, and a name.

    Args:
        model: the module to watch.
        places: the attributes and buffers that the forward is known to change, each as a module path and a name.
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
        # `.data = ...` changes the address. Holding the old memory keeps its address from being used again.
        self._placed = [t for t in self._held if not has_own_kernels(t)]
        self._memory = [t.detach() for t in self._placed]
        self._addresses = [*map(Tensor.data_ptr, self._placed)]
        # `batch_norm` does not count up the versions of its statistics.
        self._statistics = {
            id(t): t.detach().clone() for t in model.buffers() if t.dtype in _STATISTICS and t.dim() == 1
        }
        self.read: set[tuple[int, Any]] = set()
        self._changed = _CONTAINER
        self._replaced = (
            False  # whether a list was replaced by an equal one, as peft does at each switch of adapters
        )
        contents = (_parts(each) for each in found.values() if isinstance(each, _CONTAINERS))
        parts = (part for each in contents if len(each) <= _LONGEST for part in each.values())
        times = collections.Counter(id(part) for part in parts if isinstance(part, Tensor))
        self._twice = {key for key, count in times.items() if count > 1}
        self.forgive(model, places)

    def forgive(self, model: nn.Module, places: Collection[tuple[str, str]]) -> None:
        """Ignore new tensors in some attributes, and writes into some buffers: the forward makes these changes itself.

        A new number, flag or string in these attributes is a change, unless a call has left it (`note_left`).
        """
        self.places, modules = places, dict(model.named_modules())
        self._assigned: dict[Any, tuple[Any, set[tuple[Any, ...]]]] = {}
        left_out: dict[int, Any] = {}
        for path, name in places:
            if path in modules:
                attributes = vars(modules[path])
                self._assigned[id(attributes), name] = attributes, set()
                _collect(getattr(modules[path], name, None), left_out)
        for path, module in modules.items():  # a forward may assign what is also a weight
            own = vars(module)
            for name, value in (*own.items(), *own[PARAMETERS].items(), *own[BUFFERS].items()):
                if (path, name) not in places:
                    left_out.pop(id(value), None)
        for key in left_out:
            self._statistics.pop(key, None)
        # From all tensors: graphs for other states of the model may make other changes.
        self._tensors = [tensor for tensor in self._held if id(tensor) not in left_out]
        self._written = sum(self._writes[id(tensor)] for tensor in self._tensors)

    def note_left(self) -> None:
        """Note the numbers, flags and strings that a call has left in the attributes that the forward assigns."""
        for (_, name), (attributes, left) in self._assigned.items():
            value = attributes.get(name)
            if isinstance(value, _PLAIN):
                left.add(_written(value))

    def is_gone(self) -> bool:
        """Tell whether a weight was written, or has other memory, so that this state cannot come back."""
        return (
            sum(map(version_of, self._tensors)) != self._written
            or [*map(Tensor.data_ptr, self._placed)] != self._addresses
        )

    @property
    def changed(self) -> str:
        """The name of what `holds` has found changed."""
        return "a tensor" if self.is_gone() else self._changed

    def holds(self) -> bool:
        """Tell whether the model is in this state; takes some 50 microseconds for BERT-base."""
        self._changed = _CONTAINER
        if self.is_gone() or any(self._empty):
            return False
        reads = len(self.read)  # grows with each new graph
        if (sum(map(dict_version, self._dicts)), reads) != self._compared:  # versions only grow
            versions = [*map(dict_version, self._dicts)]
            changed = itertools.compress(self._copies, map(operator.ne, versions, self._versions))
            if not all(
                itertools.starmap(self._is_same, changed if reads == self._compared[1] else self._copies)
            ):
                return False
            if not self._replaced:  # the new list is not watched, so each later call must compare
                self._versions, self._compared = versions, (sum(versions), reads)
        return all(itertools.starmap(self._is_same, self._others))

    def _is_same(self, now: Any, before: Any) -> bool:
        """Tell whether a container, or the `__dict__` of a module, is the same as before in all that a graph may depend on."""
        if isinstance(now, list) and len(now) == len(before) and all(map(operator.is_, now, before)):
            return True  # at once
        then, current = _parts(before), _parts(now)
        for tensor in current[BUFFERS].values() if MODULES in current else ():
            if tensor is not None and not same_bits(tensor, self._statistics.get(id(tensor), tensor)):
                self._changed = "a tensor"
                return False
        if isinstance(now, dict) and MODULES not in now and [*then] != [*current]:
            return False  # a forward may iterate over a dict, but hardly over the attributes of a module
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
        """Tell whether `old` was in a single place, and `new` in none; a forward may ask whether two attributes are one tensor."""
        return id(old) not in self._twice and id(new) not in self._writes


class Reads:
    """The attributes of modules that a graph reads: tensors that share memory with a tensor of the graph.

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
        """The attributes that calls do not assign, in the form of `State.read`; an assigned one may be a view of a weight."""
        return {(id(vars(self._modules[path])), name) for path, name in self._found - {*assigned}}


class LeftByCalls:
    """Remembers for which values in the attributes that a graph assigns the graph is right: the forward may read what is left.

    Args:
        places: the module and the name of each attribute.
    """

    def __init__(self, places: Sequence[tuple[nn.Module, str]]) -> None:
        self.places = places
        # For each kind of values, whether the graph is right.
        self._known: dict[Any, bool] = {}
        self.note(self.kinds(), True)

    def values(self) -> tuple[Any, ...]:
        """The values of the attributes."""
        return tuple(vars(module).get(name) for module, name in self.places)

    def kinds(self) -> tuple[Any, ...]:
        """The values of the attributes, with shapes and dtypes in the place of tensors."""
        return tuple(map(_left, self.values()))

    def note(self, kinds: tuple[Any, ...], holds: bool) -> None:
        """Note whether the graph is right for values of these kinds."""
        if len(self._known) < _MOST_LEFT:
            self._known[kinds] = holds

    def holds(self) -> bool | None:
        """Tell whether the graph is right for the present values; None if that is not known."""
        return self._known.get(self.kinds())


def _left(value: Any) -> Any:
    if isinstance(value, tuple):
        return type(value), *map(_left, value)
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    return _written(value) if isinstance(value, _PLAIN) else id(value)


def _are_equal(old: Any, new: Any) -> bool:
    """Tell whether two lists or tuples hold the same numbers, flags and strings, and nothing else."""
    if type(old) is not type(new) or type(old) not in (list, tuple) or len(old) != len(new):
        return False
    pairs = zip(old, new, strict=True)
    return len(old) <= _LONGEST and all(
        isinstance(one, _PLAIN) and _written(one) == _written(other) for one, other in pairs
    )


def _is_alike(old: Any, new: Any) -> bool:
    """Tell whether two tensors, none of them a weight, differ in nothing but their values."""
    if type(old) is not Tensor or type(new) is not Tensor or has_own_kernels(old) or has_own_kernels(new):
        return False
    same = (_left(old), old.stride(), old.device) == (_left(new), new.stride(), new.device)
    return same and not (old.requires_grad or new.requires_grad or vars(old) or vars(new))


def _written(value: Any) -> tuple[Any, ...]:
    """A key for a number, flag or string, in which -0.0 differs from 0.0, and NaN equals NaN."""
    return type(value), repr(value) if isinstance(value, float | complex) else value


def _collect(value: Any, found: dict[int, Any]) -> None:
    """Add a tensor, or a container with all tensors and containers in it, under their ids."""
    if isinstance(value, Tensor):
        found[id(value)] = value
    elif isinstance(value, _CONTAINERS) and id(value) not in found:
        found[id(value)] = value
        own = _OF_TORCH if isinstance(value, dict) and MODULES in value else ()
        for key, part in _parts(value).items():
            if key not in own:
                _collect(vars(part) if key == "config" and hasattr(part, "__dict__") else part, found)


def _copied(value: Any) -> Any:
    """Copy a list, dict or set without calling methods of a subclass."""
    if type(value) in _BUILT_IN:
        return value.copy()  # `dict.copy` would lose the order of an OrderedDict
    return next(kind for kind in _WATCHED if isinstance(value, kind)).copy(value)


def _parts(value: Any) -> dict[Any, Any]:
    value = value if type(value) in _BUILT_IN or isinstance(value, tuple) else _copied(value)
    if isinstance(value, set):
        return {part: part for part in value}
    return value if isinstance(value, dict) else dict(enumerate(value))
