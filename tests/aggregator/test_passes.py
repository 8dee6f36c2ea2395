"""What passes do besides numbers: list units, fence, end the run, take up settings, write hints, and what all that costs (format §7, §11)."""

from __future__ import annotations

import threading

from aggregator.outer_step import DISCOVER_EVERY_S, HINT_EVERY_S, Aggregator
from aggregator.serve import aggregate_once, serve
from ps_diloco import keys
from ps_diloco.config import RunSettings
from ps_diloco.ids import ContributionId
from ps_diloco.records import COUNT_MAX, Config, Head, decode, encode
from ps_diloco.run import OpenRun
from ps_diloco.store import CountingStore, MemoryStore
from tests.aggregator.bench import (
    EXACT_PULL,
    START,
    FakeClock,
    announce,
    listed,
    merged_in,
    params,
    publish,
    seen_by,
    tiny_run,
    walk,
)


def test_new_units_are_listed_by_a_manifest_of_their_own_when_there_is_nothing_to_merge() -> None:
    run = tiny_run(MemoryStore())
    announce(run, "b")
    announce(run, "a")
    manifest = Aggregator(run).take_pass().head.record
    assert (manifest.version, manifest.steps, manifest.tokens) == (1, (), 0.0)
    assert {unit: (entry.incarnation, entry.first, entry.outcomes) for unit, entry in manifest.units.items()} == {
        "a": (0, 0, ""),
        "b": (0, 0, ""),
    }
    assert manifest.fragments == run.log.read(0, 0).record.fragments  # type: ignore[union-attr]


def test_garbage_among_the_units_does_not_stop_the_others() -> None:
    run = tiny_run(MemoryStore())
    announce(run, "good")
    run.store.put("units/Not.A.Name/incarnations/000000.json", b"{}")
    run.store.put(keys.incarnation("junk", 0), b"junk")
    run.store.put(keys.incarnation("huge", 0), b"[" * (3 << 20))
    announce(run, "wrong", incarnation=0)
    run.store.put(keys.incarnation("wrong", 0), run.store.get(keys.incarnation("good", 0)), overwrite=True)
    assert list(Aggregator(run).take_pass().head.record.units) == ["good"]


def test_a_new_incarnation_is_listed_by_the_manifest_that_merges_its_predecessors_pending_work() -> None:
    clock = FakeClock()
    run, aggregator = listed("a", "b", clock=clock, fragments=2, merge={"quorum": 2})
    publish(run, "a", 0, [1.0] * 4)
    publish(run, "b", 0, [1.0] * 4)
    publish(run, "a", 1, [1.0] * 3, fragment=1)
    assert [step.fragment for step in aggregator.take_pass().head.record.steps] == [0]  # fragment 1 has no quorum
    announce(run, "a", incarnation=1)
    announce(run, "a", incarnation=2)
    clock.now_s += DISCOVER_EVERY_S
    manifest = aggregator.take_pass().head.record
    assert [(step.fragment, step.closed, step.merged[0].contribution) for step in manifest.steps] == [
        (1, "fence", str(ContributionId(0, "a", 0, 1)))
    ]
    entry = manifest.units["a"]
    assert (entry.incarnation, entry.first, entry.outcomes, entry.merged, entry.tokens) == (2, 0, "", 2, 200)
    walk(run)


def test_what_a_zombie_publishes_after_its_successor_is_listed_is_never_merged() -> None:
    clock = FakeClock()
    run, aggregator = listed("a", clock=clock)
    publish(run, "a", 0, [1.0] * 7)
    aggregator.take_pass()
    announce(run, "a", incarnation=1)
    clock.now_s += DISCOVER_EVERY_S
    assert aggregator.take_pass().head.record.units["a"].incarnation == 1
    publish(run, "a", 1, [64.0] * 7)
    publish(run, "a", 0, [1.0] * 7, incarnation=1)
    manifest = aggregator.take_pass(force="once").head.record
    assert [m.contribution for step in manifest.steps for m in step.merged] == [str(ContributionId(0, "a", 1, 0))]
    assert aggregator.take_pass(force="once").kind == "idle"
    assert Aggregator(seen_by(run)).take_pass(force="once").kind == "idle"
    assert len(merged_in(walk(run))) == 2


def test_at_the_target_the_rest_is_merged_and_the_final_manifest_ends_the_run() -> None:
    run, aggregator = listed("a", "b", target_tokens=250, merge={"quorum": 2})
    for seq in range(2):
        publish(run, "a", seq, [0.5] * 7)
    publish(run, "b", 0, [0.5] * 7)
    reached = aggregator.take_pass().head.record
    assert (reached.tokens, reached.final) == (300.0, False)
    publish(run, "b", 1, [0.5] * 7)
    final = aggregator.take_pass()
    assert (final.kind, final.head.record.final, [step.closed for step in final.head.record.steps]) == ("final", True, ["drain"])
    assert head_hint(run).version == 3  # at once: units wait for nothing else
    publish(run, "a", 2, [0.5] * 7)
    for late in (aggregator, Aggregator(seen_by(run))):
        assert late.take_pass(force="once").kind == "final"
    history = walk(run)
    assert ([manifest.final for manifest in history], len(merged_in(history))) == ([False] * 3 + [True], 4)


def test_a_target_that_is_reached_with_nothing_left_ends_with_an_empty_final_manifest() -> None:
    run, aggregator = listed("a", target_tokens=100)
    publish(run, "a", 0, [0.5] * 7)
    aggregator.take_pass()
    final = aggregator.take_pass()
    assert (final.kind, final.head.record.steps) == ("final", ())
    walk(run)


