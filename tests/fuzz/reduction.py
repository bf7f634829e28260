"""A fault made small, and written as a script that shows it."""

from __future__ import annotations

from collections.abc import Iterator

from tests.fuzz import oracles
from tests.fuzz.histories import Fault
from tests.fuzz.plans import Plan
from tests.fuzz.program import Program


def reduce(program: Program, plan: Plan, kind: str) -> tuple[Program, Plan]:
    """The smallest program and plan that still fail in the same way.

    Args:
        program: one that fails.
        plan: what fails on it.
        kind: of the fault, which must stay.
    """
    while True:
        for smaller in _smaller(program, plan):
            if _fails(*smaller, kind):
                program, plan = smaller
                break
        else:
            return program, plan


def script(program: Program, plan: Plan, fault: str) -> str:
    """A script, for the root of the repository, that fails as long as the fault is there."""
    return _SCRIPT.format(
        fault=fault.splitlines()[0].replace("\\", "/"), source=program.source(), program=program, plan=plan
    )


_SCRIPT = '''\
"""Found by fuzzing: {fault}

{source}
"""

from tests.fuzz.oracles import check
from tests.fuzz.plans import Plan
from tests.fuzz.program import Program

check(
    {program},
    {plan},
)
'''


def _smaller(program: Program, plan: Plan) -> Iterator[tuple[Program, Plan]]:
    yield from ((program, smaller) for smaller in plan.smaller())
    yield from ((smaller, plan) for smaller in program.smaller())


def _fails(program: Program, plan: Plan, kind: str) -> bool:
    try:
        oracles.check(program, plan)
    except Fault as fault:
        return fault.kind == kind
    except oracles.Invalid:
        return False
    return False
