"""One call of a module, and its effects: its output, and its writes into inputs and buffers."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxopt.compare import Difference, checksum, compare, pairs, unchanged
from fxopt.float64 import wide_dtype
from fxopt.objects import tensors_in, why_no_inputs
from fxopt.outputs import mapped, restored
from fxopt.testing.aliases import aliases, in_memory
from fxopt.torch_internals import version_of

GIVEN, BROKEN = "the given inputs", "NaN and infinities"


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of a call, and a name for them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str = GIVEN

    @classmethod
    def given(cls, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Call:
        """Make the call with these inputs; raise a TypeError if they are not valid inputs."""
        fault = why_no_inputs(args, kwargs)
        if fault:
            raise TypeError(fault)
        return cls(tuple(args), dict(kwargs or {}))

    def cast(self, dtype: torch.dtype) -> Call:
        """Copy the call, with floating tensors in `dtype`, and complex tensors in the corresponding complex dtype."""
        return self.changed(lambda t: copied(t, wide_dtype(t, dtype)))

    def fresh(self) -> Call:
        """Copy the call, so that the callee may write into the tensors."""
        return self.changed(copied)

    def apart(self) -> Call:
        """Copy tensors that are more than one argument, so that all arguments are different tensors."""
        seen: set[int] = set()

        def one(value: Any) -> Any:
            again = isinstance(value, Tensor) and id(value) in seen
            seen.add(id(value))
            return copied(value) if again else value

        return Call(
            tuple(map(one, self.args)), {key: one(value) for key, value in self.kwargs.items()}, self.name
        )

    def changed(self, function: Callable[[Tensor], Tensor], name: str = "") -> Call:
        """Make the call with `function(tensor)` in place of each tensor."""
        args, kwargs = mapped(
            (list(self.args), self.kwargs), lambda t: function(t).requires_grad_(t.requires_grad)
        )
        return Call(tuple(args), kwargs, name or self.name)


def copied(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Copy a tensor with its layout in memory, including gaps between its rows and before its first entry."""
    copy = tensor.detach().to(dtype or tensor.dtype, copy=True)
    if tensor.layout != torch.strided or tensor.is_nested or not tensor.numel() or 0 in tensor.stride():
        return copy
    first = int(tensor.storage_offset() > 0)
    if copy.stride() == tensor.stride() and not first:
        return copy
    length = first + 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    memory = torch.empty(length, dtype=copy.dtype, device=tensor.device)
    # NaN in the gaps, so that code that reads them fails each time.
    memory.untyped_storage().fill_(255)  # type: ignore[attr-defined]
    return memory.as_strided(tensor.shape, tensor.stride(), first).copy_(copy)


@dataclasses.dataclass
class Observation:
    """The effects of one call.

    Attributes:
        output: a copy of the result, made before the next call.
        result: the result itself.
        inputs: the inputs after the call.
        writes: whether the call wrote into its inputs.
        buffers: the buffers whose values differ from those before the first call, as they are after this call.
        aliases: pairs of a tensor of the result, and the tensor or object that shares its memory, by path.
        kept: whether the result was still unchanged after all the calls.
        parameters: the names of parameters that the calls wrote into.
    """

    output: Any
    result: Any
    inputs: list[Any]
    writes: bool
    buffers: dict[str, Tensor]
    aliases: frozenset[tuple[str, str]]
    kept: bool = True
    parameters: tuple[str, ...] = ()


def observe(module: nn.Module, calls: list[Call]) -> list[Observation]:
    """Call one instance several times, under the same seed, and restore its buffers afterwards."""
    seen: list[Observation] = []
    given: Call | None = None
    weights = dict(module.named_parameters())
    states = {name: _state(weight) for name, weight in weights.items()}
    with restored(module, dict(module.named_buffers())) as before:
        for call in calls:
            given = (_again(given, seen[-1], call) if given else None) or call.fresh()
            result = _run(module, given, call.name)
            after = {
                name: buffer.detach().clone()
                for name, buffer in module.named_buffers()
                if name not in before or not unchanged(before[name][1], buffer)
            }
            inputs = [list(given.args), given.kwargs]
            writes = not unchanged([list(call.args), call.kwargs], inputs)
            keeps = [*weights.values(), *module.buffers(), *(each.result for each in seen)]
            shared = aliases(result, inputs, keeps)
            seen.append(Observation(mapped(result, _copied), result, inputs, writes, after, shared))
        written = tuple(name for name, weight in weights.items() if _state(weight) != states[name])
        for each in seen:
            each.kept, each.parameters = unchanged(each.output, each.result), written
    return seen


