"""How long passes take: per layer, from few layers to many, and the time that `verify=True` adds, in runs of BERT-base."""

from __future__ import annotations

import copy
import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.fx import GraphModule

import fxopt
from fxopt.kernels import packed_layer
from fxopt.passes import available
from fxopt.rewriting.rewrite import Rewrite
from fxopt.submodules import sharing_copy

from ..timing import of_runs, spread
from .workloads import bert_base

Times = dict[str, dict[int, float]]
"""`"<pass> apply"` or `"<pass> undo"` -> number of layers -> seconds."""


def passes(
    layers: Annotated[str, typer.Option(help="Numbers of layers, separated by commas.")] = "12,24,48,96,192",
    rounds: Annotated[int, typer.Option(help="Counted rounds, of which the fastest is shown.")] = 3,
) -> None:
    """Time each pass and its undo per layer: constant where a pass is linear in the graph."""
    torch.set_num_threads(1)
    counts = [int(count) for count in layers.split(",")]
    table = Table(
        *("pass", *(f"{count} layers" for count in counts), "growth"),
        title=f"milliseconds of processor time per layer, torch {torch.__version__}",
        caption="growth: how much more a layer takes among the most layers than among the fewest",
    )
    for name, row in times({name: cls() for name, cls in available().items()}, counts, rounds).items():
        each = [1000 * row[count] / count for count in counts]
        table.add_row(name, *(f"{ms:.2f}" for ms in each), f"{each[-1] / each[0]:.2f}")
    Console().print(table)


def times(passes: Mapping[str, Any], layers: list[int], rounds: int) -> Times:
    """The least time of several rounds for each pass on each number of layers, and for its undo."""
    found: Times = {}
    for count in layers:
        for name, pass_ in passes.items():
            fresh = traced(kind_for(name), count)
            for _ in range(rounds + 1):  # the first one imports and warms up
                graph_module = copy.deepcopy(fresh)
                runs: dict[str, dict[str, bool]] = {f"{name} apply": {}}
                if hasattr(pass_, "reverse"):
                    runs[f"{name} undo"] = {"reverse": True}
                for run, options in runs.items():
                    start = time.process_time()
                    graph_module = pass_(graph_module, **options)
                    seconds = time.process_time() - start
                    least = found.setdefault(run, {})
                    least[count] = min(seconds, least.get(count, seconds))
    return found


def verification(
    rounds: Annotated[int, typer.Option(help="Counted rounds.")] = 5,
    batch: Annotated[int, typer.Option(help="Sequences of 128 tokens in a run of the model.")] = 1,
) -> None:
    """Measure the time that verification adds to each pass on BERT-base, as multiples of one run of the model.

    In processor time of one thread, which other work on the machine changes little.
    """
    torch.set_num_threads(1)
    subject = bert_base(batch, 128)
    free = fxopt.symbolic_trace(subject.model, list(subject.inputs))
    fixed = fxopt.trace(subject.model, (), subject.inputs)
    table = Table(
        *("pass", "sites", "free sizes, runs", "fixed sizes, runs"),
        title=f"time of verification by runs of BERT-base on {batch} x 128, median (least to greatest) of {rounds}",
    )
    for name, cls in available().items():
        if not issubclass(cls, Rewrite):
            continue
        sites = len(cls().explain(fixed).sites)
        cells = [
            spread(_runs(cls(), traced, functools.partial(fixed, **subject.inputs), rounds))
            for traced in (free, fixed)
        ]
        table.add_row(name, str(sites), *cells)
    Console().print(table)


def _runs(pass_: Rewrite[Any], traced: GraphModule, run: Any, rounds: int) -> list[float]:
    """The time of verification in each round, as multiples of one run of the model."""

    def apply(verify: bool) -> None:
        pass_(copies.pop(), verify=verify)

    copies = [sharing_copy(traced) for _ in range(2 * (rounds + 1))]
    with torch.no_grad():
        once, plain, verified = of_runs(
            [run, functools.partial(apply, False), functools.partial(apply, True)], rounds, time.process_time
        )
    return [
        max(0.0, with_ - without) / statistics.median(once)
        for with_, without in zip(verified, plain, strict=True)
    ]


WIDTH = 8
"""The number of features: small, so that the work on the graph is what is timed."""


