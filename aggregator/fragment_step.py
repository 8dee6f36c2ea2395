"""From a closed window to one outer step of one fragment: weigh, merge, step, write (format §6.2, §6.3, §7.4 step 6).

What the stepper holds of a fragment is what stands in the log: results of a step are held only once their manifest is committed, so a lost race costs the
loser its work and nothing else.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TypeVar

import torch

from aggregator.admit import Admitted, Buffers, Refusal, fetch_shard, read_shard
from aggregator.next_manifest import Draft, Refusing, Stepped, rounds_after, saved_version, step_of
from aggregator.policy import Window
from aggregator.remerge import History, step_again
from ps_diloco.arrays import copy_into, copy_of
from ps_diloco.checkpoint import Place, read_fragment, read_state, write_anchor, write_delta, write_state
from ps_diloco.config import RunSettings
from ps_diloco.errors import Denied, NonFinite, NotFound, StoreError
from ps_diloco.fragment import FragmentValue
from ps_diloco.host import HostBuffers
from ps_diloco.ids import ContributionId
from ps_diloco.merge import MASSES_KEPT, WEIGHTS_KEPT, FragmentMerge, Weighing, awaited_units, weigh
from ps_diloco.outer import OuterState, publish_outer_step
from ps_diloco.records import Closed, Contribution, Delta, FragmentEntry, Manifest, Ref, Stored
from ps_diloco.run import OpenRun
from ps_diloco.threads import Event, Threads

log = logging.getLogger(__name__)
Item = TypeVar("Item")
Result = TypeVar("Result")

TRIES_MAX = 3
TRY_EVERY_S = 5.0
LAST: frozenset[Closed] = frozenset({"once", "drain"})
"""Windows after which this process goes away: outer state is saved with the step."""


class Stopped(Exception):
    """The pass was given up because the process is to end; nothing was committed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """What one process puts into merging. The results do not depend on it."""

    threads: int = 1
    """For decoding, encoding and hashing, beside the one that waits for them."""
    fetch_ahead: int = 0
    """Shards that are fetched while another one is merged; each is in memory, encoded."""


MODEST = Effort()


@dataclass(frozen=True, kw_only=True)
class Held:
    """A fragment as it stands in the log. Values are never changed."""

    entry: FragmentEntry
    value: FragmentValue
    state: OuterState


def same_step(one: FragmentEntry, other: FragmentEntry) -> bool:
    """Whether two entries stand for the same committed step, wherever the outer state of it is saved: objects have unique names."""
    return one.fragment_version == other.fragment_version and _last_object(one) == _last_object(other)


def _last_object(entry: FragmentEntry) -> Ref:
    return entry.deltas[-1].object if entry.deltas else entry.anchor.objects[0]


