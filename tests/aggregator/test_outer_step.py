"""One pass of the aggregator from end to end: the numbers it makes, the manifest it writes, what a pass costs (format §6, §7.4, §11)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from aggregator.outer_step import DISCOVER_EVERY_S, HINT_EVERY_S, Aggregator
from aggregator.serve import aggregate_once, serve
from ps_diloco import keys
from ps_diloco.checkpoint import read_fragment
from ps_diloco.config import RunSettings
from ps_diloco.fragment import FragmentValue
from ps_diloco.ids import ContributionId
from ps_diloco.records import COUNT_MAX, Config, Head, decode, encode
from ps_diloco.run import OpenRun
from ps_diloco.store import CountingStore, MemoryStore
from tests.aggregator.bench import (
    EXACT_PULL,
    START,
    FakeClock,
    announce,
    base_of,
    fake_env,
    merged_in,
    params,
    publish,
    seen_by,
    tiny_run,
    values,
    walk,
)

ROOT_HALF = 2**-0.5


@dataclass
class Reference:
    """A fragment in float64: the formulas of format §6.2 and §6.3, written down a second time."""

    theta: list[float]
    lr: float
    momentum: float
    m: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.m = np.zeros(len(self.theta))

    def step(self, *weighed: tuple[float, Sequence[float]]) -> np.ndarray:
        """``weighed``: (coefficient, delta) of each contribution."""
        gradient = sum((coefficient * np.array(delta) for coefficient, delta in weighed), np.zeros(len(self.theta)))
        self.m = self.momentum * self.m + gradient
        self.theta = list(np.array(self.theta) - self.lr * (self.momentum * self.m + gradient))
        return gradient


def scene(*units: str, fragments: int = 1, clock: FakeClock | None = None, **settings: object) -> tuple[OpenRun, Aggregator]:
    """A run whose units are listed, and an aggregator that listed them."""
    run = tiny_run(MemoryStore(), env=fake_env(clock=clock), fragments=fragments, **settings)
    for unit in units:
        announce(run, unit)
    aggregator = Aggregator(run)
    assert aggregator.take_pass().kind == "committed"
    return run, aggregator


def test_two_steps_of_one_fragment_are_the_merge_and_the_nesterov_step_worked_out_by_hand() -> None:
    run, aggregator = scene("a", "b", outer={"lr": 0.5, "momentum": 0.8}, merge={"weight_cap": 100.0}, pull=EXACT_PULL)
    reference = Reference([*START["a"], *START["b"]], lr=0.5, momentum=0.8)
    zero = base_of(run.log.find_head().record, 0)
    one, two = [1.0, 0.0, -1.0, 0.5, 0.25, 0.0, 2.0], [0.0, 4.0, 1.0, 0.0, -0.25, 8.0, 0.0]

    publish(run, "b", 0, two, tokens=300, steps=10, floats=[0.0, 0.0], ints=[4])
    publish(run, "a", 0, one, tokens=100, steps=10, floats=[4.0, 8.0], ints=[9])
    first = aggregator.take_pass().head.record
    (step,) = first.steps
    assert (step.fragment, step.to, step.closed, step.mass, step.round_tokens) == (0, 1, "everyone", 1.0, 400.0)
    # w = tokens^2 / steps: 1000 and 9000
    assert [(m.contribution[8], m.weight, m.coefficient) for m in step.merged] == [
        ("a", 1000.0, np.float32(0.1)),
        ("b", 9000.0, np.float32(0.9)),
    ]
    gradient = reference.step((0.1, one), (0.9, two))
    assert params(run) == pytest.approx(reference.theta, rel=1e-6, abs=1e-7)
    assert step.gradient_norm == pytest.approx(float(np.linalg.norm(gradient)), rel=1e-6)
    assert step.update_norm == pytest.approx(0.5 * 1.8 * float(np.linalg.norm(gradient)), rel=1e-6)
    value = values(run)[0]
    assert value.floats.tolist() == pytest.approx([0.4, 0.8], rel=1e-6)  # mass 1: the weighted mean alone
    assert value.ints.tolist() == [9]

    publish(run, "a", 1, two, tokens=100, floats=[0.4, 0.8])
    publish(run, "b", 1, one, tokens=100, floats=[0.4, 0.8])
    second = aggregator.take_pass().head.record
    assert (second.steps[0].mass, second.steps[0].round_tokens) == (1.0, 200.0)
    reference.step((0.5, two), (0.5, one))
    assert params(run) == pytest.approx(reference.theta, rel=1e-6, abs=1e-7)

    # two steps stale, and each was a whole round: one of them is free
    publish(run, "a", 2, two, tokens=50, steps=10, base=zero, floats=[2.4, 0.8], ints=[3])
    third = aggregator.take_pass(force="once").head.record
    (step,) = third.steps
    assert (step.mass, step.round_tokens, step.merged[0].staleness) == (50 / 150, 150.0, 2)
    # its share is 1, whatever its weight; staleness stands in the numerator only
    assert step.merged[0].coefficient == pytest.approx(ROOT_HALF / 3, rel=1e-7)
    reference.step((ROOT_HALF / 3, two))
    assert params(run) == pytest.approx(reference.theta, rel=1e-6, abs=1e-7)
    value = values(run)[0]
    assert value.floats.tolist() == pytest.approx([0.4 + 2.0 / 3, 0.8], rel=1e-6)
    assert value.ints.tolist() == [9]
    assert (third.tokens, third.units["a"].tokens, third.units["b"].tokens) == (650.0, 250, 400)


def test_with_two_fragments_each_steps_with_its_own_work_momentum_and_share_of_the_tokens() -> None:
    run, aggregator = scene("a", "b", fragments=2, outer={"lr": 0.5, "momentum": 0.5}, pull=EXACT_PULL)
    left, right = Reference(START["a"], 0.5, 0.5), Reference(START["b"], 0.5, 0.5)
    publish(run, "a", 0, [1.0, 2.0, 3.0, 4.0], tokens=100)
    publish(run, "a", 1, [1.0, 0.0, 0.0], fragment=1, tokens=70)
    publish(run, "b", 0, [0.0, 1.0, 0.0], fragment=1, tokens=70)
    manifest = aggregator.take_pass(force="once").head.record
    assert [(step.fragment, step.to, len(step.merged), step.mass) for step in manifest.steps] == [(0, 1, 1, 0.5), (1, 1, 2, 1.0)]
    left.step((0.5, [1.0, 2.0, 3.0, 4.0]))
    right.step((0.5, [1.0, 0.0, 0.0]), (0.5, [0.0, 1.0, 0.0]))
    assert params(run, 0) == pytest.approx(left.theta, rel=1e-6)
    assert params(run, 1) == pytest.approx(right.theta, rel=1e-6)
    assert manifest.tokens == pytest.approx(4 / 7 * 100 + 3 / 7 * 140, rel=1e-12)
    assert [entry.tokens for entry in manifest.fragments] == [100.0, 140.0]

    publish(run, "b", 1, [0.0, 0.0, 1.0], fragment=1, tokens=140)
    later = aggregator.take_pass(force="once").head.record
    right.step((140 / 210, [0.0, 0.0, 1.0]))
    assert params(run, 1) == pytest.approx(right.theta, rel=1e-6)
    assert later.fragments[0] == manifest.fragments[0]
    assert later.units["b"].bases == {"1": 1}


def test_one_uncompressed_unit_is_plain_diloco() -> None:
    run, aggregator = scene("a", outer={"lr": 0.7, "momentum": 0.9}, pull=EXACT_PULL)
    reference = Reference([*START["a"], *START["b"]], 0.7, 0.9)
    for seq in range(3):
        delta = [0.1 * (seq + 1)] * 7
        publish(run, "a", seq, delta)
        assert aggregator.take_pass().head.record.steps[0].closed == "everyone"
        reference.step((1.0, delta))
    assert params(run) == pytest.approx(reference.theta, rel=1e-5)


def test_what_a_quantised_update_loses_is_published_later() -> None:
    run, aggregator = scene("a", outer={"lr": 1.0, "momentum": 0.0}, pull={"codec": "int4"})
    target = np.array([*START["a"], *START["b"]])
    delta = [1.0, 0.05, 0.06, -0.07, 0.3, 0.0, -0.9]
    for seq in range(40):
        publish(run, "a", seq, delta)
        aggregator.take_pass()
        target -= np.array(delta, dtype=np.float32)
    step = 1.1 / 7  # the largest possible scale of a block whose values stay below 1.1
    assert np.abs(np.array(params(run)) - target).max() <= step / 2 + 1e-4


def test_the_manifest_says_who_wrote_it_what_came_before_and_where_every_object_is() -> None:
    run, aggregator = scene("a")
    parent = run.log.find_head()
    record = publish(run, "a", 0, [1.0] * 7)
    manifest = aggregator.take_pass().head.record
    assert manifest.parent is not None
    assert (manifest.parent.version, manifest.parent.sha256) == (parent.record.version, parent.sha256)
    assert (manifest.timeline, manifest.version, manifest.config, manifest.final) == (0, 2, 0, False)
    assert manifest.fingerprint.software.startswith("ps-diloco")
    entry = manifest.fragments[0]
    (delta,) = entry.deltas
    assert entry.state is not None
    assert (entry.fragment_version, entry.anchor.fragment_version, delta.fragment_version, entry.state.fragment_version) == (1, 0, 1, 1)
    assert keys.parse_fragment_object(delta.object.key) == (0, 0, 1)
    assert delta.sha256 == entry.sha256 == values(run)[0].sha256()
    assert (entry.rounds["a"].tokens, entry.rounds["a"].fragment_version, entry.weights) == (100, 1, (1000.0,))
    assert manifest.steps[0].merged[0].contribution == str(record.id)
    assert (manifest.units["a"].first, manifest.units["a"].outcomes, manifest.units["a"].merged) == (0, "m", 1)


def test_an_anchor_is_written_every_n_steps_and_the_chain_keeps_the_deltas_since_the_one_before() -> None:
    run, aggregator = scene("a", pull={"anchor_every": 3})
    chains = []
    held: dict[int, FragmentValue] = {}
    for seq in range(8):
        publish(run, "a", seq, [0.01 * seq] * 7)
        manifest = aggregator.take_pass().head.record
        entry = manifest.fragments[0]
        chains.append((entry.anchor.fragment_version, [delta.fragment_version for delta in entry.deltas]))
        held[entry.fragment_version] = values(run, manifest)[0]
    assert chains == [
        (0, [1]),
        (0, [1, 2]),
        (3, [1, 2, 3]),
        (3, [1, 2, 3, 4]),
        (3, [1, 2, 3, 4, 5]),
        (6, [4, 5, 6]),
        (6, [4, 5, 6, 7]),
        (6, [4, 5, 6, 7, 8]),
    ]
    for version, value in held.items():
        again = read_fragment(run, manifest.fragments[0], 0, held=(version, value))
        assert again.sha256() == manifest.fragments[0].sha256
    assert len(walk(run)) == 10


def test_another_process_goes_on_with_the_same_bits() -> None:
    ends = []
    for restart in (False, True):
        run, aggregator = scene("a", "b", pull={"anchor_every": 2})
        for seq in range(6):
            publish(run, "a", seq, [0.3 * seq + 0.1] * 7)
            publish(run, "b", seq, [-0.2 * seq] * 7, codec="int4")
            aggregator = Aggregator(seen_by(run, seed=seq + 10)) if restart else aggregator
            aggregator.take_pass()
        ends.append([entry.sha256 for entry in run.log.find_head().record.fragments])
        assert run.log.find_head().record.fragments[0].fragment_version == 6
    assert ends[0] == ends[1]


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
    run, aggregator = scene("a", "b", clock=clock, fragments=2, merge={"quorum": 2})
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
    run, aggregator = scene("a", clock=clock)
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
    run, aggregator = scene("a", "b", target_tokens=250, merge={"quorum": 2})
    for seq in range(2):
        publish(run, "a", seq, [0.5] * 7)
    publish(run, "b", 0, [0.5] * 7)
    reached = aggregator.take_pass().head.record
    assert (reached.tokens, reached.final) == (300.0, False)
    publish(run, "b", 1, [0.5] * 7)
    final = aggregator.take_pass()
    assert (final.kind, final.head.record.final, [step.closed for step in final.head.record.steps]) == ("final", True, ["drain"])
    publish(run, "a", 2, [0.5] * 7)
    for late in (aggregator, Aggregator(seen_by(run))):
        assert late.take_pass(force="once").kind == "final"
    history = walk(run)
    assert ([manifest.final for manifest in history], len(merged_in(history))) == ([False] * 3 + [True], 4)
    assert head_hint(run).version == 3


def test_a_target_that_is_reached_with_nothing_left_ends_with_an_empty_final_manifest() -> None:
    run, aggregator = scene("a", target_tokens=100)
    publish(run, "a", 0, [0.5] * 7)
    aggregator.take_pass()
    final = aggregator.take_pass()
    assert (final.kind, final.head.record.steps) == ("final", ())
    walk(run)


def test_a_pass_with_once_merges_whatever_is_there_and_is_idle_without_anything() -> None:
    run, aggregator = scene("a", "b", "c", merge={"quorum": 3})
    publish(run, "b", 0, [1.0] * 7)
    assert aggregator.take_pass().kind == "idle"
    assert aggregate_once(run).head.record.steps[0].closed == "once"
    assert aggregate_once(run).kind == "idle"


def test_a_new_config_is_named_by_the_next_manifest_and_used_from_it_on() -> None:
    clock = FakeClock()
    run, aggregator = scene("a", clock=clock, outer={"lr": 1.0, "momentum": 0.0}, pull=EXACT_PULL)
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
    run, aggregator = scene("a", clock=clock)
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
    run, _ = scene("a", "b", "c", clock=clock, merge={"quorum": 2})
    store = CountingStore(run.store)
    aggregator = Aggregator(seen_by(run, store=store, clock=clock))

    def cost() -> dict[str, int]:
        before = {verb: traffic.calls for verb, traffic in store.snapshot().verbs.items()}
        assert aggregator.take_pass().kind == "idle"
        after = {verb: traffic.calls for verb, traffic in store.snapshot().verbs.items()}
        return {verb: after[verb] - before[verb] for verb in after if after[verb] != before[verb]}

    cost()
    clock.now_s += HINT_EVERY_S
    assert cost() == {"get": 1 + 3}
    for seq in range(3):
        publish(run, "a", seq, [1.0] * 7)  # no quorum: it waits, and is not read again
    assert cost() == {"get": 1 + 3 + 3}
    assert cost() == {"get": 1 + 3}
    clock.now_s += DISCOVER_EVERY_S
    assert cost() == {"get": 1 + 3 + 3 + 1, "list_prefixes": 1}  # the next incarnation of each unit, the next config


def test_a_step_costs_two_gets_per_contribution_and_four_puts() -> None:
    run, aggregator = scene("a", "b")
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
    run, aggregator = scene("a", pull={"anchor_every": 4})
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
    run, _ = scene("a", target_tokens=300)
    stop = threading.Event()
    for seq in range(3):
        publish(run, "a", seq, [1.0] * 7)
    kinds: list[str] = []
    last = serve(seen_by(run), stop=stop, on_outcome=lambda outcome: kinds.append(outcome.kind))
    assert last is not None
    assert (kinds, last.head.record.tokens) == (["committed", "final"], 300.0)

    other, _ = scene("a")
    stop = threading.Event()

    def end_after_ten(outcome: object) -> None:
        kinds.append("pass")
        if len(kinds) == 12:
            stop.set()

    idle = serve(seen_by(other), stop=stop, on_outcome=end_after_ten)
    assert idle is not None and idle.kind == "idle"
