"""Where the lower precision ends: what is cast, and what is refused because a cast would change it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxopt
from fxopt import ChangePrecision
from fxopt.passes.change_precision import saturate
from fxopt.testing import assert_round_trip, compare
from tests.before_after import fxopt_trace, refused
from tests.modules import module
from tests.passes.precision import HALF, Use, X, changed, layers


def written_target(m, x):
    out = torch.zeros(2, 4)
    out[0] = m.linear(x)[0]
    view = out[1]
    out[1] = m.linear(x)[1]
    return m.linear(out), view


def masked(m, x):
    scores = m.linear(x)
    mask = torch.full((2, 4), torch.finfo(torch.float32).min).triu(1)
    return (scores + mask).softmax(-1), scores.masked_fill(x > 0, torch.finfo(torch.float32).min).softmax(-1)


USES = {
    "parameter": lambda m, x: m.linear(x) * m.scale,
    "buffer": lambda m, x: m.linear(x) + m.shift,
    "functional weights": lambda m, x: F.linear(x, m.linear.weight[:2]) + 0 * m.linear(x)[:, :2],
    "residual of the input": lambda m, x: x + m.linear(x),
    "explicit float32": lambda m, x: m.scale * m.linear(x).to(torch.float32).pow(2).mean(-1, keepdim=True),
    "softmax in float32": lambda m, x: F.softmax(m.linear(x), -1, dtype=torch.float32) @ m.scale,
    "tuple": lambda m, x: m.linear(x).chunk(2, -1),
    "dict": lambda m, x: {"a": m.linear(x), "b": [x, m.linear(x).argmax(-1) * 0]},
    "factory": lambda m, x: m.linear(x) * torch.arange(4.0),
    "linalg": lambda m, x: torch.linalg.inv(m.linear.weight + 9 * torch.eye(4)) + 0 * m.linear(x)[0],
    "fft": lambda m, x: torch.fft.rfft(m.linear(x)).abs(),
    "integer": lambda m, x: (m.linear(x), x.argmax(-1)),
    "float64": lambda m, x: m.linear(x).double() * 2,
    "written target": written_target,
    "written value": lambda m, x: m.linear(x).add_(m.shift).mul_(2),
    "mask": masked,
}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", USES)
def test_dtypes_meet(name, dtype):
    changed(Use(USES[name]), X, dtype=dtype)


def test_metadata_tells_the_new_dtypes():
    traced = fxopt_trace(Use(USES["residual of the input"]), [X])
    after = ChangePrecision()(traced)
    values = {node.name: node.meta["val"] for node in after.graph.nodes}
    dtypes = {name: value.dtype for name, value in values.items() if value is not None}
    assert dtypes["linear"] == dtypes["add"] == dtypes["saturate"] == torch.bfloat16
    assert dtypes["x"] == torch.float32
    restored = ChangePrecision()(after, reverse=True)
    assert {n.meta["val"].dtype for n in restored.graph.nodes if n.name in ("linear", "add")} == {
        torch.float32
    }


def test_no_metadata_is_refused():
    refused(ChangePrecision(), layers(), X, reason="its dtype is unknown")


def test_graphs_that_choose_dtypes_are_refused():
    def autocast(m, x):
        with torch.autocast("cpu", torch.bfloat16):
            return m.linear(x)

    refused(ChangePrecision(), Use(autocast), X, reason="autocast", trace=fxopt_trace)
    mixed = Use(lambda m, x: m.linear(x).half())
    refused(ChangePrecision(), mixed, X, reason="already works in float16 or bfloat16", trace=fxopt_trace)


def test_a_written_parameter_is_refused():
    def write(m, x):
        with torch.no_grad():
            m.scale.mul_(2)
        return m.linear(x) * m.scale

    refused(ChangePrecision(), Use(write), X, reason="may write into the parameter scale", trace=fxopt_trace)


def batch_statistics(m, x):
    return F.batch_norm(m.linear(x), m.mean, m.var, training=True)


def test_functional_batch_norm_updates_its_statistics():
    model = Use(batch_statistics)
    model.register_buffer("mean", torch.zeros(4))
    model.register_buffer("var", torch.ones(4))
    x = torch.randn(8, 4)
    before = fxopt_trace(copy.deepcopy(model), [x])
    after = ChangePrecision()(fxopt_trace(model, [x]))
    before(x), after(x)
    assert after.get_buffer("mean").abs().max() > 0
    assert compare(before.get_buffer("mean"), after.get_buffer("mean")).max_rel < 0.05
    assert compare(before.get_buffer("var"), after.get_buffer("var")).max_rel < 0.05


def several_buffers(m, x):
    torch._foreach_add_([m.shift, m.mean], [m.linear(x)[0].detach(), m.linear(x)[1].detach()])
    return m.linear(x) + m.shift


def test_a_function_that_writes_into_several_buffers():
    model = Use(several_buffers).requires_grad_(False)
    model.register_buffer("mean", torch.zeros(4))
    before, after = (fxopt_trace(copy.deepcopy(model), [X]) for _ in range(2))
    ChangePrecision()(after)
    before(X), after(X)
    assert compare(before.get_buffer("mean"), after.get_buffer("mean")).max_rel < 0.05


def write_seen_by_a_view(m, x):
    h = m.linear(x)
    view = h.view(-1)
    m.relu(h)
    return view


def test_a_write_into_a_cast_copy_is_refused():
    model = Use(write_seen_by_a_view, relu=nn.ReLU(inplace=True))
    reason = "it may write into linear, which would have to be cast"
    refused(ChangePrecision(keep_float32=(nn.ReLU,)), model, X, reason=reason, trace=fxopt_trace)


class WritesInput(nn.Module):
    def forward(self, x):
        x.add_(100)
        return x * 2


def test_a_foreign_module_that_may_write_its_input_is_refused():
    def use(m, x):
        h = m.linear(x)
        return m.leaf(h) + h

    def trace(model, inputs):
        return fxopt.trace(model, tuple(inputs), leaf_modules=(WritesInput,))

    refused(ChangePrecision(), Use(use, leaf=WritesInput()), X, reason="may write into linear", trace=trace)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_flow_outside_of_a_block_without(mode):
    def use(m, x):
        with mode():
            a = m.linear(x)
        return a.clone() + m.other(x)

    model = Use(use, other=nn.Linear(4, 4))
    after = ChangePrecision()(fxopt_trace(model, [X]))
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    model(x).sum().backward()
    after(y).sum().backward()
    assert compare(x.grad, y.grad).max_rel < 0.05


def test_one_cast_for_several_users():
    model = Use(lambda m, x: m.linear(x) + m.other(x), other=nn.Linear(4, 4))
    after = ChangePrecision()(fxopt_trace(model, [X]))
    assert len(after.graph.find_nodes(op="call_function", target=saturate)) == 1


class Foreign(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))

    def forward(self, x):
        assert x.dtype == torch.float32
        return x * self.weight


def test_foreign_modules_get_float32():
    model = Use(lambda m, x: m.foreign(m.linear(x)), foreign=Foreign())
    traced = fxopt.trace(model, (X,), leaf_modules=(Foreign,))
    before = copy.deepcopy(traced)
    explanation = ChangePrecision().explain(traced)
    assert "Foreign is not a layer of torch.nn" in explanation.refusals[0][2]
    after = ChangePrecision()(traced)
    assert 0 < compare(before(X), after(X)).max_rel < 0.05
    assert_round_trip(before, ChangePrecision()(after, reverse=True))


def test_complex_numbers_are_made_of_float32():
    class Phase(nn.Module):
        def __init__(self):
            super().__init__()
            self.real, self.imaginary = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x):
            number = torch.complex(self.real(x), self.imaginary(x))
            return (number * number).abs()

    model, x = Phase().eval(), torch.randn(3, 8)
    changed = ChangePrecision(torch.bfloat16)(fxopt_trace(model, [x]))
    torch.testing.assert_close(changed(x), model(x), rtol=0.1, atol=0.1)
    (number,) = changed.graph.find_nodes(op="call_function", target=torch.complex)
    assert [value.meta["val"].dtype for value in number.all_input_nodes] == [torch.float32] * 2


def test_several_tensors_that_are_returned_in_one_value_are_made_in_float32():
    model, x = module(lambda m, x: m.layer(x).topk(2), layer=nn.Linear(8, 4)), torch.randn(3, 8)
    changed = ChangePrecision(torch.bfloat16)(fxopt_trace(model, [x]))
    assert changed(x).values.dtype == torch.float32
    torch.testing.assert_close(changed(x).values, model(x).values, rtol=0.1, atol=0.1)
    assert changed.layer.weight.dtype == torch.bfloat16


def test_a_pooling_without_a_kernel_is_computed_in_float32():
    model, x = nn.Sequential(nn.Conv3d(1, 2, 1), nn.AvgPool3d(2)), torch.randn(1, 1, 2, 2, 2)
    changed = ChangePrecision(torch.bfloat16)(fxopt_trace(model, [x]))
    torch.testing.assert_close(changed(x), model(x), rtol=0.1, atol=0.1)


def test_several_tensors_in_one_value_are_not_cast():
    graph_module = fxopt_trace(nn.Sequential(nn.LSTM(8, 4)), [torch.randn(3, 8)])
    (lstm,) = graph_module.graph.find_nodes(op="call_module", target="0")
    graph_module.graph.output_node().args = (lstm,)
    explanation = ChangePrecision(torch.bfloat16).explain(graph_module)
    assert "would have to be cast, holds several tensors" in str(explanation)
