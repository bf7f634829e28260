"""The weights of a model in a file that is mapped into memory, so that the system drops what packed copies have replaced."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import tempfile
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fxopt.errors import PassError
from fxopt.memory import storage_of
from fxopt.tuning import cache_folder

_PAGE_OUT = 21  # MADV_PAGEOUT of Linux 5.4, which Python does not name: it loses nothing that was written


class Offloaded:
    """Parameters whose values are in a file, which has no name and goes with the last of them.

    They stay the same objects with the same values; what reads one finds it in memory, or the system reads the file. What
    is written into one stays in memory.

    Args:
        parameters: those on the CPU are moved, if no other process and no buffer sees their memory.
        buffers: tensors that stay where they are.

    Raises:
        PassError: the file cannot be written, or the system is not Linux.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 2)
        >>> before = layer.weight.detach().clone()
        >>> moved = Offloaded(layer.parameters())
        >>> moved.evict()
        >>> torch.equal(layer.weight, before)
        True
    """

    def __init__(self, parameters: Iterable[nn.Parameter], buffers: Iterable[Tensor] = ()) -> None:
        if sys.platform != "linux":
            raise PassError(f'memory="low" is made for Linux, and this is {sys.platform}: leave it out')
        held = {storage_of(buffer) for buffer in buffers}
        moved = [p for p in parameters if _is_plain(p) and storage_of(p) not in held]
        sizes = [(p.untyped_storage().data_ptr(), p.untyped_storage().nbytes()) for p in moved]
        places, size = dict[int, int](), 0
        # Two may begin at the same place, as arrays of numpy do: there is room for the one that sees more.
        for address, count in dict(sorted(sizes, key=lambda pair: pair[1])).items():
            places[address] = size
            size += -(-count // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = _written(moved, places, size) if size else None
        if self._memory is not None:
            for parameter in moved:
                parameter.data = _at(self._memory, parameter, places[parameter.untyped_storage().data_ptr()])
        trim()

    def evict(self) -> None:
        """Let go of the memory in which the system keeps what was read, where it offers that, and of what was freed."""
        if self._memory is not None:
            with contextlib.suppress(OSError):  # an older system, which drops it when it needs the memory
                self._memory.madvise(_PAGE_OUT)
        trim()


def _is_plain(parameter: Tensor) -> bool:
    return (
        type(parameter) is nn.Parameter
        and parameter.device.type == "cpu"
        and parameter.layout is torch.strided
        and parameter.numel() > 0
        and not parameter.is_quantized
        and not parameter.is_inference()
        and not parameter.is_conj()  # its memory holds other numbers
        and not parameter.is_neg()
        and not parameter.is_shared()
    )


def _written(parameters: Iterable[Tensor], places: dict[int, int], size: int) -> mmap.mmap:
    """Write the storages of parameters to a file, and map it so that later writes do not reach it."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            _fill(file.fileno(), parameters, places, size)
            return mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE)
    except OSError as error:
        raise PassError(
            f'memory="low" keeps the {size / 1e9:.2f} GB of weights in a file in {folder}, which cannot be written '
            f"({error.strerror}): name another folder in the environment variable FXOPT_CACHE"
        ) from error


def _fill(file: int, parameters: Iterable[Tensor], places: dict[int, int], size: int) -> None:
    os.posix_fallocate(file, 0, size)  # a full disk is an error here, and not a signal later
    for parameter in parameters:
        storage = parameter.untyped_storage()
        address, count = storage.data_ptr(), storage.nbytes()
        left, place = memoryview((ctypes.c_char * count).from_address(address)), places[address]
        while left:  # the system writes a part of what is very large
            done = os.pwrite(file, left, place)
            left, place = left[done:], place + done
    os.fsync(file)  # what is not written yet cannot be let go of


def _at(memory: mmap.mmap, parameter: Tensor, place: int) -> Tensor:
    """The values of a parameter in the file, with its strides."""
    storage = parameter.untyped_storage()
    count = storage.nbytes() // parameter.element_size()
    values = torch.frombuffer(memory, dtype=parameter.dtype, count=count, offset=place)
    return values.as_strided(parameter.shape, parameter.stride(), parameter.storage_offset())


def trim() -> None:
    """Give memory that was freed back to the system, which the allocator of glibc does when it likes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
