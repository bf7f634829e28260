"""Usable: copies of the graph, and what pickle, saving, moving, compiling and exporting make of it, give what the graph gives."""

from __future__ import annotations

import contextlib
import copy
import pickle
import tempfile
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import fxopt
from fxopt.compare import epsilon, unchanged
from fxopt.constants import Constant
from fxopt.errors import GuardError, SaveError, error_text
from fxopt.testing import compare, leaves

from ..judging.rewritten import tensors
from ..judging.subject import Subject
from ..records import NOTHING, Finding, Outcome, one_line

ROUNDING = 64
"""The largest accepted difference of other kernels' sums after tens of layers, in rounding units of the largest value.

The unit is the epsilon of the narrowest dtype that a module computes in.
"""

Inputs = Mapping[str, Tensor]
Way = Callable[[nn.Module, Inputs], nn.Module]
"""Makes an equivalent module from a module and inputs. May raise anything; `AssertionError` for wrong results."""


@torch.no_grad()
def check(subject: Subject, pipeline: tuple[str, ...]) -> Finding:
    """Copy, pickle, save, move and reload the graph; without passes and for full pipelines, compile and export it too.

    Outputs must be equal bit for bit, except after `torch.compile` and `torch.export`: there, packed layers run the public
    operators, whose sums round in another order.

    If the original (the model or the captured graph) fails in the same way, the failure is only reported as a fact.
    """
    dtype = subject.dtype_of(pipeline)
    if pipeline and not subject.rewritten(pipeline, dtype).sites:
        return NOTHING
    traced = subject.traced(dtype)
    module = subject.rewritten(pipeline, dtype).module if pipeline else traced
    origin = traced if pipeline else subject.model(dtype)
    expected, problems, used = subject.run(module, dtype), list[str](), 0
    with subject.entering("usable"):
        for name, way in _ways(subject, pipeline).items():
            try:
                actual = subject.run(way(module, subject.inputs(dtype)), dtype)
                # A compiled or exported graph may return other containers.
                if name in TORCH:
                    unit = max(torch.finfo(dtype).eps, epsilon([*tensors(module).values()]))
                    _compare(dict(leaves(expected)), dict(leaves(actual)), ROUNDING * unit)
                else:
                    _compare(expected, actual)
            except MemoryError:
                raise
            except Exception as error:  # copying and compiling run the code of all objects in a module
                excused = not pipeline and isinstance(error, SaveError)  # a model is never saved
                if excused or _fails(way, origin, subject.inputs(dtype)):
                    subject.facts[f"no_{name}"] = _text(error)
                else:
                    problems.append(f"{name}: {_text(error)}")
            else:
                used += 1
        try:
            _compare(expected, subject.run(module, dtype))
            if not pipeline:  # the graph and the model can exchange weights
                traced.load_state_dict(origin.state_dict(), strict=True)
                origin.load_state_dict(traced.state_dict(), strict=True)
        except Exception as error:  # for example, a layer whose weights are on another device
            problems.append(f"what is done with a copy changes the graph itself: {_text(error)}")
    return Finding(Outcome.FAIL if problems else Outcome.PASS, "; ".join(problems), {"ways_used": used})


def _ways(subject: Subject, pipeline: tuple[str, ...]) -> dict[str, Way]:
    ways: dict[str, Way] = {
        "deepcopy": lambda module, inputs: copy.deepcopy(module),
        "pickle": lambda module, inputs: pickle.loads(pickle.dumps(module)),
        "save": _saved,
        "state_dict": _reloaded,
        "to": _moved,
    }
    # A full pipeline covers single passes. A sweep has hundreds of models, and a separate case for torch.export.
    whole = not pipeline or len(subject.members(pipeline)) > 1
    return ways | TORCH if whole and subject.entry.given and len(pipeline) <= 1 else ways


def _saved(module: nn.Module, inputs: Inputs) -> nn.Module:
    with tempfile.TemporaryDirectory() as folder:
        fxopt.save(module, folder)
        loaded: nn.Module = fxopt.load(folder)
    return loaded


def _reloaded(module: nn.Module, inputs: Inputs) -> nn.Module:
    """A copy whose `state_dict` was set to zero and loaded again."""
    state = {name: value.detach().clone() for name, value in module.state_dict().items()}
    copied = copy.deepcopy(module)
    for value in copied.state_dict().values():
        value.zero_()
    # A run with zero weights may raise anything; values that it caches must not survive the reload.
    with contextlib.suppress(Exception):
        copied(**{name: value.clone() for name, value in inputs.items()})
    copied.load_state_dict(state)
    return copied


def _moved(module: nn.Module, inputs: Inputs) -> nn.Module:
    """Return the module itself, after moving copies of it with all their tensors to another dtype and device."""
    with contextlib.suppress(GuardError):  # the graph refuses another dtype
        wide = copy.deepcopy(module).to(torch.float64)
        fixed = {f"{n}.value" for n, m in wide.named_modules() if isinstance(m, Constant) and not m.follows}
        for name, tensor in tensors(wide).items():
            if tensor.is_floating_point() and tensor.dtype != torch.float64 and name not in fixed:
                raise AssertionError(f"after .to(torch.float64), {name} is {tensor.dtype}")
    for name, tensor in tensors(copy.deepcopy(module).to("meta")).items():
        if tensor.device.type != "meta":
            raise AssertionError(f"after .to('meta'), {name} is not on that device")
    return module


def _compiled(module: nn.Module, inputs: Inputs) -> nn.Module:
    torch.compiler.reset()
    compiled: nn.Module = torch.compile(copy.deepcopy(module), backend="eager")  # type: ignore[assignment]
    return compiled


def _exported(module: nn.Module, inputs: Inputs) -> nn.Module:
    if isinstance(
        module, GraphModule
    ):  # torch.export requires the keywords of a graph module in the order of its inputs
        names = [str(node.target) for node in module.graph.find_nodes(op="placeholder")]
        inputs = {name: inputs[name] for name in names if name in inputs}
    return torch.export.export(module, (), dict(inputs), strict=False).module()


TORCH: dict[str, Way] = {"compile": _compiled, "export": _exported}


def _fails(way: Way, origin: nn.Module, inputs: Inputs) -> bool:
    try:
        way(origin, inputs)(**inputs)
    except Exception:  # as above
        return True
    return False


def _compare(expected: object, actual: object, limit: float = 0.0) -> None:
    difference = compare(expected, actual)
    near = difference.max_rel <= limit if limit else unchanged(expected, actual)
    if not near:
        raise AssertionError(f"{difference.where} is {difference.max_rel:.3g} of its largest value off")


def _text(error: Exception) -> str:
    return one_line(error if isinstance(error, AssertionError) else error_text(error))[:300]
