"""Containers of Python's library in outputs: a graph gives the same types with the same contents."""

import collections
import copy
import dataclasses
import enum
import pickle
import types

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling

import fxopt
from tests.capture.test_odd_models import Does
from tests.modules import module


class AttributeDict(dict):
    __getattr__ = dict.get


class Results(list):
    pass


class Pair(tuple):
    pass


class Stage(enum.Enum):
    FIRST = "first"
    LAST = "last"


@dataclasses.dataclass
class Box:
    corners: torch.Tensor
    count: int = dataclasses.field(init=False)

    def __post_init__(self):
        self.corners, self.count = self.corners * 2, len(self.corners)


@dataclasses.dataclass
class Doubling:
    corners: torch.Tensor

    def __setattr__(self, name, value):
        object.__setattr__(self, name, value * 2)


class Measured(Box):
    def __init__(self, image):
        super().__init__(image)
        self.stages = {"now": Stage.LAST}


class Reversed(list):
    def __iter__(self):
        return reversed(list(list.__iter__(self)))


class Backwards(tuple):
    def __iter__(self):
        return reversed([self[i] for i in range(len(self))])


class Appending(type):
    def __call__(cls, *args):
        made = super().__call__(*args)
        made.append(1)
        return made


class Appended(list, metaclass=Appending):
    pass


class Slotted(AttributeDict):
    __slots__ = ("label",)


def slotted(x):
    made = Slotted(a=x)
    made.label = "new"
    return made


def labelled(made):
    made.label = "new"
    return made


class Flags(enum.Flag):
    FAST = 1
    SAFE = 2


OUTPUTS = {
    "Size": lambda self, x: (x + 1, x.shape),
    "Size inside": lambda self, x: {"shape": x[:, :2].size()},
    "keys": lambda self, x: {"a": x, "b": x + 1}.keys(),
    "values": lambda self, x: {"a": x, "b": x + 1}.values(),
    "items": lambda self, x: {"a": x + 1}.items(),
    "deque": lambda self, x: collections.deque([x, x + 1, x + 2], maxlen=2),
    "defaultdict": lambda self, x: collections.defaultdict(list, a=[x + 1]),
    "OrderedDict": lambda self, x: collections.OrderedDict(a=x + 1, b=x.shape),
    "set": lambda self, x: (x, {1, 2}),
    "Counter": lambda self, x: (x, collections.Counter("abca")),
    "Counter of tensors": lambda self, x: collections.Counter(a=x, b=x.shape[0]),
    "namespace": lambda self, x: types.SimpleNamespace(a=x, b=[3, x.shape[0]]),
    "derived dict": lambda self, x: AttributeDict(a=x, b={"c": x + 1}),
    "derived list": lambda self, x: Results([x, 2]),
    "derived tuple": lambda self, x: Pair((x, x.shape[0])),
    "members of an enumeration": lambda self, x: {Stage.FIRST: x, "b": [Stage.LAST], "c": {"d": Stage.LAST}},
    "dataclass that computes": lambda self, x: Box(x),
    "dataclass that computes when it is set": lambda self, x: Doubling(x),
    "dataclass with an __init__ of its own": lambda self, x: Measured(x),
    "several flags": lambda self, x: {"a": Flags.FAST | Flags.SAFE, "b": [x, Flags.SAFE]},
}


def later_field_first(x):
    output = BaseModelOutputWithPooling(last_hidden_state=x)
    output["hidden_states"] = (x + 1,)
    output.pooler_output = x * 2
    return output


OUTPUTS["ModelOutput whose later field was set first"] = lambda self, x: [later_field_first(x)]


@pytest.mark.parametrize("case", OUTPUTS)
def test_the_type_of_an_output(case):
    model, x = Does(OUTPUTS[case]), torch.randn(3, 4)
    free = {"args": ({0: torch.export.Dim.AUTO},)}
    for options in ({}, {"dynamic_shapes": free}):
        traced = fxopt.trace(model, (x,), **options)
        other = torch.randn(5, 4) if options else torch.randn(3, 4)
        for graph in (traced, copy.deepcopy(traced), pickle.loads(pickle.dumps(traced))):
            assert described(graph(other)) == described(model(other))


def described(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return (
            type(value),
            getattr(value, "default_factory", None),
            [(k, described(v)) for k, v in value.items()],
        )
    if isinstance(value, (tuple, list, collections.deque, collections.abc.MappingView)):
        return type(value), getattr(value, "maxlen", None), [described(item) for item in value]
    if isinstance(value, (types.SimpleNamespace, Box, Doubling)):
        return type(value), described(vars(value))
    return value


def test_a_tensor_in_a_set_is_made_anew():
    traced = fxopt.trace(Does(lambda self, x: {torch.tensor([1.0])}), (torch.randn(3, 4),))
    for _ in range(2):
        (made,) = traced(torch.randn(3, 4))
        assert made.add_(1).item() == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda x: Reversed([x, 2]),
        lambda x: Backwards((x, 2)),
        lambda x: Appended([x]),
        slotted,
        lambda x: labelled(collections.Counter(a=x)),
        lambda x: types.SimpleNamespace(**{"a b": x}),
        lambda x: labelled(BaseModelOutput(x)),
    ],
)
def test_a_container_that_a_graph_would_make_otherwise_is_refused(make):
    with pytest.raises(fxopt.TraceError, match="cannot be in a graph, which can hold only|carries"):
        fxopt.trace(Does(lambda self, x: make(x)), (torch.randn(2, 3),), verify=False)


def test_a_tensor_that_the_model_keeps_in_a_list_is_an_output():
    model = module(lambda self, x: (x * 2, self.kept[0], self.kept), kept=[torch.ones(2)])
    traced = fxopt.trace(model, (torch.ones(3),))
    torch.testing.assert_close(traced(torch.ones(3)), model(torch.ones(3)))


@torch.no_grad()
def test_the_order_of_entries_is_kept_by_passes_saving_and_optimize(tmp_path):
    model, x = Does(lambda self, x: later_field_first(x)), torch.randn(3, 4)
    traced = fxopt.trace(model, (x,))
    fxopt.EliminateCommonSubexpressions()(traced, verify=True)
    fxopt.save(traced, tmp_path / "saved")
    fast = fxopt.optimize(model.eval(), (x,), tune=False)
    assert fast.report[0].reason is None
    for graph in (traced, fxopt.load(tmp_path / "saved"), fast):
        assert [*graph(x)] == ["last_hidden_state", "hidden_states", "pooler_output"]
        assert torch.equal(graph(x)[2], x * 2)
