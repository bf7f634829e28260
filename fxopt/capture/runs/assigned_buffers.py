"""Buffers that a forward replaces (`self.mean = 0.9 * self.mean + 0.1 * x.mean()`): the graph writes into the old buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

import torch

from fxopt.capture.fakes.snapshots import SnapshotMaker
from fxopt.capture.nodes.graph_writer import GraphWriter
from fxopt.capture.recording.recorder import Recorder
from fxopt.capture.runs.run_result import RunResult
from fxopt.memory import storage_of
from fxopt.objects import tensors_in
from fxopt.torch_internals import buffers_of, non_persistent_of, parameters_of

# A module of the model and the name of a buffer in it.
Place = tuple[str, str]


def replaced_buffers(made: RunResult, persistent: bool) -> set[Place]:
    """Return the buffers that the forward replaced: those in the `state_dict` if `persistent`, else the others."""
    return {
        (name, key)
        for name, module in made.request.model.named_modules()
        for key, _ in buffers_of(module).items()  # lists no keys in torch.jit
        if (name, key) in made.changes and persistent == (key not in non_persistent_of(module))
    }


def unshared_buffers(made: RunResult, places: Collection[Place]) -> set[Place]:
    """Return the buffers among `places` whose memory no attribute of a module, leaves included, no input and no constant shares."""
    if not places:
        return set()
    model, describe = made.request.model, SnapshotMaker(id)
    held = [tensor for module in model.modules() for tensor in describe(vars(module)).tensors]
    memory = Counter(map(storage_of, [*held, *tensors_in([made.request.inputs, *made.constants.values()])]))
    buffers = {(name, key): buffers_of(model.get_submodule(name))[key] for name, key in places}
    return {place for place, b in buffers.items() if b is not None and memory[storage_of(b)] == 1}


def lend_copies(writer: GraphWriter, places: Collection[Place]) -> dict[Place, torch.Tensor]:
    """Replace these buffers by copies, so that values read earlier do not see later writes; return the buffers."""
    lent = {}
    for name, key in sorted(places):
        buffers = buffers_of(writer.shell.model.get_submodule(name))
        if (buffer := buffers.get(key)) is not None:
            lent[name, key], buffers[key] = buffer, buffer.clone()
    return lent


def write_back(recorder: Recorder, lent: dict[Place, torch.Tensor], others: Any) -> None:
    """Write the tensors that the forward left in these places into the old buffers, and put the old buffers back.

    A new tensor stays if a write would not be equivalent. This is so if it has another dtype, device or layout, requires
    gradients, or shares memory with other tensors of the model or with `others`: inputs, outputs and tensors that are not
    buffers, which may be written later. It also stays if the forward has another reference to the old buffer.
    """
    writer = recorder.writer
    for (name, key), buffer in lent.items():
        buffers = buffers_of(writer.shell.model.get_submodule(name))
        value, node = buffers.get(key), writer.made_by(buffer)
        # This read of the dtype is recorded, so that the graph checks it: a write would convert.
        if value is None or node is None or len(node.users) != 1 or value.dtype != buffer.dtype:
            continue
        with recorder.paused():  # these reads of strides and flags are not the forward's
            given = set(map(storage_of, tensors_in(others)))
            held = Counter(map(storage_of, [buffer, *_registered(writer.shell.model)]))
            alone = held[storage_of(value)] == 1 and not given & {storage_of(value), storage_of(buffer)}
            written = alone and _is_like(value, buffer)
        if written:
            buffers[key] = buffer
            buffer.copy_(value)


def _registered(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        held = [*parameters_of(module).values(), *buffers_of(module).values()]
        yield from (tensor for tensor in held if tensor is not None)


def _is_like(value: torch.Tensor, buffer: torch.Tensor) -> bool:
    return (
        not (value.requires_grad or buffer.requires_grad)
        and (value.device, value.layout) == (buffer.device, buffer.layout)
        and (value.shape, value.stride()) == (buffer.shape, buffer.stride())
    )
