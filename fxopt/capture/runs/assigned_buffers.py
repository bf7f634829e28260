"""Buffers that a forward replaces (`self.mean = 0.9 * self.mean + 0.1 * x.mean()`): a graph writes into those that are there."""

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
    """The buffers, in the `state_dict` or not, that the forward has replaced."""
    return {
        (name, key)
        for name, module in made.request.model.named_modules()
        for key, _ in buffers_of(module).items()  # lists no keys in torch.jit
        if (name, key) in made.changes and persistent == (key not in non_persistent_of(module))
    }


def held_alone(made: RunResult, places: Collection[Place]) -> set[Place]:
    """Those of these buffers that nothing else knows: no attribute of a module, also where it is a leaf, and no input or constant."""
    if not places:
        return set()
    model, describe = made.request.model, SnapshotMaker(id)
    held = [tensor for module in model.modules() for tensor in describe(vars(module)).tensors]
    memory = Counter(map(storage_of, [*held, *tensors_in([made.request.inputs, *made.constants.values()])]))
    buffers = {(name, key): buffers_of(model.get_submodule(name))[key] for name, key in places}
    return {place for place, b in buffers.items() if b is not None and memory[storage_of(b)] == 1}


def lend_copies(writer: GraphWriter, places: Collection[Place]) -> dict[Place, torch.Tensor]:
    """Put copies in the places of these buffers, so that who has read one does not see what is written; the buffers."""
    lent = {}
    for name, key in sorted(places):
        buffers = buffers_of(writer.shell.model.get_submodule(name))
        if (buffer := buffers.get(key)) is not None:
            lent[name, key], buffers[key] = buffer, buffer.clone()
    return lent


def write_back(recorder: Recorder, lent: dict[Place, torch.Tensor], others: Any) -> None:
    """Write what the forward has left in these places into the buffers, and put them there.

    It stays where a write would be something else: where it is of another kind, has a history, or shares memory with the
    model's other tensors or with `others`, the inputs, outputs and tensors that are no buffers, into which somebody may write;
    and where the forward has the buffer from elsewhere, too.
    """
    writer = recorder.writer
    for (name, key), buffer in lent.items():
        buffers = buffers_of(writer.shell.model.get_submodule(name))
        value, node = buffers.get(key), writer.made_by(buffer)
        # The graph has to ask the dtype, too: a write would convert.
        if value is None or node is None or len(node.users) != 1 or value.dtype != buffer.dtype:
            continue
        with recorder.paused():  # it is not the forward that reads strides and flags
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
