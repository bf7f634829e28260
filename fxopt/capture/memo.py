"""Running calls on fake tensors, each distinct one once.

A model repeats itself: the same layers and functions on tensors of the same sizes, dozens of times. What comes
out, as far as a fake tensor knows, is the same each time, and finding it out on free sizes costs thousands of
operations on sympy expressions; so it is remembered, and later calls make the output tensors alone. Whatever
the first call asked of the sizes is among the guards by then, and holds for the later ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch._prims_common import is_contiguous_or_false
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fxopt.effects import written_parameters

_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_C_FUNCTIONS = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_PYTHON_FUNCTIONS = ("torch.nn.functional", "torch.functional", "torch._tensor")
# What these give depends on more than the sizes and strides of their arguments.
_NOT_REMEMBERED = {"as_strided", "as_strided_scatter", "__set__", "__get__"}
# The output is like the input, in its dtype too.
_GIVE_SIZES_OF_INPUT = {
    torch.ops.aten.relu.default,
    torch.ops.aten._native_batch_norm_legit_no_training.default,
}


class CaptureFakeMode(FakeTensorMode):
    """A FakeTensorMode that makes tensors of known metadata cheaply."""

    _viewing = False
    # How many operators that draw random numbers have been run.
    drawn = 0

    def tensor(self, known: _Tensor) -> torch.Tensor:
        """A tensor in memory of its own."""
        with torch._C._DisableTorchDispatch():
            bare = torch.Tensor._make_wrapper_subclass(
                _Bare,
                known.shape,
                strides=known.stride,
                storage_offset=known.offset,
                dtype=known.dtype,
                device=torch.device("meta"),
                storage_size=known.bytes,
            )
            return FakeTensor(self, bare, known.device)

    def view(self, tensor: torch.Tensor, known: _Tensor) -> torch.Tensor:
        """A view of `tensor`, for autograd as well."""
        self._viewing = True
        try:
            return tensor.as_strided(known.shape, known.stride, known.offset)
        finally:
            self._viewing = False

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._viewing and func is torch.ops.aten.as_strided.default:
            with in_kernel_invocation_manager(self):
                return FakeTensor(self, torch.as_strided(*args), args[0].fake_device)
        if func is torch.ops.aten.convolution.default and _are_contiguous(args[:2]):
            # torch would ask the batch and image size which kernel to take; from these all give contiguous outputs.
            with in_kernel_invocation_manager(self):
                return FakeTensor(self, func(*args), args[0].fake_device)
        if func in _GIVE_SIZES_OF_INPUT and _are_contiguous(args[:1]):
            # torch would compute these as a dozen operators, for each of which it compares all sizes.
            with in_kernel_invocation_manager(self):
                made = torch.empty_like(args[0], memory_format=torch.contiguous_format)
                output = FakeTensor(self, made, args[0].fake_device)
                if func is torch.ops.aten.relu.default:
                    return output
                rest = [FakeTensor(self, made.new_empty(0), args[0].fake_device) for _ in range(2)]
                return output, *rest
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.drawn += 1
        return super().dispatch(func, types, args, kwargs)


def _are_contiguous(tensors: Sequence[Any]) -> bool:
    """Whether all are fake, of values that are not known, and known to be contiguous at every size."""
    return all(
        isinstance(tensor, FakeTensor) and tensor.constant is None and is_contiguous_or_false(tensor)
        for tensor in tensors
    )


class _Bare(torch.Tensor):
    """What a FakeTensor is made of here: sizes, and memory of which nothing but its size is known."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(func)


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """The metadata of an output; `view_of` is the position of the input whose memory it shares."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any
    bytes: Any
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    view_of: int | None


@dataclasses.dataclass(frozen=True)
class _Sequence:
    """A tuple, list or named result of outputs."""

    type: Any
    items: tuple[Any, ...]


class _UncertainError(Exception):
    """Metadata does not tell all about a value."""


class CallMemo:
    """What the calls of one capture (one ShapeEnv) gave."""

    def __init__(self, fake_mode: CaptureFakeMode) -> None:
        self._fake_mode = fake_mode
        self._results: dict[Any, Any] = {}

    def function_call(self, function: Any, args: Any, kwargs: Any) -> Call | None:
        """The call of a function; None where it is not certain what the result depends on."""
        python = type(function) is types.FunctionType and function.__module__ in _PYTHON_FUNCTIONS
        if not (python or isinstance(function, _C_FUNCTIONS)) or function.__name__ in _NOT_REMEMBERED:
            return None
        return self._call((function,), (), args, kwargs)

    def layer_call(self, layer: torch.nn.Module, args: Any, kwargs: Any) -> Call | None:
        """The call of a layer; None where it is not certain what the result depends on."""
        if layer._modules or _has_hooks(layer) or not type(layer).__module__.startswith("torch.nn.modules"):
            return None
        if list(written_parameters(layer)):
            return None  # a call that is remembered would write no statistics
        try:
            what = (type(layer), *_settings(layer))
        except _UncertainError:
            return None
        return self._call(what, tuple(layer.parameters()), args, kwargs)

    def _call(self, what: Any, parameters: Any, args: Any, kwargs: Any) -> Call | None:
        if torch.is_inference_mode_enabled() or torch._C._is_any_autocast_enabled():
            return None
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return None
        inputs: list[torch.Tensor] = []
        try:
            arguments = _described(args, inputs), _described(kwargs, inputs)
        except _UncertainError:
            return None
        key = (what, arguments, torch.is_grad_enabled(), torch.get_default_dtype())
        return Call(self._fake_mode, self._results, key, inputs, parameters)

    def forget(self) -> None:
        """Start anew: something has changed that results depend on besides the arguments."""
        self._results.clear()


class Call:
    """One call, which may have been made before, with arguments of the same metadata."""

    def __init__(
        self,
        fake_mode: CaptureFakeMode,
        results: dict[Any, Any],
        key: Any,
        inputs: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
    ) -> None:
        self._fake_mode = fake_mode
        self._results = results
        self._key = key
        self._inputs = inputs
        self._parameters = parameters
        self._versions = [tensor._version for tensor in inputs]
        self._drawn = fake_mode.drawn
        self.known = key in results

    def recall(self) -> Any:
        """The result of a known call, in new tensors."""
        shape_env: Any = self._fake_mode.shape_env
        with shape_env.suppress_guards():
            return self._made(self._results[self._key])

    def _made(self, known: Any) -> Any:
        if isinstance(known, _Sequence):
            return known.type([self._made(item) for item in known.items])
        if known is None:
            return None
        if known.view_of is not None:
            return self._fake_mode.view(self._inputs[known.view_of], known)
        if known.requires_grad:
            return _Made.apply(self._fake_mode, known, *self._sources())  # type: ignore[no-untyped-call]
        return self._fake_mode.tensor(known)

    def remember(self, result: Any) -> None:
        """Keep what the call gave, if it is new tensors and views of its inputs, and it has written into none.

        Calls that draw random numbers are made each time, to be counted.
        """
        unchanged = self._versions == [tensor._version for tensor in self._inputs]
        unchanged = unchanged and self._drawn == self._fake_mode.drawn
        if unchanged and result is not None:
            with contextlib.suppress(_UncertainError):
                self._results[self._key] = self._known(result, {})

    def _known(self, result: Any, memories: dict[int, Any]) -> Any:
        """The metadata of a result; `memories` holds what is new in it, of which no two may share any."""
        if result is None:
            return None
        if isinstance(result, (tuple, list)):
            named = type(result).__module__ == "torch.return_types"
            if not named and type(result) not in (tuple, list):
                raise _UncertainError
            return _Sequence(type(result), tuple(self._known(item, memories) for item in result))
        if type(result) is not FakeTensor or any(result is tensor for tensor in self._inputs):
            raise _UncertainError
        _metadata(result)
        if free_unbacked_symbols(result):
            raise _UncertainError  # sizes that the values decide, as those of `nonzero`, are new with each call
        storage = result.untyped_storage()
        owners = [i for i, tensor in enumerate(self._inputs) if _memory(tensor) == storage._cdata]
        sources = [self._inputs[owners[0]]] if len(owners) == 1 else self._sources()
        if len(owners) > 1 or storage._cdata in memories:
            raise _UncertainError
        if owners and result.dtype != sources[0].dtype:
            raise _UncertainError
        if result.requires_grad != (torch.is_grad_enabled() and any(t.requires_grad for t in sources)):
            raise _UncertainError
        if not owners:
            memories[storage._cdata] = storage
        return _Tensor(
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
        """What a new tensor depends on for autograd."""
        return [tensor for tensor in (*self._inputs, *self._parameters) if tensor.requires_grad]


class _Made(torch.autograd.Function):
    """A tensor that autograd knows to depend on others, as the call's output does."""

    @staticmethod
    def forward(ctx: Any, fake_mode: CaptureFakeMode, known: _Tensor, *sources: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*sources)
        return fake_mode.tensor(known)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # Gradients that the forward itself asks for have the shape of the source, and no values.
        return None, None, *(torch.zeros_like(source) for source in ctx.saved_tensors)


