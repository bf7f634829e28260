"""Each column of the table of operators, proved by calling what stands in it.

Every name is called in every spelling with every list of arguments below; what torch accepts is a sample.
"""

from __future__ import annotations

import collections
import functools
import inspect
import itertools
import keyword
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fxopt import operators
from fxopt.memory_formats import channels_last
from fxopt.operators import _ROWS, TABLE, Fact, facts_of, is_write_name
from fxopt.passes.change_precision import saturate

pytestmark = pytest.mark.filterwarnings("ignore")

GRID = [-20.0, -1.5, -1, -0.5, 0, 1e-6, 0.5, 1, math.pi / 2, 2, 2.5, 20]
"""Values at which functions jump or have a pole, or near which they do."""


def arguments(dtype: torch.dtype) -> list[tuple[Any, ...]]:
    """Lists of arguments that some operator takes, with new tensors."""
    generator = torch.Generator().manual_seed(0)

    def floats(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    x, y, v, square = torch.tensor(GRID).view(3, 4).to(dtype), floats(3, 4), floats(4), floats(4, 4)
    p, pair, batch = floats(3, 4).sigmoid(), floats(3, 2), floats(2, 4, 4)
    line, image, volume = floats(1, 4, 5), floats(1, 4, 5, 5), floats(1, 4, 3, 3, 3)
    w1, w2, w3, three = floats(4, 4, 3), floats(4, 4, 3, 3), floats(4, 4, 3, 3, 3), floats(2, 4, 4)
    m, i, rows, part = floats(3, 4) > 0, torch.tensor([[0, 1, 2, 0]] * 3), torch.tensor([0, 2]), floats(2, 4)
    mean, var, scalar, single, empty = floats(4), floats(4).exp(), floats(), floats(1, 1), floats(0, 4)
    z = torch.complex(y.double(), y.double())
    uneven = torch.tensor([1e-3, 30, 30, 30], dtype=dtype)  # an error of the largest is one of the product
    heads = (floats(3, 1, 4), floats(3, 1, 4), floats(3, 1, 4), 4, 2, floats(12, 4), floats(12), None, None)
    return [
        *(
            (a,)
            for a in (x, p, scalar, single, empty, pair, z, m, i, [x, y], [x], [y, x, y], line, v, uneven)
        ),
        *(
            (x, a)
            for a in (y, 0, 1, 2, -1, 0.5, 1.0, m, i, v, (3, 4), (12,), (-1,), (0, 1), (1, 1), (0,), ())
        ),
        *((x, a) for a in (dtype, "cpu", x, floats(12), square, [1, 2])),
        *((x, *a) for a in ((0, 1), (1, 0), (0, 0, 1), (0, 0, 2), (1, (2, 2)), ((3, 4), 1.0), (0, 2, 1))),
        *((x, *a) for a in ((0.0, 1.0), (0.5, False), (0.5, True), ((2, 2), (4, 1)), (0.1, 0.3, True))),
        *((x, *a) for a in ((0, i), (1, i), (0, i, y), (0, rows), (0, rows, part), (m, y), (m, 2.0), (0, v))),
        (y, x),
        *((x, *a) for a in ((y, 0.5), (y, p), (x, square), (square, v), (y, ([1], [1])), (0, 1.0))),
        *((a, 0) for a in (scalar, i, m)),
        *(
            (m, x, y),
            (m, m, m),
            (i, x),
            (x, p),
            (p, 1),
            (v, v),
            (v, v, three),
            (x, (4,)),
            (x, single.view(1)),
        ),
        *(
            (square, v),
            (batch, batch),
            (batch, batch, batch),
            (batch, batch, batch, None, 0.5),
            ("ij->ji", x),
            ("ij,kj->ik", x, y),
        ),
        *((line, 2), (image, 2), (volume, 2), (image, 5), (line, 5), (line, 1), (image, 1), (volume, 1)),
        *((a, 2, None, 0, 1, False, True) for a in (line, image, volume)),
        *((line, w1), (image, w2), (volume, w3), (image, w2, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)),
        *((x, mean, var, None, None, True), (x, mean, var), (line, mean, var), (line, mean, var, None, None)),
        *((x, None, None, mean, var, True, 0.1, 1e-5), (x, None, None, mean, var, True, 0.1, 1e-5, False)),
        (line, None, None, mean, var, True, 0.1, 1e-5, False),
        (image.to(memory_format=torch.channels_last),),
        *(
            (image, floats(1, 2, 2, 2)),
            (floats(2, 2, 3), (2, 1, 2, 2)),
            (x, torch.tensor([0, 1, 2])),
            (p, p.flip(0)),
        ),
        (*heads, False, 0.5, floats(4, 4), floats(4)),
        *(((3, 4), 1.0), (0.0, 1.0, 4), (3, 4)),
        *(((3, 4),), (5,), (0, 9, (3,)), (image, 0.5, True), (line, 0.5, True), (volume, 0.5, True)),
        *((line, 0.5, False), (image, 0.5, False), (volume, 0.5, False)),
    ]


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "identity": (nn.Identity, (3, 4)),
    "lstm": (lambda: nn.LSTM(4, 4, 2, dropout=0.5), (3, 4)),
    "gru": (lambda: nn.GRU(4, 4, 2, dropout=0.5), (3, 4)),
    "rnn": (lambda: nn.RNN(4, 4, 2, dropout=0.5), (3, 4)),
    "multihead_attention": (lambda: nn.MultiheadAttention(4, 2, dropout=0.5), (3, 4)),
}
"""Names that are called as modules alone."""

