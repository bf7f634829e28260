"""Code under `torch.vmap`, and under other transforms of torch.func, is written as the operators to which it comes down."""

import copy
import os
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.export import Dim

import fxopt
from tests.capture.test_trace import assert_same
from tests.modules import module

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


def gradient(self, x):
    return torch.func.grad_and_value(lambda y: (self.dense(y) ** 3).sum())(x)


def gradient_of_a_weight(self, x):
    return torch.func.grad(lambda weight: ((x @ weight) ** 3).sum())(self.dense.weight)


def pulled_back(self, x):
    out, pull, extra = torch.func.vjp(lambda y: (self.dense(y).sin(), y + 1), x, has_aux=True)
    with torch.no_grad():
        return out, pull(x), pull(out), extra


def rows(self, x):
    return torch.func.jacrev(lambda y: self.dense(y).sin().sum(0))(x)


def of_each_row(self, x):
    return torch.vmap(torch.func.grad(lambda row: (self.dense(row) ** 3).sum()))(x)


def pushed_forward(self, x):
    return torch.func.jvp(lambda y: self.dense(y).sin(), (x,), (x * 2,))


def columns_and_twice(self, x):
    cubes = lambda y: (self.dense(y) ** 3).sum()  # noqa: E731
    return torch.func.jacfwd(lambda y: self.dense(y).sin().sum(0))(x), torch.func.hessian(cubes)(x)


@pytest.mark.parametrize(
    ("forward", "sizes"),
    [
        *((f, ({0: Dim.DYNAMIC},)) for f in (gradient, gradient_of_a_weight, pulled_back, rows, of_each_row)),
        *((f, ({0: Dim.AUTO},)) for f in (pushed_forward, columns_and_twice)),  # torch fixes the sizes
    ],
)
def test_derivatives_in_a_forward_and_gradients_through_them(forward, sizes):
    model = module(forward, dense=nn.Linear(4, 4)).double()
    gm = fxopt.trace(model, (X.double(),), dynamic_shapes=sizes)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    for again in (gm, pickle.loads(pickle.dumps(copy.deepcopy(gm)))):
        for x in [
            torch.randn(3, 4).double(),
            *([torch.randn(5, 4).double()] if "DYN" in repr(sizes) else []),
        ]:
            with torch.no_grad():
                assert_same(again(x), model(x))
            results = again(x), model(x)
            assert_same(*results)
            assert_same(*(gradient_of(result, m) for result, m in zip(results, (again, model), strict=True)))


def gradient_of(result, model):
    tensors = torch.utils._pytree.tree_leaves(result)
    return torch.autograd.grad(sum((t**2).sum() for t in tensors if t.requires_grad), model.dense.weight)


def dual(self, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(forward_ad.make_dual(x, x).sin()).tangent


def linearized(self, x):
    return torch.func.linearize(torch.sin, x)[1](x)


@pytest.mark.parametrize("forward", [dual, linearized])
def test_forward_mode_is_refused_with_its_line(forward):
    with pytest.raises(fxopt.TraceError, match=r"forward-mode AD .*test_vmap\.py:\d+"):
        fxopt.trace(module(forward), (X,))


def test_functionalize_is_refused_with_its_line():
    with pytest.raises(fxopt.TraceError, match=r"a transform of torch\.func.*test_vmap\.py:\d+"):
        fxopt.trace(module(lambda self, x: torch.func.functionalize(torch.sin)(x)), (X,))


@pytest.mark.parametrize(
    "transform",
    [
        torch.vmap,
        lambda f: torch.func.grad(lambda x: f(x).sum()),
        lambda f: lambda x: torch.func.jvp(f, (x,), (x,)),
    ],
)
def test_a_capture_inside_a_transform_is_refused_and_one_outside_is_transformed(transform):
    model = module(lambda self, x: x.sin() * 2)
    with pytest.raises(fxopt.TraceError, match="a capture inside a transform of torch.func"):
        transform(lambda x: fxopt.trace(model, (x,))(x))(X)
    gm = fxopt.trace(model, (X,), dynamic_shapes=({0: Dim.AUTO},))
    if transform is not torch.vmap:
        assert_same(transform(gm)(X), transform(model)(X))


@pytest.mark.long
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
    with pytest.raises(fxopt.TraceError, match="Tripled is called under a transform"):
        fxopt.trace(module(lambda self, x: torch.vmap(Tripled.apply)(x)), (X,))
