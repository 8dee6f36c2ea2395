"""A unit as a training loop sees it: it trains on whatever the bucket does, and nothing of its work is lost or sent twice."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from ps_diloco import keys
from ps_diloco.errors import Fenced, UserError
from ps_diloco.records import Heartbeat, decode
from ps_diloco.store import MemoryStore
from ps_diloco.store.base import Buffer, ObjectInfo
from ps_diloco.unit.engine import Restart
from tests.stores import FaultyStore, WrappedStore
from tests.unit.scene import Scene, Trainer, wait_until


class ThreadStore(WrappedStore):
    """Remembers which threads called it."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.threads: set[int] = set()

    def get(
        self, key: str, *, max_bytes: int | None = None, byte_range: tuple[int, int] | None = None, version: str | None = None
    ) -> bytes:
        self.threads.add(threading.get_ident())
        return super().get(key, max_bytes=max_bytes, byte_range=byte_range, version=version)

    def put(self, key: str, data: Buffer, *, overwrite: bool = False) -> str | None:
        self.threads.add(threading.get_ident())
        return super().put(key, data, overwrite=overwrite)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        self.threads.add(threading.get_ident())
        return super().list(prefix, start_after=start_after)


def _heartbeat(scene: Scene, unit: str = "a") -> Heartbeat:
    key = keys.heartbeat(unit)
    return decode(Heartbeat, scene.store.get(key), key=key)


def _globally(scene: Scene) -> torch.Tensor:
    """The newest global parameters, in the order of the model's."""
    layout, head = scene.run.layout, scene.head
    values = {f: scene.value(f) for f in range(len(head.fragments))}
    return torch.cat([values[e.fragment].params[e.offset : e.offset + e.size] for e in layout.entries if e.role == "parameter"])


def _balanced(trainer: Trainer) -> bool:
    return all(abs(balance) < 1e-3 for _, balance in trainer.parts.engine.accounts)


# the ordinary life


@pytest.mark.parametrize("fragments", [1, 3])
def test_one_unit_alone_moves_the_global_value_as_it_moves_itself(fragments: int) -> None:
    scene = Scene(fragments=fragments, sync_every=3)
    with scene.join("a") as trainer:
        for _ in range(5):
            trainer.train(3)
            scene.sync(trainer)
        assert _balanced(trainer)
    scene.pass_once()
    start = torch.cat([p.detach().flatten() for p in scene.model().parameters()])
    assert torch.equal(trainer.flat(), start - 15.0) and torch.allclose(_globally(scene), start - 15.0)
    records = scene.records("a")
    assert sum(record.tokens for record in records if record.fragment == 0) == 150
    assert all(record.loss == 1.0 and not record.resent for record in records)


def test_fragments_take_turns() -> None:
    scene = Scene(fragments=3, sync_every=6)
    with scene.join("a") as trainer:
        cut_at = []
        for step in range(1, 13):
            before = trainer.parts.engine.undecided()
            trainer.train(1)
            cut_at += [step] * (trainer.parts.engine.undecided() - before)
        assert cut_at == [2, 4, 6, 8, 10, 12]
        scene.aggregate(until=lambda: len(scene.records("a")) == 6)
    assert [record.fragment for record in scene.records("a")][:6] == [0, 1, 2, 0, 1, 2]  # closing may add what was begun


@pytest.mark.parametrize("codec", ["none", "int4"])
def test_two_units_of_different_pace_hold_global_plus_their_own_work(codec: str) -> None:
    scene = Scene(fragments=2, codec=codec)
    with scene.join("a") as fast, scene.join("b") as slow:
        scene.aggregate(until=lambda: len(scene.head.units) == 2)
        for _ in range(4):
            fast.train(4, by=-0.5)
            slow.train(1, by=1.0)
            scene.pass_once()
        scene.sync(fast, slow)
        world = _globally(scene)
        for trainer in (fast, slow):
            layout, fresh = scene.run.layout, []
            states = trainer.parts.engine.states()
            snapshots = [trainer.unit._binding.snapshot(fragment).params for fragment in range(2)]
            for entry in layout.entries:
                part = slice(entry.offset, entry.offset + entry.size)
                fresh.append(states[entry.fragment].reference[part] - snapshots[entry.fragment][part])
            assert torch.allclose(trainer.flat(), world - torch.cat(fresh), atol=1e-4) and _balanced(trainer)