def _described(value: Any, tensors: list[torch.Tensor]) -> Any:
    """All of an argument that metadata of a result can depend on; its tensors are added to `tensors`."""
    if isinstance(value, torch.Tensor):
        for position, other in enumerate(tensors):
            if other is value:
                return position
        metadata = _metadata(value)
        tensors.append(value)
        return metadata
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return type(value), value.node.expr
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list, torch.Size):
        return type(value), tuple(_described(item, tensors) for item in value)
    if type(value) is dict:
        return dict, tuple((key, _described(item, tensors)) for key, item in value.items())
    if isinstance(value, slice):
        return slice, _described((value.start, value.stop, value.step), tensors)
    raise _UncertainError


def _metadata(tensor: Any) -> tuple[Any, ...]:
    plain = type(tensor) is FakeTensor and tensor.layout == torch.strided and tensor.constant is None
    if not plain or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_inference():
        raise _UncertainError
    return (
        tuple(map(_expression, tensor.shape)),
        tuple(map(_expression, tensor.stride())),
        _expression(tensor.storage_offset()),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
    )


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _settings(layer: torch.nn.Module) -> tuple[Any, ...]:
    """All of a layer that the metadata of its output can depend on."""
    settings = tuple(
        (name, _described(value, [])) for name, value in layer.__dict__.items() if not name.startswith("_")
    )
    tensors = tuple(
        (name, None if tensor is None else _metadata(tensor))
        for registry in (layer._parameters, layer._buffers)
        for name, tensor in registry.items()
    )
    return settings, tensors


def _has_hooks(layer: torch.nn.Module) -> bool:
    return bool(
        layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    )


def _memory(tensor: torch.Tensor) -> int:
    """The identity of the memory of a tensor, which its views share."""
    return int(tensor.untyped_storage()._cdata)
