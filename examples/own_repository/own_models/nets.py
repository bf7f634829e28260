"""A network whose blocks begin and end with an activation, so that some follow one another."""

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.ReLU()
        self.linear = nn.Linear(width, width)
        self.last = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.linear(self.first(x)))


class Net(nn.Module):
    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


def example() -> tuple[Net, Tensor]:
    """For `fxopt trace own_models.nets:example`: the model and an input."""
    return Net(), torch.randn(2, 8)
