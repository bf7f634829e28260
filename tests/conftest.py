"""The suite as a whole: which tests are long, the random numbers, and what the garbage collector looks at."""

import collections
import gc
import random
import zlib

import numpy
import pytest
import torch

from fxopt import packing

# For a device that is not there, torch writes the stack down each time that it is seeded, which takes longer than most tests.
for device in (torch.cuda, torch.mtia, torch.xpu):
    if not device.is_available():
        device.manual_seed_all = lambda seed: None


# In `optimize` without tuning, the kernel of a layer is one and the same on every machine, whatever was measured there before.
packing.is_slower = lambda *_: False


def pytest_configure(config):
    config.addinivalue_line("markers", "long: left to `make test-long`; tests/README.md says which tests are")
    config.addinivalue_line("markers", "nightly: left to `make test-all`, which runs each night")
    config.addinivalue_line(
        "markers",
        "sweep(n, day=m): cases of one kind; all but every n-th are long, and all but every m-th nightly",
    )


@pytest.hookimpl(tryfirst=True)  # before `-m` reads the marks
def pytest_collection_modifyitems(items):
    """Make all but every n-th case of each sweep long, and all but every `day`-th nightly."""
    before = collections.Counter()
    for item in items:
        function = item.nodeid.partition("[")[0]
        sweep = item.get_closest_marker("sweep")
        if sweep and sweep.args and before[function] % sweep.args[0]:
            item.add_marker(pytest.mark.long)
        if sweep and before[function] % sweep.kwargs.get("day", 1):
            item.add_marker(pytest.mark.nightly)
        before[function] += 1


def _seed(node):
    """Random numbers of its own for each file and each test, the same in every run: a failure can be repeated."""
    seed = zlib.crc32(node.nodeid.encode())
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def pytest_collectstart(collector):
    """Seed what a file draws when it is imported."""
    _seed(collector)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Seed what a test and its fixtures draw."""
    _seed(item)


def pytest_collection_finish(session):
    """Objects that imports have made stay to the end: no collection looks at them again."""
    gc.collect()
    gc.freeze()
