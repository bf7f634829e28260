"""Finds the fastest kernel of a layer by running each one: no kernel is the fastest for every shape on every processor.

The times are cached in the process, and for later processes in a file: `kernels.jsonl` in the folder that the environment
variable `FXOPT_CACHE` names, by default `~/.cache/fxopt`. Each measurement appends a line; the last line of a key is valid.
The machine may be busy during a measurement. So later processes measure again and keep the shorter times, until a process
confirms the times of the file; then all processes use these times.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import platform
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from fxopt.activations import ACTIVATIONS
from fxopt.kernels import kernels_for, packed_layer
from fxopt.memory_formats import channels_last
from fxopt.submodules import with_parameters
from fxopt.torch_internals import parameters_of
from fxopt.version import __version__

R = TypeVar("R")

PLAIN = "plain"
"""The name of torch's own kernel."""


MARGIN = 0.97
"""A kernel is faster if it takes at most this fraction of the plain kernel's time; smaller gains may be noise."""

_WORKING_SET = 2**25  # bytes of weights to cycle through, to read them from memory as in a whole model
_MOST_COPIES = 16  # largest number of copies of a layer, each with its own weights
_SECONDS = 0.01  # time to run each kernel of a layer

_SPREAD = 1.15  # largest ratio of the least times of two processes on an idle machine

_PROCESSES = "processes"  # key in each row: the number of processes that found the same times, 1.0 or 2.0

_rows: dict[str, dict[str, float]] = {}  # by key; times of this process count as confirmed
_lock = threading.Lock()  # threads that measure at once would slow each other down


def fastest(
    layer: nn.Module,
    shape: Sequence[int],
    *,
    rounding: bool = False,
    alone: bool = False,
    activation: str | None = None,
) -> tuple[str, Mapping[str, float]]:
    """Find the fastest kernel for a layer and the shape of its input.

    Args:
        layer: a `torch.nn.Linear`, `torch.nn.Conv1d` or `torch.nn.Conv2d`.
        shape: the shape of its input.
        rounding: whether to include kernels that round the weight.
        alone: whether to leave out kernels that need the plain weight in addition to the packed one.
        activation: the name of the activation that follows the layer; its time is included.

    Returns:
        The name of the kernel, `plain` for torch's own, and the time of each kernel in seconds.

    Example:
        >>> import torch
        >>> name, seconds = fastest(torch.nn.Linear(8, 4), (2, 8))
        >>> name in seconds
        True
    """
    seconds = measured(layer, shape, kernels_for(layer, rounding=rounding, alone=alone), activation)
    return _choice(seconds), seconds


def measured(
    layer: nn.Module, shape: Sequence[int], kernels: Sequence[str], activation: str | None = None
) -> Mapping[str, float]:
    """Return the seconds that torch's kernel and others take for a layer and its activation, from the cache or measured."""
    key = _key(layer, shape, activation)
    found = _looked_up(key, [PLAIN, *kernels], lambda: _measure(layer, shape, kernels, activation))
    return {name: found[name] for name in (PLAIN, *kernels)}


def is_slower(layer: nn.Module, shape: Sequence[int], kernel: str, activation: str | None = None) -> bool:
    """Tell whether earlier measurements found a kernel slower than torch's own, without measuring."""
    with _lock:
        _load()
        row = _rows.get(_key(layer, shape, activation), {})
    return kernel in row and row[kernel] > row[PLAIN]


def copying(shape: Sequence[int]) -> float:
    """Return the seconds to copy a float32 tensor of a shape from channels_last to torch's default layout."""

    def measure() -> dict[str, float]:
        return _times({PLAIN: [channels_last(torch.empty(tuple(shape))).contiguous]})

    return _looked_up(f"copy {'x'.join(map(str, shape))}; {_machine()}", [PLAIN], measure)[PLAIN]


def _looked_up(
    key: str, names: Collection[str], measure: Callable[[], dict[str, float]]
) -> Mapping[str, float]:
    """Return the times of a key; measure if some of `names` are missing, or if only one other process measured them."""
    with _lock:
        _load()
        before = _rows.get(key, {})
        is_known = before.keys() >= {*names}
        if is_known and before[_PROCESSES] >= 2:
            return before
        row = measure()
        agree = is_known and all(_is_same(row[name], before[name]) for name in names)
        found = before | {name: min(took, before.get(name, took)) for name, took in row.items()}
        _append(key, found | {_PROCESSES: 1.0 + agree})
        _rows[key] = found | {_PROCESSES: 2.0}
        return _rows[key]


def _load() -> None:
    if not _rows:
        _rows.update(_read())


def _is_same(seconds: float, before: float) -> bool:
    """Tell whether two measurements agree; on a busy machine, least times differ by a factor of several."""
    return max(seconds, before) <= _SPREAD * min(seconds, before)


def _choice(row: Mapping[str, float]) -> str:
    """The fastest kernel of a row; `plain` unless another one is faster by the margin."""
    name = min(row, key=row.__getitem__)
    return name if row[name] <= MARGIN * row[PLAIN] else PLAIN


