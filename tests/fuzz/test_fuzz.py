"""The fuzzer itself: programs run, faults are found, made small and written as scripts that fail."""

import runpy
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fxopt import batch_norm
from fxopt.graph_index import GraphIndex
from fxopt.memory import Memory
from fxopt.passes import merge_linears
from tests.fuzz import motifs, oracles, reduction
from tests.fuzz.__main__ import example

PROGRAMS = 40


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # `reduction` makes a fault small, and faster
    suppress_health_check=list(HealthCheck),
)
@given(st.randoms(use_true_random=False))
def test_no_fault_is_found(draw):
    program = motifs.generate(draw)
    try:
        oracles.check(program, oracles.make_plan(draw, program))
    except oracles.Invalid:
        return


def test_one_seed_gives_one_program():
    assert example("3:1") == example("3:1")
    assert example("3:1") != example("3:2")


def test_most_programs_run_and_many_are_rewritten():
    invalid = sites = 0
    for number in range(PROGRAMS):
        try:
            sites += oracles.check(*example(f"5:{number}"))
        except oracles.Invalid:
            invalid += 1
    assert invalid < PROGRAMS / 8
    assert sites > PROGRAMS / 4


def blind_to_writes(self, first, last, value=None):
    return None


def unscaled(norm):
    scale, shift = SCALE_AND_SHIFT(norm)
    return scale, shift * 1.01


def misplaced(merged, start, stop):
    return merged, (Ellipsis, slice(max(start - 1, 0), stop - (start > 0)))


SCALE_AND_SHIFT = batch_norm.scale_and_shift


@pytest.mark.parametrize(
    ("target", "name", "planted"),
    [
        (Memory, "write_between", blind_to_writes),
        (merge_linears, "_slice", misplaced),
        (batch_norm, "scale_and_shift", unscaled),
        (GraphIndex, "call_sites", lambda self, module: [None]),
    ],
    ids=["writes", "slices", "shift", "shared"],
)
def test_a_planted_fault_is_found_and_made_small(target, name, planted, tmp_path):
    with mock.patch.object(target, name, planted):
        program, plan, fault = next(_faults(range(1500)))
        small = reduction.reduce(program, plan, fault.kind)
        assert len(small[0].body) <= 6
        assert len(small[1].passes) == 1
        path = tmp_path / "found.py"
        path.write_text(reduction.script(*small, str(fault)))
        with pytest.raises((AssertionError, RuntimeError, AttributeError)):
            runpy.run_path(str(path))
    runpy.run_path(str(path))  # without the planted fault it holds


def _faults(numbers):
    for number in numbers:
        program, plan = example(f"9:{number}")
        try:
            oracles.check(program, plan)
        except oracles.Fault as fault:
            yield program, plan, fault
        except oracles.Invalid:
            continue
