"""The table of facts about torch's operators, on which all passes rely: a new operator is one word in one row.

The table lists operators by name, in any spelling: `torch.relu`, `F.relu`, `x.relu()`, `x.relu_()`, `aten.relu.default`
and `nn.ReLU` are all `relu`. `tests/test_operators.py` tests each column by calling the operators. A name that is not in
the table has no facts; passes are conservative about such operators.
"""

from __future__ import annotations

import enum
import functools
import keyword
import operator
import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

from fxopt import graph
from fxopt.objects import build_object, in_order, set_attributes, set_items
from fxopt.submodules import parts
from fxopt.torch_internals import OpOverload, OpOverloadPacket, bindings


class Fact(enum.Flag):
    """A column of the table: a fact about an operator. An error is small if it is small relative to the value."""

    NEW = enum.auto()  # its value shares no memory with its inputs, unless the call writes (`relu_`, `out=`)
    VIEW = enum.auto()  # its value may be its first input, or a part of it
    RESHAPES = enum.auto()  # it keeps the order of the elements of its first input, if the dtypes are equal
    COPIES = enum.auto()  # its value is a view or a copy, depending on the strides of its input
    LAYOUT = enum.auto()  # it depends on the strides of its input
    ELEMENTWISE = enum.auto()  # an element of its value depends only on the elements at the same place
    SMOOTH = enum.auto()  # a small error of its inputs stays small: it has no jump and no pole
    SMOOTH_IN_FIRST = enum.auto()  # it is smooth in its first input; `pow` for positive integer exponents
    MIXES = enum.auto()  # it computes each output from many inputs, with rounding errors of its own
    KEEPS_DTYPE = enum.auto()  # its value has the one floating dtype of its tensors, or a passed dtype
    SEVERAL = enum.auto()  # its value may be several tensors, possibly including indices
    DESCRIBES = enum.auto()  # it reads only the shape, dtype or device of its first input, not its numbers
    RANDOM = enum.auto()  # it may draw random numbers
    STATISTICS = enum.auto()  # in training it writes into its running statistics, whatever its schema says


_NEW, _MIXES, _SMOOTH = (kind | Fact.KEEPS_DTYPE for kind in (Fact.NEW, Fact.MIXES, Fact.SMOOTH))
_VIEW = Fact.VIEW | _SMOOTH

