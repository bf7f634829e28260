"""`fxopt.trace` records calls, shown on modules small enough to read."""

import operator

import pytest
import torch
from torch import nn
from torch.export import Dim

import fxopt
from fxopt.capture.runs.forward_run import ForwardRun
from tests.capture.models import (
    Aliases,
    Augmented,
    Buffers,
    Constants,
    Containers,
    Inplace,
    InputContainers,
    Keywords,
    Operators,
    OutArgument,
    Outputs,
    Point,
    Positional,
    PositionalOnly,
    PropertyReads,
    Recurrent,
    Setitem,
    SharedLayer,
    SizeArithmetic,
    SplitOutputs,
    TensorAttribute,
    ViewWrites,
)
from tests.modules import module


def targets(gm):
    return [node.target for node in gm.graph.nodes if node.op not in ("placeholder", "output")]


def assert_same(actual, expected):
    """Every tensor equal bit for bit, and the same containers around them; fails when there is none."""
    assert _compare(actual, expected) > 0


def _compare(actual, expected):
    assert type(actual) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
        return 1
    if isinstance(expected, dict):
        assert list(actual) == list(expected)
        return sum(_compare(actual[key], expected[key]) for key in expected)
    if isinstance(expected, (tuple, list)):
        assert len(actual) == len(expected)
        return sum(map(_compare, actual, expected))
    if isinstance(expected, Point):
        return _compare(actual.x, expected.x) + _compare(actual.y, expected.y)
    assert actual == expected
    return 0


def assert_captured(model, *args, **kwargs):
    """The captured module gives what the model gives: at the first call, and at the second."""
    model.eval()
    gm = fxopt.trace(model, args, kwargs)
    for seed in (1, 2):
        torch.manual_seed(seed)
        new_args, new_kwargs = torch.utils._pytree.tree_map_only(
            torch.Tensor,
            lambda t: torch.randn_like(t) if t.is_floating_point() else t.clone(),
            (args, kwargs),
        )
        clone = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, (new_args, new_kwargs))
        assert_same(gm(*clone[0], **clone[1]), model(*new_args, **new_kwargs))
    return gm


X = torch.randn(3, 4)

