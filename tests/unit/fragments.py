"""A fragment of a unit without threads or bucket, for tests of :mod:`ps_diloco.unit.state`: local parameters, decisions, and a made-up global value."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch

from ps_diloco.fragment import FragmentValue
from ps_diloco.layout import LayoutEntry
from ps_diloco.records import Base
from ps_diloco.shard import decode_section
from ps_diloco.unit.state import Correction, FragmentState, Pending


def entry_of(elements: int) -> LayoutEntry:
    return LayoutEntry(name="w", shape=(elements,), dtype="float32", role="parameter", fragment=0, offset=0, aliases=(), embedding=False)


def value_of(params: torch.Tensor) -> FragmentValue:
    return FragmentValue(
        params=params.float().clone(), floats=torch.zeros(1), ints=torch.zeros(1, dtype=torch.int64), frozen=torch.empty(0)
    )


def base_of(version: int) -> Base:
    return Base(fragment_version=version, sha256=hashlib.sha256(str(version).encode()).hexdigest())


def payload_of(pending: Pending) -> torch.Tensor:
    """q: what the aggregator decodes."""
    return decode_section(pending.section)


@dataclass
class Lone:
    """One fragment, its local parameters, and an aggregator that does what it is told. ``merge`` applies a payload at full weight."""

    elements: int = 4
    codec: str = "none"
    decay: float = 1.0
    version: int = 0
    seq: int = 0
    outcomes: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.start = torch.linspace(1.0, 2.0, self.elements)
        self.theta = self.start.clone()
        self.world = self.start.clone()
        self.state = FragmentState.begin(
            0, (entry_of(self.elements),), value_of(self.world), base_of(0), codec=self.codec, decay=self.decay
        )

    def work(self, step: torch.Tensor | float) -> None:
        self.theta.add_(step)

    def cut(self, *, tokens: int = 10, steps: int = 1) -> Pending:
        return self.state.cut(value_of(self.theta), tokens=tokens, steps=steps, inner_steps=0, loss=None)

    def number(self, pending: Pending) -> int:
        pending.seq = self.seq
        self.seq += 1
        return pending.seq

    def publish(self, *, tokens: int = 10, steps: int = 1) -> Pending:
        """Cut and number."""
        pending = self.cut(tokens=tokens, steps=steps)
        self.number(pending)
        return pending

    def merge(self, pending: Pending) -> None:
        assert pending.seq is not None
        self.world.sub_(payload_of(pending))
        self.outcomes[pending.seq] = "merged"
        self.version += 1

    def refuse(self, pending: Pending, reason: str) -> None:
        assert pending.seq is not None
        self.outcomes[pending.seq] = reason

    def others(self, change: torch.Tensor | float) -> None:
        self.world.add_(change)
        self.version += 1

    def settle(self) -> Correction | None:
        return self.state.settle(self.outcomes.get, value_of(self.world), base_of(self.version))

    def adopt(self, correction: Correction | None, *, lost_tokens: int = 0) -> None:
        """What the training thread does."""
        if correction is None:
            return
        if correction.add_F is not None:
            self.theta.add_(correction.add_F)
            self.state.adopted()
            return
        before = value_of(self.theta)
        self.theta = correction.value.params.clone()
        self.state.adopted(before, lost_tokens)

    def sync(self) -> None:
        self.adopt(self.settle())
