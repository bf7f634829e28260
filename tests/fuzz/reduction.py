"""A fault made small, and written as a script that runs without the harness."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import fxopt
from tests.fuzz import changes, oracles, plans
from tests.fuzz.histories import Fault
from tests.fuzz.program import PREAMBLE, Program


def reduce(program: Program, plan: plans.Plan, kind: str) -> tuple[Program, plans.Plan]:
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


def script(program: Program, plan: plans.Plan, fault: str) -> str:
    """A script that asserts what `plan` promises of `program`: it fails as long as the fault is there."""
    own = [cls for cls in (plans.SameReLU, plans.SameGELU) if cls.__name__ in str(plan)]
    (variant, of_variant), (between, of_between) = (
        _change(table, key)
        for table, key in ((changes.VARIANTS, plan.variant), (changes.BETWEEN, plan.between))
    )
    imported = "from torch.nn.utils import parametrizations, parametrize\n"
    lines = [
        f'"""Found by fuzzing: {fault.splitlines()[0]}"""'.replace("\\", "/"),
        "",
        PREAMBLE.replace("import torch\n", "import fxopt\nimport torch\n", 1),
        "",
        *(f"{inspect.getsource(each)}\n" for each in (*own, *of_variant, *of_between)),
        program.source(),
        "",
        "",
        _RUN,
        f"# {plan}",
        *_given(program, plan),
        f"{variant}(traced)" if variant else "",
        *_rewritten(plan),
        f"traced = {between}(traced)" if between else "",
        *(_UNDONE.format(", ".join(map(_text, plan.undone))).splitlines() if plan.reversible else ()),
    ]
    return "\n".join(lines).replace(imported, imported + _IMPORTS, 1) + "\n"


def _change(table: Mapping[str, Any], key: str) -> tuple[str, list[Any]]:
    """The code of a change of a graph, empty for none, and the functions that the script has to hold for it."""
    function = table[key]
    if function.__name__.startswith("_"):
        return function.__name__, [function]
    return "copy.deepcopy" if key == "deepcopy" else "", []


def _given(program: Program, plan: plans.Plan) -> list[str]:
    """The model, its inputs, the graph, and the oracle."""
    trace = "fxopt.trace(model, tuple(inputs))" if plan.own_trace else "torch.fx.symbolic_trace(model)"
    return [
        f"KEEPS = { ({*plan.passes} <= {*plans.KEEPING}) }",
        "torch.manual_seed(0)",
        "model = randomise(Model())",
        "torch.manual_seed(1)",
        f"inputs = [x.to(torch.{program.dtype}) if x.is_floating_point() else x for x in ("
        f"{', '.join(program.inputs)},)]",
        f"traced = {trace}",
        f"reference = {'model' if plan.own_trace else 'copy.deepcopy(traced)'}",
        f"oracle = Oracle(reference, inputs, float64=reference, captured=copy.deepcopy(traced), gradients={plan.gradients}, "
        f"wide=torch.{program.dtype}, rtol={oracles.RTOL[program.dtype]})",
        "same_outputs(traced)" if plan.own_trace else "",
    ]


def _rewritten(plan: plans.Plan) -> list[str]:
    """The passes, applied in their compositions and one by one beside; the last one perhaps for a block alone."""
    within = plan.within and plan.reversible
    applied, last = (plan.applied[:-1], plan.applied[-1]) if within else (plan.applied, "")
    lines = [
        "states, makers = [copy.deepcopy(traced)], []",
        'warnings.filterwarnings("error", ".* left .* alone: ")' if plan.verify else "",
        "for pass_, parts in [",
        *(f"    ({_text(pipeline)}, [{_parts(pipeline)}])," for pipeline in applied),
        "]:",
        "    alone = sharing_copy(traced)",
        f"    traced = pass_(traced{', verify=True' if plan.verify else ''})",
        "    for part, *around in parts:",
        "        part(alone)",
        "        if len(fxopt.history(alone)) == len(states):",
        "            states.append(copy.deepcopy(alone))",
        "            makers.append([each.signature for each in (part, *around)])",
        "    same_graphs(alone, traced)",
        "same_outputs(traced)",
    ]
    if within:
        lines.append(f"with fxopt.applied(traced, {_text(last)}):\n    same_outputs(traced)")
        lines.append("same_graphs(states[-1], traced)")
    return lines


_UNDONE = """\
steps = [step.key for step in fxopt.history(traced)]
for action in [{}]:
    undo(action)
while fxopt.history(traced):
    undo(len(fxopt.history(traced)))
assert_round_trip(states[0], traced)
"""

_IMPORTS = """\
from fxopt.passes import available
from fxopt.rewriting.record import MARKS
from fxopt.submodules import sharing_copy
from fxopt.testing import Oracle, assert_round_trip, randomise
"""

_RUN = """\
def same_outputs(module):
    if KEEPS:
        verdict = oracle.judge(module, module)
        assert verdict.grade.passes, str(verdict)
    else:
        fault = oracle.fault(oracle.observe(module))
        assert not fault, fault


def same_graphs(one, other):
    assert_round_trip(one, other)
    assert str(fxopt.history(one)) == str(fxopt.history(other))
    facts = [[(n.name, sorted(n.meta.get(MARKS, ()))) for n in side.graph.nodes] for side in (one, other)]
    assert facts[0] == facts[1]


def undo(action):
    \"\"\"A number of applications, or a pass or composition, which may have to wait for another.\"\"\"
    global traced
    keys, made_by = [step.key for step in fxopt.history(traced)], dict(zip(steps, makers))
    before = copy.deepcopy(traced)
    try:
        if isinstance(action, int):
            left = keys[: -min(action, len(keys))]
            traced = fxopt.undo(traced, min(action, len(keys)) or 1)
        else:
            left = [key for key in keys if action.signature not in made_by[key]]
            traced = action(traced, reverse=True)
    except fxopt.UndoError as error:
        if not str(error).endswith(" first"):
            raise
        same_graphs(before, traced)
        return
    assert left == [step.key for step in fxopt.history(traced)]
    if left == steps[: len(left)]:
        same_graphs(states[len(left)], traced)
    else:
        same_outputs(traced)


"""


def _parts(pipeline: plans.Pipeline) -> str:
    """The passes in a pipeline, each with the compositions around it."""
    found = plans.parts(pipeline)
    return ", ".join(
        f"({', '.join([_text(text), *(_text(each) for each in around if each != text)])},)"
        for text, around in found
    )


def _text(pipeline: plans.Action) -> str:
    if isinstance(pipeline, tuple):
        return f"fxopt.compose({', '.join(map(_text, pipeline))})"
    if isinstance(pipeline, int):
        return str(pipeline)
    name, options = pipeline.split("(", 1)
    return f"fxopt.{pipeline}" if hasattr(fxopt, name) else f"available()[{name!r}]({options}"


def _smaller(program: Program, plan: plans.Plan) -> Iterator[tuple[Program, plans.Plan]]:
    yield from ((program, smaller) for smaller in plan.smaller())
    yield from ((smaller, plan) for smaller in program.smaller())


def _fails(program: Program, plan: plans.Plan, kind: str) -> bool:
    try:
        oracles.check(program, plan)
    except Fault as fault:
        return fault.kind == kind
    except oracles.Invalid:
        return False
    return False
