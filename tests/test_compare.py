"""The comparison of outputs that verify, optimize, the oracle and capture share."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fxopt.compare import Unlike, compare, cosine_similarity, norm_error, pairs, row_error, unchanged, unlike
from fxopt.outputs import leaves

ONES = torch.ones(2, 2)


class Mode(enum.Enum):
    FIRST, SECOND = 1, 2


class Holds:
    """An object whose equality is its identity."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Raises:
    """An object that cannot be compared; its text says what it is."""

    __slots__ = ("value",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        raise ValueError("neither equal nor not")

    def __reduce__(self) -> tuple[Any, ...]:
        return Raises, (self.value,)

    def __repr__(self) -> str:
        return f"Raises({self.value})"


def plus(x: Tensor) -> Tensor:
    return x + 1


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (Mode.FIRST, Mode.SECOND),
        (torch.float32, torch.float16),
        (torch.strided, torch.sparse_coo),
        (int, float),
        (plus, unlike),
        (1, True),
        (math.nan, 1.0),
        (1.0, math.nan),
        (Holds(1), Holds(2)),
        (Holds(ONES), Holds(ONES + 1)),
        (slice(1), slice(2)),
        (Raises(1), Raises(2)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_leaves_that_differ_are_told_apart(left: Any, right: Any) -> None:
    assert unchanged({"a": left, "b": ONES}, {"a": left, "b": ONES.clone()})
    assert not unchanged({"a": left, "b": ONES}, {"a": right, "b": ONES})


def test_objects_that_a_copy_makes_anew_are_alike() -> None:
    assert unchanged([object(), Holds(Holds(1)), Raises(1)], [object(), Holds(Holds(1)), Raises(1)])


def test_an_object_inside_of_itself_is_walked_once() -> None:
    around = Holds(ONES)
    around.self = around  # type: ignore[attr-defined]
    assert [path for path, _ in leaves(around)] == ["output.value"]


def test_a_message_names_the_place_and_both_sides() -> None:
    with pytest.raises(Unlike, match=r"output\.a: expected torch\.float32 \[2, 2\], got None") as caught:
        pairs({"a": ONES}, {"a": None})
    assert (caught.value.expected, caught.value.actual) == ("torch.float32 [2, 2]", "None")


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_numbers_are_compared_as_they_are(dtype: torch.dtype) -> None:
    left, right = torch.tensor([1, 65535], dtype=dtype), torch.tensor([1, 2], dtype=dtype)
    assert compare(left, right).max_abs == 65533
    assert unlike(left, right) == "output: other numbers"


def test_a_small_row_is_not_hidden_by_a_large_one() -> None:
    right = torch.tensor([[1e6, 1.0], [1.0, 1.0]])
    wrong = right + torch.tensor([[0.0, 0.0], [0.0, 0.5]])
    assert row_error(right, wrong, 1e-30) == 0.5
    assert compare(right, wrong).max_rel == 0.5e-6
    assert row_error([ONES, right], [ONES, wrong], 100.0) == 0.5e-2
    assert row_error(torch.zeros(2), torch.full((2,), 1e-8), 1e-6) == pytest.approx(1e-2)


def test_what_overflows_in_further_values_does_not_count() -> None:
    wrong = torch.tensor([[1.0, math.inf], [1.0, 1.0]])
    assert row_error(ONES, wrong, 1e-30) == math.inf
    assert row_error(ONES, wrong, 1e-30, wrong) == 0


@pytest.mark.parametrize(
    ("left", "right", "error"),
    [
        (torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]), 0.1),
        (torch.tensor([3.0, math.nan]), torch.tensor([3.0, math.nan]), 0.0),
        (torch.tensor([3.0, 4.0]), torch.tensor([3.0, math.nan]), math.inf),
        (torch.zeros(2), torch.tensor([0.0, 0.5]), 0.5),
        (ONES, torch.ones(3), math.inf),
        (torch.tensor([3 + 4j]), torch.tensor([3 + 4.5j]), 0.1),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), 0.0),
    ],
    ids=str,
)
def test_the_distance_of_vectors(left: Tensor, right: Tensor, error: float) -> None:
    assert norm_error([left], [right]) == pytest.approx(error)


