"""A small model, right passes and wrong ones, and what runs a check on them."""

from __future__ import annotations

import copy
import operator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt import ReversibleTransformation, Transformation
from validation import checks
from validation.judging.subject import Subject
from validation.records import Check, Finding
from validation.zoo.entry import Entry


class Net(nn.Module):
    """Two linears, a batch normalisation, and a division."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.second(torch.relu(self.norm(self.first(x)))) / 7.0}


class Trained(Net):
    """Needs gradients when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self(torch.ones(2, 4))["logits"].sum().backward()
        self.zero_grad()


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"empty": x[:0], "name": "nothing"}


class ReadsGradMode(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if torch.is_grad_enabled() else 3 * x


class OneSize(nn.Module):
    """Asks for a size, so that of those from 4 to 6 its graph takes one alone."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if x.shape[0] % 5 == 0 else 3 * x


class NotFinite(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(-torch.exp(x / 7))


class Inverse(ReversibleTransformation):
    """A right rewrite: division by a constant becomes multiplication by its inverse."""

    preserves_computation = True

    def transform(self, graph_module: GraphModule) -> GraphModule:
        for node in graph_module.graph.find_nodes(op="call_function", target=operator.truediv):
            node.target, node.args = operator.mul, (node.args[0], self.factor(node.args[1]))
            self.mark_as_transformed(node)
        return graph_module

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        for node in self.get_transformed_nodes(graph_module):
            node.target, node.args = operator.truediv, (node.args[0], self.divisor(node.args[1]))
            self.mark_as_restored(node)
        return graph_module

    def factor(self, divisor: float) -> float:
        return 1 / divisor

    def divisor(self, factor: float) -> float:
        return 7.0


class AlmostInverse(Inverse):
    """Off by one part in ten million: float32 cannot see it, float64 can."""

    def factor(self, divisor: float) -> float:
        return (1 + 1e-7) / divisor


class BadReverse(Inverse):
    """1 / (1 / 49) is not 49: what comes back is not what was there."""

    def divisor(self, factor: float) -> float:
        return float(np.nextafter(1 / factor, 8))


class ReplaceFirst(Transformation):
    """Puts a new linear in the place of `first`; `change` makes it wrong, or right."""

    preserves_computation = True

    def transform(self, graph_module: GraphModule) -> GraphModule:
        graph_module.first = self.change(copy.deepcopy(graph_module.first))
        (node,) = graph_module.graph.find_nodes(op="call_module", target="first")
        self.mark_as_transformed(node)
        return graph_module

    def change(self, linear: nn.Linear) -> nn.Linear:
        return linear


class ForgetBias(ReplaceFirst):
    def change(self, linear: nn.Linear) -> nn.Linear:
        linear.bias = None
        return linear


class ForgetBatchNorm(Transformation):
    """With fresh statistics, 0 and 1, nobody would notice."""

    preserves_computation = True

    def transform(self, graph_module: GraphModule) -> GraphModule:
        for node in graph_module.graph.find_nodes(op="call_module", target="norm"):
            node.replace_all_uses_with(node.args[0])
            self.mark_as_transformed(node.args[0])
            graph_module.graph.erase_node(node)
        return graph_module


class ChangeInPlace(Inverse):
    """Changes a module that the graph shares with the user's model, in a way that changes no output."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        graph_module.first.weight.data *= 1
        graph_module.first.bias = nn.Parameter(graph_module.first.bias + 1)
        return super().transform(graph_module)


class MarkOnly(Inverse):
    def transform(self, graph_module: GraphModule) -> GraphModule:
        for node in graph_module.graph.find_nodes(op="call_function", target=operator.truediv):
            self.mark_as_transformed(node)
        return graph_module


class Unmarked(Inverse):
    def mark_as_transformed(self, node: torch.fx.Node) -> None:
        pass


class MulToAdd(Transformation):
    """The first example of the guide, which marks nothing: a division, here."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        for node in graph_module.graph.nodes:
            if node.op == "call_function" and node.target == operator.truediv:
                node.target = operator.add
        return graph_module


class RoundWeights(Transformation):
    """Rounds the weights of both linears, and leaves the code and the shapes as they are."""

    digits = 1

    def transform(self, graph_module: GraphModule) -> GraphModule:
        for node in graph_module.graph.find_nodes(op="call_module"):
            linear = graph_module.get_submodule(node.target)
            if isinstance(linear, nn.Linear):
                linear = copy.deepcopy(linear)
                linear.weight = nn.Parameter(linear.weight.detach().round(decimals=self.digits))
                graph_module.set_submodule(node.target, linear)
                self.mark(node)
        return graph_module

    def mark(self, node: torch.fx.Node) -> None:
        self.mark_as_transformed(node)


class RoundUnmarked(RoundWeights):
    """So roughly that the outputs are other ones; and it says that they are not."""

    preserves_computation = True
    digits = 0

    def mark(self, node: torch.fx.Node) -> None:
        pass


class BadUnmarkedReverse(BadReverse):
    """The undo is not exact, and goes by the operator, because nothing is marked."""

    def mark_as_transformed(self, node: torch.fx.Node) -> None:
        pass

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        for node in graph_module.graph.find_nodes(op="call_function", target=operator.mul):
            node.target, node.args = operator.truediv, (node.args[0], self.divisor(node.args[1]))
        return graph_module


class Idle(Inverse):
    def transform(self, graph_module: GraphModule) -> GraphModule:
        return graph_module


class Refuses(Idle):
    def explain(self, graph_module: GraphModule) -> SimpleNamespace:
        reasons = {"a": "too long", "b": "too wide", "c": "too wide"}
        return SimpleNamespace(rows=[], refusals=[(node, "", reason) for node, reason in reasons.items()])


class Rough(Inverse):
    preserves_computation = False

    def factor(self, divisor: float) -> float:
        return 1.001 / divisor


class Tolerant(Rough):
    tolerance = 1e-2


class Negate(Rough):
    def factor(self, divisor: float) -> float:
        return -1 / divisor


class Overflow(Rough):
    def factor(self, divisor: float) -> float:
        return float("inf")


class Raise(Inverse):
    def transform(self, graph_module: GraphModule) -> GraphModule:
        raise ValueError("no such thing")


def entry(model: str = "Net", **fields: Any) -> Entry:
    shape = {"x": {"shape": [5, 4]}}
    path = f"{__name__}.{model}"
    sizes = {} if "dynamic_shapes" in fields else {"sizes": "fixed"}
    return Entry.model_validate({"name": "net", "model": path, "inputs": shape, **sizes, **fields})


def run(check: Check, pass_: type[Transformation] | None = None, **fields: Any) -> Finding:
    return run_pipeline(check, *([pass_] if pass_ else []), **fields)


def run_pipeline(check: Check, *pipeline: type[Transformation], **fields: Any) -> Finding:
    passes = {pass_.__name__: pass_() for pass_ in pipeline}
    subject = Subject(entry(**fields), "cpu", passes)
    return checks.available()[check](subject, tuple(passes))
