"""Rewrites of a call of torch, tried before the call runs unchanged: a table by name and by function.

Each rewrite gets the recorder and a call. It returns the value of the call, an equal call to continue with, or
NotImplemented. A rewrite makes other calls with `recorder.call`, which go through this table as well.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import sympy
import torch

from fxopt.capture.capture_internals import (
    LIFT_FRESH,
    HigherOrderOperator,
    enter_autocast,
    exit_autocast,
    is_contiguous_or_false,
    set_grad_enabled,
    torch_assert,
    unset_fake_temporarily,
)
from fxopt.capture.data_dependence.branch_decisions import ARRAYS, READS
from fxopt.capture.data_dependence.scalar_tensors import TAKES_SIZES
from fxopt.capture.fakes.dynamic_shapes import is_backed, is_unbacked
from fxopt.capture.nodes.call_targets import property_name
from fxopt.capture.nodes.source_location import compares_with_flag, makes_calls, model_frame
from fxopt.capture.recording import idioms, indexing
from fxopt.capture.recording.higher_order import expand
from fxopt.capture.recording.recorder import Recorder, Rewrite
from fxopt.capture.recording.tensor_data import FROM_DATA, make_from_data, make_legacy, torch_keywords
from fxopt.capture.recording.torch_call import Call
from fxopt.errors import TraceError
from fxopt.objects import tensors_in
from fxopt.torch_internals import FakeTensor, storage_identity

# Functions with a flag `inplace` whose backward does not need the input.
_KEEP_NO_INPUT = {
    *("relu", "dropout", "alpha_dropout", "feature_alpha_dropout"),
    *("dropout1d", "dropout2d", "dropout3d"),
}


def rewrites_of(call: Call) -> tuple[Rewrite, ...]:
    """The rewrites of a call, in the order in which they are tried."""
    name = call.name
    if name in ("__get__", "__set__"):
        name = f"{property_name(call.function)}.{name}"
    if name.startswith("_record_function_"):
        return (lambda recorder, call: call.made(),)  # only a label for the profiler
    before = (*_IDIOMS.get(name, ()), *_BY_FUNCTION.get(call.function, (_take_torch_values,)))
    if isinstance(call.function, HigherOrderOperator):
        before += (expand,)
    writes: tuple[Rewrite, ...] = (_write_out,) if call.kwargs.get("out") is not None else ()
    if _has_inplace_flag(call.function):
        writes += (_write_in_place,)
    return (*before, *writes, *_BY_NAME.get(name, ()), _leave_out_generator)


def _idiom(function: Callable[..., Any]) -> tuple[Rewrite]:
    """Make a rewrite from a function whose parameters are `recorder.call` and the arguments of the call."""
    return (lambda recorder, call: function(recorder.call, *call.args, **call.kwargs),)


def _take_torch_values(recorder: Recorder, call: Call) -> Call:
    """Replace numpy's arrays by tensors, and Python's types by torch's dtypes."""
    args = tuple(idioms.with_torch_values(arg, recorder.call) for arg in call.args)
    return Call(call.function, args, torch_keywords(recorder, call))


# --- writes


def _write_out(recorder: Recorder, call: Call) -> Any:
    plain = Call(call.function, call.args, _without(call.kwargs, "out"))
    return _written(recorder, call.kwargs["out"], plain)


def _write_in_place(recorder: Recorder, call: Call) -> Any:
    bound = inspect.signature(call.function).bind(*call.args, **call.kwargs)
    if not bound.arguments.get("inplace"):
        return NotImplemented
    bound.arguments["inplace"] = False
    written = bound.arguments["input"]
    if recorder.writer.memory.is_sole_view(written, recorder.writer.made_by(written)):
        return _replaced(recorder, written, Call(call.function, bound.args, bound.kwargs))
    if torch.is_grad_enabled() and call.name not in _KEEP_NO_INPUT:
        # The write would destroy the input that the backward needs; torch copies it, too. Later inputs may require
        # gradients.
        bound.arguments["input"] = recorder.call(torch.Tensor.clone, (written,), {})
    return _written(recorder, written, Call(call.function, bound.args, bound.kwargs))


