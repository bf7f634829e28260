"""All that a forward asks of its inputs and of torch, besides values, is checked on entry."""

import contextlib
import pickle

import pytest
import torch
from torch import nn
from torch.export import Dim

import fxopt
from tests.modules import module

X = torch.randn(3, 4)


def test_guards_with_functions_of_python():
    def forward(self, x):
        return x * 2 if abs(x.shape[0] - 5) > 2 else x * 3

    gm = fxopt.trace(module(forward), (torch.randn(9, 4),), dynamic_shapes=({0: Dim.DYNAMIC},))
    assert torch.equal(gm(torch.ones(8, 4)), torch.full((8, 4), 2.0))
    with pytest.raises(fxopt.GuardError, match="dimension 0 is 6"):
        gm(torch.ones(6, 4))


def test_strides_that_the_forward_reads_are_those_of_the_example():
    model = module(lambda self, x: x * x.stride(1) + x.storage_offset())
    gm = fxopt.trace(model, (torch.randn(3, 8)[:, ::2],))
    other = torch.randn(3, 8)[:, ::2]
    assert torch.equal(gm(other), model(other))
    for other in (torch.randn(3, 12)[:, ::3], torch.randn(3, 8)[:, 1::2]):
        with pytest.raises(fxopt.GuardError, match="reads strides"):
            gm(other)


@pytest.mark.parametrize("forward", [lambda self, x: x.t().contiguous(), lambda self, x: x.reshape(-1)])
def test_a_part_of_a_tensor_is_an_input_of_free_sizes(forward):
    model, shapes = module(forward), ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    gm = fxopt.trace(model, (torch.randn(3, 8)[:, :5],), dynamic_shapes=shapes)
    for other in (torch.randn(4, 8)[:, :6], torch.randn(2, 3), torch.randn(8, 6)[::2, ::3]):
        assert torch.equal(gm(other), model(other))


def test_the_stride_of_a_size_of_one_that_the_forward_reads_is_that_of_the_example():
    model, shapes = module(lambda self, x: x * x.stride(0)), ({0: Dim.AUTO, 1: Dim.AUTO},)
    for given in (torch.randn(1, 1), torch.randn(3, 1).t(), torch.randn(1, 8)[:, :3]):
        gm = fxopt.trace(model, (given,), dynamic_shapes=shapes)
        assert torch.equal(gm(given), model(given))
        for other in (torch.randn(2, 1).t(), torch.randn(1, 2), torch.randn(1, 8)[:, :1]):
            with contextlib.suppress(fxopt.GuardError):
                assert torch.equal(gm(other), model(other))


def test_a_global_mode_that_the_forward_reads_is_guarded():
    gm = fxopt.trace(module(lambda self, x: x * 2 if torch.is_grad_enabled() else x), (X,))
    assert torch.equal(gm(X), X * 2)
    with torch.no_grad(), pytest.raises(fxopt.GuardError, match="captured with grad on"):
        gm(X)
    gm = fxopt.trace(
        module(lambda self, x: x * 2 if torch.is_autocast_enabled(device_type="cpu") else x), (X,)
    )
    with torch.autocast("cpu"), pytest.raises(fxopt.GuardError, match="captured with autocast off"):
        gm(X)


def test_inference_mode_that_the_forward_reads_is_guarded():
    gm = fxopt.trace(module(lambda self, x: x * 2 if torch.is_inference_mode_enabled() else x), (X,))
    assert torch.equal(gm(X), X)
    with torch.inference_mode(), pytest.raises(fxopt.GuardError, match="captured with inference_mode off"):
        gm(X)


@pytest.mark.parametrize("text", [str, "{}".format, lambda size: f"{size}"])
def test_a_size_as_text_is_guarded(text):
    model = module(lambda self, x: x * {"3": 3}.get(text(x.shape[0]), 7))
    gm = fxopt.trace(model, (X,), dynamic_shapes=({0: Dim.AUTO},))
    assert torch.equal(gm(X), X * 3)
    with pytest.raises(fxopt.GuardError, match="dimension 0 is 2"):
        gm(X[:2])


