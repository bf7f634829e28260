"""Heads that are models of their own in the zoo: only GroupViT, among models of transformers, has such layers."""

from __future__ import annotations

from torch import nn


def projector(width: int = 32, layers: int = 3) -> nn.Sequential:
    """The projection head of contrastive learning: linear layers, each with batch normalization, and ReLU between them.

    Source: Chen et al., A Simple Framework for Contrastive Learning, 2020, arXiv:2002.05709, section 2.1.

    Example:
        >>> import torch
        >>> projector(8)(torch.ones(2, 8)).shape
        torch.Size([2, 8])
    """
    blocks = [
        layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU())
    ]
    return nn.Sequential(*blocks[:-1])
