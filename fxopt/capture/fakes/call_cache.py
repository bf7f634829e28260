"""Running calls on fake tensors, each distinct one once.

A model repeats itself: the same layers and functions on tensors of the same sizes, dozens of times. What comes
out, as far as a fake tensor knows, is the same each time, and finding it out on free sizes costs thousands of
operations on sympy expressions; so it is remembered, and later calls make the output tensors alone. Whatever
the first call asked of the sizes is among the guards by then, and holds for the later ones.

The captures of one forward, with other answers or at other sizes, repeat each other as well. A call whose result follows from
what is known of the sizes of its arguments gives the same in each capture that knows the same of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fxopt.capture.fakes.call_metadata import UncertainError, argument_key, has_hooks, layer_key, metadata_key
from fxopt.capture.fakes.fake_mode import CaptureFakeMode, Metadata
from fxopt.effects import written_parameters
from fxopt.memory import storage_of

_C_FUNCTIONS = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_PYTHON_FUNCTIONS = ("torch.nn.functional", "torch.functional", "torch._tensor")
# What these give depends on more than the sizes and strides of their arguments.
_NOT_REMEMBERED = {"as_strided", "as_strided_scatter", "__set__", "__get__"}


@dataclasses.dataclass(frozen=True)
class _Sequence:
    """A tuple, list or named result of outputs."""

    type: Any
    items: tuple[Any, ...]


# For each call, and what was known of the sizes of its arguments: its result, with sizes as sympy expressions.
Earlier = dict[Any, dict[frozenset[Any], Any]]


class CallCache:
    """The results of the calls of one run (one ShapeEnv); `earlier` has those of other runs of the forward."""

    def __init__(self, fake_mode: CaptureFakeMode, earlier: Earlier) -> None:
        self._fake_mode = fake_mode
        self._results: dict[Any, Any] = {}
        self._earlier = earlier

    def function_call(self, function: Any, args: Any, kwargs: Any) -> CachedCall | None:
        """The call of a function; None where it is not certain what the result depends on."""
        python = type(function) is types.FunctionType and function.__module__ in _PYTHON_FUNCTIONS
        if not (python or isinstance(function, _C_FUNCTIONS)) or function.__name__ in _NOT_REMEMBERED:
            return None
        return self._call((function,), (), args, kwargs)

    def layer_call(self, layer: torch.nn.Module, args: Any, kwargs: Any) -> CachedCall | None:
        """The call of a layer; None where it is not certain what the result depends on."""
        if layer._modules or has_hooks(layer) or not type(layer).__module__.startswith("torch.nn.modules"):
            return None
        if list(written_parameters(layer)):
            return None  # a call that is remembered would write no statistics
        try:
            what = (type(layer), *layer_key(layer))
        except UncertainError:
            return None
        return self._call(what, tuple(layer.parameters()), args, kwargs)

    def _call(self, what: Any, parameters: Any, args: Any, kwargs: Any) -> CachedCall | None:
        if torch.is_inference_mode_enabled() or torch._C._is_any_autocast_enabled():
            return None
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return None
        inputs: list[torch.Tensor] = []
        try:
            arguments = argument_key(args, inputs), argument_key(kwargs, inputs)
        except UncertainError:
            return None
        key = (what, arguments, torch.is_grad_enabled(), torch.get_default_dtype())
        return CachedCall(self._fake_mode, self._results, self._earlier, key, inputs, parameters)

    def forget(self) -> None:
        """Start anew: something has changed that results depend on besides the arguments."""
        self._results, self._earlier = {}, {}


@dataclasses.dataclass(eq=False)
class CachedCall:
    """One call, which may have been made before, with arguments of the same metadata."""

    fake_mode: CaptureFakeMode
    results: dict[Any, Any]
    earlier: Earlier
    key: Any
    inputs: Sequence[torch.Tensor]
    parameters: Sequence[torch.Tensor]

    def __post_init__(self) -> None:
        self._versions = [tensor._version for tensor in self.inputs]
        self._drawn = self.fake_mode.drawn
        shape_env: Any = self.fake_mode.shape_env
        self._shape_env, self._state = shape_env, shape_env.state
        self.known = self.key in self.results or self._was_made_before()

    def recall(self) -> Any:
        """The result of a known call, in new tensors."""
        with self._shape_env.suppress_guards():
            return self._made(self.results[self.key])

    def _made(self, known: Any) -> Any:
        if isinstance(known, _Sequence):
            return known.type([self._made(item) for item in known.items])
        if known is None:
            return None
        if known.view_of is not None:
            return self.fake_mode.view(self.inputs[known.view_of], known)
        if known.requires_grad:
            return _Made.apply(self.fake_mode, known, *self._sources())  # type: ignore[no-untyped-call]
        return self.fake_mode.tensor(known)

    @functools.cached_property
    def _symbols(self) -> set[Any]:
        """The symbols in the sizes of the arguments; where no size is free, there is none to look for."""
        return _symbols(self.key) if self._shape_env.var_to_range else set()

    def _was_made_before(self) -> bool:
        """Tell whether another capture made this call, with the same knowledge of the sizes."""
        if self.key not in self.earlier:
            return False
        facts, _ = self._shape_env.facts.about(self._symbols)
        if facts not in self.earlier[self.key]:
            return False
        known = self.earlier[self.key][facts]
        self.results[self.key] = _with_sizes(known, lambda size: self._shape_env.symbolic(size, int))
        return True

    def remember(self, result: Any) -> None:
        """Keep what the call gave, if it is new tensors and views of its inputs, and it has written into none.

        Calls that draw random numbers are made each time, to be counted. Other captures need not make the call, either,
        if what was known of its sizes answered all that it asked about them.
        """
        unchanged = self._versions == [tensor._version for tensor in self.inputs]
        unchanged = unchanged and self._drawn == self.fake_mode.drawn
        if unchanged and result is not None:
            with contextlib.suppress(UncertainError):
                known = self.results[self.key] = self._known(result, {})
                if self._state == self._shape_env.state:
                    self._keep(known)

    def _keep(self, known: Any) -> None:
        """Keep what the call gave for other captures."""
        facts, related = self._shape_env.facts.about(self._symbols)

        def expression(size: Any) -> Any:
            if not size.node.expr.free_symbols <= related:
                raise UncertainError
            return size.node.expr

        self.earlier.setdefault(self.key, {})[facts] = _with_sizes(known, expression)

    def _known(self, result: Any, memories: dict[int, Any]) -> Any:
        """The metadata of a result; `memories` holds what is new in it, of which no two may share any."""
        if result is None:
            return None
        if isinstance(result, (tuple, list)):
            named = type(result).__module__ == "torch.return_types"
            if not named and type(result) not in (tuple, list):
                raise UncertainError
            return _Sequence(type(result), tuple(self._known(item, memories) for item in result))
        if type(result) is not FakeTensor or any(result is tensor for tensor in self.inputs):
            raise UncertainError
        metadata_key(result)
        if free_unbacked_symbols(result) - self._symbols:
            raise UncertainError  # sizes that the values decide, as those of `nonzero`, are new with each call
        storage = result.untyped_storage()
        owners = [i for i, tensor in enumerate(self.inputs) if storage_of(tensor) == storage._cdata]
        sources = [self.inputs[owners[0]]] if len(owners) == 1 else self._sources()
        if len(owners) > 1 or storage._cdata in memories:
            raise UncertainError
        if owners and result.dtype != sources[0].dtype:
            raise UncertainError
        if result.requires_grad != (torch.is_grad_enabled() and any(t.requires_grad for t in sources)):
            raise UncertainError
        if not owners:
            memories[storage._cdata] = storage
        return Metadata(
            tuple(result.shape),
            result.stride(),
            result.storage_offset(),
            storage.nbytes(),
            result.dtype,
            result.device,
            result.requires_grad,
            owners[0] if owners else None,
        )

    def _sources(self) -> list[torch.Tensor]:
        """The tensors on which a new one depends for autograd."""
        return [tensor for tensor in (*self.inputs, *self.parameters) if tensor.requires_grad]


class _Made(torch.autograd.Function):
    """A tensor that autograd knows to depend on others, as the call's output does."""

    @staticmethod
    def forward(
        ctx: Any, fake_mode: CaptureFakeMode, known: Metadata, *sources: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(*sources)
        return fake_mode.tensor(known)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # Gradients that the forward itself asks for have the shape of the source, and no values.
        return None, None, *(torch.zeros_like(source) for source in ctx.saved_tensors)


def _symbols(key: Any) -> set[Any]:
    """The symbols in the sizes of the arguments."""
    if isinstance(key, tuple):
        return set().union(*map(_symbols, key))
    return key.free_symbols if isinstance(key, sympy.Basic) else set()


def _with_sizes(known: Any, replaced: Callable[[Any], Any]) -> Any:
    """The metadata of a result with its free sizes replaced."""
    if isinstance(known, _Sequence):
        return _Sequence(known.type, tuple(_with_sizes(item, replaced) for item in known.items))
    if known is None:
        return None

    def size(value: Any) -> Any:
        return value if isinstance(value, int) else replaced(value)

    return dataclasses.replace(
        known,
        shape=tuple(map(size, known.shape)),
        stride=tuple(map(size, known.stride)),
        offset=size(known.offset),
        bytes=size(known.bytes),
    )