def _state(weight: Tensor) -> tuple[int, int]:
    """The version and a checksum of a weight: writes through `.data` leave the version, and a copy would need more memory."""
    return 0 if weight.is_inference() else version_of(weight), checksum(weight)


def _again(given: Call, seen: Observation, call: Call) -> Call | None:
    """Reuse the tensors of an earlier call for the values of `call`, to expose stale caches; None if that is not possible."""
    if seen.writes or any(other.startswith("input") for _, other in seen.aliases):
        return None
    sides = [list(tensors_in([each.args, each.kwargs])) for each in (given, call)]
    facts = [[(each.shape, each.stride(), each.dtype) for each in side if in_memory(each)] for side in sides]
    if facts[0] != facts[1] or len(facts[0]) < len(sides[0]):
        return None
    with torch.no_grad():
        for one, other in zip(*sides, strict=True):
            one.copy_(other)
    return given


def run_call(module: Callable[..., Any], call: Call) -> Any:
    """Run a module on a copy of the inputs, without gradients and always under the same seed."""
    return _run(module, call.fresh(), call.name)


def _run(module: Callable[..., Any], given: Call, name: str) -> Any:
    # Some probes raise errors on purpose, and torch.fx graphs print their errors.
    quiet = contextlib.nullcontext() if name == GIVEN else contextlib.redirect_stderr(io.StringIO())
    with torch.no_grad(), torch.random.fork_rng(), quiet:
        torch.manual_seed(0)  # two runs draw the same random numbers
        try:
            return module(*given.args, **given.kwargs)
        except Exception as error:
            if name != GIVEN:
                error.add_note(f"with {name}")
            raise


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def not_repeated(again: Observation, first: Observation, limit: float) -> str:
    """Describe how two runs on the same inputs differ by more than a limit; empty if they do not."""
    if unchanged(again.output, first.output):
        return ""
    try:
        found = compare(first.output, again.output)
        text = "" if found.max_rel <= limit else f"{found.where} is {found.max_rel:.3g} off"
    except AssertionError as error:
        text = str(error)
    return text and f"the original does not repeat itself on the same inputs, under one seed: {text}"


def difference(
    call: Call,
    expected: Observation,
    actual: Observation,
    where: str = "",
    *,
    buffers: Collection[str],
    strides: bool,
    dtypes: bool = True,
    exact: bool = True,
) -> Difference:
    """Measure the difference between the outputs, written inputs and written buffers of two modules in one call.

    Args:
        call: the call of both modules.
        expected: the observation of the original.
        actual: the observation of the candidate.
        where: the beginning of error messages.
        buffers: the names of the buffers of the original; other buffers of a candidate are ignored.
        strides: whether outputs must have the same strides, and share memory wherever those of the original do.
        dtypes: whether tensors must have the same dtype; `False` also skips strides and shared memory.
        exact: `False` if buffers may have other dtypes, and outputs need not share memory.

    Raises:
        AssertionError: structure, shape, dtype, writes or shared memory differ.
    """

    def parts(seen: Observation) -> dict[str, Any]:
        kept = {name: seen.buffers[name] for name in expected.buffers}
        if not exact:
            kept = {name: buffer.to(expected.buffers[name].dtype) for name, buffer in kept.items()}
        return {"output": seen.output, "input": seen.inputs * expected.writes, "buffer": kept}

    try:
        if expected.kept and not actual.kept:
            raise AssertionError("a later call changes the result that this one returned")
        for name in expected.buffers.keys() ^ (actual.buffers.keys() & buffers):
            writes = "does not write" if name in expected.buffers else "writes"
            raise AssertionError(f"it {writes} the buffer {name}, unlike the original")
        if expected.writes != actual.writes:
            writes = "does not write" if expected.writes else "writes"
            raise AssertionError(f"it {writes} its inputs, unlike the original")
        if actual.parameters and not expected.parameters:
            raise AssertionError(f"it writes the parameter {actual.parameters[0]}, unlike the original")
        # Attention kernels propagate NaN to fewer elements than the matrix products that they replace.
        found = compare(parts(expected), parts(actual), dtypes, path="", nan_anywhere=call.name == BROKEN)
        if strides and dtypes:
            pairs(expected.result, actual.result, strides=True)
        for place, other in sorted(actual.aliases - expected.aliases if dtypes else ()):
            raise AssertionError(f"{place} shares memory with {other}, unlike that of the original")
        # A change of precision casts each of two views, and the results share no memory.
        for place, other in sorted(expected.aliases - actual.aliases if strides and dtypes and exact else ()):
            raise AssertionError(f"{place} shares no memory with {other}, unlike that of the original")
    except AssertionError as error:
        raise AssertionError(f"{where}{f'with {call.name}, ' * (call.name != GIVEN)}{error}") from error
    return found