CASES = {
    "operators": (Operators(), (X,), {}),
    "augmented assignment": (Augmented(), (X,), {}),
    "in-place methods": (Inplace(), (X,), {}),
    "writes through views": (ViewWrites(), (X,), {}),
    "item assignment": (Setitem(), (X,), {}),
    "out argument": (OutArgument(), (X,), {}),
    "several outputs of one call": (SplitOutputs(), (X,), {}),
    "LSTM": (Recurrent(), (torch.randn(2, 3, 4),), {}),
    "constants": (Constants(), (X,), {}),
    "buffers and attributes": (Buffers(), (X,), {}),
    "tensor attribute": (TensorAttribute(), (X,), {}),
    "no-op calls that return their input": (Aliases(), (X,), {}),
    "size arithmetic": (SizeArithmetic(), (X,), {}),
    "layer called twice": (SharedLayer(), (X,), {}),
    "nested inputs": (InputContainers(), ((X, [X + 1]), {"a": X}, Point(X, X)), {}),
    "keywords": (Keywords(), (X,), {"scale": 2.0, "extra": X}),
    "positional and variadic": (Positional(), (X, X, X), {"flag": True}),
    "positional only": (PositionalOnly(), (X, X), {}),
    "outputs": (Outputs(), (X,), {}),
    "properties": (PropertyReads(), (X,), {}),
    "containers": (Containers(), (X,), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_capture_equals_eager(name):
    model, args, kwargs = CASES[name]
    assert_captured(model, *args, **kwargs)


def test_operators_have_one_canonical_form():
    class Spellings(torch.nn.Module):
        def forward(self, x):
            y = x.add(1) + torch.add(x, 2) + (3 + x)
            y = x.mul(y) * torch.mul(x, y)
            y = (2 - y) / torch.div(x, 3) - torch.sub(y, 1)
            return (2 / y) @ torch.matmul(y.T, y), torch.add(x, 1, alpha=2)

    gm = fxopt.trace(Spellings(), (X,))
    found = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    assert found == [
        *[operator.add] * 5,
        *[operator.mul] * 3,
        operator.sub,
        operator.truediv,
        operator.truediv,
        operator.sub,
        operator.sub,
        operator.truediv,
        getattr,
        operator.matmul,
        operator.matmul,
        torch.add,  # alpha=2 is no plain addition
    ]
    reflected = next(node for node in gm.graph.nodes if node.target is operator.sub)
    assert reflected.args[0] == 2


def test_layers_are_call_module_under_their_own_name():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = torch.nn.Linear(4, 4)
            self.stack = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())

        def forward(self, x):
            return self.stack(self.dense(x))

    gm = fxopt.trace(Block(), (X,))
    assert [n.target for n in gm.graph.nodes if n.op == "call_module"] == [
        "input_guard",
        "dense",
        "stack.0",
        "stack.1",
    ]


def test_leaf_modules_by_name_and_type():
    model = Containers()
    by_name = fxopt.trace(model, (X,), leaf_modules=["blocks.1"])
    assert "blocks.1" in targets(by_name)
    assert "blocks.0.dense" in targets(by_name)
    by_type = fxopt.trace(model, (X,), leaf_modules=[type(model.blocks[0])])
    assert "blocks.0" in targets(by_type)
    assert "blocks.0.dense" not in targets(by_type)
    assert_same(by_type(X), model(X))


def test_nodes_carry_value_module_stack_and_source_line():
    gm = fxopt.trace(Containers(), (X,))
    node = next(node for node in gm.graph.nodes if node.target == "blocks.1.dense")
    assert node.meta["val"].shape == (3, 4)
    assert list(node.meta["nn_module_stack"]) == ["", "blocks.1", "blocks.1.dense"]
    assert "models.py" in node.meta["stack_trace"]
    assert "self.dense(x)" in node.meta["stack_trace"]


def test_a_write_survives_dead_code_elimination():
    gm = fxopt.trace(ViewWrites(), (X,))
    before = gm(X.clone())
    gm.graph.eliminate_dead_code()
    gm.recompile()
    assert torch.equal(gm(X.clone()), before)
    assert torch.equal(before, ViewWrites()(X.clone()))


def test_what_a_layer_gives_back_unchanged_is_not_taken_for_what_went_in():
    class Residual(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.dropout = torch.nn.Dropout(0.5)

        def forward(self, x):
            y = self.dropout(x)
            z = x.to(torch.float32)
            return x, y, z

    model = Residual().eval()
    gm = fxopt.trace(model, (X,))
    model.dropout.train()  # the layer is shared, and its flag its own
    torch.manual_seed(0)
    expected = model(X)
    torch.manual_seed(0)
    assert_same(gm(X), expected)
    assert not torch.equal(expected[0], expected[1])
    assert [argument.op for argument in gm.graph.output_node().args[0]] == [
        "placeholder",
        "call_module",
        "call_method",
    ]


def test_the_same_tensor_given_twice_is_two_inputs():
    class Difference(torch.nn.Module):
        def forward(self, a, b):
            return a - b

    gm = fxopt.trace(Difference(), (X, X))
    assert torch.equal(gm(X, 2 * X), -X)


def test_the_model_is_untouched_also_when_capture_fails():
    class Counter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(4)
            self.register_buffer("calls", torch.zeros(()))
            self.last = {}

        def forward(self, x, fail):
            self.calls.add_(1)
            self.last["shape"] = "seen"
            x = self.norm(x)
            if fail and x.sum() > 0:
                return [-x]
            return x

    model = Counter()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    fxopt.trace(model, (X, False))
    with pytest.raises(fxopt.TraceError):
        fxopt.trace(model, (X, True))
    assert model.last == {}
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all("_compiled_call_impl" not in module.__dict__ for module in model.modules())
    assert not torch.compiler.is_compiling()
    assert not torch.compiler.is_exporting()


def test_dynamic_shapes_in_the_forms_of_torch_export():
    model = SizeArithmetic().eval()
    rows = Dim("rows", min=2, max=6)
    for spec in ({"x": {0: rows}}, ({0: rows},), {"x": (rows, None)}):
        gm = fxopt.trace(model, (X,), dynamic_shapes=spec)
        assert_same(
            gm(torch.randn(5, 4).copy_(torch.arange(20).view(5, 4))), model(torch.arange(20.0).view(5, 4))
        )
        with pytest.raises(fxopt.GuardError, match=r"'x', dimension 0 is 7; it takes at most 6"):
            gm(torch.randn(7, 4))
        with pytest.raises(fxopt.GuardError, match=r"'x', dimension 1 is 3; .* captured for 4 alone"):
            gm(torch.randn(3, 3))


def test_a_named_dimension_is_the_same_in_all_inputs():
    class Stack(torch.nn.Module):
        def forward(self, a, b):
            return a.sum(0), b.sum(0)

    rows = Dim("rows")
    gm = fxopt.trace(Stack(), (X, X), dynamic_shapes=({0: rows}, {0: rows}))
    gm(torch.randn(5, 4), torch.randn(5, 4))
    with pytest.raises(fxopt.GuardError):
        gm(torch.randn(5, 4), torch.randn(6, 4))
    gm = fxopt.trace(Stack(), (X, torch.randn(6, 4)), dynamic_shapes=({0: rows}, {0: 2 * rows}))
    gm(torch.randn(5, 4), torch.randn(10, 4))
    with pytest.raises(fxopt.GuardError):
        gm(torch.randn(5, 4), torch.randn(9, 4))


@pytest.mark.parametrize("name", ["expand", "broadcast_to"])
def test_what_is_expanded_to_the_batch_unless_it_is_one_holds_at_size_one(name):
    class Positions(torch.nn.Module):
        def forward(self, x):
            rows = x[:1] * 3
            if rows.shape[0] != x.shape[0]:
                rows = getattr(rows, name)(*[(len(x), 4)] if name == "broadcast_to" else [len(x), -1])
            return x * rows.cumsum(-1), rows

    gm = fxopt.trace(Positions(), (X,), dynamic_shapes=({0: Dim.DYNAMIC},))
    for batch in (1, 2, 5):
        x = torch.randn(batch, 4)
        assert all(map(torch.equal, gm(x), Positions()(x)))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_expanded_without_gradients_is_another_graph_at_size_one(mode):
    class Positions(torch.nn.Module):
        def forward(self, x, rows):
            with mode():
                if rows.shape[0] != x.shape[0]:
                    rows = rows.expand(len(x), -1)
            return x + rows

    gm = fxopt.trace(Positions(), (X, X[:1]), dynamic_shapes=({0: Dim.DYNAMIC}, None))
    assert torch.equal(gm(X, X[:1]), X + X[:1])
    with pytest.raises(fxopt.GuardError, match="dimension 0 is 1"):
        gm(X[:1], X[:1])


def changes_the_shape_of_what_it_views(self, x):
    rows = torch.ones(1, 4) * 3
    other = rows.expand(len(x), -1) if len(x) != 1 else rows
    rows.unsqueeze_(0)
    return other * 2


def branches_after_an_operator_has_asked(self, x):
    y = x.transpose(0, 1).contiguous().view(4, -1).transpose(0, 1).contiguous()
    return y + 1 if x.shape[0] == 1 else y


def branches_on_strides(self, x):
    y = x.transpose(0, 1)
    return y * 2 if y.is_contiguous() else y


def reads_a_stride(self, x):
    y = x.transpose(0, 1).contiguous()
    return y * y.stride(1)


def asks_at_one(what):
    def forward(self, x):
        if len(x) == 1:
            answer = getattr(x, what)
            if (answer() if callable(answer) else answer) == "never":
                return x
        return x.float() * 2

    return forward


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: x if x.shape[0] == 1 else 2 * x,
        lambda self, x: x.sigmoid() if x.shape[0] == 1 else x.tanh(),
        changes_the_shape_of_what_it_views,
        branches_after_an_operator_has_asked,
        branches_on_strides,
        reads_a_stride,
        *map(asks_at_one, ["requires_grad", "dtype", "is_floating_point", "data_ptr"]),
    ],
)
def test_what_differs_at_size_one_is_another_graph(forward):
    model, x = module(forward), torch.randn(5, 4)
    gm = fxopt.trace(model, (X,), dynamic_shapes=({0: Dim.DYNAMIC},))
    assert torch.equal(gm(x), model(x))
    with pytest.raises(fxopt.GuardError, match="dimension 0 is 1"):
        gm(x[:1])


