"""`trace`: the forward of any `nn.Module` as a `TracedModule`."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import os
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import sympy
import torch
import torch.fx.experimental._config
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.export import Dim
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fxopt.capture.comparison import same_calls
from fxopt.capture.guards import (
    ConstantInput,
    Input,
    InputGuard,
    Path,
    SizeGuard,
    StructureInput,
    TensorInput,
    check_value,
    python_expression,
    structure_keys,
)
from fxopt.capture.interception import intercepted, lock
from fxopt.capture.module import TracedModule
from fxopt.capture.ones import CaptureShapeEnv
from fxopt.capture.recorder import RUN_FORWARD, Recorder, is_model_code, place
from fxopt.capture.sizes import Sizes, free_dimensions, symbolic_context
from fxopt.errors import TraceError

_fx_config: Any = torch.fx.experimental._config

_CONTAINERS = (
    torch.nn.Sequential,
    torch.nn.ModuleList,
    torch.nn.ModuleDict,
    torch.nn.ParameterList,
    torch.nn.ParameterDict,
)


def trace(
    model: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    leaf_modules: Sequence[str | type[torch.nn.Module]] = (),
) -> TracedModule:
    """Capture the forward of `model` as a graph in which `torch.nn` layers are `call_module` nodes.

    The forward runs once, on fake tensors: nothing is computed, and the model is not changed.

    Args:
        model: any `nn.Module`, on one device, in the training mode and dtype in which the graph will run.
        args: positional example inputs: tensors, and tuples, lists, dicts and dataclasses of tensors. Anything
            else is a constant of the graph, which refuses to run with another value.
        kwargs: example inputs by keyword.
        dynamic_shapes: which dimensions are free, in the form that `torch.export.export` takes: a dict from
            input name, or a sequence in the order of the inputs, to a dict from dimension to
            `torch.export.Dim`. None: every size is fixed.
        leaf_modules: qualified names or types of modules that become one `call_module` node, besides
            `torch.nn` layers.

    Returns:
        A `TracedModule`, a `torch.fx.GraphModule` that takes the inputs by the names of the forward's
        parameters and returns what the model returns. Layers and parameters are shared with the model.

    Raises:
        TraceError: when the forward cannot be a graph without changing its meaning (it branches on a tensor's
            value, for example), with the line of the model that is the reason.

    Example:
        >>> import torch, fxopt
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU()).eval()
        >>> traced = fxopt.trace(model, (torch.zeros(2, 4),), dynamic_shapes=({0: torch.export.Dim("batch")},))
        >>> [node.target for node in traced.graph.nodes if node.op == "call_module"]
        ['input_guard', '0', '1']
        >>> traced(torch.zeros(5, 4)).shape
        torch.Size([5, 8])
    """
    inputs = _bind_inputs(model, args, kwargs or {})
    dimensions = _normalise_dynamic_shapes(dynamic_shapes, inputs)
    with lock:
        return Capture(model, inputs, dimensions, leaf_modules).run()


def _bind_inputs(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Example values by the names that the placeholders get; `*name` for the variadic ones."""
    if isinstance(args, torch.Tensor):
        raise TraceError("args must be a tuple of example inputs, not a tensor: write `(x,)`.")
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TraceError(
            f"the example inputs do not fit {type(model).__name__}.forward{signature}: {error}."
        ) from error
    inputs: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            inputs.update(value)
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            inputs[f"*{name}"] = value
        else:
            inputs[name] = value
    return inputs


