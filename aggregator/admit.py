"""Every check of an untrusted contribution (format §8.1).

:func:`admit` looks at the record alone and is pure; :func:`fetch_shard` and :func:`read_shard` check the bytes. Each answers with the value or with a
:class:`Refusal`, never with both and never with an exception for something that a unit sent.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from ps_diloco import keys
from ps_diloco.checkpoint import update_sections
from ps_diloco.codecs import Each
from ps_diloco.errors import FormatError, NonFinite
from ps_diloco.inbox import Incoming
from ps_diloco.merge import Candidate, SumSquares, check_sum_squares, lag_of
from ps_diloco.records import Contribution, Manifest, Reason, Run
from ps_diloco.run import OpenRun
from ps_diloco.shard import FLOAT_CODECS, ShardReader, shard_bytes_max
from ps_diloco.store.refs import fetch

_SHARD_NAME = re.compile(r"-[0-9a-f]{16}-r\d{5}\.shard", re.ASCII)  # after the record's own name (format §4)


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    reason: Reason
    detail: str
    if_head_is_new: bool = False
    """True only where the head was read after the record: an older head does not know the version that the record begins from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Admitted:
    """A contribution whose record is in order; its shard has not been looked at."""

    candidate: Candidate
    record: Contribution
    sha256: str
    first_seen_s: float


def admit(incoming: Incoming, head: Manifest, run: Run) -> Admitted | Refusal:
    """Check a record against run and head. Pure."""
    record = incoming.record
    if record is None:
        return Refusal(reason="bad-record", detail=incoming.problem)
    if record.layout_hash != run.layout_hash:
        return Refusal(reason="bad-record", detail=f"layout hash {record.layout_hash} is not the run's {run.layout_hash}")
    if record.fragment >= len(head.fragments):
        return Refusal(reason="bad-record", detail=f"fragment {record.fragment} of {len(head.fragments)}")
    if record.codec not in FLOAT_CODECS:
        return Refusal(reason="codec", detail=f"codec {record.codec!r}, known are {', '.join(sorted(FLOAT_CODECS))}")
    if len(record.shards) != 1 or record.shards[0].slices is not None:
        return Refusal(reason="bad-record", detail="contributions of several ranks are not read by this version")
    own = keys.record(record.id).removesuffix(".json")
    if not _SHARD_NAME.fullmatch(record.shards[0].ref.key.removeprefix(own)):
        return Refusal(
            reason="bad-record", detail=f"shard {record.shards[0].ref.key} does not stand under the contribution's own name {own}"
        )
    if len(record.sum_squares) != len(run.layout.of(record.fragment)):
        return Refusal(
            reason="bad-record", detail=f"{len(record.sum_squares)} sums of squares for {len(run.layout.of(record.fragment))} tensors"
        )
    entry = head.fragments[record.fragment]
    staleness = entry.fragment_version - record.base.fragment_version
    if staleness < 0:
        return Refusal(
            reason="bad-record",
            detail=f"base {record.base.fragment_version} is above the head {entry.fragment_version}: from the future",
            if_head_is_new=True,
        )
    if staleness > run.staleness_limit:
        return Refusal(reason="stale", detail=f"staleness {staleness} is beyond the limit {run.staleness_limit}")
    known = {delta.fragment_version: delta.sha256 for delta in entry.deltas} | {entry.fragment_version: entry.sha256}
    if known.get(record.base.fragment_version, record.base.sha256) != record.base.sha256:
        return Refusal(reason="bad-record", detail=f"base hash is not that of fragment version {record.base.fragment_version}")
    candidate = Candidate(id=record.id, tokens=record.tokens, steps=record.steps, staleness=staleness, lag=lag_of(staleness, entry.masses))
    return Admitted(candidate=candidate, record=record, sha256=incoming.sha256, first_seen_s=incoming.first_seen_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffers:
    """What a contribution holds beside its pseudo-gradient: buffers [B] float32 and [I] int64."""

    floats_B: torch.Tensor
    ints_I: torch.Tensor


def fetch_shard(run: OpenRun, record: Contribution) -> bytes | Refusal:
    """The bytes of a contribution's shard, size and hash checked. Does I/O; the store's errors pass through (:class:`NotFound` among them)."""
    try:
        return fetch(run.store, record.shards[0].ref, max_bytes=shard_bytes_max(update_sections(run.layout.fragments[record.fragment])))
    except FormatError as error:
        return Refusal(reason="corrupt", detail=str(error)[:1900])


def read_shard(run: OpenRun, record: Contribution, data: bytes, each: Each, *, threads: int = 1) -> Buffers | Refusal:
    """Decode a contribution: its pseudo-gradient goes to ``each`` piece by piece, its buffers come back. CPU only.

    Whether the whole was in order is known at the end: with a :class:`Refusal` everything that ``each`` got must be given up.
    """
    expected, entries = update_sections(run.layout.fragments[record.fragment]), run.layout.of(record.fragment)
    sums = SumSquares(entries)

    def count(start: int, delta_P: torch.Tensor) -> None:
        sums.add(start, delta_P)
        each(start, delta_P)

    try:
        shard = ShardReader(data, kind="contribution", run_id=run.run_id, of=str(record.id), fragment=record.fragment, expected=expected)
        buffers = Buffers(floats_B=shard.read("floats"), ints_I=shard.read("ints"))
        shard.visit("params", count, threads=threads)
        check_sum_squares(sums.totals(), record.sum_squares, entries)
    except NonFinite as error:
        return Refusal(reason="non-finite", detail=str(error)[:1900])
    except FormatError as error:
        return Refusal(reason="corrupt", detail=str(error)[:1900])
    return buffers
