"""The engines that run one model, each prepared by its own function: eager, fxopt, and their peers.

Each engine gets the same number of threads. The threads of an engine must not spin after its turn: they would occupy a core
that the next engine needs.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fxopt
from fxopt.objects import tensors_in

from .models import called, cast, fresh, generates, with_tensors


def reason(error: Exception) -> str:
    """One line with the reason why an engine is left out."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed (the extra `peers` brings it)"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


@dataclasses.dataclass(frozen=True)
class Prepared:
    """An engine with a model: `feed` makes the inputs of one run, untimed, and `run` accepts these inputs.

    `model` is the result of `fxopt.optimize`, which has a report.
    """

    feed: Callable[[Mapping[str, Any]], Any]
    run: Callable[[Any], Any]
    model: Any = None


Prepare = Callable[[nn.Module, Mapping[str, Any], int], Prepared]
"""Prepares a model for inputs like these and for this number of threads; does not change the model."""


def engines(precision: str, device: str = "cpu") -> dict[str, Prepare]:
    """The engines of a device for `float32`, `bfloat16` or `int8` by name; the first is eager float32, the reference of all."""
    chosen: dict[str, Prepare] = {
        EAGER: eager,
        AGAIN: eager,
        "fxopt" if precision == "float32" else f"fxopt {precision}": functools.partial(
            _fxopt, precision=precision
        ),
    }
    if precision != "int8":
        name = "fxopt auto" if precision == "float32" else f"fxopt auto {precision}"
        chosen[name] = functools.partial(_fxopt, precision=precision, engine="auto")
    if precision == "float32":
        chosen |= {"torch.compile": compiled, "ONNX Runtime": onnxruntime, "OpenVINO": openvino}
    elif precision == "bfloat16":
        chosen |= {
            "eager bfloat16": functools.partial(_in_bfloat16, eager),
            "torch.compile bfloat16": functools.partial(_in_bfloat16, compiled),
            "OpenVINO bfloat16": functools.partial(openvino, precision="bf16"),
        }
    else:
        chosen |= {
            "torch.ao int8": dynamically_quantized,
            "ONNX Runtime int8": functools.partial(onnxruntime, int8=True),
        }
    if device == "cpu":
        return chosen
    there = {
        name: made for name, made in chosen.items() if name.startswith((EAGER, "fxopt", "torch.compile"))
    }
    graphs = functools.partial(compiled, mode="reduce-overhead")
    if precision == "float32":
        there["torch.compile reduce-overhead"] = graphs
    elif precision == "bfloat16":
        there["torch.compile reduce-overhead bfloat16"] = functools.partial(_in_bfloat16, graphs)
    return there


EAGER = "eager"
AGAIN = "eager, again"
"""The A/A arm: a second `EAGER`, whose ratio shows the error of the measurement."""

PRECISIONS = ("float32", "bfloat16", "int8")


def eager(model: nn.Module, inputs: Mapping[str, Any], threads: int) -> Prepared:
    """The eager model."""
    return Prepared(fresh, lambda feed: called(model, feed))


def compiled(
    model: nn.Module, inputs: Mapping[str, Any], threads: int, *, mode: str | None = None
) -> Prepared:
    """`torch.compile` with frozen weights and empty caches; for `generate()`, it compiles the forward, with a static cache."""
    torch._dynamo.reset()
    if generates(inputs):
        module = copy.copy(model)
        module.forward = torch.compile(model.forward, mode=mode)
        own = {
            "cache_implementation": "static",
            "disable_compile": True,
        }  # on a GPU, transformers would compile as well
    else:
        module, own = torch.compile(model, mode=mode), {}  # type: ignore[assignment]
    with torch._inductor.config.patch(freezing=True, force_disable_caches=True):
        called(module, fresh(inputs) | own)
    return Prepared(lambda inputs: fresh(inputs) | own, lambda feed: called(module, feed))


