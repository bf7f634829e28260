"""The private names of torch that captures use. If one without a fallback is missing, `trace` raises TraceError at once."""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.utils.checkpoint

from fxopt.errors import TraceError
from fxopt.torch_internals import ROWS, attribute, private

_NO_CAPTURE = "models cannot be captured"
Place = tuple[Any, str]


def check() -> None:
    """Raise TraceError if the installed torch lacks a name that every capture needs."""
    absent = [row for row in ROWS.values() if not row.found and row.without == _NO_CAPTURE]
    if absent:
        raise TraceError(f"{absent[0]}.")


def _required(name: str, without: str = _NO_CAPTURE) -> Any:
    return private(name, without, error=TraceError)


def _place(name: str, without: str = _NO_CAPTURE) -> Place:
    """Return owner and name of an attribute that captures replace; an absent attribute gets a stand-in as owner."""
    owner, _, last = name.rpartition(".")
    stand_in = types.SimpleNamespace(**{last: lambda *args, **kwargs: None})
    found = private(name, without) if without == _NO_CAPTURE else private(name, without, None)
    return (stand_in if found is None else private(owner, without, stand_in), last)


# --- fake tensors

_fakes = "torch._subclasses.fake_tensor"
unset_fake_temporarily = _required(f"{_fakes}.unset_fake_temporarily")
in_kernel_invocation_manager = _required(f"{_fakes}.in_kernel_invocation_manager")
DataDependentOutputException = _required(f"{_fakes}.DataDependentOutputException")
is_contiguous_or_false = _required("torch._prims_common.is_contiguous_or_false")
enable_python_dispatcher = _required("torch._dispatch.python.enable_python_dispatcher")
detect_fake_mode = _required("torch._guards.detect_fake_mode")
DisableTorchDispatch = _required("torch._C._DisableTorchDispatch")
DisableTorchFunction = _required("torch._C.DisableTorchFunction")
make_wrapper_subclass = _required("torch.Tensor._make_wrapper_subclass")
make_subclass = _required("torch.Tensor._make_subclass")
call_impl_of = attribute(torch.nn.Module(), "_call_impl", _NO_CAPTURE)

# --- sizes

_shapes = "torch.fx.experimental.symbolic_shapes"
ShapeEnv = _required(f"{_shapes}.ShapeEnv")
DimDynamic = _required(f"{_shapes}.DimDynamic")
GuardOnDataDependentSymNode = _required(f"{_shapes}.GuardOnDataDependentSymNode")
StatelessSymbolicContext = _required(f"{_shapes}.StatelessSymbolicContext")
free_unbacked_symbols = _required(f"{_shapes}.free_unbacked_symbols")
number_of_truth = _required(f"{_shapes}.cast_symbool_to_symint_guardless")
SymNode = _required("torch.fx.experimental.sym_node.SymNode")
shapes_config = _required("torch.fx.experimental._config")
ConstantSource = _required("torch._dynamo.source.ConstantSource")
TensorProperty = _required("torch._dynamo.source.TensorProperty")
_update_range = _required(f"{_shapes}.ShapeEnv._update_var_to_range")
size_functions = _required("torch.utils._sympy.functions")
FloorDiv = _required("torch.utils._sympy.functions.FloorDiv")
Min = _required("torch.utils._sympy.functions.Min")
sympy_interp = _required("torch.utils._sympy.interp.sympy_interp")
int_oo = _required("torch.utils._sympy.numbers.int_oo")
PythonPrinter = _required("torch.utils._sympy.printers.PythonPrinter")
PythonReferenceAnalysis = _required("torch.utils._sympy.reference.PythonReferenceAnalysis")
SymT = _required("torch.utils._sympy.symbol.SymT")
symbol_is_type = _required("torch.utils._sympy.symbol.symbol_is_type")
ValueRanges = _required("torch.utils._sympy.value_ranges.ValueRanges")
SYMBOLIC = "_expr"
_new_node = ShapeEnv().create_unbacked_symint().node if ROWS[f"{_shapes}.ShapeEnv"].found else None
expression_of = attribute(_new_node, SYMBOLIC, _NO_CAPTURE)
float_operations = [
    _place(f"torch.fx.experimental.sym_node.SymNode.{name}") for name in ("_add", "_sub", "_mul")
]

# --- modes

