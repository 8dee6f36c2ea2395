"""A run in memory with a hand-driven aggregator, a clock that runs fast, and units whose background threads are real.

::

    scene = Scene(fragments=3, sync_every=2)
    with scene.join("a") as trainer:
        trainer.train(2)                # two inner steps; each moves every parameter by -1
        scene.aggregate(until=lambda: ...)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from aggregator.outer_step import Aggregator, Outcome
from ps_diloco import keys
from ps_diloco.checkpoint import read_fragment
from ps_diloco.config import CreateSettings, MergeSettings, OuterSettings, PullSettings, PushSettings, RunSettings, UnitSettings
from ps_diloco.env import Env, SystemClock, SystemEntropy
from ps_diloco.errors import NotFound
from ps_diloco.fragment import FragmentValue
from ps_diloco.ids import ContributionId
from ps_diloco.records import Contribution, Manifest, decode
from ps_diloco.run import OpenRun, create_run
from ps_diloco.store import MemoryStore
from ps_diloco.store.base import Store
from ps_diloco.unit.join import join
from ps_diloco.unit.unit import Unit

WAIT_S = 30.0


class FastClock(SystemClock):
    """Runs ``speed`` times as fast as the world, waits included."""

    def __init__(self, speed: float = 100.0) -> None:
        self._speed = speed

    def monotonic(self) -> float:
        return super().monotonic() * self._speed

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds / self._speed)

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        return event.wait(timeout_s / self._speed)


def fast_env() -> Env:
    return Env(clock=FastClock(), entropy=SystemEntropy())


def wait_until(holds: Callable[[], bool], what: str = "") -> None:
    """Poll until ``holds``; fail after a generous while."""
    until_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < until_s, f"waited in vain: {what}"
        time.sleep(0.002)


def plain_settings(
    *,
    sync_every: int = 2,
    codec: str = "none",
    decay: float = 1.0,
    warmup: int | None = 0,
    state_every_cuts: int = 0,
    pull_codec: str = "none",
    lr: float = 1.0,
    momentum: float = 0.0,
    **more: Any,
) -> RunSettings:
    """No outer momentum, outer learning rate 1, nothing quantised: the global value moves by the mean of what is merged."""
    return RunSettings(
        outer=OuterSettings(lr=lr, momentum=momentum),
        merge=MergeSettings(staleness_power=0.0),
        push=PushSettings.model_validate({"codec": codec, "error_feedback_decay": decay}),
        pull=PullSettings.model_validate({"codec": pull_codec, "anchor_every": 4}),
        unit=UnitSettings(sync_every=sync_every, join_warmup_steps=warmup, state_every_cuts=state_every_cuts),
        **more,
    )


def three_layers() -> nn.Module:
    """Three tensors of 6, 4 and 3 elements."""
    model = nn.Module()
    for index, size in enumerate((6, 4, 3)):
        model.register_parameter(f"p{index}", nn.Parameter(torch.arange(float(size))))
    return model


class Scene:
    """``model`` makes the run's model; every unit gets a fresh one, ones in place of its values."""

    def __init__(
        self, *, fragments: int = 1, model: Callable[[], nn.Module] = three_layers, store: Store | None = None, **settings: Any
    ) -> None:
        torch.set_num_threads(1)
        self.store = store or MemoryStore()
        self.model = model
        self.run: OpenRun = create_run(
            self.store, fast_env(), model(), create=CreateSettings(num_fragments=fragments), settings=plain_settings(**settings)
        )
        self.aggregator = Aggregator(self.run)

    def pass_once(self) -> Outcome:
        """One pass of the aggregator: all that is published is merged."""
        return self.aggregator.take_pass(force="once")

    def aggregate(self, *, until: Callable[[], bool], what: str = "") -> None:
        """Passes until ``until`` holds."""

        def done() -> bool:
            self.pass_once()
            return until()

        wait_until(done, what)

    def sync(self, *trainers: Trainer) -> None:
        """Everything that was cut is merged, read and adopted."""
        self.aggregate(until=lambda: all(trainer.settled(self.head.version) for trainer in trainers))

    @property
    def head(self) -> Manifest:
        return self.run.log.find_head().record

    def value(self, fragment: int = 0) -> FragmentValue:
        """The newest global value."""
        return read_fragment(self.run, self.head.fragments[fragment], fragment)

    def record(self, unit: str, seq: int, incarnation: int = 0) -> Contribution | None:
        key = keys.record(ContributionId(0, unit, incarnation, seq))
        try:
            return decode(Contribution, self.store.get(key), key=key)
        except NotFound:
            return None

    def records(self, unit: str, incarnation: int = 0) -> list[Contribution]:
        """All records of an incarnation. Fails if there is a gap before one of them."""
        listed = [keys.parse_record(info.key) for info in self.store.list(f"units/{unit}/t000000/{incarnation:06d}/")]
        seqs = sorted(contribution.seq for contribution in listed if contribution is not None)
        assert seqs == list(range(len(seqs)))
        found = [self.record(unit, seq, incarnation) for seq in seqs]
        return [record for record in found if record is not None]

    def open(self, name: str = "a", *, model: nn.Module | None = None, store: Store | None = None, **options: Any) -> Trainer:
        """Join; the caller closes."""
        model = self.model() if model is None else model
        options.setdefault("env", fast_env())
        options.setdefault("poll_s", 0.5)
        options.setdefault("heartbeat_s", 2.0)
        return Trainer(join("memory://none", model, unit=name, store=store or self.store, **options), model)

    @contextmanager
    def join(self, name: str = "a", **options: Any) -> Iterator[Trainer]:
        trainer = self.open(name, **options)
        try:
            yield trainer
        finally:
            trainer.unit.close(drain_s=5.0)


class Trainer:
    """A unit and its model. An inner step adds -1 to every trainable parameter."""

    def __init__(self, unit: Unit, model: nn.Module) -> None:
        self.unit = unit
        self.model = model

    def train(self, steps: int = 1, *, tokens: int = 10, by: float = -1.0) -> None:
        for _ in range(steps):
            with torch.no_grad():
                for parameter in self.model.parameters():
                    if parameter.requires_grad:
                        parameter.add_(by)
            self.unit.step(tokens=tokens, loss=1.0)

    def idle_until(self, holds: Callable[[], bool], what: str = "") -> None:
        """Inner steps without work until ``holds``."""

        def stepped() -> bool:
            self.unit.step(tokens=1)
            return holds()

        wait_until(stepped, what)

    def adopt(self) -> None:
        """Apply corrections that are ready, without a step. Between two inner steps, as ``close`` does it."""
        self.unit._adopt()

    def settled(self, version: int) -> bool:
        """Adopt what is ready; whether a version is read and adopted and nothing is undecided. No step."""
        self.adopt()
        engine = self.parts.engine
        adopted = all(state.held == engine.newest.base(state.fragment) and state.correcting is None for state in engine.states())
        return self.unit.version >= version and engine.undecided() == 0 and adopted

    def settle(self, version: int) -> None:
        """Wait until :meth:`settled`."""
        wait_until(lambda: self.settled(version), f"version {version} and nothing undecided")

    def abandon(self) -> None:
        """Let the unit end without publishing or saving anything more."""
        self.parts.errors.append(RuntimeError("abandoned"))
        self.unit._told = True

    @property
    def parts(self) -> Any:
        return self.unit._parts

    def flat(self) -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])
