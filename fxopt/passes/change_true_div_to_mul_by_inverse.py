"""Division by a constant becomes multiplication by its inverse."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_any

from fxopt import effects, graph
from fxopt.graph_index import GraphIndex
from fxopt.rewrite import Change, Refusal, ReversibleRewrite


@dataclasses.dataclass(frozen=True)
class Division:
    """A true division of a value by a constant."""

    node: Node
    denominator: int | float


@dataclasses.dataclass(frozen=True)
class ChangeTrueDivToMulByInverse(ReversibleRewrite[Division]):
    """Replaces `x / c` by `x * (1 / c)`, where `c` is a constant of the graph.

    Where `c` is a power of two, the result is the same bit for bit. Elsewhere it differs by at most one unit
    in the last place more than a division does. Such a division is rewritten only where `x` is known to be a
    floating tensor and where no rounding, comparison, sorting or cast to integers follows that would amplify
    the difference (49 / 49 is 1, 49 * (1 / 49) is less) before a layer, a product, a softmax or a
    normalization mixes it with other values. Undoing brings back the very same `c` from the record.
    Undo it before the graph is traced again: a product in a new trace tells nothing of what it was, so that
    undoing there leaves it as it is.

    Example:
        >>> import operator, torch
        >>> class Scores(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x / 8
        >>> change = ChangeTrueDivToMulByInverse()
        >>> print(change(torch.fx.symbolic_trace(Scores())).code.strip())
        def forward(self, x):
            truediv = x * 0.125;  x = None
            return truediv
    """

    preserves_computation = True

    def match(self, graph_module: GraphModule) -> Iterator[Division | Refusal]:
        """Yield the divisions by a constant."""
        index = GraphIndex(graph_module)
        floating: dict[Node, bool] = {}
        for node in index.nodes:
            floating[node] = _is_floating(index, node, floating)
        for node in filter(_is_division, index.nodes):
            numerator, denominator = _operands(node)
            if not isinstance(numerator, Node):
                continue
            reason = _obstacle(numerator, denominator) or _rounding_obstacle(
                index, node, numerator, denominator, floating
            )
            yield Refusal(node, reason) if reason else Division(node, denominator)

    def apply(self, graph_module: GraphModule, site: Division) -> Change:
        """Make the node a multiplication."""
        node = site.node
        data: dict[str, Any] = {
            "op": node.op,
            "target": node.target,
            "args": len(node.args),
            "kwargs": tuple(node.kwargs),
        }
        numerator, _ = _operands(node)
        inverse = 1 / site.denominator
        node.op, node.target = "call_function", operator.mul
        node.args, node.kwargs = (numerator, inverse), {}
        data |= {"denominator": site.denominator, "inverse": inverse}
        return Change((node,), {"node": node}, data=data)

    def revert(self, graph_module: GraphModule, nodes: dict[str, Node], data: Any) -> None:
        """Make the node the division that it was."""
        node = nodes["node"]
        if node.target is not operator.mul or len(node.args) != 2 or node.args[1] != data["inverse"]:
            raise self.changed(node, node.name)
        values = [node.args[0], data["denominator"]]
        node.op, node.target = data["op"], data["target"]
        node.args = tuple(values[: data["args"]])
        node.kwargs = dict(zip(data["kwargs"], values[data["args"] :], strict=True))


def _is_division(node: Node) -> bool:
    if node.op == "call_method":
        named = node.target in ("div", "divide", "true_divide", "__truediv__")
    else:
        named = node.op == "call_function" and node.target in _DIVISIONS
    return named and len(node.args) + len(node.kwargs) == 2 and set(node.kwargs) <= {"other"}


_DIVISIONS = (operator.truediv, torch.div, torch.divide, torch.true_divide)


def _operands(node: Node) -> tuple[Any, Any]:
    numerator, denominator = [*node.args, *node.kwargs.values()]
    return numerator, denominator


def _obstacle(numerator: Node, denominator: object) -> str | None:
    if isinstance(denominator, Node):
        return "the denominator is computed in the graph"
    if type(denominator) not in (int, float):
        return f"the denominator is a {type(denominator).__name__}, not an int or a float"
    assert isinstance(denominator, int | float)
    if isinstance(denominator, int) and abs(denominator) >= 2**63:
        return "the denominator is not a 64-bit integer"
    if denominator == 0 or not math.isfinite(denominator):
        return f"the denominator is {denominator}"
    dtype = graph.dtype_of(numerator)
    if dtype is not None and dtype.is_complex:
        return "the numerator is complex"
    # Outside of these a constant, or its inverse, underflows or overflows in the dtype of the computation.
    info = torch.finfo(dtype if dtype is not None and dtype.is_floating_point else torch.float16)
    if not all(info.tiny <= abs(value) <= info.max for value in (denominator, 1 / denominator)):
        return f"{denominator} or its inverse is outside of the normal range of {info.dtype} numbers"
    return None


def _rounding_obstacle(
    index: GraphIndex,
    node: Node,
    numerator: Node,
    denominator: int | float,
    floating: dict[Node, bool],
) -> str | None:
    """Why the inverse, which is not exact unless the denominator is a power of two, is not good enough."""
    if math.frexp(abs(denominator))[0] == 0.5:
        return None
    if not floating[numerator]:
        return (
            f"1 / {denominator} is not exact, and {numerator.name} is not known to be a floating tensor "
            "(a graph of fxopt.trace has dtypes)"
        )
    return _rounding_after(index, node, denominator, floating)


def _rounding_after(
    index: GraphIndex, node: Node, denominator: int | float, floating: dict[Node, bool]
) -> str | None:
    """What makes more than a rounding error of the error of `node`; `None` if nothing does."""
    pending, seen = [node], {node}
    while pending:
        for user in pending.pop().users:
            if user in seen or _reads_description(user):
                continue
            seen.add(user)
            if _is_step(index, user, floating):
                what = _name(user) or user.target
                return f"1 / {denominator} is not exact, and {user.name} ({what}) amplifies the error"
            if _is_unknown(index, user):
                return f"1 / {denominator} is not exact, and what {user.name} does with the error is unknown"
            if _is_mixer(index, user):
                continue
            pending.append(user)
            # What reads a tensor that was written into has no edge from here.
            for target in index.memory.written_by(user) or ():
                pending.extend(value for value in index.nodes if index.memory.may_alias(value, target))
    return None


def _is_step(index: GraphIndex, node: Node, floating: dict[Node, bool]) -> bool:
    """Whether a function jumps, so that the least error of its input may change its output by one."""
    if node.op == "call_module":
        return any(_is_step_module(part) for part in index.module(node).modules())
    name, value = _name(node), graph.value_of(node)
    if name in _STEPS or name.startswith(_STEP_PREFIXES):
        return True
    if tree_any(lambda leaf: isinstance(leaf, Tensor) and not _is_inexact(leaf.dtype), value):
        return not effects.is_container(node.target) and node.op != "output"
    rest = [*node.args[1:], *node.kwargs.values()]
    if name in ("max", "min") and any(not isinstance(item, Node) for item in rest):
        return True  # with indices
    if any(isinstance(item, torch.dtype) and not _is_inexact(item) for item in rest):
        return True
    casts = name in ("to", "type", "type_as") and graph.dtype_of(node) is None
    return casts and any(_may_name_integers(name, item, floating) for item in rest)


def _is_step_module(module: nn.Module) -> bool:
    return isinstance(module, nn.Threshold | nn.Hardshrink) or bool(getattr(module, "return_indices", False))


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _may_name_integers(cast: str, item: object, floating: dict[Node, bool]) -> bool:
    """Whether an argument of a cast may stand for a dtype of integers, in a graph without metadata."""
    if isinstance(item, Node):
        is_device = item.target is getattr and item.args[1] == "device"
        return not is_device and not floating.get(item, False)
    if isinstance(item, str | type):  # the string in `x.to("cpu")` is a device
        text = str(item)
        return cast == "type" and not any(name in text for name in ("Float", "Double", "Half", "BFloat"))
    return False


def _is_unknown(index: GraphIndex, node: Node) -> bool:
    """Whether a call is of code that is not torch's, which may round."""
    if node.op == "call_module":
        return not effects.is_torch_module(index.module(node))
    if node.op != "call_function" or effects.is_container(node.target):
        return False
    own = str(getattr(node.target, "__module__", None)).startswith("fxopt.passes.")
    return not own and not effects.is_torch_function(node.target)


def _is_mixer(index: GraphIndex, node: Node) -> bool:
    """Whether a function makes each output of many inputs, with rounding errors of its own."""
    if node.op == "call_module":
        return type(index.module(node)) in _MIXER_MODULES
    return _name(node) in _MIXERS


def _reads_description(node: Node) -> bool:
    """Whether a call reads of a tensor only what does not depend on its values: its shape, its dtype."""
    if node.target is getattr:
        return node.args[1] in _DESCRIPTION
    return _name(node) in _DESCRIPTION


def _name(node: Node) -> str:
    """The name of the function that a node calls, whether it is written as an operator or in place or not."""
    return graph.function_name(node).strip("_")


_STEPS = {
    *("floor", "ceil", "round", "trunc", "fix", "frac", "sign", "sgn", "heaviside", "floor_divide"),
    *("floordiv", "mod", "remainder", "fmod", "divmod", "eq", "ne", "lt", "le", "gt", "ge", "equal"),
    *("isclose", "allclose", "isin", "int", "long", "short", "byte", "char", "bool", "item", "tolist"),
    *("argmax", "argmin", "argsort", "bucketize", "searchsorted", "unique", "unique_consecutive"),
    *("logical_not", "logical_and", "logical_or", "nonzero", "count_nonzero", "any", "all", "less"),
    *("less_equal", "greater", "greater_equal", "not_equal", "topk", "sort", "median", "nanmedian"),
    *("kthvalue", "mode", "cummax", "cummin", "threshold", "hardshrink", "histc", "bincount", "signbit"),
    *("copysign", "angle", "atan2", "arctan2", "grid_sample", "grid_sampler", "gumbel_softmax"),
    *("multinomial", "bernoulli", "frexp", "iremainder", "ifloordiv", "imod", "tensor_split"),
}
_STEP_PREFIXES = ("quantize", "fake_quantize", "max_pool1d_with", "max_pool2d_with", "max_pool3d_with")

# Behind these a jump is no more likely to be hit with the inverse than with the division.
_MIXERS = {
    *("linear", "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d"),
    *("conv_transpose3d", "matmul", "mm", "bmm", "mv", "addmm", "baddbmm", "einsum", "softmax"),
    *("log_softmax", "layer_norm", "group_norm", "batch_norm", "instance_norm", "rms_norm"),
    *("scaled_dot_product_attention",),
}
_MIXER_MODULES: set[type[nn.Module]] = {
    *(nn.Linear, nn.Bilinear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d),
    *(nn.ConvTranspose3d, nn.Softmax, nn.LogSoftmax, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d),
    *(nn.InstanceNorm3d, nn.MultiheadAttention),
}
_DESCRIPTION = {
    *("shape", "size", "dim", "ndim", "numel", "nelement", "stride", "dtype", "device", "get_device"),
    *("requires_grad", "is_floating_point", "is_complex", "element_size", "zeros_like", "ones_like"),
    *("empty_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_ones", "new_empty"),
    *("new_full", "new_tensor"),
}


def _is_floating(index: GraphIndex, node: Node, floating: dict[Node, bool]) -> bool:
    """Whether the value of `node` is surely a floating tensor; by its metadata, else by what made it."""
    dtype = graph.dtype_of(node)
    if dtype is not None:
        return dtype.is_floating_point
    if "val" in node.meta:
        return False
    if node.op == "call_module":
        module = index.module(node)
        own = [p for p in module._parameters.values() if p is not None]
        return type(module) in _FLOATING_MODULES and all(p.is_floating_point() for p in own)
    if node.op in ("call_function", "call_method") and _name(node) in _KEEPS_FLOATING and not node.kwargs:
        tensors = [value for value in node.args if isinstance(value, Node)]
        return (
            bool(tensors) and floating[tensors[0]] and not any(isinstance(a, torch.dtype) for a in node.args)
        )
    return False


_FLOATING_MODULES: set[type[nn.Module]] = {
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding, nn.LayerNorm, nn.BatchNorm1d),
    *(nn.BatchNorm2d, nn.GroupNorm),
}
_KEEPS_FLOATING = {
    *("matmul", "bmm", "softmax", "relu", "gelu", "view", "reshape", "transpose", "permute", "contiguous"),
    *(
        "getitem",
        "flatten",
        "squeeze",
        "unsqueeze",
        "expand",
        "neg",
        "sqrt",
        "exp",
        "tanh",
        "sigmoid",
        "mean",
    ),
}
