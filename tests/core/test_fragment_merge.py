"""Accumulation of contributions: rounding, buffers, sums of squares (format §6.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_diloco.errors import IntegrityError
from ps_diloco.fragment import FragmentValue
from ps_diloco.layout import FragmentSize, LayoutEntry
from ps_diloco.merge import (
    FragmentMerge,
    check_sum_squares,
    sum_squares,
)

PROPERTY = settings(max_examples=100, deadline=None, derandomize=True)


# Accumulation


@PROPERTY
@given(st.integers(0, 40), st.lists(st.floats(0, 1, width=32), max_size=5), st.integers(0, 10**6), st.integers(0, 40))
def test_the_accumulator_rounds_every_product_and_every_sum_once(elements: int, coefficients: list[float], seed: int, cut: int) -> None:
    generator = np.random.default_rng(seed)
    whole = FragmentMerge(FragmentSize(elements=elements, floats=0, ints=0, frozen=0))
    sliced = FragmentMerge(FragmentSize(elements=elements, floats=0, ints=0, frozen=0))
    expected = np.zeros(elements, dtype=np.float32)
    reference, reach = np.zeros(elements), np.zeros(elements)
    for coefficient in coefficients:
        delta = generator.standard_normal(elements).astype(np.float32)
        whole.add_params(coefficient, torch.from_numpy(delta.copy()))
        cut = min(cut, elements)
        sliced.add_params(coefficient, torch.from_numpy(delta[cut:].copy()), start=cut)
        sliced.add_params(coefficient, torch.from_numpy(delta[:cut].copy()))
        expected += np.float32(coefficient) * delta
        reference += coefficient * delta.astype(np.float64)
        reach += abs(coefficient * delta.astype(np.float64))
    assert whole.gradient.numpy().tobytes() == expected.tobytes()
    assert sliced.gradient.numpy().tobytes() == expected.tobytes()
    assert np.all(abs(whole.gradient.numpy() - reference) <= 2 * max(len(coefficients), 1) * 2.0**-24 * reach + 1e-37)


def test_values_that_are_added_may_be_overwritten() -> None:
    merging = FragmentMerge(FragmentSize(elements=2, floats=0, ints=0, frozen=0))
    delta = torch.tensor([2.0, 4.0])
    merging.add_params(0.5, delta)
    assert merging.gradient.tolist() == [1.0, 2.0]
    assert delta.tolist() == [1.0, 2.0]


def _value(floats: Sequence[float], ints: Sequence[int]) -> FragmentValue:
    value = FragmentValue.zeros(FragmentSize(elements=0, floats=len(floats), ints=len(ints), frozen=0))
    value.floats.copy_(torch.tensor(floats))
    value.ints.copy_(torch.tensor(ints, dtype=torch.int64))
    return value


def test_float_buffers_are_the_weighted_mean_and_integers_the_maximum() -> None:
    value = _value([8.0, -1.0], [5, 2**62])
    merging = FragmentMerge(FragmentSize(elements=0, floats=2, ints=2, frozen=0))
    merging.add_buffers(0.25, torch.tensor([0.0, 4.0]), torch.tensor([7, 3]))
    merging.add_buffers(0.75, torch.tensor([4.0, 0.0]), torch.tensor([6, 2**62 + 1]))
    merging.merge_buffers_into(value, 1.0)
    assert value.floats.tolist() == [3.0, 1.0]
    assert value.ints.tolist() == [7, 2**62 + 1]
    assert (value.floats.dtype, value.ints.dtype) == (torch.float32, torch.int64)


def test_float_buffers_move_by_the_mass_and_integers_never_go_back() -> None:
    value = _value([8.0], [5])
    merging = FragmentMerge(FragmentSize(elements=0, floats=1, ints=1, frozen=0))
    merging.add_buffers(1.0, torch.tensor([0.0]), torch.tensor([-3]))
    merging.merge_buffers_into(value, 0.25)
    assert value.floats.tolist() == [6.0]
    assert value.ints.tolist() == [5]


@PROPERTY
@given(
    st.lists(st.tuples(st.integers(1, 1000), st.floats(-1e6, 1e6, width=32), st.integers(-(2**63), 2**63 - 1)), min_size=1, max_size=6),
    st.floats(-1e6, 1e6, width=32),
    st.floats(0, 1, exclude_min=True),
)
def test_buffers_equal_the_formula_in_float64(sent: list[tuple[int, float, int]], before: float, mass: float) -> None:
    value = _value([before], [0])
    merging = FragmentMerge(FragmentSize(elements=0, floats=1, ints=1, frozen=0))
    total = sum(weight for weight, _, _ in sent)
    for weight, number, integer in sent:
        merging.add_buffers(weight / total, torch.tensor([number]), torch.tensor([integer]))
    merging.merge_buffers_into(value, mass)
    mean = math.fsum(weight * number for weight, number, _ in sent) / total
    assert math.isclose(value.floats.item(), before + mass * (mean - before), rel_tol=1e-6, abs_tol=1e-6 * 1e6 * 2**-10)
    assert value.ints.item() == max(0, *(integer for _, _, integer in sent))


def test_buffers_of_a_fragment_without_any_stay_empty() -> None:
    value = _value([], [])
    merging = FragmentMerge(FragmentSize(elements=1, floats=0, ints=0, frozen=0))
    merging.add_buffers(1.0, torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    merging.merge_buffers_into(value, 1.0)
    assert (value.floats.numel(), value.ints.numel()) == (0, 0)


# Sums of squares


def _entries(*sizes: int) -> list[LayoutEntry]:
    entries, offset = [], 0
    for i, size in enumerate(sizes):
        entries.append(
            LayoutEntry(
                name=f"w{i}", shape=(size,), dtype="float32", role="parameter", fragment=0, offset=offset, aliases=(), embedding=False
            )
        )
        offset += size
    return entries


@PROPERTY
@given(st.lists(st.integers(0, 50), min_size=1, max_size=5), st.integers(0, 10**6), st.integers(-120, 120))
def test_sums_of_squares_are_those_of_float64(sizes: list[int], seed: int, exponent: int) -> None:
    values = (torch.randn(sum(sizes), generator=torch.Generator().manual_seed(seed)) * 2.0**exponent).float()
    expected = [math.fsum(x * x for x in part.tolist()) for part in values.split(sizes)]
    assert all(math.isclose(a, b, rel_tol=1e-13) for a, b in zip(sum_squares(values, _entries(*sizes)), expected, strict=True))


def test_sums_of_squares_of_large_tensors_are_taken_in_blocks() -> None:
    values = torch.full(((1 << 20) + 3,), 2.0**-70)
    assert sum_squares(values, _entries(len(values))) == (len(values) * 2.0**-140,)


@PROPERTY
@given(st.lists(st.floats(1e-290, 1e290), min_size=1, max_size=4), st.data())
def test_a_lie_of_1e_5_is_caught_and_a_rounding_of_1e_9_is_not(found: list[float], data: st.DataObject) -> None:
    entries = _entries(*[1] * len(found))
    check_sum_squares(found, found, entries)
    check_sum_squares(found, [x * (1 + 1e-9) for x in found], entries)
    check_sum_squares(found, [x * (1 - 1e-9) for x in found], entries)
    at = data.draw(st.integers(0, len(found) - 1))
    for lie in (1 + 1e-5, 1 - 1e-5, 0.0, 2.0, -1.0):
        stated = [x * lie if i == at else x for i, x in enumerate(found)]
        with pytest.raises(IntegrityError) as caught:
            check_sum_squares(found, stated, entries)
        assert caught.value.facts["tensor"] == f"w{at}"


def test_zero_is_zero() -> None:
    entries = _entries(1)
    check_sum_squares([0.0], [0.0], entries)
    check_sum_squares([0.0], [-0.0], entries)
    with pytest.raises(IntegrityError):
        check_sum_squares([0.0], [1e-200], entries)


@pytest.mark.parametrize("found", [math.nan, math.inf])
def test_a_sum_that_is_not_finite_never_agrees(found: float) -> None:
    for stated in (1.0, 0.0, 1.7e308):
        with pytest.raises(IntegrityError):
            check_sum_squares([found], [stated], _entries(1))


@pytest.mark.parametrize("stated", [[], [1.0], [1.0, 1.0, 1.0]])
def test_a_missing_or_further_sum_is_refused(stated: list[float]) -> None:
    with pytest.raises(IntegrityError, match="not one sum of squares for each tensor"):
        check_sum_squares([1.0, 1.0], stated, _entries(1, 1))
