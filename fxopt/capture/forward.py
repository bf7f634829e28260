"""One run of a model's forward on fake tensors, and the module that comes of it."""

from __future__ import annotations

import contextlib
import inspect
import os
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from typing import Any

import sympy
import torch
import torch.fx.experimental._config
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fxopt.capture import metadata
from fxopt.capture.assumptions import Condition, FreeSizes, guards_of
from fxopt.capture.checks import check_value
from fxopt.capture.comparison import names_at_run_time, same_calls, same_constants, same_results
from fxopt.capture.decisions import Answers, Decisions, TextQuestion, ValueQuestion, settled
from fxopt.capture.example_run import ExampleRun
from fxopt.capture.expected import same_value
from fxopt.capture.guards import InputGuard
from fxopt.capture.interception import intercepted
from fxopt.capture.memo import CaptureFakeMode
from fxopt.capture.module import TracedModule
from fxopt.capture.ones import LEARNED, CaptureShapeEnv
from fxopt.capture.placeholders import Placeholders
from fxopt.capture.places import RUN_FORWARD, is_model_code, place
from fxopt.capture.recorder import Recorder
from fxopt.capture.shell import Changes, Shell, copy_tree, refused_change
from fxopt.capture.size_guards import SizeGuard
from fxopt.capture.sizes import Sizes
from fxopt.capture.tensor_sizes import TensorSizes
from fxopt.capture.writer import GraphWriter
from fxopt.errors import TraceError

_DATA_DEPENDENT = (GuardOnDataDependentSymNode, DataDependentOutputException)
_fx_config: Any = torch.fx.experimental._config


def capture(
    model: torch.nn.Module,
    inputs: dict[str, Any],
    dimensions: dict[str, Any],
    layers: Set[int],
    specialize: bool,
) -> TracedModule:
    """The forward of `model` as a graph module; the arguments are those of `Capture`."""
    try:
        return _recorded(model, inputs, dimensions, layers, frozenset(), specialize).finish()
    except ValueQuestion as question:
        raise TraceError(str(question)) from None


def _recorded(
    model: torch.nn.Module,
    inputs: dict[str, Any],
    dimensions: dict[str, Any],
    layers: Set[int],
    at_one: Set[tuple[str, int | None]],
    specialize: bool,
    moving: Set[str] = frozenset(),
    lines: Collection[str] = (),
) -> Capture:
    """A capture whose forward has run, with the questions on values settled that can be.

    Those at `lines` made no difference in another capture of this forward.
    """
    free_numbers = set(moving)
    reads_texts = False

    def record(answers: Answers) -> Capture:
        nonlocal reads_texts
        made = Capture(model, inputs, dimensions, layers, at_one, specialize, answers, free_numbers)
        made.reads_texts = reads_texts
        try:
            made.recorder = made.record()
        except TextQuestion:
            if reads_texts or not specialize:
                raise
            reads_texts = True
            return record(answers)
        moved = made.placeholders.moved() | made.recorder.tensor_sizes.written()
        if not moved:
            made.check_next_call()
            return made
        # Such a number counts calls or tokens: it is free, as are the sizes that it counts; in a tensor, it is no constant.
        free_numbers.update(moved)
        return record(answers)

    return record(Answers()) if specialize else settled(record, Capture.holds_for, lines)


