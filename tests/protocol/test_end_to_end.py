"""Units and an aggregator as a user runs them, in threads of one process: training works, nobody waits, everybody ends on the same model."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ps_diloco
from aggregator import outer_step
from aggregator.serve import serve
from ps_diloco.binding import ModelBinding
from ps_diloco.env import Env
from ps_diloco.progress import fragment_share
from ps_diloco.records import Manifest
from ps_diloco.run import OpenRun, open_run
from ps_diloco.store import open_store
from tests.aggregator.bench import merged_in, values, walk

TOKENS = 16
SYNC_EVERY = 10
WEIGHTS = torch.randn(8, 1, generator=torch.Generator().manual_seed(5))
_numbers = itertools.count()


def error_of(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    error: torch.Tensor = ((model(inputs) - inputs @ WEIGHTS) ** 2).mean()
    return error


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """New units are noticed, and hints written, sooner than anybody would need it."""
    monkeypatch.setattr(outer_step, "DISCOVER_EVERY_S", 0.1)
    monkeypatch.setattr(outer_step, "HINT_EVERY_S", 0.02)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def create(url: str, fragments: int, **settings: Any) -> OpenRun:
    parsed = ps_diloco.RunSettings.model_validate({"unit": {"sync_every": SYNC_EVERY}, "pull": {"anchor_every": 3}, **settings})
    create = ps_diloco.CreateSettings(num_fragments=fragments)
    return ps_diloco.create_run(open_store(url), Env.system(), build(), create=create, settings=parsed)


@dataclass
class Trainer:
    """A unit's training program, in a thread of its own. ``may_step`` holds it up from outside."""

    url: str
    name: str
    seed: int
    may_step: Callable[[Trainer], bool] = lambda trainer: True
    model: nn.Module = field(default_factory=build)
    losses: list[float] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)
    error: BaseException | None = None

    def start(self) -> Trainer:
        self.thread = threading.Thread(target=self._guarded, daemon=True)
        self.thread.start()
        return self

    def finish(self) -> None:
        self.thread.join(60.0)
        assert not self.thread.is_alive(), f"{self.name} does not end: {self.report}"
        if self.error is not None:
            raise self.error

    def _guarded(self) -> None:
        try:
            self._train()
        except BaseException as error:  # raised again by finish
            self.error = error

    def _train(self) -> None:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(self.seed)
        with ps_diloco.join(self.url, self.model, optimizer, unit=self.name, poll_s=0.01, heartbeat_s=0.5) as unit:
            while not unit.done:
                if not self.may_step(self):
                    time.sleep(0.001)
                    continue
                inputs = torch.randn(TOKENS, 8, generator=generator)
                loss = error_of(self.model, inputs)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                self.losses.append(loss.item())
                unit.step(tokens=TOKENS, loss=self.losses[-1])
                time.sleep(0.0005)  # lets the other threads of this process in
            self.report = unit.report()


