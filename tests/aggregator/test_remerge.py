"""Outer state that was not saved is made again to the same bits, from the manifests and contributions alone (format §6.3, §7.4)."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from aggregator.fragment_step import Stopped
from aggregator.outer_step import DISCOVER_EVERY_S, Aggregator
from aggregator.remerge import History, step_again
from aggregator.serve import serve
from ps_diloco import keys
from ps_diloco.checkpoint import Place, read_state, read_update, write_delta
from ps_diloco.config import RunSettings
from ps_diloco.errors import FormatError, IntegrityError
from ps_diloco.outer import OuterState
from ps_diloco.records import Config, Manifest, encode
from ps_diloco.run import OpenRun
from ps_diloco.shard import encode_section
from ps_diloco.store import CountingStore
from tests.aggregator.bench import FakeClock, listed, publish, seen_by, values, walk

SIZES = (4, 3)


def work(seq: int) -> list[tuple[str, int, list[float]]]:
    """(unit, fragment, delta) of a round: nothing that is short in binary."""
    draw = random.Random(seq)
    return [(unit, fragment, [draw.gauss(0, 1) for _ in range(SIZES[fragment])]) for unit in "ab" for fragment in (0, 1)]


def put_round(run: OpenRun, seq: int) -> None:
    for unit, fragment, delta in work(seq):
        publish(run, unit, 2 * seq + fragment, delta, fragment=fragment, codec="int4", tokens=100 + 10 * seq)


def train(rounds: int, *, state_every: int, restart_after: Sequence[int] = (), pull: str = "int8") -> tuple[OpenRun, Manifest]:
    run, aggregator = listed("a", "b", fragments=2, pull={"state_every": state_every, "codec": pull, "anchor_every": 4})
    for seq in range(rounds):
        put_round(run, seq)
        assert aggregator.take_pass().kind == "committed"
        if seq in restart_after:
            aggregator = Aggregator(seen_by(run, seed=seq + 10))
    return run, run.log.find_head().record


@pytest.mark.parametrize("pull", ["none", "int8", "int4"])
@pytest.mark.parametrize("restart_after", [(), (0,), (4,), (2, 3), range(9)], ids=str)
def test_a_run_has_the_same_bits_whoever_dies_when_and_however_rarely_state_is_saved(restart_after: Sequence[int], pull: str) -> None:
    _, expected = train(9, state_every=1, pull=pull)
    run, head = train(9, state_every=5, restart_after=restart_after, pull=pull)
    assert [entry.sha256 for entry in head.fragments] == [entry.sha256 for entry in expected.fragments]
    assert [entry.state.fragment_version for entry in head.fragments if entry.state] == [5, 5]
    walk(run)


def test_without_the_unsaved_steps_the_bits_would_be_others() -> None:
    """Negative control: the state of the last save is not that of the head."""
    run, head = train(9, state_every=5)
    entry = head.fragments[0]
    saved = read_state(run, 0, entry.state)
    again = read_state(run, 0, entry.state)
    for taken in History(run).since_state(run.log.find_head(), 0, 5):
        step_again(run, taken, again, RunSettings.model_validate({"pull": {"codec": "int8"}}))
    assert not torch.equal(saved.momentum, again.momentum)
    assert not torch.equal(saved.error, again.error)


def test_steps_are_taken_again_under_the_settings_that_they_were_taken_under() -> None:
    ends = []
    for restart in (False, True):
        clock = FakeClock()
        run, aggregator = listed("a", "b", clock=clock, fragments=2, pull={"state_every": 50})
        for seq in range(6):
            if seq == 3:
                settings = RunSettings.model_validate({"outer": {"lr": 0.3, "momentum": 0.8}, "pull": {"state_every": 50, "codec": "int4"}})
                record = Config(run_id=run.run_id, n=1, attempt="0" * 16, reason="test", created_at="", settings=settings)
                run.store.put(keys.config(1), encode(record))
                clock.now_s += DISCOVER_EVERY_S
            if restart:
                aggregator = Aggregator(seen_by(run, seed=seq + 10, clock=clock))
            put_round(run, seq)
            aggregator.take_pass()
        assert run.log.find_head().record.config == 1
        ends.append([entry.sha256 for entry in run.log.find_head().record.fragments])
    assert ends[0] == ends[1]


def test_who_ends_in_order_saves_its_state_and_the_next_reads_no_contribution_again() -> None:
    run, _ = listed("a", "b", fragments=2, pull={"state_every": 50})
    for seq in range(3):
        put_round(run, seq)
    stop = threading.Event()
    kinds: list[str] = []

    def end(outcome: Any) -> None:
        kinds.append(outcome.kind)
        if outcome.kind == "idle":
            stop.set()

    serve(seen_by(run), stop=stop, on_outcome=end)
    head = run.log.find_head().record
    assert (kinds, head.steps) == (["committed", "idle"], ())
    assert [entry.state and entry.state.fragment_version for entry in head.fragments] == [
        entry.fragment_version for entry in head.fragments
    ]

    put_round(run, 3)
    store = CountingStore(run.store)
    assert Aggregator(seen_by(run, store=store, seed=5)).take_pass().kind == "committed"
    read = {verb: traffic.calls for verb, traffic in store.snapshot().verbs.items()}
    # per unit two records and two shards; per fragment state, anchor and delta: and no older contribution
    assert read["get"] < 2 * (2 * 2 + 1) + 2 * (1 + 8 + 1) + 12
    walk(run)


def test_a_process_that_holds_nothing_unsaved_writes_nothing_when_it_ends() -> None:
    run, aggregator = listed("a", pull={"state_every": 1})
    publish(run, "a", 0, [1.0] * 7)
    aggregator.take_pass()
    before = run.log.find_head().record.version
    assert not aggregator.save(60.0)
    assert not Aggregator(seen_by(run)).save(60.0)
    assert run.log.find_head().record.version == before


def test_no_state_is_written_after_the_time_is_up() -> None:
    run, aggregator = listed("a", "b", fragments=2)
    put_round(run, 0)
    aggregator.take_pass()
    assert not aggregator.save(-1.0)
    assert aggregator.save(1.0)
    walk(run)


def test_a_saved_state_that_another_process_overtook_is_left_behind() -> None:
    run, aggregator = listed("a", "b", fragments=2)
    put_round(run, 0)
    aggregator.take_pass()
    put_round(run, 1)
    other = Aggregator(seen_by(run, seed=3))
    assert other.take_pass().kind == "committed"
    assert not aggregator.save(60.0)  # its head is old, and so is all that it holds
    walk(run)


def test_the_end_of_a_run_saves_the_state_of_every_fragment() -> None:
    run, aggregator = listed("a", "b", fragments=2, target_tokens=150)
    put_round(run, 0)
    aggregator.take_pass()
    final = aggregator.take_pass().head.record
    assert (final.final, [entry.state and entry.state.fragment_version for entry in final.fragments]) == (True, [1, 1])
    walk(run)


def test_a_contribution_that_is_gone_is_named_with_what_to_do() -> None:
    run, _ = train(3, state_every=50)
    gone = next(info.key for info in run.store.list("units/b/t000000/") if info.key.endswith(".shard"))
    run.store.delete(gone)
    put_round(run, 3)
    with pytest.raises(FormatError, match=r"t000000/b/000000/00000000000000000000.*kept"):
        Aggregator(seen_by(run, seed=9)).take_pass()


def test_a_record_that_was_exchanged_is_not_merged_again() -> None:
    run, _ = train(2, state_every=50)
    key = next(info.key for info in run.store.list("units/a/t000000/") if info.key.endswith(".json"))
    other = next(info.key for info in run.store.list("units/b/t000000/") if info.key.endswith(".json"))
    run.store.put(key, run.store.get(other), overwrite=True)
    put_round(run, 2)
    with pytest.raises(IntegrityError, match="not the one that was merged"):
        Aggregator(seen_by(run, seed=9)).take_pass()


def published_otherwise(change: float) -> tuple[OpenRun, OuterState, torch.Tensor, torch.Tensor]:
    """Take the only step of a fragment again whose published update had ``change`` more in its first element; the state, and what came of it."""
    run, head = train(1, state_every=50, pull="none")
    (taken,) = History(run).since_state(run.log.find_head(), 0, 0)
    honest_F = read_update(run, 0, taken.delta)
    other_F = honest_F.clone()
    other_F[0] += change
    value = values(run, head)[0]
    ref = write_delta(
        run,
        Place(timeline=0, fragment=0, fragment_version=1),
        params=encode_section("params", "none", other_F),
        floats_B=value.floats,
        ints_I=value.ints,
    )
    changed = taken.__class__(step=taken.step, config=taken.config, delta=taken.delta.model_copy(update={"object": ref}))
    state = OuterState.zeros(4)
    step_again(run, changed, state, RunSettings.model_validate({"pull": {"codec": "none"}}))
    return run, state, honest_F, other_F


def test_where_this_machine_rounds_otherwise_the_error_is_that_of_the_published_update() -> None:
    _, state, honest_F, other_F = published_otherwise(1e-5)
    assert torch.equal(state.error, honest_F - other_F)
    assert state.error[0] != 0


def test_an_update_that_does_not_follow_from_its_contributions_is_an_error() -> None:
    with pytest.raises(IntegrityError, match="does not follow"):
        published_otherwise(0.5)


def test_a_stop_ends_the_merging_again_too() -> None:
    run, _ = train(3, state_every=50)
    put_round(run, 3)
    stop = threading.Event()
    aggregator = Aggregator(seen_by(run, seed=9), stop=stop)
    stop.set()
    with pytest.raises(Stopped):
        aggregator.take_pass()


def test_history_is_read_once_for_all_fragments() -> None:
    run, _ = train(6, state_every=50)
    store = CountingStore(run.store)
    history = History(seen_by(run, store=store))
    head = run.log.find_head()
    assert [taken.step.to for taken in history.since_state(head, 0, 0)] == [1, 2, 3, 4, 5, 6]
    reads = store.snapshot().calls
    assert reads == 5  # the head is known, five manifests stand before it that step something
    assert [taken.step.to for taken in history.since_state(head, 1, 2)] == [3, 4, 5, 6]
    assert store.snapshot().calls == reads