class Stepper:
    """Steps fragments. One thread. All that it remembers can be read back from the bucket."""

    def __init__(self, run: OpenRun, effort: Effort, stop: Event) -> None:
        self._run = run
        self._effort = effort
        self._stop = stop
        self._settings: dict[int, RunSettings] = {}
        self._held: dict[int, Held] = {}
        self._history = History(run)
        self._try_at_s: dict[ContributionId, float] = {}
        self._arrays = HostBuffers(max(size.elements for size in run.layout.fragments), kept=4)
        """Accumulator, and what will be the next parameters, momentum and error."""

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
            gradient = self._arrays.take(self._run.layout.fragments[fragment].elements)
            merging = self._merge(head.record, fragment, members, weighing, draft, gradient)
            if merging is None:
                self._arrays.give(gradient)
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
        if (old := self._held.get(stepped.fragment)) is not None:
            self._give_back(old.value, old.state)
        self._held[stepped.fragment] = Held(entry=stepped.after, value=stepped.value, state=stepped.state)

    def lost(self, stepped: Stepped, head: Manifest, config: int) -> None:
        """Another process's step stands there instead. Often it is the same one, and then nothing has to be read."""
        theirs = next((step for step in head.steps if step.fragment == stepped.fragment), None)
        entry = head.fragments[stepped.fragment]
        if (
            theirs is not None
            and theirs.merged == step_of(stepped).merged
            and head.config == config
            and entry.sha256 == stepped.after.sha256
        ):
            self.committed(replace(stepped, after=entry))

    def save(self, head: Manifest, until_s: float) -> dict[int, FragmentEntry]:
        """Write the outer state of fragments that are held and not saved at the head's version; their entries with it. Does I/O.

        Starts no write after ``until_s`` on the monotonic clock: what is not saved can be made again.
        """
        saved: dict[int, FragmentEntry] = {}
        for fragment, held in sorted(self._held.items()):
            entry = head.fragments[fragment]
            if not same_step(held.entry, entry) or saved_version(entry) == entry.fragment_version:
                continue
            if self._run.env.clock.monotonic() >= until_s:
                log.warning("no time to save the outer state of fragment %d: the next aggregator merges its last steps again", fragment)
                continue
            where = Place(timeline=head.timeline, fragment=fragment, fragment_version=entry.fragment_version)
            saved[fragment] = entry.model_copy(update={"state": write_state(self._run, where, held.state, threads=self._effort.threads)})
        return saved

    def _merge(
        self, head: Manifest, fragment: int, members: list[Admitted], weighing: Weighing, draft: Draft, gradient: torch.Tensor
    ) -> FragmentMerge | None:
        """Stream the members one at a time, in merge order. None if one of them had to be left out; it then is no member any more."""
        merging = FragmentMerge(self._run.layout.fragments[fragment], gradient=gradient)
        by_id = {a.candidate.id: a for a in members}
        ordered = [by_id[candidate.id] for candidate in weighing.candidates]
        with closing(
            _ahead(lambda a: fetch_shard(self._run, a.record), ordered, self._effort.fetch_ahead, self._run.env.threads)
        ) as shards:
            for admitted, coefficient, share, fetched in zip(ordered, weighing.coefficients, weighing.shares, shards, strict=True):
                if self._stop.is_set():
                    raise Stopped
                answer = self._add(head, admitted, fetched, merging, coefficient, draft)
                if isinstance(answer, Buffers):
                    merging.add_buffers(share, answer.floats_B, answer.ints_I)
                    continue
                contribution = admitted.candidate.id
                if answer is not None:
                    refuse(draft, contribution, answer, admitted.record)
                    members.remove(admitted)
                else:  # it stays undecided, and so do the unit's later ones of this fragment (I5)
                    members[:] = [a for a in members if a.record.unit != contribution.unit or a.candidate.id.seq < contribution.seq]
                return None
        return merging

    def _add(
        self,
        head: Manifest,
        admitted: Admitted,
        fetched: Callable[[], bytes | Refusal],
        merging: FragmentMerge,
        coefficient: float,
        draft: Draft,
    ) -> Buffers | Refusal | None:
        """Add a contribution's pseudo-gradient; None if it cannot be read now. Unless buffers come back, ``merging`` is worth nothing any more."""
        contribution = admitted.candidate.id
        try:
            data = fetched()
        except (NotFound, Denied) as error:  # some stores deny what is absent, and what stays denied must not block its unit for ever
            return self._absent(head, contribution, draft, error)
        except StoreError as error:
            log.warning("contribution %s cannot be read now and waits: %s", contribution, error)
            return None
        if isinstance(data, Refusal):
            return data
        return read_shard(self._run, admitted.record, data, merging.adding(coefficient), threads=self._effort.threads)

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
        value = FragmentValue(
            params=self._copy(held.value.params),
            floats=copy_of(held.value.floats),
            ints=copy_of(held.value.ints),
            frozen=held.value.frozen,
        )
        state = OuterState(momentum=self._copy(held.state.momentum), error=self._copy(held.state.error))
        published = publish_outer_step(
            value.params,
            state,
            merging.gradient,
            settings.outer,
            settings.pull.codec,
            self._run.layout.of(fragment),
            threads=self._effort.threads,
        )
        self._arrays.give(merging.gradient)
        merging.merge_buffers_into(value, weighing.mass)
        where = Place(timeline=timeline, fragment=fragment, fragment_version=version)
        delta = write_delta(self._run, where, params=published.section, floats_B=value.floats, ints_I=value.ints)
        due = closed in LAST or version - saved_version(before) >= settings.pull.state_every
        saved = write_state(self._run, where, state, threads=self._effort.threads) if due else before.state
        anchor, deltas = before.anchor, before.deltas
        if version - anchor.fragment_version >= settings.pull.anchor_every:
            deltas = tuple(d for d in deltas if d.fragment_version > anchor.fragment_version)
            anchor = write_anchor(self._run, where, value)
        digest = value.sha256(threads=self._effort.threads)
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
            gradient_norm=math.sqrt(math.fsum(published.gradient_squares)),
            update_norm=math.sqrt(math.fsum(published.update_squares)),
        )

    def _copy(self, values: torch.Tensor) -> torch.Tensor:
        copy = self._arrays.take(values.numel())
        copy_into(copy, values)
        return copy

    def _give_back(self, value: FragmentValue, state: OuterState) -> None:
        for array in (value.params, state.momentum, state.error):
            self._arrays.give(array)

    def _hold(self, head: Stored[Manifest], fragment: int) -> Held:
        """Parameters and outer state as they are in ``head``: held, or brought up to it, or read."""
        entry = head.record.fragments[fragment]
        held = self._held.get(fragment)
        if held is None or held.entry != entry:
            if held is not None and same_step(held.entry, entry):
                held = replace(held, entry=entry)
            else:
                held = self._read(head, fragment, held if held is not None and _reaches(held.entry, entry) else None)
            self._held[fragment] = held
        return held

    def _read(self, head: Stored[Manifest], fragment: int, held: Held | None) -> Held:
        entry = head.record.fragments[fragment]
        at = saved_version(entry)
        if held is not None and held.entry.fragment_version >= at:
            at = held.entry.fragment_version
            state = OuterState(momentum=copy_of(held.state.momentum), error=copy_of(held.state.error))
        else:
            state = read_state(self._run, fragment, entry.state)
        if at < entry.fragment_version:
            log.info("fragment %d: merging the steps after its fragment version %d again", fragment, at)
            for taken in self._history.since_state(head, fragment, at):
                if self._stop.is_set():
                    raise Stopped
                step_again(self._run, taken, state, self.settings(taken.config), threads=self._effort.threads)
        known = None if held is None else (held.entry.fragment_version, held.value)
        return Held(entry=entry, value=read_fragment(self._run, entry, fragment, held=known), state=state)


