"""Several aggregators on one store, one store call at a time, in every order of two of them: each contribution is merged exactly once (format §7.4)."""

from __future__ import annotations

import random

import pytest

from aggregator.outer_step import Aggregator
from ps_diloco import keys
from ps_diloco.records import Config, encode
from ps_diloco.run import OpenRun
from tests.aggregator.bench import ADDITIVE, Unreadable, announce, changed, copy_of, merged_in, publish, seen_by, walk
from tests.protocol.additive import WORK, once_each, pass_until_idle, put_out, scene
from tests.protocol.turns import Actor
from tests.stores import FaultyStore


def racer(run: OpenRun, seed: int) -> Actor:
    """An aggregator process that works until nothing is left to do."""
    return Actor(run.store, lambda store: pass_until_idle(Aggregator(seen_by(run, store=store, seed=seed))))


class Warm:
    """An aggregator that has seen the head before, so that its next pass is little more than the step; its store can be stopped before each call."""

    def __init__(self, run: OpenRun, seed: int) -> None:
        self.store = FaultyStore(run.store)
        self.aggregator = Aggregator(seen_by(run, store=self.store, seed=seed))
        assert self.aggregator.take_pass().kind == "idle"
        self.store.calls.clear()

    def start(self) -> Actor:
        return Actor(self.store, lambda store: pass_until_idle(self.aggregator))


def test_two_aggregators_that_interrupt_each_other_at_any_two_calls_merge_each_contribution_once() -> None:
    work = [WORK[0], WORK[2]]
    base = scene([])

    def warm_pair() -> tuple[OpenRun, Warm, Warm]:
        run = seen_by(base, store=copy_of(base.store))
        pair = Warm(run, 1), Warm(run, 2)
        put_out(run, work)
        return run, *pair

    _, alone, _ = warm_pair()
    assert alone.aggregator.take_pass().kind == "committed"
    calls = len(alone.store.calls)
    ends: frozenset[str] = frozenset()
    for first_stops in range(calls + 1):
        for second_stops in range(calls + 1):
            run, one, two = warm_pair()
            first, second = one.start(), two.start()
            first.turns(first_stops)
            second.turns(second_stops)
            first.finish()
            second.finish()
            history = once_each(run, work, known=ends)
            ends |= {entry.sha256 for entry in history[-1].fragments}
    assert calls > 10
    assert len(ends) == 2  # each fragment takes one step of one contribution, whoever takes it: one value each


@pytest.mark.parametrize("seed", range(40))
def test_three_aggregators_in_a_random_order_of_calls_merge_each_contribution_once(seed: int) -> None:
    run = scene()
    draw = random.Random(seed)
    racers = [racer(run, number) for number in (1, 2, 3)]
    while not all(one.finished for one in racers):
        racers[draw.randrange(3)].turns(draw.choice([0, 0, 1, 3, 10]))
    for one in racers:
        one.finish()
    once_each(run)


@pytest.mark.parametrize("seed", range(20))
def test_aggregators_racing_with_units_that_still_publish_lose_nothing(seed: int) -> None:
    run = scene([])
    draw = random.Random(seed)
    racers = [racer(run, number) for number in (1, 2)]
    waiting = list(WORK)
    while waiting or not all(one.finished for one in racers):
        if waiting and draw.random() < 0.2:
            put_out(run, [waiting.pop(0)])
        racers = [racer(run, draw.getrandbits(20) + 10) if one.finished and waiting else one for one in racers]
        draw.choice(racers).turns(draw.choice([0, 1, 3]))
    pass_until_idle(Aggregator(seen_by(run, seed=9)))
    once_each(run)


def about_to_commit(actor: Actor) -> bool:
    calls = actor.store.calls
    return bool(calls) and calls[-1].verb == "put" and calls[-1].key.startswith("manifests/")


def test_a_loser_whose_fragments_were_left_alone_commits_the_same_outputs_under_the_next_number() -> None:
    run = scene([], merge={**ADDITIVE["merge"], "quorum": 2})
    put_out(run, [("a", 0, 1, [1.0, 2.0, 3.0])])
    loser = Actor(run.store, lambda store: Aggregator(seen_by(run, store=store, seed=1)).take_pass(force="once"))
    while not about_to_commit(loser):
        loser.turn()
    written = [call.key for call in loser.store.calls if call.verb == "put"][:-1]

    put_out(run, [("a", 1, 0, [1.0] * 4), ("b", 0, 0, [1.0] * 4)])
    announce(run, "d")
    winner = Aggregator(seen_by(run, seed=2)).take_pass().head.record  # fragment 1 has no quorum: it takes fragment 0 only
    assert ([step.fragment for step in winner.steps], "d" in winner.units) == ([0], True)

    before = len(loser.store.calls)
    outcome = loser.finish()
    assert (outcome.kind, outcome.head.record.version) == ("committed", winner.version + 1)
    named = outcome.head.record.fragments[1]
    assert sorted(written) == sorted([named.deltas[0].object.key, named.state.object.key])
    again = [call.key for call in loser.store.calls[before:] if call.verb == "put"]
    assert all(key.startswith("manifests/") or key == "head.json" for key in again)
    assert outcome.head.record.fragments[0] == winner.fragments[0]
    assert list(outcome.head.record.units) == ["a", "b", "c", "d"]
    assert outcome.head.record.units["a"].outcomes == "mm"
    walk(run)


