"""Every object name, built and parsed (format §4). Keys are relative to a region's root."""

from __future__ import annotations

import re

from ps_diloco.errors import InvariantViolation
from ps_diloco.ids import ContributionId

RUN = "run.json"
HEAD = "head.json"
UNITS = "units/"


def _number(value: int, width: int) -> str:
    if value < 0 or len(str(value)) > width:
        raise InvariantViolation("number does not fit its field in a key", value=value, width=width)
    return f"{value:0{width}d}"


def config(n: int) -> str:
    return f"config/{_number(n, 6)}.json"


def timeline(n: int) -> str:
    return f"timelines/{_number(n, 6)}.json"


def manifest(timeline_n: int, version: int) -> str:
    return f"manifests/{_number(timeline_n, 6)}/{_number(version, 20)}.json"


def manifests(timeline_n: int) -> str:
    """Prefix of a timeline's manifests."""
    return f"manifests/{_number(timeline_n, 6)}/"


def _fragment_object(kind: str, timeline_n: int, fragment: int, fragment_version: int, attempt: str) -> str:
    return f"{kind}/{_number(timeline_n, 6)}/{_number(fragment, 4)}/{_number(fragment_version, 20)}-{attempt}"


def anchor(timeline_n: int, fragment: int, fragment_version: int, attempt: str) -> str:
    """Prefix of the Zarr group of an anchor, ending in ``/``."""
    return _fragment_object("anchors", timeline_n, fragment, fragment_version, attempt) + "/"


def delta(timeline_n: int, fragment: int, fragment_version: int, attempt: str) -> str:
    return _fragment_object("deltas", timeline_n, fragment, fragment_version, attempt) + ".shard"


def state(timeline_n: int, fragment: int, fragment_version: int, attempt: str) -> str:
    return _fragment_object("state", timeline_n, fragment, fragment_version, attempt) + ".shard"


def incarnation(unit: str, k: int) -> str:
    return f"units/{unit}/incarnations/{_number(k, 6)}.json"


def incarnations(unit: str) -> str:
    """Prefix of a unit's incarnations."""
    return f"units/{unit}/incarnations/"


def record(contribution: ContributionId) -> str:
    return f"{_inbox(contribution)}/{_number(contribution.seq, 20)}.json"


def shard(contribution: ContributionId, attempt: str, rank: int = 0) -> str:
    return f"{_inbox(contribution)}/{_number(contribution.seq, 20)}-{attempt}-r{_number(rank, 5)}.shard"


def _inbox(c: ContributionId) -> str:
    return f"units/{c.unit}/t{_number(c.timeline, 6)}/{_number(c.incarnation, 6)}"


def unit_state_record(unit: str, incarnation_k: int, n: int) -> str:
    return f"units/{unit}/state/{_number(incarnation_k, 6)}/{_number(n, 20)}.json"


def unit_state_data(unit: str, incarnation_k: int, n: int, attempt: str) -> str:
    return f"units/{unit}/state/{_number(incarnation_k, 6)}/{_number(n, 20)}-{attempt}.safetensors"


def unit_states(unit: str) -> str:
    """Prefix of a unit's saved states."""
    return f"units/{unit}/state/"


def heartbeat(unit: str) -> str:
    return f"units/{unit}/heartbeat.json"


def probe(attempt: str) -> str:
    return f"probe/{attempt}"


_RECORD = re.compile(r"units/([a-z0-9][a-z0-9-]{0,62})/t(\d{6})/(\d{6})/(\d{20})\.json", re.ASCII)
_UNIT_STATE = re.compile(r"units/[a-z0-9][a-z0-9-]{0,62}/state/(\d{6})/(\d{20})\.json", re.ASCII)
_INCARNATION = re.compile(r"units/[a-z0-9][a-z0-9-]{0,62}/incarnations/(\d{6})\.json", re.ASCII)
_FRAGMENT_OBJECT = re.compile(r"(?:anchors|deltas|state)/(\d{6})/(\d{4})/(\d{20})-[0-9a-f]{16}(?:\.shard|/.+)", re.ASCII)
_MANIFEST = re.compile(r"manifests/(\d{6})/(\d{20})\.json", re.ASCII)


def parse_record(key: str) -> ContributionId | None:
    """The contribution whose record stands at ``key``, or None if it is another kind of object."""
    match = _RECORD.fullmatch(key)
    return ContributionId(int(match[2]), match[1], int(match[3]), int(match[4])) if match else None


def parse_incarnation(key: str) -> int | None:
    match = _INCARNATION.fullmatch(key)
    return int(match[1]) if match else None


def parse_unit_state(key: str) -> tuple[int, int] | None:
    """(incarnation, n) of a unit-state record, or None."""
    match = _UNIT_STATE.fullmatch(key)
    return (int(match[1]), int(match[2])) if match else None


def parse_manifest(key: str) -> tuple[int, int] | None:
    """(timeline, version), or None."""
    match = _MANIFEST.fullmatch(key)
    return (int(match[1]), int(match[2])) if match else None


def parse_fragment_object(key: str) -> tuple[int, int, int] | None:
    """(timeline, fragment, fragment version) of an object of an anchor, a delta or a state, or None."""
    match = _FRAGMENT_OBJECT.fullmatch(key)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def fragment_object_name(timeline_n: int, fragment: int, fragment_version: int) -> str:
    """What the header of a delta or state shard says it is the shard of (format §5.9)."""
    return f"t{_number(timeline_n, 6)}/{_number(fragment, 4)}/{_number(fragment_version, 20)}"
