"""Every JSON object of a bucket as a frozen, strictly checked model (format §5).

::

    body = encode(manifest)                       # bytes to claim
    manifest = decode(Manifest, body, key=key)    # FormatError if anything is off
    digest = sha256_of(body)                      # what the next manifest names as its parent
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
)
from typing_extensions import TypeAliasType

from ps_diloco.config import RunSettings
from ps_diloco.errors import FormatError, IntegrityError, LimitExceeded, UnknownFormat
from ps_diloco.ids import ATTEMPT_ID, UNIT_NAME, ContributionId
from ps_diloco.layout import Layout

FORMAT = 0
COUNT_MAX = 2**53
UNDECIDED_MAX = 64
RUN_BYTES_MAX = 64 << 20
MANIFEST_BYTES_MAX = 32 << 20
RECORD_BYTES_MAX = 1 << 20
HINT_BYTES_MAX = 64 << 10


def _pattern(pattern: re.Pattern[str]) -> AfterValidator:
    def check(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError(f"does not match {pattern.pattern}")
        return text

    return AfterValidator(check)


_EXACT = re.compile(r"-?0x[01]\.[0-9a-f]{1,13}p[+-][0-9]{1,4}")


def _parse_exact(value: object, info: ValidationInfo) -> object:
    if isinstance(value, str) and _EXACT.fullmatch(value):
        try:
            return float.fromhex(value)
        except OverflowError as error:
            raise ValueError("exact number is too large for a float64") from error
    if info.mode == "json":
        raise ValueError("exact numbers are hexadecimal float text")
    return value


Exact = Annotated[
    float,
    BeforeValidator(_parse_exact),
    Field(allow_inf_nan=False),
    PlainSerializer(lambda x: float(x).hex(), return_type=str),
]
"""A float64 that survives JSON bit for bit (format §3)."""
Digest = Annotated[str, _pattern(re.compile(r"[0-9a-f]{64}"))]
AttemptId = Annotated[str, _pattern(ATTEMPT_ID)]
RunId = Annotated[str, _pattern(re.compile(r"[0-9a-f]{32}"))]
UnitName = Annotated[str, _pattern(UNIT_NAME)]
Count = Annotated[int, Field(ge=0, le=COUNT_MAX)]
Positive = Annotated[int, Field(ge=1, le=COUNT_MAX)]
Number6 = Annotated[int, Field(ge=0, le=999_999)]
Text = Annotated[str, Field(max_length=2000)]
Key = Annotated[str, _pattern(re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]*(/[A-Za-z0-9_=-][A-Za-z0-9._=-]*)*")), Field(max_length=1000)]
DecimalText = Annotated[str, _pattern(re.compile(r"0|[1-9][0-9]{0,19}"))]
"""A number as the key of a JSON object."""


def _contribution_name(text: str) -> str:
    try:
        return str(ContributionId.parse(text))
    except FormatError as error:
        raise ValueError(error.rule) from None


ContributionName = Annotated[str, AfterValidator(_contribution_name)]


class Part(BaseModel):
    """Base of everything that stands inside a record."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class Record(Part):
    """Base of every JSON object: format number, kind, run."""

    format: int = FORMAT
    kind: str
    run_id: RunId


class Ref(Part):
    """An object named with its size and SHA-256; ``key`` is relative to the region root."""

    key: Key
    size: Count
    sha256: Digest


class Parent(Part):
    timeline: Number6
    version: Count
    sha256: Digest


class Run(Record):
    """``run.json``: the immutable identity of a run (format §5.1)."""

    kind: Literal["run"] = "run"
    software: Text
    created_at: Text
    name: Text
    attempt: AttemptId
    seed: Annotated[int, Field(ge=0)]
    home: UnitName
    staleness_limit: Positive
    layout: Layout
    layout_hash: Digest
    program: dict[str, Any]


class Config(Record):
    """``config/<n>.json``: settings in force (format §5.3)."""

    kind: Literal["config"] = "config"
    n: Number6
    attempt: AttemptId
    reason: Text
    created_at: Text
    settings: RunSettings


class Timeline(Record):
    """``timelines/<n>.json``: a line of versions and where it starts (format §5.4)."""

    kind: Literal["timeline"] = "timeline"
    timeline: Number6
    attempt: AttemptId
    parent: Parent | None
    first_version: Count
    config: Number6
    reason: Text
    created_at: Text


