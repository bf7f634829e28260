"""The private names of torch that fxopt uses, each with the consequence of its absence; those of capture are in `capture/`.

Any release of torch may rename or remove such a name. A name that this torch lacks becomes its fallback, or a stand-in that
raises an error with torch's version at the first use; an import never fails. The environment variable `FXOPT_WITHOUT`, with
names joined by commas, makes fxopt treat these names as absent: tests and `fxopt doctor` show the consequence.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import operator
import os
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch.autograd import forward_ad

from fxopt.errors import FxoptError, TraceError

TESTED = ("2.12", "2.15")
"""The oldest and the newest minor version of torch on which the tests run."""

LAYERS, LIBRARY = "layers cannot be read", "fxopt cannot be used"
PLAIN = "packed layers compute as plain layers, and optimized modules fall back to eager"


@dataclasses.dataclass(frozen=True)
class Row:
    """One private name.

    Attributes:
        name: the qualified name.
        without: the consequence of its absence, as a clause.
        found: `True` if this torch has it.
        has_fallback: `True` if fxopt has a fallback for the name.
    """

    name: str
    without: str
    found: bool
    has_fallback: bool

    def __str__(self) -> str:
        remedy = "" if self.has_fallback else f". Use torch {TESTED[0]} to {TESTED[1]}, or a newer fxopt"
        return f"torch {torch.__version__} has no {self.name}: {self.without}{remedy}"


ROWS: dict[str, Row] = {}
_TAKEN_AWAY = set(os.environ.get("FXOPT_WITHOUT", "").split(","))
_RAISE: Any = object()


def private(name: str, without: str, otherwise: Any = _RAISE, error: type[Exception] = FxoptError) -> Any:
    """Look up a private name, and add it to `ROWS`.

    Args:
        name: the qualified name.
        without: the consequence of its absence, as a clause.
        otherwise: the fallback. By default, a stand-in that raises at its first use.
        error: the class of the error that the stand-in raises.

    Returns:
        The object of this name, `otherwise`, or the stand-in: a class without instances.
    """
    try:
        found = pkgutil.resolve_name(name)
    except (AttributeError, ImportError):
        found = _RAISE
    return _entered(name, without, found, otherwise, error)


def attribute(sample: Any, name: str, without: str, otherwise: Any = _RAISE) -> Any:
    """Return a function that reads a private attribute of instances such as `sample`, and add the attribute to `ROWS`."""
    read: Any = operator.attrgetter(name)
    try:
        read(sample)
    except AttributeError:
        read = _RAISE
    kind = type(sample)
    owner = sample.__name__ if kind is ModuleType else f"{kind.__module__}.{kind.__qualname__}"
    return _entered(f"{owner}.{name}", without, read, otherwise, FxoptError)


def how_tested() -> str:
    """Tell whether fxopt is tested on this torch."""
    version, (oldest, newest) = _numbers(torch.__version__), map(_numbers, TESTED)
    if oldest <= version <= newest:
        return "tested"
    return f"untested: fxopt is tested on {TESTED[0]} to {TESTED[1]}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(each) for each in version.split(".")[:2])


def missing() -> Iterator[Row]:
    """The names that this torch lacks."""
    return (row for row in ROWS.values() if not row.found)


def _entered(name: str, without: str, found: Any, otherwise: Any, error: type[Exception]) -> Any:
    if name in _TAKEN_AWAY:
        found = _RAISE
    row = ROWS[name] = Row(name, without, found is not _RAISE, otherwise is not _RAISE)
    if row.found:
        return found
    if otherwise is not _no_kernel:  # kernels differ between builds of torch, so their absence is not noted
        FxoptError.notes.append(str(row))
    return (
        _Absent(name.rpartition(".")[2], (), {"row": row, "error": error})
        if otherwise is _RAISE
        else otherwise
    )


def _no_kernel(*args: Any) -> Any:
    raise NotImplementedError


class _Absent(type):
    """Metaclass of the stand-ins for absent names: classes without instances, of which each use raises."""

    row: Row
    error: type[Exception]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise cls.error(str(cls.row))

    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(str(cls.row))


# --- values

FakeTensor = private("torch._subclasses.fake_tensor.FakeTensor", "shapes of nodes are unknown")
FakeTensorMode = private("torch._subclasses.fake_tensor.FakeTensorMode", "models cannot be captured")
pytree = private("torch.utils._pytree", LIBRARY)
TorchDispatchMode = private(
    "torch.utils._python_dispatch.TorchDispatchMode", "models cannot be captured", error=TraceError
)
enable_python_dispatcher = private(
    "torch._dispatch.python.enable_python_dispatcher",
    "where sizes are free, some nodes get no metadata",
    contextlib.nullcontext,
)
statically_known_true = private(
    "torch.fx.experimental.symbolic_shapes.statically_known_true",
    "sizes that are free count as unknown",
    lambda condition: condition is True,
)
_NEW_TENSOR = torch.empty(0)
version_of = attribute(_NEW_TENSOR, "_version", "writes into tensors cannot be counted")
_NUMBERS = itertools.count()
dict_version = private(
    "torch._C._dynamo.guards.dict_version",
    "all attributes of a model are compared at each call",
    lambda _: next(_NUMBERS),
)
"""A number that grows with each change of a dict."""
backward_hooks_of = attribute(_NEW_TENSOR, "_backward_hooks", LAYERS)
accumulation_hooks_of = attribute(_NEW_TENSOR, "_post_accumulate_grad_hooks", LAYERS)
storage_identity = attribute(_NEW_TENSOR.untyped_storage(), "_cdata", "shared memory cannot be seen")

# --- layers

_NEW_MODULE = torch.nn.Module()
PARAMETERS, BUFFERS, MODULES, NON_PERSISTENT = REGISTRIES = (
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
)
FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
DERIVED_FROM_GRAPH = ("_graph", "_code", "_lineno_map", "_prologue_start", "_compiled_call_impl")
"""Attributes that a `GraphModule` derives from its graph, and the result of `Module.compile`."""
WRAPPED_CALL = "_wrapped_call"
"""The attribute of the class of a `GraphModule` with the function that a call runs."""
COMPILED = DERIVED_FROM_GRAPH[-1]
"""The attribute of a module with the result of `Module.compile`, which is called instead of the forward."""
parameters_of, buffers_of, modules_of, non_persistent_of = (
    attribute(_NEW_MODULE, name, LAYERS) for name in REGISTRIES
)
forward_hooks_of, forward_pre_hooks_of = (attribute(_NEW_MODULE, name, LAYERS) for name in FORWARD_HOOKS)
layer_backward_hooks_of = attribute(_NEW_MODULE, "_backward_hooks", LAYERS)
layer_backward_pre_hooks_of = attribute(_NEW_MODULE, "_backward_pre_hooks", LAYERS)
compiled_call_of = attribute(_NEW_MODULE, COMPILED, LAYERS)
converter_of = attribute(_NEW_MODULE, "_apply", "models cannot be converted to float64")
global_hooks = tuple(
    private(f"torch.nn.modules.module._global_{name}", LAYERS)
    for name in ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
)

# --- operators

OpOverload = private("torch._ops.OpOverload", LIBRARY)
OpOverloadPacket = private("torch._ops.OpOverloadPacket", "the effects of operators are unknown", type(None))
schema_of = attribute(torch.ops.aten.relu.default, "_schema", "the effects of operators are unknown")
dispatch_has_kernel = private(
    "torch._C._dispatch_has_kernel", "graphs with operators of torch.ops cannot be saved or loaded"
)
bindings = {
    name: private(f"torch._C.{name}", "graphs with functions from there cannot be saved or loaded", None)
    for name in ("_VariableFunctions", "_nn", "_linalg", "_fft", "_special")
}

# --- nodes

_NEW_GRAPH = torch.fx.Graph()
root_of = attribute(_NEW_GRAPH, "_root", "passes cannot create nodes")
is_erased = attribute(_NEW_GRAPH.create_node("placeholder", "x"), "_erased", "passes cannot be applied")
used_names = attribute(_NEW_GRAPH, "_graph_namespace._used_names", "passes cannot be undone")
name_counts = attribute(_NEW_GRAPH, "_graph_namespace._base_count", "passes cannot be undone")

# --- states in which packed layers and optimized modules must not compute

_QUESTIONS = [
    private(name, PLAIN, lambda: True)
    for name in (
        "torch._C._functorch.peek_interpreter_stack",
        "torch._C._get_tracing_state",
        "torch.utils._python_dispatch._get_current_dispatch_mode",
    )
]
_LEVEL = attribute(forward_ad, "_current_level", PLAIN, lambda module: 0)
_function_modes = private("torch.overrides._get_current_function_mode_stack", PLAIN, lambda: [None])
_DeviceContext = private("torch.utils._device.DeviceContext", PLAIN, ())
has_any_global_hook = private("torch.nn.modules.module._has_any_global_hook", PLAIN, lambda: True)


def cannot_tell() -> str:
    """Return the reason why `is_transforming` is always true; empty if this torch has all names that it needs."""
    return next((str(row) for row in missing() if row.without == PLAIN), "")


def is_transforming() -> bool:
    """Tell whether torch traces, transforms or redirects the calls of this thread; a default device redirects nothing else."""
    redirects = any(type(mode) is not _DeviceContext for mode in _function_modes())
    return redirects or _LEVEL(forward_ad) >= 0 or any(ask() is not None for ask in _QUESTIONS)


# --- kernels

_kernel = functools.partial(private, without="layers are not packed for this kernel", otherwise=_no_kernel)

linear_pointwise, linear_add = (
    _kernel(f"torch.ops.mkldnn._linear_pointwise.{overload}") for overload in ("default", "binary")
)
reorder_linear_weight = _kernel("torch.ops.mkldnn._reorder_linear_weight")
convolution_pointwise, convolution_add = (
    _kernel(f"torch.ops.mkldnn._convolution_pointwise.{overload}") for overload in ("default", "binary")
)
convolution_add_into = _kernel("torch.ops.mkldnn._convolution_pointwise_.binary")
reorder_convolution_weight = _kernel("torch.ops.mkldnn._reorder_convolution_weight")
packed_nbytes = _kernel("torch.ops.mkldnn._nbytes")
mkl_linear = _kernel("torch.ops.mkl._mkl_linear.default")
mkl_reorder_linear_weight = _kernel("torch.ops.mkl._mkl_reorder_linear_weight")
int8_linear = _kernel("torch._weight_int8pack_mm")
quantized_linear = _kernel("torch.ops.onednn.qlinear_pointwise.tensor")
quantized_linear_weight = _kernel("torch.ops.onednn.qlinear_prepack")
dynamic_linear = _kernel("torch.ops.quantized.linear_dynamic")
dynamic_linear_weight = _kernel("torch.ops.quantized.linear_prepack")
quantized_by_rows = _kernel("torch._make_per_channel_quantized_tensor")


def holding_inductor(held: list[Any]) -> Any:
    """Return the inductor backend of torch.compile; it adds compiled code to `held`, to outlive `torch._dynamo.reset()`."""
    find = private("torch._dynamo.lookup_backend", "engines do not compile for a GPU")
    backend = find("inductor")

    def compiled(*args: Any, **options: Any) -> Any:
        held.append(backend(*args, **options))
        return held[-1]

    return compiled


def written_arguments(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """List the arguments of a call that its operator writes into, according to the schema."""
    schema = schema_of(operator)
    return [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(schema.arguments if schema.is_mutable else ())
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def clear_workspaces() -> None:
    """Free the workspaces of cuBLAS of all streams; a CUDA graph that is recorded next gets its own workspace."""
    private("torch._C._cuda_clearCublasWorkspaces", "engines record nothing on a GPU")()


def frozen() -> contextlib.AbstractContextManager[object]:
    """Make torch.compile treat weights as constants in the block; the import of its compiler takes 0.1 s."""
    without = "torch.compile reads the weights of a graph in each run"
    patch = private("torch._inductor.config.patch", without, lambda **_: contextlib.nullcontext())
    return patch(freezing=True)  # type: ignore[no-any-return]
