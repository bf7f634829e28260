"""One run of a model's forward on fake tensors."""

from __future__ import annotations

import contextlib
import contextvars
import decimal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fxopt.capture.capture_internals import (
    DataDependentOutputException,
    GuardOnDataDependentSymNode,
    enable_python_dispatcher,
    set_grad_enabled,
    shapes_config,
)
from fxopt.capture.data_dependence.branch_decisions import BranchDecisions
from fxopt.capture.data_dependence.branches import DataDependentBranch, LoopPositionError
from fxopt.capture.data_dependence.example_run import ExampleRun
from fxopt.capture.data_dependence.scalar_tensors import KnownScalars
from fxopt.capture.fakes.call_cache import CallCache
from fxopt.capture.fakes.fake_mode import CaptureFakeMode
from fxopt.capture.fakes.fake_model import FakeModel
from fxopt.capture.fakes.shape_env import LEARNED, CaptureShapeEnv
from fxopt.capture.fakes.size_constraints import DynamicDimensions
from fxopt.capture.fakes.snapshots import SnapshotMaker
from fxopt.capture.nodes.graph_writer import GraphWriter
from fxopt.capture.nodes.size_nodes import SizeNodes
from fxopt.capture.nodes.source_location import RUN_FORWARD, describe_location, is_model_code, is_own_code
from fxopt.capture.patches.interception import patched_torch
from fxopt.capture.recording.mode_switches import leave_open_modes
from fxopt.capture.recording.placeholders import Placeholders
from fxopt.capture.recording.random_state import reason
from fxopt.capture.recording.recorder import Recorder
from fxopt.capture.recording.request import Request
from fxopt.capture.recording.rewrites import rewrites_of
from fxopt.capture.runs.assigned_buffers import lend_copies, write_back
from fxopt.capture.runs.left_behind import remove_fakes
from fxopt.capture.runs.outside_state import ReachableState, refused_outside
from fxopt.capture.runs.run_result import RunResult
from fxopt.capture.runtime.checks import check_value
from fxopt.capture.runtime.traced_module import BY_FIRST_CALL
from fxopt.errors import GuardError, TraceError, error_text, raise_of_signal

# A stack with more frames of the model than this counts as endless recursion.
_MOST_NESTED = 100
_SYMBOLIC_SIZES = ("torch.fx.experimental.", "torch.utils._sympy.")
_DATA_DEPENDENT = (GuardOnDataDependentSymNode, DataDependentOutputException)


