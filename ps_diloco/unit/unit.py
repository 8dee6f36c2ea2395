"""A unit's life as its training loop sees it. Everything in this file runs on the training thread, between two inner steps, and does no I/O.

::

    with ps_diloco.join(run_url, model, optimizer, unit="us-east-1a") as unit:
        while not unit.done:
            ...one inner step...
            unit.step(tokens=n)
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from ps_diloco.binding import ModelBinding
from ps_diloco.config import RunSettings
from ps_diloco.errors import PsDilocoError, UserError
from ps_diloco.progress import LearningRateProgress, join_ramp, model_tokens
from ps_diloco.records import Covers
from ps_diloco.run import OpenRun
from ps_diloco.store.counting import CountingStore
from ps_diloco.unit.engine import Adopted, Cut, Engine, Restart, Save
from ps_diloco.unit.heart import Heart
from ps_diloco.unit.link import Link
from ps_diloco.unit.outbox import Identity, Outbox
from ps_diloco.unit.puller import News, Puller
from ps_diloco.unit.saved import InnerState, Restored, capture_optimizer
from ps_diloco.unit.saver import Saver

log = logging.getLogger("ps_diloco.unit")


@dataclass
class Span:
    """What was done to a fragment since its previous cut."""

    tokens: int = 0
    steps: int = 0
    losses: float = 0.0
    counted: int = 0
    due_at: int = 0

    def add(self, tokens: int, loss: float | None) -> None:
        self.tokens += tokens
        self.steps += 1
        if loss is not None:
            self.losses += loss
            self.counted += 1

    def clear(self) -> None:
        self.tokens = self.steps = self.counted = 0
        self.losses = 0.0


@dataclass(kw_only=True)
class Parts:
    """The background half of a unit, put together by ``join``."""

    run: OpenRun
    store: CountingStore
    identity: Identity
    engine: Engine
    outbox: Outbox
    puller: Puller
    saver: Saver
    heart: Heart
    link: Link
    stop: threading.Event
    errors: list[BaseException] = field(default_factory=list)


class Unit:
    """One independently paced trainer of a run. Use from one thread."""

    def __init__(
        self,
        parts: Parts,
        binding: ModelBinding,
        optimizer: torch.optim.Optimizer | None,
        settings: RunSettings,
        first: News,
        restored: Restored | None,
        extra: Callable[[], Any] | None,
    ) -> None:
        self._parts = parts
        self._binding = binding
        self._optimizer = optimizer
        self._settings = settings
        self._extra = extra
        self._layout = parts.run.layout
        self._clock = parts.run.env.clock
        self.name = parts.identity.unit
        self.incarnation = parts.identity.incarnation
        self.restored = restored.inner.extra if restored else None
        """What ``extra`` returned when the restored state was saved; None if no state was restored."""
        self.inner_steps = restored.inner.inner_steps if restored else 0
        self.tokens = restored.inner.tokens if restored else 0
        self.steps = 0
        """Inner steps of this incarnation."""
        self.blocked_s = 0.0
        """Seconds for which synchronisation kept the training thread from training."""
        self._begun_s = self._clock.monotonic()
        self._done = False
        self._closed = False
        self._progress = LearningRateProgress(settings.target_tokens)
        warmup = settings.unit.join_warmup_steps
        warmup = settings.unit.sync_every if warmup is None else warmup
        self._ramp = warmup if restored is None else 0
        """Inner steps for which the learning rate rises, because the inner optimizer starts cold."""
        late = self._ramp > 0 and first.head.record.tokens > 0
        self._to_restart = set(range(len(self._layout.fragments))) if late else set()
        self._spans = [Span() for _ in self._layout.fragments]
        self._schedule_cuts()
        self._cuts_since_save = 0
        self._loss: float | None = None
        """Mean training loss of the last span that ended."""

    # what a training loop needs

    def step(self, *, tokens: int, loss: float | None = None) -> None:
        """Call after each inner step, with the tokens it trained on and, for reports, its loss.

        Costs an addition per fragment; at a cut also the copy of a fragment to the host, and when a correction is ready its addition. Raises what the
        background threads found: :class:`Fenced` when a newer process runs under this name, :class:`FormatError` when the run is damaged.
        """
        if self._closed:
            raise UserError("the unit is closed", unit=self.name, remedy="join again")
        if tokens < 1:
            raise UserError("a step trains on at least one token", tokens=tokens)
        begun_s = self._clock.monotonic()
        self.steps += 1
        self.inner_steps += 1
        self.tokens += tokens
        for span in self._spans:
            span.add(tokens, loss)
        self._raise_errors()
        self._adopt()
        if not self._ramping:
            self._cut_what_is_due()
        self.blocked_s += self._clock.monotonic() - begun_s

    @property
    def done(self) -> bool:
        """True once the run has ended; the model then holds the final version."""
        self._raise_errors()
        final = self._parts.engine.final
        if final is not None and not self._done:
            self._done = True
            for fragment, value in enumerate(final.values):
                self._binding.replace(fragment, value)
        return self._done

    @property
    def progress(self) -> float | None:
        """Fraction of the run's target tokens that is done, own work on its way included; None without a target."""
        if self._settings.target_tokens is None:
            return None
        engine = self._parts.engine
        unmerged = [queued + span.tokens for queued, span in zip(engine.unmerged_tokens(), self._spans, strict=True)]
        return self._progress.update(model_tokens(self._layout, engine.adopted_tokens), model_tokens(self._layout, unmerged))

    @property
    def lr_scale(self) -> float:
        """Factor for the learning rate: below 1 only during the first steps of an incarnation that restored no inner state."""
        return join_ramp(self.steps + 1, self._ramp)

    @property
    def version(self) -> int:
        """The newest global version that was read."""
        return self._parts.engine.newest.head.record.version

    def report(self) -> dict[str, Any]:
        """Numbers for people and dashboards; also in the heartbeat. Safe to call from any thread."""
        parts, counts = self._parts, self._parts.store.snapshot()
        accounts = parts.engine.accounts
        return {
            "incarnation": self.incarnation,
            "steps": self.steps,
            "inner_steps": self.inner_steps,
            "tokens": self.tokens,
            "loss": self._loss,
            "version": self.version,
            "published": parts.outbox.published,
            "undecided": parts.engine.undecided(),
            "elapsed_s": round(self._clock.monotonic() - self._begun_s, 3),
            "blocked_s": round(self.blocked_s, 4),
            "bytes_pushed": counts.bytes_out,
            "bytes_pulled": counts.bytes_in,
            "bytes_saved": parts.saver.bytes_written,
            "away_s": round(parts.link.away_s, 1),
            "lost_tokens": sum(account.lost_tokens for account, _ in accounts),
            "taken_back": sum(account.taken_back for account, _ in accounts),
            "unbalanced": max(abs(balance) for _, balance in accounts),
        }

    def close(self, reason: str = "closed", *, drain_s: float = 15.0) -> None:
        """Publish what is done so far, save the unit's own state, say goodbye. Waits for the bucket at most ``drain_s``. Does I/O."""
        if self._closed:
            return
        self._closed = True
        parts = self._parts
        if not self._done and not parts.errors:
            self._adopt()
            for fragment, span in enumerate(self._spans):
                if span.steps and not self._ramping and parts.engine.can_cut(fragment):
                    self._cut(fragment)
            if not self._ramping:
                self._save()
        if parts.errors:  # a background thread has ended, so nothing more will be sent
            drain_s = 0.0
        parts.engine.join(drain_s)
        parts.outbox.wait_published(parts.outbox.accepted, drain_s)
        parts.saver.join(drain_s)
        parts.stop.set()
        parts.outbox.join(5.0)
        parts.puller.join(5.0)
        parts.heart.end("run ended" if self._done else reason)
        parts.store.close()

    def __enter__(self) -> Unit:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and not isinstance(error, KeyboardInterrupt):
            self._parts.errors.append(error)  # what the model holds now may be half a step: publish nothing of it
        self.close("closed" if error is None else type(error).__name__)

    # the parts of a step

    @property
    def _ramping(self) -> bool:
        return bool(self._to_restart)

    def _adopt(self) -> None:
        """Apply the corrections that are ready."""
        engine = self._parts.engine
        if self._ramping and self.steps == self._ramp:
            engine.post(Restart())
        for correction in engine.take_corrections():
            fragment, span = correction.fragment, self._spans[correction.fragment]
            if correction.add_F is not None:
                self._binding.add(fragment, correction.add_F)
                self._binding.adopt_buffers(fragment, correction.value.floats, correction.value.ints)
                engine.post(Adopted(fragment=fragment))
                continue
            before, lost = self._binding.snapshot(fragment), span.tokens
            self._binding.replace(fragment, correction.value)
            engine.post(Adopted(fragment=fragment, before=before, lost_tokens=lost))
            span.clear()
            if self.steps >= self._ramp and fragment in self._to_restart:
                self._to_restart.discard(fragment)
                if not self._to_restart:
                    self._schedule_cuts()

    def _schedule_cuts(self) -> None:
        """Fragments take turns: with P fragments and a cut of each every H steps, one is cut every H / P steps."""
        every, count = self._settings.unit.sync_every, len(self._spans)
        for fragment, span in enumerate(self._spans):
            span.due_at = self.steps + max(1, round(every * (fragment + 1) / count))

    def _cut_what_is_due(self) -> None:
        for fragment, span in enumerate(self._spans):
            if not span.steps or self.steps < span.due_at or not self._parts.engine.can_cut(fragment):
                continue  # replaced in this very step, not due, or two of its cuts wait: then the span grows
            self._cut(fragment)
            every = self._settings.unit.sync_every
            span.due_at += every * (1 + (self.steps - span.due_at) // every)
        every_cuts = self._settings.unit.state_every_cuts
        if every_cuts and self._cuts_since_save >= every_cuts * len(self._spans) and self._parts.saver.free:
            self._save()

    def _cut(self, fragment: int) -> None:
        span = self._spans[fragment]
        loss = self._loss = span.losses / span.counted if span.counted and math.isfinite(span.losses) else None
        self._parts.engine.post(
            Cut(
                fragment=fragment,
                snapshot=self._binding.snapshot(fragment),
                tokens=span.tokens,
                steps=span.steps,
                inner_steps=self.inner_steps,
                loss=loss,
            )
        )
        span.clear()
        self._cuts_since_save += 1

    def _save(self) -> None:
        """Capture the inner state now; residuals follow from the engine, in order; the saver writes it once all cuts that it covers are published."""
        self._cuts_since_save = 0
        tensors, scalars = capture_optimizer(self._optimizer, self._binding.names) if self._optimizer is not None else ({}, {})
        inner = InnerState(
            tensors=tensors,
            scalars=scalars,
            extra=_json(self._extra()) if self._extra is not None else None,
            inner_steps=self.inner_steps,
            tokens=self.tokens,
        )
        saver, timeline = self._parts.saver, self._parts.identity.timeline
        saver.expect()
        self._parts.engine.post(Save(then=lambda residuals, cuts: saver.put(Covers(timeline=timeline, seq=cuts - 1), residuals, inner)))

    def _raise_errors(self) -> None:
        if self._parts.errors and not self._closed:
            error = self._parts.errors[0]
            if isinstance(error, PsDilocoError):
                raise error
            raise RuntimeError("a background thread of the unit failed") from error


def _json(extra: Any) -> Any:
    """``extra`` as it will come back; raises :class:`UserError` if it is not JSON."""
    try:
        return json.loads(json.dumps(extra, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UserError("what extra returns must be JSON", cause=error, remedy="return numbers, text, lists and dicts of them") from None
