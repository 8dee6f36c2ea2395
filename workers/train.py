"""The ready training program: one unit of a run, or the same training alone.

::

    train("s3://bucket/run", "us-east-1a", stop=threading.Event())
    loss = train_alone(ProgramSettings(), seed=0, steps=500)

What to train comes from the run itself (``program`` in ``run.json``), so every unit builds the same model. The exchange happens in
:func:`ps_diloco.join`; to use it in a trainer of your own, imitate :func:`train`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import torch
from torch import nn

import ps_diloco
from ps_diloco.config import parse_settings
from ps_diloco.env import Env
from ps_diloco.errors import ConfigError, UserError
from ps_diloco.progress import join_ramp
from ps_diloco.run import open_run
from ps_diloco.store import Store, open_store
from ps_diloco.unit.leave import Ending
from workers.data import Corpus, Stream, load_corpus
from workers.evaluate import held_out_loss
from workers.model import build_model
from workers.schedule import lr_at
from workers.settings import ProgramSettings, TrainSettings


class ExitReason(IntEnum):
    """Why :func:`train` returned. All are good ends; errors are raised."""

    RUN_ENDED = 0
    STOPPED = 1
    STEPS_DONE = 2


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a unit ended, and what it left behind."""

    reason: ExitReason
    ending: Ending


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one inner step did. ``loss`` is the batch's mean in nats per byte, before the step; ``progress`` is the run's, in [0, 1], None without a target."""

    step: int
    tokens: int
    loss: float
    lr: float
    progress: float | None
    version: int = 0
    """The newest global version that was read."""
    blocked_s: float = 0.0
    """Seconds, since the start, for which synchronisation kept the unit from training."""


def train(
    run_url: str,
    unit_name: str,
    *,
    stop: threading.Event,
    store: Store | None = None,
    env: Env | None = None,
    region: str | None = None,
    take_over: bool = False,
    device: str | None = None,
    threads: int | None = None,
    step_delay_s: float = 0.0,
    steps_max: int | None = None,
    poll_s: float = 1.0,
    heartbeat_s: float = 5.0,
    on_report: Callable[[StepReport], None] | None = None,
) -> Ended:
    """Train as unit ``unit_name`` until the run ends, ``stop`` is set, or ``steps_max`` inner steps of this process are done.

    ``device`` and ``threads`` go before what the run says.
    ``step_delay_s`` is added to each step (for demonstrations of unequal units); ``on_report`` is called after each step in this thread.
    Raises :class:`UserError`, :class:`StoreError` (only while joining), :class:`Fenced` when a newer incarnation of the unit runs.
    """
    env = env or Env.system()
    store = store or open_store(run_url)
    run = open_run(store, env)
    program = program_of(run.record.program, source=f"program in run.json of {store.url}")
    here = {name: value for name, value in {"device": device, "threads": threads}.items() if value is not None}
    program = parse_settings(ProgramSettings, {**program.model_dump(), "train": program.train.model_dump() | here}, source="options")
    trainer = Trainer.build(program, seed=run.record.seed, unit=unit_name)

    with ps_diloco.join(
        run_url,
        trainer.model,
        trainer.optimizer,
        unit=unit_name,
        extra=lambda: {"data": trainer.stream.cursor},
        take_over=take_over,
        region=region,
        store=store,
        env=env,
        poll_s=poll_s,
        heartbeat_s=heartbeat_s,
    ) as unit:
        if unit.restored is not None:
            trainer.stream.resume(unit.restored.get("data"))
        step = 0
        while not unit.done and not stop.is_set() and step != steps_max:
            progress = unit.progress
            lr = lr_at(progress, program.train) * unit.lr_scale
            loss = trainer.step(lr)
            unit.step(tokens=trainer.tokens_per_step, loss=loss)
            step += 1
            if on_report is not None:
                report = StepReport(step=step, tokens=trainer.tokens_per_step, loss=loss, lr=lr, progress=progress)
                on_report(replace(report, version=unit.version, blocked_s=unit.blocked_s))
            if step_delay_s:
                env.clock.wait(stop, step_delay_s)
        reason = ExitReason.RUN_ENDED if unit.done else ExitReason.STOPPED if stop.is_set() else ExitReason.STEPS_DONE
    return Ended(reason=reason, ending=unit.close())


def train_alone(
    program: ProgramSettings,
    seed: int,
    steps: int,
    *,
    unit: str = "alone",
    join_warmup_steps: int = 30,
    corpus: Corpus | None = None,
    on_report: Callable[[StepReport], None] | None = None,
) -> float:
    """The baseline: what one unit reaches in ``steps`` inner steps without anybody else. Returns the held-out loss in nats per byte.

    No bucket; same start, data order, inner steps and join ramp as a unit of that name.
    """
    trainer = Trainer.build(program, seed=seed, unit=unit, corpus=corpus)
    for step in range(1, steps + 1):
        progress = (step - 1) / steps
        lr = lr_at(progress, program.train) * join_ramp(step, join_warmup_steps)
        loss = trainer.step(lr)
        if on_report is not None:
            on_report(StepReport(step=step, tokens=trainer.tokens_per_step, loss=loss, lr=lr, progress=progress))
    return trainer.held_out_loss()


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """What an inner step needs: model, optimizer and data of one unit, on one device. For one thread."""

    program: ProgramSettings
    model: nn.Module
    optimizer: torch.optim.Optimizer
    corpus: Corpus
    stream: Stream
    device: torch.device

    @staticmethod
    def build(program: ProgramSettings, *, seed: int, unit: str, corpus: Corpus | None = None) -> Trainer:
        """Read the corpus (unless given) and build the model. Does I/O; sets the process's CPU threads if the settings name them."""
        if program.train.threads is not None:
            torch.set_num_threads(program.train.threads)
        device = choose_device(program.train.device)
        context = program.model.context
        corpus = corpus or load_corpus(program.data, context=context)
        model = build_model(program.model, seed).to(device)
        stream = Stream(corpus, run_seed=seed, unit=unit, context=context, batch_size=program.train.batch_size)
        optimizer = build_optimizer(model, program.train)
        return Trainer(program=program, model=model, optimizer=optimizer, corpus=corpus, stream=stream, device=device)

    @property
    def tokens_per_step(self) -> int:
        return self.program.train.batch_size * self.program.model.context

    def step(self, lr: float) -> float:
        """One inner step; returns the batch's loss before it. Raises :class:`UserError`, parameters untouched, on a gradient not finite."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        tokens_BT, targets_BT = self.stream.next_batch()
        loss = self.model(tokens_BT.to(self.device), targets_BT.to(self.device))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.program.train.grad_clip)
        if not torch.isfinite(norm):
            raise UserError(
                "the gradient is not finite",
                loss=float(loss.detach()),
                lr=lr,
                remedy="lower train.lr or train.grad_clip of the run's program",
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def held_out_loss(self) -> float:
        """Mean nats per byte on the run's fixed held-out windows."""
        train, context = self.program.train, self.program.model.context
        return held_out_loss(self.model, self.corpus, batches=train.eval_batches, batch_size=train.batch_size, context=context)


def program_of(values: dict[str, Any], *, source: str) -> ProgramSettings:
    """The settings in ``run.json``; raises :class:`ConfigError` if the run belongs to another program."""
    if not values:
        raise ConfigError(
            "this run was made for another training program", source=source, remedy="join it from that program with ps_diloco.join"
        )
    return parse_settings(ProgramSettings, values, source=source)


def build_optimizer(model: nn.Module, settings: TrainSettings) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas)


def choose_device(name: str) -> torch.device:
    """``auto`` is CUDA where there is one, else the CPU. Raises :class:`ConfigError` for a device that this machine lacks."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    count = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available()), "cpu": 1}[device.type]
    if (device.index or 0) >= count:
        raise ConfigError("this machine does not have the device", device=name, found=count, remedy="set train.device to auto or cpu")
    return device