UNCALLED = {"cuda"}
"""Names that cannot be called everywhere."""

NONE = Fact(0)
Sample = tuple[Callable[..., Any], str, int]


def spellings(name: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions that this name stands for; one that writes only where there is no other."""
    homes = [home for home in (torch, F, Tensor, operator, torch._C._nn) if hasattr(home, name)]
    if name in ("saturate", "channels_last"):
        yield name, {"saturate": saturate, "channels_last": channels_last}[name]
    elif keyword.iskeyword(name):
        yield f"{name}_", getattr(operator, f"{name}_")
    elif not callable(getattr(Tensor, name, len)):  # a property, as `T` and `shape`
        yield name, lambda x: getattr(x, name)
    elif homes:
        yield from ((name, getattr(home, name)) for home in homes)
    elif hasattr(Tensor, f"{name}_"):
        yield f"{name}_", getattr(Tensor, f"{name}_")
    else:
        spelling = name if hasattr(torch.ops.aten, name) else f"_{name}"
        yield spelling, getattr(torch.ops.aten, spelling)


@functools.cache
def samples(name: str, dtype: torch.dtype = torch.float64) -> list[Sample]:
    """The calls of this name that torch accepts: the function, its spelling, the number of the arguments."""
    if name in MODULES:
        return [(module_call(name, dtype), name, -1)]
    if dtype != torch.float64:
        tried = samples(name)
    else:
        functions = {id(f): (f, spelling) for spelling, f in spellings(name) if not isinstance(f, type)}
        tried = [(*pair, number) for pair in functions.values() for number in range(len(_arguments(dtype)))]
    found = []
    for function, spelling, number in tried:
        args = fresh(number, dtype)
        try:
            outcome(function, args)
        except Exception:
            continue
        by_argument = "inplace" in str(signature(function)) and versions(args) != versions(
            fresh(number, dtype)
        )
        if not by_argument:
            found.append((function, spelling, number))
    return found


def module_call(name: str, dtype: torch.dtype) -> Callable[..., Any]:
    module = MODULES[name][0]().to(dtype if dtype.is_floating_point else torch.float64)
    several = 3 if isinstance(module, nn.MultiheadAttention) else 1
    return lambda x: module(*[x if x.is_floating_point() else x.double()] * several)


@functools.cache
def _arguments(dtype: torch.dtype) -> list[tuple[Any, ...]]:
    return arguments(dtype)


def fresh(number: int, dtype: torch.dtype = torch.float64) -> tuple[Any, ...]:
    """New copies of a list of arguments."""
    args = _arguments(dtype)[number]
    if number < 0:
        args = (torch.linspace(-1, 1, 12).view(3, 4).to(dtype),)
    return copied(args)


def copied(value: Any) -> Any:
    """The same arguments with copies of the tensors; what was one tensor becomes two."""
    if isinstance(value, Tensor):
        return value.clone()
    return type(value)(map(copied, value)) if type(value) in (tuple, list) else value


def outcome(function: Callable[..., Any], args: tuple[Any, ...], seed: int = 0) -> Any:
    torch.default_generator.manual_seed(seed)
    return function(*args)


def signature(function: Callable[..., Any]) -> object:
    try:
        return inspect.signature(function)
    except ValueError:
        return None


def versions(value: Any) -> list[int]:
    return [tensor._version for tensor in tensors(value)]


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def floating(value: Any) -> list[Tensor]:
    return [tensor for tensor in tensors(value) if tensor.is_floating_point() or tensor.is_complex()]


def storages(value: Any) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors(value)}


def named(present: Fact, absent: Fact = NONE) -> list[str]:
    return [name for name, facts in TABLE.items() if present in facts and not facts & absent]


def failures(names: list[str], wrong: Callable[..., object], dtype: torch.dtype = torch.float64) -> set[str]:
    """The names for which `wrong` holds of a sample."""
    return {
        f"{name} {number}"
        for name in names
        for function, _, number in samples(name, dtype)
        if wrong(name, function, fresh(number, dtype))
    }


def unproved(names: list[str], right: Callable[..., object], dtype: torch.dtype = torch.float64) -> set[str]:
    """The names for which `right` holds of no sample."""
    return {
        name
        for name in names
        if not any(right(name, f, fresh(n, dtype)) for f, _, n in samples(name, dtype))
        and name not in UNCALLED
    }


def test_every_name_is_one_word_of_one_row_and_can_be_called():
    words = collections.Counter(itertools.chain.from_iterable(row.split() for row in _ROWS))
    assert [word for word, count in words.items() if count > 1] == []
    assert [name for name in TABLE if name not in UNCALLED and not samples(name)] == []
    assert all(hasattr(Tensor, name) for name in UNCALLED)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bfloat16])
def test_new_memory_is_new(dtype):
    def shares(name, function, args):
        return storages(args) & storages(outcome(function, args))

    assert failures(named(Fact.NEW), shares, dtype) == set()


def test_views_may_be_views():
    left, integers = set(named(Fact.VIEW)), (torch.int32, torch.int16, torch.int8, torch.uint8)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, *integers):
        left = unproved(sorted(left), lambda n, f, args: storages(args) & storages(outcome(f, args)), dtype)
    assert left == set()
    assert named(Fact.VIEW | Fact.NEW) == []


def test_what_reshapes_keeps_the_order():
    def reorders(name, function, args):
        value, (first, *_) = outcome(function, args), args
        return value.dtype == first.dtype and not torch.equal(value.flatten(), first.flatten())

    assert failures(named(Fact.RESHAPES), reorders) == set()
    assert unproved(named(Fact.RESHAPES), lambda *call: not reorders(*call)) == set()


def with_other_strides(args):
    """The same values, the first tensor as a slice of a wider one."""
    first = tensors(args)[0]
    if first.ndim == 0:
        return None
    wide = torch.zeros(*first.shape[:-1], first.shape[-1] + 3, dtype=first.dtype)[..., 1:-2].copy_(first)
    return tree_map(lambda a: wide if a is first else a, args)


def differs(left, right):
    for a, b in zip(tree_leaves(left), tree_leaves(right), strict=True):
        if isinstance(a, Tensor):
            if a.shape != b.shape or not torch.allclose(a, b, rtol=1e-9, atol=1e-12, equal_nan=True):
                return True
        elif hasattr(a, "nbytes"):  # an array, a storage
            if getattr(a, "strides", None) != getattr(b, "strides", None) or size_of(a) != size_of(b):
                return True
        elif a != b:
            return True
    return False


def size_of(memory):
    return memory.nbytes() if callable(memory.nbytes) else memory.nbytes


def depends_on_strides(name, function, args):
    if not tensors(args):
        return False
    other = with_other_strides(args)
    if other is None:
        return False
    try:
        after = outcome(function, other)
    except RuntimeError:
        return True
    return differs(outcome(function, args), after)


def test_what_depends_on_the_layout():
    assert unproved(named(Fact.LAYOUT), depends_on_strides) == set()
    unclear = {"empty_like", "new_empty", "new_empty_strided"}
    others = [name for name in named(Fact(0), Fact.LAYOUT | Fact.RANDOM) if name not in unclear]
    assert failures(others, depends_on_strides) == set()


def at_one_place(name, function, args):
    """Tell whether a change of one element changes no other; `None` where shapes do not allow the question."""
    before = outcome(function, args)
    inputs = tensors(args)
    if {t.shape for t in inputs} != {(3, 4)} or not isinstance(before, Tensor) or before.shape != (3, 4):
        return None
    changed = copied(args)
    for tensor in floating(changed):
        tensor[1, 2] += 0.7
    after = outcome(function, changed)
    same = (before == after) | (before.isnan() & after.isnan())
    same[1, 2] = True
    return bool(same.all())


def test_elementwise():
    assert failures(named(Fact.ELEMENTWISE), lambda *call: at_one_place(*call) is False) == set()
    assert unproved(named(Fact.ELEMENTWISE), at_one_place) == set()


def grows(name, function, args):
    """Tell whether an error of 1e-12 grows to more than 1e-9, or makes infinite numbers of finite ones."""
    in_first = Fact.SMOOTH_IN_FIRST in TABLE[name]
    second = args[1] if in_first else None
    if (
        in_first
        and name == "pow"
        and not (isinstance(second, int | float) and second > 0 and second % 1 == 0)
    ):
        return False
    if isinstance(second, Tensor) and second.min() < 1e-3 * second.max():
        return False  # a division by a small number is a product with a large one
    before = outcome(function, copied(args))
    if len(floating(before)) < len(tensors(before)):
        # A pass sees integers in the metadata, or knows that a cast or indices may make them.
        fixed = Fact.KEEPS_DTYPE in TABLE[name] and Fact.SEVERAL not in TABLE[name]
        return fixed and any(tensor.is_floating_point() for tensor in tensors(args)[:1])
    inputs = [number for number, tensor in enumerate(tensors(args)) if tensor.dtype.is_floating_point]
    if in_first:
        inputs = [0] if 0 in inputs else []
    return any(
        _grown(function, args, before, moved, error)
        for moved in (inputs, *([number] for number in inputs))
        for error in itertools.product((1e-12, -1e-12), (1e-12, -1e-12))
    )


def _grown(function, args, before, moved, error):
    changed = copied(args)
    for tensor in (tensors(changed)[number] for number in moved):
        if tensor.numel():
            signs = torch.arange(tensor.numel()).view(tensor.shape) % 2
            tensor += torch.tensor(error, dtype=tensor.dtype)[signs] * tensor.abs().max()
    largest = max((float(t.abs().max()) for t in floating(args) if t.numel()), default=0.0)
    after = outcome(function, changed)
    for old, new in zip(floating(before), floating(after), strict=True):
        finite = old.isfinite()
        magnitude = max(largest, float(old[finite].abs().max()) if finite.any() else 0.0)
        steady = (new - old)[finite].abs() <= 1e-9 * magnitude
        if not steady.all() or (old.isinf() & new.isfinite()).any():
            return True
    return False


@pytest.mark.long
def test_smooth():
    assert failures(named(Fact.SMOOTH) + named(Fact.SMOOTH_IN_FIRST), grows) == set()
    probed = unproved(named(Fact.SMOOTH), lambda n, f, args: floating(args) and floating(outcome(f, args)))
    assert probed == {"setitem"}  # it returns nothing: `test_writes`


def mixes(name, function, args):
    """Tell whether one element of the value depends on several elements of an input."""
    return any(_mixes(function, copied(args), number) for number in range(len(floating(args))))


def _mixes(function, args, number):
    tensor = floating(args)[number].requires_grad_()
    try:
        made = floating(outcome(function, args))
    except RuntimeError:  # no gradients of running statistics
        return False
    if not made or not made[0].requires_grad:
        return False
    (gradient,) = torch.autograd.grad(made[0].flatten()[:1].sum(), tensor, allow_unused=True)
    return gradient is not None and gradient.count_nonzero() > 1


def test_mixes():
    assert unproved(named(Fact.MIXES), mixes) == set()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_keeps_dtype(dtype):
    def changes(name, function, args):
        inputs, made = tensors(args), tensors(outcome(function, args))
        if (
            not inputs
            or not (inputs[0].dtype == dtype or name in ("where", "embedding"))
            or not floating(args)
        ):
            return False
        if Fact.SEVERAL in TABLE[name]:
            made = floating(made)
        return any(tensor.dtype != dtype for tensor in made)

    assert failures(named(Fact.KEEPS_DTYPE), changes, dtype) == set()
    assert unproved(named(Fact.KEEPS_DTYPE), lambda n, f, args: floating(outcome(f, args))) == {"setitem"}


def test_several():
    def several(name, function, args):
        return isinstance(outcome(function, args), tuple | list)

    assert unproved(named(Fact.SEVERAL), several) == set()
    tensor_makers = [n for n in TABLE if TABLE[n] & (Fact.NEW | Fact.KEEPS_DTYPE | Fact.SMOOTH)]
    assert failures([n for n in tensor_makers if Fact.SEVERAL not in TABLE[n]], several) == set()


def test_descriptions():
    def reads_values(name, function, args):
        before = outcome(function, args)
        other = copied(args)
        tensors(other)[0].fill_(1)
        after = outcome(function, other)
        if name.startswith(("empty", "new_empty")):
            before, after = ([(t.shape, t.dtype) for t in tensors(v)] for v in (before, after))
        return differs(before, after)

    assert failures(named(Fact.DESCRIBES), reads_values) == set()


def is_seeded(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    overloads = [getattr(packet, overload) for overload in packet.overloads()] if packet else []
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)


def test_random():
    def draws(name, function, args):
        return differs(outcome(function, args, 0), outcome(function, copied(args), 1))

    assert unproved([name for name in named(Fact.RANDOM) if not is_seeded(name)], draws) == set()
    steady = [n for n in named(Fact(0), Fact.RANDOM) if "empty" not in n and n != "data_ptr"]
    assert failures(steady, draws) == set()
    assert [name for name in steady if is_seeded(name)] == []


def test_writes():
    def writes(name, function, args):
        before = copied(args)
        outcome(function, args)
        return differs(before, args)

    assert unproved(named(Fact.STATISTICS), writes) == set()
    writing = [
        name
        for name in TABLE
        if any(is_write_name(f"__{s}__") or is_write_name(s) for _, s, _ in samples(name))
    ]
    assert failures([n for n in named(Fact(0), Fact.STATISTICS) if n not in writing], writes) == set()
    assert unproved(["setitem", "copy", "zero"], writes) == set()


MODULES_OF_TORCH = {
    "linear": nn.Linear(2, 2),
    "batch_norm": nn.BatchNorm1d(2),
    "conv_transpose2d": nn.ConvTranspose2d(1, 1, 1),
    "layer_norm": nn.LayerNorm(2),
    "gelu": nn.GELU(),
    "log_sigmoid": nn.LogSigmoid(),
    "max_pool2d": nn.MaxPool2d(2),
    "dropout1d": nn.Dropout1d(),
    "softmax": nn.Softmax2d(),
}


class Linear(nn.Linear):
    pass


def test_modules_are_looked_up_by_exact_type():
    node = torch.fx.Graph().placeholder("x")
    for name, module in MODULES_OF_TORCH.items():
        assert facts_of(node, module) == TABLE[name], name
    hooked, replaced = nn.ReLU(), nn.ReLU()
    hooked.register_forward_hook(lambda module, args, output: None)
    replaced.forward = lambda x: x
    for module in (Linear(2, 2), nn.Sequential(nn.ReLU()), hooked, replaced):
        assert facts_of(node, module) == Fact(0), module


def clone(x):
    """Not what torch calls so."""
    return x


def test_functions_from_elsewhere_have_no_facts():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    for target in (clone, torch.special.round, math.exp, max, torch.isin, torch.histogram):
        assert facts_of(graph.call_function(target, (x,))) == Fact(0), target
    for target in (operator.add, torch.add, torch.Tensor.add, operator.iadd, torch.ops.aten.add_.Tensor):
        assert facts_of(graph.call_function(target, (x, x))) == TABLE["add"], target
    for name in ("add", "add_", "__add__", "__iadd__"):
        assert facts_of(graph.call_method(name, (x, x))) == TABLE["add"]
    x.meta["val"] = (torch.ones(1),)  # not a tensor: `add` may be any method
    assert facts_of(graph.call_method("add", (x, x))) == Fact(0)
    assert facts_of(graph.call_function(getattr, (x, "data"))) == Fact(0)


def test_no_plain_name_is_taken_for_an_augmented_one():
    names = {*dir(torch), *dir(F), *dir(Tensor), *dir(torch.ops.aten)}
    plain = [name for name in names if not name.endswith("_") and operators._is_augmented(name)]
    assert plain == []
