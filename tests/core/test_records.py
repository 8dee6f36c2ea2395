"""Records: what was written is read back bit for bit, and whatever else is refused by the right error (format §3, §5)."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from ps_diloco import records
from ps_diloco.config import CreateSettings, RunSettings
from ps_diloco.errors import FormatError, IntegrityError, LimitExceeded, UnknownFormat
from ps_diloco.ids import ContributionId
from ps_diloco.layout import FragmentSize, Layout, LayoutEntry
from ps_diloco.records import OUTCOME_CHAR, OUTCOME_NAME, TAKE_BACK, Record, UnitEntry, decode, encode, sha256_of
from tests.core.record_examples import CONTRIBUTION_VALUES, JSON, KINDS, RUN_ID

PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)
KIND = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def _changed(**values: Any) -> bytes:
    return json.dumps({**CONTRIBUTION_VALUES, **values}).encode()


def _read(body: bytes, **options: Any) -> records.Contribution:
    return decode(records.Contribution, body, key="units/u/r.json", **options)


def test_every_kind_of_record_of_the_module_has_a_strategy_here() -> None:
    assert {model for model in vars(records).values() if isinstance(model, type) and issubclass(model, Record)} - {Record} == set(KINDS)


@KIND
def test_every_record_comes_back_bit_for_bit(kind: type[Record]) -> None:
    @settings(PROPERTY, max_examples=40)
    @given(KINDS[kind])
    def check(record: Record) -> None:
        body = encode(record)
        back = decode(kind, body, key="some/key.json", run_id=RUN_ID, max_bytes=records.RUN_BYTES_MAX)
        assert back == record
        assert encode(back) == body
        assert body == json.dumps(json.loads(body), sort_keys=True, separators=(",", ":")).encode()
        assert sha256_of(body) == hashlib.sha256(body).hexdigest()

    check()


@KIND
def test_a_record_without_one_of_its_fields_or_with_one_more_is_refused(kind: type[Record]) -> None:
    @settings(PROPERTY, max_examples=10)
    @given(KINDS[kind])
    def check(record: Record) -> None:
        values = json.loads(encode(record))
        for field in values:
            with pytest.raises(FormatError):
                decode(
                    kind, json.dumps({name: value for name, value in values.items() if name != field}).encode(), key="k", max_bytes=1 << 26
                )
        with pytest.raises(FormatError, match="field=surprise"):
            decode(kind, json.dumps({**values, "surprise": 1}).encode(), key="k", max_bytes=1 << 26)

    check()


@KIND
def test_a_record_of_another_kind_is_refused(kind: type[Record]) -> None:
    @settings(PROPERTY, max_examples=5)
    @given(KINDS[kind])
    def check(record: Record) -> None:
        for other in KINDS:
            if other is not kind:
                with pytest.raises(FormatError, match="another kind"):
                    decode(other, encode(record), key="k", max_bytes=1 << 26)

    check()


@KIND
def test_a_record_cut_short_anywhere_is_refused(kind: type[Record]) -> None:
    @settings(PROPERTY, max_examples=5)
    @given(KINDS[kind], st.floats(0, 1, exclude_max=True))
    def check(record: Record, part: float) -> None:
        body = encode(record)
        with pytest.raises(FormatError):
            decode(kind, body[: int(part * len(body))], key="k", max_bytes=1 << 26)

    check()


@KIND
def test_a_record_with_a_changed_byte_is_read_or_refused_but_never_crashes_the_reader(kind: type[Record]) -> None:
    @settings(PROPERTY, max_examples=40)
    @given(KINDS[kind], st.floats(0, 1, exclude_max=True), st.integers(0, 255))
    def check(record: Record, part: float, byte: int) -> None:
        body = bytearray(encode(record))
        body[int(part * len(body))] = byte
        try:
            decode(kind, bytes(body), key="k", run_id=RUN_ID, max_bytes=1 << 26)
        except FormatError as error:
            assert error.facts["key"] == "k"

    check()


@settings(PROPERTY, max_examples=100)
@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_garbage_is_a_format_error(body: bytes) -> None:
    with pytest.raises(FormatError):
        _read(body)


@settings(PROPERTY, max_examples=200)
@given(st.sampled_from(sorted(CONTRIBUTION_VALUES)), JSON)
def test_any_json_value_in_any_field_is_read_or_refused_with_the_key(field: str, value: Any) -> None:
    try:
        record = _read(_changed(**{field: value}))
    except FormatError as error:
        assert error.facts["key"] == "units/u/r.json"
    else:
        assert json.loads(encode(record))[field] == value


def test_the_example_is_valid_as_it_stands() -> None:
    record = _read(_changed(), run_id=RUN_ID)
    assert record.id == ContributionId(0, "us-east-1a", 2, 17)
    assert record.sum_squares == (3.0, 0.0)
    assert record.shards[0].slices == ((0, 0, 4), (1, 2, 2))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", True),
        ("tokens", 1000.0),
        ("tokens", "1000"),
        ("tokens", 0),
        ("tokens", 2**53 + 1),
        ("tokens", None),
        ("steps", 0),
        ("seq", -1),
        ("seq", False),
        ("timeline", 1_000_000),
        ("fragment", -1),
        ("resent", 0),
        ("resent", "false"),
        ("unit", "US-EAST"),
        ("unit", "a\n"),
        ("unit", "../a"),
        ("attempt", "0123456789ABCDEF"),
        ("attempt", "0123456789abcdef\n"),
        ("layout_hash", "a" * 63),
        ("layout_hash", "A" * 64),
        ("created_at", 5),
        ("codec", "x" * 2001),
        ("loss", 1.5),
        ("loss", 1),
        ("loss", "1.5"),
        ("loss", "nan"),
        ("loss", "inf"),
        ("loss", "-0x1.8p+1 "),
        ("loss", "0X1.8P+1"),
        ("loss", "0x1.8p+1\n"),
        ("loss", "0x1.8p+9999"),
        ("loss", "0x1.00000000000001p+0"),
        ("loss", "0x1.8p+\u0661"),
        ("loss", True),
        ("sum_squares", [3.0]),
        ("sum_squares", [None]),
        ("sum_squares", "0x1.8p+1"),
        ("base", {"fragment_version": 3}),
        ("base", {"fragment_version": 3, "sha256": "b" * 64, "extra": 1}),
        ("base", {"fragment_version": True, "sha256": "b" * 64}),
        ("shards", []),
        ("shards", [{"ref": {"key": "a", "size": 5, "sha256": "c" * 64}, "slices": [[0, 0, 0]]}]),
        ("shards", [{"ref": {"key": "a", "size": 5, "sha256": "c" * 64}, "slices": [[0, 0]]}]),
        ("shards", [{"ref": {"key": "a", "size": 5, "sha256": "c" * 64}, "slices": [[0, -1, 5]]}]),
        ("shards", [{"ref": {"key": "a", "size": 5.0, "sha256": "c" * 64}, "slices": None}]),
    ],
    ids=repr,
)
def test_a_value_of_the_wrong_type_or_range_is_refused_by_the_name_of_its_field(field: str, value: Any) -> None:
    with pytest.raises(FormatError, match="does not follow the format") as caught:
        _read(_changed(**{field: value}))
    assert type(caught.value) is FormatError
    assert str(caught.value.facts["field"]).split(".")[0] == field


@pytest.mark.parametrize(
    "key", ["", "/", "a/", "/a", "a//b", ".", "..", "a/../b", "../a", "a/.", "a b", "a\n", "a\\b", "\u00e4", "a" * 1001, "a:b"]
)
def test_a_ref_cannot_name_a_key_outside_the_run(key: str) -> None:
    shard = {"ref": {"key": key, "size": 5, "sha256": "c" * 64}, "slices": None}
    with pytest.raises(FormatError, match="ref.key"):
        _read(_changed(shards=[shard]))


def test_a_duplicate_key_is_refused_at_any_depth() -> None:
    text = _changed().decode()
    for once, twice in (
        ('"tokens": 1000', '"tokens": 1000, "tokens": 1000'),
        ('"fragment_version": 3', '"fragment_version": 3, "fragment_version": 4'),
        ('"tokens": 1000', '"tokens": 1000, "\\u0074okens": 2000'),
    ):
        assert once in text
        with pytest.raises(FormatError, match="duplicate key"):
            _read(text.replace(once, twice).encode())


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_numbers_that_are_not_finite_are_refused_even_in_free_objects(number: str) -> None:
    beat = records.Heartbeat(run_id=RUN_ID, unit="u", incarnation=0, nonce="0" * 16, interval_s=1.0, ended=None, report={"x": 12345})
    with pytest.raises(FormatError, match="strict JSON"):
        decode(records.Heartbeat, encode(beat).replace(b"12345", number.encode()), key="k")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"0",
        b"null",
        b'"text"',
        b"{",
        b"{}{}",
        b'{"format": 0,}',
        b"\xff\xfe",
        b'{"format": 0, "a": "\xff"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"format": ' + b"9" * 5000 + b"}",
        _changed().decode().encode("utf-16"),
        b"\xef\xbb\xbf" + _changed(),
    ],
    ids=lambda body: repr(body[:12]),
)
def test_what_is_not_one_strict_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(FormatError):
        _read(body)


@pytest.mark.parametrize("number", [1, -1, 2**70, "0", None, False, True, [], {}, 0.5], ids=repr)
def test_an_unknown_format_number_is_refused_and_the_known_one_is_told(number: Any) -> None:
    with pytest.raises(UnknownFormat, match="known=0") as caught:
        _read(_changed(format=number))
    assert "upgrade" in str(caught.value)


def test_a_format_number_that_is_not_an_integer_is_refused() -> None:
    with pytest.raises(FormatError):
        _read(_changed(format=0.0))


def test_an_unknown_format_is_told_before_anything_else_is_looked_at() -> None:
    with pytest.raises(UnknownFormat):
        _read(b'{"format": 1, "kind": "something new"}')


def test_a_missing_format_number_is_unknown() -> None:
    values = {name: value for name, value in CONTRIBUTION_VALUES.items() if name != "format"}
    with pytest.raises(UnknownFormat, match="none"):
        _read(json.dumps(values).encode())


def test_an_object_of_another_run_is_refused() -> None:
    with pytest.raises(IntegrityError, match="another run") as caught:
        _read(_changed(run_id="f" * 32), run_id=RUN_ID)
    assert caught.value.facts["expected"] == RUN_ID
    assert _read(_changed(run_id="f" * 32)).run_id == "f" * 32


def test_an_object_larger_than_its_limit_is_refused_unread() -> None:
    body = _changed()
    assert _read(body, max_bytes=len(body)).tokens == 1000
    with pytest.raises(LimitExceeded, match=f"limit={len(body) - 1}"):
        _read(body, max_bytes=len(body) - 1)
    with pytest.raises(LimitExceeded):
        _read(b"[" * (records.RECORD_BYTES_MAX + 1))


def test_the_limits_are_those_of_the_document() -> None:
    assert (records.RUN_BYTES_MAX, records.MANIFEST_BYTES_MAX) == (64 * 2**20, 32 * 2**20)
    assert (records.RECORD_BYTES_MAX, records.HINT_BYTES_MAX, records.UNDECIDED_MAX, records.COUNT_MAX) == (2**20, 64 * 2**10, 64, 2**53)


@settings(PROPERTY, max_examples=300)
@given(st.integers(0, 2**64 - 1))
def test_every_finite_float64_is_exact_in_a_record(bits: int) -> None:
    number = struct.unpack("<d", struct.pack("<Q", bits))[0]
    if not math.isfinite(number):
        with pytest.raises(ValidationError):
            records.Contribution.model_validate({**_python_values(), "loss": number})
        return
    record = records.Contribution.model_validate({**_python_values(), "loss": number})
    back = _read(encode(record))
    assert back.loss is not None
    assert struct.pack("<d", back.loss) == struct.pack("<d", number)
    assert json.loads(encode(record))["loss"] == number.hex()


@pytest.mark.parametrize("number", [0.0, -0.0, 5e-324, -5e-324, 2.0**-1022, 1.7976931348623157e308, 0.1, 1 / 3, 2.0**53 + 2])
def test_the_corners_of_float64_are_exact(number: float) -> None:
    back = _read(_changed(loss=number.hex())).loss
    assert back is not None
    assert struct.pack("<d", back) == struct.pack("<d", number)


def _python_values() -> dict[str, Any]:
    return dict(_read(_changed()))


def test_a_record_cannot_be_built_with_wrong_values_either() -> None:
    for field, value in (("tokens", True), ("tokens", 1.0), ("unit", "A"), ("loss", math.nan), ("loss", math.inf), ("surprise", 1)):
        with pytest.raises(ValidationError):
            records.Contribution.model_validate({**_python_values(), field: value})


@pytest.mark.parametrize(
    "name", ["t000000/u/000000/0", "t000000/u/000000/0000000000000000001\u0661", "t000000/U/000000/00000000000000000001", ""], ids=ascii
)
def test_a_receipt_names_a_contribution_in_canonical_text(name: str) -> None:
    with pytest.raises(ValidationError, match="not the name of a contribution"):
        records.Refused(contribution=name, fragment=None, tokens=0, reason="stale", detail="")


def test_settings_in_a_config_record_are_strict() -> None:
    config = records.Config(run_id=RUN_ID, n=0, attempt="0" * 16, reason="", created_at="", settings=RunSettings())
    values = json.loads(encode(config))
    assert decode(records.Config, json.dumps(values).encode(), key="k") == config
    for section, field, value in (("outer", "lr", "0.7"), ("outer", "lrr", 0.7), ("merge", "quorum", True), ("pull", "state_every", True)):
        spoilt = {**values, "settings": {**values["settings"], section: {**values["settings"][section], field: value}}}
        with pytest.raises(FormatError, match=f"settings.{section}.{field}"):
            decode(records.Config, json.dumps(spoilt).encode(), key="k")


def test_a_hostile_layout_in_a_run_record_is_a_format_error() -> None:
    entry = LayoutEntry(name="w", shape=(3,), dtype="float32", role="parameter", fragment=0, offset=0, aliases=(), embedding=False)
    layout = Layout(fragments=(FragmentSize(elements=3, floats=0, ints=0, frozen=0),), entries=(entry,))
    run = records.Run(
        run_id=RUN_ID,
        software="",
        created_at="",
        name="",
        attempt="0" * 16,
        seed=0,
        home="home",
        staleness_limit=CreateSettings().staleness_limit,
        layout=layout,
        layout_hash=layout.hash,
        program={},
    )
    values = json.loads(encode(run))
    for field, value in (
        ("offset", 1),
        ("shape", [4]),
        ("fragment", 1),
        ("fragment", -1),
        ("shape", [-3]),
        ("shape", [2**36, 2**36]),
        ("shape", [1] * 65),
    ):
        spoilt = {**values, "layout": {**values["layout"], "entries": [{**values["layout"]["entries"][0], field: value}]}}
        with pytest.raises(FormatError, match="layout"):
            decode(records.Run, json.dumps(spoilt).encode(), key="run.json", max_bytes=records.RUN_BYTES_MAX)


def _unit(first: int, outcomes: str) -> UnitEntry:
    return UnitEntry(
        incarnation=0, region="home", first=first, outcomes=outcomes, tries={}, bases={}, tokens=0, merged=0, refused=0, lost=0
    )


def test_receipts_are_read_from_the_outcomes() -> None:
    entry = _unit(10, "ms.m.")
    assert [entry.outcome(seq) for seq in (0, 9, 10, 11, 12, 13, 14, 15, 99)] == [
        "decided",
        "decided",
        "merged",
        "superseded",
        None,
        "merged",
        None,
        None,
        None,
    ]
    assert entry.first_undecided == 12


def test_a_unit_without_receipts_has_nothing_decided() -> None:
    entry = _unit(0, "")
    assert entry.outcome(0) is None
    assert entry.first_undecided == 0


@settings(PROPERTY, max_examples=100)
@given(st.integers(0, 1000), st.text(".msxcanobkq", max_size=128))
def test_the_first_undecided_is_the_first_without_an_outcome(first: int, outcomes: str) -> None:
    entry = _unit(first, outcomes)
    assert entry.outcome(entry.first_undecided) is None
    assert all(entry.outcome(seq) is not None for seq in range(entry.first_undecided))


def test_every_outcome_of_the_document_has_its_character_and_reaction() -> None:
    assert OUTCOME_CHAR == {
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
    assert {OUTCOME_NAME[char] for char in OUTCOME_CHAR.values()} == set(OUTCOME_CHAR)
    assert {"superseded", "missing", "corrupt"} == TAKE_BACK
    assert all(_unit(0, char).outcome(0) == name for name, char in OUTCOME_CHAR.items())


@pytest.mark.parametrize("outcomes", ["z", "M", "m\n", " ", "m" * 129])
def test_outcomes_of_another_alphabet_or_length_are_refused(outcomes: str) -> None:
    with pytest.raises(ValidationError):
        _unit(0, outcomes)


@pytest.mark.parametrize("key", ["", "-1", "01", "+1", " 1", "1\n", "\u0661", "x", "1" * 21], ids=ascii)
def test_numbers_used_as_keys_have_one_text_only(key: str) -> None:
    for field in ("tries", "bases"):
        with pytest.raises(ValidationError):
            UnitEntry.model_validate({**dict(_unit(0, "")), field: {key: 1}})