def test_a_loser_whose_fragment_was_stepped_starts_again_from_the_winners_version() -> None:
    run = scene([])
    put_out(run, [("a", 0, 0, [1.0] * 4)])
    loser = racer(run, 1)
    while not about_to_commit(loser):
        loser.turn()
    put_out(run, [("c", 0, 0, [2.0] * 4)])
    # the winner merges both in one step, so the loser remembers another value for that version of the fragment
    assert Aggregator(seen_by(run, seed=2)).take_pass().kind == "committed"
    put_out(run, [("b", 0, 0, [3.0] * 4)])
    assert loser.finish() == ["overtaken", "committed", "idle"]
    once_each(run, [("a", 0, 0, [1.0] * 4), ("b", 0, 0, [3.0] * 4), ("c", 0, 0, [2.0] * 4)])


def test_a_loser_whose_fragment_was_stepped_with_other_work_starts_again() -> None:
    run = scene([])
    put_out(run, [("a", 0, 0, [1.0] * 4)])
    loser = racer(run, 1)
    while not about_to_commit(loser):
        loser.turn()
    half_blind = Unreadable(run.store)
    half_blind.key = next(info.key for info in run.store.list("units/a/t000000/") if info.key.endswith(".shard"))
    put_out(run, [("c", 0, 0, [2.0] * 4)])
    winner = Aggregator(seen_by(run, store=half_blind, seed=2)).take_pass().head.record
    assert [m.contribution[8] for m in winner.steps[0].merged] == ["c"]
    assert loser.finish() == ["overtaken", "committed", "idle"]
    once_each(run, [("a", 0, 0, [1.0] * 4), ("c", 0, 0, [2.0] * 4)])


def test_a_loser_keeps_the_rest_of_its_work_when_one_of_its_fragments_was_stepped() -> None:
    run = scene([])
    put_out(run, [("a", 0, 0, [1.0] * 4)])
    loser = racer(run, 1)
    put_out(run, [("b", 0, 1, [1.0] * 3)])
    while not about_to_commit(loser):
        loser.turn()
    half_blind = Unreadable(run.store)
    half_blind.key = next(info.key for info in run.store.list("units/b/t000000/") if info.key.endswith(".shard"))
    announce(run, "d")
    winner = Aggregator(seen_by(run, store=half_blind, seed=2)).take_pass(force="once").head.record
    assert ([step.fragment for step in winner.steps], "d" in winner.units) == ([0], True)
    before = len(loser.store.calls)
    assert loser.finish() == ["committed", "idle"]
    writes = [call.key for call in loser.store.calls[before:] if call.verb == "put"]
    assert all(key.startswith("manifests/") or key == "head.json" for key in writes)  # nothing is merged twice by the same process
    assert [step.fragment for step in walk(run)[-1].steps] == [1]
    once_each(run, [("a", 0, 0, [1.0] * 4), ("b", 0, 1, [1.0] * 3)])


def test_a_loser_whose_step_is_the_winners_too_reads_nothing_again() -> None:
    run = scene([])
    pair = Warm(run, 1), Warm(run, 2)
    for seq in range(3):
        put_out(run, [("a", seq, 0, [1.0 + seq] * 4)])
        loser = pair[0].start()
        while not about_to_commit(loser):
            loser.turn()
        assert pass_until_idle(pair[1].aggregator) == ["committed", "idle"]
        assert loser.finish() == ["overtaken", "idle"]
        pair[0].store.before = None
        reads = [call.key for call in pair[0].store.calls if call.verb == "get" and call.key.startswith(("state/", "anchors/", "deltas/"))]
        assert all(key.startswith("anchors/") for key in reads)
        assert bool(reads) == (seq == 0)  # version 0, once
        pair[0].store.calls.clear()
    walk(run)


def test_a_loser_whose_only_refusal_was_pronounced_by_the_winner_has_nothing_left_to_do() -> None:
    run = scene([])
    publish(run, "a", 0, [1.0] * 4, edit=changed(codec="zip9"))
    loser = racer(run, 1)
    while not about_to_commit(loser):
        loser.turn()
    assert pass_until_idle(Aggregator(seen_by(run, seed=2))) == ["committed", "idle"]
    assert loser.finish() == ["overtaken", "idle"]
    assert walk(run)[-1].units["a"].refused == 1


def test_a_loser_does_not_put_its_settings_over_newer_ones() -> None:
    run = scene([], merge={**ADDITIVE["merge"], "quorum": 2})
    put_out(run, [("a", 0, 1, [1.0, 2.0, 3.0])])
    loser = Actor(run.store, lambda store: Aggregator(seen_by(run, store=store, seed=1)).take_pass(force="once"))
    while not about_to_commit(loser):
        loser.turn()
    settings = run.config(0).model_copy(update={"target_tokens": 10**9})
    record = Config(run_id=run.run_id, n=1, attempt="0" * 16, reason="", created_at="", settings=settings)
    run.store.put(keys.config(1), encode(record))
    put_out(run, [("a", 1, 0, [1.0] * 4), ("b", 0, 0, [1.0] * 4)])
    assert Aggregator(seen_by(run, seed=2)).take_pass().head.record.config == 1
    assert loser.finish().kind == "overtaken"
    Aggregator(seen_by(run, seed=3)).take_pass(force="once")
    history = walk(run)
    assert [manifest.config for manifest in history] == sorted(manifest.config for manifest in history)
    assert len(merged_in(history)) == 3
