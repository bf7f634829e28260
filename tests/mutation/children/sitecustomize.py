"""Python imports this module when a process starts whose PYTHONPATH has this folder: one that a test starts."""

import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
OURS = tuple(os.path.join(ROOT, package, "") for package in ("fxopt", "validation"))
TOOL = 3  # of the numbers of sys.monitoring one that no debugger, profiler or coverage takes


def listen(note):
    """Call `note(file, line)` for each line of our packages, once until `sys.monitoring.restart_events()`."""
    monitoring = sys.monitoring

    def start(code, offset):
        if code.co_filename.startswith(OURS):
            monitoring.set_local_events(TOOL, code, monitoring.events.LINE)
        return monitoring.DISABLE

    def line(code, number):
        note(os.path.relpath(code.co_filename, ROOT), number)
        return monitoring.DISABLE

    monitoring.use_tool_id(TOOL, "executed")
    monitoring.register_callback(TOOL, monitoring.events.PY_START, start)
    monitoring.register_callback(TOOL, monitoring.events.LINE, line)
    monitoring.set_events(TOOL, monitoring.events.PY_START)


if (
    __name__ == "sitecustomize" and "EXECUTED_LINES" in os.environ
):  # each at once, since the process may be killed
    lines = os.open(os.environ["EXECUTED_LINES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    listen(lambda file, number: os.write(lines, f"{file}\t{number}\n".encode()))

if __name__ == "sitecustomize" and "MUTANT" in os.environ:
    from tests.mutation.planting import plant_numbered

    plant_numbered(*os.environ["MUTANT"].rsplit(":", 1))
