"""The recorder: a `TorchFunctionMode` that writes a node for each torch-level call of a forward on fake tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from fxopt.capture.capture_internals import (
    LIFT_FRESH,
    GuardOnDataDependentSymNode,
    PreDispatchTorchFunctionMode,
    alias,
    call_impl_of,
    parametrizations_cached,
    pop_mode_temporarily,
)
from fxopt.capture.data_dependence.branch_decisions import BranchDecisions
from fxopt.capture.data_dependence.hidden_branches import result_for_all_outcomes
from fxopt.capture.data_dependence.scalar_tensors import KnownScalars, holds_sizes, with_numbers
from fxopt.capture.fakes.call_cache import CallCache
from fxopt.capture.fakes.fake_mode import CaptureFakeMode
from fxopt.capture.nodes.call_targets import canonical, property_name
from fxopt.capture.nodes.graph_writer import GraphWriter
from fxopt.capture.nodes.source_location import makes_calls
from fxopt.capture.recording.dispatch_recorder import DispatchRecorder
from fxopt.capture.recording.mode_switches import ModeSwitches
from fxopt.capture.recording.property_reads import GRAD_QUERIES, PropertyReads
from fxopt.capture.recording.random_state import PythonRandomState
from fxopt.capture.recording.torch_call import (
    CHANGES_CONTAINER,
    PACKED,
    Call,
    has_packed,
    refusal,
    with_schema,
)
from fxopt.capture.runtime.input_specs import same_objects
from fxopt.effects import is_write
from fxopt.errors import TraceError
from fxopt.objects import tensors_in
from fxopt.torch_internals import (
    FakeTensor,
    forward_hooks_of,
    forward_pre_hooks_of,
    layer_backward_hooks_of,
    layer_backward_pre_hooks_of,
    version_of,
)

# Returns the value of a call, an equal call to continue with, or NotImplemented.
Rewrite = Callable[["Recorder", Call], Any]


@dataclasses.dataclass(eq=False)
class Recorder(PreDispatchTorchFunctionMode):
    """Records the calls of one forward.

    `decisions` answers Python's questions about values. `rewrites` returns the rewrites to try on a call, in order, before
    it runs unchanged. The class is a PreDispatchTorchFunctionMode because torch reports `autocast` only to those.
    """

    writer: GraphWriter
    fake_mode: CaptureFakeMode
    decisions: BranchDecisions
    tensor_sizes: KnownScalars
    memo: CallCache
    rewrites: Callable[[Call], Sequence[Rewrite]]

    def __post_init__(self) -> None:
        TorchFunctionMode.__init__(self)
        self.shell, self.shape_env = self.writer.shell, self.fake_mode.shape_env
        self.switches = ModeSwitches(self.writer)
        self.queries = PropertyReads(self.writer)
        self.draws = PythonRandomState()
        # True inside a transform of torch.func: calls are recorded as operators.
        self.below = False
        # The first TraceError; a forward may catch it, but the capture must still fail.
        self.failure: TraceError | None = None
        # Identity of the alias of a call's result -> the argument that the call returned unchanged.
        self.aliases: dict[int, torch.Tensor] = {}
        # Identity -> the result of `tensor.data`, and the tensor.
        self.data_of: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._opaque, self.records_layers_in_calls = 0, False
        self.hooked: set[str] = set()  # layers whose hooks or cached parametrizations ran unrecorded

    # --- calls

    @makes_calls
    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._opaque:
            return function(*args, **kwargs)
        if not all(issubclass(kind, torch.Tensor) for kind in types):
            return NotImplemented  # the model's own class handles the call, in calls that come here
        # Actions of torch inside a call (it enters modes, too) are not the model's.
        self._opaque += 1
        try:
            if self.shell.stale and any(id(t) in self.shell.stale for t in tensors_in((args, kwargs))):
                raise TraceError(f"the forward reads what an earlier call has left. {self.writer.where()}")
            if function is not LIFT_FRESH:  # it makes a fake of its argument itself
                args, kwargs = self.writer.faked((args, kwargs))
            return self.call(function, args, kwargs)
        except TraceError as error:
            self.failure = self.failure or error
            raise
        finally:
            self._opaque -= 1

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make one call, in a form that a graph can contain, and write its node."""
        call = Call(with_schema(function), args, kwargs)
        for rewrite in self.rewrites(call):
            outcome = rewrite(self, call)
            if isinstance(outcome, Call):
                call = outcome
            elif outcome is not NotImplemented:
                return outcome
        failure = self.shape_env.failure
        try:
            with self.shape_env.in_operator() as questions:
                result = self._result(call)
        except GuardOnDataDependentSymNode:
            if not holds_sizes(call.args, call.kwargs):
                raise
            # torch reads sizes from tensors where no mode sees it; pass the numbers instead.
            self.shape_env.failure = failure
            return self.call(call.function, *with_numbers(call.args, call.kwargs, self.item))
        self.tensor_sizes.keep(call.name, call.args, call.kwargs, result)
        if self.record(call, result) and not is_write(call.function):
            self.shape_env.settle_at_one(questions, call.function, call.args, call.kwargs, result)
        else:
            self.shape_env.guard(questions)
        return result

    @makes_calls
    def make_alias(self, tensor: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Make the alias of a tensor, and write its node if no recorded call makes the alias."""
        if self._opaque:
            return make()
        self._opaque += 1
        try:
            made = make()
            self.record(Call(alias, (tensor,), {}), made)
        finally:
            self._opaque -= 1
        return made

    def item(self, tensor: torch.Tensor) -> Any:
        """The number in a tensor, as a node."""
        return self.call(torch.Tensor.item, (tensor,), {})

    def _result(self, call: Call) -> Any:
        """The result of a call on fake tensors."""
        if is_write(call.function):
            return call.made()
        known = self.memo.function_call(call.function, call.args, call.kwargs)
        if known is not None and known.known:
            return known.recall()
        result = self.decisions.calls.result_of(functools.partial(call.function, *call.args, **call.kwargs))
        if isinstance(result, torch.Tensor):
            result = self.distinct(result, call.args, call.kwargs)
        if known is not None:
            known.remember(result)
        return result

    def record(self, call: Call, result: Any) -> bool:
        """Write the node of a call and return True; a call that only returned information to Python is noted, and gives False."""
        name, args = call.name, call.args
        about = property_name(call.function) if name == "__get__" else name
        if name == "__get__" and about in GRAD_QUERIES:
            self.queries.note(about, args, result)  # `grad_fn` may be None
            return False
        if reason := refusal(call, result):
            raise TraceError(f"the forward {reason} {self.writer.where()}")
        if result is not None and not self.writer.makes_something(result):
            self.queries.note(about, args, result)
            return False
        if name == "view" and any(isinstance(value, torch.dtype) for value in (*args, *call.kwargs.values())):
            self.queries.note_dtype(args[0])  # the view reinterprets the bytes
        op, target, *given = canonical(call.function, args, call.kwargs)
        self.writer.create(op, target, *self.writer.arguments(name, *given), result)
        return True

    def distinct(self, result: Any, args: Any, kwargs: Any) -> Any:
        """Return an alias of `result` if it is one of the arguments, as `x.to(dtype)` may be, so that it has its own node."""
        if not any(result is value for value in (*args, *kwargs.values())):
            return result
        alias = result.view_as(result)
        if isinstance(result, FakeTensor):
            alias.constant = result.constant
        self.aliases[id(alias)] = self.aliases.get(id(result), result)
        return alias

    # --- modules

    def call_layer(self, name: str, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a layer on fake tensors without recording its calls, and write one `call_module` node."""
        if self._opaque:
            return call_impl_of(module)(*args, **kwargs)
        if has_packed(args, kwargs):
            self.fail(PACKED)
        of_torch = type(module).__module__.startswith("torch.nn.")
        if self.shell.has_changed(module) or (self.records_layers_in_calls and of_torch):
            return self.call_container(name, module, args, kwargs)  # the graph would call the unchanged layer
        args, kwargs = self.writer.faked((args, kwargs))
        if parametrizations_cached(parametrize) or any(
            forward_hooks_of(part) or forward_pre_hooks_of(part) for part in module.modules()
        ):
            self.hooked.add(name)
        with self.writer.inside(name, module):
            node_args, node_kwargs = self.writer.arguments(name, args, kwargs)
        with self.paused():
            self.writer.containers.before_call((args, kwargs))
            given = self.writer.faked((args, kwargs))
            with self.shape_env.in_operator() as questions:
                result = self._layer_result(name, module, args, kwargs)
            if not same_objects(given, (args, kwargs)):
                self.fail(f"the layer {name!r} {CHANGES_CONTAINER}")
            self.shell.keep_settings(module)
            if module.training or self.writer.containers.any_in((args, kwargs)):
                self.shape_env.guard(questions)  # a second call would change something
            else:
                call = functools.partial(result_for_all_outcomes, self.shape_env, "", call_impl_of(module))
                self.shape_env.settle_at_one(questions, call, args, kwargs, result)
        with self.writer.inside(name, module):
            self.writer.create("call_module", name, node_args, node_kwargs, result)
            self.writer.containers.after_call((args, kwargs))
        return result

    @makes_calls
    def _layer_result(self, name: str, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """The result of a layer on fake tensors."""
        call = self.memo.layer_call(module, args, kwargs)
        if call is not None and call.known:
            return call.recall()
        versions = _versions((args, kwargs))
        draws = PythonRandomState() if call is None else None
        result = result_for_all_outcomes(
            self.shape_env, f"the layer {name!r}", call_impl_of(module), *args, **kwargs
        )
        if draws is not None:
            draws.take_back()  # the layer draws its numbers when the graph runs
        if isinstance(result, torch.Tensor) and versions == _versions((args, kwargs)):
            result = self.distinct(result, args, kwargs)
        if call is not None:
            call.remember(result)
        return result

    def call_container(self, name: str, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a module whose own forward is recorded."""
        if self._opaque:
            return call_impl_of(module)(*args, **kwargs)
        if isinstance(module, torch.nn.RNNBase) and has_packed(args, kwargs):
            self.fail(PACKED)
        if layer_backward_hooks_of(module) or layer_backward_pre_hooks_of(module):
            self.fail(
                f"module {name!r} has backward hooks, which a graph cannot hold: make it a leaf (leaf_modules=...)"
            )
        with self.writer.inside(name, module):
            return call_impl_of(module)(*args, **kwargs)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Run the block without recording it."""
        self._opaque += 1
        try:
            with pop_mode_temporarily():
                yield
        finally:
            self._opaque -= 1

    @contextlib.contextmanager
    def below_transforms(self) -> Iterator[None]:
        """Record the operators that the calls in the block dispatch to.

        Inside `torch.vmap` or `torch.func.grad`, a call gets wrapped tensors, which have no node; operators get plain ones.
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
        """Raise TraceError, and fail the capture even if the forward catches the error."""
        self.failure = self.failure or TraceError(f"{reason}. {self.writer.where()}")
        raise self.failure

    @property
    def recording(self) -> bool:
        """Tell whether calls are recorded at this moment."""
        return not self._opaque

    @contextlib.contextmanager
    def recorded_inside(self) -> Iterator[None]:
        """Record the calls that the block makes, inside a call of torch."""
        opaque, self._opaque = self._opaque, 0
        try:
            with self:
                yield
        finally:
            self._opaque = opaque


def _versions(value: Any) -> list[int]:
    return [version_of(tensor) for tensor in tensors_in(value) if not tensor.is_inference()]