@pytest.mark.parametrize("copy", ["repeat", "clone", "flip"])
def test_what_is_copied_unless_the_batch_is_one_is_another_graph(copy):
    class Copied(torch.nn.Module):
        def forward(self, x):
            rows = x[:1] * 3
            if len(x) != 1:
                rows = {"repeat": rows.repeat(1, 1), "clone": rows.clone(), "flip": rows.flip(0)}[copy]
            return rows, x

    gm = fxopt.trace(Copied(), (X,), dynamic_shapes=({0: Dim.DYNAMIC},))
    with pytest.raises(fxopt.GuardError, match="dimension 0 is 1"):
        gm(torch.ones(1, 4))


def test_a_branch_on_strides_is_not_taken_silently_for_another_layout():
    class Layout(torch.nn.Module):
        def forward(self, x):
            return x * 2 if x.is_contiguous() else x

    gm = fxopt.trace(Layout(), (torch.ones(4, 4),))
    assert torch.equal(gm(torch.ones(4, 4)), 2 * torch.ones(4, 4))
    with pytest.raises(fxopt.GuardError, match="'x', which is not contiguous, has another memory layout"):
        gm(torch.ones(4, 4).T.expand(4, 4)[:, ::1].T.as_strided((4, 4), (1, 4)))


def test_sizes_of_one_are_taken_where_the_graph_is_the_same():
    class Causal(torch.nn.Module):
        def forward(self, x):
            rows = x.shape[0]
            scale = 1.0 if rows > 1 else x.shape[1] / 4
            return (x * scale).view(rows, 2, -1)

    gm = fxopt.trace(Causal(), (X,), dynamic_shapes=({0: Dim.DYNAMIC},))
    for rows in (1, 2, 9):
        assert torch.equal(gm(torch.ones(rows, 4)), Causal()(torch.ones(rows, 4)))


