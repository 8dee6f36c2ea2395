"""One pass of the aggregator, top to bottom (format §7.4): head, inbox, admit, plan, merge, outer step, write, commit.

The aggregator has no state of its own: whatever this process remembers (:class:`_Memory`, the inbox) only saves reads, and any other process that starts
now does the same from the bucket alone. Killed at any point it leaves the old version or the new one, whole, and at worst some objects nobody names.
"""

from __future__ import annotations

import logging
import math
import threading
from dataclasses import dataclass, field
from typing import Literal

import torch

from aggregator.admit import Admitted, Loaded, Refusal, admit, load
from aggregator.next_manifest import Draft, Refusing, Stepped, next_manifest, rounds_after
from aggregator.policy import Force, Plan, Window, in_line, plan_windows
from ps_diloco import keys
from ps_diloco.checkpoint import Place, read_fragment, read_state, write_anchor, write_delta, write_state
from ps_diloco.codecs import check_finite
from ps_diloco.config import RunSettings
from ps_diloco.errors import Denied, FormatError, NonFinite, NotFound, StoreError
from ps_diloco.fragment import FragmentValue
from ps_diloco.ids import ContributionId
from ps_diloco.inbox import Inbox
from ps_diloco.merge import MASSES_KEPT, WEIGHTS_KEPT, FragmentMerge, Weighing, awaited_units, sum_squares, weigh
from ps_diloco.outer import OuterState, outer_step
from ps_diloco.records import Closed, Contribution, Delta, FragmentEntry, Incarnation, Manifest, Stored
from ps_diloco.run import OpenRun, fingerprint
from ps_diloco.shard import Section, encode_section
from ps_diloco.transition import check_transition

log = logging.getLogger(__name__)

TRIES_MAX = 3
TRY_EVERY_S = 5.0
DISCOVER_EVERY_S = 5.0
DISCOVER_EARLY_EVERY_S = 1.0
EARLY_VERSIONS = 20
"""A run's units come one after the other at its beginning."""
HINT_EVERY_S = 1.0


class Stopped(Exception):
    """The pass was given up because the process is to end; nothing was committed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a pass did. ``wake_at_s``: when a window closes by time alone (this process's monotonic clock)."""

    kind: Literal["committed", "idle", "overtaken", "final"]
    head: Stored[Manifest]
    wake_at_s: float | None = None


@dataclass(kw_only=True)
class _Memory:
    """What saves reads, and nothing else."""

    head: Stored[Manifest] | None = None
    settings: dict[int, RunSettings] = field(default_factory=dict)
    config: int = 0
    fragments: dict[int, tuple[FragmentEntry, FragmentValue, OuterState]] = field(default_factory=dict)
    arrivals: dict[str, Incarnation] = field(default_factory=dict)
    discovered_at_s: float = -math.inf
    hinted_at_s: float = -math.inf
    hinted: str = ""
    try_at_s: dict[ContributionId, float] = field(default_factory=dict)


