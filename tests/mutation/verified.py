"""Small models, and what the validation of sites says of each pass on them: `verify=True`, and no other check."""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import fxopt
from fxopt.rewriting.rewrite import Rewrite
from fxopt.testing import randomise
from tests.hazards.sites import IMAGE, ROWS, SITES, fx_leaves, own_leaves
from tests.hazards.test_numbers_and_writes import CONVS, WRITES
from tests.hazards.test_unusual_layers import HAZARDS

KEPT = [name for name, site in SITES.items() if site.pass_.preserves_computation]
"""The sites of passes that keep the outputs."""

NORMS = ("conv-norm", "linear-norm", "norm-linear")

Use = Callable[[nn.Module, Tensor], Any]


def also(use: Use, other: Use) -> Use:
    """Both of two uses."""
    return lambda m, x: (use(m, x), other(m, x))


def foreign(x: Tensor) -> Tensor:
    """A function that writes, and whose name does not say so."""
    return x.mul_(3)


def tanh(x: Tensor) -> Tensor:
    """A function that rounds, and whose name does not say so."""
    return x.floor()


class ReLU(nn.ReLU):
    """A layer with a jump, of the name of one without."""

    def forward(self, x: Tensor) -> Tensor:
        return (x >= 1).to(x.dtype)


torch.fx.wrap("foreign")
torch.fx.wrap("tanh")

WRITING: dict[str, Callable[[Tensor], Any]] = {
    **WRITES,
    "a foreign function": lambda x: foreign(x),
    "setitem": lambda x: x.__setitem__(0, 5.0),
    "iadd": lambda x: x.t().__iadd__(2),
    "augmented": lambda x: operator.iadd(x, 2),
    "einsum": lambda x: torch.einsum("ij->ji", x).add_(1),
}

DIVISIONS: tuple[Callable[[Tensor], Any], ...] = (
    *(lambda x: 3 / (x + 9), lambda x: x / 3, lambda x: x.long() / 49, lambda x: (x > 0) / 7),
    *(lambda x: (x / 49).floor(), lambda x: x / 49 >= 1, lambda x: (x / 49).prod().floor()),
    *(lambda x: 1 / (1 - x / 49), lambda x: (x / 49) ** -1, lambda x: (x / 49).to(torch.int64)),
    *(lambda x: torch.special.round(x / 49), lambda x: torch.zeros(5, 4).copy_(x / 49).floor()),
    *(lambda x: torch.div(x * 40, 7, rounding_mode="floor"), lambda x: torch.div(x, 3, rounding_mode=None)),
    *(lambda x: (1 - x / 49) ** -1, lambda x: (z := x * 0, z.t().copy_((x / 49).t()), z.floor())[2]),
    *(lambda x: tanh(x / 49), lambda x: (x / 49).prod(), lambda x: (y := x / 49, y.add_(1), y.floor())[2]),
)

SCALES: tuple[Use, ...] = (
    *(lambda m, x: 3 / (m.a(x) + 9), lambda m, x: 2 - m.a(x), lambda m, x: torch.rsub(m.a(x), 2)),
    *(lambda m, x: torch.add(m.a(x), 2, alpha=3), lambda m, x: m.a(x) / 3, lambda m, x: m.a(x) - 2),
    lambda m, x: torch.div(m.a(x), 3, rounding_mode="floor"),
)

ATTENTIONS: tuple[Use, ...] = (
    lambda m, x: (x @ x.mT + (x @ x.mT).tanh() + (x @ x.mT).sin()).softmax(-1) @ x,
    lambda m, x: torch.where(x @ x.mT > 1, x @ x.mT, -3.0).softmax(-1) @ x,
)

VIEWS: tuple[Callable[[Tensor], Tensor], ...] = (
    *(lambda y: y.reshape(-1), lambda y: y.flatten(), lambda y: y.ravel(), lambda y: y.contiguous()),
    *(lambda y: y.view(15), lambda y: y.view(-1, 5)),
)


def _uses() -> Iterator[tuple[str, Use]]:
    """Sites, with what may happen beside them."""
    for name in KEPT:
        site = SITES[name]
        yield name, site.use
        yield name, also(site.use, lambda m, x: x.tanh() * 2)
        for layer in site.names:
            yield name, also(site.use, lambda m, x, layer=layer: getattr(m, layer)(x.abs()))
            yield name, also(lambda m, x, layer=layer: getattr(m, layer)(x.abs()), site.use)
    yield "merge", lambda m, x: (m.a(input=x), m.b(x))
    yield "conv-norm", lambda m, x: m.norm(m.a(x)) + m.norm(m.a(x.abs()))
    yield "conv-norm", lambda m, x: (m.norm(m.a(x)), m.norm(x.repeat(1, 2, 1, 1)[:, :4]))
    for name in NORMS:
        first, last = ("norm", "a") if name == "norm-linear" else ("a", "norm")
        yield name, lambda m, x, f=first, g=last: (getattr(m, g)(y := getattr(m, f)(x)), y.relu())
    for write in WRITING.values():
        yield "merge", lambda m, x, write=write: (m.a(h := x * 1), write(h), m.b(h))
        yield "merge", lambda m, x, write=write: (y := m.a(x), z := m.b(x), write(y), y * 1, z * 1)
        yield "norm-linear", lambda m, x, write=write: (y := m.norm(h := x * 1), write(h), m.a(y))[1:]
    yield "merge", lambda m, x: (m.a(h := x * 1), m.relu(h), m.b(h))
    yield "norm-linear", lambda m, x: (y := m.norm(h := x * 1), m.relu(h), m.a(y))[1:]
    for view in VIEWS:
        yield "merge", lambda m, x, view=view: (y := m.a(x), view(y).add_(1), y * 1, m.b(x))
        yield "merge", lambda m, x, view=view: (view(m.a(x)) * 1, m.b(x))
    for use in SCALES:
        yield "linear-scale", use
    for use in ATTENTIONS:
        yield "attention", use
    for use in DIVISIONS:
        yield "division", lambda m, x, use=use: use(x)
        yield "division", lambda m, x, use=use: use(m.linear(x))
    yield "division", lambda m, x: m.relu(m.linear(x) / 49)


