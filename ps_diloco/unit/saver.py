"""Writes a unit's own state in the background, one at a time (format §5.11)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from ps_diloco.records import Covers
from ps_diloco.run import OpenRun
from ps_diloco.store.counting import CountingStore
from ps_diloco.threads import Event, Queue
from ps_diloco.unit.link import Link
from ps_diloco.unit.outbox import Identity, Outbox
from ps_diloco.unit.saved import InnerState, write_unit_state

log = logging.getLogger("ps_diloco.unit")


@dataclass(frozen=True, kw_only=True)
class _Job:
    covers: Covers
    residuals: Mapping[int, torch.Tensor]
    inner: InnerState


class Saver:
    """A state is written only after every contribution that it covers is published, so ``covers`` is never a promise."""

    def __init__(
        self,
        run: OpenRun,
        identity: Identity,
        outbox: Outbox,
        link: Link,
        stop: Event,
        *,
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._identity = identity
        self._outbox = outbox
        self._link = link
        self._stop = stop
        self._on_error = on_error
        self._expected = 0
        self._written = 0
        self._store = CountingStore(run.store)
        self._run = replace(run, store=self._store)
        self._jobs: Queue = run.env.threads.queue()
        self._thread = run.env.threads.thread(self._loop, name="ps-diloco-saver")

    def start(self) -> None:
        self._thread.start()

    @property
    def free(self) -> bool:
        """Whether the last state is written; the next one may be captured."""
        return self._written == self._expected

    @property
    def bytes_written(self) -> int:
        return self._store.snapshot().bytes_out

    def expect(self) -> None:
        """A state was captured and will be put. Called by the training thread."""
        self._expected += 1

    def put(self, covers: Covers, residuals: Mapping[int, torch.Tensor], inner: InnerState) -> None:
        """Called by the engine."""
        self._jobs.put(_Job(covers=covers, residuals=residuals, inner=inner))

    def join(self, timeout_s: float) -> None:
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def _write(self, n: int, job: _Job) -> bool:
        write_unit_state(self._run, self._identity, n, job.covers, job.residuals, job.inner)
        return True

    def _loop(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                while not self._outbox.wait_published(job.covers.seq + 1, 1.0):
                    if self._stop.is_set():
                        return
                if self._link.until_done("save the unit's state", partial(self._write, self._written, job)):
                    self._written += 1
        except BaseException as error:  # reported to the training thread, which raises it
            self._on_error(error)
