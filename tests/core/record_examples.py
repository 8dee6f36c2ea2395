"""Any valid record of every kind, as hypothesis strategies, and one contribution as plain values."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

from ps_diloco import records
from ps_diloco.config import RunSettings, parse_settings
from ps_diloco.ids import ContributionId
from ps_diloco.layout import FragmentSize, Layout, LayoutEntry
from ps_diloco.records import OUTCOME_CHAR, Record, UnitEntry

RUN_ID = "0123456789abcdef0123456789abcdef"
COUNT = st.integers(0, 2**53)
POSITIVE = st.integers(1, 2**53)
NUMBER = st.integers(0, 999_999)
EXACT = st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
DIGEST = st.binary(min_size=32, max_size=32).map(bytes.hex)
ATTEMPT = st.binary(min_size=8, max_size=8).map(bytes.hex)
UNIT = st.from_regex(r"[a-z0-9][a-z0-9-]{0,8}", fullmatch=True)
KEY = st.from_regex(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]{0,8}(/[A-Za-z0-9_=-][A-Za-z0-9._=-]{0,8}){0,2}", fullmatch=True)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | EXACT | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
OBJECT = st.dictionaries(TEXT, JSON, max_size=3)
CONTRIBUTION = st.builds(ContributionId, NUMBER, UNIT, NUMBER, COUNT).map(str)


def tuples(inner: st.SearchStrategy[Any], *, min_size: int = 0, max_size: int = 3) -> st.SearchStrategy[Any]:
    return st.lists(inner, min_size=min_size, max_size=max_size).map(tuple)


REF = st.builds(records.Ref, key=KEY, size=COUNT, sha256=DIGEST)
PARENT = st.builds(records.Parent, timeline=NUMBER, version=COUNT, sha256=DIGEST)
COVERS = st.builds(records.Covers, timeline=NUMBER, seq=st.integers(-1, 2**53))
SETTINGS = st.builds(
    lambda lr, cap, target, warmup: parse_settings(
        RunSettings,
        {"outer": {"lr": lr}, "merge": {"weight_cap": cap}, "target_tokens": target, "unit": {"join_warmup_steps": warmup}},
        source="-",
    ),
    st.floats(0, 10, exclude_min=True),
    st.floats(1, 1e300),
    st.none() | POSITIVE,
    st.none() | COUNT,
)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    shapes = draw(st.lists(st.lists(st.integers(1, 2**9), max_size=3).map(tuple), min_size=1, max_size=4))
    sizes = [math.prod(shape) for shape in shapes]
    return Layout(
        fragments=tuple(FragmentSize(elements=n, floats=0, ints=0, frozen=0) for n in sizes),
        entries=tuple(
            LayoutEntry(
                name=f"{draw(TEXT)}{i}",
                shape=shape,
                dtype=draw(st.sampled_from(["float32", "bfloat16"])),
                role="parameter",
                fragment=i,
                offset=0,
                aliases=draw(st.sampled_from([(), (f"alias {i}",)])),
                embedding=draw(st.booleans()),
            )
            for i, shape in enumerate(shapes)
        ),
    )


RUN = st.builds(
    lambda layout, **rest: records.Run(layout=layout, layout_hash=layout.hash, **rest),
    layouts(),
    run_id=st.just(RUN_ID),
    software=TEXT,
    created_at=TEXT,
    name=TEXT,
    attempt=ATTEMPT,
    seed=st.integers(0, 2**63 - 1),
    home=UNIT,
    staleness_limit=POSITIVE,
    program=OBJECT,
)
CONFIG = st.builds(records.Config, run_id=st.just(RUN_ID), n=NUMBER, attempt=ATTEMPT, reason=TEXT, created_at=TEXT, settings=SETTINGS)
TIMELINE = st.builds(
    records.Timeline,
    run_id=st.just(RUN_ID),
    timeline=NUMBER,
    attempt=ATTEMPT,
    parent=st.none() | PARENT,
    first_version=COUNT,
    config=NUMBER,
    reason=TEXT,
    created_at=TEXT,
)
INCARNATION = st.builds(
    records.Incarnation,
    run_id=st.just(RUN_ID),
    unit=UNIT,
    incarnation=NUMBER,
    attempt=ATTEMPT,
    region=UNIT,
    software=TEXT,
    created_at=TEXT,
    restored=st.none() | st.builds(records.Restored, incarnation=NUMBER, covers=COVERS),
)
RECORD = st.builds(
    records.Contribution,
    run_id=st.just(RUN_ID),
    timeline=NUMBER,
    unit=UNIT,
    incarnation=NUMBER,
    seq=COUNT,
    attempt=ATTEMPT,
    layout_hash=DIGEST,
    fragment=NUMBER,
    base=st.builds(records.Base, fragment_version=COUNT, sha256=DIGEST),
    tokens=POSITIVE,
    steps=POSITIVE,
    inner_steps=COUNT,
    codec=TEXT,
    shards=tuples(st.builds(records.ShardRef, ref=REF, slices=st.none() | tuples(st.tuples(COUNT, COUNT, POSITIVE))), min_size=1),
    sum_squares=tuples(EXACT),
    loss=st.none() | EXACT,
    resent=st.booleans(),
    created_at=TEXT,
)
FRAGMENT = st.builds(
    records.FragmentEntry,
    fragment_version=COUNT,
    sha256=DIGEST,
    anchor=st.builds(records.Anchor, fragment_version=COUNT, objects=tuples(REF, min_size=1, max_size=2)),
    deltas=tuples(st.builds(records.Delta, fragment_version=POSITIVE, sha256=DIGEST, object=REF), max_size=2),
    state=st.none() | st.builds(records.State, fragment_version=POSITIVE, object=REF),
    tokens=EXACT,
    rounds=st.dictionaries(UNIT, st.builds(records.Round, tokens=POSITIVE, fragment_version=POSITIVE), max_size=2),
    weights=tuples(EXACT, max_size=32),
    masses=tuples(EXACT, max_size=64),
)
STEP = st.builds(
    records.Step,
    fragment=NUMBER,
    to=POSITIVE,
    closed=st.sampled_from(["everyone", "mass", "waited", "fence", "once", "drain"]),
    mass=EXACT,
    round_tokens=EXACT,
    merged=tuples(
        st.builds(
            records.Merged,
            contribution=CONTRIBUTION,
            record=DIGEST,
            tokens=POSITIVE,
            steps=POSITIVE,
            base=COUNT,
            staleness=COUNT,
            weight=EXACT,
            coefficient=EXACT,
        ),
        min_size=1,
        max_size=2,
    ),
    gradient_norm=EXACT,
    update_norm=EXACT,
)
REFUSED = st.builds(
    records.Refused,
    contribution=CONTRIBUTION,
    fragment=st.none() | NUMBER,
    tokens=COUNT,
    reason=st.sampled_from([name for name in OUTCOME_CHAR if name != "merged"]),
    detail=TEXT,
)
UNIT_ENTRY = st.builds(
    UnitEntry,
    incarnation=NUMBER,
    region=UNIT,
    first=COUNT,
    outcomes=st.text(".msxcanobkq", max_size=128),
    tries=st.dictionaries(COUNT.map(str), POSITIVE, max_size=2),
    bases=st.dictionaries(st.integers(0, 63).map(str), COUNT, max_size=2),
    tokens=COUNT,
    merged=COUNT,
    refused=COUNT,
    lost=COUNT,
)
MANIFEST = st.builds(
    records.Manifest,
    run_id=st.just(RUN_ID),
    timeline=NUMBER,
    version=COUNT,
    attempt=ATTEMPT,
    created_at=TEXT,
    parent=st.none() | PARENT,
    config=NUMBER,
    final=st.booleans(),
    fingerprint=st.builds(records.Fingerprint, software=TEXT, torch=TEXT, isa=TEXT),
    tokens=EXACT,
    fragments=tuples(FRAGMENT, min_size=1, max_size=2),
    steps=tuples(STEP, max_size=2),
    refused=tuples(REFUSED, max_size=2),
    units=st.dictionaries(UNIT, UNIT_ENTRY, max_size=2),
)
HEAD = st.builds(records.Head, run_id=st.just(RUN_ID), timeline=NUMBER, version=COUNT, sha256=DIGEST, nonce=ATTEMPT)
HEARTBEAT = st.builds(
    records.Heartbeat,
    run_id=st.just(RUN_ID),
    unit=UNIT,
    incarnation=NUMBER,
    nonce=ATTEMPT,
    interval_s=st.floats(0, 3600, exclude_min=True),
    ended=st.none() | TEXT,
    report=OBJECT,
)
UNIT_STATE = st.builds(
    records.UnitState,
    run_id=st.just(RUN_ID),
    unit=UNIT,
    incarnation=NUMBER,
    n=COUNT,
    attempt=ATTEMPT,
    covers=COVERS,
    layout_hash=DIGEST,
    data=REF,
    created_at=TEXT,
)
KINDS: dict[type[Record], st.SearchStrategy[Any]] = {
    records.Run: RUN,
    records.Config: CONFIG,
    records.Timeline: TIMELINE,
    records.Incarnation: INCARNATION,
    records.Contribution: RECORD,
    records.Manifest: MANIFEST,
    records.Head: HEAD,
    records.Heartbeat: HEARTBEAT,
    records.UnitState: UNIT_STATE,
}

CONTRIBUTION_VALUES: dict[str, Any] = {
    "format": 0,
    "kind": "contribution",
    "run_id": RUN_ID,
    "timeline": 0,
    "unit": "us-east-1a",
    "incarnation": 2,
    "seq": 17,
    "attempt": "0123456789abcdef",
    "layout_hash": "a" * 64,
    "fragment": 1,
    "base": {"fragment_version": 3, "sha256": "b" * 64},
    "tokens": 1000,
    "steps": 10,
    "inner_steps": 40,
    "codec": "int4",
    "shards": [{"ref": {"key": "units/x/y.shard", "size": 5, "sha256": "c" * 64}, "slices": [[0, 0, 4], [1, 2, 2]]}],
    "sum_squares": ["0x1.8p+1", "0x0.0p+0"],
    "loss": None,
    "resent": False,
    "created_at": "2025-01-01T00:00:00.000Z",
}
