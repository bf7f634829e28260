"""The shell: a copy of the model that holds fake tensors and reports the calls of its modules.

The user's model is never run and never changed; what a forward does to its own attributes, it does to the shell.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fxopt.capture.recorder import Recorder
from fxopt.errors import TraceError

_CONTAINERS = (
    torch.nn.Sequential,
    torch.nn.ModuleList,
    torch.nn.ModuleDict,
    torch.nn.ParameterList,
    torch.nn.ParameterDict,
)


class Shell:
    """A copy of `model` with fake parameters and buffers, whose names by identity are `names`.

    Plain tensor attributes stay the model's own: a graph holds them as constants.
    """

    def __init__(self, model: torch.nn.Module, fake_mode: FakeTensorMode) -> None:
        self._original = model
        self.names: dict[int, str] = {}
        memo: dict[int, Any] = {}
        tensors = {
            **dict(model.named_buffers(remove_duplicate=False)),
            **dict(model.named_parameters(remove_duplicate=False)),
        }
        for name, tensor in tensors.items():
            if id(tensor) not in memo:
                memo[id(tensor)] = fake_mode.from_tensor(tensor, static_shapes=True)
                self.names[id(memo[id(tensor)])] = name
        for module in model.modules():
            for value in module.__dict__.values():
                if isinstance(value, torch.Tensor):
                    memo.setdefault(id(value), value)
        try:
            self.model = copy.deepcopy(model, memo)
        except Exception as error:
            raise TraceError(
                f"{type(model).__name__} cannot be copied by copy.deepcopy, which capture needs so as to "
                f"leave the model untouched: {type(error).__name__}: {error}"
            ) from error
        self._slots = list(self._tensor_slots())

    def report_to(self, recorder: Recorder, layers: Collection[int]) -> None:
        """Report calls of modules; `layers` are the identities of the original modules that are layers."""
        originals = dict(self._original.named_modules())
        for name, module in self.model.named_modules():
            call = recorder.call_layer if id(originals[name]) in layers else recorder.call_container
            # nn.Module.__call__ prefers this attribute of the instance, which only the shell has.
            module._compiled_call_impl = _Call(call, name, module)

    def check_state(self) -> None:
        """Raise TraceError if the forward has put another tensor where the model had one."""
        for name, key, registry, before in self._slots:
            if id(registry.get(key)) != before:
                raise TraceError(
                    f"the forward assigns another tensor to {f'{name}.{key}'.lstrip('.')!r}: state that is replaced "
                    "cannot live in a graph. Write into it with `.copy_()`, or make the module that does this a leaf."
                )

    def _tensor_slots(self) -> Any:
        """Every slot of a module that holds a tensor, with the identity of what it holds."""
        for name, module in self.model.named_modules():
            for registry in (module._buffers, module._parameters, module.__dict__):
                for key, value in registry.items():
                    if isinstance(value, torch.Tensor):
                        yield name, key, registry, id(value)


class _Call:
    """A module's call in the shell, reported to the recorder."""

    def __init__(self, call: Callable[..., Any], name: str, module: torch.nn.Module) -> None:
        self.call, self.name, self.module = call, name, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self.name, self.module, args, kwargs)


def is_layer(name: str, module: torch.nn.Module, leaf_modules: Sequence[str | type[torch.nn.Module]]) -> bool:
    """Whether a module becomes one `call_module` node: a layer of torch.nn, or a leaf that the caller names."""
    if any(name == leaf if isinstance(leaf, str) else isinstance(module, leaf) for leaf in leaf_modules):
        return True
    return type(module).__module__.startswith(("torch.nn.", "torch.ao.nn.")) and not isinstance(
        module, _CONTAINERS
    )


def copy_tree(source: torch.nn.Module, target: torch.nn.Module, layers: Collection[int]) -> None:
    """Give `target` the parameters, buffers, children and flags of `source`; containers are made anew.

    What is shared stays shared: layers and parameters are the same objects, a container under two names is one
    container again.
    """
    made: dict[int, torch.nn.Module] = {id(source): target}

    def fill(old: torch.nn.Module, new: torch.nn.Module) -> None:
        new.training = old.training
        for name, parameter in old._parameters.items():
            new.register_parameter(name, parameter)
        for name, buffer in old._buffers.items():
            new.register_buffer(name, buffer, persistent=name not in old._non_persistent_buffers_set)
        for name, child in old._modules.items():
            if child is None or id(child) in layers:
                new.add_module(name, child)
                continue
            if id(child) not in made:
                made[id(child)] = torch.nn.Module()
                fill(child, made[id(child)])
            new.add_module(name, made[id(child)])

    fill(source, target)
