"""The function of a graph computes what the graph does, and writes only into memory that nobody reads any more."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.errors import GuardError
from fxopt.kernels import kernels_for
from fxopt.optimizing.lowering import function_of

PACKS = pytest.mark.skipif(not kernels_for(nn.Conv2d(3, 3, 1)), reason="torch has no packed kernels here")


def randomised(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data = torch.rand(tensor.shape, generator=generator) + 0.1
    return model.eval()


class Residual(nn.Module):
    """Two residual additions; `also` is what else is done with the first sum."""

    def __init__(self, also: str) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))
        self.also = also

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, fourth = self.convs
        y = first(x)
        if self.also == "one channel is added to all":
            y = y[:, :1].expand(-1, 4, -1, -1)  # its memory has room for no sum
        kept = y[:, :1] if self.also == "a view is read later" else None
        z = second(y) if self.also != "the layer reads it itself" else y
        z = torch.relu(third(z) + y)
        if kept is not None:
            z = z * kept
        if self.also == "it is read later":
            z = z - y
        if self.also == "the input is added":
            z = first(x) + x
        return fourth(z)


@PACKS
@pytest.mark.parametrize(
    "also",
    [
        "nothing",
        "a view is read later",
        "it is read later",
        "the layer reads it itself",
        "the input is added",
        "one channel is added to all",
    ],
)
def test_sums_go_where_nobody_reads(also: str) -> None:
    model, x = randomised(Residual(also)), torch.rand(2, 4, 6, 6) + 0.1
    traced = fxopt.trace(model, (x,))
    packed = fxopt.compose(fxopt.PackConvs(tune=False), fxopt.FuseEpilogues())(traced)
    assert any("other" in node.kwargs for node in packed.graph.nodes)
    function, given = function_of(packed, {}), x.clone()
    with torch.no_grad():
        wanted = model.double()(x.double())
        model.float()
        for _ in range(2):
            torch.testing.assert_close(function(x).double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(x, given)


@PACKS
def test_memory_is_written_where_it_is_free() -> None:
    model, x = randomised(Residual("nothing")), torch.rand(2, 4, 6, 6)
    traced = fxopt.trace(model, (x,))
    packed = fxopt.compose(fxopt.PackConvs(tune=False), fxopt.FuseEpilogues())(traced)
    seen: dict[str, int] = {}

    class Pointers(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen[str(func)] = seen.get(str(func), 0) + 1
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Pointers():
        function_of(packed, {})(x)
    assert seen["mkldnn._convolution_pointwise_.binary"] == 1


@PACKS
def test_a_residual_in_another_layout_is_added() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.linear = nn.Conv2d(4, 4, 1), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x) + self.linear(x)  # what a linear layer gives is in the default layout

    model, x = randomised(Net()), torch.rand(2, 4, 6, 6)
    packed = fxopt.compose(fxopt.PackConvs(tune=False), fxopt.FuseEpilogues())(fxopt.trace(model, (x,)))
    with torch.no_grad():
        torch.testing.assert_close(function_of(packed, {})(x), model(x), rtol=1e-5, atol=1e-5)


def test_hooks_modes_and_guards_stay() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                y = self.norm(x)
            return self.linear(y)

    model, x = randomised(Net()), torch.rand(2, 4)
    traced = fxopt.trace(model, (x,))
    assert function_of(traced, {}) is traced, "its nodes switch modes"

    layers = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)).eval()
    traced = fxopt.trace(layers, (x,))
    traced.get_submodule("1").register_forward_hook(lambda module, args, value: value + 1)
    function = function_of(traced, {})
    with torch.no_grad():
        assert torch.equal(function(x), traced(x))
        assert torch.equal(function(input=x), traced(x))
    with pytest.raises(GuardError, match="captured for 2 alone"):
        function(torch.rand(3, 4))


@PACKS
@torch.no_grad()
def test_a_packed_layer_may_be_called_by_keyword() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.conv = nn.Linear(32, 32), nn.Conv2d(3, 8, 3)

        def forward(self, x: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
            return self.linear(input=x) + x, self.conv(input=image)

    model, given = randomised(Net()), (torch.rand(16, 32), torch.rand(2, 3, 8, 8))
    fast = fxopt.optimize(model, given, tune=False)
    assert fast.report[0].reason is None, fast.report
    assert fast.report[0].kernels, fast.report
    torch.testing.assert_close(fast(*given), model(*given))


def test_global_hooks_see_the_layers_of_the_model() -> None:
    model, x, seen = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.rand(2, 4), []
    fast = fxopt.optimize(model, (x,), tune=False)
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, value: seen.append(module))
    try:
        with torch.no_grad():
            fast(x)
    finally:
        handle.remove()
    assert {model[0], model[1]} <= {*seen}
