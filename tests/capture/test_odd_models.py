"""Whatever is given to `trace` is captured right, or refused by a TraceError: no other exception leaves it."""

import contextlib
import dataclasses
import functools
import io
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

import fxopt
from fxopt.objects import tensors_in
from tests.capture.test_decisions import captured_right_or_refused

X = torch.randn(3, 4)


class Does(nn.Module):
    """A module with a linear layer, and these attributes, whose forward is a function."""

    def __init__(self, function, **attributes):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = [function]
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args):
        return self.function[0](self, *args)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        return self.inner(x).relu() * self.scale


def packed(self, x, lengths):
    sequence = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(self.lstm(sequence)[0], batch_first=True, total_length=x.shape[1])[0]


def jagged():
    return torch.nested.nested_tensor([torch.randn(k, 4) for k in (2, 3)], layout=torch.jagged)


def ctc_inputs():
    lengths = torch.tensor([9, 8]), torch.tensor([3, 2])
    return torch.randn(9, 2, 5).log_softmax(-1), torch.randint(1, 5, (2, 3)), *lengths


LSTM = functools.partial(nn.LSTM, 4, 4, batch_first=True)
COO = torch.eye(4).to_sparse()
Q = torch.randn(1, 2, 16, 16)


def scanned(self, x):
    from torch._higher_order_ops.scan import scan

    return scan(lambda c, row: ((c + row).tanh(), c * row), torch.zeros(3), x, dim=1, reverse=True)


def mapped(self, x):
    from torch._higher_order_ops.map import map as map_rows

    return map_rows(lambda row, y: self.linear(row) + y, x, torch.ones(4))


def looped(self, x):
    from torch._higher_order_ops.while_loop import while_loop

    return while_loop(
        lambda i, z: z.sum() < 9, lambda i, z: (i + 1, z + self.linear(z).exp()), (torch.tensor(0), x)
    )


def causal(self, q):
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 16, 16, device="cpu")
    return flex_attention(q, q, q, block_mask=mask) + flex_attention(
        q, q, q, score_mod=lambda score, b, h, i, j: score + (i - j)
    )


def compiled_when_called(function):
    @functools.wraps(function)
    def compile_hook(x):
        compiled = torch.compile(dynamic=True)(function)
        globals()[function.__name__] = functools.wraps(function)(compiled)
        return compiled(x)

    return compile_hook


@compiled_when_called
def softened(x):
    return x.relu() + 1


class Offset:
    def of(self, x):
        return x + 1


def compiled_method(self):
    def step(self, x):
        return self.linear(x)

    function = torch.compile(step)
    assert function.__code__ is not None
    return function.__get__(self)


compiled = torch.compile(lambda x: x.relu() + 1, backend="eager")

