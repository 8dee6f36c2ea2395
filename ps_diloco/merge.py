"""The merge of one fragment's contributions into one pseudo-gradient (format §6.2). Pure: no I/O, no clock.

::

    weighing = weigh(candidates, fragment_version=7, rounds=entry.rounds, weights=entry.weights, settings=settings)
    merging = FragmentMerge(size)
    for ... in zip(weighing.candidates, weighing.coefficients, weighing.shares):      # in merge order
        shard.visit("params", merging.adding(coefficient))
        merging.add_buffers(share, floats_B, ints_I)
    gradient_F = merging.gradient                                                     # descends
"""

from __future__ import annotations

import math
import statistics
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ps_diloco.arrays import PIECE, pieces, zeros
from ps_diloco.config import MergeSettings
from ps_diloco.errors import IntegrityError
from ps_diloco.fragment import FragmentValue
from ps_diloco.ids import ContributionId
from ps_diloco.layout import FragmentSize, LayoutEntry
from ps_diloco.records import Round

WEIGHTS_KEPT = 32
MASSES_KEPT = 64
MASS_MAX = 1.0
"""One step never moves by more than a round, however much arrives at once after an outage."""
WEIGHTS_NEEDED = 4
DOT_AT_ONCE = 1 << 13
"""Float64 of one dot product: below 10,000, where OpenBLAS begins to spread it over threads (and the order of summation would depend on their number)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """What the merge needs to know of a contribution before it sees its values.

    ``staleness`` in outer steps of the fragment; ``lag`` in rounds, see :func:`lag_of`.
    """

    id: ContributionId
    tokens: int
    steps: int
    staleness: int
    lag: float


def lag_of(staleness: int, masses: Sequence[float]) -> float:
    """Rounds that were merged since a contribution's base, beyond the first one.

    Measured in mass and not in steps, so that it does not matter in how many steps a round arrives; and one round is free, because in a synchronous round,
    too, each contribution is made beside all the others. ``masses``: those of the fragment's last steps, newest last.
    """
    return max(0.0, math.fsum(masses[-staleness:]) - 1.0) if staleness else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Weighing:
    """Result of :func:`weigh`, in merge order. ``coefficients`` are exact float32 values and multiply the decoded values.

    ``shares`` sum to 1 and average the float buffers; ``weights`` are the uncapped w_i that the manifest keeps.
    """

    candidates: tuple[Candidate, ...]
    weights: tuple[float, ...]
    shares: tuple[float, ...]
    coefficients: tuple[float, ...]
    mass: float
    round_tokens: float


def float32(value: float) -> float:
    """``value`` rounded to the nearest float32."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def merge_order(candidate: Candidate) -> tuple[str, int, int]:
    return (candidate.id.unit, candidate.id.incarnation, candidate.id.seq)


def weigh(
    candidates: Sequence[Candidate],
    *,
    fragment_version: int,
    rounds: Mapping[str, Round],
    weights: Sequence[float],
    settings: MergeSettings,
    awaited: int = 0,
) -> Weighing:
    """Weights, mass and coefficients of contributions to merge into one outer step of a fragment that stands at ``fragment_version``.

    w = min(tokens^2 / steps, cap x recent median) (Decoupled DiLoCo, capped); the staleness factor (1 + lag)^-p stands in the numerator only; the mass
    a = min(1, tokens / R) keeps n steps of one contribution equal to one step of n (format §6.2). ``awaited``: units that are listed but have not been merged
    into this fragment yet; in its first ``round_window`` steps R counts each of them like the mean of those present, else a run's first round would be taken
    once per arrival at full length.
    """
    ordered = tuple(sorted(candidates, key=merge_order))
    raw = [c.tokens**2 / c.steps for c in ordered]
    ceiling = settings.weight_cap * statistics.median(weights) if len(weights) >= WEIGHTS_NEEDED else math.inf
    capped = [min(w, ceiling) for w in raw]
    total = math.fsum(capped)
    tokens = sum(c.tokens for c in ordered)
    round_tokens = float(settings.round_tokens or _round_tokens(ordered, fragment_version, rounds, settings.round_window, awaited))
    mass = min(MASS_MAX, tokens / round_tokens)
    shares = [w / total for w in capped]
    return Weighing(
        candidates=ordered,
        weights=tuple(raw),
        shares=tuple(shares),
        coefficients=tuple(
            float32(mass * (1.0 + c.lag) ** -settings.staleness_power * share) for c, share in zip(ordered, shares, strict=True)
        ),
        mass=mass,
        round_tokens=round_tokens,
    )


def mass_of(
    candidates: Sequence[Candidate], *, fragment_version: int, rounds: Mapping[str, Round], settings: MergeSettings, awaited: int = 0
) -> float:
    """The mass a that merging ``candidates`` would have; 0 for none."""
    if not candidates:
        return 0.0
    return weigh(candidates, fragment_version=fragment_version, rounds=rounds, weights=(), settings=settings, awaited=awaited).mass