def _normalise_dynamic_shapes(dynamic_shapes: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    if dynamic_shapes is None:
        return {}
    if isinstance(dynamic_shapes, Mapping):
        unknown = sorted(set(dynamic_shapes) - {name.lstrip("*") for name in inputs})
        if unknown:
            raise TraceError(f"dynamic_shapes names {unknown}; the inputs are {list(inputs)}.")
        return dict(dynamic_shapes)
    if len(dynamic_shapes) != len(inputs):
        raise TraceError(
            f"dynamic_shapes has {len(dynamic_shapes)} entries for {len(inputs)} inputs: {list(inputs)}."
        )
    return {name.lstrip("*"): spec for name, spec in zip(inputs, dynamic_shapes, strict=True)}


# A sympy condition on sizes, and the line of the model that needs it.
Condition = tuple[Any, str]


@dataclasses.dataclass
class _FreeDimension:
    """One dimension that was asked to be free."""

    where: str
    dim: int
    choice: Any
    symbol: Any
    hint: int


class Capture:
    """One run of a model's forward, recorded."""

    def __init__(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        dimensions: dict[str, Any],
        leaf_modules: Sequence[str | type[torch.nn.Module]] = (),
        at_one: Set[tuple[str, int]] = frozenset(),
    ) -> None:
        self.model = model
        self.inputs = inputs
        self.dimensions = dimensions
        self.leaf_modules = leaf_modules
        self.at_one = at_one
        self.layers = {id(m) for name, m in model.named_modules() if _is_layer(name, m, leaf_modules)}
        self.shape_env = CaptureShapeEnv()
        self.fake_mode = FakeTensorMode(shape_env=self.shape_env, allow_non_fake_inputs=True)
        self.graph = torch.fx.Graph()
        self.sizes = Sizes(self.graph, self.shape_env)
        self.free: list[_FreeDimension] = []
        self.expected: list[tuple[Input, torch.Tensor | None]] = []

    def run(self) -> TracedModule:
        """Capture at the sizes of the example inputs; where that excludes a size of 1, at 1 as well."""
        recorder = self.record()
        guards = _guards(self._assumed() + self._asked(), self.shape_env.replace)
        if recorder.layout_read_at is not None:
            # Strides differ at sizes of 1, and asking for them leaves no guard.
            guards += [SizeGuard(f"{symbol} != 1", recorder.layout_read_at) for symbol, _ in self._roots()]
        alternatives = [guards, *self._captured_at_one(recorder, guards)]
        self._check_asked_dimensions()
        return self._module(recorder, alternatives)

    def record(self) -> Recorder:
        """Run the forward on fake tensors; the graph is complete but for the guard."""
        device = _device(self.model, self.inputs)
        shell, parameters = self._shell()
        recorder = Recorder(self.graph, self.sizes, self.shape_env, parameters, device)
        self._intercept_modules(shell, recorder)
        arguments = {name: self._placeholder(recorder, name, value) for name, value in self.inputs.items()}
        args, kwargs = _call_arguments(self.model, arguments)
        state = _tensor_state(shell)
        self.shape_env.location = recorder.location
        try:
            with (
                _fx_config.patch(backed_size_oblivious=True),
                self.fake_mode,
                intercepted(recorder),
                recorder,
            ):
                result = _run_forward(shell, args, kwargs)
                with recorder.paused():
                    self._check_values(recorder)
                    recorder.add_output(result)
        except TraceError:
            raise
        except Exception as error:
            if _is_own(error):
                raise
            raise _explained(error, recorder) from error
        _check_state(shell, state, recorder)
        return recorder

    def _check_values(self, recorder: Recorder) -> None:
        """Write what the forward assumes of numbers that only a run knows, such as the number of nonzeros."""
        for asserts in self.shape_env.deferred_runtime_asserts.values():
            for runtime_assert in asserts:
                condition = self.sizes.node_of(self.shape_env.replace(runtime_assert.expr))
                if condition is not True:
                    message = f"the graph assumes {runtime_assert.expr}, as does {runtime_assert.msg or 'the forward'}"
                    self.graph.call_function(check_value, (condition, message))

    # --- the shell: a copy of the model that holds fake tensors

    def _shell(self) -> tuple[torch.nn.Module, dict[int, str]]:
        """A copy of the model with fake parameters and buffers, and the names of those by identity.

        Plain tensor attributes stay the model's own: a graph holds them as constants.
        """
        memo: dict[int, Any] = {}
        names: dict[int, str] = {}
        originals = {
            **dict(self.model.named_buffers(remove_duplicate=False)),
            **dict(self.model.named_parameters(remove_duplicate=False)),
        }
        for name, tensor in originals.items():
            if id(tensor) not in memo:
                memo[id(tensor)] = self.fake_mode.from_tensor(tensor, static_shapes=True)
                names[id(memo[id(tensor)])] = name
        for module in self.model.modules():
            for value in module.__dict__.values():
                if isinstance(value, torch.Tensor):
                    memo.setdefault(id(value), value)
        try:
            return copy.deepcopy(self.model, memo), names
        except Exception as error:
            raise TraceError(
                f"{type(self.model).__name__} cannot be copied by copy.deepcopy, which capture needs so as to "
                f"leave the model untouched: {type(error).__name__}: {error}"
            ) from error

    def _intercept_modules(self, shell: torch.nn.Module, recorder: Recorder) -> None:
        originals = dict(self.model.named_modules())
        for name, module in shell.named_modules():
            call = recorder.call_layer if id(originals[name]) in self.layers else recorder.call_container
            # nn.Module.__call__ prefers this attribute of the instance, which only the shell has.
            module._compiled_call_impl = _Call(call, name, module)

    # --- inputs

    def _placeholder(self, recorder: Recorder, name: str, value: Any) -> Any:
        """Write the placeholder for one input and return the fake of its value."""
        node = self.graph.placeholder(name, **self._default(name))
        fake = self._fake_input(
            recorder, node, name.lstrip("*"), (), value, self.dimensions.get(name.lstrip("*"))
        )
        node.meta["val"] = fake
        return fake

    def _default(self, name: str) -> dict[str, Any]:
        """Constants can be left out, where no input without a default follows them."""
        rest = list(self.inputs)[list(self.inputs).index(name) :]
        if all(_is_literal(self.inputs[other]) for other in rest) and not name.startswith("*"):
            return {"default_value": self.inputs[name]}
        return {}

    def _fake_input(
        self, recorder: Recorder, node: torch.fx.Node, name: str, path: Path, value: Any, spec: Any
    ) -> Any:
        if isinstance(value, torch.Tensor):
            return self._fake_tensor(recorder, node, name, path, value, spec)
        if not _holds_tensors(value):
            self.expected.append((ConstantInput(name, path, value), None))
            return value
        keys = structure_keys(value)
        kind = "item" if isinstance(value, (tuple, list, dict)) else "attr"
        self.expected.append((StructureInput(name, path, type(value), keys), None))
        items = {}
        for position, key in enumerate(keys):
            item = value[key] if kind == "item" else getattr(value, key)
            inner = (
                spec.get(key) if isinstance(spec, Mapping) else spec[position] if spec is not None else None
            )
            items[key] = self._fake_input(recorder, node, name, (*path, (kind, key)), item, inner)
        if isinstance(value, (tuple, list)):
            return type(value)(*items.values()) if hasattr(value, "_fields") else type(value)(items.values())
        if type(value) is dict:
            return items
        return type(value)(**items)

    def _fake_tensor(
        self, recorder: Recorder, node: torch.fx.Node, name: str, path: Path, value: torch.Tensor, spec: Any
    ) -> torch.Tensor:
        where = f"input {name}{''.join(f'[{key!r}]' for _, key in path)}"
        choices = free_dimensions(spec, value, where)
        with torch.no_grad():
            # An object of its own: the same tensor given twice is two inputs.
            example = value.detach().requires_grad_(value.requires_grad)
            for dim in list(choices):
                if (where, dim) in self.at_one:
                    example = example.narrow(dim, 0, 1)
                    del choices[dim]
        fake = self.fake_mode.from_tensor(
            example, symbolic_context=symbolic_context(example, choices), source=ConstantSource(where)
        )
        for dim, choice in choices.items():
            self.free.append(
                _FreeDimension(where, dim, choice, fake.shape[dim].node.expr, example.shape[dim])
            )
        sizes: Any = fake.shape
        shape: Any = tuple(size if isinstance(size, int) else size.node.expr for size in sizes)
        expected = TensorInput(name, path, value.dtype, False, shape)
        self.expected.append((expected, fake))
        recorder.add_input(fake, node, path)
        return fake

    # --- what the graph assumes of sizes

    def _assumed(self) -> list[Condition]:
        """What the forward relied on: guards, and the ranges that checks in torch have given to sizes."""
        conditions = self.shape_env.conditions()
        for free in self.free:
            bounds = self.shape_env.var_to_range.get(free.symbol)
            if bounds is not None and bounds.lower > 0:
                conditions.append((sympy.Ge(free.symbol, bounds.lower), "a check in torch"))
            if bounds is not None and bounds.upper < 2**31:
                conditions.append((sympy.Le(free.symbol, bounds.upper), "a check in torch"))
        return conditions

    def _asked(self) -> list[Condition]:
        """The conditions that named `Dim`s state: their limits, and to be the same wherever they stand."""
        conditions: list[Condition] = []
        first: dict[str, _FreeDimension] = {}
        named = [free for free in self.free if isinstance(free.choice, Dim)]
        for free in named:
            choice: Any = free.choice
            origin = f"dynamic_shapes: {choice!r}"
            of = first.setdefault(choice.__name__, free)
            root = getattr(choice, "root", None)
            if root is not None:
                base = next((f for f in named if f.choice.__name__ == root.__name__), None)
                if base is None:
                    raise TraceError(f"dynamic_shapes uses {choice!r}, but gives {root!r} to no dimension.")
                conditions.append((sympy.Eq(free.symbol, choice.fn(base.symbol)), origin))
            elif of is not free:
                conditions.append((sympy.Eq(free.symbol, of.symbol), origin))
            else:
                conditions.append((sympy.Ge(free.symbol, choice.min), origin))
                if choice.max < 2**31:
                    conditions.append((sympy.Le(free.symbol, choice.max), origin))
        return conditions

    def _roots(self) -> list[tuple[Any, _FreeDimension]]:
        """The symbols that remain after unification, each with one dimension that it is the size of."""
        roots: dict[Any, _FreeDimension] = {}
        for free in self.free:
            expression = self.shape_env.replace(free.symbol)
            if isinstance(expression, sympy.Symbol):
                roots.setdefault(expression, free)
        return list(roots.items())

    def _check_asked_dimensions(self) -> None:
        for free in self.free:
            expression = self.shape_env.replace(free.symbol)
            if expression.is_number and free.choice is not Dim.AUTO:
                raise TraceError(
                    f"dimension {free.dim} of {free.where} was asked to be free, but the forward fixes it to "
                    f"{expression}, at {self._origin(free.symbol)}. Leave it out of dynamic_shapes, or give Dim.AUTO."
                )

    def _origin(self, symbol: Any) -> str:
        """The line that needed the last condition on a size."""
        lines = [line for condition, line in self.shape_env.conditions() if symbol in condition.free_symbols]
        return lines[-1] if lines else "an unknown place"

    def _captured_at_one(self, recorder: Recorder, guards: list[SizeGuard]) -> list[list[SizeGuard]]:
        """The guards of further captures, at sizes of 1 that `guards` exclude, which gave the same graph.

        Forwards, and torch's own code, ask whether a size is 1 (for causal masks, broadcasting, strides) where
        the answer often changes nothing in the graph. Whether it does is settled by capturing there too.
        """
        hints = {str(symbol): int(free.hint) for symbol, free in self._roots()}
        excluded = [
            symbol
            for symbol, _ in self._roots()
            if not all(
                guard.holds({**hints, str(symbol): 1}) for guard in guards if str(symbol) in guard.symbols
            )
        ]
        subsets = [(symbol,) for symbol in excluded] + ([tuple(excluded)] if len(excluded) > 1 else [])
        found = (self._captured_with_ones(recorder, set(subset)) for subset in subsets)
        return [alternative for alternative in found if alternative is not None]

    def _captured_with_ones(self, recorder: Recorder, ones: set[Any]) -> list[SizeGuard] | None:
        """The guards under which this graph holds where the sizes `ones` are 1; None if it does not."""
        narrowed = {(f.where, f.dim) for f in self.free if self.shape_env.replace(f.symbol) in ones}
        other = Capture(self.model, self.inputs, self.dimensions, self.leaf_modules, narrowed)
        try:
            constants = other.record().constants
        except TraceError:
            return None  # sizes of 1 stay excluded, and the guard says so
        mine = {(free.where, free.dim): free.symbol for free in self.free}
        names = {free.symbol: mine[free.where, free.dim] for free in other.free}

        def at_one(expression: Any) -> Any:
            return self.shape_env.replace(expression).xreplace(dict.fromkeys(ones, sympy.Integer(1)))

        def translated(expression: Any) -> Any:
            return at_one(other.shape_env.replace(expression).xreplace(names))

        if not same_calls(self.graph, other.graph, at_one, translated) or not all(
            map(torch.equal, recorder.constants.values(), constants.values())
        ):
            return None
        sizes = [SizeGuard(f"{symbol} == 1", "the capture at size 1") for symbol in ones]
        return sizes + _guards(other._assumed(), translated) + _guards(self._asked(), at_one)

    # --- the result

    def _module(self, recorder: Recorder, alternatives: list[list[SizeGuard]]) -> TracedModule:
        root = torch.nn.Module()
        _copy_tree(self.model, root, self.layers)
        for name, tensor in recorder.constants.items():
            root.register_buffer(name, tensor, persistent=False)
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        guard_name = "input_guard"
        while hasattr(root, guard_name):
            guard_name = f"_{guard_name}"
        strict = recorder.dtype_read_at is not None
        root.add_module(
            guard_name, InputGuard([self._final(i, strict) for i, _ in self.expected], alternatives)
        )
        root.get_submodule(guard_name).training = root.training
        if placeholders:
            with self.graph.inserting_after(placeholders[-1]):
                self.graph.call_module(guard_name, (), {_plain_name(node): node for node in placeholders})
        traced = TracedModule(root, self.graph, type(self.model).__name__)
        traced.config = getattr(self.model, "config", None)
        traced.dtype_read_at = recorder.dtype_read_at
        return traced

    def _final(self, expected: Input, strict_dtype: bool) -> Input:
        """An input with the sizes that are left free after the whole forward."""
        if not isinstance(expected, TensorInput):
            return expected
        shape: list[int | str] = []
        for size in expected.shape:
            expression = self.shape_env.replace(sympy.sympify(size))
            shape.append(int(expression) if expression.is_number else python_expression(expression))
        strict = strict_dtype and expected.dtype.is_floating_point
        fixed = tuple(
            (dim, self._origin(size))
            for dim, size in enumerate(expected.shape)
            if isinstance(size, sympy.Symbol) and isinstance(shape[dim], int)
        )
        return dataclasses.replace(expected, shape=tuple(shape), strict_dtype=strict, fixed_by=fixed)


def _guards(conditions: list[Condition], translated: Callable[[Any], Any]) -> list[SizeGuard]:
    """The conditions that say something, once each."""
    guards: dict[str, SizeGuard] = {}
    for condition, origin in conditions:
        expression = translated(condition)
        if expression is not sympy.true:
            text = python_expression(expression)
            guards.setdefault(text, SizeGuard(text, origin))
    return list(guards.values())


class _Call:
    """A module's call in the shell, reported to the recorder."""

    def __init__(self, call: Callable[..., Any], name: str, module: torch.nn.Module) -> None:
        self.call, self.name, self.module = call, name, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self.name, self.module, args, kwargs)


