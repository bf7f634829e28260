"""torch's own databases of programs: each case is captured right, or refused with a `TraceError`."""

import importlib

import pytest
import torch
from torch import nn
from torch._export.db.examples import all_examples, get_rewrite_cases
from torch.utils import _pytree as pytree

import fxopt

pytestmark = pytest.mark.filterwarnings("ignore")  # of deprecated operators

EXAMPLES = [case for case in all_examples().values() for case in (case, *get_rewrite_cases(case))]
# A branch of torch.cond on a value, whose two sides compute different things.
REFUSED_EXAMPLES = {"cond_closed_over_variable"}

# What decides on the value of a tensor, or has no kernel for fake tensors.
REFUSED_OPERATORS = {
    *("allclose", "corrcoef", "cov", "equal", "item", "nn.functional.gaussian_nll_loss"),
    *("linalg.lstsq", "linalg.lstsq.grad_oriented"),
    # takes a module as an argument
    "nn.functional.triplet_margin_with_distance_loss",
}
BATCHES = 8


@pytest.fixture(scope="module")
def operators():
    """The entries of the operator database, random ones without a seed of their own."""
    database = importlib.import_module("torch.testing._internal.common_methods_invocations")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(database, "wrapper_set_seed", lambda op, *args, **kwargs: op(*args, **kwargs))
        yield database.op_db


class Call(nn.Module):
    """One call; the tensors among its arguments are the inputs."""

    def __init__(self, function, args, kwargs):
        super().__init__()
        leaves, self.structure = pytree.tree_flatten((args, kwargs))
        self.function = [function]  # not a method
        self.leaves = [torch.Tensor if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def forward(self, *tensors):
        given = iter(tensors)
        leaves = [next(given) if leaf is torch.Tensor else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return self.function[0](*args, **kwargs)


def outcome(module, args, kwargs):
    """Gives what a call returns and leaves in its inputs, from one seed."""
    torch.manual_seed(0)
    args = pytree.tree_map_only(torch.Tensor, torch.clone, args)
    return module(*args, **kwargs), [value for value in args if isinstance(value, torch.Tensor)]


def check_right_or_refused(name, model, args, kwargs, refused):
    """Captured without the comparison of `trace`, so that nothing but the graph makes it right."""
    expected = outcome(model, args, kwargs)
    try:
        traced = fxopt.trace(model, args, kwargs, verify=False)
    except fxopt.TraceError as error:
        if name not in refused:
            raise AssertionError(f"{name} was captured before") from error
        return
    found = outcome(traced, args, kwargs)
    if "empty" in name or "resize" in name:  # memory that nobody has written
        found, expected = pytree.tree_map_only(torch.Tensor, torch.zeros_like, (found, expected))
    torch.testing.assert_close(found, expected, equal_nan=True, msg=lambda message: f"{name}: {message}")


@pytest.mark.parametrize("case", EXAMPLES, ids=lambda case: case.name)
def test_export_examples(case):
    check_right_or_refused(case.name, case.model, case.example_args, case.example_kwargs, REFUSED_EXAMPLES)
    if case.name in REFUSED_EXAMPLES:
        traced = fxopt.trace(case.model, case.example_args, specialize=True)
        torch.testing.assert_close(traced(*case.example_args), case.model(*case.example_args))


@pytest.mark.long
@pytest.mark.sweep(day=8)
@pytest.mark.parametrize("batch", range(BATCHES))
def test_operators(operators, batch):
    for operator in operators[batch::BATCHES]:
        dtype = next((d for d in (torch.float64, torch.int64, torch.bool) if d in operator.dtypes), None)
        sample = dtype and next(iter(operator.sample_inputs("cpu", dtype)), None)
        if sample is None or operator.name.startswith("jiterator"):  # for other devices
            continue
        name = ".".join(filter(None, (operator.name, operator.variant_test_name)))
        args = (sample.input, *sample.args)
        model = Call(operator.op, args, sample.kwargs)
        tensors = [t for t in pytree.tree_leaves((args, sample.kwargs)) if isinstance(t, torch.Tensor)]
        check_right_or_refused(name, model, tuple(tensors), {}, REFUSED_OPERATORS)