def awaited_units(candidates: Sequence[Candidate], listed: Iterable[str], rounds: Mapping[str, Round]) -> int:
    """Listed units that neither take part now nor ever did in this fragment."""
    return len(set(listed) - set(rounds) - {c.id.unit for c in candidates})


def _round_tokens(candidates: Sequence[Candidate], fragment_version: int, rounds: Mapping[str, Round], window: int, awaited: int) -> float:
    last = {unit: r.tokens for unit, r in rounds.items() if r.fragment_version > fragment_version - window}
    last.update({c.id.unit: c.tokens for c in candidates})
    present = [c.tokens for c in candidates]
    expected = awaited * math.fsum(present) / len(present) if fragment_version < window else 0.0
    return sum(last.values()) + expected


class FragmentMerge:
    """Streaming accumulator of one fragment: memory is one array, flat in the number of contributions. ``gradient``: memory for it, whatever it holds."""

    def __init__(self, size: FragmentSize, *, dtype: torch.dtype = torch.float32, gradient: torch.Tensor | None = None) -> None:
        self.gradient = zeros(size.elements, dtype) if gradient is None else gradient.zero_()
        self._floats = torch.zeros(size.floats, dtype=torch.float64)
        self._ints: torch.Tensor | None = None

    def add_params(self, coefficient: float, delta_F: torch.Tensor, start: int = 0) -> None:
        """``gradient[start:start+n] += coefficient * delta``, multiply and add rounded apart. Overwrites ``delta_F``. Threads may add disjoint parts."""
        self.gradient[start : start + delta_F.numel()].add_(delta_F.mul_(coefficient))

    def adding(self, coefficient: float) -> Callable[[int, torch.Tensor], None]:
        """:meth:`add_params` for a shard's pieces as they come."""
        return lambda start, delta_P: self.add_params(coefficient, delta_P, start)

    def add_buffers(self, share: float, floats_B: torch.Tensor, ints_I: torch.Tensor) -> None:
        """Add one contribution's buffers: weighted mean of floats, maximum of integers."""
        self._floats.add_(floats_B.to(torch.float64).mul_(share))
        self._ints = ints_I.clone() if self._ints is None else torch.maximum(self._ints, ints_I)

    def merge_buffers_into(self, value: FragmentValue, mass: float) -> None:
        """Write the merged buffers into the global value."""
        moved = value.floats.to(torch.float64)
        moved.add_((self._floats - moved).mul_(mass))
        value.floats.copy_(moved)
        if self._ints is not None:
            value.ints.copy_(torch.maximum(value.ints, self._ints))


def sum_squares(values_F: torch.Tensor, entries: Sequence[LayoutEntry]) -> tuple[float, ...]:
    """Float64 sum of squares of each parameter entry of a fragment (format §5.6)."""
    sums = SumSquares(entries)
    for start, values_P in pieces(values_F, 4 * PIECE):
        sums.add(start, values_P)
    return sums.totals()


class SumSquares:
    """The sums of :func:`sum_squares` from pieces that come in any order, also from several threads::

        sums = SumSquares(entries)
        shard.visit("params", sums.add)
        check_sum_squares(sums.totals(), record.sum_squares, entries)

    Squares are added up in float64 within a piece, and pieces with ``math.fsum``, which rounds once: neither order nor threads change a bit of the result,
    and it is within 2^-39 of the exact one.
    """

    def __init__(self, entries: Sequence[LayoutEntry]) -> None:
        self._ends = [entry.offset + entry.size for entry in entries]  # ascending: entries are in offset order and leave no gap
        self._parts: list[list[float]] = [[] for _ in entries]

    def add(self, start: int, values_P: torch.Tensor) -> None:
        """Count values whose first one is element ``start`` of the fragment."""
        values = values_P.numpy().astype(np.float64)
        position, index = 0, bisect_right(self._ends, start)
        while position < values.size:
            end, parts = min(self._ends[index] - start, values.size), self._parts[index]
            for first in range(position, end, DOT_AT_ONCE):
                part = values[first : min(first + DOT_AT_ONCE, end)]
                parts.append(part.dot(part))
            position, index = end, index + 1

    def totals(self) -> tuple[float, ...]:
        """One sum for each entry."""
        return tuple(map(math.fsum, self._parts))


def check_sum_squares(found: Sequence[float], stated: Sequence[float], entries: Sequence[LayoutEntry]) -> None:
    """Raise :class:`IntegrityError` naming the first tensor whose stated sum of squares is not the decoded one."""
    if len(stated) != len(entries):
        raise IntegrityError("there is not one sum of squares for each tensor", stated=len(stated), tensors=len(entries))
    for entry, mine, theirs in zip(entries, found, stated, strict=True):
        if not (math.isfinite(mine) and abs(mine - theirs) <= 1e-6 * max(abs(mine), abs(theirs)) + 1e-300):
            raise IntegrityError("stated sum of squares is not that of the values", tensor=entry.name, stated=theirs, found=mine)
