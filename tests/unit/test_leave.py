"""How a unit leaves: nothing is lost silently, whatever the bucket, the user or the training does."""

from __future__ import annotations

import sys
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

from ps_diloco.errors import NonFinite, UserError
from ps_diloco.store.memory import MemoryStore
from tests.stores import FaultyStore
from tests.unit.scene import Scene, wait_until


def test_work_that_no_aggregator_listed_is_in_the_saved_state_and_is_merged_after_a_restart() -> None:
    scene = Scene()
    first = scene.open("a")
    before = scene.value().params.clone()
    first.train(7)  # two cuts that nobody may see yet, and a span that cannot be cut any more
    ending = first.unit.close(drain_s=2.0)
    assert (ending.listed, ending.published, ending.unsent, ending.saved) == (False, 0, 2, True)
    with scene.join("a", take_over=True) as second:
        assert second.unit.inner_steps == 7
        scene.aggregate(until=lambda: scene.head.units["a"].incarnation == 1)
        wait_until(second.parts.outbox.listed.is_set)
        second.train(2)
        scene.sync(second)
        assert torch.equal(scene.value().params, before - 9.0)  # 7 steps of the first process, 2 of the second


def test_a_store_that_is_down_is_reported_and_not_waited_for_without_end() -> None:
    store = FaultyStore(MemoryStore())
    scene = Scene(store=store)
    trainer = scene.open("a")
    scene.aggregate(until=lambda: "a" in scene.head.units)
    wait_until(trainer.parts.outbox.listed.is_set)
    store.down = True
    trainer.train(3)
    begun = time.monotonic()
    ending = trainer.unit.close(drain_s=1.0)
    assert time.monotonic() - begun < 30
    assert (ending.listed, ending.published, ending.saved) == (True, 0, False)
    assert ending.unsent == 2


def test_closing_twice_answers_the_same() -> None:
    scene = Scene()
    trainer = scene.open("a")
    assert trainer.unit.close(drain_s=0.5) is trainer.unit.close()


def test_parameters_that_are_not_finite_are_an_error_that_names_the_tensor() -> None:
    scene = Scene(model=lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    trainer = scene.open("a")
    with torch.no_grad():
        trainer.model[1].bias.fill_(float("nan"))  # type: ignore[index, union-attr]
    with pytest.raises(NonFinite, match=r"tensor=1\.bias.*start the unit again"):
        trainer.train(2)
        trainer.unit.close(drain_s=5.0)


def test_an_interrupt_within_an_adoption_publishes_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    with scene.join("b") as other:
        scene.aggregate(until=lambda: "b" in scene.head.units)
        first = scene.open("a")
        scene.aggregate(until=lambda: "a" in scene.head.units)
        wait_until(first.parts.outbox.listed.is_set)
        other.train(2, by=100.0)
        scene.aggregate(until=lambda: scene.head.units["b"].merged == 1)
        wait_until(lambda: bool(first.parts.engine._corrections))

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(first.unit._binding, "adopt_buffers", interrupted)
        with pytest.raises(KeyboardInterrupt), first.unit:
            first.train(1)
        assert first.unit.ending is not None and first.unit.ending.published == 0 and not first.unit.ending.saved
        other.abandon()


def test_leaving_by_sys_exit_publishes_and_saves() -> None:
    scene = Scene()
    trainer = scene.open("a")
    scene.aggregate(until=lambda: "a" in scene.head.units)
    wait_until(trainer.parts.outbox.listed.is_set)
    with pytest.raises(SystemExit), trainer.unit:
        trainer.train(1)
        sys.exit(0)
    assert trainer.unit.ending is not None
    assert (trainer.unit.ending.published, trainer.unit.ending.unsent, trainer.unit.ending.saved) == (1, 0, True)


def test_stop_ends_the_loop_from_anywhere() -> None:
    scene = Scene()
    with scene.join("a") as trainer:
        assert not trainer.unit.done
        threading.Thread(target=trainer.unit.stop).start()
        wait_until(lambda: trainer.unit.done)


@pytest.mark.parametrize("tokens", [0, -1, 3.5, "7", None, torch.tensor([1, 2]), torch.tensor(2.5)], ids=repr)
def test_tokens_that_are_no_count_are_refused_at_once(tokens: object) -> None:
    scene = Scene()
    with scene.join("a") as trainer, pytest.raises(UserError, match="tokens"):
        trainer.unit.step(tokens=tokens)  # type: ignore[arg-type]


def test_numbers_of_torch_and_numpy_are_taken_for_what_they_are() -> None:
    scene = Scene()
    with scene.join("a") as trainer:
        trainer.unit.step(tokens=torch.tensor(4), loss=torch.tensor(1.5))  # type: ignore[arg-type]
        trainer.unit.step(tokens=np.int64(5), loss=np.float32(2.5))  # type: ignore[arg-type]
        assert trainer.unit.tokens == 9
        assert trainer.unit.report()["loss"] == 2.0


def test_extra_must_be_a_function_that_returns_json() -> None:
    scene = Scene()
    for extra, match in (({"f": 1}, "function"), (lambda: {"x": float("nan")}, "JSON"), (lambda: object(), "JSON")):
        with pytest.raises(UserError, match=match):
            scene.open("a", extra=extra)


def test_parameters_that_get_new_storage_or_are_replaced_are_still_the_units() -> None:
    scene = Scene()
    with scene.join("a") as trainer:
        scene.aggregate(until=lambda: "a" in scene.head.units)
        wait_until(trainer.parts.outbox.listed.is_set)
        before = scene.value().params.clone()
        trainer.model.p0.data = trainer.model.p0.data.clone()  # type: ignore[union-attr, operator]
        trainer.model.load_state_dict({k: v.clone() for k, v in trainer.model.state_dict().items()}, assign=True)
        trainer.train(2)
        scene.sync(trainer)
        assert torch.equal(scene.value().params, before - 2.0)
        assert torch.equal(trainer.flat(), before - 2.0)


def test_what_the_last_version_merged_is_booked_as_merged_and_the_rest_as_lost() -> None:
    scene = Scene(target_tokens=20)
    with scene.join("a") as trainer:
        scene.aggregate(until=lambda: "a" in scene.head.units)
        wait_until(trainer.parts.outbox.listed.is_set)
        trainer.train(2)  # reaches the target
        scene.aggregate(until=lambda: scene.head.final)
        trainer.train(1)  # too late
        wait_until(lambda: trainer.unit.done)
        trainer.unit.close(drain_s=5.0)
        (state,) = trainer.parts.engine.states()
        assert state.account.merged == 26.0 and state.account.produced == 39.0 and state.account.discarded == 13.0
        assert state.account.lost_tokens == 10
        assert state.balance() == 0.0
