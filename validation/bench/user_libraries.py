"""Small models of diffusers and timm, with random weights, for the benchmark of users.

`user_libraries.yaml` has them. A library that is not installed is left out; the extra `users` installs some of them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from fxopt.testing import randomise


@dataclasses.dataclass(frozen=True)
class LibraryModel:
    """A model as `user_libraries.yaml` describes it: the path of its class, the arguments of that, and what its forward takes."""

    path: str
    expressions: str | dict[str, str]
    args: list[Any]
    options: dict[str, Any]

    def make(self) -> nn.Module:
        """Make the model, importing its library."""
        model: nn.Module = _made({"make": self.path, "args": self.args, **self.options})
        return model

    def inputs(self, batch: int) -> Any:
        """Inputs for so many examples, in the order or by the names of the forward's parameters."""
        names = {**vars(torch), "batch": batch}
        if isinstance(self.expressions, str):
            return eval(f"({self.expressions},)", names)
        return {name: eval(text, names) for name, text in self.expressions.items()}


def model_types() -> list[str]:
    """The names of all models of installed libraries, sorted: `"monai.UNet"`."""
    return sorted(_models())


def build(model_type: str) -> nn.Module:
    """A small model in float32 on the CPU, in evaluation mode, with random weights and statistics."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = _models()[model_type].make()
    made.__dict__["library_model"] = model_type
    return randomise(made.float(), 0).eval()


def example_inputs(model: nn.Module, batch: int = 2, sequence: int = 0) -> dict[str, Tensor]:
    """Inputs of a model of `build` by the names of the forward's parameters, floating ones in the model's dtype."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = _models()[model.__dict__["library_model"]].inputs(batch)
    if not isinstance(made, dict):
        made = dict(zip(inspect.signature(model.forward).parameters, made, strict=False))
    tensors = (*model.parameters(), *model.buffers())
    dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in made.items()}


@functools.cache
def _models() -> dict[str, LibraryModel]:
    found: dict[str, LibraryModel] = {}
    for group in yaml.safe_load(Path(__file__).with_name("user_libraries.yaml").read_text(encoding="utf-8")):
        library = group.get("library") or group["make"].partition(".")[0]
        if importlib.util.find_spec(library) is None:
            continue
        for name, own in group["models"].items():
            said = {"args": [], **group, **group.get("options", {}), **(own or {})}
            args = [name if arg == "{}" else arg for arg in said["args"]]
            options = {key: value for key, value in said.items() if key not in _SAID}
            assert f"{library}.{name}" not in found, name
            path = said["make"].format(name)
            found[f"{library}.{name}"] = LibraryModel(path, said["inputs"], args, options)
    return found


_SAID = {"library", "make", "inputs", "args", "options", "models"}


def _made(said: Any) -> Any:
    """An argument: lists become tuples, and a mapping is what its `make` makes, or its `import` names."""
    if isinstance(said, list):
        return tuple(map(_made, said))
    if not isinstance(said, dict):
        return said
    path = said.get("make") or said["import"]
    found = resolve_name(path)
    if "import" in said:
        return found
    options = {name: _made(value) for name, value in said.items() if name not in ("make", "args")}
    return found(*map(_made, said.get("args", ())), **options)