_ROWS: dict[str, Fact] = {
    "add sub subtract rsub mul multiply neg negative abs absolute square exp exp2 expm1 sin cos atan arctan asinh "
    "arcsinh erf erfc sigmoid tanh relu relu6 leaky_relu elu selu celu gelu silu mish hardtanh hardswish hardsigmoid "
    "log_sigmoid softsign softshrink tanhshrink clamp clamp_min clamp_max clip maximum minimum fmax fmin lerp "
    "addcmul logaddexp masked_fill nan_to_num": _NEW | Fact.ELEMENTWISE | _SMOOTH,
    "div divide true_divide truediv pow": _NEW | Fact.ELEMENTWISE | Fact.SMOOTH_IN_FIRST,
    "sqrt rsqrt reciprocal log log2 log10 log1p tan acos asin floor ceil round trunc frac sign floor_divide floordiv "
    "remainder mod fmod softplus threshold hardshrink": _NEW | Fact.ELEMENTWISE,
    "and or xor invert lshift rshift bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift "
    "eq ne lt le gt ge not_equal less less_equal greater greater_equal isnan isinf isfinite logical_not logical_and "
    "logical_or logical_xor": Fact.NEW | Fact.ELEMENTWISE,
    "sum mean amax amin var std logsumexp cumsum cat stack hstack vstack clone repeat repeat_interleave tile flip roll tril "
    "triu gather index_select index_add index_copy scatter scatter_add masked_select masked_scatter pad prelu glu "
    "embedding avg_pool1d avg_pool2d avg_pool3d": _NEW | _SMOOTH,
    "max min where max_pool1d max_pool2d max_pool3d": _NEW | _SMOOTH | Fact.SEVERAL,
    "interpolate upsample adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d": _NEW | _SMOOTH,
    "pixel_shuffle": _SMOOTH,  # a view if the factor is 1
    "prod cumprod grid_sample affine_grid": _NEW,
    "any all argmax argmin argsort count_nonzero cdist pdist dist outer cross cosine_similarity pairwise_distance bucketize "
    "searchsorted histc one_hot atan2 hypot sinh cosh xlogy cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss "
    "binary_cross_entropy binary_cross_entropy_with_logits kl_div": Fact.NEW,
    "arange zeros ones full linspace eye tril_indices triu_indices scalar_tensor": Fact.NEW,
    "sort topk median mode kthvalue cummax cummin aminmax": Fact.NEW | Fact.SEVERAL,
    "reshape reshape_as flatten contiguous channels_last": _VIEW | Fact.COPIES | Fact.RESHAPES,
    "ravel": _VIEW | Fact.COPIES,
    "unflatten squeeze unsqueeze": _VIEW | Fact.RESHAPES,
    "transpose t T mT H mH swapaxes swapdims permute "
    "movedim expand expand_as broadcast_to narrow select slice getitem diagonal unfold detach alias data "
    "real imag view_as_real positive identity": _VIEW,
    "view view_as unsafe_view": _VIEW | Fact.LAYOUT | Fact.RESHAPES,
    "as_strided": _VIEW | Fact.LAYOUT,
    "view_as_complex": Fact.VIEW | Fact.SMOOTH | Fact.LAYOUT,
    "chunk split split_with_sizes tensor_split unbind hsplit vsplit dsplit unsafe_chunk unsafe_split meshgrid "
    "broadcast_tensors": _VIEW | Fact.SEVERAL,
    "to type type_as float double half bfloat16 cpu cuda saturate": Fact.VIEW | Fact.SMOOTH,
    "bool long int short char byte": Fact.VIEW,
    "setitem copy fill zero": _SMOOTH,
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout": _VIEW | Fact.RANDOM,
    "linear bilinear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution matmul mm bmm "
    "mv addmm baddbmm softmax log_softmax softmin layer_norm group_norm rms_norm normalize": _NEW | _MIXES,
    "scaled_dot_product_attention": _NEW | _MIXES | Fact.RANDOM,
    "batch_norm instance_norm": _NEW | _MIXES | Fact.STATISTICS,
    "native_batch_norm": Fact.MIXES | Fact.SEVERAL | Fact.STATISTICS,
    "tensordot": _NEW | _MIXES,
    "einsum": _MIXES,  # may be a view if it has one tensor: einsum("ij->ji", x)
    "lstm gru rnn": _NEW | _MIXES | Fact.SEVERAL | Fact.RANDOM,
    "multihead_attention multi_head_attention_forward": _NEW | _MIXES | Fact.SEVERAL | Fact.RANDOM,
    "shape size dim ndim ndimension numel nelement dtype device layout get_device is_floating_point "
    "is_complex is_cuda element_size itemsize": Fact.DESCRIBES,
    "is_contiguous stride storage_offset": Fact.DESCRIBES | Fact.LAYOUT,
    "data_ptr storage untyped_storage numpy": Fact.LAYOUT,
    "zeros_like ones_like empty_like full_like new_zeros new_ones new_empty new_empty_strided new_full": _NEW
    | Fact.DESCRIBES,
    "rand_like randn_like": _NEW | Fact.DESCRIBES | Fact.RANDOM,
    "bernoulli binomial cauchy exponential geometric log_normal multinomial normal poisson uniform": Fact.RANDOM,
    "rand randint randint_like randn randperm": Fact.RANDOM,
    "rrelu rrelu_with_noise feature_dropout native_dropout gumbel_softmax": Fact.RANDOM,
}

TABLE = {name: facts for names, facts in _ROWS.items() for name in names.split()}
"""The facts of each name."""


def facts_of(node: Node, module: nn.Module | None = None) -> Fact:
    """Look up the facts of the operator that a node calls; none if it is not one of torch's own.

    Args:
        node: any node.
        module: the module that a `call_module` node calls; only modules whose type is exactly one of `torch.nn` or a packed
            layer, without hooks, have facts.
    """
    if module is None:
        return TABLE.get(name_of(node), Fact(0))
    kind: Any = type(module)
    return Fact(0) if hooks_of(module) or "forward" in vars(module) else _facts_of_kind(kind)


def reads_bits(node: Node) -> bool:
    """Tell whether a node reinterprets bits as numbers of another dtype, as `x.view(torch.int32)` does."""
    options = (*node.args[1:], *node.kwargs.values())
    return Fact.LAYOUT in facts_of(node) and any(isinstance(option, torch.dtype) for option in options)