@contextmanager
def aggregating(url: str) -> Iterator[threading.Thread]:
    """An aggregator in a thread, until the block or the run ends."""
    stop = threading.Event()
    run = open_run(open_store(url), Env.system())
    thread = threading.Thread(target=serve, args=(run,), kwargs={"stop": stop, "poll_s": 0.01}, daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        stop.set()
        thread.join(60.0)
        assert not thread.is_alive()


def eventually(condition: Callable[[], bool], trainers: list[Trainer]) -> None:
    for _ in range(12_000):
        if condition():
            return
        for trainer in trainers:
            if trainer.error is not None:
                raise trainer.error
        time.sleep(0.005)
    raise AssertionError("it never came true")


def check_end(run: OpenRun, trainers: list[Trainer]) -> list[Manifest]:
    """What holds at the end of every run, however it went."""
    history = walk(run)
    last = history[-1]
    assert last.final
    binding = [ModelBinding(trainer.model, run.layout) for trainer in trainers]
    for fragment, value in enumerate(values(run, last)):
        for bound in binding:  # bit for bit the last version, buffers included
            assert bound.snapshot(fragment).sha256() == value.sha256() == last.fragments[fragment].sha256
    merged = [(step.fragment, m.tokens) for manifest in history for step in manifest.steps for m in step.merged]
    assert last.tokens == pytest.approx(sum(fragment_share(run.layout, fragment) * tokens for fragment, tokens in merged))
    assert sum(entry.tokens for entry in last.units.values()) == sum(tokens for _, tokens in merged)
    for trainer in trainers:
        entry = last.units[trainer.name]
        assert entry.refused == entry.lost == 0
        assert 0 < entry.tokens <= len(last.fragments) * TOKENS * len(trainer.losses)
        assert trainer.report["tokens"] == TOKENS * len(trainer.losses)
        assert trainer.report["unbalanced"] < 1e-3  # I10
    return history


@torch.no_grad()
def check_learned(trainers: list[Trainer]) -> None:
    """The final model is far better than version 0 on data that no unit has seen."""
    inputs = torch.randn(1000, 8, generator=torch.Generator().manual_seed(99))
    begun, ended = (error_of(model.eval(), inputs).item() for model in (build(), trainers[0].model))
    assert ended < 0.4 * begun


@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("kind", ["memory", "local"])
def test_three_units_learn_and_end_on_the_same_model(kind: str, fragments: int, tmp_path: Path) -> None:
    url = f"memory://end-to-end-{next(_numbers)}" if kind == "memory" else str(tmp_path / "run")
    run = create(url, fragments, target_tokens=3 * 30 * SYNC_EVERY * TOKENS)
    with aggregating(url):
        trainers = [Trainer(url, f"unit-{number}", number).start() for number in range(3)]
        for trainer in trainers:
            trainer.finish()
    history = check_end(run, trainers)
    check_learned(trainers)
    assert len(merged_in(history)) >= 3 * fragments
    assert {unit for manifest in history for unit in manifest.units} == {"unit-0", "unit-1", "unit-2"}


def test_nobody_waits_for_a_unit_that_is_four_times_slower_and_its_work_still_counts() -> None:
    url = f"memory://end-to-end-{next(_numbers)}"
    run = create(url, 1, target_tokens=120 * SYNC_EVERY * TOKENS, merge={"merge_at_least": 0.3})
    begun: list[bool] = []

    def all_listed(_: Trainer) -> bool:
        if not begun and len(run.log.find_head().record.units) == 3:
            begun.append(True)
        return bool(begun)

    fast = [Trainer(url, f"fast-{number}", number, all_listed) for number in range(2)]
    slow = Trainer(url, "slow", 2, lambda mine: 4 * len(mine.losses) < min(len(trainer.losses) for trainer in fast))
    with aggregating(url):
        trainers = [trainer.start() for trainer in (*fast, slow)]
        for trainer in trainers:
            trainer.finish()
    history = check_end(run, trainers)
    steps = [step for manifest in history for step in manifest.steps]
    late = [m for step in steps for m in step.merged if "/slow/" in m.contribution]
    assert late and max(m.staleness for m in late) >= 1
    alone = [step for step in steps if not any("/slow/" in m.contribution for m in step.merged)]
    assert len(alone) > len(steps) / 2
    assert all(step.closed != "waited" for step in alone)


def test_training_goes_on_while_there_is_no_aggregator_and_the_next_one_catches_up() -> None:
    url = f"memory://end-to-end-{next(_numbers)}"
    run = create(url, 3, target_tokens=90 * SYNC_EVERY * TOKENS)
    trainers = [Trainer(url, f"unit-{number}", number) for number in range(3)]
    with aggregating(url):
        for trainer in trainers:
            trainer.start()
        eventually(lambda: run.log.find_head().record.tokens > 10 * SYNC_EVERY * TOKENS, trainers)
    before = run.log.find_head().record
    assert not before.final
    trained = [len(trainer.losses) for trainer in trainers]
    eventually(lambda: all(len(t.losses) > done + 6 * SYNC_EVERY for t, done in zip(trainers, trained, strict=True)), trainers)
    assert run.log.find_head().record.version == before.version
    with aggregating(url):
        for trainer in trainers:
            trainer.finish()
    history = check_end(run, trainers)
    assert history[-1].version > before.version
    # with two cuts of a fragment waiting the span grows, and nothing of it is lost
    assert max(m.tokens for manifest in history for step in manifest.steps for m in step.merged) >= 3 * SYNC_EVERY * TOKENS
    check_learned(trainers)
