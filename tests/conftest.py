"""The suite as a whole: how much of its sweeps runs, and what the garbage collector looks at."""

import collections
import gc
import os


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "sweep(n): models of one kind; every n-th case runs, and with NIGHTLY=1 each"
    )


def pytest_collection_modifyitems(config, items):
    """Leave of each sweep every n-th case, unless it is night."""
    if os.environ.get("NIGHTLY"):
        return
    before, left = collections.Counter(), []
    for item in items:
        function = item.nodeid.partition("[")[0]
        if (sweep := item.get_closest_marker("sweep")) and before[function] % sweep.args[0]:
            left.append(item)
        before[function] += 1
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]


def pytest_collection_finish(session):
    """Objects that imports have made stay to the end: no collection looks at them again."""
    gc.collect()
    gc.freeze()