def test_whether_a_tensor_takes_gradients_is_guarded_where_the_forward_reads_it():
    gm = fxopt.trace(module(lambda self, x: x * 2 if (x + 1).requires_grad else x * 3), (X,))
    assert torch.equal(gm(X), X * 3)
    with pytest.raises(fxopt.GuardError, match="'x' has requires_grad=True"):
        gm(X.clone().requires_grad_())
    with torch.no_grad(), pytest.raises(fxopt.GuardError, match="captured with grad on"):
        gm(X)


def of_a_parameter(self, x):
    return x * 2 if self.dense.weight.requires_grad else x * 3


def of_a_result(self, x):
    return x * 2 if self.dense(x).requires_grad else x * 3


def graph_of_a_result(self, x):
    return x * 3 if self.dense(x).grad_fn is None else x * 2


def leaf(self, x):
    return x * 3 if self.dense(x).is_leaf else x * 2


@pytest.mark.parametrize("forward", [of_a_parameter, of_a_result, graph_of_a_result, leaf])
def test_whether_a_parameter_takes_gradients_is_checked_where_the_forward_reads_it(forward):
    model = module(forward, dense=nn.Linear(4, 4))
    gm = fxopt.trace(model, (X,))
    assert torch.equal(gm(X), X * 2)
    copied = pickle.loads(pickle.dumps(gm))
    for frozen in (gm.requires_grad_(False), copied.requires_grad_(False)):
        with pytest.raises(fxopt.GuardError, match=r"'dense.weight' .* has requires_grad=False; it was True"):
            frozen(X)
    gm.requires_grad_(True)
    assert torch.equal(gm(X), X * 2)
    model.requires_grad_(False)
    assert torch.equal(fxopt.trace(model, (X,))(X), X * 3)


def test_a_merged_parameter_is_checked_like_those_that_it_came_from():
    def forward(self, x):
        return self.a(x) * self.b(x) * (2 if self.a.weight.requires_grad else 3)

    gm = fxopt.trace(module(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), (X,))
    expected = gm(X)
    merged = fxopt.MergeLinears()(gm)
    torch.testing.assert_close(merged(X), expected)
    with pytest.raises(fxopt.GuardError, match="has requires_grad=False"):
        merged.requires_grad_(False)(X)


def test_a_frozen_parameter_is_no_error_where_nobody_asks():
    gm = fxopt.trace(nn.Sequential(nn.Linear(4, 4)), (X,))
    expected = gm(X)
    assert torch.equal(gm.requires_grad_(False)(X), expected)


def test_an_integer_dtype_that_the_forward_reads_is_guarded():
    gm = fxopt.trace(
        module(lambda self, x: torch.arange(3, dtype=x.dtype) + x), (torch.ones(3, dtype=torch.long),)
    )
    with pytest.raises(fxopt.GuardError, match="is torch.int32"):
        gm(torch.ones(3, dtype=torch.int32))


def test_a_size_that_python_makes_a_number_is_guarded():
    gm = fxopt.trace(
        module(lambda self, x: x[: int(0.7 * x.shape[0])]),
        (torch.ones(6, 4),),
        dynamic_shapes=({0: Dim.AUTO},),
    )
    assert gm(torch.ones(7, 4)).shape == (4, 4)
    with pytest.raises(fxopt.GuardError, match="dimension 0 is 9"):
        gm(torch.ones(9, 4))


def test_a_guard_that_is_no_limit_is_not_called_one():
    gm = fxopt.trace(
        module(lambda self, x: x * 2 if x.shape[0] % 2 == 0 else x),
        (torch.ones(4, 4),),
        dynamic_shapes=({0: Dim.AUTO},),
    )
    with pytest.raises(
        fxopt.GuardError, match=r"dimension 0 is 5; it must satisfy \(x\.shape\[0\] % 2\) == 0"
    ):
        gm(torch.ones(5, 4))
