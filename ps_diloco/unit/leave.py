"""How a unit leaves: publish what can be published, save what cannot, say what became of it. Bounded in time whatever the bucket does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ps_diloco.records import Covers
from ps_diloco.unit.parts import Parts
from ps_diloco.unit.saved import InnerState

SAVE_S_MIN = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """What a unit left behind. ``unsent`` cuts, and the last steps of ``uncut`` fragments, are in the saved state, if there is one, and lost otherwise."""

    listed: bool
    published: int
    unsent: int
    uncut: int
    """Fragments that could not be cut at the end, because two contributions of theirs wait to be merged."""
    saved: bool


def wind_down(
    parts: Parts,
    inner: InnerState | None,
    *,
    fresh: Mapping[int, torch.Tensor],
    waiting: Mapping[int, torch.Tensor],
    drain_s: float,
    reason: str,
) -> Ending:
    """End all background threads. ``inner`` None: nothing more is published or saved.

    ``fresh``: parameters [F] of fragments whose last span could not be cut any more; ``waiting``: residuals of an earlier incarnation that were not used
    yet. Both go into the saved state, so that the next incarnation sends them.
    """
    clock = parts.run.env.clock
    until_s = clock.monotonic() + drain_s

    def left_s() -> float:
        return max(0.0, until_s - clock.monotonic())

    engine, outbox, saver = parts.engine, parts.outbox, parts.saver
    ended = engine.join(left_s())
    if inner is not None and ended and outbox.listed.is_set():
        outbox.wait_published(outbox.accepted, left_s())
    outbox.halt()
    published, unsent = outbox.published, outbox.accepted - outbox.published
    saved = False
    if inner is not None and ended and not parts.errors:
        residuals = {state.fragment: state.unsent() for state in engine.states()}
        for state in engine.states():
            if state.fragment in fresh:
                residuals[state.fragment].add_(state.reference).sub_(fresh[state.fragment])
            if state.fragment in waiting:
                residuals[state.fragment].add_(waiting[state.fragment])
        saver.expect()
        saver.put(Covers(timeline=parts.identity.timeline, seq=published - 1), residuals, inner)
        saver.join(max(SAVE_S_MIN, left_s()))
        saved = saver.free
    parts.stop.set()
    for thread in (outbox, saver, parts.puller):
        thread.join(1.0)
    parts.heart.end(reason)
    if parts.owns_store:
        parts.store.close()
    return Ending(listed=outbox.listed.is_set(), published=published, unsent=unsent, uncut=len(fresh), saved=saved)
