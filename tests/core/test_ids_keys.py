"""Names and keys: round trips, order, and refusal of whatever only looks like one (format §3, §4)."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ps_diloco import keys
from ps_diloco.errors import ConfigError, FormatError, InvariantViolation
from ps_diloco.ids import ATTEMPT_ID, ContributionId, check_unit_name

PROPERTY = settings(max_examples=100, deadline=None, derandomize=True)

UNITS = st.from_regex(r"[a-z0-9][a-z0-9-]{0,62}", fullmatch=True)
NUMBERS_6 = st.integers(0, 999_999)
NUMBERS_20 = st.integers(0, 10**20 - 1)
ATTEMPTS = st.from_regex(r"[0-9a-f]{16}", fullmatch=True)
CONTRIBUTIONS = st.builds(ContributionId, NUMBERS_6, UNITS, NUMBERS_6, NUMBERS_20)

ZERO_TO_NINE_ELSEWHERE = "\u0660\u06f0\u0966\uff10\U0001d7d8"  # digits to str.isdigit, not to the format


@PROPERTY
@given(CONTRIBUTIONS)
def test_a_contribution_name_comes_back_from_its_text(contribution: ContributionId) -> None:
    assert ContributionId.parse(str(contribution)) == contribution


@PROPERTY
@given(CONTRIBUTIONS)
def test_a_record_key_comes_back_as_the_contribution(contribution: ContributionId) -> None:
    assert keys.parse_record(keys.record(contribution)) == contribution


def test_the_texts_of_the_document_are_the_texts_of_the_code() -> None:
    contribution = ContributionId(0, "us-east-1a", 2, 17)
    attempt = "0123456789abcdef"
    assert str(contribution) == "t000000/us-east-1a/000002/00000000000000000017"
    assert keys.record(contribution) == "units/us-east-1a/t000000/000002/00000000000000000017.json"
    assert keys.shard(contribution, attempt, 3) == f"units/us-east-1a/t000000/000002/00000000000000000017-{attempt}-r00003.shard"
    assert keys.config(1) == "config/000001.json"
    assert keys.timeline(1) == "timelines/000001.json"
    assert keys.manifest(1, 2) == "manifests/000001/00000000000000000002.json"
    assert keys.anchor(1, 2, 3, attempt) == f"anchors/000001/0002/00000000000000000003-{attempt}/"
    assert keys.delta(1, 2, 3, attempt) == f"deltas/000001/0002/00000000000000000003-{attempt}.shard"
    assert keys.state(1, 2, 3, attempt) == f"state/000001/0002/00000000000000000003-{attempt}.shard"
    assert keys.incarnation("a", 4) == "units/a/incarnations/000004.json"
    assert keys.unit_state_record("a", 4, 5) == "units/a/state/000004/00000000000000000005.json"
    assert keys.unit_state_data("a", 4, 5, attempt) == f"units/a/state/000004/00000000000000000005-{attempt}.safetensors"
    assert keys.heartbeat("a") == "units/a/heartbeat.json"
    assert (keys.RUN, keys.HEAD, keys.probe(attempt)) == ("run.json", "head.json", f"probe/{attempt}")


@PROPERTY
@given(NUMBERS_6, NUMBERS_20, UNITS)
def test_numbers_come_back_from_every_numbered_key(n: int, m: int, unit: str) -> None:
    assert keys.parse_manifest(keys.manifest(n, m)) == (n, m)
    assert keys.parse_incarnation(keys.incarnation(unit, n)) == n
    assert keys.parse_unit_state(keys.unit_state_record(unit, n, m)) == (n, m)


@PROPERTY
@given(NUMBERS_6, st.integers(0, 9999), NUMBERS_20, ATTEMPTS)
def test_the_fragment_and_version_come_back_from_the_key_of_an_output(n: int, fragment: int, version: int, attempt: str) -> None:
    place = (n, fragment, version)
    assert keys.parse_fragment_object(keys.delta(*place, attempt)) == place
    assert keys.parse_fragment_object(keys.state(*place, attempt)) == place
    assert keys.parse_fragment_object(keys.anchor(*place, attempt) + "params/c/0") == place
    assert keys.parse_fragment_object(keys.anchor(*place, attempt)) is None
    for key in (keys.delta(*place, attempt), keys.state(*place, attempt)):
        for other in _lookalikes(key):
            assert keys.parse_fragment_object(other) is None, other


@PROPERTY
@given(NUMBERS_20, NUMBERS_20, NUMBERS_6, NUMBERS_6)
def test_key_order_is_numeric_order(a: int, b: int, i: int, j: int) -> None:
    assert (keys.manifest(0, a) < keys.manifest(0, b)) == (a < b)
    assert (keys.config(i) < keys.config(j)) == (i < j)
    assert (keys.record(ContributionId(i, "u", j, a)) < keys.record(ContributionId(j, "u", i, b))) == ((i, j, a) < (j, i, b))


@PROPERTY
@given(st.lists(CONTRIBUTIONS, max_size=8))
def test_contributions_of_a_timeline_sort_by_unit_then_incarnation_then_seq(contributions: list[ContributionId]) -> None:
    same_timeline = [ContributionId(0, c.unit, c.incarnation, c.seq) for c in contributions]
    assert sorted(same_timeline) == sorted(same_timeline, key=lambda c: (c.unit, c.incarnation, c.seq))


@PROPERTY
@given(CONTRIBUTIONS, ATTEMPTS, st.integers(0, 99_999))
def test_a_shard_key_is_not_taken_for_a_record(contribution: ContributionId, attempt: str, rank: int) -> None:
    key = keys.shard(contribution, attempt, rank)
    assert keys.parse_record(key) is None
    assert key.startswith(keys.record(contribution).removesuffix(".json") + "-")


@PROPERTY
@given(CONTRIBUTIONS, NUMBERS_6, NUMBERS_20)
def test_kinds_of_keys_are_not_mixed_up(contribution: ContributionId, n: int, m: int) -> None:
    unit = contribution.unit
    made = {
        "record": keys.record(contribution),
        "incarnation": keys.incarnation(unit, n),
        "unit_state": keys.unit_state_record(unit, n, m),
        "manifest": keys.manifest(n, m),
    }
    parsers = {
        "record": keys.parse_record,
        "incarnation": keys.parse_incarnation,
        "unit_state": keys.parse_unit_state,
        "manifest": keys.parse_manifest,
    }
    for kind, key in made.items():
        assert [name for name, parse in parsers.items() if parse(key) is not None] == [kind]


@PROPERTY
@given(st.integers(0, 99), st.integers(0, 99), ATTEMPTS)
def test_keys_lie_below_the_prefixes_that_are_listed(n: int, m: int, attempt: str) -> None:
    assert keys.manifest(n, m).startswith(keys.manifests(n))
    assert keys.incarnation("u", n).startswith(keys.incarnations("u"))
    assert keys.unit_state_record("u", n, m).startswith(keys.unit_states("u"))
    assert keys.unit_state_data("u", n, m, attempt).startswith(keys.unit_states("u"))
    for key in (keys.incarnation("u", n), keys.heartbeat("u"), keys.record(ContributionId(n, "u", m, 0))):
        assert key.startswith(keys.UNITS)


def _lookalikes(text: str) -> list[str]:
    """Texts that differ from a valid one by what sloppy parsers let pass."""
    spoilt = [
        text + "\n",
        "\n" + text,
        text + " ",
        " " + text,
        text + "\0",
        text.upper(),
        text + "/",
        "/" + text,
        text.replace("/", "//", 1),
    ]
    digit = re.search(r"\d(?=[^\d]*$)", text)
    assert digit is not None
    at = digit.start()
    spoilt += [text[:at] + other + text[at + 1 :] for other in (*ZERO_TO_NINE_ELSEWHERE, "-", "+", "_", "")]
    spoilt += [text[:at] + "0" + text[at:], text.replace("/", "/../", 1), text.replace("/", "\\", 1)]
    return [other for other in spoilt if other != text]


@PROPERTY
@given(CONTRIBUTIONS)
def test_lookalikes_of_a_contribution_name_are_refused(contribution: ContributionId) -> None:
    for text in _lookalikes(str(contribution)):
        with pytest.raises(FormatError):
            ContributionId.parse(text)


@PROPERTY
@given(CONTRIBUTIONS, NUMBERS_6, NUMBERS_20)
def test_lookalikes_of_keys_are_other_objects(contribution: ContributionId, n: int, m: int) -> None:
    for key, parse in (
        (keys.record(contribution), keys.parse_record),
        (keys.incarnation(contribution.unit, n), keys.parse_incarnation),
        (keys.unit_state_record(contribution.unit, n, m), keys.parse_unit_state),
        (keys.manifest(n, m), keys.parse_manifest),
    ):
        for other in [*_lookalikes(key), key + ".json", key.replace(".json", "json"), key.replace(".json", ".jsonl"), "x/" + key]:
            assert parse(other) is None, other


@PROPERTY
@given(st.text(max_size=80))
def test_any_text_is_a_contribution_name_only_if_it_is_its_own_canonical_text(text: str) -> None:
    try:
        assert str(ContributionId.parse(text)) == text
    except FormatError as error:
        assert error.kind == "format"


@PROPERTY
@given(UNITS)
def test_unit_names_of_the_format_are_taken_as_they_are(name: str) -> None:
    assert check_unit_name(name) == name


@PROPERTY
@given(st.text(max_size=70))
def test_any_other_unit_name_is_refused_by_name(name: str) -> None:
    assume(not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,62}", name))
    with pytest.raises(ConfigError) as caught:
        check_unit_name(name, what="region")
    assert caught.value.facts == {"region": repr(name)}
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "name", ["", "-a", "A", "a_b", "a.b", "a/b", "..", "a\n", "a b", "\u00e4", "a" * 64, "\u0661", "\uff41", "a\u0000"], ids=ascii
)
def test_names_that_only_look_like_units_are_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        check_unit_name(name)


def test_the_longest_unit_name_has_63_characters() -> None:
    assert check_unit_name("a" * 63) == "a" * 63


@pytest.mark.parametrize(
    "text", ["0123456789abcdeF", "0123456789abcde", "0123456789abcdef0", "0123456789abcdef\n", "\uff10123456789abcdef"], ids=ascii
)
def test_attempt_ids_are_16_lower_case_hexadecimal_digits(text: str) -> None:
    assert ATTEMPT_ID.fullmatch(text) is None


@pytest.mark.parametrize(
    "build",
    [
        lambda: keys.config(1_000_000),
        lambda: keys.timeline(1_000_000),
        lambda: keys.manifest(1_000_000, 0),
        lambda: keys.manifest(0, 10**20),
        lambda: keys.manifest(-1, 0),
        lambda: keys.manifest(0, -1),
        lambda: keys.delta(0, 10_000, 0, "0" * 16),
        lambda: keys.shard(ContributionId(0, "u", 0, 0), "0" * 16, 100_000),
        lambda: keys.record(ContributionId(0, "u", 1_000_000, 0)),
        lambda: keys.record(ContributionId(0, "u", 0, 10**20)),
        lambda: keys.incarnation("u", -1),
    ],
)
def test_a_number_wider_than_its_field_is_an_error(build: object) -> None:
    with pytest.raises(InvariantViolation):
        build()  # type: ignore[operator]
