"""What benchmarks work on: models of given sizes, real pseudo-gradients, runs with contributions in them.

::

    delta_F = pseudo_gradient(25_000_000)
    run = new_run(LocalStore(directory), Slab(25_000_000))
    announce(run, units)
    publish(run, "u00", 0, encoded(run, 0, delta_F))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn

from aggregator.outer_step import Aggregator
from ps_diloco import CreateSettings, RunSettings, create_run, keys
from ps_diloco.binding import ModelBinding
from ps_diloco.checkpoint import buffer_sections
from ps_diloco.config import parse_settings
from ps_diloco.env import Env
from ps_diloco.ids import ContributionId
from ps_diloco.layout import build_layout
from ps_diloco.merge import sum_squares
from ps_diloco.records import Base, Contribution, Incarnation, Manifest, ShardRef, encode
from ps_diloco.run import OpenRun
from ps_diloco.shard import Section, encode_section, encode_shard
from ps_diloco.store import Store
from ps_diloco.store.refs import put_data
from workers.settings import ModelSettings, ProgramSettings, TrainSettings
from workers.train import Trainer

GPT_SIZES = {
    "tiny": ModelSettings(width=16, heads=2, layers=1, context=16),
    "0.8M": ModelSettings(),
    "5.6M": ModelSettings(width=256, heads=8, layers=7),
    "25M": ModelSettings(width=512, heads=8, layers=8),
}
TENSORS = 64
"""Of a :class:`Slab`: about as many as a model of that size would have in a fragment."""


def program(size: str, *, batch_size: int = 8, threads: int | None = 1) -> ProgramSettings:
    """The training program with a GPT of ``GPT_SIZES``."""
    return ProgramSettings(model=GPT_SIZES[size], train=TrainSettings(batch_size=batch_size, threads=threads, device="cpu"))


class Slab(nn.Module):
    """``elements`` parameters in ``TENSORS`` tensors, for benchmarks that never train."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for index in range(min(TENSORS, elements)):
            size = elements // TENSORS + (index < elements % TENSORS)
            self.register_parameter(f"p{index:03d}", nn.Parameter(torch.empty(size).normal_(std=0.02, generator=generator)))


@lru_cache(maxsize=1)
def _trained(size: str, steps: int) -> torch.Tensor:
    """Displacement of a GPT after ``steps`` inner steps of real training, one flat vector in layout order."""
    trainer = Trainer.build(program(size), seed=0, unit="benchmark")
    binding = ModelBinding(trainer.model, build_layout(trainer.model))
    before = binding.snapshot(0).params
    for step in range(steps):
        trainer.step(2e-3 * min(1.0, (step + 1) / 10))
    return before.sub_(binding.snapshot(0).params)


def pseudo_gradient(elements: int, *, size: str = "0.8M", steps: int = 40) -> torch.Tensor:
    """Values as a unit sends them, [F] float32: a real displacement repeated up to ``elements``.

    Every repetition gets random signs and a random magnitude within a factor of four, so that blocks keep their distribution and zstd finds no repetition.
    """
    threads = torch.get_num_threads()
    tile = _trained(size, steps)
    torch.set_num_threads(threads)
    values = torch.empty(elements)
    generator = torch.Generator().manual_seed(0)
    for start in range(0, elements, tile.numel()):
        part = values[start : start + tile.numel()]
        signs = torch.randint(0, 2, part.shape, generator=generator, dtype=torch.int8).mul_(2).sub_(1)
        torch.mul(tile[: part.numel()], signs, out=part)
        part.mul_(math.exp(float(torch.rand((), generator=generator)) * math.log(4) - math.log(2)))
    return values


def new_run(
    store: Store, model: nn.Module, *, fragments: int = 1, env: Env | None = None, staleness_limit: int = 64, **settings: object
) -> OpenRun:
    """A run whose version 0 is ``model``. ``settings`` are sections of :class:`RunSettings`."""
    return create_run(
        store,
        env or Env.system(),
        model,
        create=CreateSettings(num_fragments=fragments, staleness_limit=staleness_limit),
        settings=parse_settings(RunSettings, settings, source="benchmark"),
    )


def announce(run: OpenRun, units: Sequence[str]) -> Manifest:
    """Claim incarnation 0 of ``units`` and list them; return the head."""
    for unit in units:
        record = Incarnation(
            run_id=run.run_id,
            unit=unit,
            incarnation=0,
            attempt=run.env.entropy.attempt_id(),
            region="home",
            software="benchmark",
            created_at="",
            restored=None,
        )
        run.store.put(keys.incarnation(unit, 0), encode(record))
    return Aggregator(run).take_pass(force="once").head.record


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A cut of one fragment as the unit's codec encodes it; the same one may be published by several units."""

    fragment: int
    section: Section
    sum_squares: tuple[float, ...]


def encoded(run: OpenRun, fragment: int, delta_F: torch.Tensor, *, codec: str = "int4") -> Encoded:
    decoded = torch.empty_like(delta_F)
    section = encode_section("params", codec, delta_F, decoded=decoded)
    return Encoded(fragment=fragment, section=section, sum_squares=sum_squares(decoded, run.layout.of(fragment)))


def publish(run: OpenRun, unit: str, seq: int, cut: Encoded, base: Base, *, tokens: int = 51_200, steps: int = 50) -> Contribution:
    """Write a contribution as a unit does: shard, then record."""
    record = put_shard(run, unit, seq, cut, base, tokens=tokens, steps=steps)
    run.store.put(keys.record(record.id), encode(record))
    return record


def put_shard(run: OpenRun, unit: str, seq: int, cut: Encoded, base: Base, *, tokens: int = 51_200, steps: int = 50) -> Contribution:
    """Write the shard of a contribution; return the record that names it, which is not written."""
    contribution = ContributionId(0, unit, 0, seq)
    size = run.layout.fragments[cut.fragment]
    buffers = buffer_sections(torch.zeros(size.floats), torch.zeros(size.ints, dtype=torch.int64))
    data = encode_shard([cut.section, *buffers], kind="contribution", run_id=run.run_id, of=str(contribution), fragment=cut.fragment)
    attempt = run.env.entropy.attempt_id()
    ref = put_data(run.store, run.env, keys.shard(contribution, attempt), data)
    return Contribution(
        run_id=run.run_id,
        timeline=0,
        unit=unit,
        incarnation=0,
        seq=seq,
        attempt=attempt,
        layout_hash=run.record.layout_hash,
        fragment=cut.fragment,
        base=base,
        tokens=tokens,
        steps=steps,
        inner_steps=steps * (seq + 1),
        codec=cut.section.codec,
        shards=(ShardRef(ref=ref),),
        sum_squares=cut.sum_squares,
        loss=None,
        resent=False,
        created_at="",
    )


def base_of(manifest: Manifest, fragment: int) -> Base:
    entry = manifest.fragments[fragment]
    return Base(fragment_version=entry.fragment_version, sha256=entry.sha256)


def unit_names(count: int) -> list[str]:
    return [f"u{index:02d}" for index in range(count)]
