"""An aggregator or a unit that dies before any of its store calls, or whose answers are lost: old or new, whole, and nothing counts twice (format §7)."""

from __future__ import annotations

import itertools
import random
import threading

import pytest

from aggregator.outer_step import DISCOVER_EVERY_S, Aggregator, Outcome
from ps_diloco.errors import Unavailable
from ps_diloco.ids import ContributionId
from ps_diloco.records import FragmentEntry, Manifest, UnitEntry
from ps_diloco.run import OpenRun
from ps_diloco.store import MemoryStore, Store
from ps_diloco.unit.link import Link
from ps_diloco.unit.outbox import Identity, Outbox
from ps_diloco.unit.state import FragmentState
from tests.aggregator.bench import FakeClock, announce, base_of, copy_of, merged_in, publish, seen_by, tiny_run, values, walk
from tests.protocol.turns import Killed, killed_at
from tests.stores import Call, Fault, FaultyStore

process_numbers = itertools.count(100)
End = tuple[list[str], list[tuple[float, dict[str, object]]], dict[str, UnitEntry]]


@pytest.fixture(scope="module")
def begun() -> OpenRun:
    """Two fragments that have stepped once, five contributions that nobody decided, a new incarnation and a new unit that nobody listed."""
    run = tiny_run(MemoryStore(), fragments=2, merge={"merge_at_least": 0.0}, pull={"anchor_every": 2})
    for unit in "abc":
        announce(run, unit)
    aggregator = Aggregator(run)
    aggregator.take_pass()
    for fragment, size in enumerate((4, 3)):
        publish(run, "c", fragment, [0.5] * size, fragment=fragment)
    aggregator.take_pass()
    publish(run, "a", 0, [1.0, 0.0, 0.5, 0.25])
    publish(run, "a", 1, [0.5, 0.5, -1.0], fragment=1, codec="int8")
    publish(run, "b", 0, [2.0, 0.0, 0.0], fragment=1)
    publish(run, "b", 1, [0.0, -3.0, 1.0, 0.0], codec="int4")
    publish(run, "c", 2, [0.1] * 4)
    announce(run, "a", incarnation=1)
    announce(run, "d")
    return run


def fresh(begun: OpenRun) -> OpenRun:
    return seen_by(begun, store=copy_of(begun.store))


def finish(aggregator: Aggregator, clock: FakeClock) -> Outcome:
    """Passes until nothing is left to do, whatever the store answers."""
    for _ in range(60):
        clock.now_s += DISCOVER_EVERY_S
        try:
            outcome = aggregator.take_pass()
        except Unavailable:
            continue
        if outcome.kind == "idle":
            return outcome
    raise AssertionError("no end in sight")


def end_of(manifest: Manifest) -> End:
    def numbers(entry: FragmentEntry) -> tuple[float, dict[str, object]]:
        return entry.tokens, dict(entry.rounds)

    return [entry.sha256 for entry in manifest.fragments], [numbers(entry) for entry in manifest.fragments], manifest.units


@pytest.fixture(scope="module")
def undisturbed(begun: OpenRun) -> End:
    run, clock = fresh(begun), FakeClock()
    finish(Aggregator(seen_by(run, clock=clock)), clock)
    history = walk(run)
    assert len(merged_in(history)) == 7
    assert history[-1].units["a"].incarnation == 1
    return end_of(history[-1])


def pass_calls(begun: OpenRun) -> list[Call]:
    store = FaultyStore(copy_of(begun.store))
    assert Aggregator(seen_by(begun, store=store, seed=2)).take_pass().kind == "committed"
    return store.calls


def test_an_aggregator_killed_before_any_call_leaves_old_or_new_and_the_next_one_ends_with_the_same_bits(
    begun: OpenRun, undisturbed: End
) -> None:
    calls = pass_calls(begun)
    commit = next(call.number for call in calls if call.verb == "put" and call.key.startswith("manifests/"))
    for number in range(len(calls) + 1):
        run, clock = fresh(begun), FakeClock()
        dying = Aggregator(seen_by(run, store=FaultyStore(run.store, before=killed_at(number)), seed=2))
        if number < len(calls):
            with pytest.raises(Killed):
                dying.take_pass()
        else:
            dying.take_pass()
        assert len(walk(run)) == (3 if number <= commit else 4), f"killed before call {number}"
        finish(Aggregator(seen_by(run, seed=3, clock=clock)), clock)
        assert end_of(walk(run)[-1]) == undisturbed, f"killed before call {number}"