class Capture:
    """One run of a model's forward, recorded.

    `inputs` are example values by name, `dimensions` what is free of their sizes, `layers` the identities of the
    modules that are one node; `at_one` says which of these sizes are 1 this time. `answers` answers questions on
    values, and so do the example inputs if `specialize` is set. `moving`
    names ints inside objects that are free, because the forward changes them. `earlier` is the state of the model that
    an earlier call left.
    """

    recorder: Recorder

    def __init__(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        dimensions: dict[str, Any],
        layers: Set[int],
        at_one: Set[tuple[str, int | None]] = frozenset(),
        specialize: bool = False,
        answers: Answers = Answers(),  # noqa: B008 (frozen)
        moving: Set[str] = frozenset(),
        earlier: Changes | None = None,
    ) -> None:
        self.model = model
        self.inputs = inputs
        self.dimensions = dimensions
        self.layers = layers
        self.at_one = at_one
        self.specialize = specialize
        self.answers = answers
        self.moving = moving
        self.earlier = earlier
        # Whether texts that hold a value are decided on the example inputs.
        self.reads_texts = False
        # The hooks of each module, before and after the forward.
        self.hooks: dict[str, Any] = {}
        # The real value for each fake input.
        self.examples: dict[int, Any] = {}
        self.shape_env = CaptureShapeEnv()
        self.fake_mode = CaptureFakeMode(shape_env=self.shape_env, allow_non_fake_inputs=True)
        self.graph = torch.fx.Graph()
        self.sizes = Sizes(self.graph, self.shape_env)
        self.free = FreeSizes(self.shape_env)

    def finish(self) -> TracedModule:
        """The graph module; where the forward excluded a size of 1, it is captured there as well."""
        recorder = self.recorder
        guards = guards_of(self._relied_on(recorder) + self.free.asked(), self.shape_env.replace)
        alternatives = [guards, *self._captured_at_one(guards)]
        self.free.check_asked()
        return self._module(recorder, alternatives)

    def _relied_on(self, recorder: Recorder) -> list[Condition]:
        conditions = self.free.assumed()
        if recorder.queries.layout_read_at is not None:
            # Strides differ at sizes of 1, and asking for them leaves no guard.
            sizes = [symbol for symbol, free in self.free.roots() if free.dim is not None]
            conditions += [(sympy.Ne(symbol, 1), recorder.queries.layout_read_at) for symbol in sizes]
        return conditions

    def record(self) -> Recorder:
        """Run the forward on fake tensors; the graph is complete but for the guard."""
        device = _device(self.model, self.inputs)
        shell = Shell(self.model, self.fake_mode, self.layers, self.earlier)
        writer = GraphWriter(self.graph, self.sizes, shell, device)
        example = None
        if self.specialize:
            example = ExampleRun(self.model, self.layers, self.graph, writer.constants, self.examples)
        decisions = Decisions(writer, self.sizes, self.shape_env, self.answers, example, self.reads_texts)
        tensor_sizes = TensorSizes(writer, shell.real, self.moving)
        recorder = Recorder(writer, self.shape_env, self.fake_mode, shell, decisions, tensor_sizes)
        shell.report_to(recorder)
        shell.take_hooks(self.hooks)
        self.placeholders = Placeholders(
            writer, self.fake_mode, self.shape_env, self.free, self.at_one, self.moving, self.examples
        )
        arguments = {
            name: self.placeholders.add(
                name, value, self.dimensions.get(name.lstrip("*")), **self._default(name)
            )
            for name, value in self.inputs.items()
        }
        if not self.at_one:
            self.free.check_example()
        if self.free.dimensions:
            # The memo of calls is enough; torch's own, of operators, on free sizes costs more than it saves.
            self.fake_mode.cache_enabled = False
        args, kwargs = _call_arguments(self.model, arguments)
        try:
            self.shape_env.location = writer.location
            self.shape_env.decide = decisions.size
            with (
                _fx_config.patch(backed_size_oblivious=True),
                _process_state_kept(),
                self.fake_mode,
                # Lets torch's C++ operators compute with free sizes in Python where they cannot themselves.
                enable_python_dispatcher(),
                intercepted(recorder),
                recorder,
            ):
                result = _run_forward(shell.model, args, kwargs)
                for source in recorder.draws.drawn_from():
                    raise TraceError(
                        f"the forward draws random numbers from Python's {source!r}, and a graph would hold those that it "
                        "drew. Use torch's, or make the module that draws them a leaf (leaf_modules=...)."
                    )
                with recorder.paused():
                    self._check_values()
                    writer.add_output(result)
                    decisions.erase_unused()
        except TraceError:
            if decisions.open:
                raise decisions.open from None
            raise
        except Exception as error:
            if decisions.open:
                raise decisions.open from None
            if decisions.text_question and isinstance(error, (KeyError, AttributeError)):
                raise decisions.text_question from None
            if _is_own(error):
                raise
            raise _explained(error, recorder) from error
        finally:
            recorder.draws.take_back()
            # torch keeps each ShapeEnv in its caches for good; it must not keep the model with it.
            self.shape_env.location = str
            self.shape_env.decide = lambda expression: None
            if example is not None:
                example.close()
        if decisions.open:
            raise decisions.open
        if recorder.failure or self.shape_env.failure:
            # The forward has caught it, and gone another way than it would with real tensors.
            raise recorder.failure or _explained(self.shape_env.failure, recorder)
        self.hooks = shell.hooks()
        self.changes, self.state = shell.changes(recorder.aliases), shell.state(recorder.aliases)
        self.placeholders.check_unchanged()
        return recorder

    def check_next_call(self) -> None:
        """Raise TraceError if the forward has changed state that could alter what a later call computes.

        It could not if a second call, which starts from that state and reads no tensor of the first one, makes the
        same calls under the same guards and leaves the same state: then so does every later one.
        """
        if not self.changes:
            return
        refused = refused_change(next(iter(self.changes)))
        if any(isinstance(value, list) for value in self.changes.values()):
            raise refused
        again = Capture(
            self.model,
            self.inputs,
            self.dimensions,
            self.layers,
            self.at_one,
            self.specialize,
            self.answers,
            self.moving,
            self.changes,
        )
        again.hooks, again.reads_texts = self.hooks, self.reads_texts
        try:
            again.recorder = again.record()
        except TraceError:
            raise refused from None
        translated = self._translation(again, {})

        def same_size(mine: Any, its: Any) -> bool:
            return bool(self.shape_env.replace(mine) == translated(its))

        same = self._same_guards(again, translated) and self._same_graph(again, same_size)
        if again.state != self.state or not same:
            raise refused

    def holds_for(self, other: Capture) -> bool:
        """Whether the graph of this capture computes what that of `other` does, which was made with other answers."""
        names = names_at_run_time(self.graph, other.graph)
        if names is None or self._assumed_of_numbers({}) != other._assumed_of_numbers(names):
            return False
        translated = self._translation(other, names)

        def same_size(mine: Any, its: Any) -> bool:
            return bool(self.shape_env.replace(mine) == translated(its))

        return (
            self.changes == other.changes
            and self.state == other.state
            and self.recorder.queries.answers() == other.recorder.queries.answers()
            and self._same_guards(other, translated)
            and self._same_graph(other, same_size)
            and same_results(self.graph, other.graph, same_size)
        )

    def _assumed_of_numbers(self, names: dict[Any, Any]) -> set[Any]:
        """The conditions on numbers that only a run knows, and their limits, with other names for their symbols."""
        asserts = (a for listed in self.shape_env.deferred_runtime_asserts.values() for a in listed)
        inputs = {free.symbol for free in self.free.dimensions}
        limits = {
            (names.get(symbol, symbol), limit)
            for symbol, limit in self.shape_env.var_to_range.items()
            if symbol not in inputs
        }
        return limits | {(a.expr.xreplace(names), None) for a in asserts}

    def _translation(self, other: Capture, names: dict[Any, Any]) -> Callable[[Any], Any]:
        """What rewrites a size of another capture of this forward in the symbols of this one.

        `names` has the symbols of this one for numbers that only a run knows, where they are called otherwise.
        """
        mine = {(free.where, free.dim): free.symbol for free in self.free.dimensions}
        all_names = names | {free.symbol: mine[free.where, free.dim] for free in other.free.dimensions}
        return lambda expression: self.shape_env.replace(
            other.shape_env.replace(expression).xreplace(all_names)
        )

    def _same_guards(self, other: Capture, translated: Callable[[Any], Any]) -> bool:
        """Whether both captures assume the same of the inputs' sizes."""
        mine = {(f.where, f.dim): self.shape_env.replace(f.symbol) for f in self.free.dimensions}
        its = {(f.where, f.dim): translated(f.symbol) for f in other.free.dimensions}
        return mine == its and guards_of(self._relied_on(self.recorder), self.shape_env.replace) == guards_of(
            other._relied_on(other.recorder), translated
        )

    def _same_graph(self, other: Capture, same_size: Callable[[Any, Any], bool]) -> bool:
        constants, others = self.recorder.writer.constants, other.recorder.writer.constants
        return same_calls(self.graph, other.graph, same_size) and same_constants(constants, others)

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

    def _default(self, name: str) -> dict[str, Any]:
        """What equals the forward's own default can be left out, where no input without one follows."""
        parameters = inspect.signature(self.model.forward).parameters
        rest = list(self.inputs)[list(self.inputs).index(name) :]
        if all(_is_default(parameters.get(other), self.inputs[other]) for other in rest):
            return {"default_value": self.inputs[name]}
        return {}

    def _captured_at_one(self, guards: list[SizeGuard]) -> list[list[SizeGuard]]:
        """The guards of further captures, at sizes of 1 that `guards` exclude, which gave the same graph.

        Forwards, and torch's own code, ask whether a size is 1 (for causal masks, broadcasting, strides) where
        the answer often changes nothing in the graph. Whether it does is settled by capturing there too.
        """
        hints = {str(symbol): int(free.hint) for symbol, free in self.free.roots()}
        excluded = [
            symbol
            for symbol, free in self.free.roots()
            if free.dim is not None
            and not all(
                guard.holds({**hints, str(symbol): 1}) for guard in guards if str(symbol) in guard.symbols
            )
        ]
        subsets = [(symbol,) for symbol in excluded] + ([tuple(excluded)] if len(excluded) > 1 else [])
        found = (self._captured_with_ones(set(subset)) for subset in subsets)
        return [alternative for alternative in found if alternative is not None]

    def _captured_with_ones(self, ones: set[Any]) -> list[SizeGuard] | None:
        """The guards under which this graph holds where the sizes `ones` are 1; None if it does not."""
        narrowed = {
            (f.where, f.dim) for f in self.free.dimensions if self.shape_env.replace(f.symbol) in ones
        }
        try:
            other = _recorded(
                self.model,
                self.inputs,
                self.dimensions,
                self.layers,
                narrowed,
                self.specialize,
                self.moving,
                self.answers.at_lines,
            )
        except TraceError:
            return None  # sizes of 1 stay excluded, and the guard says so
        its, translation = other.recorder, self._translation(other, {})

        def at_one(expression: Any) -> Any:
            return self.shape_env.replace(expression).xreplace(dict.fromkeys(ones, sympy.Integer(1)))

        def translated(expression: Any) -> Any:
            return at_one(translation(expression))

        if not self._same_graph(other, lambda mine, size: bool(at_one(mine) == translated(size))):
            return None
        sizes = [SizeGuard(f"{symbol} == 1", "the capture at size 1") for symbol in ones]
        return sizes + guards_of(other._relied_on(its), translated) + guards_of(self.free.asked(), at_one)

    # --- the result

    def _module(self, recorder: Recorder, alternatives: list[list[SizeGuard]]) -> TracedModule:
        root = torch.nn.Module()
        copy_tree(self.model, root, self.layers)
        for name, tensor in recorder.writer.constants.items():
            root.register_buffer(name, tensor, persistent=False)
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        guard_name = "input_guard"
        while hasattr(root, guard_name):
            guard_name = f"_{guard_name}"
        root.add_module(
            guard_name,
            InputGuard(self.placeholders.final(recorder.queries), alternatives, recorder.decisions.checks),
        )
        root.get_submodule(guard_name).training = root.training
        if placeholders:
            with self.graph.inserting_after(placeholders[-1]):
                self.graph.call_module(guard_name, (), {_plain_name(node): node for node in placeholders})
        metadata.complete(self.graph, f"{type(self.model).__module__}.{type(self.model).__qualname__}")
        traced = TracedModule(root, self.graph, type(self.model).__name__)
        traced.config = getattr(self.model, "config", None)
        traced.dtypes_read_at = recorder.queries.dtypes_read_at
        read = [
            parameter
            for parameter in traced.parameters()
            if parameter.dtype in recorder.queries.dtypes_read_at
        ]
        if read:
            smallest = min(read, key=torch.numel)  # the graph keeps it alive
            traced.read_parameter = smallest, smallest.dtype
        traced.modes_read = recorder.queries.modes_read
        return traced