class Layer(nn.Module):
    """A function of a value and of the modules that it calls by name."""

    def __init__(self, function: Callable[..., Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, **dict(self.named_children()))


def dense() -> nn.Module:
    """Two layers to merge, a division, an activation, and a normalization to fold; a bias in each layer."""
    return Layer(
        lambda x, query, key, out, act, norm: norm(out(act(query(x) * key(x) / 8))),
        **{name: nn.Linear(WIDTH, WIDTH) for name in ("query", "key", "out")},
        act=nn.GELU(),
        norm=nn.BatchNorm1d(WIDTH),
    )


def convolution() -> nn.Module:
    """A convolution with a normalization to fold."""
    return nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 1), nn.BatchNorm2d(WIDTH))


def branches() -> nn.Module:
    """Two convolutions to merge."""
    convolutions = {name: nn.Conv2d(WIDTH, WIDTH, 1) for name in ("left", "right")}
    return Layer(lambda x, left, right: left(x) + right(x), **convolutions)


def cluttered() -> nn.Module:
    """A dropout that changes nothing, a value that is computed twice, and one that nothing uses."""

    def function(x: Tensor, dropout: nn.Module) -> Tensor:
        y = dropout(x)
        torch.relu(y)
        return torch.sin(y) * torch.sin(y)

    return Layer(function, dropout=nn.Dropout())


def _attention(x: Tensor) -> Tensor:
    """Attention of one head to its own input, with a mask."""
    rows = x[None]
    weights = (rows @ rows.transpose(-2, -1) / 8 + rows[..., :1]).softmax(-1)
    return (weights @ rows)[0]


def _copies(x: Tensor) -> Tensor:
    """A copy into the default layout."""
    halves = (x + 1).view(2, 2, WIDTH // 2).transpose(0, 1).contiguous()
    return halves.transpose(0, 1).reshape(2, WIDTH) + 1


def _grouped(x: Tensor) -> Tensor:
    """Attention whose queries have twice as many heads as its keys and values."""
    query = x[None, None].expand(1, 2, 2, WIDTH)
    heads = x[None, None][:, :, None].expand(1, 1, 2, 2, WIDTH).reshape(1, 2, 2, WIDTH)
    return nn.functional.scaled_dot_product_attention(query, heads, heads)[0, 0]


def _wide(x: Tensor, layer: nn.Module) -> Tensor:
    """A layer with enough features for a kernel with weights in int8."""
    return layer(torch.cat([x] * (64 // WIDTH), dim=1))  # type: ignore[no-any-return]


def _linear(features: int = WIDTH) -> nn.Module:
    return nn.Linear(features, WIDTH)


OWN: dict[str, Callable[[], nn.Module]] = {
    "EliminateCommonSubexpressions": cluttered,
    "EliminateDeadCode": cluttered,
    "FoldConstants": lambda: Layer(lambda x: x + x.new_ones(WIDTH).cos()),
    "FoldNormWeights": lambda: nn.Sequential(nn.LayerNorm(WIDTH), _linear()),
    "FoldScaleAndShift": lambda: Layer(lambda x, layer: layer(x) * 3, layer=_linear()),
    "FuseAttention": lambda: Layer(_attention),
    "FuseEpilogues": lambda: nn.Sequential(packed_layer(_linear(), "onednn", (2, WIDTH)), nn.ReLU()),
    "MergeConvs": branches,
    "QuantizeLinears": lambda: Layer(_wide, layer=_linear(64)),
    "RemoveCopies": lambda: Layer(_copies),
    "RemoveIdentity": cluttered,
    "RemoveRepeatedHeads": lambda: Layer(_grouped),
}
"""The layers that have a place for one pass, by its name."""


def kind_for(name: str) -> Callable[[], nn.Module]:
    """The layer that has a place for the pass of this name."""
    return OWN.get(name, convolution if "Conv" in name else dense)


def traced(kind: Callable[[], nn.Module], layers: int) -> GraphModule:
    """A graph of so many layers."""
    model = nn.Sequential(*(kind() for _ in range(layers))).eval()
    shape = (2, WIDTH, 4, 4) if kind in (convolution, branches) else (2, WIDTH)
    return fxopt.trace(model, (torch.ones(shape),), verify=False)