def onnxruntime(
    model: nn.Module,
    inputs: Mapping[str, Any],
    threads: int,
    *,
    int8: bool = False,
) -> Prepared:
    """ONNX Runtime on the model exported with `dynamo=True`; `int8` quantizes matrix products dynamically.

    As by default, its threads spin during a run, but not after the run.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.force_spinning_stop", "1")
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "model.onnx"
        leaves = tuple(tensors(inputs))
        torch.onnx.export(Flat(model, inputs), leaves, file, dynamo=True, external_data=True, verbose=False)
        if int8:
            import onnx
            from onnxruntime.quantization import quantize_dynamic

            proto = onnx.load(file)
            del proto.graph.value_info[:]  # these have stale shapes of weights, which quantization transposes
            file = file.with_name("int8.onnx")
            # Not convolutions: ONNX Runtime has no kernel for them with signed weights.
            products = ["MatMul", "Gemm"]
            quantize_dynamic(proto, file, op_types_to_quantize=products, use_external_data_format=True)
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]
    return Prepared(
        lambda inputs: dict(zip(names, _arrays(inputs), strict=True)), lambda feed: session.run(None, feed)
    )


def openvino(
    model: nn.Module, inputs: Mapping[str, Any], threads: int, *, precision: str = "f32"
) -> Prepared:
    """OpenVINO on the model exported by `torch.export`; its default precision would be bfloat16 on CPUs that support it."""
    import openvino

    exported = torch.export.export(Flat(model, inputs), tuple(tensors(inputs)), strict=False)
    module = openvino.Core().compile_model(
        openvino.convert_model(exported),
        "CPU",
        {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": precision,
            "ENABLE_CPU_PINNING": False,  # pinned threads would occupy a core that other engines need
        },
    )
    return Prepared(_arrays, lambda feed: list(module(feed).values()))


def dynamically_quantized(model: nn.Module, inputs: Mapping[str, Any], threads: int) -> Prepared:
    """`torch.ao.quantization.quantize_dynamic` on every linear layer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)
    return Prepared(fresh, lambda feed: called(module, feed))


def _fxopt(
    model: nn.Module, inputs: Mapping[str, Any], threads: int, *, precision: str, engine: str = "torch"
) -> Prepared:
    """`fxopt.optimize`; the engine `auto` uses the fastest of the installed engines."""
    example = {} if generates(inputs) else fresh(inputs)
    module = fxopt.optimize(model, (), example, precision=precision, engine=engine)
    return Prepared(fresh, lambda feed: called(module, feed), module)


def _in_bfloat16(prepare: Prepare, model: nn.Module, inputs: Mapping[str, Any], threads: int) -> Prepared:
    """The engine on a copy of the model in bfloat16."""
    prepared = prepare(copy.deepcopy(model).bfloat16(), cast(inputs, torch.bfloat16), threads)
    return Prepared(lambda inputs: prepared.feed(cast(inputs, torch.bfloat16)), prepared.run)


def _arrays(inputs: Mapping[str, Any]) -> list[Any]:
    return [tensor.numpy() for tensor in tensors(inputs)]


def tensors(value: Any) -> list[Tensor]:
    """Every tensor in nested containers and caches, in order; numpy arrays in a list become tensors without a copy."""
    if isinstance(value, list):
        value = [torch.from_numpy(each) if isinstance(each, np.ndarray) else each for each in value]
    return list(tensors_in(value))


class Flat(nn.Module):
    """A model that accepts its tensors one by one and returns a tuple of tensors, as exporters require."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        if generates(inputs):
            raise ValueError("it takes the forward alone, and not generate()")
        super().__init__()
        self.model, self.inputs = model, inputs
        self.eval()

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        given = iter(leaves)
        return tuple(tensors(self.model(**with_tensors(self.inputs, lambda tensor: next(given)))))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drop prints, warnings, and logs below errors in the block."""
    before = logging.root.manager.disable
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)