class Covers(Part):
    """All contributions of an incarnation up to ``seq`` are included in a saved state."""

    timeline: Number6
    seq: Annotated[int, Field(ge=-1, le=COUNT_MAX)]


class Restored(Part):
    incarnation: Number6
    covers: Covers


class Incarnation(Record):
    """``units/<unit>/incarnations/<k>.json`` (format §5.5)."""

    kind: Literal["incarnation"] = "incarnation"
    unit: UnitName
    incarnation: Number6
    attempt: AttemptId
    region: UnitName
    software: Text
    created_at: Text
    restored: Restored | None


class Base(Part):
    """What a contribution's work started from."""

    fragment_version: Count
    sha256: Digest


Slices = TypeAliasType("Slices", Annotated[tuple[tuple[Count, Count, Positive], ...], FailFast()])


class ShardRef(Part):
    ref: Ref
    slices: Slices | None = None


class Contribution(Record):
    """A record: written last, it publishes a contribution (format §5.6)."""

    kind: Literal["contribution"] = "contribution"
    timeline: Number6
    unit: UnitName
    incarnation: Number6
    seq: Count
    attempt: AttemptId
    layout_hash: Digest
    fragment: Number6
    base: Base
    tokens: Positive
    steps: Positive
    inner_steps: Count
    codec: Text
    shards: Annotated[tuple[ShardRef, ...], FailFast(), Field(min_length=1, max_length=100_000)]
    sum_squares: Annotated[tuple[Exact, ...], FailFast()]
    loss: Exact | None
    resent: bool
    created_at: Text

    @property
    def id(self) -> ContributionId:
        return ContributionId(self.timeline, self.unit, self.incarnation, self.seq)


class Anchor(Part):
    fragment_version: Count
    objects: Annotated[tuple[Ref, ...], FailFast(), Field(min_length=1, max_length=100_000)]


class Delta(Part):
    fragment_version: Positive
    sha256: Digest
    object: Ref


class State(Part):
    fragment_version: Positive
    object: Ref


class Round(Part):
    tokens: Positive
    fragment_version: Positive


class FragmentEntry(Part):
    """Where a fragment stands in a version (format §5.7)."""

    fragment_version: Count
    sha256: Digest
    anchor: Anchor
    deltas: Annotated[tuple[Delta, ...], FailFast()]
    state: State | None
    tokens: Exact
    rounds: dict[UnitName, Round]
    weights: Annotated[tuple[Exact, ...], FailFast(), Field(max_length=32)]
    masses: Annotated[tuple[Exact, ...], FailFast(), Field(max_length=64)]


class Merged(Part):
    contribution: ContributionName
    record: Digest
    size: Count
    tokens: Positive
    steps: Positive
    base: Count
    staleness: Count
    weight: Exact
    coefficient: Exact


Closed = Literal["everyone", "mass", "waited", "fence", "once", "drain"]


class Step(Part):
    """One fragment's outer step: who was merged with which weight, and why the window ended."""

    fragment: Number6
    to: Positive
    closed: Closed
    mass: Exact
    round_tokens: Exact
    merged: Annotated[tuple[Merged, ...], FailFast(), Field(min_length=1)]
    gradient_norm: Exact
    update_norm: Exact


Reason = Literal["superseded", "missing", "corrupt", "stale", "non-finite", "norm", "bad-record", "codec", "quarantined"]
OUTCOME_CHAR: dict[str, str] = {
    "merged": "m",
    "superseded": "s",
    "missing": "x",
    "corrupt": "c",
    "stale": "a",
    "non-finite": "n",
    "norm": "o",
    "bad-record": "b",
    "codec": "k",
    "quarantined": "q",
}
OUTCOME_NAME = {char: name for name, char in OUTCOME_CHAR.items()}
TAKE_BACK = frozenset({"superseded", "missing", "corrupt"})
"""Refusals after which the unit sends the work again; after any other it discards it (format §8.2)."""


class Refused(Part):
    contribution: ContributionName
    fragment: Number6 | None
    tokens: Count
    reason: Reason
    detail: Text