class ForwardRun:
    """Runs a model's forward once and records it."""

    recorder: Recorder
    placeholders: Placeholders

    def __init__(self, request: Request) -> None:
        self.request = request
        # The real value for each fake input.
        self.examples: dict[int, Any] = {}
        self.shape_env = CaptureShapeEnv()
        # `export` keeps the number in a 0-dimensional input unknown; otherwise torch would assume the example's number.
        self.fake_mode = CaptureFakeMode(shape_env=self.shape_env, allow_non_fake_inputs=True, export=True)
        self.graph = torch.fx.Graph()
        self.sizes = SizeNodes(self.graph, self.shape_env)
        self.free = DynamicDimensions(self.shape_env)
        self._example: ExampleRun | None = None
        self._variables = dict(request.earlier.variables)
        self._changed: dict[str, bool] = {}
        self._assigned: list[tuple[str, str]] = []

    def record(self) -> RunResult:
        """Run the forward on fake tensors; the graph of the result lacks only the input guard."""
        request, shape_env, known = self.request, self.shape_env, sys.exception()
        request.running.runs += 1
        recorder = self.recorder = self._recorder()
        surroundings = ReachableState(request.model, request.layers, request.reads_dict_keys)
        args, kwargs = self._fake_inputs()
        try:
            shape_env.location = recorder.writer.location
            shape_env.decide = recorder.decisions.size
            self.fake_mode.make_alias = recorder.make_alias
            self._run(recorder.shell.model, args, kwargs)
        except Exception as error:
            surroundings.restore()
            raise_of_signal(error, known)
            reason = _classified(error, recorder)
            if reason is error:
                raise
            if isinstance(error, LookupError) and recorder.decisions.running:
                raise LoopPositionError(str(reason), *recorder.decisions.running, error) from error
            raise reason from None if isinstance(reason, DataDependentBranch) else error
        finally:
            recorder.draws.take_back()
            changed_outside = surroundings.changed()
            fakes_left = remove_fakes(request, only_clear_caches=True)
            request.running.left_fakes |= bool(fakes_left)
            # The caches of torch keep each ShapeEnv forever, so it must not refer to the model.
            self.fake_mode.make_alias = None
            shape_env.location = str
            shape_env.decide = lambda expression: None
            recorder.decisions.constant.close()
            if self._example is not None:
                self._example.close()
        if any(changed_outside.values()):
            surroundings.restore()
        _raise_caught(recorder)
        result = self._result(recorder, changed_outside | self._changed)
        if fakes_left and not changed_outside:
            raise refused_outside(fakes_left[0])
        self.placeholders.check_unchanged()
        return result

    def _recorder(self) -> Recorder:
        """Build the recorder of this run."""
        request = self.request
        shell = FakeModel(
            request.model, self.fake_mode, request.layers, request.earlier, self._refuse_earlier
        )
        writer = GraphWriter(self.graph, self.sizes, shell, request.device(), request.running)
        if request.specialize:
            self._example = ExampleRun(
                request.model, request.layers, self.graph, writer.constants, self.examples
            )
        decisions = BranchDecisions(
            writer,
            self.fake_mode,
            request.answers,
            self._example,
            request.raising,
            request.reads_dict_keys,
            request.by_state,
        )
        tensor_sizes = KnownScalars(writer, self.shape_env, request.moving)
        memo = CallCache(self.fake_mode, request.results)
        recorder = Recorder(writer, self.fake_mode, decisions, tensor_sizes, memo, rewrites_of)
        shell.report_to(recorder)
        shell.take_hooks(request.earlier.hooks)
        return recorder

    def _result(self, recorder: Recorder, changed_outside: dict[str, Any]) -> RunResult:
        """Collect the results of the run."""
        shell, writer, decisions = recorder.shell, recorder.writer, recorder.decisions
        state, written = shell.state(recorder.aliases), shell.written()
        changes, outside = shell.changes(state), set(map(id, written.outside))
        unchanged, constants = shell.unchanged(), writer.constants
        for name in decisions.constant.decided_by:
            if name not in constants and name not in unchanged:
                raise TraceError(f"the forward decides on the value of {name!r}, which it writes.")
            if name in constants and id(constants[name]) in outside:
                raise TraceError(
                    "the forward decides on the value of a tensor that it writes, or may write under inference mode. Hold it in a buffer."
                )
        return RunResult(
            request=self.request,
            graph=self.graph,
            constants=writer.constants,
            made_by=writer.made_by,
            is_constant=decisions.constant.makes,
            placeholders=self.placeholders,
            free=self.free,
            shape_env=self.shape_env,
            sizes=self.sizes,
            reads=recorder.queries,
            checks=decisions.checks,
            branches=decisions.asked_at,
            drawn=self.fake_mode.drawn,
            changes=changes,
            state=state,
            own=shell.own(state, recorder.aliases),
            hooks=shell.hooks(),
            variables=self._variables,
            written=written,
            originals=shell.originals,
            unchanged=unchanged,
            changed_outside=changed_outside,
            moved=self.placeholders.moved() | recorder.tensor_sizes.written(),
            assigned=self._assigned,
        )

    def _refuse_earlier(self) -> None:
        reason = "the forward reads what an earlier call has left"
        if not hasattr(self, "recorder"):
            raise TraceError(f"{reason}.")  # while the model is copied: the value is the key of a dict
        self.recorder.fail(reason)

    def _fake_inputs(self) -> tuple[list[Any], dict[str, Any]]:
        """Write the placeholders and return the arguments of the forward, with fakes for the examples."""
        request = self.request
        self.placeholders = Placeholders(
            self.recorder.writer, self.fake_mode, self.free, request, self.examples
        )
        fakes = {
            name: self.placeholders.add(
                name, value, request.dimensions.get(name.lstrip("*")), **request.default(name)
            )
            for name, value in request.inputs.items()
        }
        if not request.at_one:
            self.free.check_example()
        if self.free.dimensions:
            # The call cache is enough: with dynamic sizes, torch's own cache of operators costs more than it saves.
            self.fake_mode.cache_enabled = False
        return request.arguments(fakes)

    def _run(self, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Run the forward, and write its output."""
        recorder = self.recorder
        with (
            shapes_config.patch(backed_size_oblivious=True),
            _process_state_kept(),
            self.fake_mode,
            # Lets torch's C++ operators compute dynamic sizes in Python if they cannot do so themselves.
            enable_python_dispatcher(),
            patched_torch(recorder, model),
            recorder,
            leave_open_modes(),
        ):
            decimal.getcontext()  # its first call, which sympy may make, sets a context variable
            context = contextvars.copy_context()
            for variable, value in self._variables.items():
                context.run(variable.set, value)
            before = dict(context)
            lent = lend_copies(recorder.writer, self.request.assigned)
            method, held = self.request.method, recorder.shell.held_by_name()
            called = getattr(model, method) if method else model
            # A call of the module enters this scope by itself.
            with recorder.writer.inside("", model) if method else contextlib.nullcontext():
                result = context.run(_run_forward, called, args, kwargs)
            write_back(recorder, lent, [args, kwargs, result, recorder.shell.outside])
            result = self._with_assigned(result, held)
            for source in recorder.draws.drawn_from():
                raise TraceError(f"{reason(source)}.")
            contents = SnapshotMaker(id)
            for variable, value in context.items():
                if contents(before.get(variable, variable)) != (left := contents(value)):
                    self._variables[variable] = value
                    self._changed[f"the context variable {variable.name!r}"] = bool(
                        left.tensors or left.sizes
                    )
            with recorder.paused():
                self._check_values()
                recorder.writer.add_output(result)

    def _with_assigned(self, result: Any, held: Mapping[tuple[str, str], Any]) -> Any:
        """Return the result of a method, with a tuple of the values that it assigned to attributes of modules."""
        shell = self.recorder.shell
        if not self.request.method:
            return result
        if gone := held.keys() - shell.held_by_name().keys():
            name = min(gone)[1]
            self.recorder.fail(
                f"the forward deletes {name!r}, or puts a parameter, buffer or module in its place"
            )
        found = shell.assigned(held, self.request.earlier.assigned)
        assigned = {place: value for place, value in found.items() if place[1] not in BY_FIRST_CALL}
        self._assigned = [*assigned]
        return (result, tuple(assigned.values())) if assigned else result

    def _check_values(self) -> None:
        """Write checks of what the forward assumes about numbers known only at runtime, such as a count of nonzeros."""
        for asserts in self.shape_env.deferred_runtime_asserts.values():
            for runtime_assert in asserts:
                if runtime_assert.msg == LEARNED:
                    continue
                condition = self.sizes.node_of(runtime_assert.expr)
                if condition is not True:
                    message = f"the graph assumes {runtime_assert.expr}, as does {runtime_assert.msg or 'the forward'}"
                    self.graph.call_function(check_value, (condition, message))


def _run_forward(shell: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return shell(*args, **kwargs)


assert _run_forward.__name__ == RUN_FORWARD


@contextlib.contextmanager
def _process_state_kept() -> Iterator[None]:
    """Restore the gradient mode and the default dtype after the block, in which `einsum` does not ask opt_einsum for a path.

    opt_einsum compares sizes, which would fix free ones. The graph calls `einsum`, which asks opt_einsum in each run.
    """
    grad_enabled, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    paths: Any = torch.backends.opt_einsum
    searches, paths.enabled = paths.enabled, False
    try:
        yield
    finally:
        paths.enabled = searches
        set_grad_enabled(grad_enabled)
        torch.set_default_dtype(dtype)


def _classified(error: Exception, recorder: Recorder) -> Exception:
    """Return the error to raise for an exception of the forward: an open branch, or a TraceError with the model's line."""
    decisions = recorder.decisions
    if decisions.open:
        return decisions.open
    if isinstance(error, TraceError):
        return error
    if decisions.text_question and isinstance(error, (KeyError, AttributeError)):
        return decisions.text_question
    # A GuardError comes from a graph module inside the model, which refuses these inputs.
    return error if _is_own(error) and not isinstance(error, GuardError) else _with_line(error)


def _is_own(error: Exception) -> bool:
    """Tell whether the capture's own code raised an exception: a bug of fxopt, not a limit of the model."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, RecursionError):
        called = [code for code in codes if is_model_code(code.co_filename)]
        return len(called) < _MOST_NESTED  # else the model calls itself
    return is_own_code(codes[-1])


def _raise_caught(recorder: Recorder) -> None:
    """Raise errors that the forward caught, and decisions on texts: with real tensors, it may take another path."""
    if recorder.decisions.open or recorder.decisions.text_question:
        raise recorder.decisions.open or recorder.decisions.text_question  # type: ignore[misc]
    if recorder.failure or recorder.shape_env.failure:
        raise recorder.failure or _with_line(recorder.shape_env.failure)


def _with_line(error: Any) -> TraceError:
    """Return an exception of the forward as a TraceError that names the model's line."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    after = next((i for i, f in enumerate(frames) if f.f_code.co_name == RUN_FORWARD), 0)
    own = [frame for frame in frames[after:] if is_model_code(frame.f_code.co_filename)]
    # If no frame is the model's, a layer of torch fails, called only by other layers of torch.
    callers = [frame.f_locals.get("self") for frame in frames[after:] if frame.f_code.co_name == "forward"]
    layer = next((m for m in reversed(callers) if isinstance(m, torch.nn.Module)), None)
    in_layer = "In the forward." if layer is None else f"In {type(layer).__name__}({layer.extra_repr()})."
    where = describe_location(own[-1], None) if own else in_layer
    if isinstance(error, _DATA_DEPENDENT):
        return TraceError(
            f"the forward decides on the value of a tensor, which is unknown at capture. {where} Compute with "
            "`torch.where`, pass the decision as an argument, or make the module a leaf (leaf_modules=...)."
        )
    if frames[-1].f_globals.get("__name__", "").startswith(_SYMBOLIC_SIZES):
        return TraceError(
            f"torch's arithmetic on symbolic sizes failed. {where} {type(error).__name__}: {str(error).rstrip('.')}. Fix these "
            "sizes: leave them out of dynamic_shapes."
        )
    return TraceError(f"the forward failed under capture. {where} {error_text(error)}")
