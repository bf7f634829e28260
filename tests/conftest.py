"""The suite as a whole: how much of its sweeps runs, the random numbers, and what the garbage collector looks at."""

import collections
import gc
import os
import random
import zlib

import numpy
import pytest
import torch


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "sweep(n): models of one kind; every n-th case runs, and with NIGHTLY=1 each"
    )


@pytest.hookimpl(trylast=True)  # of what `-k` has chosen: one case that is named runs
def pytest_collection_modifyitems(config, items):
    """Leave of each sweep every n-th case, unless it is night."""
    if os.environ.get("NIGHTLY"):
        return
    before, kept, left = collections.Counter(), [], []
    for item in items:
        function = item.nodeid.partition("[")[0]
        sweep = item.get_closest_marker("sweep")
        (left if sweep and before[function] % sweep.args[0] else kept).append(item)
        before[function] += 1
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


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