def refuse(draft: Draft, contribution: ContributionId, refusal: Refusal, record: Contribution | None) -> None:
    draft.refused[contribution] = Refusing(refusal=refusal, record=record)
    log.warning("refused %s: %s: %s", contribution, refusal.reason, refusal.detail)


def _reaches(held: FragmentEntry, entry: FragmentEntry) -> bool:
    """Whether the chain of ``entry`` goes through ``held``, so that the steps after it lead from one to the other."""
    if held.fragment_version == 0:
        return bool(entry.deltas) and entry.deltas[0].fragment_version == 1
    return bool(held.deltas) and held.deltas[-1] in entry.deltas


def _ahead(
    function: Callable[[Item], Result], items: Sequence[Item], count: int, threads: Threads
) -> Generator[Callable[[], Result], None, None]:
    """One callable for each item that gives ``function(item)``, or raises what it raised; ``count`` more are begun by then. With 0 all is done when called."""
    if count == 0:
        yield from (partial(function, item) for item in items)
        return
    pool = threads.pool(count, name="ps-diloco-fetch")
    try:
        begun: deque[Future[Result]] = deque()
        following = iter(items)
        begun.extend(pool.submit(function, item) for item in islice(following, count))
        for _ in items:
            begun.extend(pool.submit(function, item) for item in islice(following, 1))
            yield begun.popleft().result
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
