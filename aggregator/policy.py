"""When does a fragment step, and with whom (format §6.2, §7.4 step 5). Pure: one process's monotonic clock comes in as a number."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from aggregator.admit import Admitted
from ps_diloco.config import MergeSettings
from ps_diloco.errors import ConfigError
from ps_diloco.ids import ContributionId
from ps_diloco.merge import awaited_units, mass_of
from ps_diloco.records import Closed, FragmentEntry, Manifest

Force = Literal["once", "drain"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """A fragment that steps now: with all of ``members``, because of ``closed``."""

    closed: Closed
    members: tuple[Admitted, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    windows: dict[int, Window]
    wake_at_s: float | None
    """When a window closes by time alone, if nothing else comes; None if nothing is pending."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The share of one of ``of`` processes: fragments whose number is ``index`` modulo ``of`` are its own.

    Other fragments it leaves to the others, unless one could have stepped for ``patience_s`` and nobody did it. Nobody has to agree on anything: two
    processes that step the same fragment race for the commit, and one of them has worked in vain.
    """

    index: int = 0
    of: int = 1
    patience_s: float = 10.0

    @staticmethod
    def parse(text: str, *, patience_s: float) -> Part:
        """``2/3`` is the second of three. Raises :class:`ConfigError`."""
        match = re.fullmatch(r"([1-9][0-9]{0,3})/([1-9][0-9]{0,3})", text, re.ASCII)
        if match is None or int(match[1]) > int(match[2]):
            remedy = "write --part 1/2 for the first of two processes"
            raise ConfigError("a part is I/N with I from 1 to N", part=repr(text), remedy=remedy)
        return Part(index=int(match[1]) - 1, of=int(match[2]), patience_s=patience_s)

    def owns(self, fragment: int) -> bool:
        return fragment % self.of == self.index


WHOLE = Part()


def in_line(pending: Sequence[Admitted], waiting: Collection[ContributionId]) -> list[Admitted]:
    """``pending`` without those that wait to be read again, and without what stands behind one of them: decisions of a unit within a fragment keep
    the order of seq (I5)."""
    ready: list[Admitted] = []
    blocked: set[tuple[str, int]] = set()
    for admitted in sorted(pending, key=lambda a: a.candidate.id):
        line = (admitted.record.unit, admitted.record.fragment)
        if admitted.candidate.id in waiting:
            blocked.add(line)
        if line not in blocked:
            ready.append(admitted)
    return ready


def plan_windows(
    pending: Sequence[Admitted],
    head: Manifest,
    settings: MergeSettings,
    *,
    now_s: float,
    fenced: Collection[str] = (),
    force: Force | None = None,
) -> Plan:
    """Decide per fragment. ``fenced``: units whose next incarnation is about to be listed, so that their pending work is merged now or never."""
    windows: dict[int, Window] = {}
    wake: list[float] = []
    for fragment, entry in enumerate(head.fragments):
        members = tuple(a for a in pending if a.record.fragment == fragment)
        if not members:
            continue
        closed, at_s = _close(members, entry, head.units, settings, fenced, force, now_s)
        if closed is not None:
            windows[fragment] = Window(closed=closed, members=members)
        else:
            wake.append(at_s)
    return Plan(windows=windows, wake_at_s=min(wake) if wake else None)


def leave_to_others(
    plan: Plan,
    head: Manifest,
    part: Part,
    ready_since_s: Mapping[tuple[int, int], float],
    now_s: float,
    taken_over: Collection[int] = (),
) -> tuple[Plan, dict[tuple[int, int], float]]:
    """``plan`` without the windows that another process's part has and has not had for too long; and since when each of those was ready.

    ``ready_since_s``: what the call before gave back, by (fragment, fragment version). ``taken_over``: fragments whose last step was ours although they are
    another's, who therefore is not waited for again.
    """
    windows, waiting = {}, {}
    for fragment, window in plan.windows.items():
        place = (fragment, head.fragments[fragment].fragment_version)
        since_s = ready_since_s.get(place, now_s)
        if part.owns(fragment) or fragment in taken_over or now_s - since_s >= part.patience_s:
            windows[fragment] = window
        else:
            waiting[place] = since_s
    wake = [since_s + part.patience_s for since_s in waiting.values()] + ([] if plan.wake_at_s is None else [plan.wake_at_s])
    return Plan(windows=windows, wake_at_s=min(wake) if wake else None), waiting


def _close(
    members: tuple[Admitted, ...],
    entry: FragmentEntry,
    listed: Mapping[str, object],
    settings: MergeSettings,
    fenced: Collection[str],
    force: Force | None,
    now_s: float,
) -> tuple[Closed | None, float]:
    """(why the window closes now or None, when it closes by time alone)."""
    if force is not None:
        return force, now_s
    if any(a.record.unit in fenced for a in members):
        return "fence", now_s
    present = {a.record.unit for a in members}
    active = {unit for unit, r in entry.rounds.items() if r.fragment_version > entry.fragment_version - settings.round_window}
    awaited = set(listed) - set(entry.rounds) if entry.fragment_version < settings.round_window else set()
    if len(present) >= settings.quorum and active | awaited <= present:
        return "everyone", now_s
    oldest_s = min(a.first_seen_s for a in members)
    quorum_at = _reached(members, lambda seen: len({a.record.unit for a in seen}) >= settings.quorum)
    mass_at = _reached(members, lambda seen: _mass(seen, entry, listed, settings) >= settings.merge_at_least)
    enough_s = oldest_s + settings.merge_wait_s_max if mass_at is None else mass_at + settings.grace_s_max
    closes_s = oldest_s + settings.quorum_s_max if quorum_at is None else max(enough_s, quorum_at)
    if now_s < closes_s:
        return None, closes_s
    return ("mass" if quorum_at is not None and mass_at is not None else "waited"), now_s


def _mass(seen: Sequence[Admitted], entry: FragmentEntry, listed: Mapping[str, object], settings: MergeSettings) -> float:
    candidates = [a.candidate for a in seen]
    awaited = awaited_units(candidates, listed, entry.rounds)
    return mass_of(candidates, fragment_version=entry.fragment_version, rounds=entry.rounds, settings=settings, awaited=awaited)


def _reached(members: Sequence[Admitted], enough: Callable[[Sequence[Admitted]], bool]) -> float | None:
    """When, in order of arrival, the members were enough; None if they are not."""
    ordered = sorted(members, key=lambda a: a.first_seen_s)
    for count in range(1, len(ordered) + 1):
        if enough(ordered[:count]):
            return ordered[count - 1].first_seen_s
    return None
