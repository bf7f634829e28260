"""`python -m tests.fuzz`: random programs against all passes, until the time is used up.

From the environment: FUZZ_SECONDS (60), FUZZ_SEED (0), FUZZ_GRAPHS (a limit; none). One seed gives the same
programs everywhere; how far a run gets depends on the machine. A fault is reduced and written to FUZZ_OUT
(reports/fuzz) as a script for the root of the repository.
"""

from __future__ import annotations

import collections
import os
import pathlib
import random
import sys
import time
import warnings

import torch

from tests.fuzz import histories, motifs, oracles, plans, reduction
from tests.fuzz.program import Program


def main() -> int:
    """Run; returns 1 if there was a fault."""
    seconds, seed = float(os.environ.get("FUZZ_SECONDS", "60")), int(os.environ.get("FUZZ_SEED", "0"))
    limit = int(os.environ.get("FUZZ_GRAPHS", sys.maxsize))
    print(f"FUZZ_SEED={seed} FUZZ_SECONDS={seconds:g}", flush=True)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts: collections.Counter[str] = collections.Counter()
    reported = start = time.monotonic()
    number = 0
    while counts["graphs"] < limit and time.monotonic() - start < seconds:
        program, plan = example(f"{seed}:{number}")
        counts.update(_judged(f"{seed}:{number}", program, plan))
        number += 1
        if time.monotonic() - reported > 60:
            reported = time.monotonic()
            print(_summary(counts, reported - start), flush=True)
    print(_summary(counts, time.monotonic() - start))
    for name, count in counts.most_common():
        if name.startswith(("unverified: ", "lost by ")):
            print(f"{count:6} {name}")
    return 1 if counts["faults"] else 0


def example(name: str) -> tuple[Program, plans.Plan]:
    """The program and the plan of a name, `<seed>:<number>`."""
    draw = random.Random(name)
    program = motifs.generate(draw)
    return program, plans.make_plan(draw, program)


def _judged(name: str, program: Program, plan: plans.Plan) -> dict[str, int]:
    try:
        return {"graphs": 1, **oracles.check(program, plan)}
    except oracles.Invalid:
        return {"invalid": 1}
    except histories.Fault as fault:
        print(f"{name}: {fault}", flush=True)
        text = reduction.script(*reduction.reduce(program, plan, fault.kind), str(fault))
        out = pathlib.Path(os.environ.get("FUZZ_OUT", "reports/fuzz")) / f"fault_{name.replace(':', '_')}.py"
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)
        print(f"{text}\nwritten to {out}", flush=True)
        return {"graphs": 1, "faults": 1}


def _summary(counts: collections.Counter[str], seconds: float) -> str:
    return (
        f"{counts['graphs']} graphs ({counts['graphs'] / max(seconds, 1e-9):.1f}/s), {counts['sites']} sites "
        f"rewritten, {counts['undone']} undos, {counts['verified sites']} sites verified but for "
        f"{counts['unverified']}, {counts['invalid']} programs that do not run, {counts['faults']} faults"
    )


if __name__ == "__main__":
    sys.exit(main())
