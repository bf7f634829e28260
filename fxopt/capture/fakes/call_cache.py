"""Running calls on fake tensors, each distinct one once.

Finding out sizes costs thousands of operations on sympy expressions, and a model repeats its layers dozens of times. Whatever
the first call asked of the sizes is among the guards by then, and holds for the later ones. The captures of one forward repeat
each other as well: a call gives the same in each that knows the same of the sizes of its arguments.
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

from fxopt.capture.capture_internals import (
    free_unbacked_symbols,
    is_any_autocast_enabled,
    peek_interpreter_stack,
)
from fxopt.capture.fakes.dynamic_shapes import expression_of_size
from fxopt.capture.fakes.fake_mode import CaptureFakeMode, Metadata
from fxopt.effects import written_parameters
from fxopt.memory import storage_of
from fxopt.operators import hooks_of
from fxopt.torch_internals import (
    FakeTensor,
    buffers_of,
    modules_of,
    parameters_of,
    pytree,
    storage_identity,
    version_of,
)

_C_FUNCTIONS = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_PYTHON_FUNCTIONS = ("torch.nn.functional", "torch.functional", "torch._tensor")
# What these give depends on more than the sizes and strides of their arguments.
_NOT_REMEMBERED = {"as_strided", "as_strided_scatter", "__set__", "__get__"}


_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)

# The metadata of the tensors in a result, and the structure of it.
Known = tuple[list[Metadata | None], pytree.TreeSpec]
# For each call, and what was known of the sizes of its arguments: its result, with sizes as sympy expressions.
Earlier = dict[Any, dict[frozenset[Any], Any]]


class _UncertainError(Exception):
    """Metadata does not tell all about a value."""


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
        of_torch = type(layer).__module__.startswith("torch.nn.modules")
        if modules_of(layer) or hooks_of(layer) or not of_torch:
            return None
        if list(written_parameters(layer)):
            return None  # a call that is remembered would write no statistics
        try:
            what = (type(layer), *_layer_key(layer))
        except _UncertainError:
            return None
        return self._call(what, tuple(layer.parameters()), args, kwargs)

    def _call(self, what: Any, parameters: Any, args: Any, kwargs: Any) -> CachedCall | None:
        if torch.is_inference_mode_enabled() or is_any_autocast_enabled():
            return None
        if peek_interpreter_stack() is not None:
            return None
        inputs: list[torch.Tensor] = []
        try:
            arguments = _argument_key(args, inputs), _argument_key(kwargs, inputs)
        except _UncertainError:
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
        self._versions = [version_of(tensor) for tensor in self.inputs]
        self._drawn = self.fake_mode.drawn
        self._shape_env, self._state = self.fake_mode.shape_env, self.fake_mode.shape_env.state
        self.known = self.key in self.results or self._was_made_before()

    def recall(self) -> Any:
        """The result of a known call, in new tensors."""
        with self._shape_env.suppress_guards():
            tensors, structure = self.results[self.key]
            return pytree.tree_unflatten(map(self._made, tensors), structure)

    def _made(self, known: Metadata | None) -> Any:
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
        """Keep what the call gave, if it is new tensors and views of its inputs, and it has written into none and drawn nothing.

        Other captures need not make the call, either, if what was known of its sizes answered all that it asked about them.
        """
        unchanged = self._versions == [version_of(tensor) for tensor in self.inputs]
        unchanged = unchanged and self._drawn == self.fake_mode.drawn
        if unchanged and result is not None:
            with contextlib.suppress(_UncertainError):
                tensors, structure = pytree.tree_flatten(result, _is_unknown)
                memories: dict[int, Any] = {}
                known = [self._known(tensor, memories) for tensor in tensors], structure
                self.results[self.key] = known
                if self._state == self._shape_env.state:
                    self._keep(known)

    def _keep(self, known: Known) -> None:
        """Keep what the call gave for other captures."""
        facts, related = self._shape_env.facts.about(self._symbols)

        def expression(size: Any) -> Any:
            if not size.node.expr.free_symbols <= related:
                raise _UncertainError
            return size.node.expr

        self.earlier.setdefault(self.key, {})[facts] = _with_sizes(known, expression)

    def _known(self, result: Any, memories: dict[int, Any]) -> Metadata | None:
        """The metadata of a tensor in a result; `memories` holds what is new in that, of which no two may share any."""
        if result is None:
            return None
        if type(result) is not FakeTensor or any(result is tensor for tensor in self.inputs):
            raise _UncertainError
        _metadata_key(result)
        if free_unbacked_symbols(result) - self._symbols:
            raise _UncertainError  # sizes that the values decide, as those of `nonzero`, are new with each call
        storage = result.untyped_storage()
        owners = [
            i for i, tensor in enumerate(self.inputs) if storage_of(tensor) == storage_identity(storage)
        ]
        sources = [self.inputs[owners[0]]] if len(owners) == 1 else self._sources()
        if len(owners) > 1 or storage_identity(storage) in memories:
            raise _UncertainError
        if owners and result.dtype != sources[0].dtype:
            raise _UncertainError
        if result.requires_grad != (torch.is_grad_enabled() and any(t.requires_grad for t in sources)):
            raise _UncertainError
        if not owners:
            memories[storage_identity(storage)] = storage
        sizes = tuple(result.shape), result.stride(), result.storage_offset(), storage.nbytes()
        view_of = owners[0] if owners else None
        return Metadata(*sizes, result.dtype, result.device, result.requires_grad, view_of)

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


def _is_unknown(value: Any) -> bool:
    """Tell whether a part of a result is more than its items."""
    named = type(value).__module__ == "torch.return_types"
    return not (named or type(value) in (tuple, list))


def _with_sizes(known: Known, replaced: Callable[[Any], Any]) -> Known:
    """The metadata of a result with its free sizes replaced."""

    def size(value: Any) -> Any:
        return value if isinstance(value, int) else replaced(value)

    tensors, structure = known
    return [tensor and tensor.resized(size) for tensor in tensors], structure


def _argument_key(value: Any, tensors: list[torch.Tensor]) -> Any:
    """All of an argument that metadata of a result can depend on; its tensors are added to `tensors`."""
    if isinstance(value, torch.Tensor):
        for position, other in enumerate(tensors):
            if other is value:
                return position
        key = _metadata_key(value)
        tensors.append(value)
        return key
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return type(value), value.node.expr
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list, torch.Size):
        return type(value), tuple(_argument_key(item, tensors) for item in value)
    if type(value) is dict:
        return dict, tuple((key, _argument_key(item, tensors)) for key, item in value.items())
    if isinstance(value, slice):
        return slice, _argument_key((value.start, value.stop, value.step), tensors)
    raise _UncertainError


def _metadata_key(tensor: Any) -> tuple[Any, ...]:
    plain = type(tensor) is FakeTensor and tensor.layout == torch.strided and tensor.constant is None
    if not plain or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_inference():
        raise _UncertainError
    return (
        tuple(map(expression_of_size, tensor.shape)),
        tuple(map(expression_of_size, tensor.stride())),
        expression_of_size(tensor.storage_offset()),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
    )


def _layer_key(layer: torch.nn.Module) -> tuple[Any, ...]:
    """All of a layer that the metadata of its output can depend on."""
    attributes = tuple(
        (name, _argument_key(value, [])) for name, value in layer.__dict__.items() if not name.startswith("_")
    )
    tensors = tuple(
        (name, None if tensor is None else _metadata_key(tensor))
        for registry in (parameters_of(layer), buffers_of(layer))
        for name, tensor in registry.items()
    )
    return attributes, tensors
