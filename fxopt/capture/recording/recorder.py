"""The recorder: a `TorchFunctionMode` that writes each torch-level call of a forward as a node.

The forward runs on fake tensors, so Python sees ordinary tensors and nothing is computed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
from torch._prims_common import is_contiguous_or_false
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, free_unbacked_symbols
from torch.fx.node import _side_effectful_functions
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily

from fxopt.capture.data_dependence.branch_decisions import ARRAYS, READS, BranchDecisions
from fxopt.capture.data_dependence.indexing import are_numbers, select_by_scalar, with_tensors
from fxopt.capture.data_dependence.scalar_tensors import KnownScalars, holds_sizes, with_numbers
from fxopt.capture.fakes.call_cache import CallCache
from fxopt.capture.fakes.dynamic_shapes import SymbolicNumber
from fxopt.capture.fakes.fake_mode import CaptureFakeMode
from fxopt.capture.fakes.fake_model import FakeModel
from fxopt.capture.fakes.shape_env import CaptureShapeEnv
from fxopt.capture.nodes.call_targets import canonical, property_name
from fxopt.capture.nodes.graph_writer import GraphWriter
from fxopt.capture.recording.dispatch_recorder import DispatchRecorder
from fxopt.capture.recording.higher_order import expansion
from fxopt.capture.recording.idioms import deep_copy, new_tensor, one_hot, reduced, with_torch_values
from fxopt.capture.recording.mode_switches import ModeSwitches
from fxopt.capture.recording.property_reads import GRAD_QUERIES, PropertyReads
from fxopt.capture.recording.random_state import PythonRandomState
from fxopt.capture.recording.squeeze import assumed_kept, squeeze_with_guard, unbind_with_guard
from fxopt.capture.runtime.checks import check_value
from fxopt.errors import TraceError
from fxopt.objects import tensors_in
from fxopt.operators import is_write_name

_RESHAPES_IN_PLACE = {
    *("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_"),
    *("resize_", "resize_as_", "set_", "as_strided_"),
}
# Functions with a flag `inplace` whose backward needs nothing of the input.
_KEEP_NO_INPUT = {
    "relu",
    "dropout",
    "alpha_dropout",
    "feature_alpha_dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
}
_HOOKS = {"register_hook", "register_post_accumulate_grad_hook"}
_DUAL = {"_make_dual", "_unpack_dual"}
_FROM_DATA = {torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy}
# All that is seen of `torch.IntTensor([1])` and the like: torch makes a fake of a tensor.
_LEGACY_FROM_DATA: Any = torch.ops.aten.lift_fresh.default

_IDIOMS: dict[str, Callable[..., Any]] = {
    "__deepcopy__": deep_copy,
    "__reduce_ex__": reduced,
    "one_hot": one_hot,
    "new_tensor": new_tensor,
}

# What an operator asked of the sizes, with the answers.
Questions = dict[Any, bool]


class Recorder(PreDispatchTorchFunctionMode):
    """Records the calls of one forward.

    `writer` writes the nodes; `shell` knows what the layers were like before the forward; `decisions` answers what
    Python asks of values. It is a PreDispatchTorchFunctionMode because torch reports `autocast` to those alone.
    """

    def __init__(
        self,
        writer: GraphWriter,
        shape_env: CaptureShapeEnv,
        fake_mode: CaptureFakeMode,
        shell: FakeModel,
        decisions: BranchDecisions,
        tensor_sizes: KnownScalars,
        memo: CallCache,
    ) -> None:
        TorchFunctionMode.__init__(self)
        self.writer = writer
        self.decisions = decisions
        self.tensor_sizes = tensor_sizes
        self.memo = memo
        self._fake_mode = fake_mode
        self.switches = ModeSwitches(writer)
        self.queries = PropertyReads(writer)
        self.draws = PythonRandomState()
        # Inside a transform of torch.func: calls are seen as the operators they come down to.
        self.below = False
        # The first error of ours; a forward may catch it, but a graph must not come of it.
        self.failure: TraceError | None = None
        self._shape_env = shape_env
        self._shell = shell
        # For what came out of a call unchanged, what went in.
        self.aliases: dict[int, torch.Tensor] = {}
        self._opaque = 0
        # By identity: what `tensor.data` gave, and the tensor.
        self._data_of: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    # --- calls

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._opaque:
            return function(*args, **kwargs)
        # What torch does inside a call (it enters modes, too) is not the model's doing.
        self._opaque += 1
        try:
            if self._shell.stale and any(id(t) in self._shell.stale for t in tensors_in((args, kwargs))):
                raise TraceError(f"the forward reads what an earlier call has left. {self.writer.where()}")
            if function is _LEGACY_FROM_DATA and type(args[0]) is torch.Tensor:
                return self._legacy_tensor(args[0])
            return self._call(function, self.writer.faked(args), self.writer.faked(kwargs))
        except TraceError as error:
            self.failure = self.failure or error
            raise
        finally:
            self._opaque -= 1

    def _call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make one call, and write the node for it."""
        name = getattr(function, "__name__", "")
        if name.startswith("_record_function_"):
            return function(*args, **kwargs)  # a name for the profiler
        if name in _IDIOMS and (made := _IDIOMS[name](self._call, *args, **kwargs)) is not NotImplemented:
            return made
        if function not in _FROM_DATA:
            args = tuple(with_torch_values(arg, self._call) for arg in args)
        kwargs = {key: with_torch_values(arg, self._call) for key, arg in kwargs.items()}
        if name == "__set__" and (property_set := self._set_property(function, *args)) is not None:
            return property_set[0]
        if name == "__get__" and property_name(function) == "grad":
            return self._gradient(*args)
        if name == "item" and args[0].is_complex():
            name = "__complex__"
        if function is _enter_autocast or function is _exit_autocast:
            return self.switches.autocast(function, args)
        if function is torch._C._set_grad_enabled:
            return self.switches.set_grad_enabled(args[0])
        if isinstance(function, torch._ops.HigherOrderOperator):
            return self._higher_order(function, args, kwargs)
        if function in _FROM_DATA and not contains(
            args[0] if args else kwargs["data"], (torch.Tensor, *SymbolicNumber)
        ):
            return self._tensor_from_data(function, args, kwargs)
        if function is torch.tensor and args and are_numbers(args[0]) and not kwargs.get("requires_grad"):
            return self._tensor_from_numbers(args[0], kwargs)
        if name == "__get__" and property_name(function) == "data":
            # It is the same memory, and counts its writes by itself: what is known of the one would not be forgotten.
            data = args[0].detach()
            self.record(function, args, kwargs, data)
            self._data_of[id(data)] = data, args[0]
            return data
        if kwargs.get("out") is not None:
            out = kwargs["out"]
            return self._written(out, function, args, {key: kwargs[key] for key in kwargs if key != "out"})
        if _has_inplace_flag(function):
            bound = inspect.signature(function).bind(*args, **kwargs)
            if bound.arguments.get("inplace"):
                bound.arguments["inplace"] = False
                written = bound.arguments["input"]
                if torch.is_grad_enabled() and written.requires_grad and name not in _KEEP_NO_INPUT:
                    # What backward needs of the input would be overwritten; torch copies it, too.
                    bound.arguments["input"] = self._call(torch.Tensor.clone, (written,), {})
                return self._written(written, function, bound.args, bound.kwargs)
        if name in ("__getitem__", "__setitem__"):
            args = (args[0], with_tensors(args[1], self._call), *args[2:])
        if name == "__getitem__" and (result := select_by_scalar(args[0], args[1], self._call)) is not None:
            return result
        base = name.partition(".")[0]
        if base == "squeeze" and (result := self._squeezed(*args, **kwargs)) is not None:
            return result
        if base == "unbind" and (parts := unbind_with_guard(*args, **kwargs)) is not None:
            self.record(function, args, kwargs, parts)
            return parts
        if (name in READS or name in ARRAYS) and not _is_known((args, kwargs)):
            if (truth := self.tensor_sizes.truth(name, args)) is not None:
                return truth
            return self._read_values(name, function, args, kwargs)
        if name == "data_ptr":
            self.queries.note(name, args, None)
            return _address(args[0])
        if name in ("__format__", "__repr__"):
            if not _is_known(args[:1]):
                return self.decisions.text(name, *args)
            with unset_fake_temporarily():
                return function(args[0].constant, *args[1:])
        if function is torch._assert and isinstance(args[0], torch.Tensor):
            self.record(function, args, kwargs, None)
            return None
        if kwargs.get("generator", self) is None:
            # With this argument torch takes an overload that knows no free sizes.
            kwargs = {key: value for key, value in kwargs.items() if key != "generator"}
        args, kwargs = self.tensor_sizes.given_as_numbers(name, args, kwargs, self._item)
        if name == "interpolate":
            self._assume_not_empty(*args, **kwargs)
        failure = self._shape_env.failure
        try:
            result, questions = self._result(function, args, kwargs)
        except GuardOnDataDependentSymNode:
            if not holds_sizes(args, kwargs):
                raise
            # torch reads sizes that are tensors where no mode sees it; give it the numbers.
            self._shape_env.failure = failure
            args, kwargs = with_numbers(args, kwargs, self._item)
            return self._call(function, args, kwargs)
        self.tensor_sizes.keep(name, args, kwargs, result)
        if base == "squeeze":
            for fact in assumed_kept(*args, **kwargs):
                self._shape_env.assume(fact, f"`squeeze` at {self.writer.location()}")
        if self.record(function, args, kwargs, result) and not is_write_name(name):
            self._shape_env.settle_at_one(questions, function, args, kwargs, result)
        else:
            self._shape_env.guard(questions)
        return result

    def _result(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Questions]:
        """What a function gives on fake tensors, and what it has asked of the sizes."""
        writing = is_write_name(getattr(function, "__name__", ""))
        call = None if writing else self.memo.function_call(function, args, kwargs)
        if call is not None and call.known:
            return call.recall(), {}
        with self._shape_env.in_operator() as questions:
            if writing:
                result = function(*args, **kwargs)
            else:
                result = self.decisions.calls.result_of(functools.partial(function, *args, **kwargs))
        if isinstance(result, torch.Tensor) and not writing:
            result = self._distinct(result, args, kwargs)
        if call is not None:
            call.remember(result, questions)
        return result, questions

    def record(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
        """Write the node for a call that has been made, and say so; a call that only asked a question has none."""
        name = getattr(function, "__name__", "")
        if name == "__set__":
            raise TraceError(
                f"the forward assigns to the attribute {function.__self__.__name__!r} of a tensor, which a graph "
                f"cannot hold. {self.writer.where()}"
            )
        if name in _HOOKS:
            raise TraceError(
                f"the forward calls {name!r}: a graph cannot hold what it does to gradients. {self.writer.where()}"
            )
        if name in _DUAL:
            raise TraceError(
                "the forward uses forward-mode AD (torch.autograd.forward_ad), whose levels a graph cannot hold: "
                f"torch.func.jvp can be captured. {self.writer.where()}"
            )
        if name == "__get__" and property_name(function) in GRAD_QUERIES:
            self.queries.note(property_name(function), args, result)  # `grad_fn` may be None
            return False
        if result is None:
            if (
                not is_write_name(name)
                and name != "retain_grad"
                and function not in _side_effectful_functions
            ):
                raise TraceError(
                    f"the forward calls {name!r}, which a graph cannot hold. {self.writer.where()}"
                )
        elif not self.writer.makes_something(result):
            self.queries.note(property_name(function) if name == "__get__" else name, args, result)
            return False
        if name in _RESHAPES_IN_PLACE and any(isinstance(size, torch.SymInt) for size in args[0].shape):
            raise TraceError(
                f"the forward changes the shape of a tensor in place ({name!r}), while its sizes are free: sizes that "
                f"were read before would be read from the changed tensor. Use {name.rstrip('_')!r}. {self.writer.where()}"
            )
        op, target, node_args, node_kwargs = canonical(function, args, kwargs)
        node_args, node_kwargs = self.writer.arguments(name, node_args, node_kwargs)
        self.writer.create(op, target, node_args, node_kwargs, result)
        return True

    def call_layer(self, name: str, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a layer on fake tensors, out of sight, and write one `call_module` node."""
        if self._opaque:
            return module._call_impl(*args, **kwargs)
        if self._shell.has_changed(module):
            return self.call_container(name, module, args, kwargs)  # the graph would call the model's own
        args, kwargs = self.writer.faked(args), self.writer.faked(kwargs)
        containers = self.writer.containers
        with self.writer.inside(name, module):
            node_args, node_kwargs = self.writer.arguments(name, args, kwargs)
        with self.paused():
            containers.before_call((args, kwargs))
            result, questions = self._layer_result(module, args, kwargs)
            self._shell.keep_settings(module)
            if module.training or containers.any_in((args, kwargs)):
                self._shape_env.guard(questions)  # a second call would change something
            else:
                self._shape_env.settle_at_one(questions, module._call_impl, args, kwargs, result)
        with self.writer.inside(name, module):
            self.writer.create("call_module", name, node_args, node_kwargs, result)
            containers.after_call((args, kwargs))
        return result

    def _layer_result(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Questions]:
        """What a layer gives on fake tensors, and what it has asked of the sizes."""
        call = self.memo.layer_call(module, args, kwargs)
        if call is not None and call.known:
            return call.recall(), {}
        versions = _versions((args, kwargs))
        draws = PythonRandomState() if call is None else None
        with self._shape_env.in_operator() as questions:
            result = module._call_impl(*args, **kwargs)
        if draws is not None:
            draws.take_back()  # the layer draws them when the graph runs
        if isinstance(result, torch.Tensor) and versions == _versions((args, kwargs)):
            result = self._distinct(result, args, kwargs)
        if call is not None:
            call.remember(result, questions)
        return result, questions

    def call_container(self, name: str, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a module whose own forward is recorded."""
        if self._opaque:
            return module._call_impl(*args, **kwargs)
        if module._backward_hooks or module._backward_pre_hooks:
            self.fail(
                f"module {name!r} has backward hooks, which a graph cannot hold: make it a leaf (leaf_modules=...)"
            )
        with self.writer.inside(name, module):
            return module._call_impl(*args, **kwargs)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Run the block without recording it."""
        self._opaque += 1
        try:
            with _pop_mode_temporarily():
                yield
        finally:
            self._opaque -= 1

    @contextlib.contextmanager
    def below_transforms(self) -> Iterator[None]:
        """Record the operators to which the calls of the block come down.

        Inside `torch.vmap` or `torch.func.grad` a call is made on wrapped tensors, which stand for slices or for tensors
        of another level that no node has; the operators that torch makes of it are calls on whole tensors.
        """
        self.below = True
        operators = DispatchRecorder(self.writer)
        try:
            with self.paused(), operators:
                yield
        finally:
            self.below = False
            operators.restore_gradients()

    def fail(self, reason: str) -> None:
        """Raise TraceError, also where the forward would catch it."""
        self.failure = self.failure or TraceError(f"{reason}. {self.writer.where()}")
        raise self.failure

    @property
    def recording(self) -> bool:
        """Tell whether calls are recorded at this moment."""
        return not self._opaque

    # --- special calls

    def _item(self, tensor: torch.Tensor) -> Any:
        """The number in a tensor, as a node."""
        return self._call(torch.Tensor.item, (tensor,), {})

    def _higher_order(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the calls that a higher-order operator stands for."""
        expanded = expansion(function)
        if expanded is None:
            raise TraceError(
                f"the forward calls the higher-order operator {function.name()!r}, which a graph cannot hold. "
                f"{self.writer.where()}"
            )
        opaque, self._opaque = self._opaque, 0
        try:
            with self:
                return expanded(*args, **kwargs)
        finally:
            self._opaque = opaque

    def _set_property(self, function: Any, tensor: torch.Tensor, value: Any) -> tuple[Any] | None:
        """Assign to an attribute of a tensor in a form that a graph can hold; None where there is none."""
        name = property_name(function)
        if name == "data" and self._data_of.get(id(value), (None, None))[1] is tensor:
            return (None,)  # `tensor.data *= 2` has written into its memory, and assigns what is there
        if name == "requires_grad" and not self._shell.real(tensor)[0]:
            return (self._call(torch.Tensor.requires_grad_, (tensor, value), {}),)
        return None

    def _gradient(self, tensor: torch.Tensor) -> None:
        """`tensor.grad`, which a graph takes to be None, and checks."""
        _, real = self._shell.real(tensor)
        if real is not None and real.is_leaf and real.grad is not None:
            raise TraceError(
                f"the forward reads a gradient, which a graph cannot hold. {self.writer.where()}"
            )
        if tensor.is_leaf:
            gradient = self.writer.create(
                "call_function", getattr, (self.writer.argument(tensor), "grad"), {}, None
            )
            is_none = self.writer.create("call_function", operator.is_, (gradient, None), {}, None)
            message = f"the graph assumes that a gradient is None. {self.writer.where()}"
            self.writer.create("call_function", check_value, (is_none, message), {}, None)

    def _read_values(self, name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that makes a Python value of what is in a tensor."""
        if name in READS:
            return self.decisions.read(name, function, args, kwargs)
        array = self.decisions.array(args[0])
        return array.astype(args[1]) if len(args) > 1 else array

    def _tensor_from_data(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        with unset_fake_temporarily():
            real = function(*args, **kwargs)
        return self._fresh(real, function(*args, **kwargs))

    def _legacy_tensor(self, real: torch.Tensor) -> torch.Tensor:
        """The fake that torch will take for this tensor, made by a legacy constructor from Python data."""
        mode = self._fake_mode
        with unset_fake_temporarily():
            before = real.clone()  # torch carries out what is done to a number that it knows
        known = mode.may_turn_const(real)
        return self._fresh(
            before, mode.fake_tensor_converter.from_real_tensor(mode, real, make_constant=known)
        )

    def _fresh(self, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
        """A tensor whose numbers are known, and which is made anew at each call of the graph if it is written."""
        node = self.writer.create("get_attr", self.writer.constant(real), (), {}, fake)
        self.writer.fresh.append((fake, fake._version, node))
        return fake

    def _squeezed(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """What `squeeze` gives where torch would keep a free size of 1."""
        select, squeeze = (
            lambda *given, f=f: self._call(f, given, {}) for f in (torch.Tensor.select, torch.Tensor.squeeze)
        )
        if self.decisions.specialised:
            kwargs["is_known"] = lambda size: True
        return squeeze_with_guard(select, squeeze, *args, **kwargs)

    def _assume_not_empty(self, input: torch.Tensor, size: Any = None, *_: Any, **__: Any) -> None:
        """The memory format of what `interpolate` gives is known if no size is 0: the graph checks that."""
        if is_contiguous_or_false(input):
            return  # so is what it gives
        for number in (*input.shape, *(size if isinstance(size, (tuple, list)) else (size,))):
            if isinstance(number, torch.SymInt) and free_unbacked_symbols(number):
                origin = f"`interpolate` at {self.writer.location()}"
                self._shape_env.assume(sympy.Ge(number.node.expr, 1), origin)

    def _distinct(self, result: Any, args: Any, kwargs: Any) -> Any:
        """`result`, as an object of its own if it is one of the arguments.

        `x.to(dtype)` or dropout in eval mode may return `x` itself. The two are different nodes: what comes out of
        the call must not be taken for what went in.
        """
        if not any(result is value for value in (*args, *kwargs.values())):
            return result
        alias = result.view_as(result)
        if isinstance(result, FakeTensor):
            alias.constant = result.constant
        self.aliases[id(alias)] = self.aliases.get(id(result), result)
        return alias

    def _tensor_from_numbers(self, numbers: list[torch.Tensor], options: dict[str, Any]) -> torch.Tensor:
        """`torch.tensor` of tensors with one number each: it copies the numbers, and gives no gradient to them."""
        stacked = self._call(torch.stack, (list(numbers),), {})
        if stacked.requires_grad:
            stacked = self._call(torch.Tensor.detach, (stacked,), {})
        options = {name: value for name, value in options.items() if value is not None}
        made: torch.Tensor = self._call(torch.Tensor.to, (stacked,), options) if options else stacked
        return made

    def _written(self, out: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`f(x, out=y)` and `f(y, inplace=True)` as `y.copy_(f(...))`, of which fx knows that it writes."""
        if not isinstance(out, torch.Tensor):
            raise TraceError(
                f"`out` of {function.__name__!r} is a {type(out).__name__}; give one tensor. {self.writer.where()}"
            )
        result = function(*args, **kwargs)
        if result.shape != out.shape:
            raise TraceError(
                f"`out` of {function.__name__!r} would be resized; give it the right shape. {self.writer.where()}"
            )
        result = self._distinct(result, args, kwargs)
        self.record(function, args, kwargs, result)
        out.copy_(result)
        self.record(torch.Tensor.copy_, (out, result), {}, out)
        return out


@functools.lru_cache(maxsize=1024)
def _has_inplace_flag(function: Any) -> bool:
    return getattr(function, "__module__", "") == "torch.nn.functional" and "inplace" in getattr(
        getattr(function, "__code__", None), "co_varnames", ()
    )


def _is_known(value: Any) -> bool:
    """Tell whether the tensors in `value` are made from Python data, so that their numbers are known."""
    return all(isinstance(t, FakeTensor) and t.constant is not None for t in tensors_in(value))


def _address(fake: torch.Tensor) -> int:
    """A number that tells the memory of one fake from that of another."""
    storage: int = fake.untyped_storage()._cdata
    offset = fake.storage_offset()
    return storage * 64 + (offset * fake.element_size() if isinstance(offset, int) else 0)


def _versions(value: Any) -> list[int]:
    return [tensor._version for tensor in tensors_in(value) if not tensor.is_inference()]


def contains(data: Any, types: Any) -> bool:
    """Tell whether there is an instance of these types in nested sequences."""
    if isinstance(data, (list, tuple)):
        return any(contains(item, types) for item in data)
    return isinstance(data, types)
