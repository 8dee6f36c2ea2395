"""The background half of a unit: one thread that owns the state of every fragment and takes events in order.

::

    training thread --- Cut, Adopted, Save, Restart ---> engine --- Pending ---> outbox --> bucket
                    <--- Correction (one per fragment) --        <--- News ----- puller <-- bucket

Nothing here touches the network; everything heavy (encoding, corrections) happens here and not on the training thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ps_diloco.config import RunSettings
from ps_diloco.errors import Fenced, InvariantViolation, NonFinite
from ps_diloco.fragment import FragmentValue
from ps_diloco.layout import Layout
from ps_diloco.records import UNDECIDED_MAX
from ps_diloco.threads import Queue, Threads
from ps_diloco.unit.outbox import Identity, Outbox
from ps_diloco.unit.puller import News
from ps_diloco.unit.state import UNDECIDED_PER_FRAGMENT, Account, Correction, FragmentState

log = logging.getLogger("ps_diloco.unit")


REMEDIES = {
    "stale": "Its base was more outer steps behind than the run's staleness_limit: cut more often (unit.sync_every), or merge more at once.",
    "non-finite": "The training diverged here.",
    "norm": "The training diverged here.",
    "codec": "The aggregator is of another version.",
}


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A snapshot of a fragment, with what was done since its previous cut."""

    fragment: int
    snapshot: FragmentValue
    tokens: int
    steps: int
    inner_steps: int
    loss: float | None


@dataclass(frozen=True, kw_only=True)
class Adopted:
    """The training thread applied a correction; for a replacement, what it replaced."""

    fragment: int
    before: FragmentValue | None = None
    lost_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Restart:
    """Replace every fragment by its newest global value: the end of a joining ramp."""


@dataclass(frozen=True, kw_only=True)
class Save:
    """Hand the residuals as they are after all cuts so far, and the number of cuts so far, to ``then``."""

    then: Callable[[dict[int, torch.Tensor], int], None]


