"""Aggregators whose head is a moment old, or whose step looks like another's: nothing honest is refused, nothing is mistaken, nothing is dropped at the end."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from aggregator.outer_step import DRAIN_S_MAX, Aggregator
from ps_diloco import keys
from ps_diloco.ids import ContributionId
from ps_diloco.store import MemoryStore
from tests.aggregator.bench import FakeClock, Unreadable, announce, base_of, changed, listed, publish, seen_by, tiny_run, walk
from tests.protocol.turns import Actor
from tests.stores import Call, FaultyStore

Where = Callable[[Call], bool]


def run_to(actor: Actor, store: FaultyStore, after: int, where: Where) -> None:
    """Up to, and without, the first call of its pass for which ``where`` holds."""
    while not (len(store.calls) > after and where(store.calls[-1])):
        assert not actor.finished
        actor.turn()


def commits(call: Call) -> bool:
    return call.verb == "put" and call.key.startswith("manifests/")


def test_work_from_a_version_that_a_slow_aggregator_does_not_know_yet_is_not_refused() -> None:
    run, _ = listed("a", "b")
    store = FaultyStore(run.store)
    quick, slow = Aggregator(seen_by(run, seed=1)), Aggregator(seen_by(run, store=store, seed=2))
    quick.take_pass()
    slow.take_pass()
    before = len(store.calls)
    publish(run, "a", 0, [1.0] * 7)
    publish(run, "b", 0, [1.0] * 7)
    actor = Actor(store, lambda _: slow.take_pass())
    run_to(actor, store, before, lambda call: call.key.startswith("units/"))
    quick.take_pass()
    publish(run, "a", 1, [1.0] * 7)  # on the version that was committed just now
    publish(run, "a", 2, [1.0] * 7)
    actor.finish()
    store.before = None
    while slow.take_pass(force="once").kind != "idle":
        pass
    head = run.log.find_head().record
    assert ({unit: entry.outcomes for unit, entry in head.units.items()}, head.refused) == ({"a": "mmm", "b": "m"}, ())
    walk(run)


def test_work_that_is_from_the_future_of_a_new_head_too_is_refused() -> None:
    run, aggregator = listed("a")
    future = base_of(run.log.find_head().record, 0).model_copy(update={"fragment_version": 9})
    publish(run, "a", 0, [1.0] * 7, edit=changed(base=future))
    publish(run, "a", 1, [1.0] * 7)
    assert aggregator.take_pass(force="once").kind == "idle"  # and what stands behind it waits (I5)
    (refused,) = aggregator.take_pass(force="once").head.record.refused
    assert refused.reason == "bad-record" and "from the future" in refused.detail
    assert run.log.find_head().record.units["a"].outcomes == "bm"
    walk(run)


def test_another_step_that_leads_to_the_same_parameters_is_not_taken_for_ones_own() -> None:
    """Small differences vanish in the quantised update; momentum and error keep them."""
    run = tiny_run(MemoryStore(), pull={"state_every": 50, "codec": "int8"}, merge={"quorum": 2})
    announce(run, "a")
    announce(run, "c")
    store = FaultyStore(run.store)
    one, other = Aggregator(seen_by(run, seed=1)), Aggregator(seen_by(run, store=store, seed=2))
    one.take_pass()
    other.take_pass()
    draw = random.Random(19)
    big = [1.0] + [draw.uniform(-1, 1) for _ in range(6)]
    tiny = [0.0] + [draw.choice([-1, 1]) * 0.0035 for _ in range(6)]
    zero = base_of(run.log.find_head().record, 0)
    publish(run, "a", 0, big)
    publish(run, "c", 0, big)
    before = len(store.calls)
    actor = Actor(store, lambda _: other.take_pass())
    run_to(actor, store, before, lambda call: call.key == keys.record(ContributionId(0, "c", 0, 0)))
    publish(run, "a", 1, tiny)
    run_to(actor, store, before, lambda call: call.key == keys.record(ContributionId(0, "c", 0, 1)))
    one.take_pass()  # merges a0 a1 c0
    publish(run, "c", 1, [-x for x in tiny], base=zero)
    actor.finish()  # would have merged a0 c0 c1
    store.before = None
    publish(run, "a", 2, [x * 0.01 for x in big])
    other.take_pass()
    publish(run, "a", 3, big)
    publish(run, "c", 2, big)
    assert Aggregator(seen_by(run, seed=3)).take_pass().kind == "committed"
    walk(run)


@pytest.mark.parametrize("final", [False, True])
def test_two_processes_may_save_the_same_state_at_once(final: bool) -> None:
    run, _ = listed("a", target_tokens=100 if final else None, pull={"state_every": 50})
    store = FaultyStore(run.store)
    one, other = Aggregator(seen_by(run, store=store, seed=1)), Aggregator(seen_by(run, seed=2))
    one.take_pass()
    publish(run, "a", 0, [1.0] * 7)
    other.take_pass()
    one._memory.head = run.log.find_head()
    one._stepper._hold(run.log.find_head(), 0)
    before = len(store.calls)
    actor = Actor(store, lambda _: one.take_pass().kind if final else one.save(60.0))
    run_to(actor, store, before, commits)
    assert other.save(60.0)
    assert actor.finish() == ("final" if final else False)
    assert run.log.find_head().record.final == final
    walk(run)


@pytest.mark.parametrize("suffix", [".shard", ".json"])
def test_the_end_of_a_run_waits_for_work_that_cannot_be_read_for_a_moment(suffix: str) -> None:
    clock = FakeClock()
    run, aggregator = listed("a", "b", clock=clock, target_tokens=150)
    publish(run, "a", 0, [0.5] * 7)
    publish(run, "b", 0, [0.5] * 7)
    aggregator.take_pass()
    publish(run, "b", 1, [0.5] * 7)
    store = Unreadable(run.store)
    store.key = max(info.key for info in run.store.list("units/b/t000000/") if info.key.endswith(suffix))
    other = Aggregator(seen_by(run, store=store, clock=clock))
    assert other.take_pass().kind == "idle"
    store.broken = False
    final = other.take_pass()
    assert (final.kind, final.head.record.units["b"].outcomes) == ("final", "mm")
    walk(run)


def test_the_end_of_a_run_waits_no_longer_than_it_says() -> None:
    clock = FakeClock()
    run, aggregator = listed("a", "b", clock=clock, target_tokens=150)
    publish(run, "a", 0, [0.5] * 7)
    publish(run, "b", 0, [0.5] * 7)
    aggregator.take_pass()
    publish(run, "b", 1, [0.5] * 7)
    store = Unreadable(run.store)
    store.key = max(info.key for info in run.store.list("units/b/t000000/") if info.key.endswith(".shard"))
    other = Aggregator(seen_by(run, store=store, clock=clock))
    assert other.take_pass().kind == "idle"
    clock.now_s += DRAIN_S_MAX
    assert other.take_pass().kind == "final"
