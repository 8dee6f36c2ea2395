"""One pass of the aggregator, top to bottom (format §7.4): head, inbox, admit, plan, step, commit.

The aggregator has no state of its own: whatever this process remembers (:class:`_Memory`, the inbox, the stepper) only saves reads, and any other process
that starts now does the same from the bucket alone. Killed at any point it leaves the old version or the new one, whole, and at worst some objects nobody
names.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Literal

from aggregator.admit import Admitted, Refusal, admit
from aggregator.fragment_step import MODEST, Effort, Stepper, refuse
from aggregator.next_manifest import Draft, Stepped, next_manifest
from aggregator.policy import WHOLE, Force, Part, Plan, in_line, leave_to_others, plan_windows
from ps_diloco import keys
from ps_diloco.config import RunSettings
from ps_diloco.errors import StoreError
from ps_diloco.ids import ContributionId
from ps_diloco.inbox import Inbox, Incoming
from ps_diloco.records import Incarnation, Manifest, Stored
from ps_diloco.run import OpenRun, fingerprint
from ps_diloco.threads import Event
from ps_diloco.transition import check_transition

log = logging.getLogger(__name__)

DISCOVER_EVERY_S = 5.0
DISCOVER_EARLY_EVERY_S = 1.0
EARLY_VERSIONS = 20
"""A run's units come one after the other at its beginning."""
HINT_EVERY_S = 1.0
DRAIN_S_MAX = 30.0
"""For which the end of a run waits for published work that cannot be read."""


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
    config: int = 0
    arrivals: dict[str, Incarnation] = field(default_factory=dict)
    discovered_at_s: float = -math.inf
    hinted_at_s: float = -math.inf
    hinted: str = ""
    ready_since_s: dict[tuple[int, int], float] = field(default_factory=dict)
    """(fragment, fragment version) of another process's part -> since when it could be stepped."""
    target_since_s: float | None = None
    taken_over: dict[int, int] = field(default_factory=dict)
    """Fragment of another process's part -> fragment version to which this process stepped it."""
    ahead: set[ContributionId] = field(default_factory=set)
    """Contributions whose base was above the head of the last pass."""


