"""The default layout and channels_last, for images and for sequences, which are images with one row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


def is_channels_last(value: Tensor) -> bool:
    """Tell whether an image or a sequence is in channels_last: the channels of a pixel are next to each other.

    Example:
        >>> import torch
        >>> tokens = torch.zeros(2, 7, 3)
        >>> is_channels_last(tokens), is_channels_last(tokens.transpose(1, 2))
        (False, True)
    """
    if value.dim() == 3:
        return value.transpose(1, 2).is_contiguous()
    return value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)


def images_in_channels_last(args: Iterable[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """The positions of images and videos that torch treats as channels_last, among arguments and entries of containers.

    A convolution returns its output in the layout that torch infers for its input.

    Example:
        >>> import torch
        >>> image = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
        >>> images_in_channels_last([torch.zeros(2, 3, 4, 4)], {"images": [image, image[:, :1]]})
        (1, 2)
    """
    values = list[Any]()
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            values.append(value)
        elif isinstance(value, dict | list | tuple):
            values += value.values() if isinstance(value, dict) else value
    return tuple(i for i, each in enumerate(values) if isinstance(each, Tensor) and _suggests(each))


def _suggests(value: Tensor) -> bool:
    if value.dim() not in (4, 5) or value.layout is not torch.strided or value.is_nested:
        return False
    sizes, strides, least = value.shape, value.stride(), 0
    for dim in (1, *range(value.dim() - 1, 1, -1), 0):  # like `suggest_memory_format` in torch's C++ code
        if sizes[dim] == 0 or strides[dim] < least or (dim == 0 and strides[1] == least):
            return False
        least = strides[dim] * sizes[dim]
    return strides[1] != 0


def channels_last(value: Tensor) -> Tensor:
    """Convert an image or a sequence to channels_last, with the strides of this layout also in dimensions of size 1.

    Example:
        >>> import torch
        >>> channels_last(torch.zeros(2, 3, 4, 4)).stride(), channels_last(torch.zeros(2, 3, 4)).stride()
        ((48, 1, 12, 3), (12, 1, 3))
    """
    if value.dim() == 3:
        return channels_last(value.unsqueeze(2)).squeeze(2)
    return with_strides_of_channels_last(value.contiguous(memory_format=torch.channels_last))


def contiguous(value: Tensor) -> Tensor:
    """Convert a tensor to torch's default layout, with the strides of this layout also in dimensions of size 1.

    Example:
        >>> import torch
        >>> value = torch.zeros(2, 1, 3, 3).to(memory_format=torch.channels_last)
        >>> value.contiguous().stride(), contiguous(value).stride()
        ((9, 1, 3, 1), (9, 9, 3, 1))
    """
    value, strides = value.contiguous(), [1]
    for size in value.shape[:0:-1]:
        strides.insert(0, size * strides[0])
    return with_strides(value, tuple(strides))


def with_strides_of_channels_last(image: Tensor) -> Tensor:
    """Give an image in channels_last the strides of this layout also in dimensions of size 1; return others unchanged."""
    if image.dim() != 4 or not image.is_contiguous(memory_format=torch.channels_last):
        return image
    _, channels, height, width = image.shape
    return with_strides(image, (channels * height * width, 1, channels * width, channels))


def with_strides(value: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return the same tensor with other strides in dimensions of size 1."""
    return value if value.stride() == strides else value.as_strided(value.shape, strides)