CAPTURED = {
    "a compiled function": (Does(lambda self, x: compiled(x)), (X,)),
    "a compiled submodule": (Does(lambda self, x: self.part(x), part=torch.compile(Scaled())), (X,)),
    "torch.compile in the forward": (Does(lambda self, x: torch.compile(torch.relu)(x)), (X,)),
    # As `roi_align` of torchvision.
    "torch.compile at the first call": (
        Does(lambda self, x: softened(x + vars(self).setdefault("n", 0))),
        (X,),
    ),
    "torch.compile of a method": (Does(lambda self, x: compiled_method(self)(x)), (X,)),
    "torch.compile of a class": (Does(lambda self, x: torch.compile(Offset)().of(x)), (X,)),
    "cond": (
        Does(lambda self, x: torch.cond(x.sum() > 0, lambda y: self.linear(y), torch.cos, (x,))),
        (X.abs(),),
    ),
    "while_loop": (Does(looped), (X,)),
    "scan": (Does(scanned), (X,)),
    "map": (Does(mapped), (X,)),
    "flex_attention": (Does(causal), (Q,)),
    "a scripted submodule": (Does(lambda self, x: self.part(x), part=torch.jit.script(Scaled())), (X,)),
    "a traced submodule": (Does(lambda self, x: self.part(x), part=torch.jit.trace(Scaled(), (X,))), (X,)),
    "the weight of a scripted submodule": (
        Does(lambda self, x: x @ self.part.inner.weight, part=torch.jit.script(Scaled())),
        (X,),
    ),
    "AdaptiveLogSoftmaxWithLoss": (nn.AdaptiveLogSoftmaxWithLoss(4, 10, [3]), (X, torch.tensor([1, 5, 9]))),
    "CTC loss": (Does(lambda self, *args: nn.functional.ctc_loss(*args)), ctc_inputs()),
    "a layer for CTC loss": (Does(lambda self, *args: self.ctc(*args), ctc=nn.CTCLoss()), ctc_inputs()),
    "a sparse input": (Does(lambda self, a, x: torch.sparse.mm(a, x)), (COO, torch.randn(4, 4))),
    "a compressed sparse input": (Does(lambda self, a, x: a @ x), (COO.to_sparse_csr(), torch.randn(4, 4))),
    "a sparse attribute": (Does(lambda self, x: torch.sparse.mm(self.a, x), a=COO), (torch.randn(4, 4),)),
    "a sparse output": (Does(lambda self, x: (x * (x > 0)).to_sparse()), (X,)),
    "a list of arguments": (Scaled(), [X]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CAPTURED)
def test_captured_right(case):
    model, args = CAPTURED[case]
    traced = fxopt.trace(model, args, specialize=True)
    made, expected = list(tensors_in(traced(*args))), list(tensors_in(model(*args)))
    torch.testing.assert_close(made, expected)


WRAPPED = torch.compile(Scaled(), backend="eager")

REFUSED = {
    "torch.relu": (torch.relu, (X,), "make a function the `forward`"),
    "a class": (nn.ReLU, (X,), r"an instance, `ReLU\(\.\.\.\)`"),
    "None": (None, (X,), "this is a NoneType"),
    "a method": (Scaled().forward, (X,), "not one of its methods"),
    "a compiled model": (WRAPPED, (X,), "pass what it wraps, `model._orig_mod`"),
    "DataParallel": (nn.DataParallel(Scaled()), (X,), "pass what it wraps, `model.module`"),
    "a scripted model": (torch.jit.script(Scaled()), (X,), "TorchScript; pass the module from which"),
    "an ExportedProgram": (torch.export.export(Scaled(), (X,)), (X,), r"program\.module\(\)"),
    "a lazy model": (nn.Sequential(nn.LazyLinear(3)), (X,), r"0\.weight, 0\.bias.*Run the model once"),
    "a dict of arguments": (Scaled(), {"x": X}, "kwargs="),
    "a number for arguments": (Scaled(), 3, r"not a int: write `\(x,\)`"),
    "a nested input": (nn.Linear(4, 4), (jagged(),), "nested tensor.*padded, with a mask"),
    "a nested tensor inside": (
        Does(lambda self, x: torch.nested.as_nested_tensor([x, x[:2]], layout=torch.jagged).values()),
        (X,),
        "nested tensor",
    ),
    "a quantized input": (
        Does(lambda self, x: x.dequantize()),
        (torch.quantize_per_tensor(X, 0.1, 0, torch.qint8),),
        "quantized tensor",
    ),
    "a packed sequence": (Does(packed, lstm=LSTM()), (torch.randn(3, 6, 4), torch.tensor([6, 2, 4])), ""),
    "a packed input": (nn.GRU(4, 4), (pack_sequence([torch.randn(3, 4), torch.randn(2, 4)]),), ""),
    "a forward without an end": (Does(lambda self, x: self.forward(x)), (X,), "RecursionError"),
    "no forward": (nn.ModuleList([nn.Linear(4, 4)]), (X,), "forward"),
    "an error in Python": (Does(lambda self, x: 1 / 0), (X,), "ZeroDivisionError"),
    "the end of an iterator": (Does(lambda self, x: next(iter(()))), (X,), "StopIteration"),
    "a generator as output": (Does(lambda self, x: (row for row in x)), (X,), "generator"),
    "another thread": (Does(lambda self, x: in_thread(x.relu)), (X,), "out of sight"),
    "an int out of range": (Does(lambda self, x: x * 2**100), (X,), "OverflowError"),
    "named dimensions": (Does(lambda self, x: x.rename("a", "b").sum("a")), (X,), "rename"),
    "a module as input": (Does(lambda self, x, f: f(x)), (X, nn.Linear(4, 4)), "Linear"),
    "backward": (Does(lambda self, x: self.linear(x).sum().backward()), (X,), "'backward'"),
}


def in_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("specialize", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_a_trace_error(case, specialize):
    model, args, message = REFUSED[case]
    with contextlib.redirect_stdout(io.StringIO()), pytest.raises(fxopt.TraceError, match=message):
        fxopt.trace(model, args, specialize=specialize)


class Marked:
    __slots__ = "mark"


@dataclasses.dataclass(slots=True)
class Slotted(Marked):
    value: torch.Tensor


@dataclasses.dataclass(slots=True)
class Counted(Slotted):
    count: object = dataclasses.field(default_factory=int, init=False)


def _marked(self, x):
    result = Slotted(x + 1)
    result.mark = x * 2
    return result


@pytest.mark.parametrize("kind", [Slotted, Counted])
def test_dataclasses_with_slots_are_inputs(kind):
    traced = fxopt.trace(Does(lambda self, given: given.value + 1), (kind(X),))
    assert torch.equal(traced(kind(X)), X + 1)


@pytest.mark.parametrize(("forward", "name"), [(_marked, "mark"), (lambda self, x: Counted(x + 1), "count")])
def test_what_is_in_a_slot_that_the_constructor_does_not_take_is_not_lost(forward, name):
    with pytest.raises(fxopt.TraceError, match=rf"carries \['{name}'\] besides its fields"):
        fxopt.trace(Does(forward), (X,), verify=False)
    assert torch.equal(fxopt.trace(Does(lambda self, x: Slotted(x + 1)), (X,))(X).value, X + 1)


def test_an_input_with_slots_is_changed():
    def forward(self, given):
        given.value = given.value + 1
        return given.value

    traced, given = fxopt.trace(Does(forward), (Slotted(X),)), Slotted(X)
    assert torch.equal(traced(given), X + 1)
    assert torch.equal(given.value, X + 1)


class Noise(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        return x + torch.rand(4, generator=self.generator)


def test_a_generator_of_a_module_is_refused_and_goes_on_in_a_leaf():
    model, eager = torch.nn.Sequential(Noise()), torch.nn.Sequential(Noise())
    x = torch.randn(3, 4)
    with pytest.raises(fxopt.TraceError, match="drawn from a torch.Generator, which a graph cannot hold"):
        fxopt.trace(model, (x,))
    traced = fxopt.trace(model, (x,), leaf_modules="0")
    for _ in range(2):
        assert torch.equal(traced(x), eager(x))


class Packs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = torch.nn.LSTM(4, 5, batch_first=True)

    def forward(self, x, lengths):
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.rnn(packed)[1]


@pytest.mark.parametrize("specialize", [False, True])
def test_a_packed_sequence_is_refused_with_what_to_do(specialize):
    inputs = (torch.randn(3, 6, 4), torch.tensor([6, 2, 4]))
    with pytest.raises(fxopt.TraceError, match="is given a packed sequence.*give it the padded sequence"):
        fxopt.trace(Packs(), inputs, specialize=specialize)


def test_a_packed_sequence_as_an_input_is_refused():
    packed = torch.nn.utils.rnn.pack_sequence([torch.randn(3, 4), torch.randn(2, 4)])
    with pytest.raises(fxopt.TraceError, match="packed sequence"):
        fxopt.trace(torch.nn.GRU(4, 4), (packed,), specialize=True)


def test_a_tensor_where_there_was_none_is_named_by_its_shape():
    class Optional(torch.nn.Module):
        def forward(self, x, mask=None):
            return x if mask is None else x * mask

    traced = fxopt.trace(Optional(), (torch.ones(3), None))
    with pytest.raises(
        fxopt.GuardError, match=r"'mask' is a tensor of shape \(3,\); the graph was captured for None"
    ):
        traced(torch.ones(3), torch.ones(3))


class Child(nn.Module):
    def __init__(self, parent):
        super().__init__()
        self.parent = weakref.ref(parent)

    def forward(self, x):
        self.parent().last = x
        return self.parent().dense(x)


class Parent(nn.Module):
    def __init__(self):
        super().__init__()
        self.child, self.dense, self.last = Child(self), nn.Linear(4, 4), None

    def forward(self, x):
        return self.child(x)


def test_a_weak_reference_to_a_module_leads_to_the_copy_of_it():
    model, x = Parent(), torch.randn(2, 4)
    traced = fxopt.trace(model, (x,))
    assert model.last is None
    assert torch.equal(traced(x), model(x))


def test_mkldnn_tensors():
    captured_right_or_refused(Does(lambda self, x: x.to_mkldnn().relu().to_dense()), (X,), [(-X,)])