class Aggregator:
    """Takes outer steps. One thread; any number of processes may run it on one run, each with a ``part`` of the fragments that it steps first."""

    def __init__(
        self,
        run: OpenRun,
        *,
        part: Part = WHOLE,
        effort: Effort = MODEST,
        stop: Event | None = None,
    ) -> None:
        self._run = run
        self._part = part
        self._inbox = Inbox(run)
        self._memory = _Memory()
        self._stepper = Stepper(run, effort, stop or run.env.threads.event())

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
        settings = self._stepper.settings(self._memory.config)
        incoming = self._inbox.refresh(head.record)
        # admit
        draft = Draft(
            config=self._memory.config, known=[(arrived.id, arrived.record.fragment if arrived.record else None) for arrived in incoming]
        )
        pending = self._admit(incoming, head.record, draft)
        # plan
        if self._ends(head.record, settings):
            force, draft.final = "drain", True
        plan = self._plan(pending, head.record, settings, force)
        # step
        for fragment, window in plan.windows.items():
            stepped = self._stepper.step(head, fragment, window, draft)
            if stepped is not None:
                draft.stepped.append(stepped)
        # commit
        self._list_arrivals(draft)
        draft.keep_order()
        if draft.final and self._waits(draft):
            draft.final = False
        if not draft.worth_committing(head.record):
            self._hint(head)
            return Outcome(kind="idle", head=head, wake_at_s=plan.wake_at_s)
        if draft.final:
            draft.saved = self._stepper.save(head.record, math.inf)
        return self._commit(head, draft)

    def save(self, seconds: float) -> bool:
        """Save outer state that is only in this process, so that the next one need not merge again; whether a manifest names it. Does I/O.

        Starts no write after ``seconds``. Call it before the process ends; a process that is killed instead loses nothing but time.
        """
        head = self._memory.head
        if head is None or head.record.final:
            return False
        draft = Draft(config=head.record.config, saved=self._stepper.save(head.record, self._run.env.clock.monotonic() + seconds))
        return bool(draft.saved) and self._commit(head, draft).kind == "committed"

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
            while self._run.config_if_any(self._memory.config + 1) is not None:
                self._memory.config += 1
        except StoreError as error:  # those who are known go on
            log.warning("cannot look for new units and settings now: %s", error)

    def _ends(self, head: Manifest, settings: RunSettings) -> bool:
        """Whether this pass is to end the run: the target is reached, and of several processes this is the first, or the first has not done it."""
        if settings.target_tokens is None or head.tokens < settings.target_tokens:
            return False
        now_s = self._run.env.clock.monotonic()
        if self._memory.target_since_s is None:
            self._memory.target_since_s = now_s
        return self._part.owns(0) or 0 in self._memory.taken_over or now_s - self._memory.target_since_s >= self._part.patience_s

    def _waits(self, draft: Draft) -> bool:
        """Whether the end of the run waits for work that was published and cannot be decided now, which a final manifest would drop."""
        since_s = self._memory.target_since_s
        waited_s = 0.0 if since_s is None else self._run.env.clock.monotonic() - since_s
        return bool(draft.undecided or self._inbox.unread) and waited_s < DRAIN_S_MAX

    def _admit(self, incoming: list[Incoming], head: Manifest, draft: Draft) -> list[Admitted]:
        """Check records. One that seems to be from the future was perhaps made from a version newer than ``head``: the next pass, with a new head, decides."""
        pending: list[Admitted] = []
        ahead: set[ContributionId] = set()
        blocked: set[tuple[str, int]] = set()
        for arrived in incoming:
            answer = admit(arrived, head, self._run.record)
            line = (arrived.id.unit, arrived.record.fragment if arrived.record else -1)
            if isinstance(answer, Refusal) and answer.if_head_is_new and arrived.id not in self._memory.ahead:
                ahead.add(arrived.id)
                blocked.add(line)
            elif line in blocked:
                continue
            elif isinstance(answer, Refusal):
                refuse(draft, arrived.id, answer, arrived.record)
            else:
                pending.append(answer)
        self._memory.ahead = ahead
        return pending

    def _plan(self, pending: list[Admitted], head: Manifest, settings: RunSettings, force: Force | None) -> Plan:
        now_s = self._run.env.clock.monotonic()
        fenced = [unit for unit in self._memory.arrivals if unit in head.units]
        ready = in_line(pending, self._stepper.waiting(now_s))
        plan = plan_windows(ready, head, settings.merge, now_s=now_s, fenced=fenced, force=force)
        if force == "drain":
            return plan
        taken_over = self._memory.taken_over
        for fragment in [f for f, version in taken_over.items() if head.fragments[f].fragment_version != version]:
            del taken_over[fragment]  # its owner is back
        plan, self._memory.ready_since_s = leave_to_others(plan, head, self._part, self._memory.ready_since_s, now_s, taken_over)
        return plan

    def _list_arrivals(self, draft: Draft) -> None:
        """List new incarnations. One whose predecessor still has undecided work that cannot be read now waits for it (I6)."""
        undecided = {contribution.unit for contribution in draft.undecided} | self._inbox.unread
        draft.listed = {unit: record for unit, record in self._memory.arrivals.items() if unit not in undecided}

    def _commit(self, head: Stored[Manifest], draft: Draft) -> Outcome:
        """Claim the next number; when another process took it, the one after it, with all of this draft that it left untouched."""
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
                for stepped in draft.stepped:
                    self._stepper.committed(stepped)
                    self._note_taken_over(stepped)
                self._hint(committed)
                return Outcome(kind="final" if draft.final else "committed", head=committed)
            head = self._memory.head = self._run.log.find_head(head)
            for stepped in draft.stepped:
                self._stepper.lost(stepped, head.record, draft.config)
            rest = draft.onto(head.record)
            if rest is None:
                return Outcome(kind="overtaken", head=head)
            draft = rest

    def _note_taken_over(self, stepped: Stepped) -> None:
        fragment = stepped.fragment
        if self._part.owns(fragment) or stepped.closed == "drain":
            return
        if fragment not in self._memory.taken_over:
            log.warning("nobody stepped fragment %d for %.0f s: taking it over until its owner is back", fragment, self._part.patience_s)
        self._memory.taken_over[fragment] = stepped.after.fragment_version

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
