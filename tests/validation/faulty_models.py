"""Models that die, hang and fail, and one that does not."""

from __future__ import annotations

import collections
import itertools
import os
import signal
import sys
import time

import torch
from torch import Tensor, nn


class Good(nn.Module):
    """The others do something else before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.before(x)
        return self.linear(x)

    def before(self, x: Tensor) -> None:
        return


class Segfault(Good):
    def before(self, x: Tensor) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


class Exit(Good):
    def before(self, x: Tensor) -> None:
        os._exit(0)


class SystemExits(Good):
    def before(self, x: Tensor) -> None:
        sys.exit("enough")


class Hang(Good):
    def before(self, x: Tensor) -> None:
        while True:
            time.sleep(0.1)


class HangInC(Good):
    def before(self, x: Tensor) -> None:
        collections.deque(itertools.repeat(0), maxlen=0)


class Memory(Good):
    def before(self, x: Tensor) -> None:
        torch.empty(2**62, dtype=torch.uint8)


class Error(Good):
    def before(self, x: Tensor) -> None:
        raise ValueError("a model of its own mind")