def _key(layer: nn.Module, shape: Sequence[int], activation: str | None = None) -> str:
    """The cache key: layer, activation, dtype and input shape, processor, versions of torch and fxopt, number of threads."""
    weight = layer.get_parameter("weight")
    what = f"{layer!r}{f' and {activation}' if activation else ''} {weight.dtype} {'x'.join(map(str, shape))}"
    return f"{what}; {_machine()}"


def _machine() -> str:
    return (
        f"{_processor()}, torch {torch.__version__}, fxopt {__version__}, {torch.get_num_threads()} threads"
    )


@functools.cache
def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    if "model name" not in said:
        return platform.processor() or platform.machine()
    # Virtual machines call many processors "Intel(R) Xeon(R) Processor".
    return f"{said['model name']} {said.get('model', '')}.{said.get('stepping', '')}"


def _measure(
    layer: nn.Module, shape: Sequence[int], kernels: Sequence[str], activation: str | None
) -> dict[str, float]:
    dtype = layer.get_parameter("weight").dtype
    size = sum(p.numel() * p.element_size() for p in layer.parameters())
    generator = torch.Generator().manual_seed(0)  # measuring must not advance the global generator
    count = min(_MOST_COPIES, math.ceil(_WORKING_SET / max(1, size)))
    copies = [_random_layer(layer, generator) for _ in range(count)]
    value = torch.randn(tuple(shape), generator=generator, device="cpu").to(dtype)
    runs = {PLAIN: copies} | {name: [packed_layer(copy, name, shape) for copy in copies] for name in kernels}
    with torch.no_grad():
        # A packed convolution returns channels_last, so its input is in channels_last if it follows another one.
        packed_value = value if isinstance(layer, nn.Linear) else channels_last(value)

        follows = ACTIVATIONS[activation] if activation else None

        def run(name: str, each: nn.Module) -> Tensor:
            if name == PLAIN:
                found: Tensor = each(value)
                return found if follows is None else follows(found)
            packed: Tensor = each(packed_value, None, activation)
            return packed

        return _times(
            {name: [functools.partial(run, name, each) for each in layers] for name, layers in runs.items()}
        )


def _random_layer(layer: nn.Module, generator: torch.Generator) -> nn.Module:
    drawn = {
        name: nn.Parameter(torch.empty_like(p).uniform_(-0.5, 0.5, generator=generator), False)
        for name, p in layer.named_parameters()
    }
    return with_parameters(layer, parameters_of(layer) | drawn)


def _times(runs: Mapping[str, Sequence[Callable[[], object]]]) -> dict[str, float]:
    """Return the least time of each kernel; each turn uses the weights of another copy of the layer."""
    for calls in runs.values():
        for call in calls:  # packs the weights
            call()

    def seconds_of(calls: Sequence[Callable[[], object]], turn: int) -> float:
        start = time.perf_counter()
        calls[turn % len(calls)]()
        return time.perf_counter() - start

    return least_seconds(runs, seconds_of, _SECONDS, 100)


def least_seconds(
    runs: Mapping[str, R], seconds_of: Callable[[R, int], float], budget: float, most: int
) -> dict[str, float]:
    """Return the least time of each run, measured in turns, so that a slow moment of the machine affects all runs.

    Args:
        runs: the runs to time, by name.
        seconds_of: function of a run and the number of the turn that returns the time in seconds.
        budget: seconds for each run; after three turns, timing ends when the sum of all budgets is spent.
        most: the largest number of turns.
    """
    found = dict.fromkeys(runs, float("inf"))
    begun, turn = time.perf_counter(), 0
    while turn < 3 or (turn < most and time.perf_counter() - begun < budget * len(runs)):
        for name, run in runs.items():
            found[name] = min(found[name], seconds_of(run, turn))
        turn += 1
    return found


def cache_folder() -> Path:
    """The folder for files of fxopt: the environment variable `FXOPT_CACHE`, by default `~/.cache/fxopt`."""
    return Path(os.path.expanduser(os.environ.get("FXOPT_CACHE") or "~/.cache/fxopt"))


def _file() -> Path:
    return cache_folder() / "kernels.jsonl"


def _read() -> dict[str, dict[str, float]]:
    found = dict[str, dict[str, float]]()
    with contextlib.suppress(OSError):  # no file yet
        for line in _file().read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):  # half a line of a killed process: measure again
                match json.loads(line):
                    case [str(key), dict(row)] if {PLAIN, _PROCESSES} <= row.keys():
                        if all(isinstance(took, float) and took > 0 for took in row.values()):
                            found[key] = row
    return found


def _append(key: str, row: Mapping[str, float]) -> None:
    """Append a measurement to the file; on a read-only file system, nothing is written and each process measures."""
    file = _file()
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as lines:  # append, to keep the lines of other processes
            lines.write(f"\n{json.dumps([key, row])}")  # the file may end in half a line


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held the old one


os.register_at_fork(after_in_child=_after_fork)
