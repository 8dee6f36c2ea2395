"""From a closed window to one outer step of one fragment: weigh, merge, step, write (format §6.2, §6.3, §7.4 step 6).

What the stepper holds of a fragment is what stands in the log: results of a step are held only once their manifest is committed, so a lost race costs the
loser its work and nothing else.
"""

from __future__ import annotations

import logging
import math
import threading
from dataclasses import dataclass, replace

import torch

from aggregator.admit import Admitted, Loaded, Refusal, load
from aggregator.next_manifest import Draft, Refusing, Stepped, rounds_after
from aggregator.policy import Window
from aggregator.remerge import History, step_again
from ps_diloco.checkpoint import Place, read_fragment, read_state, write_anchor, write_delta, write_state
from ps_diloco.codecs import check_finite
from ps_diloco.config import RunSettings
from ps_diloco.errors import Denied, NonFinite, NotFound, StoreError
from ps_diloco.fragment import FragmentValue
from ps_diloco.ids import ContributionId
from ps_diloco.merge import MASSES_KEPT, WEIGHTS_KEPT, FragmentMerge, Weighing, awaited_units, sum_squares, weigh
from ps_diloco.outer import OuterState, outer_step
from ps_diloco.records import Closed, Contribution, Delta, FragmentEntry, Manifest, Stored
from ps_diloco.run import OpenRun
from ps_diloco.shard import Section, encode_section

log = logging.getLogger(__name__)

TRIES_MAX = 3
TRY_EVERY_S = 5.0
LAST: frozenset[Closed] = frozenset({"once", "drain"})
"""Windows after which this process goes away: outer state is saved with the step."""


