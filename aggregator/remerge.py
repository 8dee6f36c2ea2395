"""Outer state that was not saved at a version, made again from one that was (format §6.3, §7.4 step 6).

Momentum m and error e of a fragment are saved every ``pull.state_every`` steps. The manifests say of every step which contributions it merged, with which
coefficients, under which settings, and which update it published: from these the same bits follow, whichever process asks.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from aggregator.admit import Refusal, fetch_shard, read_shard
from ps_diloco import keys
from ps_diloco.arrays import empty
from ps_diloco.checkpoint import read_update
from ps_diloco.config import RunSettings
from ps_diloco.errors import FormatError, IntegrityError, NotFound
from ps_diloco.ids import ContributionId
from ps_diloco.merge import FragmentMerge
from ps_diloco.outer import OuterState, outer_update
from ps_diloco.records import RECORD_BYTES_MAX, Contribution, Delta, Manifest, Merged, Step, Stored, decode, sha256_of
from ps_diloco.run import OpenRun
from ps_diloco.shard import encode_section

log = logging.getLogger(__name__)

TOLERANCE = 1e-3
"""Of the update's norm: what another torch or instruction set may make of the same step. Equal fingerprints give equal bits (I7)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """A step that a manifest holds, with what is needed to take it again."""

    step: Step
    config: int
    delta: Delta


class History:
    """The steps of the newest versions, found by walking from a head to its parents. Each manifest is read once."""

    def __init__(self, run: OpenRun) -> None:
        self._run = run
        self._taken: dict[tuple[int, int], Taken] = {}
        self._timeline = 0

    def since_state(self, head: Stored[Manifest], fragment: int, after: int) -> list[Taken]:
        """Steps of ``fragment`` from fragment version ``after`` to the head's, oldest first. Does I/O.

        Looks for the unsaved steps of all fragments at once, since whoever needs one of them is new and will need the others.
        """
        if head.record.timeline != self._timeline:  # the other line had other steps
            self._taken.clear()
            self._timeline = head.record.timeline
        entries = head.record.fragments
        saved = [entry.state.fragment_version if entry.state else 0 for entry in entries]
        saved[fragment] = min(after, saved[fragment])
        self._taken = {place: taken for place, taken in self._taken.items() if place[1] > saved[place[0]]}
        wanted = {(f, to) for f, entry in enumerate(entries) for to in range(saved[f] + 1, entry.fragment_version + 1)}
        manifest: Stored[Manifest] | None = None
        while not wanted <= self._taken.keys():
            manifest = head if manifest is None else self._parent(manifest)
            self._note(manifest.record)
        return [self._taken[fragment, to] for to in range(after + 1, entries[fragment].fragment_version + 1)]

    def _note(self, manifest: Manifest) -> None:
        for step in manifest.steps:
            entry = manifest.fragments[step.fragment]
            self._taken[step.fragment, step.to] = Taken(step=step, config=manifest.config, delta=entry.deltas[-1])

    def _parent(self, manifest: Stored[Manifest]) -> Stored[Manifest]:
        parent = manifest.record.parent
        if parent is None:
            raise FormatError("a step since the last saved outer state is in no manifest", run_id=self._run.run_id)
        found = self._run.log.read(parent.timeline, parent.version)
        if found is None or found.sha256 != parent.sha256:
            raise IntegrityError(
                "a manifest is not the one that its successor names (I4)", timeline=parent.timeline, version=parent.version
            )
        return found


def step_again(run: OpenRun, taken: Taken, state: OuterState, settings: RunSettings, *, threads: int = 1) -> None:
    """Carry ``state`` over one step, in place. Does I/O: two GET per contribution and one for the update.

    The error that is kept is that of the update which was *published*, so nothing is lost even where this machine rounds otherwise than the one that
    took the step. Raises :class:`FormatError` when a contribution is gone or the published update does not follow from it.
    """
    fragment = taken.step.fragment
    merging = FragmentMerge(run.layout.fragments[fragment])
    for merged in taken.step.merged:
        _add(run, merged, merging, threads)
    published_F = read_update(run, fragment, taken.delta)
    exactly = True

    def quantise(x_F: torch.Tensor) -> torch.Tensor:
        nonlocal exactly
        again_F = empty(x_F.numel())
        encode_section("params", settings.pull.codec, x_F, decoded=again_F, threads=threads)
        exactly = torch.equal(again_F, published_F)
        if not exactly:
            difference = torch.linalg.vector_norm(again_F.sub_(published_F), dtype=torch.float64)
            if difference > TOLERANCE * torch.linalg.vector_norm(published_F, dtype=torch.float64):
                raise IntegrityError(
                    "a published update does not follow from what its step merged (I7)", fragment=fragment, to=taken.step.to
                )
        return published_F

    outer_update(state, merging.gradient, settings.outer, quantise)
    if not exactly:
        log.warning("step %d of fragment %d has other low bits on this machine; the published ones are kept", taken.step.to, fragment)


def _add(run: OpenRun, merged: Merged, merging: FragmentMerge, threads: int) -> None:
    """Add a contribution that a manifest says was merged, with the coefficient that it says."""
    key = keys.record(ContributionId.parse(merged.contribution))
    remedy = "outer state can be rebuilt only while the contributions since its last save are kept"
    try:
        body = run.store.get(key, max_bytes=RECORD_BYTES_MAX)
        if sha256_of(body) != merged.record:
            raise IntegrityError("a record is not the one that was merged", key=key)
        record = decode(Contribution, body, key=key, run_id=run.run_id)
        answer = fetch_shard(run, record)
    except NotFound as error:
        raise FormatError(
            "a merged contribution is gone that the outer state needs", contribution=merged.contribution, cause=error, remedy=remedy
        ) from None
    if not isinstance(answer, Refusal):
        read = read_shard(run, record, answer, merging.adding(merged.coefficient), threads=threads)
        if not isinstance(read, Refusal):
            return
        answer = read
    raise FormatError("a merged contribution cannot be read any more", contribution=merged.contribution, cause=answer.detail, remedy=remedy)
