"""Joining (format §7.2): who may, under which number, with which state, and what the next incarnation takes over."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from ps_diloco import keys
from ps_diloco.config import CreateSettings
from ps_diloco.env import Env, SystemClock, SystemEntropy
from ps_diloco.errors import ConfigError, Fenced, LayoutError, RunNotFound, UnitActive
from ps_diloco.records import Covers, Heartbeat, Incarnation, Manifest, Merged, Parent, Step, Stored, UnitEntry, decode, encode
from ps_diloco.run import create_run
from ps_diloco.store import MemoryStore
from ps_diloco.unit.join import join, keeps_residual
from ps_diloco.unit.saved import InnerState, Restored
from tests.stores import Call, Fault, FaultyStore
from tests.unit.scene import Scene, fast_env, plain_settings, wait_until


def _incarnation(scene: Scene, number: int) -> Incarnation:
    key = keys.incarnation("a", number)
    return decode(Incarnation, scene.store.get(key), key=key)


def _beat(scene: Scene, *, incarnation: int = 0, ended: str | None = None, nonce: str = "0" * 16) -> None:
    beat = Heartbeat(run_id=scene.run.run_id, unit="a", incarnation=incarnation, nonce=nonce, interval_s=4.0, ended=ended, report={})
    scene.store.put(keys.heartbeat("a"), encode(beat), overwrite=True)


# who may join


def test_a_unit_joins_with_the_newest_global_values_in_its_model() -> None:
    scene = Scene(fragments=3)
    model = scene.model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(77.0)
    with scene.join("a", model=model) as trainer:
        assert torch.equal(trainer.flat(), torch.cat([p.detach().flatten() for p in scene.model().parameters()]))
        assert trainer.unit.incarnation == 0 and trainer.unit.restored is None
    assert _incarnation(scene, 0).restored is None


def test_no_run_a_bad_name_and_an_unknown_region_are_errors_of_the_user() -> None:
    scene = Scene()
    with pytest.raises(RunNotFound):
        scene.open("a", store=MemoryStore())
    with pytest.raises(ConfigError, match="lower-case"):
        scene.open("A b")
    with pytest.raises(ConfigError, match="no such active region"):
        scene.open("a", region="mars")
    assert not any(info.key.startswith("units/") for info in scene.store.list(""))


def test_a_model_that_is_not_the_runs_is_refused_with_the_tensors_name() -> None:
    scene = Scene(model=lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    with pytest.raises(LayoutError) as caught:
        scene.open("a", model=nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)))
    assert caught.value.facts["name"] == "1.weight" and caught.value.facts["field"] == "shape"
    with pytest.raises(LayoutError, match=r"only_in_run=\['1.bias'\]"):
        scene.open("a", model=nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False)))
    assert not any(info.key.startswith("units/") for info in scene.store.list(""))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_of_another_type_than_the_runs_is_refused(dtype: torch.dtype) -> None:
    for ours, theirs in ((dtype, torch.float32), (torch.float32, dtype)):
        scene = Scene(model=lambda ours=ours: nn.Linear(3, 2).to(ours))  # type: ignore[misc]
        with pytest.raises(LayoutError) as caught:
            scene.open("a", model=nn.Linear(3, 2).to(theirs))
        assert caught.value.facts["field"] == "dtype"


# one process under a name


def test_a_second_process_under_a_living_name_is_refused() -> None:
    scene = Scene()
    real = Env(clock=SystemClock(), entropy=SystemEntropy())
    with scene.join("a", heartbeat_s=1.0), pytest.raises(UnitActive) as caught:
        wait_until(lambda: any(scene.store.list(keys.heartbeat("a"))))
        scene.open("a", env=real)  # watches for two real seconds, in which the other's heart beats 200 times
    assert caught.value.facts["incarnation"] == 0 and "take_over" in caught.value.remedy
    assert not any("000001" in info.key for info in scene.store.list("units/a/incarnations/"))


def test_a_process_that_said_goodbye_is_followed_at_once() -> None:
    scene = Scene()
    with scene.join("a"):
        pass
    store = FaultyStore(scene.store)
    with scene.join("a", store=store) as again:
        assert again.unit.incarnation == 1
        beats = [call for call in store.calls if call.key.endswith("heartbeat.json") and call.verb == "get"]
        assert len(beats) == 1


def test_a_process_that_died_is_followed_after_a_while() -> None:
    scene = Scene()
    with scene.join("a"):
        pass
    _beat(scene)  # its last word: it lives
    store = FaultyStore(scene.store)
    with scene.join("a", store=store) as again:
        assert again.unit.incarnation == 1
        assert sum(call.key.endswith("heartbeat.json") and call.verb == "get" for call in store.calls) > 2


def test_a_heartbeat_that_is_rubbish_or_of_an_older_incarnation_stops_nobody() -> None:
    scene = Scene()
    for number, body in enumerate((b"rubbish", b"", None)):
        if body is not None:
            scene.store.put(keys.heartbeat("a"), body, overwrite=True)
        with scene.join("a") as trainer:
            assert trainer.unit.incarnation == number
        _beat(scene, incarnation=0)
    _beat(scene, incarnation=1, nonce="1" * 16)
    with scene.join("a") as trainer:
        assert trainer.unit.incarnation == 3


def test_of_two_that_join_at_once_one_is_refused() -> None:
    scene = Scene()
    key = keys.incarnation("a", 0)

    def other_first(call: Call) -> None:
        if call.verb == "put" and call.key == key and not list(scene.store.list(key)):
            scene.store.put(key, b"the other's")

    with pytest.raises(UnitActive, match="just joined"):
        scene.open("a", store=FaultyStore(scene.store, before=other_first))


@pytest.mark.parametrize("fault", list(Fault))
def test_a_lost_answer_to_the_claim_of_an_incarnation_is_survived(fault: Fault) -> None:
    scene = Scene()
    store = FaultyStore(scene.store)

    def plan(call: Call) -> None:
        if call.verb == "get" and call.key == keys.incarnation("a", 0) and not store._plan:
            store._plan[call.number + 1] = fault  # the put that follows

    store.before = plan
    with scene.join("a", store=store) as trainer:
        assert trainer.unit.incarnation == 0
        trainer.train(2)
        scene.aggregate(until=lambda: len(scene.records("a")) == 1)
    assert store.faults


def test_who_takes_over_fences_the_other() -> None:
    scene = Scene()
    old = scene.open("a")
    old.train(2)
    scene.aggregate(until=lambda: len(scene.records("a")) == 1)
    with scene.join("a", take_over=True) as new:
        assert new.unit.incarnation == 1
        new.train(2)
        scene.aggregate(until=lambda: len(scene.records("a", 1)) == 1)
        with pytest.raises(Fenced) as caught:
            old.idle_until(lambda: False)
        assert caught.value.exit_code == 4
        with pytest.raises(Fenced):
            _ = old.unit.done
        old.unit.close(drain_s=5.0)
        scene.aggregate(until=lambda: scene.head.units["a"].outcomes == "m")
        new.settle(scene.head.version)
    assert scene.head.units["a"].incarnation == 1


# what a restart takes over


def test_a_restart_goes_on_with_optimizer_cursor_and_residual() -> None:
    scene = Scene(codec="int4")
    model = scene.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with scene.join("a", model=model, optimizer=optimizer, extra=lambda: {"cursor": 42}) as first:
        for _ in range(2):
            optimizer.zero_grad()
            sum((p * (1.0 + p.detach())).sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
            optimizer.step()
            first.unit.step(tokens=10)
        scene.aggregate(until=lambda: len(scene.records("a")) == 1)
    saved = first.parts.engine.states()[0].residual
    assert saved.abs().max() > 0
    scene.pass_once()
    model = scene.model()
    again = torch.optim.AdamW(model.parameters(), lr=0.1)
    with scene.join("a", model=model, optimizer=again) as second:
        assert second.unit.restored == {"cursor": 42}
        assert (second.unit.inner_steps, second.unit.tokens, second.unit.steps) == (2, 20, 0)
        assert second.unit.lr_scale == 1.0
        for old, new in zip(first.model.parameters(), model.parameters(), strict=True):
            kept = optimizer.state[old]
            assert len(kept) == 3 and all(torch.equal(again.state[new][key], kept[key]) for key in kept)
        scene.aggregate(until=lambda: scene.head.units["a"].incarnation == 1)
        wait_until(lambda: second.parts.engine.accounts[0][0].produced != 0.0)
    assert torch.equal(second.parts.engine.states()[0].residual, saved)
    restored = _incarnation(scene, 1).restored
    assert restored is not None and (restored.incarnation, restored.covers) == (0, Covers(timeline=0, seq=0))


def test_a_residual_is_not_used_when_later_work_was_merged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    scene = Scene(codec="int4", state_every_cuts=1)
    first = scene.open("a")
    first.model.p0.data.add_(torch.linspace(-1.0, 1.0, 6))  # type: ignore[union-attr, operator]
    first.train(2)  # a cut, and a saved state that covers it
    scene.aggregate(until=lambda: any("/state/" in info.key and info.key.endswith(".json") for info in scene.store.list("units/a/")))
    first.parts.saver.expect()  # as if it could not save again
    first.train(2)
    scene.aggregate(until=lambda: scene.head.units["a"].merged == 2)
    first.abandon()
    first.unit.close(drain_s=1.0)
    with scene.join("a", take_over=True) as second:
        assert second.unit.inner_steps == 2
        scene.aggregate(until=lambda: scene.head.units["a"].incarnation == 1)
        wait_until(lambda: "residual is not used" in caplog.text)
        assert second.parts.engine.accounts[0][0].produced == 0.0


@dataclass
class Line:
    """Made-up manifests after a run's first one, to ask whether a residual is kept."""

    scene: Scene
    head: Stored[Manifest]

    def add(self, *, incarnation: int | None, outcomes: str = "", first: int = 0, merged: tuple[tuple[int, int], ...] = ()) -> Line:
        """``merged``: (incarnation, seq) of contributions that this manifest merges; ``incarnation`` None: the unit is not listed."""
        old = self.head.record
        entry = UnitEntry(
            incarnation=incarnation or 0,
            region="home",
            first=first,
            outcomes=outcomes,
            tries={},
            bases={},
            tokens=0,
            merged=0,
            refused=0,
            lost=0,
        )
        members = tuple(
            Merged(
                contribution=f"t000000/a/{k:06d}/{seq:020d}",
                record="0" * 64,
                size=1,
                tokens=1,
                steps=1,
                base=0,
                staleness=0,
                weight=1.0,
                coefficient=1.0,
            )
            for k, seq in merged
        )
        step = Step.model_construct(
            fragment=0, to=1, closed="once", mass=1.0, round_tokens=1.0, merged=members, gradient_norm=0.0, update_norm=0.0
        )
        update = {
            "version": old.version + 1,
            "parent": Parent(timeline=0, version=old.version, sha256=self.head.sha256),
            "units": {} if incarnation is None else {"a": entry},
            "steps": (step,) if members else (),
        }
        committed = self.scene.run.log.commit(old.model_copy(update=update))
        assert committed is not None
        return Line(self.scene, committed)

    def keeps(self, since: Line, *, saved: int, covers: int) -> bool:
        inner = InnerState(optimizer="", tensors={}, scalars={}, extra=None, inner_steps=0, tokens=0)
        restored = Restored(incarnation=saved, covers=Covers(timeline=0, seq=covers), residuals={}, inner=inner)
        return keeps_residual(self.scene.run, since.head, self.head, "a", restored)


