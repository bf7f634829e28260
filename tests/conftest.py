"""The suite as a whole: how much of its sweeps runs, and what the garbage collector looks at."""

import collections
import gc
import os

import pytest


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


def pytest_collection_finish(session):
    """Objects that imports have made stay to the end: no collection looks at them again."""
    gc.collect()
    gc.freeze()