PreDispatchTorchFunctionMode = _required("torch.fx.experimental.proxy_tensor.PreDispatchTorchFunctionMode")
pop_mode_temporarily = _required("torch.overrides._pop_mode_temporarily")
pop_function_mode = _required("torch.overrides._pop_mode")
function_mode_stack = _required("torch.overrides._get_current_function_mode_stack")
pop_dispatch_mode = _required("torch.utils._python_dispatch._pop_mode")
dispatch_mode_stack = _required("torch.utils._python_dispatch._get_current_dispatch_mode_stack")
set_grad_enabled = _required("torch._C._set_grad_enabled")
enter_autocast = _required("torch.amp.autocast_mode._enter_autocast")
exit_autocast = _required("torch.amp.autocast_mode._exit_autocast")
is_any_autocast_enabled = _required("torch._C._is_any_autocast_enabled")
peek_interpreter_stack = _required("torch._C._functorch.peek_interpreter_stack")
is_functorch_wrapped_tensor = _required("torch._C._functorch.is_functorch_wrapped_tensor")
_FOR_COMPILED = enter_inference_mode, exit_inference_mode, sdpa_backends, switch_sdpa_backends = [
    private(name, "torch.compile breaks graphs at inference_mode and sdpa_kernel", None)
    for name in (
        "torch.autograd.grad_mode._enter_inference_mode",
        "torch.autograd.grad_mode._exit_inference_mode",
        "torch.nn.attention._cur_sdpa_kernel_backends",
        "torch.nn.attention._sdpa_kernel",
    )
]
SDPA_COMPILED = None not in _FOR_COMPILED
INFERENCE_COMPILED = SDPA_COMPILED and torch.__version__ >= "2.13"  # Dynamo 2.12 rejects these calls
SDPA_KERNEL = _place("torch.nn.attention._sdpa_kernel")
IS_COMPILING = _place("torch.compiler._is_compiling_flag", "models take the branches of eager mode")
IS_EXPORTING = _place("torch.compiler._is_exporting_flag", "models take the branches of eager mode")

# --- calls

get_qualified_name = _required("torch.fx.node._get_qualified_name")
side_effectful_functions = _required("torch.fx.node._side_effectful_functions")
custom_builtins = _required("torch.fx.graph._custom_builtins")
HigherOrderOperator = _required("torch._ops.HigherOrderOperator")
torch_assert = _required("torch._assert")
# The module of the classes that torch makes for the gradients of custom operators.
GRADIENTS_OF_OPERATORS = "torch._library.autograd"
TRANSFORMS = [
    _place(f"torch._functorch.{name}")
    for name in (
        "apis.vmap_impl",
        "apis._chunked_vmap",
        "eager_transforms.grad_and_value_impl",
        "eager_transforms._jvp_with_argnums",
    )
]
_COMPILED_PARTS = "forwards that call compiled functions are refused"
STANCE = _place("torch._dynamo.eval_frame._stance", _COMPILED_PARTS)
DynamoStance = private("torch._dynamo.eval_frame.DynamoStance", _COMPILED_PARTS, None)
VJP = _place("torch._functorch.eager_transforms._vjp_with_argnums")
_generator = "_checkpoint_without_reentrant_generator"
if hasattr(torch.utils.checkpoint, f"{_generator}_impl"):  # from torch 2.14 on
    _generator += "_impl"
CHECKPOINT = _place(f"torch.utils.checkpoint.{_generator}")
IS_CAUSAL = _place(
    "torch.nn.modules.transformer._detect_is_causal_mask", "layers of nn.Transformer with masks are refused"
)
BATCH_NORM = _place(
    "torch.nn.modules.batchnorm._BatchNorm.forward", "layers with momentum=None are refused in training mode"
)
parse_to = _required("torch._C._nn._parse_to", "forwards that call Module.to are refused")
push_saved_tensors_hooks = _required(
    "torch._C._autograd._push_saved_tensors_default_hooks",
    "forwards that set saved_tensors_hooks are refused",
)
parametrizations_cached = attribute(
    torch.nn.utils.parametrize, "_cache_enabled", "cached parametrizations count as hooks", lambda module: 1
)

# --- operators

LIFT_FRESH = _required("torch.ops.aten.lift_fresh.default")
cond = _required("torch.ops.higher_order.cond", "torch.cond, and branches that stay in a graph, are refused")
istft = _required("torch._refs.istft", "torch.istft of a free length is refused")
_SLOWER = "captures are slower"
relu, batch_norm, alias, as_strided, convolution = (
    private(f"torch.ops.aten.{name}.default", _SLOWER, None)
    for name in ("relu", "_native_batch_norm_legit_no_training", "alias", "as_strided", "convolution")
)
_SIZES = "free sizes are fixed, or refused, where an operator gets them"
FLOOR_DIVISION = _place("torch._meta_registrations.div_rtn", _SIZES)
ctc_loss = private("torch.ops.aten._ctc_loss.Tensor", _SIZES, None)
cdist = private("torch.ops.aten._cdist_forward", _SIZES, None)
take_along_dim = private("torch._refs.take_along_dim", _SIZES, None)
# The names needed to replace the kernel of an operator.
_COMPOSITE, _AUTOGRAD = DISPATCH_KEYS = [
    private(f"torch._C.DispatchKey.{name}", _SIZES, None)
    for name in ("CompositeImplicitAutograd", "Autograd")
]
dispatch_cache_of, run_for_key_of = (
    attribute(torch.ops.aten.relu.default, name, _SIZES, None) for name in ("_dispatch_cache", "_op_dk")
)


def replaced_operator(name: str) -> Any:
    """Return an operator of `torch.ops.aten` whose kernel captures replace; `None` if that is not possible."""
    return private(f"torch.ops.aten.{name}", _SIZES, None) if can_replace_kernels else None


can_replace_kernels = None not in (*DISPATCH_KEYS, dispatch_cache_of, run_for_key_of, cdist, take_along_dim)


def sdpa_dense() -> Any:
    """Import the operator of flex_attention without a kernel, only when needed: its module is slow to import."""
    return _required(
        "torch._higher_order_ops.flex_attention.sdpa_dense", "forwards with flex_attention are refused"
    )