class UnitEntry(Part):
    """Receipts of one unit (format §5.7). Sequence numbers below ``first`` are decided."""

    incarnation: Number6
    region: UnitName
    first: Count
    outcomes: Annotated[str, _pattern(re.compile(r"[.msxcanobkq]{0,128}"))]
    tries: dict[DecimalText, Positive]
    bases: dict[DecimalText, Count]
    tokens: Count
    merged: Count
    refused: Count
    lost: Count

    def outcome(self, seq: int) -> str | None:
        """``merged``, a refusal reason, ``decided`` if too old to say which, None if undecided."""
        if seq < self.first:
            return "decided"
        index = seq - self.first
        if index >= len(self.outcomes) or self.outcomes[index] == ".":
            return None
        return OUTCOME_NAME[self.outcomes[index]]

    @property
    def first_undecided(self) -> int:
        hole = self.outcomes.find(".")
        return self.first + (len(self.outcomes) if hole < 0 else hole)


class Fingerprint(Part):
    software: Text
    torch: Text
    isa: Text


class Manifest(Record):
    """Immutable record of a version (format §5.7)."""

    kind: Literal["manifest"] = "manifest"
    timeline: Number6
    version: Count
    attempt: AttemptId
    created_at: Text
    parent: Parent | None
    config: Number6
    final: bool
    fingerprint: Fingerprint
    tokens: Exact
    fragments: Annotated[tuple[FragmentEntry, ...], FailFast(), Field(min_length=1, max_length=64)]
    steps: Annotated[tuple[Step, ...], FailFast()]
    refused: Annotated[tuple[Refused, ...], FailFast()]
    units: dict[UnitName, UnitEntry]


class Head(Record):
    """``head.json``: a hint (format §5.8)."""

    kind: Literal["head"] = "head"
    timeline: Number6
    version: Count
    sha256: Digest
    nonce: AttemptId


class Heartbeat(Record):
    """``heartbeat.json``: a hint (format §5.8)."""

    kind: Literal["heartbeat"] = "heartbeat"
    unit: UnitName
    incarnation: Number6
    nonce: AttemptId
    interval_s: Annotated[float, Field(gt=0, le=3600)]
    ended: Text | None
    report: dict[str, Any]


class UnitState(Record):
    """Record beside a unit's saved state (format §5.11)."""

    kind: Literal["unit_state"] = "unit_state"
    unit: UnitName
    incarnation: Number6
    n: Count
    attempt: AttemptId
    covers: Covers
    layout_hash: Digest
    data: Ref
    created_at: Text


R = TypeVar("R", bound=Record)


@dataclass(frozen=True, slots=True)
class Stored(Generic[R]):
    """A record together with the hash of the bytes that stand in the bucket."""

    record: R
    sha256: str


def sha256_of(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def encode(record: Record) -> bytes:
    """The bytes of a record: JSON with sorted keys, no white space."""
    return json.dumps(record.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def decode(kind: type[R], body: bytes, *, key: str, run_id: str | None = None, max_bytes: int = RECORD_BYTES_MAX) -> R:
    """Parse ``body``, found under ``key``, as a record of ``kind``.

    Raises :class:`UnknownFormat`, :class:`LimitExceeded`, :class:`IntegrityError` (another run's object) or :class:`FormatError`.
    """
    if len(body) > max_bytes:
        raise LimitExceeded("object is larger than the format allows", key=key, size=len(body), limit=max_bytes)
    try:
        values = json.loads(body, object_pairs_hook=no_duplicates, parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise FormatError("object is not strict JSON", key=key, cause=str(error)[:200] or type(error).__name__) from None
    if not isinstance(values, dict):
        raise FormatError("object is not a JSON object", key=key)
    if values.get("format") != FORMAT or isinstance(values.get("format"), bool):
        raise UnknownFormat(
            "object has a format number that this version does not read",
            key=key,
            format=repr(values.get("format", "none"))[:40],
            known=FORMAT,
            remedy="upgrade ps-diloco",
        )
    if values.get("kind") != kind.model_fields["kind"].default:
        expected = kind.model_fields["kind"].default
        raise FormatError("object is of another kind", key=key, kind=repr(values.get("kind", "none"))[:40], expected=expected)
    try:
        record = kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(step) for step in first["loc"])[:200]
        raise FormatError(
            "object does not follow the format", key=key, field=where or "-", value=repr(first["input"])[:80], rule=first["msg"]
        ) from None
    if run_id is not None and record.run_id != run_id:
        raise IntegrityError("object belongs to another run", key=key, run_id=record.run_id, expected=run_id)
    return record


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("duplicate key")
    return values


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("number is too large for a float64")
    return value


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")