def test_no_store_call_is_made_by_the_training_thread() -> None:
    store = ThreadStore()
    scene = Scene(fragments=3, store=store, state_every_cuts=1, codec="int4", target_tokens=100_000)
    with scene.join("a") as trainer:
        me = threading.get_ident()
        store.threads.clear()
        for _ in range(300):
            trainer.train(1)
            _ = trainer.unit.done, trainer.unit.progress, trainer.unit.lr_scale, trainer.unit.version, trainer.unit.report()
        assert me not in store.threads
        for _ in range(5):
            scene.pass_once()
            wait_until(lambda: bool(trainer.parts.engine._corrections) or trainer.unit.version == scene.head.version)
            store.threads.clear()
            trainer.train(10)
            assert me not in store.threads
    assert trainer.unit.report()["version"] > 0


def test_a_published_contribution_is_what_the_model_was_at_the_cut() -> None:
    scene = Scene()
    with scene.join("a") as trainer:
        trainer.train(2)
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.fill_(1e6)
        scene.aggregate(until=lambda: scene.head.fragments[0].fragment_version == 1)
        start = torch.cat([p.detach().flatten() for p in scene.model().parameters()])
        assert torch.allclose(_globally(scene), start - 2.0)
        trainer.abandon()


def test_a_step_of_no_tokens_and_a_step_after_the_end_are_errors_of_the_user() -> None:
    scene = Scene()
    with scene.join("a") as trainer, pytest.raises(UserError):
        trainer.unit.step(tokens=0)
    with pytest.raises(UserError, match="closed"):
        trainer.unit.step(tokens=1)
    trainer.unit.close()  # twice is no error


# the bucket goes away


def test_while_the_bucket_is_away_training_goes_on_and_afterwards_nothing_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(fragments=2, sync_every=2, codec="int8")
    store = FaultyStore(scene.store)
    trainer = scene.open("a", store=store)
    trainer.train(2)
    scene.sync(trainer)
    store.down = True
    for _ in range(200):
        trainer.train(1)
        assert trainer.parts.engine.undecided() <= 4
    wait_until(lambda: "Training goes on" in caplog.text, "the warning")
    assert "memory://" in caplog.text and trainer.unit.report()["away_s"] > 0
    undecided = trainer.parts.engine.undecided()
    assert undecided == 4 and len(scene.records("a")) == 2
    store.down = False
    scene.sync(trainer)
    assert "answers again" in caplog.text
    trainer.unit.close(drain_s=30.0)
    for _ in range(3):
        scene.pass_once()
    for fragment in range(2):
        assert sum(record.tokens for record in scene.records("a") if record.fragment == fragment) == 2020
    report = trainer.unit.report()
    assert report["lost_tokens"] == 0 and report["taken_back"] == 0 and _balanced(trainer)
    assert scene.head.units["a"].refused == 0 and scene.head.units["a"].merged == len(scene.records("a"))


def test_an_absent_bucket_does_not_keep_a_unit_from_closing() -> None:
    scene = Scene()
    store = FaultyStore(scene.store)
    trainer = scene.open("a", store=store)
    trainer.train(2)
    store.down = True
    trainer.train(3)
    trainer.unit.close(drain_s=0.2)
    assert not any(part._thread.is_alive() for part in (trainer.parts.engine, trainer.parts.outbox, trainer.parts.puller))


# replacement in the very step in which a cut is due


def test_a_fragment_that_was_replaced_in_the_step_of_its_cut_is_not_cut() -> None:
    """There would be nothing in it: a record of no tokens, which the format does not allow."""
    scene = Scene(sync_every=2)
    with scene.join("a") as trainer:
        trainer.train(1)
        trainer.parts.engine.post(Restart())
        wait_until(lambda: bool(trainer.parts.engine._corrections))
        trainer.train(1)
        assert trainer.parts.outbox.accepted == 0 and trainer.parts.engine.undecided() == 0
        trainer.train(1)
        scene.aggregate(until=lambda: len(scene.records("a")) == 1)
        record = scene.record("a", 0)
        assert record is not None and (record.tokens, record.steps) == (10, 1)
        assert trainer.unit.report()["lost_tokens"] == 20


# joining late, ending


def test_a_late_unit_ramps_and_its_first_contribution_starts_after_the_ramp() -> None:
    scene = Scene(fragments=2, sync_every=2, warmup=4)
    with scene.join("early") as early:
        early.train(8)
        scene.sync(early)
    scene.pass_once()
    assert scene.head.tokens > 0
    with scene.join("late") as late:
        scene.aggregate(until=lambda: "late" in scene.head.units)
        late.settle(scene.head.version)
        scales = []
        for _ in range(4):
            scales.append(late.unit.lr_scale)
            late.train(1, tokens=1000, by=-100.0)
        assert scales == [0.25, 0.5, 0.75, 1.0] and late.unit.lr_scale == 1.0
        assert late.parts.outbox.accepted == 0
        wait_until(lambda: len(late.parts.engine._corrections) == 2)
        late.train(1, tokens=1000, by=-100.0)  # still before the replacement, which this step takes up at its end
        assert torch.allclose(late.flat(), _globally(scene))
        late.train(2, tokens=7, by=-1.0)
        scene.aggregate(until=lambda: len(scene.records("late")) >= 2)
        first = scene.record("late", 0)
        assert first is not None and first.tokens in (7, 14)
        assert late.unit.report()["lost_tokens"] == 2 * 5000


