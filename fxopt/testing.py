"""The oracle: whether two modules compute the same, and whether an undo gave everything back.

Fresh weights hide faults (BatchNorm statistics are 0 and 1, biases 0), so call `randomise` first.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

RTOL_FLOAT64 = 1e-9
"""How well a correct rewrite agrees in float64, relative to the largest value of a tensor."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """What `compare` measured.

    Attributes:
        tensors: how many tensors were compared.
        values: how many numbers they hold.
        max_abs: the largest absolute difference.
        max_rel: the largest difference of a tensor, relative to the largest value of that tensor.
        where: the path of the tensor with the largest relative difference, such as `output.logits`.
    """

    tensors: int
    values: int
    max_abs: float
    max_rel: float
    where: str


@dataclasses.dataclass(frozen=True)
class Equivalence:
    """What `assert_equivalent` measured.

    Attributes:
        float64: the candidate against the reference, both in float64.
        own: the candidate in its own dtype against the reference in float64.
        baseline: the reference in its own dtype against itself in float64.
    """

    float64: Difference
    own: Difference
    baseline: Difference


def assert_equivalent(
    reference: nn.Module,
    candidate: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    float64: tuple[nn.Module, nn.Module] | None = None,
    rtol: float = RTOL_FLOAT64,
    factor: float = 2.0,
    floor: float = 4.0,
) -> Equivalence:
    """Assert that two modules give the same outputs, every tensor of them.

    First both in float64, where a correct rewrite agrees to `rtol` and a wrong one does not. Then in their
    own dtype, where the candidate may be `factor` times as far from the float64 output as the reference
    itself, plus `floor` units in the last place.

    Args:
        reference: the module that is right.
        candidate: the module to judge.
        args: positional inputs, in the modules' own dtype; floating ones are converted where needed.
        kwargs: keyword inputs.
        float64: reference and candidate in float64, when a converted copy does not do, for example because
            a dtype is baked into the graph. By default, deep copies are converted.
        rtol: tolerance in float64, relative to the largest value of each tensor.
        factor: see above.
        floor: see above; relative to the largest value of each tensor.

    Returns:
        The measured differences.

    Raises:
        AssertionError: an output differs in structure, shape, dtype or value, or holds no tensor.

    Example:
        >>> import torch
        >>> linear = torch.nn.Linear(2, 3)
        >>> result = assert_equivalent(linear, torch.fx.symbolic_trace(linear), [torch.randn(4, 2)])
        >>> result.own.tensors, result.own.max_abs <= 1e-6
        (1, True)
    """
    kwargs = kwargs or {}
    wide_reference, wide_candidate = float64 or (in_float64(reference), in_float64(candidate))
    wide_args, wide_kwargs = _cast(args, torch.float64), _cast(kwargs, torch.float64)
    truth = _call(wide_reference, wide_args, wide_kwargs)
    exact = compare(truth, _call(wide_candidate, wide_args, wide_kwargs))
    if not exact.max_rel <= rtol:
        raise AssertionError(
            f"in float64, {exact.where} differs by {exact.max_rel:.3g} of its largest value "
            f"({exact.max_abs:.3g}); a correct rewrite agrees to {rtol:.0e}"
        )
    expected, actual = _call(reference, args, kwargs), _call(candidate, args, kwargs)
    compare(expected, actual)  # the same structure, shapes and dtypes
    baseline, own = compare(truth, expected, dtypes=False), compare(truth, actual, dtypes=False)
    limit = factor * baseline.max_rel + floor * _epsilon(expected)
    if not own.max_rel <= limit:
        raise AssertionError(
            f"in its own dtype, {own.where} is {own.max_rel:.3g} of its largest value away from the float64 "
            f"output; the original is {baseline.max_rel:.3g} away, so the limit is {limit:.3g}"
        )
    return Equivalence(exact, own, baseline)


def assert_round_trip(before: GraphModule, after: GraphModule) -> int:
    """Assert that `after` is `before` again: nothing of a rewrite is left, and nothing is lost.

    Compared are the nodes (names, order, operations, targets, arguments), the modules (names, order, types,
    options, training flags), parameters and buffers (names, order, values bit for bit, dtype, device,
    `requires_grad`, persistence, and which of them are the same tensor), and the generated code.

    Args:
        before: a deep copy of the graph module, made before the pass.
        after: the graph module after the pass and its undo.

    Returns:
        The number of values compared bit for bit.

    Raises:
        AssertionError: something differs; the message names all kinds of differences found.

    Example:
        >>> import copy, torch
        >>> from fxopt import FuseBiasInLinear
        >>> traced = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 3)))
        >>> before, fuse = copy.deepcopy(traced), FuseBiasInLinear()
        >>> assert_round_trip(before, fuse(fuse(traced), reverse=True))
        9
    """
    views: dict[str, Callable[[GraphModule], Any]] = {
        "nodes": _nodes,
        "modules": _modules,
        "tensors": _tensor_facts,
        "ties": _ties,
        "state_dict": lambda gm: list(gm.state_dict()),
        "code": lambda gm: gm.code,
    }
    problems = [
        f"{name}: {_first_difference(view(before), view(after))}"
        for name, view in views.items()
        if view(before) != view(after)
    ]
    values = 0
    others = dict(_tensors(after))
    for name, tensor in _tensors(before):
        other = others.get(name)
        if other is not None and not _same_bits(tensor, other):
            problems.append(f"values: {name} differs")
        values += tensor.numel()
    if problems:
        raise AssertionError("the round trip is not exact:\n  " + "\n  ".join(problems))
    return values


def randomise(module: nn.Module, seed: int = 0) -> nn.Module:
    """Give every bias, affine scale and running statistic of `module` a random value, in place.

    Matrices keep their values. The same seed gives the same values on every machine: they are drawn in
    float64 on the CPU, module by module.

    Args:
        module: the module to change.
        seed: of the random generator.

    Returns:
        `module` itself.

    Example:
        >>> import torch
        >>> randomise(torch.nn.BatchNorm1d(1), seed=1).running_mean
        tensor([-0.2657])
    """
    generator = torch.Generator().manual_seed(seed)
    seen: set[int] = set()

    def fill(tensor: Tensor | None, low: float, high: float) -> None:
        if tensor is None or id(tensor) in seen or not tensor.is_floating_point():
            return
        seen.add(id(tensor))
        values = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * (high - low) + low
        with torch.no_grad():
            tensor.copy_(values)

    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False):
            if "bias" in name:
                fill(parameter, -0.5, 0.5)
            elif parameter.ndim == 1:  # an affine scale
                fill(parameter, 0.5, 1.5)
        fill(getattr(child, "running_mean", None), -0.5, 0.5)
        fill(getattr(child, "running_var", None), 0.5, 2.0)
    return module


def compare(expected: object, actual: object, dtypes: bool = True) -> Difference:
    """Compare every tensor of two outputs: nested tuples, lists, mappings, model outputs, caches.

    Args:
        expected: the output that is right.
        actual: the output to judge.
        dtypes: whether tensors must have the same dtype.

    Returns:
        The largest differences. Values that are NaN or infinite in both, at the same place, are equal.

    Raises:
        AssertionError: structure, shape, dtype or a non-tensor value differs, or there is nothing to compare.

    Example:
        >>> import torch
        >>> compare({"a": torch.ones(2)}, {"a": torch.tensor([1.0, 1.5])}).max_abs
        0.5
    """
    left, right = dict(leaves(expected)), dict(leaves(actual))
    if list(left) != list(right):
        raise AssertionError(f"the outputs differ in structure: {_first_difference(list(left), list(right))}")
    tensors = values = 0
    max_abs = max_rel = 0.0
    where = ""
    for path, value in left.items():
        other = right[path]
        if not isinstance(value, Tensor) or not isinstance(other, Tensor):
            if type(value) is not type(other) or (not isinstance(value, Tensor) and value != other):
                raise AssertionError(f"{path}: expected {value!r}, got {other!r}")
            continue
        if value.shape != other.shape or (dtypes and value.dtype != other.dtype):
            raise AssertionError(
                f"{path}: expected {value.dtype} {list(value.shape)}, got {other.dtype} {list(other.shape)}"
            )
        absolute, relative = _distance(value, other)
        tensors, values = tensors + 1, values + value.numel()
        if not where or not relative <= max_rel:  # also true for NaN, which must not be lost
            max_rel, where = relative, path
        max_abs = absolute if not absolute <= max_abs else max_abs
    if not tensors or not values:
        raise AssertionError("the outputs hold no tensor with values, so nothing was compared")
    return Difference(tensors, values, max_abs, max_rel, where)


def leaves(value: object, path: str = "output") -> Iterator[tuple[str, object]]:
    """The leaves of a nested output with their paths: tensors, numbers, strings, `None`.

    Example:
        >>> [path for path, _ in leaves({"logits": 1.0, "states": (2, 3)})]
        ['output.logits', 'output.states[0]', 'output.states[1]']
    """
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}")
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]")
    elif hasattr(value, "__dict__") and not isinstance(value, type | nn.Module) and not callable(value):
        for key, item in vars(value).items():  # a cache object, or a dataclass
            yield from leaves(item, f"{path}.{key}")
    else:
        yield path, value


def in_float64(module: nn.Module) -> nn.Module:
    """A deep copy of `module` with floating parameters and buffers in float64."""
    return copy.deepcopy(module).double()


def _call(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    # A forward may write into its inputs, and the seed makes two runs draw the same random numbers.
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        return module(*copy.deepcopy(list(args)), **copy.deepcopy(dict(kwargs)))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: _cast(item, dtype) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_cast(item, dtype) for item in value)
    return value


def _distance(expected: Tensor, actual: Tensor) -> tuple[float, float]:
    if not expected.numel():
        return 0.0, 0.0
    if expected.is_complex():
        expected, actual = torch.view_as_real(expected), torch.view_as_real(actual)
    # Also integers and booleans in float64: exact up to 2**53, and one rule for all.
    wide, other = expected.detach().double().cpu(), actual.detach().double().cpu()
    same = (wide == other) | (wide.isnan() & other.isnan())
    distance = torch.where(same, 0.0, (wide - other).abs())
    if distance.isnan().any() or distance.isinf().any():
        return float("inf"), float("inf")
    finite = wide[wide.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    absolute = float(distance.max())
    return absolute, absolute / largest if largest else (0.0 if absolute == 0 else float("inf"))


def _epsilon(output: object) -> float:
    dtypes = [v.dtype for _, v in leaves(output) if isinstance(v, Tensor) and v.is_floating_point()]
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)


def _nodes(gm: GraphModule) -> list[str]:
    return [node.format_node() or f"output {node.args}" for node in gm.graph.nodes]


def _modules(gm: GraphModule) -> list[tuple[str, str, str, bool]]:
    named = gm.named_modules(remove_duplicate=False)
    return [(name, type(m).__qualname__ if name else "", m.extra_repr(), m.training) for name, m in named]


def _tensors(gm: GraphModule) -> list[tuple[str, Tensor]]:
    parameters = list(gm.named_parameters(remove_duplicate=False))
    return [*parameters, *gm.named_buffers(remove_duplicate=False)]


def _tensor_facts(gm: GraphModule) -> list[tuple[str, str, torch.dtype, torch.device, bool, torch.Size]]:
    return [(name, type(t).__name__, t.dtype, t.device, t.requires_grad, t.shape) for name, t in _tensors(gm)]


def _ties(gm: GraphModule) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, tensor in _tensors(gm):
        names.setdefault(id(tensor), []).append(name)
    return sorted(group for group in names.values() if len(group) > 1)


def _same_bits(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.device.type == "meta" or not left.numel():
        return True
    raw = [t.detach().cpu().clone(memory_format=torch.contiguous_format) for t in (left, right)]
    return torch.equal(*(t.flatten().view(torch.uint8) for t in raw))


def _first_difference(before: Any, after: Any) -> str:
    if isinstance(before, str):
        before, after = before.splitlines(), after.splitlines()
    for old, new in zip(before, after, strict=False):
        if old != new:
            return f"{old!r} became {new!r}"
    longer, word = (before, "is gone") if len(before) > len(after) else (after, "is new")
    return f"{longer[min(len(before), len(after))]!r} {word}"
