"""Wrong passes, each a function of a graph module: what a fold, a kernel or an undo can get wrong, one thing each.

`EQUIVALENCE`, `ACCURACY`, `EFFECT`, `USABLE` and `ROUND_TRIP` say which check has to catch them.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fxopt import FuseBiasInLinear, ReversibleTransformation, Rewriter, Transformation


class Parts(nn.Module):
    """A little of everything: a class token, a clamp, buffers, a batch normalisation, outputs of each type."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.linspace(-1, 1, 4))
        self.first, self.norm, self.second = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.clamp = nn.Hardtanh(-6, 6)
        self.register_buffer("scale", torch.full((6,), 1.5))

    def forward(self, x: Tensor) -> dict[str, Any]:
        first = self.first(x + self.token)
        hidden = self.clamp(first)
        logits = self.second(torch.relu(self.norm(hidden))) / 7.0 * self.scale
        return {"logits": logits, "states": [hidden, logits + first]}


class Deep(nn.Sequential):
    """Thirteen sites of one kind."""

    def __init__(self) -> None:
        super().__init__(*(layer for _ in range(13) for layer in (nn.Linear(6, 6), nn.Tanh())))


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[Any, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        return self.seen.setdefault(self.key(x), x)

    def key(self, x: Tensor) -> Any:
        return None


class RemembersShapes(Remembers):
    def key(self, x: Tensor) -> Any:
        return x.shape, x.dtype


class ReusesMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        self.memory = self.memory if self.memory.shape == x.shape else torch.empty_like(x)
        return self.memory.copy_(x)


class SecondCall(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x if self.calls == 1 else x + 1


class Offset(nn.Module):
    """Adds a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.offset


class OtherLinear(nn.Linear):
    pass


class ForgetsAtDeepcopy(Offset):
    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        new = type(self)()
        new.offset.zero_()
        return new


class ForgetsAtPickling(Offset):
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_buffers": {"offset": torch.zeros(())}}


class SharesWithCopies(Offset):
    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return self


class LoadsNothing(Offset):
    def _load_from_state_dict(self, *args: Any) -> None:
        pass


class StaysWhereItIs(Offset):
    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        return self


class KeepsItsDtype(Offset):
    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        self.offset = self.offset.to(fn(self.offset).device)
        return self


class KeepsItsDevice(Offset):
    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        self.offset = self.offset.to(fn(self.offset).dtype)
        return self


class OtherWhenExported(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if torch.compiler.is_exporting() else x


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _find(gm: GraphModule, target: object) -> Node:
    return next(node for node in gm.graph.nodes if node.target == target)


def after(target: object, layer: Callable[[], nn.Module]) -> Callable[[GraphModule], None]:
    """Puts a layer behind the first node with a target."""

    def change(gm: GraphModule) -> None:
        node = _find(gm, target)
        gm.add_submodule("planted", layer())
        with gm.graph.inserting_after(node):
            new = gm.graph.call_module("planted", (node,))
        node.replace_all_uses_with(new, lambda user: user is not new)

    return change


def dropped(target: str) -> Callable[[GraphModule], None]:
    def change(gm: GraphModule) -> None:
        node = _find(gm, target)
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)

    return change


def replaced(target: str, make: Callable[[nn.Module], nn.Module]) -> Callable[[GraphModule], None]:
    return lambda gm: setattr(gm, target, make(gm.get_submodule(target)))


def output(make: Callable[[dict[str, Any]], Any]) -> Callable[[GraphModule], None]:
    def change(gm: GraphModule) -> None:
        (node,) = gm.graph.find_nodes(op="output")
        node.args = (make(dict(node.args[0])),)

    return change


def _without_bias(layer: Any) -> nn.Module:
    new = nn.Linear(layer.in_features, layer.out_features, bias=False, dtype=layer.weight.dtype)
    new.weight = layer.weight
    return new


def _norm(**changes: Any) -> Callable[[Any], nn.Module]:
    def make(norm: Any) -> nn.Module:
        new = nn.BatchNorm1d(6).to(norm.weight.dtype).eval()
        new.load_state_dict(norm.state_dict())
        for name, value in changes.items():
            setattr(new, name, value)
        return new

    return make


def _other_divisor(gm: GraphModule) -> None:
    node = _find(gm, operator.truediv)
    node.args = (node.args[0], 7.0 * (1 + 1e-8))


def _writes_buffer(gm: GraphModule) -> None:
    node = _find(gm, operator.mul)
    with gm.graph.inserting_after(node):
        gm.graph.call_method("add_", (node.args[1], 1e-3))


def _writes_input(gm: GraphModule) -> None:
    first = _find(gm, "first")
    with gm.graph.inserting_after(first):
        gm.graph.call_method("mul_", (gm.graph.find_nodes(op="placeholder")[0], 2))


def _doubled(gm: GraphModule) -> None:
    node = _find(gm, operator.mul)
    with gm.graph.inserting_after(node):
        wide = gm.graph.call_method("double", (node,))
    node.replace_all_uses_with(wide, lambda user: user is not wide)


def _with_another_input(gm: GraphModule) -> None:
    with gm.graph.inserting_after(gm.graph.find_nodes(op="placeholder")[-1]):
        gm.graph.placeholder("added", default_value=None)


def _without_check(gm: GraphModule) -> None:
    gm.graph.erase_node(_find(gm, "input_guard"))


class WritesItsWeights(nn.Module):
    """Does at each call what once would do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.fill_(1)
        return x * self.scale


class Repeats(nn.Module):
    """Gives back memory that it keeps, with the right values in it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.empty(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.memory = x.clone()
        return self.memory


EQUIVALENCE: dict[str, Callable[[GraphModule], object]] = {
    "a clamp that the inputs do not reach is dropped": dropped("clamp"),
    "a clamp is tighter": replaced("clamp", lambda _: nn.Hardtanh(-5.9, 6)),
    "values above 50 are cut off": after("first", lambda: nn.Hardtanh(-50, 50)),
    "a batch normalisation is dropped": dropped("norm"),
    "a bias is dropped": replaced("second", _without_bias),
    "an epsilon is dropped": replaced("norm", _norm(eps=0.0)),
    "a normalisation is left in training mode": replaced("norm", _norm(training=True)),
    "a constant is off by 1e-8": _other_divisor,
    "it divides zero by zero": after("clamp", lambda: Function(lambda x: x * (x / x))),
    "it rounds to float32 on the way": after("norm", lambda: Function(lambda x: x.float().to(x.dtype))),
    "it rounds to bfloat16, but not in float64": after(
        "norm", lambda: Function(lambda x: x if x.dtype == torch.float64 else x.bfloat16().to(x.dtype))
    ),
    "it rounds to float16, but not in float64": after(
        "norm", lambda: Function(lambda x: x if x.dtype == torch.float64 else x.half().to(x.dtype))
    ),
    "an activation is another one": after("norm", nn.GELU),
    "it draws random numbers": after("norm", lambda: nn.Dropout(0.1).train()),
    "it remembers its first result": after(operator.mul, Remembers),
    "it remembers a result for each shape": after("first", RemembersShapes),
    "it reuses the memory of its result": after(operator.mul, ReusesMemory),
    "it goes wrong at the second call": after("norm", SecondCall),
    "it writes its input": _writes_input,
    "it writes a buffer": _writes_buffer,
    "a list becomes a tuple": output(lambda out: {**out, "states": tuple(out["states"])}),
    "two outputs change places": output(lambda out: {**out, "states": [*reversed(out["states"])]}),
    "an output is lost": output(lambda out: {"logits": out["logits"]}),
    "an output has another name": output(lambda out: {"logit": out["logits"], "states": out["states"]}),
    "the order of the outputs is another": output(lambda out: dict(reversed(out.items()))),
    "the dtype of an output is another": _doubled,
    "an output is laid out otherwise": after(
        operator.mul, lambda: Function(lambda x: x.t().contiguous().t())
    ),
    "an output is twice as large": after(operator.mul, lambda: Function(lambda x: 2 * x)),
    "one row is off": after(
        "second", lambda: Function(lambda x: x + 1e-7 * (torch.arange(len(x)) == 2)[:, None])
    ),
    "it is right for positive inputs alone": after("first", lambda: Function(lambda x: x.where(x > -9, -x))),
    "small values become zero": after("first", lambda: Function(lambda x: x.where(x.abs() > 1e-2, 0 * x))),
    "values above 1000 are cut off": after("first", lambda: nn.Hardtanh(-1e3, 1e3)),
    "values beyond those of float16 are cut off": after("first", lambda: nn.Hardtanh(-65504, 65504)),
    "NaN becomes zero": after("first", lambda: Function(lambda x: x.masked_fill(x.isnan(), 0))),
    "infinities become numbers": after(
        "first", lambda: Function(lambda x: x.where(~x.isinf(), x.sign() * 1e30))
    ),
    "an output is memory that the module keeps": after(operator.mul, Repeats),
    "it writes a weight of its own": after("norm", WritesItsWeights),
    "an input is added": _with_another_input,
    "the check of inputs is gone": _without_check,
}

ACCURACY = {
    "the dtype of an output is another": _doubled,
    "a list becomes a tuple": EQUIVALENCE["a list becomes a tuple"],
    "it reuses the memory of its result": after(operator.mul, ReusesMemory),
    "it remembers its first result": after(operator.mul, Remembers),
    "it writes its input": _writes_input,
    "it writes a buffer": _writes_buffer,
    "an output is lost": EQUIVALENCE["an output is lost"],
    "an output is laid out otherwise": EQUIVALENCE["an output is laid out otherwise"],
    "an output is twice as large": EQUIVALENCE["an output is twice as large"],
    "it goes wrong at the second call": EQUIVALENCE["it goes wrong at the second call"],
}

SAID = {
    "an output is twice as large": "of their norm, the limit is",
    "it goes wrong at the second call": "of their norm, the limit is",
}
"""The measurement by which each of these must be seen; the second is right in the first call."""


def _harmless(gm: GraphModule) -> None:
    _find(gm, operator.truediv).args = (_find(gm, operator.truediv).args[0], 7)


def _in_place(change: Callable[[GraphModule], object]) -> Callable[[GraphModule], None]:
    def both(gm: GraphModule) -> None:
        with torch.no_grad():
            change(gm)
        _harmless(gm)

    return both


EFFECT = {
    "a class token is written": _in_place(lambda gm: gm.token.mul_(2)),
    "a class token is written behind the back of autograd": _in_place(lambda gm: gm.token.data.mul_(2)),
    "a buffer of the model is written": _in_place(lambda gm: gm.scale.mul_(2)),
    "a weight is written": _in_place(lambda gm: gm.first.weight.mul_(2)),
    "a parameter is frozen": _in_place(lambda gm: gm.first.weight.requires_grad_(False)),
    "an option of a layer of the model is changed": _in_place(lambda gm: setattr(gm.norm, "eps", 0.0)),
    "a layer of the model is put in training mode": _in_place(lambda gm: gm.norm.train()),
    "a layer of the model gets a hook": _in_place(lambda gm: gm.second.register_forward_hook(_hook)),
    "a layer of the model gets an attribute": _in_place(lambda gm: setattr(gm.second, "note", 1)),
    "a layer of the model gets another forward": _in_place(lambda gm: setattr(gm.second, "forward", _hook)),
    "a layer of the model gets another class": _in_place(
        lambda gm: setattr(gm.second, "__class__", OtherLinear)
    ),
    "a buffer of a layer is no longer saved": _in_place(
        lambda gm: gm.norm._non_persistent_buffers_set.add("running_mean")
    ),
}


USABLE: dict[str, Callable[[GraphModule], object]] = {
    "it cannot be pickled": after("norm", lambda: Function(lambda x: x + 1)),
    "a buffer is lost in a copy": after("norm", ForgetsAtDeepcopy),
    "a buffer is lost in a pickle": after("norm", ForgetsAtPickling),
    "a copy shares a buffer": after("norm", SharesWithCopies),
    "its weights cannot be loaded": after("norm", LoadsNothing),
    "a buffer does not move": after("norm", StaysWhereItIs),
    "a buffer keeps its dtype": after("norm", KeepsItsDtype),
    "a buffer keeps its device": after("norm", KeepsItsDevice),
    "it cannot be saved": after("norm", Offset),
}


EXPORTED: dict[str, Callable[[GraphModule], object]] = {
    "it is exported as something else": after("norm", OtherWhenExported),
}
"""Wrong passes that only a full pipeline is asked for."""


def _transposed(gm: GraphModule) -> None:
    weight = gm.first.weight
    gm.first.weight = nn.Parameter(weight.detach().t().contiguous().t(), weight.requires_grad)


WAYS = {
    "it cannot be pickled": "pickle: ",
    "a buffer is lost in a copy": "deepcopy: ",
    "a buffer is lost in a pickle": "pickle: ",
    "a copy shares a buffer": "what is done with a copy changes the graph itself",
    "its weights cannot be loaded": "state_dict: ",
    "a buffer does not move": "to: ",
    "a buffer keeps its dtype": "to: after .to(torch.float64)",
    "a buffer keeps its device": "to: after .to('meta')",
    "it cannot be saved": "save: ",
}
"""The ways in which these must be seen to fail: none of them can be saved, either."""


@dataclasses.dataclass(frozen=True)
class ForgetsBias(FuseBiasInLinear):
    """The fusion of biases, which forgets those of some layers."""

    of: tuple[str, ...] = ()

    def apply(self, rewriter: Rewriter, site: Any) -> Node:
        node = super().apply(rewriter, site)
        if str(node.target) in self.of:
            (pad,) = node.all_input_nodes
            rewriter.set(pad, kwargs={**pad.kwargs, "value": 0.0})
        return node


def _hook(module: nn.Module, args: Any, result: Tensor) -> None:
    pass


ROUND_TRIP: dict[str, Callable[[GraphModule], object]] = {
    "a hook is left": lambda gm: gm.second.register_forward_hook(_hook),
    "an attribute is left": lambda gm: setattr(gm, "was_fused", True),
    "an attribute of a layer is changed": lambda gm: setattr(gm.second, "in_features", 7),
    "a weight is laid out otherwise": _transposed,
    "a value is off by one unit in the last place": lambda gm: gm.first.bias.data.copy_(
        torch.nextafter(gm.first.bias.data, torch.tensor(9.0, dtype=gm.first.bias.dtype))
    ),
    "a layer is left in training mode": lambda gm: gm.norm.train(),
    "a module is left": lambda gm: gm.add_submodule("left", nn.ReLU()),
}


@dataclasses.dataclass(frozen=True)
class Wrong(Transformation):
    """Does to a graph what a table says."""

    name: str
    preserves_computation = True

    def transform(self, graph_module: GraphModule) -> GraphModule:
        tables: tuple[dict[str, Any], ...] = (EQUIVALENCE, EFFECT, USABLE, EXPORTED)
        next(table[self.name] for table in tables if self.name in table)(graph_module)
        return graph_module


@dataclasses.dataclass(frozen=True)
class WrongAndInexact(Wrong):
    preserves_computation = False


@dataclasses.dataclass(frozen=True)
class WrongReverse(ReversibleTransformation):
    """A right pass; its undo does what a table says as well."""

    name: str
    preserves_computation = True

    def transform(self, graph_module: GraphModule) -> GraphModule:
        _harmless(graph_module)
        return graph_module

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        node = _find(graph_module, operator.truediv)
        node.args = (node.args[0], 7.0)
        if self.name:
            with torch.no_grad():
                ROUND_TRIP[self.name](graph_module)
        return graph_module