def test_a_free_dimension_that_the_forward_fixes_is_an_error():
    class Fixed(torch.nn.Module):
        def forward(self, x):
            return x + torch.ones(3, 1)

    with pytest.raises(fxopt.TraceError, match="dimension 0 of input x was asked to be free.*3"):
        fxopt.trace(Fixed(), (X,), dynamic_shapes=({0: Dim("rows")},))
    gm = fxopt.trace(Fixed(), (X,), dynamic_shapes=({0: Dim.AUTO},))
    with pytest.raises(fxopt.GuardError, match=r"The forward fixes it, at .*test_trace\.py:\d+"):
        gm(torch.ones(4, 4))


def test_data_dependent_sizes_are_computed_by_the_graph():
    class Nonzero(torch.nn.Module):
        def forward(self, x):
            rows = torch.nonzero(x[:, 0] > 0).squeeze(1)
            return x[rows], torch.zeros(rows.shape[0], 2), x.sum() * int(x.shape[0])

    gm = fxopt.trace(Nonzero(), (X,))
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(3, 4)
        assert_same(gm(x), Nonzero()(x))


def test_item_is_a_node():
    class Item(torch.nn.Module):
        def forward(self, x, n):
            return x * n.item(), x[:, 0] + float(1)

    gm = fxopt.trace(Item(), (X, torch.tensor(3)))
    assert_same(gm(X, torch.tensor(5)), Item()(X, torch.tensor(5)))


@pytest.mark.parametrize("spec", [{"y": {0: 1}}, ({0: "rows"},), ({5: Dim("rows")},), ({}, {})])
def test_malformed_dynamic_shapes(spec):
    with pytest.raises(fxopt.TraceError, match="dynamic_shapes"):
        fxopt.trace(SizeArithmetic(), (X,), dynamic_shapes=spec)


@pytest.mark.parametrize(
    ("given", "spec", "message"),
    [
        ((X, X), ({0: Dim.AUTO},), "input given must be a dict, a tuple of 2 entries or None"),
        ((X, X), Dim.AUTO, "input given must be a dict, a tuple of 2 entries or None"),
        ({"a": X, "b": X}, {"c": {0: Dim.AUTO}}, r"input given names \['c'\]; its parts are \['a', 'b'\]"),
        ({"a": {"b": X}}, {"a": {0: Dim.AUTO}}, r"input given\['a'\] names \[0\]; its parts are \['b'\]"),
    ],
)
def test_dynamic_shapes_of_a_container_with_other_parts(given, spec, message):
    class Container(torch.nn.Module):
        def forward(self, given):
            return list(given)

    with pytest.raises(fxopt.TraceError, match=message):
        fxopt.trace(Container(), (given,), dynamic_shapes={"given": spec})


class AsksForOne(nn.Module):
    """Asks whether sizes are 1, where the answer makes no difference."""

    def forward(self, x, y):
        one = x.shape[0] == 1 or y.shape[0] == 1
        return x.add(1) if one else 1 + x


@pytest.mark.parametrize(
    ("rows", "of_y", "expected"),
    [
        (Dim("rows", min=2), Dim("rows", min=2), []),
        (Dim.DYNAMIC(min=2), Dim.AUTO(min=2), []),
        (Dim("rows"), Dim("rows"), ["xy"]),  # both sizes are 1, or none
        (Dim("rows", min=2), Dim("others"), ["y"]),
        (Dim.AUTO, Dim.AUTO, ["x", "y", "xy"]),
    ],
)
def test_captures_at_size_1_are_made_where_sizes_may_be_1(rows, of_y, expected, monkeypatch):
    captures = []
    record = ForwardRun.record
    monkeypatch.setattr(
        ForwardRun, "record", lambda self: captures.append(self.request.at_one) or record(self)
    )
    x = torch.randn(5, 4)
    gm = fxopt.trace(AsksForOne(), (x, x), dynamic_shapes=({0: rows}, {0: of_y}))
    assert ["".join(sorted(where[-1] for where, _ in ones)) for ones in captures if ones] == expected
    assert torch.equal(gm(x, x), x + 1)
    if expected == ["xy"]:
        assert torch.equal(gm(x[:1], x[:1]), x[:1] + 1)
    if "x" not in "".join(expected):
        with pytest.raises(fxopt.GuardError, match="dimension 0 is 1"):
            gm(x[:1], x[:1])
