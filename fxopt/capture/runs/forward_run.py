"""One run of a model's forward on fake tensors, and the module that comes of it."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
import torch.fx.experimental._config
from torch._dispatch.python import enable_python_dispatcher

from fxopt.capture.data_dependence.branch_decisions import Body, BranchDecisions
from fxopt.capture.data_dependence.branches import DataDependentBranch, PlaceError
from fxopt.capture.data_dependence.example_run import ExampleRun
from fxopt.capture.data_dependence.scalar_tensors import KnownScalars
from fxopt.capture.fakes.call_cache import CallCache
from fxopt.capture.fakes.fake_mode import CaptureFakeMode
from fxopt.capture.fakes.fake_model import Changes, FakeModel, Written
from fxopt.capture.fakes.module_tree import copy_tree, recorded_modules
from fxopt.capture.fakes.shape_env import LEARNED, CaptureShapeEnv
from fxopt.capture.fakes.size_constraints import Condition, DynamicDimensions
from fxopt.capture.nodes.completion import check_names, complete_metadata
from fxopt.capture.nodes.graph_writer import GraphWriter
from fxopt.capture.nodes.size_nodes import SizeNodes
from fxopt.capture.nodes.source_location import RUN_FORWARD
from fxopt.capture.patches.interception import patched_torch
from fxopt.capture.recording.placeholders import Placeholders
from fxopt.capture.recording.random_state import reason
from fxopt.capture.recording.recorder import Recorder
from fxopt.capture.recording.request import Request
from fxopt.capture.recording.rewrites import rewrites_of
from fxopt.capture.runs.failures import classify_error, raise_caught
from fxopt.capture.runs.left_behind import remove_fakes
from fxopt.capture.runs.outside_state import ReachableState, refused_outside
from fxopt.capture.runtime.checks import check_value
from fxopt.capture.runtime.input_guard import InputGuard
from fxopt.capture.runtime.size_guards import SizeGuard
from fxopt.capture.runtime.traced_module import TracedModule
from fxopt.errors import TraceError

_fx_config: Any = torch.fx.experimental._config


class ForwardRun:
    """One run of a model's forward, recorded."""

    recorder: Recorder
    placeholders: Placeholders
    # What the forward has changed in the state of the model, all of that state, and the hooks of each module.
    changes: Changes
    state: Changes
    hooks: dict[str, Any]
    written: Written
    unchanged_buffers: set[str]
    # What it has changed outside of the model, in words, and whether it has put a tensor there.
    changed_outside: dict[str, bool]
    # By line: what is done after each question there, and may be left out.
    left_out: dict[str, list[Body]]

    def __init__(self, request: Request) -> None:
        self.request = request
        # The real value for each fake input.
        self.examples: dict[int, Any] = {}
        self.shape_env = CaptureShapeEnv()
        # `export` leaves the number in an input of no dimensions unknown: torch would guess the one of the example.
        self.fake_mode = CaptureFakeMode(shape_env=self.shape_env, allow_non_fake_inputs=True, export=True)
        self.graph = torch.fx.Graph()
        self.sizes = SizeNodes(self.graph, self.shape_env)
        self.free = DynamicDimensions(self.shape_env)
        self.left_out = {}

    def record(self) -> None:
        """Run the forward on fake tensors; the graph is complete but for the guard."""
        request, shape_env = self.request, self.shape_env
        device = request.device()
        shell = FakeModel(request.model, self.fake_mode, request.layers, request.earlier, request.known)
        writer = GraphWriter(self.graph, self.sizes, shell, device, request.running)
        example = None
        if request.specialize:
            example = ExampleRun(request.model, request.layers, self.graph, writer.constants, self.examples)
        decisions = BranchDecisions(
            writer,
            self.sizes,
            self.fake_mode,
            request.answers,
            example,
            request.reads_texts,
            request.raising,
            request.knows_keys,
        )
        tensor_sizes = KnownScalars(writer, shell.real, request.moving)
        memo = CallCache(self.fake_mode, request.results)
        recorder = self.recorder = Recorder(
            writer, shape_env, self.fake_mode, shell, decisions, tensor_sizes, memo, rewrites_of
        )
        shell.report_to(recorder)
        shell.take_hooks(request.hooks)
        surroundings = ReachableState(
            (module for _, module in recorded_modules(request.model, request.layers)), request.knows_keys
        )
        args, kwargs = self._fake_inputs()
        try:
            shape_env.location = writer.location
            shape_env.decide = decisions.size
            self._run(shell.model, args, kwargs)
        except Exception as error:
            reason = classify_error(error, recorder)
            if reason is error:
                raise
            if isinstance(error, LookupError) and decisions.running:
                raise PlaceError(str(reason), *decisions.running, error) from error
            raise reason from None if isinstance(reason, DataDependentBranch) else error
        finally:
            recorder.draws.take_back()
            self.changed_outside = surroundings.changed()
            fakes_left = remove_fakes(request.running, from_caches_alone=True)
            request.running.left_fakes |= bool(fakes_left)
            # torch keeps each ShapeEnv in its caches for good; it must not keep the model with it.
            shape_env.location = str
            shape_env.decide = lambda expression: None
            if example is not None:
                example.close()
        raise_caught(recorder, shape_env)
        self.hooks, self.unchanged_buffers = shell.hooks(), shell.unchanged_buffers()
        self.written = shell.written()
        self.changes, self.state = shell.changes(recorder.aliases), shell.state(recorder.aliases)
        if fakes_left and not self.changed_outside:
            raise refused_outside(fakes_left[0])
        self.placeholders.check_unchanged()

    def relied_on(self) -> list[Condition]:
        """The conditions on sizes under which the forward makes the calls that it has made."""
        conditions = self.free.assumed()
        layout_read_at = self.recorder.queries.layout_read_at
        if layout_read_at is not None:
            # Strides differ at sizes of 1, and asking for them leaves no guard.
            sizes = [symbol for symbol, free in self.free.roots() if free.dim is not None]
            conditions += [(sympy.Ne(symbol, 1), layout_read_at) for symbol in sizes]
        return conditions

    def _fake_inputs(self) -> tuple[list[Any], dict[str, Any]]:
        """Write the placeholders; the arguments of the forward, with fakes for the examples."""
        request = self.request
        self.placeholders = Placeholders(
            self.recorder.writer, self.fake_mode, self.shape_env, self.free, request, self.examples
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
            # The memo of calls is enough; torch's own, of operators, on free sizes costs more than it saves.
            self.fake_mode.cache_enabled = False
        return request.arguments(fakes)

    def _run(self, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Run the forward, and write its output."""
        recorder = self.recorder
        with (
            _fx_config.patch(backed_size_oblivious=True),
            _process_state_kept(),
            self.fake_mode,
            # Lets torch's C++ operators compute with free sizes in Python where they cannot themselves.
            enable_python_dispatcher(),
            patched_torch(recorder, model),
            recorder,
        ):
            # Context variables that the forward sets are set for this run.
            result = contextvars.copy_context().run(_run_forward, model, args, kwargs)
            for source in recorder.draws.drawn_from():
                raise TraceError(f"{reason(source)}.")
            with recorder.paused():
                self._check_values()
                recorder.writer.add_output(result)

    def _check_values(self) -> None:
        """Write what the forward assumes of numbers that only a run knows, such as the number of nonzeros."""
        for asserts in self.shape_env.deferred_runtime_asserts.values():
            for runtime_assert in asserts:
                if runtime_assert.msg == LEARNED:
                    continue
                condition = self.sizes.node_of(self.shape_env.replace(runtime_assert.expr))
                if condition is not True:
                    message = f"the graph assumes {runtime_assert.expr}, as does {runtime_assert.msg or 'the forward'}"
                    self.graph.call_function(check_value, (condition, message))

    def module(self, alternatives: list[list[SizeGuard]]) -> TracedModule:
        """The graph module, which holds where one of these sets of guards does."""
        for line, bodies in self.left_out.items():
            self.recorder.decisions.check_left_out(line, bodies)
        self.recorder.decisions.check_alike()
        check_names(self.graph)
        model, recorder, queries = self.request.model, self.recorder, self.recorder.queries
        root = torch.nn.Module()
        copy_tree(model, root, self.request.layers)
        for name, tensor in recorder.writer.constants.items():
            root.register_buffer(name, tensor, persistent=False)
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        guard_name = "input_guard"
        while hasattr(root, guard_name):
            guard_name = f"_{guard_name}"
        root.add_module(
            guard_name,
            InputGuard(self.placeholders.final(queries), alternatives, recorder.decisions.checks),
        )
        root.get_submodule(guard_name).training = root.training
        if placeholders:
            with self.graph.inserting_after(placeholders[-1]):
                self.graph.call_module(guard_name, (), {_plain_name(node): node for node in placeholders})
        complete_metadata(self.graph, f"{type(model).__module__}.{type(model).__qualname__}")
        traced = TracedModule(root, self.graph, type(model).__name__)
        traced.config = getattr(model, "config", None)
        traced.dtypes_read_at = queries.dtypes_read_at
        read = [parameter for parameter in traced.parameters() if parameter.dtype in queries.dtypes_read_at]
        if read:
            smallest = min(read, key=torch.numel)  # the graph keeps it alive
            traced.read_parameter = smallest, smallest.dtype
        traced.modes_read = queries.modes_read
        if queries.gradients_read_at is not None:
            named = traced.named_parameters(remove_duplicate=False)
            flags = {name: parameter.requires_grad for name, parameter in named}
            traced.gradients_read = queries.gradients_read_at, flags
        return traced


def _run_forward(shell: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return shell(*args, **kwargs)


assert _run_forward.__name__ == RUN_FORWARD


@contextlib.contextmanager
def _process_state_kept() -> Iterator[None]:
    """Give back the gradient mode and the default dtype."""
    grad_enabled, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    try:
        yield
    finally:
        torch._C._set_grad_enabled(grad_enabled)
        torch.set_default_dtype(dtype)


def _plain_name(node: torch.fx.Node) -> str:
    return str(node.target).lstrip("*")
