"""The heartbeat: an overwritten hint that says a unit lives, with a report for people (format §5.8)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ps_diloco import keys
from ps_diloco.errors import FormatError, NotFound, StoreError
from ps_diloco.records import HINT_BYTES_MAX, Heartbeat, decode, encode
from ps_diloco.run import OpenRun
from ps_diloco.unit.outbox import Identity

log = logging.getLogger("ps_diloco.unit")

END_S_MAX = 5.0


class Heart:
    """Writes ``heartbeat.json`` every ``interval_s`` in a thread of its own. Failures are logged and forgotten: it is a hint."""

    def __init__(self, run: OpenRun, identity: Identity, *, interval_s: float, report: Callable[[], dict[str, Any]]) -> None:
        self._run = run
        self._identity = identity
        self._interval_s = interval_s
        self._report = report
        self._stop = run.env.threads.event()
        self._ended: str | None = None
        self._thread = run.env.threads.thread(self._loop, name="ps-diloco-heart")

    def start(self) -> None:
        self._thread.start()

    def end(self, reason: str) -> None:
        """Stop; the thread writes one last heartbeat that says why, for which this waits a few seconds at most."""
        self._ended = reason
        self._stop.set()
        self._thread.join(END_S_MAX)

    def beat(self, *, ended: str | None = None) -> None:
        """Write one heartbeat. Does I/O."""
        beat = Heartbeat(
            run_id=self._run.run_id,
            unit=self._identity.unit,
            incarnation=self._identity.incarnation,
            nonce=self._run.env.entropy.attempt_id(),
            interval_s=self._interval_s,
            ended=ended,
            report=self._report(),
        )
        try:
            self._run.store.put(keys.heartbeat(self._identity.unit), encode(beat), overwrite=True)
        except StoreError as error:
            log.info("heartbeat was not written: %s", error)

    def _loop(self) -> None:
        while not self._stop.is_set():
            self.beat()
            self._run.env.clock.wait(self._stop, self._interval_s)
        self.beat(ended=self._ended)


def read_heartbeat(run: OpenRun, unit: str) -> Heartbeat | None:
    """A unit's heartbeat; None if there is none or it is garbage. Does I/O."""
    key = keys.heartbeat(unit)
    try:
        return decode(Heartbeat, run.store.get(key, max_bytes=HINT_BYTES_MAX), key=key, run_id=run.run_id, max_bytes=HINT_BYTES_MAX)
    except (NotFound, FormatError):
        return None
