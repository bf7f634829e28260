"""A source for a sweep whose models each fall at another stage, or come through in a way of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Good(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) / 7.0


class Unbuilt(Good):
    def __init__(self) -> None:
        raise ValueError("not without a config")


class Unrunnable(Good):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[0, 0, :3])


class Infinite(Good):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 0


class Unseeded(Good):
    """Changes the generator, which cannot be part of a graph."""

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(1)
        return super().forward(x)


class Different(Good):
    """Off by one part in ten million, which float32 would not see."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 1e-7 if torch.compiler.is_exporting() else 1)


class Rounds(Good):
    """Converts to float32 on the way, and divides in two ways that are one to that precision."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).to(torch.float32)
        return (y * (1 / 3) if torch.compiler.is_exporting() else y / 3).to(x.dtype)


class Counts(Good):
    """Decides on a number that is another one in lower precision."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if int((1e6 * y.abs()).sum()) % 1000 < 0.1 else y * 3


class DifferentAtOtherSizes(Good):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 if torch.compiler.is_exporting() else x.shape[0] // 2)


class Decides(Good):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * int(x.abs().sum() > 0)


class OneBatch(Good):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] != 2:
            raise ValueError("two rows, please")
        return super().forward(x)


class OneSequence(Good):
    """Says the same at every length, but is guarded to one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.shape[1] == 16 else super().forward(x) + 0


class Reads(Good):
    """Asks for a mode, which the graph then holds to."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if torch.is_grad_enabled() else 1)


class Single(Good):
    """Computes in float32 whatever it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(torch.float32))


class Overflows(Good):
    """Is infinite in float64."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (float("inf") if x.dtype == torch.float64 else 1.0)


class Parametrized(Good):
    """No pickle takes it."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.linear)


MODELS = {
    cls.__name__.lower(): cls
    for cls in (
        *(Counts, Decides, Different, DifferentAtOtherSizes, Good, Infinite, OneBatch, OneSequence),
        *(Overflows, Parametrized, Reads, Rounds, Single, Unbuilt, Unrunnable, Unseeded),
    )
}


def model_types() -> list[str]:
    return sorted(MODELS)


def build(model_type: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[model_type]().eval()


def example_inputs(model: nn.Module, batch: int = 2, sequence: int = 16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(batch, sequence, 4, generator=generator, dtype=torch.float64)
    return {"x": values.to(next(model.parameters()).dtype)}
