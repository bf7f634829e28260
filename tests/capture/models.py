"""Modules that use Python and torch in the ways that a capture has to see."""

import dataclasses

import torch
from torch import nn


class Operators(nn.Module):
    def forward(self, x):
        y = 2 - x + 1 + x * 3
        y = y / 2 + 2 / (y * y + 1) - y // 2 + y % 2 + 7 % (abs(y) + 1)
        y = y**2 + 2 ** (-abs(y)) + -y + (-1) ** torch.arange(len(x.T))
        mask = ((y > 0) & (y < 1)) | ~(y == y) ^ (y >= 0.5) | (y <= -3) | (y != y)
        return y.matmul(y.T), mask, 3 @ torch.eye(3) if False else torch.eye(3) @ y


class Augmented(nn.Module):
    def forward(self, x):
        y = x.clone()
        y += 1
        y *= x
        y -= 0.5
        y /= 2
        return y, x


class Inplace(nn.Module):
    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = x * 1
        z = y
        y.add_(1).mul_(2)
        nn.functional.relu(y, inplace=True)
        z = z + 1
        self.relu(z)
        torch.relu_(y)
        return y, z


class ViewWrites(nn.Module):
    def forward(self, x):
        y = x.clone()
        row = y[0]
        flat = y.view(-1)
        row.fill_(7)
        flat[5] = 1
        y.t()[1].zero_()
        nn.functional.relu(flat, inplace=True)
        return y


class Setitem(nn.Module):
    def forward(self, x):
        y = torch.zeros_like(x)
        y[:, 1] = x[:, 2]
        y[x > 0] = 5
        y[0, ...] += 1
        return y


class OutArgument(nn.Module):
    def forward(self, x):
        out = torch.empty_like(x)
        torch.add(x, 1, out=out)
        half = torch.empty(x.shape, dtype=torch.float64)
        torch.mul(x, 2, out=half)
        return out, half


class SplitOutputs(nn.Module):
    def forward(self, x):
        a, b = x.split(2, dim=1)
        values, indices = torch.max(x, dim=1)
        first, *rest = x.unbind(0)
        top = x.topk(2)
        return a * b, values, indices, first + rest[0], top.values


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 5, batch_first=True)

    def forward(self, x):
        out, (h, c) = self.lstm(x)
        return out, h + c


class Constants(nn.Module):
    """Tensors from Python data are fresh at every call, also when the forward writes into them."""

    def forward(self, x):
        weights = torch.tensor([1.0, 2.0, 3.0, 4.0])
        counter = torch.tensor([0.0])
        counter += x.sum()
        mean = torch.as_tensor(0.5)
        return x * weights + mean, counter, torch.tensor([[1, 2]])


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.arange(4.0))
        self.register_buffer("hidden", torch.ones(4), persistent=False)
        self.scale = nn.Parameter(torch.full((4,), 2.0))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return x * self.scale + self.shift - self.hidden


class TensorAttribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.arange(4.0)

    def forward(self, x):
        return x + self.table


class Aliases(nn.Module):
    """`to`, `contiguous` and dropout in eval mode may return their input itself."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.identity = nn.Identity()

    def forward(self, x):
        y = self.dropout(x)
        z = self.identity(y).to(torch.float32).contiguous()
        w = z.float()
        w.add_(1)
        return x + y, z, w


class SizeArithmetic(nn.Module):
    def forward(self, x):
        rows, columns = x.shape
        y = x.reshape(rows * 2, columns // 2)
        ones = torch.ones(rows + 1, max(columns, 2))
        index = torch.arange(rows) % (rows - 1 + x.size(1))
        scale = (rows * columns) ** 0.5 if columns > 3 else 1
        return y, ones, index, x / scale, x.new_full((rows, 1), float(columns)), y.numel() * x


class SharedLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(4, 4)
        self.again = self.dense

    def forward(self, x):
        return self.again(self.dense(x))


@dataclasses.dataclass
class Point:
    x: torch.Tensor
    y: torch.Tensor


class InputContainers(nn.Module):
    def forward(self, pair, named, point):
        first, (second,) = pair
        return {"sum": first + second + named["a"], "point": Point(point.x * 2, point.y)}


class Keywords(nn.Module):
    def forward(self, x, scale=1.0, **others):
        return x * scale + others["extra"]


class Positional(nn.Module):
    def forward(self, x, *others, flag=False):
        for other in others:
            x = x + other * 2
        return -x if flag else x


class PositionalOnly(nn.Module):
    def forward(self, a, b, /):
        return a - b


class Outputs(nn.Module):
    def forward(self, x):
        return {"a": x + 1, "list": [x, (x * 2, None)], "number": 3, "name": "n"}


class PropertyReads(nn.Module):
    def forward(self, x):
        y = x.T.mT.real
        if x.dtype == torch.float32 and x.ndim == 2 and not x.is_cuda and isinstance(x, torch.Tensor):
            y = y + 1
        zeros = torch.zeros(x.shape[0], device=x.device, dtype=x.dtype)
        return y, zeros, x.data


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(4, 4)

    def forward(self, x):
        return self.dense(x) + x


class Containers(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.named = nn.ModuleDict({"out": nn.Linear(4, 2)})
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(4))])

    def forward(self, x):
        for block in self.blocks:
            x = block(x) * self.scales[0]
        return self.named["out"](x)


def asserted(self, x):
    """A forward; pytest would rewrite the assertion in a file of tests."""
    assert x.sum() < 1e6, "too large"
    return x * 2
