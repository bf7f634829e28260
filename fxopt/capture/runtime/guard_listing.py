"""`guards`: the assumptions of a captured graph about its inputs, as a readable list."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from fxopt.capture.runtime.input_guard import InputGuard
from fxopt.capture.runtime.input_specs import (
    ConstantSpec,
    NumberSpec,
    StructureSpec,
    TensorSpec,
    describe,
    dtype_kind,
)
from fxopt.graph import check_graph_module


@dataclasses.dataclass(frozen=True)
class Guard:
    """One assumption of a graph about an input; a call that violates it raises GuardError.

    Attributes:
        input: the input, with the path inside it: `input_ids`, `past_key_values.layers[0].keys`. Empty for a
            decision on a value that the graph computes, and for a global mode.
        dimension: the dimension of the input that is limited; None for the whole input.
        limit: the condition, as text: `input_ids.shape[1] <= 512`.
        source: the line of the model that needs the condition, or another origin.

    Example:
        >>> import torch, fxopt
        >>> gm = fxopt.trace(torch.nn.ReLU(), (torch.zeros(3),))
        >>> fxopt.guards(gm)[1]
        Guard(input='input', dimension=0, limit='input.shape[0] == 3', source='the example input')
        >>> print(fxopt.guards(gm)[1])
        input, dimension 0: input.shape[0] == 3  (the example input)
    """

    input: str
    dimension: int | None
    limit: str
    source: str

    def __str__(self) -> str:
        dimension = "" if self.dimension is None else f", dimension {self.dimension}"
        subject = f"{self.input or 'the run'}{dimension}"
        return f"{subject}: {self.limit}  ({self.source})"


def guards(gm: torch.fx.GraphModule) -> list[Guard]:
    """List the assumptions that calls of `gm` check.

    Args:
        gm: a captured graph module, also after passes, `copy.deepcopy` or pickling.

    Returns:
        One `Guard` for each assumption, in the order of the inputs; then conditions on sizes, decisions and modes. Empty
        for a graph module that `fxopt.trace` did not make: it may make assumptions, but does not check them.

    Raises:
        TypeError: if `gm` is not a graph module.

    Example:
        >>> import torch, fxopt
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2)).eval()
        >>> rows = torch.export.Dim("rows", max=64)
        >>> gm = fxopt.trace(model, (torch.zeros(5, 3, 4),), dynamic_shapes=({0: rows},))
        >>> print(*fxopt.guards(gm), sep="\\n")
        input: a tensor of 3 dimensions, floating  (the example input)
        input, dimension 0: input.shape[0] >= 1  (as all free sizes)
        input, dimension 1: input.shape[1] == 3  (the example input)
        input, dimension 2: input.shape[2] == 4  (the example input)
        input, dimension 0: input.shape[0] <= 64  (dynamic_shapes: Dim('rows', min=0, max=64))
    """
    check_graph_module(gm, "guards takes")
    called = dict.fromkeys(str(node.target) for node in gm.graph.nodes if node.op == "call_module")
    modules = [gm.get_submodule(target) for target in called]
    found = [guard for m in modules if isinstance(m, InputGuard) for guard in _listed(m)]
    for mode, (on, where) in getattr(gm, "modes_read", {}).items():
        found.append(Guard("", None, f"{mode} is {'on' if on else 'off'}", where))
    return found


def _listed(module: InputGuard) -> Iterator[Guard]:
    for expected in module.inputs:
        if isinstance(expected, TensorSpec):
            yield from _of_tensor(expected, module)
        else:
            yield Guard(describe(expected), None, _of_value(expected, module), "the example input")
    first, *others = module.alternatives
    for guard in first:
        input, dimension = module.subjects[guard.symbols[0]]
        yield Guard(input, dimension, module.words[guard.condition], guard.source)
    for alternative in others:
        input, dimension = module.subjects[alternative[0].symbols[0]]
        conditions = " and ".join(f"({module.words[guard.condition]})" for guard in alternative)
        yield Guard(
            input, dimension, f"or, instead of what sizes must be else: {conditions}", alternative[0].source
        )
    for decision in module.decisions:
        decided, _, where = decision.partition(": ")
        yield Guard("", None, decided, where)


def _of_tensor(expected: TensorSpec, module: InputGuard) -> Iterator[Guard]:
    name, example = describe(expected), "the example input"
    kind = "of any dtype" if expected.any_dtype else dtype_kind(expected.dtype)
    dtype = str(expected.dtype) if expected.strict_dtype else kind
    yield Guard(name, None, f"a tensor of {len(expected.shape)} dimensions, {dtype}", example)
    if expected.layout is not None:
        contiguous = "contiguous" if expected.layout[0] else "laid out as the example, not contiguous"
        yield Guard(name, None, contiguous, "the forward reads strides")
    if expected.requires_grad is not None:
        yield Guard(name, None, f"requires_grad is {expected.requires_grad}", "the forward reads that")
    if expected.same_as is not None:
        same = (
            f"the same tensor as {expected.same_as}"
            if expected.same_as != name
            else "no tensor that is given before"
        )
        yield Guard(name, None, same, "the forward compares tensors by identity or memory address")
    for dim, size in enumerate(expected.shape):
        place = f"{name}.shape[{dim}]"
        if module.words.get(str(size)) != place:
            source = dict(expected.fixed_by).get(dim, example)
            yield Guard(name, dim, f"{place} == {module.words.get(str(size), size)}", source)
        if not isinstance(size, int):
            yield Guard(name, dim, f"{place} >= 1", "as all free sizes")


def _of_value(expected: ConstantSpec | NumberSpec | StructureSpec, module: InputGuard) -> str:
    if isinstance(expected, ConstantSpec):
        return f"is {expected.value!r}"
    if isinstance(expected, NumberSpec):
        return f"an int, {module.words.get(str(expected.value), expected.value)}"
    return f"a {expected.type.__name__} of {list(expected.keys)}"
