"""The first call of an engine in a process of its own: how long it takes, and how much memory."""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import time
from multiprocessing.connection import Connection

import torch

from .engines import Prepare, Unavailable, engines, reason
from .memory import forget_peak, resident
from .quiet import quiet
from .workloads import Workload, build

PATIENCE = 1800.0
"""Seconds after which an engine that does not come to its first result is given up."""


@dataclasses.dataclass(frozen=True)
class FirstCall:
    """Bytes of the whole process, with torch and the model; NaN where this system does not tell them.

    Attributes:
        seconds: From the model in memory to the first result.
        resident: Resident memory after that.
        peak: Its peak on the way.
    """

    seconds: float
    resident: float
    peak: float


def first_call(prepare: Prepare, workload: Workload, threads: int) -> FirstCall:
    """Makes an engine ready and runs it once, in this process."""
    torch.set_num_threads(threads)
    gc.collect()
    forget_peak()
    start = time.perf_counter()
    with torch.no_grad():
        prepared = prepare(workload.model, workload.inputs, threads)
        prepared.run(prepared.feed(workload.inputs))
    seconds = time.perf_counter() - start
    return FirstCall(seconds, resident("VmRSS"), resident("VmHWM"))


def first_call_alone(
    name: str, small: bool, precision: str, engine: str, threads: int, patience: float = PATIENCE
) -> FirstCall:
    """The same in a new process, which imports and compiles everything anew.

    Raises `Unavailable` with the reason when the engine cannot run, and when its process ends without an answer.
    """
    context = multiprocessing.get_context("spawn")
    answer, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, name, small, precision, engine, threads))
    process.start()
    sender.close()
    try:
        if not answer.poll(patience):
            raise Unavailable(f"no result after {patience:.0f} seconds")
        found = answer.recv()
        process.join(60)  # it has processes of its own to end
    except EOFError:
        process.join()
        raise Unavailable(f"its process ended with exit status {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
    if isinstance(found, str):
        raise Unavailable(found)
    assert isinstance(found, FirstCall)
    return found


def _answer(sender: Connection, name: str, small: bool, precision: str, engine: str, threads: int) -> None:
    with quiet():
        try:
            sender.send(first_call(engines(precision, threads)[engine], build(name, small), threads))
        except Exception as error:  # whatever an engine makes of a model
            sender.send(reason(error))
