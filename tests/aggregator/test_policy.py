"""When a fragment steps, and with whom: ``plan_windows`` and ``in_line`` as pure functions (format §6.2, §7.4 step 5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from aggregator.admit import Admitted
from aggregator.policy import WHOLE, Part, Plan, in_line, leave_to_others, plan_windows
from ps_diloco.config import MergeSettings
from ps_diloco.ids import ContributionId
from ps_diloco.merge import Candidate
from ps_diloco.records import (
    Anchor,
    Base,
    Contribution,
    Fingerprint,
    FragmentEntry,
    Manifest,
    Ref,
    Round,
    ShardRef,
    UnitEntry,
)

REF = Ref(key="units/a/x", size=1, sha256="a" * 64)
UNIT = UnitEntry(incarnation=0, region="home", first=0, outcomes="", tries={}, bases={}, tokens=0, merged=0, refused=0, lost=0)


def arrival(unit: str, seq: int = 0, *, at_s: float = 0.0, fragment: int = 0, tokens: int = 100) -> Admitted:
    contribution = ContributionId(0, unit, 0, seq)
    record = Contribution(
        run_id="0" * 32,
        timeline=0,
        unit=unit,
        incarnation=0,
        seq=seq,
        attempt="0" * 16,
        layout_hash="b" * 64,
        fragment=fragment,
        base=Base(fragment_version=0, sha256="c" * 64),
        tokens=tokens,
        steps=10,
        inner_steps=10,
        codec="none",
        shards=(ShardRef(ref=REF),),
        sum_squares=(),
        loss=None,
        resent=False,
        created_at="",
    )
    candidate = Candidate(id=contribution, tokens=tokens, steps=10, staleness=0, lag=0.0)
    return Admitted(candidate=candidate, record=record, sha256="d" * 64, first_seen_s=at_s)


def head(*rounds: Mapping[str, tuple[int, int]], at: int = 20, listed: Sequence[str] = ()) -> Manifest:
    """One fragment per argument, at version ``at``: unit -> (tokens, fragment version) of its last merged contribution."""
    entries = tuple(
        FragmentEntry(
            fragment_version=at,
            sha256="c" * 64,
            anchor=Anchor(fragment_version=at, objects=(REF,)),
            deltas=(),
            state=None,
            tokens=0.0,
            rounds={unit: Round(tokens=tokens, fragment_version=version) for unit, (tokens, version) in seen.items()},
            weights=(),
            masses=(),
        )
        for seen in rounds
    )
    units = {unit for seen in rounds for unit in seen} | set(listed)
    return Manifest(
        run_id="0" * 32,
        timeline=0,
        version=0,
        attempt="0" * 16,
        created_at="",
        parent=None,
        config=0,
        final=False,
        fingerprint=Fingerprint(software="", torch="", isa=""),
        tokens=0.0,
        fragments=entries,
        steps=(),
        refused=(),
        units=dict.fromkeys(sorted(units), UNIT),
    )


THREE = {"a": (100, 20), "b": (100, 19), "c": (100, 18)}


def plan(
    pending: Sequence[Admitted], manifest: Manifest, now_s: float, *, fenced: Sequence[str] = (), force: Any = None, **merge: Any
) -> Plan:
    return plan_windows(pending, manifest, MergeSettings.model_validate(merge), now_s=now_s, fenced=fenced, force=force)


def closed(*args: Any, **settings: Any) -> str | None:
    """Why fragment 0 steps now, or None."""
    window = plan(*args, **settings).windows.get(0)
    return window.closed if window else None


def test_nothing_pending_is_no_window_and_nothing_to_wake_for() -> None:
    assert plan([], head(THREE), 0.0, force="once") == Plan(windows={}, wake_at_s=None)


def test_a_window_closes_at_once_when_every_active_unit_is_there() -> None:
    pending = [arrival("c"), arrival("a"), arrival("b")]
    result = plan(pending, head(THREE), 0.0, grace_s_max=30.0)
    assert result.windows[0].closed == "everyone"
    assert {a.record.unit for a in result.windows[0].members} == {"a", "b", "c"}
    assert result.wake_at_s is None


def test_a_unit_that_was_silent_for_a_whole_round_window_is_not_waited_for() -> None:
    silent = {**THREE, "c": (100, 4)}
    assert closed([arrival("a"), arrival("b")], head(silent), 0.0, round_window=16, merge_at_least=1.0) == "everyone"
    silent["c"] = (100, 5)
    assert closed([arrival("a"), arrival("b")], head(silent), 0.0, round_window=16, merge_at_least=1.0) is None


def test_a_window_closes_by_mass_when_half_a_round_is_there() -> None:
    assert closed([arrival("a")], head(THREE), 0.0) is None  # a third
    assert closed([arrival("a"), arrival("b")], head(THREE), 0.0) == "mass"


def test_two_contributions_of_one_unit_count_with_all_their_tokens_but_as_one_unit() -> None:
    pending = [arrival("a", 0), arrival("a", 1)]
    assert closed(pending, head(THREE), 0.0) == "mass"
    assert closed(pending, head(THREE), 0.0, quorum=2) is None


def test_a_window_that_never_gets_its_mass_closes_when_the_oldest_has_waited_long_enough() -> None:
    pending = [arrival("a", at_s=5.0)]
    waiting = plan(pending, head(THREE), 14.99)
    assert (waiting.windows, waiting.wake_at_s) == ({}, 15.0)
    assert closed(pending, head(THREE), 15.0) == "waited"


def test_the_wait_counts_from_the_oldest_arrival_and_not_from_the_newest() -> None:
    pending = [arrival("a", at_s=9.0, tokens=10), arrival("b", at_s=1.0, tokens=10)]
    many = {**THREE, "d": (1000, 20)}
    assert plan(pending, head(many), 2.0).wake_at_s == 11.0


def test_grace_begins_when_the_mass_was_reached_and_not_when_it_was_noticed() -> None:
    pending = [arrival("a", at_s=1.0), arrival("b", at_s=3.0)]
    waiting = plan(pending, head(THREE), 3.0, grace_s_max=2.0)
    assert (waiting.windows, waiting.wake_at_s) == ({}, 5.0)
    assert closed(pending, head(THREE), 5.0, grace_s_max=2.0) == "mass"


def test_grace_ends_at_once_when_the_last_unit_comes() -> None:
    pending = [arrival("a", at_s=1.0), arrival("b", at_s=3.0), arrival("c", at_s=3.5)]
    assert closed(pending, head(THREE), 3.5, grace_s_max=2.0) == "everyone"


def test_a_quorum_that_is_not_there_holds_the_window_up_for_its_longest_wait_and_no_longer() -> None:
    pending = [arrival("a", at_s=2.0), arrival("a", 1, at_s=3.0)]
    settings = {"quorum": 2, "quorum_s_max": 7.0}
    waiting = plan(pending, head(THREE), 8.99, **settings)
    assert (waiting.windows, waiting.wake_at_s) == ({}, 9.0)
    assert closed(pending, head(THREE), 9.0, **settings) == "waited"


def test_the_quorum_is_also_asked_for_when_all_active_units_are_fewer() -> None:
    alone = {"a": (100, 20)}
    assert closed([arrival("a")], head(alone), 0.0, quorum=2) is None
    assert closed([arrival("a")], head(alone), 0.0, quorum=1) == "everyone"


def test_a_quorum_that_comes_late_closes_a_window_whose_mass_had_waited() -> None:
    many = {**THREE, "d": (10_000, 20)}
    pending = [arrival("a", at_s=0.0), arrival("b", at_s=30.0)]
    assert plan(pending[:1], head(many), 20.0, quorum=2).wake_at_s == 60.0
    assert closed(pending, head(many), 30.0, quorum=2) == "waited"


def test_a_listed_unit_that_was_never_merged_is_awaited_in_the_first_round_window() -> None:
    early = head({"a": (100, 3)}, at=3, listed=["b", "c", "d"])
    assert closed([arrival("a")], early, 0.0) is None
    assert closed([arrival("a"), arrival("b")], early, 0.0) == "mass"
    assert closed([arrival(unit) for unit in "abcd"], early, 0.0) == "everyone"


def test_a_listed_unit_that_never_published_is_not_awaited_later() -> None:
    late = head({"a": (100, 20)}, at=20, listed=["b", "c", "d"])
    assert closed([arrival("a")], late, 0.0) == "everyone"


@pytest.mark.parametrize("force", ["once", "drain"])
def test_a_forced_pass_takes_whatever_is_there_and_says_so(force: str) -> None:
    assert closed([arrival("a")], head(THREE), 0.0, force=force, quorum=3) == force


def test_a_unit_about_to_be_fenced_closes_the_windows_of_its_own_fragments_only() -> None:
    pending = [arrival("a", 0, fragment=0), arrival("b", 0, fragment=0), arrival("b", 1, fragment=1)]
    two = head(THREE, THREE)
    result = plan(pending, two, 0.0, fenced=["a"], merge_at_least=1.0)
    assert {fragment: window.closed for fragment, window in result.windows.items()} == {0: "fence"}
    assert [a.record.unit for a in result.windows[0].members] == ["a", "b"]
    assert result.wake_at_s == 10.0


def test_fragments_are_planned_apart_and_the_earliest_wake_up_wins() -> None:
    pending = [arrival("a", 0, fragment=0, at_s=4.0), arrival("a", 1, fragment=1, at_s=2.0), arrival("a", 2, fragment=2)]
    result = plan(pending, head(THREE, THREE, {"a": (100, 20)}), 4.0)
    assert {fragment: window.closed for fragment, window in result.windows.items()} == {2: "everyone"}
    assert result.wake_at_s == 12.0


def test_in_line_sorts_by_unit_and_number() -> None:
    pending = [arrival("b", 1), arrival("a", 2), arrival("b", 0), arrival("a", 1)]
    assert [(a.record.unit, a.record.seq) for a in in_line(pending, set())] == [("a", 1), ("a", 2), ("b", 0), ("b", 1)]


def test_in_line_keeps_back_what_stands_behind_a_waiting_contribution_of_the_same_unit_and_fragment() -> None:
    pending = [arrival("a", 0), arrival("a", 1), arrival("a", 2, fragment=1), arrival("a", 3), arrival("b", 0)]
    ready = in_line(pending, {ContributionId(0, "a", 0, 1)})
    assert [(a.record.unit, a.record.seq) for a in ready] == [("a", 0), ("a", 2), ("b", 0)]


# parts of several processes

FOUR = tuple(THREE for _ in range(4))
SECOND = Part(index=1, of=2, patience_s=7.0)


def parted(part: Part, since: dict[tuple[int, int], float], now_s: float) -> tuple[list[int], float | None, dict[tuple[int, int], float]]:
    """(fragments that step, when to look again, what is remembered) of a plan in which all four fragments could step."""
    manifest = head(*FOUR)
    pending = [arrival(unit, fragment, fragment=fragment) for unit in "abc" for fragment in range(4)]
    left, remembered = leave_to_others(plan(pending, manifest, now_s), manifest, part, since, now_s)
    return list(left.windows), left.wake_at_s, remembered


def test_a_process_steps_its_own_fragments_and_the_others_only_when_nobody_else_does() -> None:
    fragments, wake_s, since = parted(SECOND, {}, 100.0)
    assert (fragments, wake_s) == ([1, 3], 107.0)
    fragments, wake_s, since = parted(SECOND, since, 106.9)
    assert (fragments, wake_s) == ([1, 3], 107.0)
    assert parted(SECOND, since, 107.0) == ([0, 1, 2, 3], None, {})


def test_patience_begins_anew_with_each_step_of_the_other_process() -> None:
    _, _, since = parted(SECOND, {}, 100.0)
    assert set(since) == {(0, 20), (2, 20)}
    older = {(0, 19): 50.0, (2, 19): 50.0}  # the fragments have been stepped since
    assert parted(SECOND, older, 100.0) == ([1, 3], 107.0, since)


def test_the_only_process_owns_everything_and_parts_cover_each_fragment_once() -> None:
    assert parted(WHOLE, {}, 100.0) == ([0, 1, 2, 3], None, {})
    for count in range(1, 6):
        owners = [[part for part in range(count) if Part(index=part, of=count).owns(fragment)] for fragment in range(12)]
        assert all(len(owner) == 1 for owner in owners)


def test_a_fragment_that_was_taken_over_is_not_waited_for_again() -> None:
    manifest = head(*FOUR)
    pending = [arrival(unit, fragment, fragment=fragment) for unit in "abc" for fragment in range(4)]
    left, remembered = leave_to_others(plan(pending, manifest, 100.0), manifest, SECOND, {}, 100.0, {2})
    assert (list(left.windows), set(remembered)) == ([1, 2, 3], {(0, 20)})