def _run_forward(shell: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return shell(*args, **kwargs)


assert _run_forward.__name__ == RUN_FORWARD


def _device(model: torch.nn.Module, inputs: dict[str, Any]) -> torch.device:
    """The one device of the model (of the inputs, where it has no tensors)."""
    devices = {t.device: name for name, t in [*model.named_buffers(), *model.named_parameters()]}
    if len(devices) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise TraceError(f"{type(model).__name__} is spread over several devices ({places}); move it to one.")
    if devices:
        return next(iter(devices))
    tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
    return tensors[0].device if tensors else torch.device("cpu")


def _call_arguments(model: torch.nn.Module, inputs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The inputs as the forward takes them: by keyword, but for positional-only and variadic parameters."""
    kinds = {name: parameter.kind for name, parameter in inspect.signature(model.forward).parameters.items()}
    variadic = any(name.startswith("*") for name in inputs)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for name, value in inputs.items():
        kind = kinds.get(name)
        if name.startswith("*"):
            args.extend(value)
        elif kind is inspect.Parameter.POSITIONAL_ONLY or (
            variadic and kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        ):
            args.append(value)
        else:
            kwargs[name] = value
    return args, kwargs


def _is_default(parameter: inspect.Parameter | None, value: Any) -> bool:
    """Whether a value is the parameter's default, and generated code can hold it."""
    literal = value is None or type(value) in (bool, int, float, str)
    return parameter is not None and literal and same_value(value, parameter.default)


@contextlib.contextmanager
def _process_state_kept() -> Iterator[None]:
    """Give back the gradient mode and the default dtype; a graph cannot hold a change of the latter."""
    grad_enabled, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    try:
        yield
        if torch.get_default_dtype() != dtype:
            raise TraceError(
                "the forward sets torch's default dtype, which a graph cannot hold. Give dtypes in calls."
            )
    finally:
        torch._C._set_grad_enabled(grad_enabled)
        torch.set_default_dtype(dtype)


def _plain_name(node: torch.fx.Node) -> str:
    return str(node.target).lstrip("*")


def _is_own(error: Exception) -> bool:
    """Whether an exception was raised by the capture's own code: a bug here, not something about the model."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    code = frame.f_code
    # A function of torch's in C has no frame of its own: what it raises comes from the line that makes the model's call.
    makes_calls = code.co_name in ("_result", "_layer_result", "__torch_function__", "__torch_dispatch__")
    return code.co_filename.startswith(os.path.dirname(__file__)) and not makes_calls


def _explained(error: Any, recorder: Recorder) -> TraceError:
    """An exception of the forward as a TraceError that names the model's line."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    after = next((i for i, f in enumerate(frames) if f.f_code.co_name == RUN_FORWARD), 0)
    lines = [(f, n) for f, n in traceback.walk_tb(error.__traceback__)][after:]
    own = [(f, n) for f, n in lines if is_model_code(f.f_code.co_filename)]
    where = place(own[-1][0], None) if own else recorder.writer.where()
    if isinstance(error, _DATA_DEPENDENT):
        return TraceError(
            f"the forward decides on the value of a tensor, which a graph cannot. {where} Compute with "
            "`torch.where`, pass the decision as an argument, or make the module a leaf (leaf_modules=...)."
        )
    return TraceError(f"the forward failed under capture. {where} {type(error).__name__}: {error}")
