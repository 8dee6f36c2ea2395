"""Publishing contributions, one record in flight at a time (format §7.3). One background thread; the only writer of a unit's records."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from ps_diloco import keys
from ps_diloco.checkpoint import buffer_sections
from ps_diloco.errors import Fenced
from ps_diloco.ids import ContributionId
from ps_diloco.records import RECORD_BYTES_MAX, Contribution, ShardRef, encode
from ps_diloco.run import OpenRun
from ps_diloco.shard import encode_shard
from ps_diloco.store.claim import claim_object
from ps_diloco.store.refs import put_data
from ps_diloco.threads import Event, Queue
from ps_diloco.unit.link import Link
from ps_diloco.unit.state import Pending


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Who publishes: the same for all contributions of this process."""

    timeline: int
    unit: str
    incarnation: int


class Outbox:
    """First in, first out; never drops, never reorders, so the n-th cut that is put gets seq n.

    Bounded from outside: a unit has at most 2 undecided cuts per fragment and 64 in all.
    """

    def __init__(self, run: OpenRun, identity: Identity, link: Link, stop: Event, *, on_error: Callable[[BaseException], None]) -> None:
        self._run = run
        self._identity = identity
        self._link = link
        self._stop = stop
        self._queue: Queue = run.env.threads.queue()
        self._on_error = on_error
        self._published = run.env.threads.condition()
        self._begin = threading.Lock()
        self._halted = False
        self._count = 0
        self._put = 0
        self.listed = run.env.threads.event()
        """Set once a manifest lists the incarnation; nothing is published before."""
        self._thread = run.env.threads.thread(self._loop, name="ps-diloco-outbox")

    def start(self) -> None:
        self._thread.start()

    def put(self, pending: Pending) -> int:
        """Queue a cut; return the seq that it will get. Called by one thread only."""
        self._put += 1
        self._queue.put(pending)
        return self._put - 1

    @property
    def published(self) -> int:
        """Number of records written."""
        return self._count

    def wait_published(self, count: int, timeout_s: float) -> bool:
        """Block until at least ``count`` records are written; False when the time is over."""
        with self._published:
            return self._published.wait_for(lambda: self._count >= count or self._stop.is_set(), timeout_s) and self._count >= count

    @property
    def accepted(self) -> int:
        """Number of cuts that were put, written or not: the seq of the next one."""
        return self._put

    def halt(self) -> None:
        """Begin no further record. Cuts whose ``seq`` is None after this call are never published by this process."""
        with self._begin:
            self._halted = True

    def join(self, timeout_s: float) -> None:
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _loop(self) -> None:
        try:
            while (pending := self._queue.get()) is not None:
                while not self.listed.is_set() and not self._stop.is_set() and not self._halted:
                    self._run.env.clock.wait(self.listed, 0.2)
                if self._stop.is_set() or self._halted:
                    return
                self._publish(pending)
        except BaseException as error:  # reported to the training thread, which raises it
            self._on_error(error)

    def _publish(self, pending: Pending) -> None:
        who, run = self._identity, self._run
        with self._begin:
            if self._halted:
                return
            pending.seq = self._count  # before anything is written, so that no decision can come earlier
        contribution = ContributionId(who.timeline, who.unit, who.incarnation, self._count)
        attempt = run.env.entropy.attempt_id()
        data = encode_shard(
            [pending.section, *buffer_sections(pending.floats_B, pending.ints_I)],
            kind="contribution",
            run_id=run.run_id,
            of=str(contribution),
            fragment=pending.fragment,
        )
        key = keys.shard(contribution, attempt)
        ref = self._link.until_done("publish a contribution", lambda: put_data(run.store, run.env, key, data))
        if ref is None:
            return
        record = Contribution(
            run_id=run.run_id,
            timeline=who.timeline,
            unit=who.unit,
            incarnation=who.incarnation,
            seq=self._count,
            attempt=attempt,
            layout_hash=run.record.layout_hash,
            fragment=pending.fragment,
            base=pending.base,
            tokens=pending.tokens,
            steps=pending.steps,
            inner_steps=pending.inner_steps,
            codec=pending.section.codec,
            shards=(ShardRef(ref=ref),),
            sum_squares=pending.sum_squares,
            loss=pending.loss,
            resent=pending.resent,
            created_at=run.env.clock.wall_text(),
        )
        body, record_key = encode(record), keys.record(contribution)
        # an uncertain answer is tried again with the same bytes until it is definite: the first put may still land
        claim = self._link.until_done(
            "publish a record", lambda: claim_object(run.store, run.env, record_key, body, max_bytes=RECORD_BYTES_MAX)
        )
        if claim is None:
            return
        if not claim.won:
            raise Fenced(
                "another process publishes under this unit's incarnation",
                unit=who.unit,
                incarnation=who.incarnation,
                key=record_key,
                remedy="give every running unit its own name",
            )
        with self._published:
            self._count += 1
            self._published.notify_all()
