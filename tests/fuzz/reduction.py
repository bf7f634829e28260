"""A fault made small, and written as a script that runs without the harness."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator

from tests.fuzz import oracles
from tests.fuzz.program import PREAMBLE, Program


def reduce(program: Program, plan: oracles.Plan, kind: str) -> tuple[Program, oracles.Plan]:
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


def script(program: Program, plan: oracles.Plan, fault: str) -> str:
    """A script that asserts what `plan` promises of `program`: it fails as long as the fault is there."""
    own = [oracles.SameReLU, oracles.SameGELU]
    classes = [inspect.getsource(cls) for cls in own if cls.__name__ in "".join(plan.passes)]
    steps = []
    for table, key in ((oracles.VARIANTS, plan.variant), (oracles.BETWEEN, plan.between)):
        function = table[key]
        if function.__name__.startswith("_"):
            classes.append(inspect.getsource(function))
            steps.append(function.__name__)
        else:
            steps.append("copy.deepcopy" if key == "deepcopy" else "")
    variant, between = steps
    trace = "fxopt.trace(model, tuple(inputs))" if plan.own_trace else "torch.fx.symbolic_trace(model)"
    passes = ", ".join(f"fxopt.{name}" for name in plan.passes)
    lines = [
        f'"""Found by fuzzing: {fault.splitlines()[0]}"""'.replace("\\", "/"),
        "",
        PREAMBLE.replace("import torch\n", "import fxopt\nimport torch\n", 1),
        "",
        *(f"{text}\n" for text in classes),
        program.source(),
        "",
        "",
        "def run(module):",
        "    leaves = [x.clone().requires_grad_(GRADIENTS and x.is_floating_point()) for x in inputs]",
        "    with torch.set_grad_enabled(GRADIENTS):",
        "        outputs = copy.deepcopy(module)(*(x * 1 for x in leaves))",
        "    tensors = [t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor)]",
        "    if GRADIENTS:",
        "        sum(t.sin().sum() for t in tensors if t.requires_grad).backward()",
        "    return [t.detach() for t in tensors], [x.grad for x in leaves]",
        "",
        "",
        f"GRADIENTS = {plan.gradients}",
        "torch.manual_seed(0)",
        "model = randomise(Model())",
        "torch.manual_seed(1)",
        f"inputs = [x.to(torch.{program.dtype}) if x.is_floating_point() else x for x in ("
        f"{', '.join(program.inputs)},)]",
        f"traced = {trace}",
        f"{variant}(traced)" if variant else "",
        "before = copy.deepcopy(traced)",
        "expected = run(model)" if plan.own_trace and not variant else "expected = run(before)",
        f"passes = [{passes}]",
        "for pass_ in passes:",
        "    traced = pass_(traced)",
    ]
    if "ChangePrecision()" not in plan.passes:
        lines.append(
            "torch.testing.assert_close(run(traced), expected, rtol=1e-9, atol=1e-9, equal_nan=True)"
        )
    if between:
        lines.append(f"traced = {between}(traced)")
    lines += [
        "if all(isinstance(pass_, fxopt.ReversibleTransformation) for pass_ in passes):",
        "    for pass_ in reversed(list(dict.fromkeys(passes))):",
        "        traced = pass_(traced, reverse=True)",
        "    assert_round_trip(before, traced)",
    ]
    imports = "from torch.utils._pytree import tree_leaves\n\nfrom fxopt.testing import assert_round_trip, randomise\n"
    text = "\n".join(lines) + "\n"
    return text.replace(
        "from torch.nn.utils import parametrizations\n",
        f"from torch.nn.utils import parametrizations\n{imports}",
        1,
    )


def _smaller(program: Program, plan: oracles.Plan) -> Iterator[tuple[Program, oracles.Plan]]:
    for number in range(len(plan.passes)):
        if len(plan.passes) > 1:
            passes = plan.passes[:number] + plan.passes[number + 1 :]
            yield program, dataclasses.replace(plan, passes=passes)
    simpler = {"between": "nothing", "variant": "as it is", "gradients": False, "own_trace": False}
    for field, value in simpler.items():
        if getattr(plan, field) != value:
            yield program, dataclasses.replace(plan, **{field: value})
    yield from ((smaller, plan) for smaller in program.smaller())


def _fails(program: Program, plan: oracles.Plan, kind: str) -> bool:
    try:
        oracles.check(program, plan)
    except oracles.Fault as fault:
        return fault.kind == kind
    except oracles.Invalid:
        return False
    return False
