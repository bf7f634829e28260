"""Buffers that a forward replaces, as a running mean or a queue: the graph writes what the model puts in their place, or it is refused."""

import copy

import pytest
import torch
from torch import nn
from torch.export import Dim

import fxopt
from tests.capture.test_trace import assert_same
from tests.modules import module

X = torch.randn(3, 4)


def averaged(self, x):
    self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
    self.calls = self.calls + 1
    return x - self.mean / self.calls


def read_before(self, x):
    y = self.dense(x) * self.mean
    self.mean = self.mean.lerp(y.detach().mean(0), 0.1)
    return y


def queued(self, x):
    self.queue = torch.cat([self.queue, x])[-6:]
    return x @ self.queue.T


def returned_old(self, x):
    old = self.mean
    self.mean = old + x.mean(0)
    return old, old[1:], x


def written_before(self, x):
    part = self.mean[:2]
    self.mean = self.mean * 0.5
    part += 1
    self.mean += x.mean(0)
    return x + self.mean, part


def rotated(self, x):
    self.mean, self.other = self.other, self.mean + x.mean(0)
    return x + self.mean


def made_anew(self, x):
    self.mean = torch.zeros(4)
    self.mean[0] = 3
    return x + self.mean


def in_a_layer(self, x):
    y = self.norm(x)
    self.norm.running_mean = self.norm.running_mean * 0.5
    return y + self.norm(x * 2)


@torch.inference_mode()
def without_gradients(self, x):
    self.mean = self.mean + self.dense(x).mean(0)
    return x * self.mean


def model_of(forward):
    model = module(forward, dense=nn.Linear(4, 4), norm=nn.BatchNorm1d(4))
    model.register_buffer("mean", torch.zeros(4))
    model.register_buffer("other", torch.ones(4), persistent=False)
    model.register_buffer("calls", torch.zeros(()))
    model.register_buffer("queue", torch.zeros(6, 4))
    return model


RIGHT = [averaged, read_before, queued, returned_old, written_before, rotated, made_anew, in_a_layer]


@pytest.mark.parametrize("forward", [*RIGHT, without_gradients])
@pytest.mark.parametrize("training", [True, False])
def test_a_buffer_that_is_replaced_is_written(forward, training):
    model = model_of(forward).train(training)
    names = dict(model.named_buffers())
    free = ({0: Dim("batch", min=2)},)
    traced = fxopt.trace(copy.deepcopy(model), (X,), dynamic_shapes=free, verify=False)
    for size in (3, 3, 5, 2):
        x = torch.randn(size, 4)
        made, expected = traced(x), model(x)
        assert_same(made, expected)
        found = dict(traced.named_buffers())
        assert_same({name: found[name].clone() for name in names}, dict(model.named_buffers()))
        if isinstance(made, torch.Tensor) and made.requires_grad:
            made.sum().backward()  # a write into what it needs would be an error


def returned(self, x):
    self.mean = self.mean + x.mean(0)
    return self.mean[1:]


def an_input(self, x):
    y = x - self.square
    self.square = x
    return y


def with_a_history(self, x):
    self.mean = self.mean + self.dense(x).mean(0)
    return x * self.mean


def of_another_dtype(self, x):
    self.mean = self.mean.double() + x.mean(0)
    return x * self.mean


def of_another_layout(self, x):
    y = x @ self.wide
    self.wide = (self.wide + 1).t()
    return y


def one_for_two(self, x):
    self.mean = self.other = self.mean + x.mean(0)
    return x * self.mean


def a_tensor_that_is_written(self, x):
    self.plain += x.mean(0)
    y = x + self.mean
    self.mean = self.plain
    return y


def with_gradients(self, x):
    with torch.no_grad():
        self.learned = self.learned * 0.5
    return x


def not_there_yet(self, x):
    if self.missing is None:
        self.missing = torch.zeros(4)
    return x + self.missing


def known_by_an_attribute(self, x):
    self.mean = self.mean + x.mean(0)
    return x * self.mean + self.first[0]


def returned_by_an_attribute(self, x):
    self.mean = self.mean + x.mean(0)
    return x * self.mean, self.first[0]


def known_by_a_view(self, x):
    self.mean = self.mean + x.mean(0)
    return x * self.mean + self.views[0]


def known_by_two_names(self, x):
    self.mean = self.mean + x.mean(0)
    return x * self.mean + self.again


def never_read(self, x):
    self.mean = x.mean(0)
    return x


def known_by_a_leaf(self, x):
    self.mean = self.mean + x.mean(0)
    return self.leaf(x * self.mean)


class Leaf(nn.Module):
    def forward(self, x):
        return x + self.held[0]


REFUSED = [returned, an_input, with_a_history, of_another_dtype, of_another_layout, one_for_two]
REFUSED += [a_tensor_that_is_written, with_gradients, not_there_yet]
KNOWN = [known_by_an_attribute, returned_by_an_attribute, known_by_a_view, known_by_two_names, never_read]


@pytest.mark.parametrize("forward", [*REFUSED, *KNOWN])
def test_a_write_that_somebody_else_would_see_is_refused(forward):
    model = model_of(forward)
    model.register_buffer("square", torch.zeros(3, 4))
    model.register_buffer("wide", torch.rand(4, 4))
    model.register_buffer("learned", torch.zeros(4, requires_grad=True))
    model.register_buffer("missing", None)
    model.plain = torch.zeros(4)
    if forward in (known_by_two_names, never_read):
        model.register_buffer("again", model.mean)
    if forward in KNOWN:
        model.first, model.views = [model.mean], [model.mean.view(2, 2).view(4)]
    with pytest.raises(fxopt.TraceError, match=r"assigns to '(mean|square|wide|learned|missing)'"):
        fxopt.trace(model, (X,), verify=False)


def test_a_buffer_that_a_leaf_holds_is_not_written():
    model = model_of(known_by_a_leaf)
    model.leaf = Leaf()
    model.leaf.held = [model.mean]
    with pytest.raises(fxopt.TraceError, match="assigns to 'mean'"):
        fxopt.trace(model, (X,), leaf_modules="leaf", verify=False)


def test_a_table_that_no_state_dict_has_is_made_and_not_written():
    def forward(self, x):
        self.other = torch.arange(4.0)
        return x + self.other

    traced = fxopt.trace(model_of(forward), (X,))
    assert [node.name for node in traced.graph.nodes if "copy" in node.name or "clone" in node.name] == []


def test_what_is_written_is_no_read_of_the_inputs():
    traced = fxopt.trace(model_of(averaged), (X,), verify=False)
    x = X.t().contiguous().t().requires_grad_()  # of other strides
    assert_same(traced(x), model_of(averaged)(x))
    with pytest.raises(
        fxopt.GuardError, match="dtype|float"
    ):  # in eager the buffer has another dtype from then on
        traced(x.double())