@pytest.fixture
def line() -> Line:
    scene = Scene()
    return Line(scene, scene.run.log.find_head())


@pytest.mark.parametrize(
    ("outcomes", "first", "late", "kept"),
    [
        ("mm", 0, (), True),  # all that was merged is covered
        ("mm.", 0, (), True),  # an undecided one beyond: superseded, so never merged
        ("mmx", 0, (), True),
        ("mmm", 0, (), False),  # seq 2 was merged beyond what the state covers
        ("mm.m", 0, (), False),
        ("m", 0, (1,), True),  # merged in the very manifest that lists the new incarnation, and covered
        ("mm", 0, (2,), False),  # the same, and not covered
        ("m", 2, (), False),  # seq 2 itself
        ("", 3, (), False),  # receipts are gone: it cannot be told
        ("", 2, (), True),
    ],
)
def test_a_residual_is_kept_just_if_nothing_beyond_its_state_was_merged(
    line: Line, outcomes: str, first: int, late: tuple[int, ...], kept: bool
) -> None:
    before = line.add(incarnation=0, outcomes=outcomes, first=first)
    listed = before.add(incarnation=1, merged=tuple((0, seq) for seq in late))
    assert listed.keeps(before, saved=0, covers=1) is kept
    assert listed.add(incarnation=1, outcomes="m").keeps(before, saved=0, covers=1) is kept


