"""Progress of a run and of a learning rate (format §6.4)."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from ps_diloco.layout import FragmentSize, Layout, LayoutEntry
from ps_diloco.progress import LearningRateProgress, fragment_share, join_ramp, model_tokens

PROPERTY = settings(max_examples=100, deadline=None, derandomize=True)

TOKENS = st.floats(0, 1e15)
MOVES = st.lists(st.tuples(TOKENS, TOKENS), max_size=30)


def _layout(*elements: int) -> Layout:
    return Layout(
        fragments=tuple(FragmentSize(elements=n, floats=0, ints=0, frozen=0) for n in elements),
        entries=tuple(
            LayoutEntry(name=f"w{i}", shape=(n,), dtype="float32", role="parameter", fragment=i, offset=0, aliases=(), embedding=False)
            for i, n in enumerate(elements)
        ),
    )


@PROPERTY
@given(st.lists(st.integers(1, 2**30), min_size=1, max_size=8), st.integers(0, 2**50))
def test_a_token_merged_into_every_fragment_is_one_token(elements: list[int], tokens: int) -> None:
    layout = _layout(*elements)
    assert math.isclose(math.fsum(fragment_share(layout, f) for f in range(len(elements))), 1.0, rel_tol=1e-12)
    assert math.isclose(model_tokens(layout, [tokens] * len(elements)), tokens, rel_tol=1e-12)


def test_model_tokens_are_weighted_by_fragment_size() -> None:
    assert model_tokens(_layout(3, 1), [100, 20]) == 80.0
    assert model_tokens(_layout(3, 1), []) == 0.0


@PROPERTY
@given(st.integers(1, 10**15), MOVES)
def test_progress_never_decreases_and_stays_between_0_and_1(target: int, moves: list[tuple[float, float]]) -> None:
    progress = LearningRateProgress(target)
    seen = [progress.update(merged, own) for merged, own in moves]
    assert seen == sorted(seen)
    assert all(0 <= value <= 1 for value in seen)
    if moves:
        assert seen[-1] == min(1.0, max(merged + own for merged, own in moves) / target)


@PROPERTY
@given(st.integers(1, 10**9), st.floats(1, 1e6))
def test_progress_is_clamped_at_the_horizon(target: int, factor: float) -> None:
    assert LearningRateProgress(target).update(target * factor, 0.0) == 1.0
    assert LearningRateProgress(target).update(0.0, target * factor) == 1.0


def test_work_that_becomes_merged_does_not_move_progress_back() -> None:
    progress = LearningRateProgress(1000)
    assert progress.update(100.0, 50.0) == 0.15
    assert progress.update(140.0, 0.0) == 0.15  # ten of the fifty were refused
    assert progress.update(200.0, 0.0) == 0.2


@PROPERTY
@given(MOVES)
def test_without_a_target_there_is_no_progress(moves: list[tuple[float, float]]) -> None:
    progress = LearningRateProgress(None)
    assert all(progress.update(merged, own) == 0.0 for merged, own in moves)


@PROPERTY
@given(st.integers(1, 10**9), MOVES, TOKENS)
def test_a_new_timeline_starts_from_its_own_progress(target: int, moves: list[tuple[float, float]], merged: float) -> None:
    progress = LearningRateProgress(target)
    for before, own in moves:
        progress.update(before, own)
    progress.new_timeline()
    assert progress.update(merged, 0.0) == min(1.0, merged / target)


@PROPERTY
@given(st.integers(0, 10_000), st.integers(1, 20_000))
def test_the_join_ramp_rises_to_1_and_stays(warmup: int, step: int) -> None:
    factor = join_ramp(step, warmup)
    assert 0 < factor <= 1
    assert join_ramp(step + 1, warmup) >= factor
    assert (factor == 1.0) == (step >= warmup)


def test_the_join_ramp_is_k_over_its_length_at_step_k() -> None:
    assert [join_ramp(step, 4) for step in range(1, 7)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert join_ramp(1, 0) == 1.0
