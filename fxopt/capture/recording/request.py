"""The request of a run: its options, and the signature of the forward."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Set
from typing import Any

import torch

from fxopt.capture.data_dependence.branches import Outcomes
from fxopt.capture.fakes.call_cache import Earlier
from fxopt.capture.fakes.kept_state import KeptState
from fxopt.capture.nodes.source_location import RunningCode
from fxopt.capture.runtime.input_specs import same_value
from fxopt.errors import TraceError
from fxopt.objects import tensors_in


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """The user's options (up to `specialize`), the assumptions of one run, and data that all runs share (last three)."""

    model: torch.nn.Module
    inputs: dict[str, Any]  # example values
    dimensions: dict[str, Any]  # their dynamic sizes
    layers: Set[int]  # identities of the modules that become one node each
    specialize: bool
    method: str = ""  # the captured method, without hooks; the call of the module if empty
    at_one: Set[tuple[str, int | None]] = frozenset()  # the dynamic sizes that are 1 in this run
    # The dynamic sizes that differ from the example.
    sizes: Mapping[tuple[str, int | None], int] = dataclasses.field(default_factory=dict)
    answers: Outcomes = dataclasses.field(default_factory=Outcomes)
    by_state: bool = False  # conditions on only parameters and buffers are decided by current values
    reads_dict_keys: bool = False  # sizes that are keys of dicts must be known
    moving: Set[str] = frozenset()  # ints inside objects that are dynamic, because the forward changes them
    shared_inputs: bool = False  # a tensor passed twice is one tensor in the forward, which tests this
    changes_inputs: bool = False  # the forward changes lists or dicts among its inputs
    assigned: Set[tuple[str, str]] = frozenset()  # buffers that the forward replaces, and the graph writes
    earlier: KeptState = dataclasses.field(default_factory=KeptState)
    # Functions of torch that raised for one outcome of a condition; results of calls; functions that made calls.
    raising: dict[tuple[Any, str], bool] = dataclasses.field(default_factory=dict)
    results: Earlier = dataclasses.field(default_factory=dict)
    running: RunningCode = dataclasses.field(default_factory=RunningCode)

    def signature(self) -> inspect.Signature:
        """The signature of the captured method."""
        return inspect.signature(getattr(self.model, self.method or "forward"))

    def tensors(self) -> list[torch.Tensor]:
        """The tensors of the model, and those of the example inputs."""
        return [*self.model.parameters(), *self.model.buffers(), *tensors_in(self.inputs)]

    def device(self) -> torch.device:
        """The one device of the model, or of the inputs if the model has no tensors."""
        devices = {
            t.device: name for name, t in [*self.model.named_buffers(), *self.model.named_parameters()]
        }
        if len(devices) > 1:
            places = ", ".join(f"{name} on {device}" for device, name in devices.items())
            raise TraceError(
                f"{type(self.model).__name__} is spread over several devices ({places}); move it to one."
            )
        if devices:
            return next(iter(devices))
        tensors = [value for value in self.inputs.values() if isinstance(value, torch.Tensor)]
        return tensors[0].device if tensors else torch.device("cpu")

    def arguments(self, values: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Arrange input values as the forward accepts them: by keyword, except positional-only and variadic parameters."""
        parameters = self.signature().parameters
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        positional: set[Any] = {inspect.Parameter.POSITIONAL_ONLY}
        if any(name.startswith("*") for name in values):
            positional.add(inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for name, value in values.items():
            if name.startswith("*"):
                args.extend(value)
            elif name in parameters and parameters[name].kind in positional:
                args.append(value)
            else:
                kwargs[name] = value
        return args, kwargs

    def default(self, name: str) -> dict[str, Any]:
        """The default of a placeholder: an example value equal to the forward's default, if all later inputs have defaults too."""
        parameters = self.signature().parameters
        rest = list(self.inputs)[list(self.inputs).index(name) :]
        if all(_is_default(parameters.get(other), self.inputs[other]) for other in rest):
            return {"default_value": self.inputs[name]}
        return {}


def _is_default(parameter: inspect.Parameter | None, value: Any) -> bool:
    """Tell whether a value is the parameter's default, and generated code can hold it."""
    literal = value is None or type(value) in (bool, int, float, str)
    return parameter is not None and literal and same_value(value, parameter.default)