class Aggregator:
    """Takes outer steps. One thread; any number of processes may run it on one run."""

    def __init__(self, run: OpenRun, *, stop: threading.Event | None = None) -> None:
        self._run = run
        self._inbox = Inbox(run)
        self._memory = _Memory()
        self._stop = stop or threading.Event()

    def take_pass(self, *, force: Force | None = None) -> Outcome:
        """Do all that can be done now, in one commit. Does I/O.

        Raises the store's errors when the bucket is away (nothing is lost, call again), :class:`FormatError` when the run itself is damaged, and
        :class:`Stopped`.
        """
        # head
        head = self._memory.head = self._run.log.find_head(self._memory.head)
        if head.record.final:
            self._hint(head)
            return Outcome(kind="final", head=head)
        # inbox
        self._discover(head.record, now=force is not None)
        settings = self._settings(self._memory.config)
        incoming = self._inbox.refresh(head.record)
        # admit
        draft = Draft(config=self._memory.config)
        pending: list[Admitted] = []
        for arrived in incoming:
            answer = admit(arrived, head.record, self._run.record)
            if isinstance(answer, Refusal):
                self._refuse(draft, arrived.id, answer, arrived.record)
            else:
                pending.append(answer)
        # plan
        if settings.target_tokens is not None and head.record.tokens >= settings.target_tokens:
            force, draft.final = "drain", True
        fenced = [unit for unit in self._memory.arrivals if unit in head.record.units]
        plan = self._plan(pending, head.record, settings, fenced, force)
        # merge, outer step, write
        for fragment, window in plan.windows.items():
            stepped = self._step(head.record, fragment, window, settings, draft)
            if stepped is not None:
                draft.stepped.append(stepped)
        # commit
        self._list_arrivals(draft, {a.candidate.id for a in pending})
        draft.keep_order([(arrived.id, arrived.record.fragment if arrived.record else None) for arrived in incoming])
        if not draft.worth_committing(head.record):
            self._hint(head)
            return Outcome(kind="idle", head=head, wake_at_s=plan.wake_at_s)
        return self._commit(head, draft)

    def _discover(self, head: Manifest, *, now: bool) -> None:
        """Look for new units, incarnations and settings, now and then: this is the only listing of a pass."""
        clock_s = self._run.env.clock.monotonic()
        self._memory.arrivals = {
            unit: record
            for unit, record in self._memory.arrivals.items()
            if unit not in head.units or head.units[unit].incarnation < record.incarnation
        }
        self._memory.config = max(self._memory.config, head.config)
        every_s = DISCOVER_EARLY_EVERY_S if head.version < EARLY_VERSIONS else DISCOVER_EVERY_S
        if not now and clock_s - self._memory.discovered_at_s < every_s:
            return
        self._memory.discovered_at_s = clock_s
        try:
            self._memory.arrivals.update(self._inbox.discover(head))
            while (settings := self._run.config_if_any(self._memory.config + 1)) is not None:
                self._memory.config += 1
                self._memory.settings[self._memory.config] = settings
        except StoreError as error:  # those who are known go on
            log.warning("cannot look for new units and settings now: %s", error)

    def _settings(self, n: int) -> RunSettings:
        if n not in self._memory.settings:
            self._memory.settings[n] = self._run.config(n)
        return self._memory.settings[n]

    def _plan(self, pending: list[Admitted], head: Manifest, settings: RunSettings, fenced: list[str], force: Force | None) -> Plan:
        now_s = self._run.env.clock.monotonic()
        ready = in_line(pending, {c for c, at_s in self._memory.try_at_s.items() if at_s > now_s})
        return plan_windows(ready, head, settings.merge, now_s=now_s, fenced=fenced, force=force)

    def _step(self, head: Manifest, fragment: int, window: Window, settings: RunSettings, draft: Draft) -> Stepped | None:
        """Merge a window into one outer step of a fragment; None if none of its contributions could be used."""
        before = head.fragments[fragment]
        members = list(window.members)
        while members:
            weighing = weigh(
                [a.candidate for a in members],
                fragment_version=before.fragment_version,
                rounds=before.rounds,
                weights=before.weights,
                settings=settings.merge,
                awaited=awaited_units([a.candidate for a in members], head.units, before.rounds),
            )
            merging = self._merge(head, fragment, members, weighing, draft)
            if merging is None:
                continue  # somebody could not be used: weights change, start again without them
            try:
                return self._outer_step(head, fragment, window.closed, members, weighing, merging, settings)
            except NonFinite as error:
                largest = max(members, key=lambda a: math.fsum(a.record.sum_squares))
                members.remove(largest)
                refusal = Refusal(
                    reason="norm", detail=f"the merged update is not finite; this contribution has the largest norm ({error})"
                )
                self._refuse(draft, largest.candidate.id, refusal, largest.record)
        return None

    def _merge(self, head: Manifest, fragment: int, members: list[Admitted], weighing: Weighing, draft: Draft) -> FragmentMerge | None:
        """Stream the members one at a time, in merge order. None if one of them had to be left out; it then is no member any more."""
        merging = FragmentMerge(self._run.layout.fragments[fragment])
        by_id = {a.candidate.id: a for a in members}
        for candidate, coefficient, share in zip(weighing.candidates, weighing.coefficients, weighing.shares, strict=True):
            if self._stop.is_set():
                raise Stopped
            admitted = by_id[candidate.id]
            try:
                answer: Loaded | Refusal | None = load(self._run, admitted)
            except (NotFound, Denied) as error:  # some stores deny what is absent, and what stays denied must not block its unit for ever
                answer = self._absent(head, candidate.id, draft, error)
            except StoreError as error:
                log.warning("contribution %s cannot be read now and waits: %s", candidate.id, error)
                answer = None
            if isinstance(answer, Loaded):
                merging.add_buffers(share, answer.floats_B, answer.ints_I)
                merging.add_params(coefficient, answer.delta_F)
                continue
            if answer is not None:
                self._refuse(draft, candidate.id, answer, admitted.record)
                members.remove(admitted)
            else:  # it stays undecided, and so do the unit's later ones of this fragment (I5)
                members[:] = [a for a in members if a.record.unit != candidate.id.unit or a.candidate.id.seq < candidate.id.seq]
            return None
        return merging

    def _absent(self, head: Manifest, contribution: ContributionId, draft: Draft, error: StoreError) -> Refusal | None:
        """An object that a record names is not there: tried again a few times, counted in the manifest, then refused."""
        tries = head.units[contribution.unit].tries.get(str(contribution.seq), 0) + 1
        if tries >= TRIES_MAX:
            return Refusal(reason="missing", detail=str(error)[:1900])
        draft.tries[contribution] = tries
        self._memory.try_at_s[contribution] = self._run.env.clock.monotonic() + TRY_EVERY_S
        return None

    def _outer_step(
        self,
        head: Manifest,
        fragment: int,
        closed: Closed,
        members: list[Admitted],
        weighing: Weighing,
        merging: FragmentMerge,
        settings: RunSettings,
    ) -> Stepped:
        before = head.fragments[fragment]
        version = before.fragment_version + 1
        value, state = self._load(fragment, before)
        update: list[Section] = []

        def quantise(x_F: torch.Tensor) -> torch.Tensor:
            update_F = torch.empty_like(x_F)
            update.append(encode_section("params", settings.pull.codec, x_F, decoded=update_F))
            return update_F

        update_F = outer_step(value.params, state, merging.gradient, settings.outer, quantise)
        check_finite(value.params)
        merging.merge_buffers_into(value, weighing.mass)
        where = Place(timeline=head.timeline, fragment=fragment, fragment_version=version)
        delta = write_delta(self._run, where, params=update[0], floats_B=value.floats, ints_I=value.ints)
        saved = write_state(self._run, where, state)
        anchor, deltas = before.anchor, before.deltas
        if version - anchor.fragment_version >= settings.pull.anchor_every:
            deltas = tuple(d for d in deltas if d.fragment_version > anchor.fragment_version)
            anchor = write_anchor(self._run, where, value)
        digest = value.sha256()
        after = FragmentEntry(
            fragment_version=version,
            sha256=digest,
            anchor=anchor,
            deltas=(*deltas, Delta(fragment_version=version, sha256=digest, object=delta)),
            state=saved,
            tokens=before.tokens + sum(a.record.tokens for a in members),
            rounds=rounds_after(before, weighing, settings.merge.round_window),
            weights=(*before.weights, *weighing.weights)[-WEIGHTS_KEPT:],
            masses=(*before.masses, weighing.mass)[-MASSES_KEPT:],
        )
        self._memory.fragments[fragment] = (after, value, state)
        return Stepped(
            fragment=fragment,
            before=before,
            after=after,
            closed=closed,
            weighing=weighing,
            members=tuple(members),
            gradient_norm=_norm(merging.gradient, self._run, fragment),
            update_norm=_norm(update_F, self._run, fragment),
        )

    def _load(self, fragment: int, entry: FragmentEntry) -> tuple[FragmentValue, OuterState]:
        """Theta, m and e as they are in ``entry``: remembered, or read. The caller changes them, so they are no longer remembered."""
        known = self._memory.fragments.pop(fragment, None)
        if known is not None and known[0] == entry:
            return known[1], known[2]
        if (entry.state.fragment_version if entry.state else 0) != entry.fragment_version:
            raise FormatError(
                "the outer state of a fragment is not saved at its version", fragment=fragment, fragment_version=entry.fragment_version
            )
        held = None  # what a lost race left in memory is on no chain
        if known is not None and any((d.fragment_version, d.sha256) == (known[0].fragment_version, known[0].sha256) for d in entry.deltas):
            held = (known[0].fragment_version, known[1])
        return read_fragment(self._run, entry, fragment, held=held), read_state(self._run, fragment, entry.state)

    def _list_arrivals(self, draft: Draft, pending: set[ContributionId]) -> None:
        """List new incarnations. One whose predecessor still has undecided work that cannot be read now waits for it (I6)."""
        undecided = {c.unit for c in pending - draft.decided} | self._inbox.unread
        draft.listed = {unit: record for unit, record in self._memory.arrivals.items() if unit not in undecided}

    def _refuse(self, draft: Draft, contribution: ContributionId, refusal: Refusal, record: Contribution | None) -> None:
        draft.refused[contribution] = Refusing(refusal=refusal, record=record)
        log.warning("refused %s: %s: %s", contribution, refusal.reason, refusal.detail)

    def _commit(self, head: Stored[Manifest], draft: Draft) -> Outcome:
        """Claim the next number; when another process took it but touched nothing of ours, the one after it with the same outputs."""
        env = self._run.env
        while True:
            manifest = next_manifest(
                head,
                draft,
                self._run.layout,
                attempt=env.entropy.attempt_id(),
                created_at=env.clock.wall_text(),
                fingerprint=fingerprint(),
            )
            check_transition(head, manifest, self._run.layout)
            if self._run.log.timeline(head.record.timeline + 1) is not None:
                self._memory.head = None
                return Outcome(kind="overtaken", head=head)
            committed = self._run.log.commit(manifest)
            if committed is not None:
                self._memory.head = committed
                self._hint(committed)
                return Outcome(kind="final" if draft.final else "committed", head=committed)
            head = self._memory.head = self._run.log.find_head(head)
            if not draft.fits(head.record):
                return Outcome(kind="overtaken", head=head)

    def _hint(self, head: Stored[Manifest]) -> None:
        """Overwrite ``head.json`` if it is due. Losing it costs readers one more GET, so a failure is only logged (I9)."""
        now_s = self._run.env.clock.monotonic()
        if self._memory.hinted == head.sha256 or (now_s - self._memory.hinted_at_s < HINT_EVERY_S and not head.record.final):
            return
        self._memory.hinted_at_s = now_s
        try:
            self._run.log.write_hint(head)
        except StoreError as error:
            log.warning("could not write %s: %s", keys.HEAD, error)
            return
        self._memory.hinted = head.sha256


def _norm(values_F: torch.Tensor, run: OpenRun, fragment: int) -> float:
    return math.sqrt(math.fsum(sum_squares(values_F, run.layout.of(fragment))))