def name_of(node: Node) -> str:
    """The name of the operator that a node calls as a function or method, or reads; empty if it is not torch's own.

    Example:
        >>> x = torch.fx.Graph().placeholder("x")
        >>> [name_of(x.graph.call_function(each, (x,))) for each in (torch.relu_, operator.iadd, print)]
        ['relu', 'add', '']
    """
    if node.op == "call_function" and node.target is not getattr:
        return _name_of_function(node.target)
    if node.op != "call_method" and node.target is not getattr:
        return ""
    owner = graph.value_of(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
    if owner is not None and not isinstance(owner, Tensor):
        return ""
    return _bare(str(node.args[1] if node.target is getattr else node.target))


def is_container(target: object) -> bool:
    """Tell whether a call target only packs its arguments: into a tuple, a dict, a model output, an object."""
    if target in (build_object, in_order, set_attributes, set_items):
        return True
    return isinstance(target, type) and issubclass(target, tuple | list | dict)


def is_torch_module(module: nn.Module) -> bool:
    """Tell whether a module is one of torch's own layers, whose effects are known, without a forward of its own."""
    homes = ("torch.nn.", "fxopt.kernels")
    return all(
        type(part).__module__.startswith(homes) and "forward" not in vars(part) for part in parts(module)
    )


def is_torch_function(target: object) -> bool:
    """Tell whether a call target belongs to torch or to Python itself, so that its name shows whether it writes."""
    module = getattr(target, "__module__", None) or ""
    return module.split(".")[0] in _WELL_NAMED or isinstance(target, type(torch.Tensor.add))


def is_known_function(target: object) -> bool:
    """Tell whether a call target belongs to torch or Python and accepts any dtype and strides.

    Operators that other packages registered may not.
    """
    namespace = re.match(r"torch\._?ops\.(\w+)", getattr(target, "__module__", None) or "")
    return is_torch_function(target) and (namespace is None or namespace[1] in _NAMESPACES)


def is_write_name(name: str) -> bool:
    """Tell whether a function of this name writes into its first argument, by torch's naming rule.

    Example:
        >>> [name for name in ("add_", "__iadd__", "__setitem__", "add", "and_") if is_write_name(name)]
        ['add_', '__iadd__', '__setitem__']
    """
    bare = name.strip("_")
    if name.startswith("__") and name.endswith("__"):
        return bare in ("setitem", "delitem") or _is_augmented(bare)
    return name.endswith("_") and not name.endswith("__") and not keyword.iskeyword(bare)


def hooks_of(module: nn.Module) -> list[str]:
    """The kinds of hooks that a module has; a hook may change inputs and outputs of a call in any way."""
    return [name for name in _HOOKS if vars(module).get(name)]


_HOOKS = [name for name in vars(nn.Module()) if name.endswith("_hooks")]


# Python modules whose functions write into an argument only if their name, `out` or `inplace` says so.
_WELL_NAMED = ("torch", "_operator", "operator", "math", "builtins")

# The namespaces of torch's operators, and of those of transformers, which are composed of torch's.
_NAMESPACES = ("aten", "prim", "prims", "transformers")

_HOMES = (torch, F, Tensor, operator, bindings["_nn"])
"""The namespaces of the functions in the table: a function of the same name from elsewhere has no facts."""


@functools.lru_cache(maxsize=4096)
def _name_of_function(target: Any) -> str:
    name, module = str(getattr(target, "__name__", "")), str(getattr(target, "__module__", ""))
    if isinstance(target, OpOverload | OpOverloadPacket):
        known = str(target).startswith("aten.")
    else:
        known = module.startswith(("fxopt.passes.", "fxopt.memory_formats")) or any(
            getattr(home, name, None) is target for home in _HOMES
        )
    return _bare(name.split(".")[0]) if known else ""


@functools.lru_cache(maxsize=4096)
def _facts_of_kind(kind: Any) -> Fact:
    if kind.__module__ == "fxopt.kernels":
        kind = kind.__bases__[-1]  # a packed layer has the facts of its plain layer
    name = kind.__name__
    if getattr(nn, name, None) is not kind:
        return Fact(0)
    name = name.lower()
    return _OF_MODULES.get(name) or _OF_MODULES.get(re.sub(r"[123]d$", "", name), Fact(0))


_OF_MODULES = {name.replace("_", ""): facts for name, facts in TABLE.items()}


@functools.lru_cache(maxsize=4096)
def _bare(name: str) -> str:
    """The name of an operator, without the marks of an in-place form."""
    bare = name.strip("_")
    return bare[1:] if _is_augmented(bare) else bare


def _is_augmented(bare: str) -> bool:
    """Tell whether a name is that of an augmented assignment: `iadd`, but not `index`, where `ndex` is not an operator."""
    rest = bare[1:]
    return bare[:1] == "i" and (hasattr(operator, rest) or hasattr(operator, f"{rest}_") or rest == "div")