@pytest.mark.parametrize("seed", range(8))
def test_a_series_of_aggregators_that_all_die_gets_there_in_the_end(begun: OpenRun, undisturbed: End, seed: int) -> None:
    run, clock, draw = fresh(begun), FakeClock(), random.Random(seed)
    for number in range(12):
        mortal = FaultyStore(run.store, before=killed_at(draw.randrange(60)))
        try:
            finish(Aggregator(seen_by(run, store=mortal, seed=number + 2, clock=clock)), clock)
        except Killed:
            continue
    finish(Aggregator(seen_by(run, seed=20, clock=clock)), clock)
    assert end_of(walk(run)[-1]) == undisturbed


@pytest.mark.parametrize("fault", list(Fault))
def test_any_single_lost_or_failed_call_changes_nothing_in_the_end(begun: OpenRun, undisturbed: End, fault: Fault) -> None:
    for call in pass_calls(begun):
        run, clock = fresh(begun), FakeClock()
        store = FaultyStore(run.store, plan={call.number: fault})
        finish(Aggregator(seen_by(run, store=store, seed=2, clock=clock)), clock)
        assert [where for where, _ in store.faults] == [call]
        history = walk(run)
        if call.verb == "put":  # then the pass goes on as if nothing had been
            assert len(history) == 4, call
        assert len(merged_in(history)) == 7
        assert history[-1].units == undisturbed[2], call
        if call.verb != "get" or "/t000000/" not in call.key:  # a contribution that cannot be read is merged one step later
            assert end_of(history[-1]) == undisturbed, call


@pytest.mark.parametrize("seed", range(8))
def test_two_aggregators_on_a_store_that_fails_now_and_then_merge_each_contribution_once(begun: OpenRun, seed: int) -> None:
    run, clock = fresh(begun), FakeClock()
    rates = {Fault.FAILED: 0.02, Fault.LOST_ANSWER: 0.05}
    pair = [
        Aggregator(seen_by(run, store=FaultyStore(run.store, seed=10 * seed + number, rates=rates), seed=number + 2, clock=clock))
        for number in range(2)
    ]
    for _ in range(3):
        for aggregator in pair:
            finish(aggregator, clock)
    history = walk(run)
    assert len(merged_in(history)) == 7
    assert history[-1].units["a"].incarnation == 1 and "d" in history[-1].units


def test_a_commit_whose_answer_is_lost_is_known_as_won_even_when_another_has_committed_on_top(begun: OpenRun) -> None:
    number = next(call.number for call in pass_calls(begun) if call.verb == "put" and call.key.startswith("manifests/"))
    run = fresh(begun)

    def before(call: Call) -> None:
        if call.number == number + 1:  # the read-back
            publish(run, "b", 2, [1.0] * 4)
            assert Aggregator(seen_by(run, seed=3)).take_pass().head.record.version == 4

    store = FaultyStore(run.store, plan={number: Fault.LOST_ANSWER}, before=before)
    outcome = Aggregator(seen_by(run, store=store, seed=2)).take_pass()
    assert (outcome.kind, outcome.head.record.version) == ("committed", 3)
    history = walk(run)
    assert (len(history), len(merged_in(history))) == (5, 8)


@pytest.mark.parametrize("when", ["before the next pass", "during the next commit"])
def test_a_commit_that_lands_after_its_aggregator_gave_up_counts_once(begun: OpenRun, undisturbed: End, when: str) -> None:
    run, clock = fresh(begun), FakeClock()
    late: list[bytes] = []
    key = "manifests/000000/00000000000000000003.json"

    class Slow(FaultyStore):
        """Holds the first manifest back, and answers nothing about its key."""

        silent = True

        def put(self, key: str, data: bytes | bytearray | memoryview, *, overwrite: bool = False) -> str | None:
            if key.startswith("manifests/"):
                if self.silent:
                    late.append(bytes(data))
                    raise Unavailable("injected", maybe_applied=True)
                if when == "during the next commit":
                    run.store.put(key, late[0])
            return super().put(key, data, overwrite=overwrite)

    slow = Slow(run.store)
    aggregator = Aggregator(seen_by(run, store=slow, seed=2, clock=clock))
    with pytest.raises(Unavailable, match="no definite answer"):
        aggregator.take_pass()
    assert len(set(late)) == 1  # only ever the same bytes
    slow.silent = False
    if when == "before the next pass":
        run.store.put(key, late[0])
        assert aggregator.take_pass().kind == "idle"
    else:
        assert aggregator.take_pass().kind == "overtaken"
        assert aggregator.take_pass().kind == "idle"
    assert run.store.get(key) == late[0]
    assert end_of(walk(run)[-1]) == undisturbed