@makes_calls
def _replaced(recorder: Recorder, out: torch.Tensor, call: Call) -> Any:
    """Record `f(y, inplace=True)` as `f(y)`, which replaces `y` in later calls: no other tensor shares the memory of `y`."""
    result = recorder.distinct(call.made(), call.args, call.kwargs)
    recorder.record(call, result)
    out.copy_(result)
    recorder.writer.share_origin(out, result)
    return out


@makes_calls
def _written(recorder: Recorder, out: Any, call: Call) -> Any:
    """Record `f(x, out=y)` and `f(y, inplace=True)` as `y.copy_(f(...))`, which fx treats as a write."""
    name, where = call.name, recorder.writer.where
    if not isinstance(out, torch.Tensor):
        raise TraceError(f"`out` of {name!r} is a {type(out).__name__}; give one tensor. {where()}")
    result = call.made()
    if result.shape != out.shape:
        raise TraceError(f"`out` of {name!r} would be resized; give it the right shape. {where()}")
    result = recorder.distinct(result, call.args, call.kwargs)
    recorder.record(call, result)
    out.copy_(result)
    recorder.record(Call(torch.Tensor.copy_, (out, result), {}), out)
    return out


@functools.lru_cache(maxsize=1024)
def _has_inplace_flag(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    of_functional = getattr(function, "__module__", "") == "torch.nn.functional"
    return of_functional and "inplace" in getattr(code, "co_varnames", ())


# --- sizes and indices


def _stack_indices(recorder: Recorder, call: Call) -> Call:
    source, index, *rest = call.args
    return Call(call.function, (source, indexing.with_tensors(index, recorder.call), *rest), call.kwargs)


def _squeeze(recorder: Recorder, call: Call) -> Any:
    """Guard the sizes of a `squeeze`, as torch would keep an unknown size of 1; assumptions get a runtime check."""
    is_known = (lambda size: True) if recorder.decisions.specialised else is_backed
    for fact in indexing.squeeze_with_guard(is_known, *call.args, **call.kwargs):
        recorder.shape_env.assume(fact, f"`squeeze` at {recorder.writer.location()}")
    return NotImplemented


def _keep_sizes(recorder: Recorder, call: Call) -> Any:
    """Read the sizes of a tensor before its shape changes in place."""
    if id(call.args[0]) in recorder.aliases:
        recorder.fail(
            f"{call.name!r} changes the shape of a tensor that another call has given back as it was"
        )
    recorder.writer.read_sizes(call.args[0])
    return NotImplemented


def _unbind(recorder: Recorder, call: Call) -> Any:
    parts = indexing.unbind_with_guard(*call.args, **call.kwargs)
    if parts is None:
        return NotImplemented
    recorder.record(call, parts)
    return parts


def _take_numbers(recorder: Recorder, call: Call) -> Call:
    """Replace tensors without dimensions by their numbers, if these are known and used as sizes."""
    known = recorder.tensor_sizes.given_as_numbers(call.name, call.args, call.kwargs, recorder.item)
    return Call(call.function, *known)


def _assume_not_empty(recorder: Recorder, call: Call) -> Any:
    """Assume that no size is 0, so that the memory format of the output of `interpolate` is known: the graph checks this."""
    bound = inspect.signature(call.function).bind(*call.args, **call.kwargs).arguments
    size = bound.get("size")
    if not is_contiguous_or_false(bound["input"]):  # a contiguous input has a contiguous output
        for number in (*bound["input"].shape, *(size if isinstance(size, (tuple, list)) else (size,))):
            if is_unbacked(number):
                origin = f"`interpolate` at {recorder.writer.location()}"
                recorder.shape_env.assume(sympy.Ge(number.node.expr, 1), origin)
    return NotImplemented


# --- values


def _read_value(recorder: Recorder, call: Call) -> Any:
    """Make a call that turns the contents of a tensor into a Python value."""
    if call.name == "item" and call.args[0].dtype is torch.bool:
        frame = model_frame(sys._getframe(1))
        is_flag = frame is not None and compares_with_flag(frame.f_code)  # a symbolic number is not `True`
        return recorder.call(torch.Tensor.__bool__, call.args, {}) if is_flag else NotImplemented
    name = "__complex__" if call.name == "item" else call.name
    if call.name == "item" and not call.args[0].is_complex():
        return NotImplemented
    if _is_known((call.args, call.kwargs)):
        return NotImplemented
    if (truth := recorder.tensor_sizes.truth(name, call.args)) is not None:
        return truth
    if name in READS:
        return recorder.decisions.read(name, call.function, call.args, call.kwargs)
    array = recorder.decisions.array(call.args[0])
    return array.astype(call.args[1]) if len(call.args) > 1 else array


def _address(recorder: Recorder, call: Call) -> int:
    """A number that identifies the memory of a fake."""
    fake = call.args[0]
    recorder.queries.note(call.name, call.args, None)
    storage: int = storage_identity(fake.untyped_storage())
    offset = fake.storage_offset()
    return storage * 64 + (offset * fake.element_size() if isinstance(offset, int) else 0)


def _text(recorder: Recorder, call: Call) -> Any:
    if not _is_known(call.args[:1]):
        return recorder.decisions.text(call.name, *call.args)
    with unset_fake_temporarily():
        return call.function(call.args[0].constant, *call.args[1:])


def _is_known(value: Any) -> bool:
    """Tell whether all tensors in `value` are made from Python data, so that their numbers are known."""
    return all(isinstance(t, FakeTensor) and t.constant is not None for t in tensors_in(value))


# --- others


def _assert(recorder: Recorder, call: Call) -> None:
    """Record an assertion on the values of a tensor; an assertion on sizes is true, or a guard makes it true."""
    if any(isinstance(argument, torch.Tensor) for argument in (*call.args, *call.kwargs.values())):
        recorder.record(call, None)
    else:
        call.function(*call.args, **call.kwargs)


def _leave_out_generator(recorder: Recorder, call: Call) -> Any:
    """Drop `generator=None`, with which torch's overload does not support dynamic sizes; refuse any other generator."""
    if "generator" not in call.kwargs:
        return NotImplemented
    recorder.writer.argument(call.kwargs["generator"])
    return Call(call.function, call.args, _without(call.kwargs, "generator"))


def _without(kwargs: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key != name}


_IDIOMS: dict[str, tuple[Rewrite, ...]] = {
    "__deepcopy__": _idiom(idioms.deep_copy),
    "__reduce_ex__": _idiom(idioms.reduced),
    "one_hot": _idiom(idioms.one_hot),
    "new_tensor": _idiom(idioms.new_tensor),
    "affine_grid": _idiom(idioms.affine_grid),
}
_BY_FUNCTION: dict[Any, tuple[Rewrite, ...]] = {
    **dict.fromkeys(FROM_DATA, (make_from_data,)),
    **dict.fromkeys(
        (enter_autocast, exit_autocast),
        (lambda recorder, call: recorder.switches.autocast(call.function, call.args),),
    ),
    LIFT_FRESH: (make_legacy,),
    set_grad_enabled: (lambda recorder, call: recorder.switches.set_grad_enabled(call.args[0]),),
    torch_assert: (_assert,),
}
_BY_NAME: dict[str, tuple[Rewrite, ...]] = {
    **dict.fromkeys(TAKES_SIZES, (_take_numbers,)),
    "__getitem__": (
        *(_stack_indices, *_idiom(indexing.select_by_scalar)),
        *(_take_numbers, *_idiom(indexing.slice_in_turn)),
    ),
    "__setitem__": (_stack_indices, *_idiom(indexing.set_by_scalar)),
    **dict.fromkeys(("squeeze", "squeeze.default", "squeeze.dim", "squeeze.dims"), (_squeeze,)),
    **dict.fromkeys(("unbind", "unbind.int"), (_unbind,)),
    **dict.fromkeys(("t_", "transpose_", "swapaxes_", "swapdims_", "unsqueeze_"), (_keep_sizes,)),
    "interpolate": (_take_numbers, _assume_not_empty),
    **dict.fromkeys((*READS, *ARRAYS, "item"), (_read_value,)),
    **dict.fromkeys(("__format__", "__repr__"), (_text,)),
    "data_ptr": (_address,),
    **dict.fromkeys(idioms.SHAPES, (idioms.of_numbers,)),
    "istft": (idioms.istft,),
    "data.__get__": (idioms.data,),
    "data.__set__": (idioms.assigned_data,),
    "requires_grad.__set__": (idioms.assigned_requires_grad,),
    "grad.__get__": (idioms.gradient,),
}