def test_a_residual_of_an_incarnation_that_was_never_listed_is_kept(line: Line) -> None:
    first = line.add(incarnation=0, outcomes="mmm")
    assert first.keeps(line, saved=0, covers=-1)
    assert first.add(incarnation=2).keeps(first, saved=1, covers=0)


def test_a_residual_is_dropped_when_an_incarnation_between_hides_what_was_merged(line: Line) -> None:
    """Incarnation 0 saved, had more merged, died; 1 joined and died at once; 2 finds the state of 0, and the receipts of 0 are gone."""
    used = line.add(incarnation=0, outcomes="mmmm")
    between = used.add(incarnation=1)
    assert not between.keeps(used, saved=0, covers=1)
    assert not between.add(incarnation=2).keeps(between, saved=0, covers=1)


def test_a_residual_is_dropped_when_the_listing_cannot_be_found(line: Line) -> None:
    before = line.add(incarnation=0)
    listed = before.add(incarnation=1)
    assert not listed.keeps(listed, saved=0, covers=-1)


def test_an_url_is_enough_to_join() -> None:
    create_run(MemoryStore(), fast_env(), nn.Linear(2, 1), create=CreateSettings(), settings=plain_settings())
    with pytest.raises(RunNotFound, match="ps-diloco init"):
        join("memory://no-run-here", nn.Linear(2, 1), unit="a")
