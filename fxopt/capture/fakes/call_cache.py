"""A cache of calls on fake tensors: each distinct call runs once.

Computing sizes takes thousands of operations on sympy expressions, and a model repeats its layers dozens of times. The
guards that the first call needs also hold for the later ones. The runs of one forward repeat calls as well. If two runs
know the same facts about the sizes of the arguments, a call has the same result in both.
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
# The results of these functions depend on more than the sizes and strides of their arguments.
_NOT_REMEMBERED = {"as_strided", "as_strided_scatter", "__set__", "__get__"}


_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)

# The metadata of the tensors in a result, and the pytree structure of the result.
Known = tuple[list[Metadata | None], pytree.TreeSpec]
# Call -> known facts about the sizes of its arguments -> result, with sizes as sympy expressions.
Earlier = dict[Any, dict[frozenset[Any], Any]]


class _UncertainError(Exception):
    """Metadata does not describe a value completely."""


class CallCache:
    """The results of the calls of one run (one ShapeEnv); `earlier` has the results of other runs of the forward."""

    def __init__(self, fake_mode: CaptureFakeMode, earlier: Earlier) -> None:
        self._fake_mode = fake_mode
        self._results: dict[Any, Any] = {}
        self._earlier = earlier

    def function_call(self, function: Any, args: Any, kwargs: Any) -> CachedCall | None:
        """The call of a function; None if it is uncertain what the result depends on."""
        python = type(function) is types.FunctionType and function.__module__ in _PYTHON_FUNCTIONS
        if not (python or isinstance(function, _C_FUNCTIONS)) or function.__name__ in _NOT_REMEMBERED:
            return None
        return self._call((function,), (), args, kwargs)

    def layer_call(self, layer: torch.nn.Module, args: Any, kwargs: Any) -> CachedCall | None:
        """The call of a layer; None if it is uncertain what the result depends on."""
        of_torch = type(layer).__module__.startswith("torch.nn.modules")
        if modules_of(layer) or hooks_of(layer) or not of_torch:
            return None
        if list(written_parameters(layer)):
            return None  # a cached call would not update the statistics
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
        """Empty the cache, because results have changed for a reason other than the arguments."""
        self._results, self._earlier = {}, {}


@dataclasses.dataclass(eq=False)
class CachedCall:
    """One call, and whether a call with the same argument metadata was made before."""

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
        """The symbols in the sizes of the arguments; empty if the run has no symbols."""
        return _symbols(self.key) if self._shape_env.var_to_range else set()

    def _was_made_before(self) -> bool:
        """Tell whether another run made this call with the same facts known about the sizes."""
        if self.key not in self.earlier:
            return False
        facts, _ = self._shape_env.facts.about(self._symbols)
        if facts not in self.earlier[self.key]:
            return False
        known = self.earlier[self.key][facts]
        self.results[self.key] = _with_sizes(known, lambda size: self._shape_env.symbolic(size, int))
        return True

    def remember(self, result: Any) -> None:
        """Store a result of new tensors and views of inputs, if the call wrote to no input and drew no random numbers.

        The result is stored for other runs as well if the known facts answered every question about sizes in the call.
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
        """Store the result for other runs."""
        facts, related = self._shape_env.facts.about(self._symbols)

        def expression(size: Any) -> Any:
            if not size.node.expr.free_symbols <= related:
                raise _UncertainError
            return size.node.expr

        self.earlier.setdefault(self.key, {})[facts] = _with_sizes(known, expression)

    def _known(self, result: Any, memories: dict[int, Any]) -> Metadata | None:
        """The metadata of a tensor in a result; `memories` collects new storages, which no two tensors of a result may share."""
        if result is None:
            return None
        if type(result) is not FakeTensor or any(result is tensor for tensor in self.inputs):
            raise _UncertainError
        _metadata_key(result)
        if free_unbacked_symbols(result) - self._symbols:
            raise _UncertainError  # data-dependent sizes, as those of `nonzero`, are new in each call
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
        """The inputs and parameters that a new tensor depends on for autograd."""
        return [tensor for tensor in (*self.inputs, *self.parameters) if tensor.requires_grad]


class _Made(torch.autograd.Function):
    """Creates a tensor that depends on `sources` for autograd, as the output of the call does."""

    @staticmethod
    def forward(
        ctx: Any, fake_mode: CaptureFakeMode, known: Metadata, *sources: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(*sources)
        return fake_mode.tensor(known)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # Gradients that the forward itself computes have the shape of the source, and no values.
        return None, None, *(torch.zeros_like(source) for source in ctx.saved_tensors)


def _symbols(key: Any) -> set[Any]:
    """The symbols in the sizes of the arguments."""
    if isinstance(key, tuple):
        return set().union(*map(_symbols, key))
    return key.free_symbols if isinstance(key, sympy.Basic) else set()


def _is_unknown(value: Any) -> bool:
    """Tell whether a part of a result is a leaf: not a tuple, a list or a `torch.return_types` value."""
    named = type(value).__module__ == "torch.return_types"
    return not (named or type(value) in (tuple, list))


def _with_sizes(known: Known, replaced: Callable[[Any], Any]) -> Known:
    """The metadata of a result with its symbolic sizes replaced."""

    def size(value: Any) -> Any:
        return value if isinstance(value, int) else replaced(value)

    tensors, structure = known
    return [tensor and tensor.resized(size) for tensor in tensors], structure


def _argument_key(value: Any, tensors: list[torch.Tensor]) -> Any:
    """A key of everything in an argument that result metadata can depend on; its tensors are appended to `tensors`."""
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
    """A key of everything in a layer that the metadata of its output can depend on."""
    attributes = tuple(
        (name, _argument_key(value, [])) for name, value in layer.__dict__.items() if not name.startswith("_")
    )
    tensors = tuple(
        (name, None if tensor is None else _metadata_key(tensor))
        for registry in (parameters_of(layer), buffers_of(layer))
        for name, tensor in registry.items()
    )
    return attributes, tensors
