"""Order of writes, and memory that tensors share."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxopt
from fxopt.graph_index import GraphIndex
from tests.modules import module


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.linear = nn.Linear(2, 2)
        self.act = nn.ReLU(inplace=True)
        self.register_buffer("state", torch.zeros(2))
        self.sequence = nn.Sequential(nn.ReLU(inplace=True))
        self.hooked, self.hooked_part = nn.Tanh(), nn.Sequential(nn.Tanh())
        self.hooked.register_forward_pre_hook(lambda module, args: None)
        self.hooked_part[0].register_forward_hook(lambda module, args, output: None)
        self.embedding = nn.Embedding(3, 2, max_norm=0.1)
        self.bag = nn.EmbeddingBag(3, 2, max_norm=0.1)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x, y):
        return self.function(self, x, y)


@torch.fx.wrap
def mix_(a, b):
    b.add_(1)
    return a


class LayersAreLeaves(torch.fx.Tracer):
    proxy_buffer_attributes = True

    def is_leaf_module(self, m, module_qualified_name):
        return not isinstance(m, Function)


def index_of(function):
    model = Function(function)
    return GraphIndex(torch.fx.GraphModule(model, LayersAreLeaves().trace(model)))


def node(index, name):
    return next(n for n in index.nodes if n.name == name)


WRITES = {
    "add_": lambda m, x, y: x.add_(1),
    "__iadd__": lambda m, x, y: x.__iadd__(1),
    "out": lambda m, x, y: torch.add(y * 1, 1, out=x),
    "inplace keyword": lambda m, x, y: F.relu(x, inplace=True),
    "inplace by position": lambda m, x, y: F.elu(x, 1.0, True),
    "inplace module": lambda m, x, y: m.act(x),
    "aten": lambda m, x, y: torch.ops.aten.add_.Tensor(x, 1),
    "aten out": lambda m, x, y: torch.ops.aten.add.out(y * 1, 1, out=x),
    "foreach": lambda m, x, y: torch._foreach_add_([x], 1),
    "batch_norm statistics": lambda m, x, y: F.batch_norm(y * 1, x, x, training=True),
    "embedding that renormalises": lambda m, x, y: F.embedding(y, x, max_norm=1.0),
    "batch_norm of torch": lambda m, x, y: torch.batch_norm(y, None, None, x, x, True, 0.1, 1e-5, True),
    "through a view": lambda m, x, y: x[0].t().zero_(),
    "through detach": lambda m, x, y: x.detach().zero_(),
    "resize_": lambda m, x, y: x.resize_(3),
    "several tensors": lambda m, x, y: torch._foreach_add_([y * 1, x], 1),
    "in a joined tuple": lambda m, x, y: operator.add((y * 2).split(1), (x,))[1].add_(1),
    "in a tuple made of a tensor": lambda m, x, y: operator.add(x.split(1), (y,))[0].add_(1),
    "aten batch_norm": lambda m, x, y: torch.ops.aten.batch_norm(y, None, None, x, x, True, 0.1, 1e-5, True),
    "in a repeated tuple": lambda m, x, y: (x.split(1) * 2)[0].add_(1),
    "embedding_bag": lambda m, x, y: F.embedding_bag(y, x, max_norm=1.0),
    "a part of a layer": lambda m, x, y: m.sequence(x),
    "a hook of a layer": lambda m, x, y: m.hooked(x),
    "a hook of a part": lambda m, x, y: m.hooked_part(x),
    "a foreign function with such a name": lambda m, x, y: mix_(y * 1, x),
}


LIKE_ANOTHER = [
    *(lambda m, x, y, name=name: getattr(x, name)(y) for name in ("to", "type_as", "view_as", "expand_as")),
    lambda m, x, y: torch.Tensor.reshape_as(x, y),
    lambda m, x, y: x.expand(y.shape),
]


@pytest.mark.parametrize("call", LIKE_ANOTHER)
def test_what_is_made_like_another_is_no_view_of_it(call):
    model = Function(lambda m, x, y: call(m, torch.tanh(x), torch.exp(y)) + 1).eval()
    index = GraphIndex(fxopt.trace(model, (torch.zeros(3, 2), torch.ones(3, 2))))
    first, other, made = node(index, "tanh"), node(index, "exp"), node(index, "add").args[0]
    assert made is not first
    assert index.memory.may_alias(made, first)
    assert not index.memory.may_alias(made, other)
    assert made not in [*index.memory.derived(other)]


def test_an_object_with_a_method_of_that_name_may_give_its_argument():
    index = index_of(lambda m, x, y: x.to(y).add_(1))
    assert index.memory.may_alias(node(index, "to"), node(index, "y"))


@pytest.mark.parametrize("name", WRITES)
def test_writes_are_seen(name):
    index = index_of(lambda m, x, y: (WRITES[name](m, x, y), x + 1))
    assert index.memory.written(node(index, "x")) is not None
    first, last = index.nodes[0], index.nodes[-1]
    assert "may write into x" in index.memory.write_between(first, last, node(index, "x"))


@pytest.mark.parametrize(
    ("read", "call"),
    [
        (lambda m: m.embedding.weight, lambda m, x, y: m.embedding(y)),
        (lambda m: m.bag.weight, lambda m, x, y: m.bag(y)),
        (lambda m: m.norm.running_mean, lambda m, x, y: m.norm(x)),
    ],
)
def test_writes_of_layers_into_their_own_tensors(read, call):
    index = index_of(lambda m, x, y: (read(m) + 1, call(m, x, y), read(m) + 2))
    first, last = index.nodes[0], index.nodes[-1]
    value = next(n for n in index.nodes if n.op == "get_attr")
    assert index.memory.written(value)
    assert "may write into" in index.memory.write_between(first, last, value)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x, y: x.add(1),
        lambda m, x, y: (m.linear(x) + y).add_(1),
        lambda m, x, y: F.embedding_bag(y, x),
        lambda m, x, y: (x * 2.0).add_(1),
        lambda m, x, y: F.relu(x, inplace=False),
        lambda m, x, y: operator.and_(x, y),
        lambda m, x, y: x.__index__(),
        lambda m, x, y: torch.ops.aten.add.Tensor(x, 1),
        lambda m, x, y: m.linear(x),
        lambda m, x, y: F.batch_norm(y, x, x),
        lambda m, x, y: F.batch_norm(y, x, x, training=False),
        lambda m, x, y: F.instance_norm(x),
        lambda m, x, y: F.instance_norm(y, x, x, use_input_stats=False),
        lambda m, x, y: F.embedding(y, x),
    ],
)
def test_no_write_is_not_seen(function):
    index = index_of(function)
    assert index.memory.written(node(index, "x")) is None


def test_augmented_operators_write():
    index = index_of(lambda m, x, y: (x + y) & x)
    call = node(index, "add")
    for target, writes in ((operator.iadd, True), (operator.ior, True), (operator.index, False)):
        call.target = target
        assert GraphIndex(index.graph_module).memory.writes(call) is writes


def test_setitem_and_modes_in_captured_graphs():
    def function(m, x, y):
        z = x * 1
        with torch.no_grad():
            z[0] = y[0]
        return z

    index = GraphIndex(fxopt.trace(Function(function).eval(), (torch.ones(2), torch.ones(2))))
    mul = node(index, "mul")
    assert "setitem" in index.memory.written(mul).name
    assert "has a side effect" in index.memory.write_between(mul, index.nodes[-1])


def test_all_writers_are_listed_in_order():
    index = index_of(lambda m, x, y: (x.add_(1), m.linear(x), x[0].mul_(2), m.act(x), (x * 1.0).add_(1)))
    x = node(index, "x")
    assert [writer.name for writer in index.memory.writers(x)] == ["add_", "mul_", "act"]
    assert index.memory.written(x) is index.memory.writers(x)[0]
    assert index.memory.writers(node(index, "linear")) == []
    assert node(index, "getitem") in index.memory.aliases(x)
    assert node(index, "linear") not in index.memory.aliases(x)


def test_containers_do_not_write_and_unknown_functions_may():
    index = index_of(lambda m, x, y: x + y)
    for target, writes in (
        (dict, False),
        (print, False),
        (test_writes_are_seen, True),
        (operator.neg, False),
    ):
        with index.graph_module.graph.inserting_before(index.nodes[-1]):
            call = index.graph_module.graph.call_function(target, (index.nodes[0],))
        assert GraphIndex(index.graph_module).memory.writes(call) is writes
        index.graph_module.graph.erase_node(call)


def test_aliases():
    index = index_of(lambda m, x, y: (x.view(-1), x + 1.0, m.linear(x), x.reshape(2), m.act(y)))
    x = node(index, "x")
    aliases = [n.name for n in index.nodes[:-1] if index.memory.may_alias(x, n)]
    assert aliases == ["x", "y", "view", "reshape", "act"]


def test_buffers_share_memory_by_storage():
    whole, other = (nn.Parameter(torch.zeros(4)) for _ in range(2))
    part = nn.Parameter(whole.detach()[1:])
    index = GraphIndex(torch.fx.symbolic_trace(module(lambda m: (m.a, m.b, m.c), a=whole, b=part, c=other)))
    a, b, c = index.nodes[:3]
    assert index.memory.may_alias(a, b)
    assert not index.memory.may_alias(a, c)


def test_runs_are_parted_by_writes():
    index = index_of(lambda m, x, y: (x + 1, x.exp(), x.add_(1), x * 2, y.add_(1)))
    takers = [node(index, name) for name in ("add", "exp", "mul")]
    runs = index.memory.runs(takers, node(index, "x"))
    assert [[each.name for each in run] for run in runs] == [["add", "exp"], ["mul"]]


def test_what_is_derived_from_a_value():
    def function(m, x, y):
        made = m.linear(x)
        whole = made.contiguous()
        return made.view(-1)[0], whole.view(-1), made + 1, y

    index = index_of(function)
    linear = node(index, "linear")
    derived = {each.name for each in index.memory.derived(linear, until=("contiguous",))}
    assert derived == {"linear", "view", "getitem", "output"}
    assert "view_1" in {each.name for each in index.memory.derived(linear)}


def test_what_is_seen_behind_a_node():
    index = index_of(lambda m, x, y: (m.linear(x), m.linear(y).t().exp(), x.exp()))
    first, view, exp = (node(index, name) for name in ("linear", "t", "exp"))
    assert index.memory.is_seen_after(first, view)  # the output takes it
    assert not index.memory.is_seen_after(view, exp)
    assert index.memory.is_seen_after(node(index, "x"), exp)  # the caller has it


def test_layers_that_write_into_their_own_tensors_are_not_pure():
    index = index_of(lambda m, x, y: (m.linear(x), m.norm(x), m.embedding(y)))
    pure = [index.memory.is_pure(node(index, name)) for name in ("linear", "norm", "embedding")]
    assert pure == [True, False, False]


def test_two_views_of_one_free_size_share_no_memory():
    def views(self, x, y):
        x, y = x + 1, y + 1
        batch = x.shape[0]
        return x.view(batch, 2, 1), y.view(batch, 2, 1)

    batch = torch.export.Dim("batch")
    free = {"x": {0: batch}, "y": {0: batch}}
    traced = fxopt.trace(Function(views), (torch.randn(3, 2), torch.randn(3, 2)), dynamic_shapes=free)
    first, second = traced.graph.find_nodes(op="call_method", target="view")
    assert isinstance(first.args[1], torch.fx.Node)
    assert first.args[1] is second.args[1]
    assert not GraphIndex(traced).memory.may_alias(first, second)


def test_an_index_is_not_viewed_and_what_tensors_choose_is_a_copy():
    def chooses(m, x, tags):
        score = m.start[tags]
        score += x
        return score, x[1:]

    model = module(chooses, start=nn.Parameter(torch.randn(5)))
    traced = fxopt.trace(model, (torch.randn(3), torch.tensor([0, 1, 2])))
    index = GraphIndex(traced)
    x, tags = traced.graph.find_nodes(op="placeholder")
    (start,) = traced.graph.find_nodes(op="get_attr")
    assert [index.memory.written(node) for node in (x, tags, start)] == [None] * 3
    row = next(n for n in traced.graph.nodes if n.target is operator.getitem and n.args[0] is x)
    assert index.memory.may_alias(row, x)


def test_a_tensor_of_one_element_chooses_from_a_list_and_copies_nothing():
    graph = torch.fx.Graph()
    x, number = graph.placeholder("x"), graph.placeholder("number")
    x.meta["val"], number.meta["val"] = torch.ones(4), torch.tensor([0])
    parts = graph.call_method("chunk", (x, 2))
    part = graph.call_function(operator.getitem, (parts, number))
    graph.output(graph.call_method("add_", (part, 1)))
    index = GraphIndex(torch.fx.GraphModule(nn.Module(), graph))
    assert index.memory.may_alias(part, x)
    assert index.memory.written(x)


def test_a_check_writes_nothing():
    def checks(m, x):
        return torch.stack([x[:, i] * 2 if f else x[:, i] for i, f in enumerate(m.which)], 1)

    traced = fxopt.trace(module(checks, which=torch.tensor([True, False, True])), (torch.randn(2, 3),))
    index = GraphIndex(traced)
    assert not any(index.memory.written(node) for node in traced.graph.nodes)


def test_what_a_recurrent_layer_returns_is_new_unless_a_packed_sequence_may_come_in():
    lstm = nn.Sequential(nn.LSTM(4, 4))
    for graph_module, new in (
        (fxopt.trace(lstm, (torch.randn(3, 2, 4),)), True),
        (torch.fx.symbolic_trace(lstm), False),
    ):
        (call,) = graph_module.graph.find_nodes(op="call_module", target="0")
        assert GraphIndex(graph_module).memory.gives_new_memory(call) is new


def test_a_product_of_einsum_is_new_and_a_transposed_matrix_is_not():
    model = Function(lambda m, x, y: (torch.einsum("ij,kj->ik", x, y), torch.einsum("ij->ji", x)))
    gm = fxopt.trace(model, (torch.randn(2, 3), torch.randn(4, 3)))
    product, view = gm.graph.find_nodes(op="call_function", target=torch.einsum)
    memory = GraphIndex(gm).memory
    assert memory.gives_new_memory(product)
    assert not memory.gives_new_memory(view)