class Stopped(Exception):
    """The pass was given up because the process is to end; nothing was committed."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """A fragment as it stands in the log. Values are never changed."""

    entry: FragmentEntry
    value: FragmentValue
    state: OuterState


def same_value(one: FragmentEntry, other: FragmentEntry) -> bool:
    """Whether two entries stand for the same parameters and outer state, whoever wrote the objects: the same steps of the same work lead to both."""
    return (one.fragment_version, one.sha256, one.tokens, one.rounds, one.weights, one.masses) == (
        other.fragment_version,
        other.sha256,
        other.tokens,
        other.rounds,
        other.weights,
        other.masses,
    )


class Stepper:
    """Steps fragments. One thread. All that it remembers can be read back from the bucket."""

    def __init__(self, run: OpenRun, stop: threading.Event) -> None:
        self._run = run
        self._stop = stop
        self._settings: dict[int, RunSettings] = {}
        self._held: dict[int, Held] = {}
        self._history = History(run)
        self._try_at_s: dict[ContributionId, float] = {}

    def settings(self, config: int) -> RunSettings:
        if config not in self._settings:
            self._settings[config] = self._run.config(config)
        return self._settings[config]

    def waiting(self, now_s: float) -> set[ContributionId]:
        """Contributions an object of which was absent a moment ago."""
        return {contribution for contribution, at_s in self._try_at_s.items() if at_s > now_s}

    def step(self, head: Stored[Manifest], fragment: int, window: Window, draft: Draft) -> Stepped | None:
        """Merge a window into one outer step; None if none of its contributions could be used. Refusals go into ``draft``. Does I/O."""
        before = head.record.fragments[fragment]
        settings = self.settings(draft.config)
        members = list(window.members)
        while members:
            weighing = weigh(
                [a.candidate for a in members],
                fragment_version=before.fragment_version,
                rounds=before.rounds,
                weights=before.weights,
                settings=settings.merge,
                awaited=awaited_units([a.candidate for a in members], head.record.units, before.rounds),
            )
            merging = self._merge(head.record, fragment, members, weighing, draft)
            if merging is None:
                continue  # somebody could not be used: weights change, start again without them
            held = self._hold(head, fragment)
            try:
                return self._outer_step(held, head.record.timeline, fragment, window.closed, members, weighing, merging, settings)
            except NonFinite as error:
                largest = max(members, key=lambda a: math.fsum(a.record.sum_squares))
                members.remove(largest)
                detail = f"the merged update is not finite; this contribution has the largest norm ({error})"
                refuse(draft, largest.candidate.id, Refusal(reason="norm", detail=detail), largest.record)
        return None

    def committed(self, stepped: Stepped) -> None:
        """The manifest with this step stands in the log."""
        self._held[stepped.fragment] = Held(entry=stepped.after, value=stepped.value, state=stepped.state)

    def lost(self, stepped: Stepped, head: Manifest) -> None:
        """Another process's step stands there instead. Often it is the same one, and then nothing has to be read."""
        if same_value(head.fragments[stepped.fragment], stepped.after):
            self.committed(replace(stepped, after=head.fragments[stepped.fragment]))

    def save(self, head: Manifest, until_s: float) -> dict[int, FragmentEntry]:
        """Write the outer state of fragments that are held and not saved at the head's version; their entries with it. Does I/O.

        Starts no write after ``until_s`` on the monotonic clock: what is not saved can be made again.
        """
        saved: dict[int, FragmentEntry] = {}
        for fragment, held in sorted(self._held.items()):
            entry = head.fragments[fragment]
            if not same_value(held.entry, entry) or saved_version(entry) == entry.fragment_version:
                continue
            if self._run.env.clock.monotonic() >= until_s:
                log.warning("no time to save the outer state of fragment %d: the next aggregator merges its last steps again", fragment)
                continue
            where = Place(timeline=head.timeline, fragment=fragment, fragment_version=entry.fragment_version)
            saved[fragment] = entry.model_copy(update={"state": write_state(self._run, where, held.state)})
        return saved

    def _merge(self, head: Manifest, fragment: int, members: list[Admitted], weighing: Weighing, draft: Draft) -> FragmentMerge | None:
        """Stream the members one at a time, in merge order. None if one of them had to be left out; it then is no member any more."""
        merging = FragmentMerge(self._run.layout.fragments[fragment])
        by_id = {a.candidate.id: a for a in members}
        for candidate, coefficient, share in zip(weighing.candidates, weighing.coefficients, weighing.shares, strict=True):
            if self._stop.is_set():
                raise Stopped
            admitted = by_id[candidate.id]
            try:
                answer: Loaded | Refusal | None = load(self._run, admitted.record)
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
                refuse(draft, candidate.id, answer, admitted.record)
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
        self._try_at_s[contribution] = self._run.env.clock.monotonic() + TRY_EVERY_S
        return None

    def _outer_step(
        self,
        held: Held,
        timeline: int,
        fragment: int,
        closed: Closed,
        members: list[Admitted],
        weighing: Weighing,
        merging: FragmentMerge,
        settings: RunSettings,
    ) -> Stepped:
        before = held.entry
        version = before.fragment_version + 1
        value = held.value.clone()
        state = OuterState(momentum=held.state.momentum.clone(), error=held.state.error.clone())
        update: list[Section] = []

        def quantise(x_F: torch.Tensor) -> torch.Tensor:
            update_F = torch.empty_like(x_F)
            update.append(encode_section("params", settings.pull.codec, x_F, decoded=update_F))
            return update_F

        update_F = outer_step(value.params, state, merging.gradient, settings.outer, quantise)
        check_finite(value.params)
        merging.merge_buffers_into(value, weighing.mass)
        where = Place(timeline=timeline, fragment=fragment, fragment_version=version)
        delta = write_delta(self._run, where, params=update[0], floats_B=value.floats, ints_I=value.ints)
        due = closed in LAST or version - saved_version(before) >= settings.pull.state_every
        saved = write_state(self._run, where, state) if due else before.state
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
        return Stepped(
            fragment=fragment,
            before=before,
            after=after,
            value=value,
            state=state,
            closed=closed,
            weighing=weighing,
            members=tuple(members),
            gradient_norm=self._norm(merging.gradient, fragment),
            update_norm=self._norm(update_F, fragment),
        )

    def _hold(self, head: Stored[Manifest], fragment: int) -> Held:
        """Parameters and outer state as they are in ``head``: held, or brought up to it, or read."""
        entry = head.record.fragments[fragment]
        held = self._held.get(fragment)
        if held is None or held.entry != entry:
            if held is not None and same_value(held.entry, entry):
                held = replace(held, entry=entry)
            else:
                on_chain = held is not None and (held.entry.fragment_version, held.entry.sha256) in _chain(entry)
                held = self._read(head, fragment, held if on_chain else None)
            self._held[fragment] = held
        return held

    def _read(self, head: Stored[Manifest], fragment: int, held: Held | None) -> Held:
        entry = head.record.fragments[fragment]
        at = saved_version(entry)
        if held is not None and held.entry.fragment_version >= at:
            at = held.entry.fragment_version
            state = OuterState(momentum=held.state.momentum.clone(), error=held.state.error.clone())
        else:
            state = read_state(self._run, fragment, entry.state)
        if at < entry.fragment_version:
            log.info("fragment %d: merging the steps after its fragment version %d again", fragment, at)
            for taken in self._history.since_state(head, fragment, at):
                if self._stop.is_set():
                    raise Stopped
                step_again(self._run, taken, state, self.settings(taken.config))
        known = None if held is None else (held.entry.fragment_version, held.value)
        return Held(entry=entry, value=read_fragment(self._run, entry, fragment, held=known), state=state)

    def _norm(self, values_F: torch.Tensor, fragment: int) -> float:
        return math.sqrt(math.fsum(sum_squares(values_F, self._run.layout.of(fragment))))


def saved_version(entry: FragmentEntry) -> int:
    """The fragment version at which the outer state is saved; that of version 0 is zero and needs no object."""
    return entry.state.fragment_version if entry.state else 0


def refuse(draft: Draft, contribution: ContributionId, refusal: Refusal, record: Contribution | None) -> None:
    draft.refused[contribution] = Refusing(refusal=refusal, record=record)
    log.warning("refused %s: %s: %s", contribution, refusal.reason, refusal.detail)


def _chain(entry: FragmentEntry) -> set[tuple[int, str]]:
    return {(delta.fragment_version, delta.sha256) for delta in entry.deltas} | {(entry.fragment_version, entry.sha256)}
