"""Packed weights move to huge pages; their contents and addresses stay."""

import mmap
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import fxopt
from fxopt.optimizing import prepare as prepare_module
from fxopt.optimizing.huge_pages import huge_ranges, move_to_huge_pages

HUGE = 2**21


def in_huge_pages(address):
    """The bytes in huge pages of the mapping that an address is in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds:
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("AnonHugePages"):
            return 1024 * int(line.split()[1])
    return 0


@pytest.fixture
def memory():
    """Four huge pages of memory, in pages of the usual size, where the system offers others on demand."""
    with mmap.mmap(-1, 4 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area:
        area.write(bytes(range(256)) * (4 * HUGE // 256))
        try:
            area.madvise(25, 0, 2 * HUGE)  # MADV_COLLAPSE, which Python does not name
        except OSError:
            pytest.skip("this system offers no huge pages on demand; Linux does from version 6.1")
        tensor = torch.frombuffer(area, dtype=torch.uint8)
        yield tensor
        del tensor


def test_pages_that_weights_fill_by_half_or_more():
    half = HUGE // 2
    assert huge_ranges([]) == []
    assert huge_ranges([(5 * HUGE, half)]) == [(5 * HUGE, HUGE)]
    assert huge_ranges([(5 * HUGE, half - 1)]) == []
    assert huge_ranges([(5 * HUGE, half), (6 * HUGE, HUGE), (8 * HUGE, half)]) == [
        (5 * HUGE, 2 * HUGE),
        (8 * HUGE, HUGE),
    ]
    assert huge_ranges([(5 * HUGE + 1, half // 2), (6 * HUGE - half // 2, 2 * HUGE)]) == [
        (5 * HUGE, 3 * HUGE)
    ]


def test_contents_stay(memory):
    address = memory.data_ptr()
    before = in_huge_pages(address)
    move_to_huge_pages([(address, memory.nbytes)])
    assert in_huge_pages(address) > before
    assert torch.equal(
        memory.view(-1, 256), torch.arange(256, dtype=torch.uint8).expand(4 * HUGE // 256, 256)
    )


def test_memory_that_is_not_there_is_left_alone():
    move_to_huge_pages([(HUGE * 2**10, HUGE)])


def test_packed_weights_of_optimized_models_are_in_huge_pages(memory, monkeypatch):
    monkeypatch.setattr(prepare_module, "speedup", lambda *_: 1.5)
    model, x = nn.Sequential(nn.Linear(2048, 1024), nn.Linear(1024, 2048)).eval(), torch.randn(4, 2048)
    fast = fxopt.optimize(model, (x,), tune=False)
    ((lowered,),) = fast.__dict__["_fxopt_graphs"]._graphs.values()
    places = [packed for packed in lowered.packed.values() if huge_ranges([(packed.address, packed.nbytes)])]
    assert len(places) == 2
    assert all(in_huge_pages(packed.address + packed.nbytes // 2) for packed in places)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