def _run_forward(shell: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return shell(*args, **kwargs)


assert _run_forward.__name__ == RUN_FORWARD


def _is_layer(
    name: str, module: torch.nn.Module, leaf_modules: Sequence[str | type[torch.nn.Module]]
) -> bool:
    if any(name == leaf if isinstance(leaf, str) else isinstance(module, leaf) for leaf in leaf_modules):
        return True
    return type(module).__module__.startswith(("torch.nn.", "torch.ao.nn.")) and not isinstance(
        module, _CONTAINERS
    )


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


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, dict):
        return any(_holds_tensors(item) for item in value.values())
    if isinstance(value, (tuple, list)):
        return any(_holds_tensors(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return any(_holds_tensors(getattr(value, field.name)) for field in dataclasses.fields(value))
    return False


def _is_literal(value: Any) -> bool:
    """Whether generated code can hold the value as a default."""
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return all(_is_literal(item) for item in value)
    return value is None or type(value) in (bool, int, float, str)


def _plain_name(node: torch.fx.Node) -> str:
    return str(node.target).lstrip("*")


def _tensor_state(shell: torch.nn.Module) -> list[tuple[str, str, Any, int]]:
    """Every slot of a module that holds a tensor, with the identity of what it holds."""
    slots = []
    for name, module in shell.named_modules():
        for registry in (module._buffers, module._parameters, module.__dict__):
            slots += [
                (name, key, registry, id(v)) for key, v in registry.items() if isinstance(v, torch.Tensor)
            ]
    return slots


def _check_state(shell: torch.nn.Module, state: list[tuple[str, str, Any, int]], recorder: Recorder) -> None:
    for name, key, registry, before in state:
        if id(registry.get(key)) != before:
            raise TraceError(
                f"the forward assigns another tensor to {f'{name}.{key}'.lstrip('.')!r}: state that is replaced "
                "cannot live in a graph. Write into it with `.copy_()`, or make the module that does this a leaf."
            )


def _copy_tree(source: torch.nn.Module, target: torch.nn.Module, layers: set[int]) -> None:
    """Give `target` the parameters, buffers, children and flags of `source`; containers are made anew.

    What is shared stays shared: layers and parameters are the same objects, a container under two names is one
    container again.
    """
    made: dict[int, torch.nn.Module] = {id(source): target}

    def fill(old: torch.nn.Module, new: torch.nn.Module) -> None:
        new.training = old.training
        for name, parameter in old._parameters.items():
            new.register_parameter(name, parameter)
        for name, buffer in old._buffers.items():
            new.register_buffer(name, buffer, persistent=name not in old._non_persistent_buffers_set)
        for name, child in old._modules.items():
            if child is None or id(child) in layers:
                new.add_module(name, child)
                continue
            if id(child) not in made:
                made[id(child)] = torch.nn.Module()
                fill(child, made[id(child)])
            new.add_module(name, made[id(child)])

    fill(source, target)


def _is_own(error: Exception) -> bool:
    """Whether an exception was raised by the capture's own code: a bug here, not something about the model."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_code.co_filename.startswith(os.path.dirname(__file__))


def _explained(error: Exception, recorder: Recorder) -> TraceError:
    """An exception of the forward as a TraceError that names the model's line."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    after = next((i for i, f in enumerate(frames) if f.f_code.co_name == RUN_FORWARD), 0)
    lines = [(f, n) for f, n in traceback.walk_tb(error.__traceback__)][after:]
    own = [(f, n) for f, n in lines if is_model_code(f.f_code.co_filename)]
    where = place(own[-1][0], None) if own else recorder.where()
    if isinstance(error, (GuardOnDataDependentSymNode, DataDependentOutputException)):
        return TraceError(
            f"the forward decides on the value of a tensor, which a graph cannot. {where} Compute with "
            "`torch.where`, pass the decision as an argument, or make the module a leaf (leaf_modules=...)."
        )
    return TraceError(f"the forward failed under capture. {where} {type(error).__name__}: {error}")