def outbox_of(run: OpenRun, store: Store, incarnation: int, errors: list[BaseException]) -> Outbox:
    """The publishing half of a unit process, listed."""
    mine = seen_by(run, store=store, seed=next(process_numbers))
    stop = threading.Event()
    link = Link(mine.env, stop, url=store.url)
    outbox = Outbox(mine, Identity(timeline=0, unit="a", incarnation=incarnation), link, stop, on_error=errors.append)
    outbox.listed.set()
    return outbox


def publish_two_cuts(run: OpenRun, store: Store, incarnation: int) -> list[BaseException]:
    """One cut of each fragment, published by the code of a unit; what its thread died of."""
    errors: list[BaseException] = []
    outbox = outbox_of(run, store, incarnation, errors)
    head = run.log.find_head().record
    for fragment, value in enumerate(values(run, head)):
        state = FragmentState.begin(fragment, run.layout.of(fragment), value, base_of(head, fragment), codec="int8", decay=1.0)
        moved = value.clone()
        moved.params.sub_(0.125 * (1 + fragment))
        outbox.put(state.cut(moved, tokens=100, steps=10, inner_steps=10, loss=None))
    outbox.start()
    outbox.join(30.0)
    return errors


def listed_unit() -> tuple[OpenRun, FakeClock, Aggregator]:
    clock = FakeClock()
    run = tiny_run(MemoryStore(), fragments=2)
    announce(run, "a")
    aggregator = Aggregator(seen_by(run, clock=clock))
    aggregator.take_pass()
    return run, clock, aggregator


@pytest.mark.parametrize("number", range(5))
def test_of_a_unit_killed_before_any_call_of_publishing_each_record_is_merged_once_or_was_never_there(number: int) -> None:
    run, clock, aggregator = listed_unit()
    errors = publish_two_cuts(run, FaultyStore(run.store, before=killed_at(number)), incarnation=0)
    assert [type(error) for error in errors] == ([Killed] if number < 4 else [])
    whole = number // 2
    announce(run, "a", incarnation=1)
    clock.now_s += DISCOVER_EVERY_S
    assert aggregator.take_pass().head.record.units["a"].incarnation == 1
    # the old process was not dead after all, and goes on
    publish(run, "a", whole, [64.0] * 4)
    assert publish_two_cuts(run, run.store, incarnation=1) == []
    finish(aggregator, clock)
    old = [str(ContributionId(0, "a", 0, seq)) for seq in range(whole)]
    new = [str(ContributionId(0, "a", 1, seq)) for seq in range(2)]
    history = walk(run)
    assert merged_in(history) == dict.fromkeys(old + new, 1)
    assert history[-1].units["a"].outcomes == "mm"


@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize("number", range(4))
def test_a_unit_whose_put_fails_or_loses_its_answer_publishes_the_record_once_under_the_same_number(fault: Fault, number: int) -> None:
    run, clock, aggregator = listed_unit()
    assert publish_two_cuts(run, FaultyStore(run.store, plan={number: fault}), incarnation=0) == []
    finish(aggregator, clock)
    assert merged_in(walk(run)) == dict.fromkeys((str(ContributionId(0, "a", 0, seq)) for seq in range(2)), 1)
    assert len(list(run.store.list("units/a/t000000/"))) == 4


def test_a_unit_on_a_store_that_answers_now_and_then_still_publishes_each_record_once() -> None:
    for seed in range(10):
        run, clock, aggregator = listed_unit()
        store = FaultyStore(run.store, seed=seed, rates={Fault.FAILED: 0.4, Fault.LOST_ANSWER: 0.3})
        assert publish_two_cuts(run, store, incarnation=0) == []
        finish(aggregator, clock)
        assert len(merged_in(walk(run))) == 2


def test_a_second_process_under_the_same_incarnation_is_stopped_at_its_first_record() -> None:
    run, clock, aggregator = listed_unit()
    assert publish_two_cuts(run, run.store, incarnation=0) == []
    (error,) = publish_two_cuts(run, run.store, incarnation=0)
    assert "another process publishes under this unit's incarnation" in str(error)
    finish(aggregator, clock)
    assert len(merged_in(walk(run))) == 2