def test_a_pass_with_once_merges_whatever_is_there_and_is_idle_without_anything() -> None:
    run, aggregator = listed("a", "b", "c", merge={"quorum": 3})
    publish(run, "b", 0, [1.0] * 7)
    assert aggregator.take_pass().kind == "idle"
    assert aggregate_once(run).head.record.steps[0].closed == "once"
    assert aggregate_once(run).kind == "idle"


def test_a_new_config_is_named_by_the_next_manifest_and_used_from_it_on() -> None:
    clock = FakeClock()
    run, aggregator = listed("a", clock=clock, outer={"lr": 1.0, "momentum": 0.0}, pull=EXACT_PULL)
    settings = RunSettings.model_validate({"outer": {"lr": 0.25, "momentum": 0.0}, "pull": EXACT_PULL})
    record = Config(run_id=run.run_id, n=1, attempt="0" * 16, reason="test", created_at="", settings=settings)
    run.store.put(keys.config(1), encode(record))
    clock.now_s += DISCOVER_EVERY_S
    publish(run, "a", 0, [1.0] * 7)
    manifest = aggregator.take_pass().head.record
    assert manifest.config == 1
    assert params(run)[0] == START["a"][0] - 0.25
    assert Aggregator(seen_by(run)).take_pass().head.record.config == 1


def head_hint(run: OpenRun) -> Head:
    return decode(Head, run.store.get(keys.HEAD), key=keys.HEAD)


def test_the_hint_is_written_at_most_once_a_second_and_catches_up_when_nothing_else_happens() -> None:
    clock = FakeClock()
    run, aggregator = listed("a", clock=clock)
    assert head_hint(run).version == 1
    for seq in range(3):
        publish(run, "a", seq, [1.0] * 7)
        aggregator.take_pass()
        clock.now_s += HINT_EVERY_S / 4
    assert (head_hint(run).version, len(list(run.store.list_versions(keys.HEAD)))) == (1, 2)
    clock.now_s += HINT_EVERY_S / 4
    assert aggregator.take_pass().kind == "idle"
    assert (head_hint(run).version, len(list(run.store.list_versions(keys.HEAD)))) == (4, 3)


def test_an_idle_pass_costs_one_get_and_one_per_live_unit_and_lists_only_to_discover() -> None:
    clock = FakeClock()
    run, _ = listed("a", "b", "c", clock=clock, merge={"quorum": 2})
    store = CountingStore(run.store)
    aggregator = Aggregator(seen_by(run, store=store, clock=clock))

    def cost() -> dict[str, int]:
        before = {verb: traffic.calls for verb, traffic in store.snapshot().verbs.items()}
        assert aggregator.take_pass().kind == "idle"
        after = {verb: traffic.calls for verb, traffic in store.snapshot().verbs.items()}
        return {verb: after[verb] - before[verb] for verb in after if after[verb] != before[verb]}

    cost()
    clock.now_s += HINT_EVERY_S / 2
    cost()
    assert cost() == {"get": 1 + 3}
    for seq in range(3):
        publish(run, "a", seq, [1.0] * 7)  # no quorum: it waits, and is not read again
    assert cost() == {"get": 1 + 3 + 3}
    assert cost() == {"get": 1 + 3}
    clock.now_s += DISCOVER_EVERY_S
    assert cost() == {"get": 1 + 3 + 3 + 1, "list_prefixes": 1}  # the next incarnation of each unit, the next config


def test_a_step_costs_two_gets_per_contribution_and_three_puts() -> None:
    run, aggregator = listed("a", "b", pull={"state_every": 1})
    store = CountingStore(run.store)
    aggregator = Aggregator(seen_by(run, store=store))
    aggregator.take_pass()
    for seq in range(2):
        publish(run, "a", seq, [1.0] * 7)
        publish(run, "b", seq, [1.0] * 7)
        before = store.snapshot()
        assert aggregator.take_pass().kind == "committed"
    after = store.snapshot()
    # next manifest, timelines/1; per unit: record, next record, shard
    assert after.verbs["get"].calls - before.verbs["get"].calls == 2 + 2 * 3
    assert after.verbs["put"].calls - before.verbs["put"].calls == 3  # delta, state, manifest; the hint is not due yet


def test_totals_and_receipts_of_a_long_run_stay_bounded() -> None:
    run, aggregator = listed("a", pull={"anchor_every": 4})
    for seq in range(140):
        publish(run, "a", seq, [0.01] * 7)
        manifest = aggregator.take_pass().head.record
    entry = manifest.units["a"]
    assert (entry.first, entry.outcomes, entry.merged, entry.tokens) == (76, "m" * 64, 140, 14_000)
    assert (entry.outcome(75), entry.outcome(76), entry.outcome(140)) == ("decided", "merged", None)
    assert len(manifest.fragments[0].weights) == 32
    assert len(manifest.fragments[0].deltas) <= 2 * 4
    assert entry.tokens < COUNT_MAX


def test_serve_takes_passes_until_it_is_stopped_and_ends_by_itself_when_the_run_is_final() -> None:
    run, _ = listed("a", target_tokens=300)
    stop = threading.Event()
    for seq in range(3):
        publish(run, "a", seq, [1.0] * 7)
    kinds: list[str] = []
    last = serve(seen_by(run), stop=stop, on_outcome=lambda outcome: kinds.append(outcome.kind))
    assert last is not None
    assert (kinds, last.head.record.tokens) == (["committed", "final"], 300.0)

    other, _ = listed("a")
    stop = threading.Event()

    def end_after_ten(outcome: object) -> None:
        kinds.append("pass")
        if len(kinds) == 12:
            stop.set()

    idle = serve(seen_by(other), stop=stop, on_outcome=end_after_ten)
    assert idle is not None and idle.kind == "idle"
