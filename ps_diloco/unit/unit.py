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
import operator
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from ps_diloco.binding import ModelBinding
from ps_diloco.config import RunSettings
from ps_diloco.errors import PsDilocoError, UserError
from ps_diloco.progress import LearningRateProgress, join_ramp, model_tokens
from ps_diloco.records import Covers
from ps_diloco.unit.engine import Adopted, Cut, Left, Restart, Save
from ps_diloco.unit.leave import Ending, wind_down
from ps_diloco.unit.parts import Parts
from ps_diloco.unit.puller import News
from ps_diloco.unit.saved import InnerState, Restored, capture_optimizer

log = logging.getLogger("ps_diloco.unit")

LOOK_EVERY_S = 1.0
UNLISTED_S = 30.0


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
        *,
        cold: bool,
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
        self._waiting = dict(restored.residuals) if restored else {}
        self.steps = 0
        """Inner steps of this process; ``inner_steps`` goes on over restarts."""
        self.blocked_s = 0.0
        """Seconds for which synchronisation kept the training thread from training."""
        self._begun_s = self._clock.monotonic()
        self._done = self._closed = self._stopping = self._inside = self._told = False
        self.ending: Ending | None = None
        """What became of the work, once the unit is closed."""
        self._look_at_s = self._begun_s + LOOK_EVERY_S
        self._told_unlisted = False
        self._progress = LearningRateProgress(settings.target_tokens)
        warmup = settings.unit.join_warmup_steps
        warmup = settings.unit.sync_every if warmup is None else warmup
        self._ramp = warmup if cold else 0
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
        tokens, loss = _whole(tokens), None if loss is None else float(loss)
        begun_s = self._clock.monotonic()
        self.steps += 1
        self.inner_steps += 1
        self.tokens += tokens
        for span in self._spans:
            span.add(tokens, loss)
        self._raise_errors()
        self._inside = True  # if this is left by an exception, the model may hold half a correction: then nothing more is published
        self._adopt()
        if not self._ramping:
            self._cut_what_is_due()
        self._inside = False
        ended_s = self._clock.monotonic()
        self.blocked_s += ended_s - begun_s
        if ended_s >= self._look_at_s:
            self._look_at_s = ended_s + LOOK_EVERY_S
            self._look(ended_s)

    @property
    def done(self) -> bool:
        """True once the run has ended, and the model then holds the final version; or once :meth:`stop` was called."""
        self._raise_errors()
        final = self._parts.engine.final
        if final is not None and not self._done:
            self._done = self._inside = True
            for fragment, value in enumerate(final.values):
                before, span = self._binding.snapshot(fragment, frozen=False), self._spans[fragment]
                self._binding.replace(fragment, value)
                self._parts.engine.post(Left(fragment=fragment, before=before, lost_tokens=span.tokens))
                span.clear()
            self._inside = False
        return self._done or self._stopping

    @property
    def progress(self) -> float | None:
        """Fraction of the run's target tokens that is done, own work on its way included; None without a target."""
        if self._settings.target_tokens is None:
            return None
        engine = self._parts.engine
        unmerged = [queued + span.tokens for queued, span in zip(engine.unmerged_tokens(), self._spans, strict=True)]
        adopted = engine.adopted_tokens
        if self._done and engine.final is not None:  # which was not adopted fragment by fragment
            adopted = [entry.tokens for entry in engine.final.head.record.fragments]
        return self._progress.update(model_tokens(self._layout, adopted), model_tokens(self._layout, unmerged))

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

    def stop(self) -> None:
        """Ask the loop to end: ``done`` becomes true. Safe in a signal handler; leaving the ``with`` block then publishes and saves."""
        self._stopping = True

    def close(self, reason: str = "closed", *, drain_s: float = 15.0) -> Ending:
        """Publish what is done so far, save the unit's own state, say goodbye; returns what became of it. Does I/O, for little more than ``drain_s``.

        Raises what a background thread had found and nobody was told yet.
        """
        if self.ending is not None:
            return self.ending
        self._closed = True
        parts = self._parts
        inner, fresh = None, {}
        try:
            if not (self._done or self._inside or parts.errors):
                self._adopt()
                if not self._ramping:
                    fresh = self._cut_what_is_left()
                    inner = self._capture()
        finally:
            self.ending = wind_down(
                parts,
                inner,
                fresh=fresh,
                waiting={} if parts.outbox.listed.is_set() else self._waiting,
                drain_s=0.0 if parts.errors else drain_s,
                reason="run ended" if self._done else reason,
            )
        if not self._told:
            self._raise_errors()
        return self.ending

    def __enter__(self) -> Unit:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        if not isinstance(error, KeyboardInterrupt | SystemExit):
            self._parts.errors.append(error)  # what the model holds now may be half a step: publish nothing of it
            self._told = True
        self.close(type(error).__name__)

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
            before, lost = self._binding.snapshot(fragment, frozen=False), span.tokens
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
        parts = self._parts
        unused = self._waiting and not parts.outbox.listed.is_set()  # residuals that a state saved now would lack
        if every_cuts and self._cuts_since_save >= every_cuts * len(self._spans) and parts.saver.free and not unused:
            self._save()

    def _cut_what_is_left(self) -> dict[int, torch.Tensor]:
        """The last cuts; of fragments that may not be cut any more the parameters, for the saved state."""
        kept: dict[int, torch.Tensor] = {}
        for fragment, span in enumerate(self._spans):
            if span.steps and self._parts.engine.can_cut(fragment):
                self._cut(fragment)
            elif span.steps:
                kept[fragment] = self._binding.snapshot(fragment, frozen=False).params
        return kept

    def _cut(self, fragment: int) -> None:
        span = self._spans[fragment]
        loss = self._loss = span.losses / span.counted if span.counted and math.isfinite(span.losses) else None
        self._parts.engine.post(
            Cut(
                fragment=fragment,
                snapshot=self._binding.snapshot(fragment, frozen=False),
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
        inner, saver, timeline = self._capture(), self._parts.saver, self._parts.identity.timeline
        saver.expect()
        self._parts.engine.post(Save(then=lambda residuals, cuts: saver.put(Covers(timeline=timeline, seq=cuts - 1), residuals, inner)))

    def _capture(self) -> InnerState:
        tensors, scalars = capture_optimizer(self._optimizer, self._binding.names) if self._optimizer is not None else ({}, {})
        return InnerState(
            optimizer=type(self._optimizer).__name__ if self._optimizer is not None else "",
            tensors=tensors,
            scalars=scalars,
            extra=json_of(self._extra()) if self._extra is not None else None,
            inner_steps=self.inner_steps,
            tokens=self.tokens,
        )

    def _look(self, now_s: float) -> None:
        """Now and then: what a person should know."""
        self._parts.link.look()
        if not self._told_unlisted and not self._parts.outbox.listed.is_set() and now_s - self._begun_s > UNLISTED_S:
            self._told_unlisted = True
            log.warning("no aggregator has listed this unit for %.0f s: it trains, but nothing can be published until one runs", UNLISTED_S)

    def _raise_errors(self) -> None:
        if self._parts.errors:
            self._told = True
            error = self._parts.errors[0]
            if isinstance(error, PsDilocoError):
                raise error
            raise RuntimeError("a background thread of the unit failed") from error


def json_of(extra: Any) -> Any:
    """``extra`` as it will come back; raises :class:`UserError` if it is not JSON."""
    try:
        return json.loads(json.dumps(extra, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UserError("what extra returns must be JSON", cause=error, remedy="return numbers, text, lists and dicts of them") from None


def _whole(tokens: Any) -> int:
    """A positive int from whatever counts as one; raises :class:`UserError`."""
    try:
        count = operator.index(tokens.item() if hasattr(tokens, "item") else tokens)
    except (TypeError, ValueError, RuntimeError):
        count = 0
    if count < 1:
        raise UserError("a step trains on a whole number of tokens, at least one", tokens=tokens)
    return count