@dataclass(frozen=True, kw_only=True)
class Residuals:
    """Residuals of an earlier incarnation, to be used from now on."""

    values: dict[int, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Left:
    """Work since the last cut that will not be sent: the model was replaced by the final version, or the unit ends."""

    fragment: int
    before: FragmentValue | None
    lost_tokens: int


Event = Cut | Adopted | Left | Restart | Save | Residuals | News


class Engine:
    """Owns the :class:`FragmentState` of every fragment. ``post`` and the ``take_``/``can_`` methods are called from other threads and never wait for I/O."""

    def __init__(
        self,
        layout: Layout,
        settings: RunSettings,
        identity: Identity,
        first: News,
        outbox: Outbox,
        *,
        threads: Threads,
        on_error: Callable[[BaseException], None],
        recycle: Callable[[FragmentValue], None] = lambda snapshot: None,
    ) -> None:
        """``recycle`` gets every snapshot that was posted, once nothing reads its ``params`` any more; on the engine's thread."""
        self._layout = layout
        self._identity = identity
        self._outbox = outbox
        self._on_error = on_error
        self._recycle = recycle
        self._newest = first
        self._states = [
            FragmentState.begin(
                fragment,
                layout.of(fragment),
                first.values[fragment],
                first.base(fragment),
                codec=settings.push.codec,
                decay=settings.push.error_feedback_decay,
            )
            for fragment in range(len(layout.fragments))
        ]
        self._events: Queue = threads.queue()
        self._lock = threading.Lock()
        self._corrections: dict[int, Correction] = {}
        self._taken = [0] * len(layout.fragments)
        self._unmerged = [0] * len(layout.fragments)
        self._final: News | None = first if first.head.record.final else None
        self.accounts: tuple[tuple[Account, float], ...] = tuple((Account(), 0.0) for _ in self._states)
        """Per fragment a copy of its account and the balance of I10, as they were after the last event."""
        self._restart: set[int] = set()
        self._warned: set[str] = set()
        self.adopted_tokens = [entry.tokens for entry in first.head.record.fragments]
        """Per fragment: tokens merged into the version that the local parameters hold."""
        self._offered_tokens = list(self.adopted_tokens)
        self._thread = threads.thread(self._loop, name="ps-diloco-engine")

    # called by the training thread

    def start(self) -> None:
        self._thread.start()

    def post(self, event: Event) -> None:
        """Queue an event; returns at once. Bounded by :meth:`can_cut`, one correction per fragment, and the newest news only being kept."""
        self._events.put(event)

    def can_cut(self, fragment: int) -> bool:
        """Whether one more cut of a fragment may be undecided. If true, take it with :meth:`post` at once: the place is reserved."""
        with self._lock:
            if self._taken[fragment] >= UNDECIDED_PER_FRAGMENT or sum(self._taken) >= UNDECIDED_MAX:
                return False
            self._taken[fragment] += 1
            return True

    def take_corrections(self) -> list[Correction]:
        """Corrections that are ready; each is to be applied now and answered with :class:`Adopted`."""
        if not self._corrections:
            return []
        with self._lock:
            ready = list(self._corrections.values())
            self._corrections.clear()
            return ready

    @property
    def final(self) -> News | None:
        """The final version, once there is one."""
        return self._final

    @property
    def newest(self) -> News:
        """The newest version that was read; not yet adopted, perhaps."""
        return self._newest

    def unmerged_tokens(self) -> list[int]:
        """Per fragment: tokens of cuts that are not decided."""
        with self._lock:
            return list(self._unmerged)

    def undecided(self) -> int:
        with self._lock:
            return sum(self._taken)

    def states(self) -> list[FragmentState]:
        """For tests: the states themselves. Touch only when :meth:`join` has returned."""
        return self._states

    def join(self, timeout_s: float) -> bool:
        """Handle what is queued, then end; whether it has."""
        self._events.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # the engine's own thread

    def _loop(self) -> None:
        try:
            while (event := self._events.get()) is not None:
                self._handle(event)
        except BaseException as error:  # reported to the training thread, which raises it
            self._on_error(error)

    def _handle(self, event: Event) -> None:
        if isinstance(event, Cut):
            state = self._states[event.fragment]
            try:
                pending = state.cut(event.snapshot, tokens=event.tokens, steps=event.steps, inner_steps=event.inner_steps, loss=event.loss)
            except NonFinite as error:
                raise self._explained(event, error) from None
            self._recycle(event.snapshot)
            self._count(event.fragment)
            self._outbox.put(pending)
        elif isinstance(event, Adopted):
            self._states[event.fragment].adopted(event.before, event.lost_tokens)
            if event.before is not None:
                self._recycle(event.before)
                self._count(event.fragment)
            self.adopted_tokens[event.fragment] = self._offered_tokens[event.fragment]
            self._settle(event.fragment)
        elif isinstance(event, Left):
            self._states[event.fragment].leave(event.before, event.lost_tokens)
            if event.before is not None:
                self._recycle(event.before)
            self._count(event.fragment)
        elif isinstance(event, News):
            self._take_news(event)
        elif isinstance(event, Restart):
            self._restart = set(range(len(self._states)))
            for fragment in range(len(self._states)):
                self._settle(fragment)
        elif isinstance(event, Residuals):
            for fragment, residual in event.values.items():
                self._states[fragment].restore_residual(residual)
                self._count(fragment)
        else:
            kept = {state.fragment: state.unsent_error() for state in self._states}
            event.then(kept, self._outbox.accepted)

    def _explained(self, event: Cut, error: NonFinite) -> NonFinite:
        bad = torch.isfinite(event.snapshot.params).logical_not().nonzero()
        if not len(bad):
            return error
        return NonFinite(
            "the model's parameters are not finite",
            tensor=self._layout.entry_at(event.fragment, int(bad[0])),
            inner_steps=event.inner_steps,
            remedy="nothing of this span was sent; start the unit again, it goes on from its saved state and the newest version",
        )

    def _take_news(self, news: News) -> None:
        entry = news.head.record.units.get(self._identity.unit)
        if entry is not None and entry.incarnation > self._identity.incarnation:
            raise Fenced(
                "a newer incarnation of this unit runs",
                unit=self._identity.unit,
                newest=entry.incarnation,
                ours=self._identity.incarnation,
                remedy="nothing to do: this process ends and the newer one goes on",
            )
        self._newest = news
        for fragment in range(len(self._states)):
            self._settle(fragment)
        if news.head.record.final:
            for fragment, state in enumerate(self._states):
                before = len(state.undecided)
                state.finish(self._outcome)
                with self._lock:
                    self._taken[fragment] -= before
                self._count(fragment)
            self._final = news

    def _settle(self, fragment: int) -> None:
        """Compare a fragment with the newest version, unless the training thread still owes the answer to an earlier correction."""
        state, news = self._states[fragment], self._newest
        if state.correcting is not None:
            return
        before = len(state.undecided)
        correction = state.settle(self._outcome, news.values[fragment], news.base(fragment))
        with self._lock:
            self._taken[fragment] -= before - len(state.undecided)
        if fragment in self._restart:
            self._restart.discard(fragment)
            correction = state.replace(news.values[fragment], news.base(fragment))
        if correction is None:
            return
        self._count(fragment)
        self._warn_of_refusals(state)
        self._offered_tokens[fragment] = news.head.record.fragments[fragment].tokens
        with self._lock:
            self._corrections[fragment] = correction

    def _warn_of_refusals(self, state: FragmentState) -> None:
        for reason in state.account.refused.keys() - self._warned:
            self._warned.add(reason)
            log.warning(
                "work of this unit was refused (%s) and is lost; the fragment goes on from the global version. %s",
                reason,
                REMEDIES.get(reason, ""),
            )

    def _outcome(self, seq: int) -> str | None:
        """What the newest version says about a contribution of this incarnation; None if it is undecided."""
        entry = self._newest.head.record.units.get(self._identity.unit)
        if entry is None or entry.incarnation != self._identity.incarnation:
            return None
        result = entry.outcome(seq)
        if result == "decided":
            raise InvariantViolation("a contribution was decided so long ago that its receipt is gone", seq=seq, first=entry.first)
        return result

    def _count(self, fragment: int) -> None:
        """Tell other threads about a fragment. The sums are taken before the lock, which the training thread may want."""
        state = self._states[fragment]
        account = replace(state.account), state.balance()
        with self._lock:
            self._unmerged[fragment] = state.unmerged_tokens
            self.accounts = (*self.accounts[:fragment], account, *self.accounts[fragment + 1 :])