Case = tuple[str, Rewrite[Any], nn.Module, Tensor]


def _cases() -> Iterator[Case]:
    for number, (name, use) in enumerate(_uses()):
        yield (
            f"{name} {number}",
            SITES[name].pass_,
            _ready(SITES[name].model(use, relu=nn.ReLU(True), linear=nn.Linear(4, 4))),
            SITES[name].x,
        )
    for attention in ATTENTIONS:
        model = _ready(SITES["attention"].model(attention))
        yield "attention, each row has a key", fxopt.FuseAttention(each_row_has_a_key=True), model, IMAGE
    hooked = nn.ReLU()
    hooked.register_forward_hook(lambda module, args, out: out.floor())
    for layer in (ReLU(), hooked):
        model = _ready(SITES["division"].model(lambda m, x: m.layer(x / 49), layer=layer))
        yield "division, a layer with a jump", SITES["division"].pass_, model, ROWS
    for name in KEPT:
        site = SITES[name]
        for layer in site.names:
            for hazard in ("forward hook", "pre-hook", "own forward", "subclass"):
                model = _ready(site.model())
                HAZARDS[hazard][0](getattr(model, layer))
                yield f"{name}, {layer} has {hazard}", site.pass_, model, site.x
        if "a" in site.names:
            model = site.model(also(site.use, lambda m, x: m.again(x * 2)))
            model.again = model.a
            yield f"{name}, another name", site.pass_, _ready(model), site.x
    for name in NORMS:
        for change in (
            lambda m: m.norm.train(),
            lambda m: setattr(m.norm, "eps", 0.1),
            lambda m: (nn.init.constant_(m.a.weight, 3e38), m.norm.running_var.fill_(1e-3)),
            lambda m: setattr(m, "norm", type(m.norm)(4, affine=False).eval()),
            lambda m: m.a.register_parameter("bias", None),
        ):
            model = _ready(SITES[name].model())
            change(model)
            yield f"{name}, another layer", SITES[name].pass_, model, SITES[name].x
    for name in NORMS[1:]:
        yield (
            f"{name}, three dimensions",
            SITES[name].pass_,
            _ready(SITES[name].model()),
            torch.randn(2, 4, 4),
        )
    for conv in CONVS:
        model = SITES["conv-norm"].model()
        model.a = conv
        yield "conv-norm, another convolution", SITES["conv-norm"].pass_, _ready(model), IMAGE
    for both in (True, False):
        model = _ready(SITES["merge"].model())
        model.b.bias = None
        model.a.bias = model.a.bias if both else None
        yield "merge, a bias is missing", SITES["merge"].pass_, model, ROWS
    norms = [nn.BatchNorm1d(4) for _ in range(3)]
    chain = nn.Sequential(norms[0], nn.Linear(4, 4), norms[1], norms[2], nn.Linear(4, 2))
    yield "a chain", fxopt.FuseBatchNorm1dInLinear(), _ready(chain), ROWS
    for name in ("merge", "bias"):
        yield f"{name}, a vector", SITES[name].pass_, _ready(SITES[name].model()), torch.randn(4)


def _ready(model: nn.Module) -> nn.Module:
    return randomise(model.eval())


def findings() -> Iterator[str]:
    """Gives what the validation of sites says, or how a pass ends, for each case where that is something."""
    torch.manual_seed(0)
    for name, pass_, model, x in _cases():
        # A graph of torch.fx has no shapes: they come from the input.
        for trace, verify in ((own_leaves, True), (fx_leaves, (x,))):
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    graph_module = trace(model, [x])
                    graph_module(x)
                except Exception:  # a model that cannot be run or captured is no case
                    continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                warnings.simplefilter("error", fxopt.VerificationWarning)
                try:
                    pass_(copy.deepcopy(graph_module), verify=verify)
                except Exception as error:  # whatever a wrong pass raises
                    yield f"{name}: {type(error).__name__}: {error}"


def first_finding() -> str | None:
    """The first of the findings; None where there is none."""
    return next(findings(), None)
