"""The merge: weights, mass, coefficients, buffers, and why the mass is there (format §6.2)."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_diloco.config import MergeSettings, OuterSettings
from ps_diloco.ids import ContributionId
from ps_diloco.layout import FragmentSize
from ps_diloco.merge import (
    MASS_MAX,
    WEIGHTS_NEEDED,
    Candidate,
    FragmentMerge,
    Weighing,
    awaited_units,
    float32,
    mass_of,
    merge_order,
    weigh,
)
from ps_diloco.outer import OuterState, outer_step
from ps_diloco.records import Round

PROPERTY = settings(max_examples=100, deadline=None, derandomize=True)

PLAIN = MergeSettings()
CANDIDATES = st.lists(
    st.builds(
        Candidate,
        id=st.builds(ContributionId, st.just(0), st.sampled_from(["a", "b", "c-1", "c0"]), st.integers(0, 2), st.integers(0, 10**6)),
        tokens=st.integers(1, 10**9),
        steps=st.integers(1, 10**5),
        staleness=st.integers(0, 64),
        lag=st.floats(0, 64),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda candidate: candidate.id,
)
ROUNDS = st.dictionaries(
    st.sampled_from(["a", "b", "x", "y"]),
    st.builds(Round, tokens=st.integers(1, 10**9), fragment_version=st.integers(1, 100)),
)
WEIGHTS = st.lists(st.floats(1e-3, 1e15), max_size=32)


def _candidate(unit: str = "u", *, seq: int = 0, tokens: int = 100, steps: int = 10, staleness: int = 0) -> Candidate:
    return Candidate(id=ContributionId(0, unit, 0, seq), tokens=tokens, steps=steps, staleness=staleness, lag=float(staleness))


def _weigh(
    candidates: Sequence[Candidate],
    *,
    rounds: dict[str, Round] | None = None,
    weights: Sequence[float] = (),
    merge: MergeSettings = PLAIN,
    version: int = 100,
    awaited: int = 0,
) -> Weighing:
    return weigh(candidates, fragment_version=version, rounds=rounds or {}, weights=weights, settings=merge, awaited=awaited)


# Weights and coefficients


@PROPERTY
@given(CANDIDATES, ROUNDS, WEIGHTS, st.randoms(use_true_random=False))
def test_the_order_of_the_candidates_does_not_matter(
    candidates: list[Candidate], rounds: dict[str, Round], weights: list[float], shuffler: random.Random
) -> None:
    weighing = _weigh(candidates, rounds=rounds, weights=weights)
    shuffled = list(candidates)
    shuffler.shuffle(shuffled)
    assert _weigh(shuffled, rounds=rounds, weights=weights) == weighing
    assert list(weighing.candidates) == sorted(candidates, key=merge_order)


@PROPERTY
@given(CANDIDATES, ROUNDS, WEIGHTS, st.floats(1, 100), st.floats(0, 10))
def test_coefficients_are_float32_values_whose_sum_is_at_most_the_mass(
    candidates: list[Candidate], rounds: dict[str, Round], weights: list[float], cap: float, power: float
) -> None:
    weighing = _weigh(candidates, rounds=rounds, weights=weights, merge=MergeSettings(weight_cap=cap, staleness_power=power))
    assert 0 < weighing.mass <= MASS_MAX
    for coefficient in weighing.coefficients:
        assert struct.unpack("<f", struct.pack("<f", coefficient))[0] == coefficient
        assert 0 <= coefficient <= MASS_MAX
    assert math.fsum(weighing.coefficients) <= weighing.mass * (1 + len(candidates) * 2.0**-24)
    assert math.isclose(math.fsum(weighing.shares), 1.0, rel_tol=1e-12)


@PROPERTY
@given(CANDIDATES, ROUNDS, WEIGHTS)
def test_without_staleness_the_coefficients_add_up_to_the_mass(
    candidates: list[Candidate], rounds: dict[str, Round], weights: list[float]
) -> None:
    fresh = [Candidate(id=c.id, tokens=c.tokens, steps=c.steps, staleness=0, lag=0.0) for c in candidates]
    weighing = _weigh(fresh, rounds=rounds, weights=weights)
    assert math.isclose(math.fsum(weighing.coefficients), weighing.mass, rel_tol=1e-6)


@PROPERTY
@given(CANDIDATES)
def test_weights_are_tokens_times_tokens_per_step(candidates: list[Candidate]) -> None:
    weighing = _weigh(candidates)
    assert list(weighing.weights) == [c.tokens * c.tokens / c.steps for c in sorted(candidates, key=merge_order)]


def test_two_units_of_known_size_have_known_coefficients() -> None:
    weighing = _weigh([_candidate("b", tokens=300, steps=30), _candidate("a", tokens=100, steps=10)])
    assert weighing.weights == (1000.0, 3000.0)
    assert weighing.shares == (0.25, 0.75)
    assert weighing.coefficients == (0.25, 0.75)
    assert (weighing.mass, weighing.round_tokens) == (1.0, 400.0)


@PROPERTY
@given(st.integers(0, 64), st.floats(0, 4))
def test_a_lone_stale_contribution_is_shrunk(staleness: int, power: float) -> None:
    weighing = _weigh([_candidate(staleness=staleness)], merge=MergeSettings(staleness_power=power))
    assert weighing.coefficients == (float32((1.0 + staleness) ** -power),)
    assert weighing.mass == 1.0


@PROPERTY
@given(CANDIDATES, st.integers(0, 64))
def test_the_staleness_of_one_does_not_change_the_others(candidates: list[Candidate], staleness: int) -> None:
    first, *others = sorted(candidates, key=merge_order)
    aged = Candidate(id=first.id, tokens=first.tokens, steps=first.steps, staleness=staleness, lag=float(staleness))
    before, after = _weigh([first, *others]), _weigh([aged, *others])
    assert before.coefficients[1:] == after.coefficients[1:]
    assert before.shares == after.shares


@pytest.mark.parametrize("known", range(WEIGHTS_NEEDED + 2))
def test_a_weight_is_capped_once_four_weights_are_known(known: int) -> None:
    candidates = [_candidate("a", tokens=10, steps=10), _candidate("b", tokens=1000, steps=10)]  # w = 10 and 100,000
    weighing = _weigh(candidates, weights=[10.0] * known, merge=MergeSettings(weight_cap=3.0))
    assert weighing.weights == (10.0, 100_000.0), "what the manifest keeps is not capped"
    assert weighing.shares == ((0.25, 0.75) if known >= 4 else (10 / 100_010, 100_000 / 100_010))


@PROPERTY
@given(CANDIDATES, st.lists(st.floats(1e-3, 1e15), min_size=4, max_size=32), st.floats(1, 100))
def test_no_capped_weight_is_above_the_cap(candidates: list[Candidate], weights: list[float], cap: float) -> None:
    weighing = _weigh(candidates, weights=weights, merge=MergeSettings(weight_cap=cap))
    ceiling = cap * float(np.median(weights))
    capped = [min(w, ceiling) for w in weighing.weights]
    total = math.fsum(capped)
    assert all(math.isclose(share, w / total, rel_tol=1e-12) for share, w in zip(weighing.shares, capped, strict=True))


# Mass


def test_the_mass_is_the_part_of_a_round_that_is_merged() -> None:
    rounds = {unit: Round(tokens=100, fragment_version=99) for unit in "abcd"}
    assert _weigh([_candidate("a")], rounds=rounds).mass == 0.25
    assert _weigh([_candidate("a"), _candidate("b")], rounds=rounds).mass == 0.5
    assert _weigh([_candidate(unit) for unit in "abcd"], rounds=rounds).mass == 1.0
    assert _weigh([_candidate("new")], rounds=rounds).mass == 0.2
    assert _weigh([_candidate(unit, seq=seq) for unit in "abcd" for seq in (0, 1)], rounds=rounds).mass == 1.0


def test_a_unit_counts_with_its_last_contribution_this_step_included() -> None:
    rounds = {"a": Round(tokens=900, fragment_version=99), "b": Round(tokens=100, fragment_version=99)}
    assert _weigh([_candidate("a", tokens=100)], rounds=rounds).round_tokens == 200.0
    both = [_candidate("a", seq=1, tokens=300), _candidate("a", seq=0, tokens=100)]
    assert _weigh(both, rounds=rounds).round_tokens == 400.0


def test_a_silent_unit_leaves_the_round_after_the_window() -> None:
    merge = MergeSettings(round_window=16)
    for version, mass in ((84, 1.0), (85, 0.5), (100, 0.5)):
        assert _weigh([_candidate("a")], rounds={"b": Round(tokens=100, fragment_version=version)}, merge=merge, version=100).mass == mass


def test_a_fixed_round_is_used_as_it_is() -> None:
    rounds = {"b": Round(tokens=10**9, fragment_version=99)}
    weighing = _weigh([_candidate("a", tokens=100)], rounds=rounds, merge=MergeSettings(round_tokens=400), awaited=7)
    assert (weighing.mass, weighing.round_tokens) == (0.25, 400.0)
    assert _weigh([_candidate("a", tokens=1000)], merge=MergeSettings(round_tokens=400)).mass == MASS_MAX


def test_units_that_are_awaited_count_in_the_first_window_only() -> None:
    merge = MergeSettings(round_window=16)
    assert _weigh([_candidate("a")], merge=merge, version=0, awaited=3).mass == 0.25
    assert _weigh([_candidate("a"), _candidate("b", tokens=300)], merge=merge, version=15, awaited=2).round_tokens == 400 + 2 * 200
    assert _weigh([_candidate("a")], merge=merge, version=16, awaited=3).mass == 1.0


def test_awaited_are_the_listed_units_never_seen_in_the_fragment() -> None:
    rounds = {"a": Round(tokens=1, fragment_version=1)}
    assert awaited_units([_candidate("b")], ["a", "b", "c", "d"], rounds) == 2
    assert awaited_units([], [], rounds) == 0


@PROPERTY
@given(CANDIDATES, ROUNDS, st.integers(0, 5))
def test_the_mass_can_be_asked_for_alone(candidates: list[Candidate], rounds: dict[str, Round], awaited: int) -> None:
    asked = mass_of(candidates, fragment_version=100, rounds=rounds, settings=PLAIN, awaited=awaited)
    assert asked == _weigh(candidates, rounds=rounds, awaited=awaited).mass
    assert mass_of([], fragment_version=100, rounds=rounds, settings=PLAIN, awaited=awaited) == 0.0


# Split invariance

ELEMENTS = 5
EXACT_ROUND = 2**21  # a power of two, so that tokens / R is a float32 and nothing is rounded


def _step(
    params: torch.Tensor, state: OuterState, weighing: Weighing, deltas: dict[ContributionId, torch.Tensor], outer: OuterSettings
) -> None:
    merging = FragmentMerge(FragmentSize(elements=len(params), floats=0, ints=0, frozen=0), dtype=torch.float64)
    for candidate, coefficient in zip(weighing.candidates, weighing.coefficients, strict=True):
        merging.add_params(coefficient, deltas[candidate.id].clone())
    outer_step(params, state, merging.gradient, outer, torch.clone)


def _run(
    batches: Sequence[Sequence[Candidate]],
    deltas: dict[ContributionId, torch.Tensor],
    *,
    merge: MergeSettings,
    rounds: dict[str, Round],
    listed: Sequence[str] = (),
    version: int = 100,
) -> torch.Tensor:
    """Parameters after one outer step at mu = 0 for each batch of contributions."""
    params, state = torch.ones(ELEMENTS, dtype=torch.float64), OuterState.zeros(ELEMENTS, dtype=torch.float64)
    for batch in batches:
        awaited = awaited_units(batch, listed, rounds)
        weighing = weigh(batch, fragment_version=version, rounds=rounds, weights=(), settings=merge, awaited=awaited)
        _step(params, state, weighing, deltas, OuterSettings(lr=0.7, momentum=0.0))
        version += 1
        rounds = {**rounds, **{c.id.unit: Round(tokens=c.tokens, fragment_version=version) for c in batch}}
    return params


def _deltas(candidates: Sequence[Candidate], seed: int) -> dict[ContributionId, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {c.id: torch.randn(ELEMENTS, dtype=torch.float64, generator=generator) for c in candidates}


def _splits(candidates: Sequence[Candidate], cuts: Sequence[int]) -> list[Sequence[Candidate]]:
    borders = [0, *sorted({cut % len(candidates) for cut in cuts} - {0}), len(candidates)]
    return [candidates[a:b] for a, b in zip(borders, borders[1:], strict=False)]


@PROPERTY
@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 2**17), st.integers(0, 3)), min_size=1, max_size=12),
    st.lists(st.integers(0, 11), max_size=4),
    st.integers(0, 10**6),
)
def test_contributions_merged_in_one_step_or_in_many_give_the_same_parameters(
    drawn: list[tuple[str, int, int]], cuts: list[int], seed: int
) -> None:
    """Fixed round, equal tokens per step, the same staleness whenever merged."""
    candidates = [_candidate(unit, seq=i, tokens=tokens * 8, steps=tokens, staleness=age) for i, (unit, tokens, age) in enumerate(drawn)]
    merge = MergeSettings(round_tokens=16 * EXACT_ROUND, staleness_power=2.0)
    candidates = [c for c in candidates if (c.lag + 1) in (1, 2, 4)]  # whose factor is exact too
    if not candidates:
        return
    deltas = _deltas(candidates, seed)
    at_once = _run([candidates], deltas, merge=merge, rounds={})
    one_by_one = _run([[c] for c in candidates], deltas, merge=merge, rounds={})
    in_parts = _run(_splits(candidates, cuts), deltas, merge=merge, rounds={})
    torch.testing.assert_close(one_by_one, at_once, rtol=0, atol=1e-9)
    torch.testing.assert_close(in_parts, at_once, rtol=0, atol=1e-9)


@PROPERTY
@given(st.lists(st.integers(1, 2**16), min_size=1, max_size=12), st.lists(st.integers(0, 11), max_size=4), st.integers(0, 10**6))
def test_a_learned_round_is_split_invariant_too(tokens: list[int], cuts: list[int], seed: int) -> None:
    sizes = [*tokens, EXACT_ROUND // 2 - sum(tokens)]
    candidates = [_candidate(f"u{i:02d}", tokens=2 * n, steps=n) for i, n in enumerate(sizes)]
    rounds = {c.id.unit: Round(tokens=c.tokens, fragment_version=100) for c in candidates}
    deltas = _deltas(candidates, seed)
    at_once = _run([candidates], deltas, merge=PLAIN, rounds=rounds)
    one_by_one = _run([[c] for c in candidates], deltas, merge=PLAIN, rounds=rounds)
    torch.testing.assert_close(one_by_one, at_once, rtol=0, atol=1e-9)
    torch.testing.assert_close(_run(_splits(candidates, cuts), deltas, merge=PLAIN, rounds=rounds), at_once, rtol=0, atol=1e-9)
    plain_mean = sum(deltas[c.id] * c.tokens for c in candidates) / EXACT_ROUND
    torch.testing.assert_close(at_once, 1.0 - 0.7 * plain_mean, rtol=0, atol=1e-9)


@pytest.mark.parametrize("units", [2, 4, 8])
def test_the_first_round_of_a_run_is_split_invariant_for_equal_units(units: int) -> None:
    candidates = [_candidate(f"u{i}") for i in range(units)]
    listed = [c.id.unit for c in candidates]
    deltas = _deltas(candidates, 1)
    at_once = _run([candidates], deltas, merge=PLAIN, rounds={}, listed=listed, version=0)
    one_by_one = _run([[c] for c in candidates], deltas, merge=PLAIN, rounds={}, listed=listed, version=0)
    torch.testing.assert_close(one_by_one, at_once, rtol=0, atol=1e-9)


@PROPERTY
@given(CANDIDATES)
def test_the_sum_of_coefficients_is_split_invariant_for_any_batch_sizes(candidates: list[Candidate]) -> None:
    merge = MergeSettings(round_tokens=8 * 10**9, staleness_power=0.0)
    at_once = math.fsum(_weigh(candidates, merge=merge).coefficients)
    assert math.isclose(at_once, math.fsum(_weigh([c], merge=merge).coefficients[0] for c in candidates), rel_tol=1e-6)


# Why the mass is there


def _noisy_quadratic(*, mass_is_one: bool, arrivals: int = 200) -> list[float]:
    """Losses of the global parameters: 4 units train on a noisy quadratic and are merged one at a time (quorum 1), each 3 steps stale."""
    torch.manual_seed(0)
    elements, units, inner_steps, inner_lr = 16, 4, 20, 0.05
    curvature = torch.linspace(0.5, 2.0, elements, dtype=torch.float64)
    params, state = torch.ones(elements, dtype=torch.float64), OuterState.zeros(elements, dtype=torch.float64)
    bases = [params.clone() for _ in range(units)]
    rounds: dict[str, Round] = {}
    losses = [(curvature * params.square()).sum().item()]
    for arrival in range(arrivals):
        unit = arrival % units
        local = bases[unit].clone()
        for _ in range(inner_steps):
            local -= inner_lr * (curvature * local + 0.1 * torch.randn(elements, dtype=torch.float64))
        candidate = _candidate(f"u{unit}", seq=arrival, staleness=min(arrival, units - 1))
        weighing = weigh(
            [candidate],
            fragment_version=arrival,
            rounds=rounds,
            weights=(),
            settings=PLAIN,
            awaited=awaited_units([candidate], [f"u{i}" for i in range(units)], rounds),
        )
        delta = (bases[unit] - local) / (weighing.mass if mass_is_one else 1.0)
        _step(params, state, weighing, {candidate.id: delta}, OuterSettings(lr=0.7, momentum=0.5))
        rounds[candidate.id.unit] = Round(tokens=candidate.tokens, fragment_version=arrival + 1)
        bases[unit] = params.clone()
        losses.append((curvature * params.square()).sum().item())
    return losses


def test_quorum_one_converges_because_the_mass_scales_each_arrival() -> None:
    losses = _noisy_quadratic(mass_is_one=False)
    assert max(losses) == losses[0]
    assert max(losses[-50:]) < 0.02 * losses[0]


def test_without_the_mass_the_same_run_diverges() -> None:
    losses = _noisy_quadratic(mass_is_one=True)
    assert min(losses[-50:]) > 100 * losses[0]
