"""A generated model as source text: it can be built and cut down."""

from __future__ import annotations

import dataclasses
import re
import sys
import types
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fxopt.testing import randomise


@dataclasses.dataclass(frozen=True)
class Program:
    """A model and its inputs.

    Attributes:
        layers: the constructor of each child, in order, by name.
        setup: statements at the end of `__init__`: ties, hooks, flags, buffers.
        body: statements of `forward`; one string is one statement, or one block.
        returns: what `forward` returns, as a tuple.
        inputs: expressions of the inputs `x0`, `x1`, ..., evaluated under a fixed seed.
        dtype: of the model: `float64`, or `float32` for passes that work on no other.
    """

    layers: tuple[tuple[str, str], ...]
    setup: tuple[str, ...]
    body: tuple[str, ...]
    returns: tuple[str, ...]
    inputs: tuple[str, ...]
    dtype: str = "float64"

    def source(self) -> str:
        """The class `Model`, as Python source."""
        children = [f"self.{name} = {expression}" for name, expression in self.layers]
        init = ["super().__init__()", *children, f"self.eval().to(torch.{self.dtype})", *self.setup]
        forward = [*self.body, f"return ({', '.join(self.returns)},)"]
        names = ", ".join(["self", *(f"x{number}" for number in range(len(self.inputs)))])
        return "\n".join(
            [
                "class Model(nn.Module):",
                "    def __init__(self):",
                *_indented(init, 8),
                "",
                f"    def forward({names}):",
                *_indented(forward, 8),
            ]
        )

    def model(self) -> nn.Module:
        """The model, in eval mode but for what `setup` changes, with random biases and statistics."""
        namespace = _namespace()
        exec(compile(self.source(), "<fuzz>", "exec"), namespace)
        torch.manual_seed(0)
        model: nn.Module = namespace["Model"]()
        return randomise(model)

    def arguments(self) -> list[Tensor]:
        """The inputs."""
        torch.manual_seed(1)
        made = [eval(expression, _namespace()) for expression in self.inputs]
        return [x.to(getattr(torch, self.dtype)) if x.is_floating_point() else x for x in made]

    def writes(self) -> bool:
        """True where a statement may write in place, so that the order of statements matters."""
        return bool(re.search(r"_\(|inplace=True|out=|\] = |[+*]= ", "\n".join(self.body)))

    def stateful(self) -> bool:
        """True where a call may change the model."""
        return bool(re.search(r"\.train\(|self\.state|max_norm", "\n".join((*self.setup, *self.body))))

    def smaller(self) -> Iterator[Program]:
        """Programs with one thing less, the largest cuts first."""
        for field in ("returns", "body", "setup"):
            parts = getattr(self, field)
            for count in (len(parts) // 2, 1):
                for start in range(0, len(parts), max(count, 1)):
                    kept = parts[:start] + parts[start + count :]
                    if count and (kept or field != "returns"):
                        yield dataclasses.replace(self, **{field: kept})
        for number, line in enumerate(self.body):
            match = re.match(r"(\w+) = .", line)
            for value in dict.fromkeys(re.findall(r"\b[vx]\d+\b", line)) if match else ():
                if match and value != match[1]:
                    yield self._without(number, match[1], value)
        for number, (name, expression) in enumerate(self.layers):
            if not re.search(rf"self\.{name}\b", "\n".join((*self.setup, *self.body))):
                yield dataclasses.replace(self, layers=self.layers[:number] + self.layers[number + 1 :])
            plain = re.sub(r"(, \w+=[^,()]+(\([^()]*\))?)+\)", ")", expression)
            if plain != expression:
                layers = (*self.layers[:number], (name, plain), *self.layers[number + 1 :])
                yield dataclasses.replace(self, layers=layers)

    def _without(self, number: int, name: str, value: str) -> Program:
        """Without the statement that makes `name`, whose uses take `value`."""

        def renamed(texts: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(re.sub(rf"\b{name}\b", value, text) for text in texts)

        body = self.body[:number] + renamed(self.body[number + 1 :])
        return dataclasses.replace(self, body=body, returns=renamed(self.returns))


# What the text of a program may name.
PREAMBLE = '''\
import copy
import operator
import pickle
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.utils import parametrizations, parametrize


class Scaled(nn.Linear):
    """A subclass with a forward of its own, as adapters have."""

    def forward(self, input):
        return super().forward(input) * 2


def doubled(module, args, output):
    """A forward hook."""
    return output * 2


def doubled_input(input):
    """A forward put on an instance."""
    return input * 2


def halved(module, args):
    """A forward pre-hook."""
    return (args[0] / 2,)
'''


_MODULE = types.ModuleType("fuzz_program")
sys.modules["fuzz_program"] = _MODULE  # so that pickles find what it defines
exec(PREAMBLE, vars(_MODULE))


def _namespace() -> dict[str, object]:
    return dict(vars(_MODULE))


def _indented(statements: list[str], by: int) -> list[str]:
    return [" " * by + line for statement in statements for line in statement.splitlines()]
