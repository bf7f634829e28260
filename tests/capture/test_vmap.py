"""What runs under `torch.vmap` is written as the operators to which it comes down."""

import copy
import os
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.export import Dim

import fxopt
from tests.capture.test_silent_changes import module
from tests.capture.test_trace import assert_same

X = torch.randn(3, 4)


def mask(self, x):
    """A mask over pairs of rows, as transformers builds them, with a tensor from outside the mapped function."""
    sums, rows = x.sum(1), torch.arange(x.shape[0])
    pair = torch.vmap(torch.vmap(lambda i, j: (j <= i) & (sums[i] > sums[j]), (None, 0)), (0, None))
    return pair(rows, rows)


def layers(self, x):
    return torch.vmap(lambda row: self.dense(row).softmax(0) * torch.tensor([1.0, 2.0, 3.0, 4.0]))(x)


def writes(self, x):
    y = x.clone()
    torch.vmap(lambda row: row.add_(1))(y)
    return y


def structures(self, x):
    return torch.vmap(lambda row: (row.sum(), {"double": row * 2}), out_dims=(0, 1))(x)


def columns(self, x):
    return torch.vmap(lambda column, n: column * n, in_dims=(1, None), out_dims=1)(x, x.shape[0])


@pytest.mark.parametrize("forward", [mask, layers, writes, structures, columns])
@pytest.mark.parametrize("sizes", [None, ({0: Dim.DYNAMIC},)])
def test_a_mapped_call(forward, sizes):
    model = module(forward, dense=nn.Linear(4, 4))
    gm = fxopt.trace(model, (X,), dynamic_shapes=sizes)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    for again in (gm, pickle.loads(pickle.dumps(copy.deepcopy(gm)))):
        for x in [X, torch.randn(3, 4), *([X[:1], X[:2], torch.randn(7, 4)] if sizes else [])]:
            assert_same(again(x), model(x))


def test_gradients_through_a_mapped_call():
    model = module(layers, dense=nn.Linear(4, 4))
    gm = fxopt.trace(model, (X,))
    (expected,) = torch.autograd.grad(model(X).sum(), model.dense.weight)
    (result,) = torch.autograd.grad(gm(X).sum(), model.dense.weight)
    assert torch.equal(result, expected)


def test_a_decision_under_vmap_is_still_an_error():
    with pytest.raises(fxopt.TraceError, match="vmap"):
        fxopt.trace(module(lambda self, x: torch.vmap(lambda r: r if r.sum() > 0 else -r)(x)), (X,))


def test_other_transforms_are_refused():
    with pytest.raises(fxopt.TraceError):
        fxopt.trace(module(lambda self, x: torch.func.grad(lambda y: (y * y).sum())(x)), (X,))


def test_a_write_under_vmap_is_kept_in_another_process(tmp_path):
    path = tmp_path / "traced.pickle"
    path.write_bytes(pickle.dumps(fxopt.trace(module_that_writes(), (X,))))
    code = (
        "import pickle, sys, torch; gm = pickle.load(open(sys.argv[1], 'rb'))\n"
        "gm.graph.eliminate_dead_code(); gm.recompile(); assert gm(torch.zeros(3, 4)).sum() == 12"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, env=os.environ)


class Writes(nn.Module):
    forward = writes


def module_that_writes():
    return Writes().eval()


def test_gradients_that_are_off_under_vmap_are_off_in_the_graph():
    def forward(self, x):
        still = torch.vmap(torch.no_grad()(lambda row: row * self.dense.weight[0]))(x)
        return still, torch.vmap(lambda row: row * self.dense.weight[0])(x), x * self.dense.weight[0]

    model = module(forward, dense=nn.Linear(4, 4))
    gm = fxopt.trace(model, (X,))
    assert [out.requires_grad for out in gm(X)] == [False, True, True]
    with torch.no_grad():
        assert [out.requires_grad for out in gm(X)] == [False, False, False]


class Tripled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


def test_a_backward_of_its_own_is_refused_under_vmap():
    with pytest.raises(fxopt.TraceError, match="Tripled is called under torch.vmap"):
        fxopt.trace(module(lambda self, x: torch.vmap(Tripled.apply)(x)), (X,))
