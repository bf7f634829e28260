"""The fuzzer itself: programs run, faults are found, made small and written as scripts that fail."""

import runpy
import warnings
from collections import Counter
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import fxopt
from fxopt.graph_index import GraphIndex
from fxopt.memory import Memory
from fxopt.passes import available, fold_batch_norms, merging
from fxopt.rewriting import composition, history, undoing
from tests.fuzz import motifs, oracles, plans, reduction
from tests.fuzz.__main__ import example
from tests.fuzz.histories import Fault

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
        oracles.check(program, plans.make_plan(draw, program))
    except oracles.Invalid:
        return


def test_one_seed_gives_one_program():
    assert example("3:1") == example("3:1")
    assert example("3:1") != example("3:2")


@pytest.mark.long
def test_most_programs_run_and_many_are_rewritten_and_verified():
    invalid, counts = 0, Counter[str]()
    for number in range(PROGRAMS):
        try:
            counts.update(oracles.check(*example(f"5:{number}")))
        except oracles.Invalid:
            invalid += 1
    assert invalid < PROGRAMS / 8
    assert counts["sites"] > PROGRAMS / 4
    assert counts["undone"] > PROGRAMS
    assert counts["verified sites"] > counts["unverified"]


def test_plans_draw_every_pass_and_all_that_can_be_done_with_them():
    drawn = [example(f"6:{number}")[1] for number in range(400)]
    assert {text for plan in drawn for text in plan.passes} == {*plans.PASSES}
    assert {f"{name}()" for name in available()} <= {*plans.PASSES}
    assert any(plan.within for plan in drawn)
    assert any(plan.verify for plan in drawn)
    assert all(plan.own_trace for plan in drawn if plan.verify)
    pipelines = [pipeline for plan in drawn for pipeline in plan.applied if isinstance(pipeline, tuple)]
    assert any(isinstance(part, tuple) for pipeline in pipelines for part in pipeline)
    assert any(len(pipeline) > len({*pipeline}) for pipeline in pipelines)
    kinds = {type(action) for plan in drawn for action in plan.undone}
    assert kinds == {int, str, tuple}


def blind_to_writes(self, first, last, value=None):
    return None


def unscaled(norm):
    scale, shift = SCALE_AND_SHIFT(norm)
    return scale, shift * 1.01


def misplaced(layers):
    return MERGED(layers[::-1])


def everything(graph_module, chosen):
    return UNDO_STEPS(graph_module, fxopt.history(graph_module))


def left_in_training(graph_module, chosen):
    try:
        return UNDO_STEPS(graph_module, chosen)
    except fxopt.UndoError:
        graph_module.train()
        raise


def backwards(self):
    object.__setattr__(self, "parts", self.parts[::-1])
    POST_INIT(self)


SCALE_AND_SHIFT, MERGED = fold_batch_norms.scale_and_shift, merging._merged
UNDO_STEPS, POST_INIT = undoing.undo_steps, composition.Composition.__post_init__


@pytest.mark.long
@pytest.mark.sweep(day=4)
@pytest.mark.parametrize(
    ("target", "name", "planted", "kind"),
    [
        (Memory, "write_between", blind_to_writes, "rewritten outputs"),
        (merging, "_merged", misplaced, "rewritten outputs"),
        (fold_batch_norms, "scale_and_shift", unscaled, "rewritten outputs"),
        (GraphIndex, "call_sites", lambda self, module: [None], ""),
        (merging, "_merged", misplaced, "verify"),
        (composition.Composition, "__post_init__", backwards, "composition"),
        (undoing, "undo_steps", everything, "undo history"),
        (undoing, "undo_steps", left_in_training, "refused undo"),
        (undoing, "_check_order", lambda undone, steps: None, "undo"),
        (undoing, "_unmark", lambda graph_module, undone, standing: [], "partial undo"),
        (history, "undo", lambda graph_module, steps=1: graph_module, "applied"),
    ],
    ids=[
        *("writes", "slices", "shift", "shared", "verified", "order", "too much", "refused", "stands on"),
        *("marks", "with"),
    ],
)
def test_a_planted_fault_is_found_and_made_small(target, name, planted, kind, tmp_path):
    with mock.patch.object(target, name, planted):
        program, plan, fault = next(f for f in _faults(range(1500)) if f[2].kind == kind or not kind)
        small = reduction.reduce(program, plan, fault.kind)
        assert len(small[0].body) <= 12
        assert len(small[1].passes) <= 3
        path = tmp_path / "found.py"
        path.write_text(reduction.script(*small, str(fault)))
        with pytest.raises(Exception), warnings.catch_warnings():  # noqa: B017, PT011
            runpy.run_path(str(path))
    runpy.run_path(str(path))  # without the planted fault it holds


def _faults(numbers):
    for number in numbers:
        program, plan = example(f"9:{number}")
        try:
            oracles.check(program, plan)
        except Fault as fault:
            yield program, plan, fault
        except oracles.Invalid:
            continue
