"""The models of the benchmarks, described by a YAML file, with random weights and inputs."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
import typer
import yaml
from torch import Tensor, nn
from torch.export import Dim
from transformers import LlamaConfig, LlamaModel

from fxopt import float64
from fxopt.objects import tensors_in
from fxopt.outputs import mapped
from fxopt.testing import randomise


@dataclasses.dataclass(frozen=True)
class Entry:
    """A model as a file describes it: how to make it, and its inputs."""

    said: Mapping[str, Any]

    @property
    def library(self) -> str:
        """The package that the model is from."""
        return str(self.said.get("library") or self.said["make"].partition(".")[0])

    def make(self) -> nn.Module:
        """Make the model in float32 on the CPU, in evaluation mode, importing its library."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            options = {key: value for key, value in self.said.items() if key not in _SAID}
            if self.library == "transformers":
                found: Any = resolve_name(self.said["make"])
                given = {key: _made(v) if isinstance(v, dict) else v for key, v in options.items()}
                made: Any = found._from_config(found.config_class(**given), dtype=torch.float32)
            else:
                made = _made({"make": self.said["make"], "args": self.said.get("args", ()), **options})
            return randomise(made.float(), 0).eval()  # initial statistics let values vanish

    def inputs(self, model: nn.Module, batch: int) -> dict[str, Any]:
        """Inputs of the forward by parameter name, floating ones in the dtype of the model."""
        names = {**vars(torch), "batch": batch}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            expressions = self.said["inputs"]
            if isinstance(expressions, str):
                first = next(iter(inspect.signature(model.forward).parameters))
                expressions = {first: expressions}
            made = {name: eval(str(text), names) for name, text in expressions.items()}
        tensors = (*model.parameters(), *model.buffers())
        dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
        return cast(made, dtype)


ZOO = Path(__file__).with_name("zoo.yaml")
_SAID = {"library", "make", "inputs", "args", "models", "kind", "unseen", "batch", "step"}


def entries(file: Path) -> dict[str, Entry]:
    """The models of a file by name; values of a model override those of its group."""
    groups = yaml.safe_load(file.read_text(encoding="utf-8"))
    found: dict[str, Entry] = {}
    for group in groups:
        shared = {key: value for key, value in group.items() if key not in ("models", "options")}
        for name, own in group["models"].items():
            said = shared | group.get("options", {}) | (own or {})
            said["make"] = said["make"].format(name)
            said["args"] = [name if arg == "{}" else arg for arg in said.get("args", ())]
            assert name not in found, name
            found[name] = Entry(said)
    return found


@functools.cache
def zoo() -> dict[str, Entry]:
    """The models of `zoo.yaml` whose libraries are installed."""
    known = entries(ZOO)
    libraries = {entry.library for entry in known.values()}
    present = {library for library in libraries if importlib.util.find_spec(library)}
    return {name: entry for name, entry in known.items() if entry.library in present}


def _made(said: Any) -> Any:
    """Make an argument: a mapping with `make` is called; lists become tuples, except in configs of transformers."""
    if isinstance(said, list):
        return tuple(map(_made, said))
    if not isinstance(said, dict) or "make" not in said:
        return said
    options = {name: value for name, value in said.items() if name not in ("make", "args")}
    if not said["make"].startswith("transformers."):
        options = {name: _made(value) for name, value in options.items()}
    return resolve_name(said["make"])(*map(_made, said.get("args", ())), **options)


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model in eval mode with inputs by name; a run gets `fresh(inputs)`, because it may add to a cache."""

    model: nn.Module
    inputs: dict[str, Any]
    name: str = ""

    def captured(self, capture: Callable[..., Any], free: bool, **options: Any) -> Callable[[], Any]:
        """Return a function that captures the model, with static sizes, or with dynamic batch and text length."""
        shapes = {
            name: {0: Dim.AUTO} if value.is_floating_point() else {0: Dim.AUTO, 1: Dim.AUTO}
            for name, value in self.inputs.items()
        }
        return functools.partial(
            capture, self.model, (), self.inputs, dynamic_shapes=shapes if free else None, **options
        )


def workload(name: str, device: str = "cpu") -> Workload:
    """The zoo model of this name with its inputs, the same in every process."""
    entry = zoo()[name]
    model = entry.make().to(device)
    given = entry.inputs(model, entry.said.get("batch", 1))
    inputs = with_tensors(given, lambda tensor: tensor.to(device))
    made = Workload(model, inputs, name)
    return decoding(made) if entry.said.get("step") else made


def named(text: str, known: Mapping[str, Any] | tuple[str, ...], what: str = "model") -> list[str]:
    """The known names in a comma-separated list, which may abbreviate them; all if the list is empty."""
    found: dict[str, None] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        fitting = [name for name in known if name == part] or [
            name for name in known if name.startswith(part)
        ]
        if not fitting:
            raise typer.BadParameter(f"there is no {what} {part!r}: it is one of {', '.join(known)}")
        found |= dict.fromkeys(fitting)
    return list(found or known)


def llama(layers: int) -> Workload:
    """A narrow Llama with this number of layers: width does not matter, because a capture computes nothing."""
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 8, "num_key_value_heads": 4}
    model = LlamaModel(LlamaConfig(**sizes, num_hidden_layers=layers, use_cache=False)).eval()
    ids = torch.randint(0, 1000, (3, 7))
    return Workload(
        model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, f"Llama, {layers} layers"
    )


def decoding(text: Workload) -> Workload:
    """The decoding step of the last token. The step before has run too, because prefill leaves strided keys in the cache."""
    model, ids = text.model, text.inputs["input_ids"]
    with torch.no_grad():
        cache = model(ids[:, :-2], use_cache=True).past_key_values
        cache = model(ids[:, -2:-1], past_key_values=cache, use_cache=True).past_key_values
    inputs = {"input_ids": ids[:, -1:], "past_key_values": cache, "use_cache": True}
    return Workload(model, inputs, text.name)


def with_tensors(inputs: Mapping[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """The same inputs with other tensors; caches are copied, so that a run does not change the original ones."""
    return mapped(dict(inputs), change)  # type: ignore[no-any-return]


def fresh(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The same inputs for another run, which may add to a cache; no tensor is copied."""
    return with_tensors(inputs, lambda tensor: tensor)


def cast(inputs: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The same inputs with floating-point tensors in another dtype."""
    return with_tensors(inputs, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def generates(inputs: Mapping[str, Any]) -> bool:
    """Tell whether inputs are for `generate()` rather than the forward."""
    return "max_new_tokens" in inputs


def called(model: Any, inputs: Mapping[str, Any]) -> Any:
    """Call `generate()` or the forward, whichever the inputs are for."""
    return model.generate(**inputs) if generates(inputs) else model(**inputs)


def in_float64(workload: Workload) -> list[Tensor]:
    """The tensors of the outputs of a copy of the model in float64."""
    with torch.no_grad():
        wide = float64.in_float64(workload.model)  # the forward of TAESD has float32 in its code
        return list(tensors_in(called(wide, cast(workload.inputs, torch.float64))))
