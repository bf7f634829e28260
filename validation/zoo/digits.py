"""A real task: the handwritten digits that come with scikit-learn, 1797 images of 8 by 8 pixels.

Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

SIZE = 32
"""Images are enlarged to this many pixels a side, so that models that halve them often have some left."""


def train(model: nn.Module, seed: int, epochs: int = 8, batch: int = 64) -> None:
    """Train an image classifier (`pixel_values` [n, 1, 32, 32] to logits [n, 10]) on the training images."""
    images, labels = data()[0]
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    steps = epochs * (len(images) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    model.train()
    for _ in range(epochs):
        order = torch.randperm(len(images), generator=generator)
        for chosen in order[: len(images) // batch * batch].split(batch):
            loss = nn.functional.cross_entropy(logits_of(model(images[chosen])), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.zero_grad()
    model.eval()


def accuracy(model: Callable[[Tensor], Any], dtype: torch.dtype, device: str, batch: int) -> float:
    """The share of the 500 test images that `model` (`pixel_values` to output) classifies right.

    `batch` images go at a time, because a captured graph may take no other number; it has to divide 500.
    """
    images, labels = data()[1]
    predicted = [logits_of(model(some.to(device, dtype))).argmax(-1).cpu() for some in images.split(batch)]
    return float((torch.cat(predicted) == labels).double().mean())


@functools.cache
def data() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test images, float32 [n, 1, 32, 32] with mean 0 and deviation 1, and labels, int64 [n]."""
    import sklearn.datasets  # only here: it takes as long as torch, and each worker would wait for it
    import sklearn.model_selection

    loaded = sklearn.datasets.load_digits()
    images = torch.tensor(loaded.images, dtype=torch.float32)[:, None]
    images = nn.functional.interpolate(images, size=SIZE, mode="nearest")
    images = (images - images.mean()) / images.std()
    labels = torch.tensor(loaded.target)
    split = sklearn.model_selection.train_test_split
    train, test = split(torch.arange(len(labels)), test_size=500, random_state=0, stratify=loaded.target)
    return (images[train], labels[train]), (images[test], labels[test])


def logits_of(output: Any) -> Tensor:
    """The logits in a model's output."""
    logits: Tensor = output if isinstance(output, Tensor) else output["logits"]
    return logits