def test_the_final_version_is_in_the_model_when_the_run_is_done() -> None:
    scene = Scene(fragments=3, sync_every=2, target_tokens=100)
    with scene.join("a") as trainer, scene.join("b") as other:
        seen = []
        for _ in range(1000):
            trainer.train(1)
            other.train(1, by=0.5)
            seen.append(trainer.unit.progress)
            scene.pass_once()
            if scene.head.final:
                break
        for one in (trainer, other):
            wait_until(lambda one=one: one.unit.done)  # type: ignore[misc]
            assert torch.equal(one.flat(), _globally(scene)) and one.unit.done
        assert seen == sorted(seen) and 0.0 < seen[0] <= seen[-1] <= 1.0 and trainer.unit.progress == 1.0
        records = len(scene.records("a"))
    assert _heartbeat(scene).ended == "run ended" and len(scene.records("a")) == records
    assert scene.head.tokens >= 100


def test_a_run_without_a_target_has_no_progress() -> None:
    with Scene().join("a") as trainer:
        trainer.train(1)
        assert not trainer.unit.progress and not trainer.unit.done
        trainer.abandon()


def test_closing_publishes_what_was_done_and_says_goodbye() -> None:
    scene = Scene(fragments=2, sync_every=100)
    with scene.join("a") as trainer:
        trainer.train(3, tokens=5)
        scene.aggregate(until=lambda: "a" in scene.head.units)
        wait_until(lambda: trainer.parts.outbox.listed.is_set())
    assert [record.tokens for record in scene.records("a")] == [15, 15]
    assert _heartbeat(scene).ended == "closed" and _heartbeat(scene).report["published"] == 2
    assert any(info.key.startswith("units/a/state/") for info in scene.store.list("units/a/"))


def test_after_an_exception_nothing_of_a_half_done_step_is_published() -> None:
    scene = Scene(sync_every=100)
    trainer = scene.open("a")
    with pytest.raises(ZeroDivisionError), trainer.unit:
        trainer.train(3)
        scene.aggregate(until=lambda: "a" in scene.head.units)
        wait_until(lambda: trainer.parts.outbox.listed.is_set())
        raise ZeroDivisionError
    assert scene.records("a") == [] and _heartbeat(scene).ended == "ZeroDivisionError"


def test_what_a_background_thread_found_is_raised_by_the_next_step() -> None:
    scene = Scene()
    with scene.join("a") as trainer:
        scene.aggregate(until=lambda: "a" in scene.head.units)
        scene.store.put(f"units/a/t000000/000000/{0:020d}.json", b"another process was here")
        with pytest.raises(Fenced, match="another process publishes"):
            trainer.idle_until(lambda: False)
        trainer.unit.close(drain_s=0.1)


# strange models


class Strange(nn.Module):
    """Batch statistics, a tied head, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(5, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.frozen(self.embed(x))))


@pytest.mark.parametrize("fragments", [1, 2])
def test_buffers_ties_and_frozen_parameters_come_through(fragments: int) -> None:
    scene = Scene(fragments=fragments, model=Strange, sync_every=2)
    frozen = Strange().frozen.weight.detach().clone()
    with scene.join("a") as a, scene.join("b") as b:
        for index, trainer in enumerate((a, b)):
            optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
            for _ in range(2 + 2 * index):
                optimizer.zero_grad()
                trainer.model(torch.arange(5)).square().mean().backward()
                optimizer.step()
                trainer.unit.step(tokens=10)
        scene.sync(a, b)
        states = [{name: tensor.clone() for name, tensor in trainer.model.state_dict().items()} for trainer in (a, b)]
        for name, tensor in states[0].items():
            if "num_batches" in name:
                assert tensor.item() == states[1][name].item() == 4  # the larger of both
            elif "running" in name or fragments == 1:  # with two fragments one of them holds fresh work, which no other unit has
                assert torch.allclose(tensor, states[1][name], atol=1e-5)
        for trainer in (a, b):
            model = trainer.model
            assert isinstance(model, Strange) and model.head.weight is model.embed.weight
            assert torch.equal(model.frozen.weight, frozen)
        assert not torch.equal(a.model.get_buffer("norm.running_mean"), torch.zeros(3))
        a.abandon()
        b.abandon()
