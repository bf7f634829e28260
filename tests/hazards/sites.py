"""One small site for each pass, to which a hazard is added; and what must come of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

import fxopt
from fxopt.rewriting.rewrite import Rewrite
from tests.before_after import fx_trace, refused, rewritten

ROWS = torch.randn(5, 4)
IMAGE = torch.randn(2, 3, 5, 5)
SEQUENCE = torch.randn(2, 4, 5)


class Use(nn.Module):
    """Layers, used as `use` says."""

    def __init__(self, use: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.use = use

    def forward(self, x):  # no annotations: fx cannot pickle those that are strings
        return self.use(self, x)


@dataclasses.dataclass(frozen=True)
class Site:
    """A pass, a model in which it rewrites one site, an input, and the layers of the site."""

    pass_: Rewrite[Any]
    use: Callable[..., Any]
    layers: Callable[[], dict[str, nn.Module]]
    x: Tensor
    names: tuple[str, ...]
    tracers: tuple[str, ...] = ("fx", "own")

    def model(self, use: Callable[..., Any] | None = None, **more: nn.Module) -> Use:
        """A new model, used as the site is, or as `use` says."""
        return Use(use or self.use, **self.layers(), **more)


# The outputs here are such that a rewrite of any kind is free to happen.
SITES: dict[str, Site] = {
    "merge": Site(
        fxopt.MergeLinears(),
        lambda m, x: (m.a(x), m.b(x)),
        lambda: {"a": nn.Linear(4, 3), "b": nn.Linear(4, 3)},
        ROWS,
        ("a", "b"),
    ),
    "conv-merge": Site(
        fxopt.MergeConvs(),
        lambda m, x: (m.a(x).relu(), m.b(x) * 2),
        lambda: {"a": nn.Conv2d(3, 4, 3), "b": nn.Conv2d(3, 2, 3)},
        IMAGE,
        ("a", "b"),
    ),
    "bias": Site(
        fxopt.FuseBiasInLinear(),
        lambda m, x: m.a(x) + 1,
        lambda: {"a": nn.Linear(4, 3)},
        ROWS,
        ("a",),
    ),
    "conv-norm": Site(
        fxopt.FuseBatchNorm2dInConv2d(),
        lambda m, x: m.norm(m.a(x)) + 1,
        lambda: {"a": nn.Conv2d(3, 4, 3), "norm": nn.BatchNorm2d(4)},
        IMAGE,
        ("a", "norm"),
    ),
    "pack": Site(
        fxopt.PackLinears(),
        lambda m, x: m.a(x) + 1,
        lambda: {"a": nn.Linear(4, 3)},
        ROWS,
        ("a",),
        ("own",),
    ),
    "conv-pack": Site(
        fxopt.PackConvs(),
        lambda m, x: m.a(x) + 1,
        lambda: {"a": nn.Conv2d(3, 4, 3)},
        IMAGE,
        ("a",),
        ("own",),
    ),
    "conv1d-pack": Site(
        fxopt.PackConvs(),
        lambda m, x: m.a(x) + 1,
        lambda: {"a": nn.Conv1d(4, 4, 2)},
        SEQUENCE,
        ("a",),
        ("own",),
    ),
    "linear-norm": Site(
        fxopt.FuseBatchNorm1dInLinear(),
        lambda m, x: m.norm(m.a(x)) + 1,
        lambda: {"a": nn.Linear(4, 4), "norm": nn.BatchNorm1d(4)},
        ROWS,
        ("a", "norm"),
        ("own",),
    ),
    "norm-linear": Site(
        fxopt.FuseBatchNorm1dInLinear(),
        lambda m, x: m.a(m.norm(x)) + 1,
        lambda: {"a": nn.Linear(4, 4), "norm": nn.BatchNorm1d(4)},
        ROWS,
        ("a", "norm"),
        ("own",),
    ),
    "conv1d-norm": Site(
        fxopt.FoldBatchNorms(),
        lambda m, x: m.norm(m.a(x)) + 1,
        lambda: {"a": nn.Conv1d(4, 4, 2), "norm": nn.BatchNorm1d(4)},
        SEQUENCE,
        ("a", "norm"),
        ("own",),
    ),
    "transposed-norm": Site(
        fxopt.FoldBatchNorms(),
        lambda m, x: m.norm(m.a(x)) + 1,
        lambda: {"a": nn.ConvTranspose2d(3, 4, 3), "norm": nn.BatchNorm2d(4)},
        IMAGE,
        ("a", "norm"),
    ),
    "linear-scale": Site(
        fxopt.FoldScaleAndShift(),
        lambda m, x: (m.a(x) * 3).tanh(),
        lambda: {"a": nn.Linear(4, 3)},
        ROWS,
        ("a",),
    ),
    "shift-linear": Site(
        fxopt.FoldScaleAndShift(),
        lambda m, x: m.a(x.tanh() - 3).tanh(),
        lambda: {"a": nn.Linear(4, 3)},
        ROWS,
        ("a",),
        ("own",),
    ),
    "norm-weights": Site(
        fxopt.FoldNormWeights(),
        lambda m, x: m.a(m.norm(x)) + 1,
        lambda: {"a": nn.Linear(4, 4), "norm": nn.LayerNorm(4)},
        ROWS,
        ("a", "norm"),
    ),
    "function": Site(
        fxopt.MakeLayers(), lambda m, x: x @ m.a + 1, lambda: {"a": nn.Parameter(torch.randn(4, 3))}, ROWS, ()
    ),
    "activation": Site(
        fxopt.ReplaceActivation("gelu", "silu"),
        lambda m, x: m.a(x) + 1,
        lambda: {"a": nn.GELU()},
        ROWS,
        ("a",),
    ),
    "division": Site(fxopt.ChangeTrueDivToMulByInverse(), lambda m, x: x / 8, dict, ROWS, ()),
    "identity": Site(
        fxopt.RemoveIdentity(),
        lambda m, x: m.a(x) + 1,
        lambda: {"a": nn.Dropout()},
        ROWS,
        (),
    ),
    "copy": Site(
        fxopt.RemoveCopies(),
        lambda m, x: x.transpose(0, 1).contiguous().transpose(0, 1).reshape(20) + 1,
        dict,
        ROWS,
        (),
        ("own",),
    ),
    "duplicate": Site(
        fxopt.EliminateCommonSubexpressions(), lambda m, x: torch.sin(x) * torch.sin(x), dict, ROWS, ()
    ),
    "attention": Site(
        fxopt.FuseAttention(),
        lambda m, x: (x @ x.transpose(-1, -2) / 3).softmax(-1) @ x,
        dict,
        IMAGE,
        (),
        ("own",),
    ),
    "heads": Site(
        fxopt.RemoveRepeatedHeads(),
        lambda m, x: F.scaled_dot_product_attention(
            x.expand(2, 3, 5, 5), *(x[:, :1][:, :, None].expand(2, 1, 3, 5, 5).reshape(2, 3, 5, 5),) * 2
        ),
        dict,
        IMAGE,
        (),
        ("own",),
    ),
    "precision": Site(
        fxopt.ChangePrecision(),
        lambda m, x: m.a(x) + 1,
        lambda: {"a": nn.Linear(4, 3)},
        ROWS,
        ("a",),
        ("own",),
    ),
}

PACKING = ("pack", "conv-pack", "conv1d-pack")
"""The sites whose new layers have the parameters of the old ones, and kernels for some dtypes alone."""

LAYERS = [(name, layer) for name, site in SITES.items() for layer in site.names]
"""Each layer of each site."""

TRACED = [(name, tracer) for name, site in SITES.items() for tracer in site.tracers]
"""Each site with each tracer."""


def crossed(names: Iterable[str], places: Sequence[tuple[str, ...]] = LAYERS) -> list[tuple[str, ...]]:
    """Each name with each place; the tracers that the site takes come in turn."""
    pairs = [(name, place) for name in names for place in places]
    return [
        (name, *place, SITES[place[0]].tracers[number % len(SITES[place[0]].tracers)])
        for number, (name, place) in enumerate(pairs)
    ]


class Leaves(torch.fx.Tracer):
    """A tracer for which every child of the model is a leaf, and buffers are nodes."""

    proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not isinstance(m, Use)


def fx_leaves(model: nn.Module, inputs: Sequence[Tensor]) -> GraphModule:
    """A graph without metadata, with all children as leaves."""
    return GraphModule(model, Leaves().trace(model))


def own_leaves(model: nn.Module, inputs: Sequence[Tensor]) -> GraphModule:
    """A graph with metadata, with all children as leaves."""
    leaves = [name for name, _ in model.named_children()]
    return fxopt.trace(model, tuple(inputs), leaf_modules=leaves)


TRACERS = {"fx": fx_leaves, "own": own_leaves}


def safe(
    site: Site, model: nn.Module, tracer: str, *inputs: Tensor, sites: int = 1, **options: Any
) -> GraphModule:
    """Assert that the site is rewritten, and the outputs stay."""
    trace = fx_trace if tracer == "fx" else own_leaves  # a tracer of one's own is not pickled
    return rewritten(site.pass_, model, *(inputs or (site.x,)), sites=sites, trace=trace, **options)


def unsafe(site: Site, model: nn.Module, tracer: str, reason: str, *inputs: Tensor) -> None:
    """Assert that the site is refused for a reason that contains a text."""
    refused(site.pass_, model, *(inputs or (site.x,)), reason=reason, trace=TRACERS[tracer])