def test_a_frozen_dataclass_with_slots_is_compared_by_its_tensors() -> None:
    @dataclasses.dataclass(frozen=True, slots=True)
    class Output:
        values: Tensor

    before, after = Output(torch.zeros(2000)), Output(torch.zeros(2000))
    after.values[1000] = 5
    assert compare(before, after).max_abs == 5


def test_numbers_of_type_float_have_a_distance() -> None:
    before, after = {"loss": 1.0, "count": 2}, {"loss": 1.5, "count": 2}
    assert not unlike(before, after)
    assert norm_error(before, after) == 0.5
    assert unlike(before, {"loss": 1.0, "count": 3})
    with pytest.raises(Unlike):
        pairs(before, after)


def test_the_distance_counts_integers_where_that_is_asked_for() -> None:
    assert norm_error(torch.tensor([3, 4]), torch.tensor([3, 9]), integers=True) == 1


def test_the_cosine_is_the_least_and_knows_no_zero_vector() -> None:
    one, other = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])
    assert cosine_similarity((one, one), (one, other)) == pytest.approx(0.5**0.5)
    assert cosine_similarity(torch.zeros(2), other) == 1


@pytest.mark.parametrize("fill", [-1e30, torch.finfo(torch.float32).min, -1e9])
def test_what_fills_masked_places_hides_nothing(fill: float) -> None:
    right = torch.tensor([[3.0, 4.0, fill], [0.0, 0.0, fill]], dtype=torch.float64)
    wrong = right.float() + torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    assert compare(right, wrong, dtypes=False).max_rel == pytest.approx(0.25)
    assert norm_error(right, wrong) == pytest.approx(0.2)
    assert cosine_similarity(right, right.float() * torch.tensor([-1.0, 1.0, 1.0])) < 0.5
    missing = right.clone()
    missing[1, 2] = 5.0
    assert compare(right, missing).max_rel == pytest.approx(1)
    assert norm_error(right, missing) > 0.5
    assert compare(missing, right).max_rel >= 0.5


def test_masks_of_several_sizes_hide_no_error() -> None:
    expected, found = torch.tensor([-2e9, -1e9, 1.0, 2.0]), torch.tensor([-2e9, -1e9, 1.0, 5.0])
    assert norm_error(expected, found) > 1
    assert compare(expected, found).max_rel == 1.5


def test_a_number_in_the_place_of_nan_has_no_cosine() -> None:
    exact = torch.tensor([math.nan, 1.0])
    assert cosine_similarity(exact, torch.tensor([math.nan, 2.0])) == pytest.approx(1)
    assert cosine_similarity(exact, torch.tensor([5.0, 1.0])) == 0


def test_the_row_of_a_small_image_is_its_channels():
    one, other = torch.tensor([[[[1.0]], [[1e-3]]]]), torch.tensor([[[[1.0]], [[2e-3]]]])
    assert row_error(one, other, 1e-30) == pytest.approx(1e-3)
    assert row_error(one[0], other[0], 1e-30) == pytest.approx(1e-3)
    assert row_error(one[0, 1, 0, 0], other[0, 1, 0, 0], 1e-30) == pytest.approx(1)


def test_a_small_image_is_judged_by_its_channels_and_a_large_one_by_its_rows():
    for size, error in (((1, 2, 1, 3), 1e-3), ((1, 2, 1, 8), 1.0), ((2, 1, 3), 1.0)):
        one = torch.ones(size)
        one.view(2, -1)[1] = 1e-3
        other = one.clone()
        other.view(2, -1)[1, 0] = 2e-3
        assert row_error(one, other, 1e-30) == pytest.approx(error)
