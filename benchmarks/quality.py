"""Model quality under asynchrony: simulated time, real training, real merge.

Units of unequal speed train real models on real text. Cuts, codecs, merge, outer step and corrections are the project's own functions; only time, network
and bucket are simulated (a latency up and one down). With ``--baselines`` the same run prints one unit alone, and synchronous data-parallel training.

    python -m benchmarks.quality --tokens 1200000 --baselines
    python -m benchmarks.quality --set merge.round_tokens=20480 --set merge.merge_at_least=0     # negative control: every arrival counts as a whole round
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ps_diloco.binding import ModelBinding
from ps_diloco.config import RunSettings, parse_settings, set_dotted
from ps_diloco.fragment import FragmentValue
from ps_diloco.ids import ContributionId
from ps_diloco.layout import Layout, build_layout
from ps_diloco.merge import Candidate, FragmentMerge, Weighing, awaited_units, lag_of, weigh
from ps_diloco.outer import OuterState, outer_step
from ps_diloco.progress import join_ramp
from ps_diloco.records import Base, Round
from ps_diloco.shard import decode_section, encode_section
from ps_diloco.unit.state import FragmentState, Pending
from workers.data import Corpus, load_corpus
from workers.schedule import lr_at
from workers.settings import ProgramSettings
from workers.train import Trainer, train_alone


@dataclass
class Arrival:
    at_s: float
    unit: str
    pending: Pending


@dataclass
class GlobalFragment:
    """The aggregator's side of one fragment."""

    value: FragmentValue
    outer: OuterState
    version: int = 0
    masses: list[float] = field(default_factory=list)
    rounds: dict[str, Round] = field(default_factory=dict)
    weights: list[float] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)

    def candidate(self, arrival: Arrival) -> Candidate:
        pending = arrival.pending
        staleness = self.version - pending.base.fragment_version
        contribution = ContributionId(0, arrival.unit, 0, pending.seq or 0)
        return Candidate(
            id=contribution, tokens=pending.tokens, steps=pending.steps, staleness=staleness, lag=lag_of(staleness, self.masses)
        )


class SimulatedUnit:
    """A unit whose steps are real and whose time is not."""

    def __init__(
        self, name: str, seconds: float, trainer: Trainer, layout: Layout, start: list[FragmentValue], settings: RunSettings
    ) -> None:
        self.name, self.seconds, self.trainer = name, seconds, trainer
        self.binding = ModelBinding(trainer.model, layout)
        self.states = [
            FragmentState.begin(f, layout.of(f), value, base(0), codec=settings.push.codec, decay=settings.push.error_feedback_decay)
            for f, value in enumerate(start)
        ]
        every = settings.unit.sync_every
        self.every = every
        self.steps = 0
        self.cut_at = [0] * len(start)
        self.due_at = [max(1, round(every * (f + 1) / len(start))) for f in range(len(start))]
        self.seqs = itertools.count()
        self.merged: set[int] = set()

    def unmerged_tokens(self) -> float:
        fresh = [(self.steps - cut) * self.trainer.tokens_per_step for cut in self.cut_at]
        return sum(s.unmerged_tokens + tokens for s, tokens in zip(self.states, fresh, strict=True)) / len(self.states)

    def step(self, lr: float) -> list[Pending]:
        """One inner step, adoptions and cuts at its border; returns what was cut."""
        self.trainer.step(lr * join_ramp(self.steps + 1, self.every))
        self.steps += 1
        cuts = []
        for f, state in enumerate(self.states):
            if state.correcting is not None and state.correcting.add_F is not None:
                self.binding.add(f, state.correcting.add_F)
                state.adopted()
            if self.steps >= self.due_at[f] and len(state.undecided) < 2:
                steps = self.steps - self.cut_at[f]
                pending = state.cut(
                    self.binding.snapshot(f), tokens=steps * self.trainer.tokens_per_step, steps=steps, inner_steps=self.steps, loss=None
                )
                pending.seq = next(self.seqs)
                self.cut_at[f] = self.steps
                self.due_at[f] += self.every
                cuts.append(pending)
        return cuts


def base(version: int) -> Base:
    return Base(fragment_version=version, sha256="0" * 64)


@dataclass
class Result:
    loss: float
    steps: list[int]
    versions: int
    staleness: float
    mass: float


class Simulation:
    """Events in simulated time: a unit's step, an arrival, the end of a window, a version reaching the units."""

    def __init__(self, program: ProgramSettings, settings: RunSettings, corpus: Corpus, options: argparse.Namespace) -> None:
        self.program, self.settings, self.options = program, settings, options
        speeds = [float(text) for text in options.speeds.split(",")]
        trainers = [Trainer.build(program, seed=0, unit=f"u{i}", corpus=corpus) for i in range(len(speeds))]
        self.layout = build_layout(trainers[0].model, options.fragments)
        binding = ModelBinding(trainers[0].model, self.layout)
        start = [binding.snapshot(f) for f in range(options.fragments)]
        self.units = {
            f"u{i}": SimulatedUnit(f"u{i}", seconds, trainer, self.layout, start, settings)
            for i, (seconds, trainer) in enumerate(zip(speeds, trainers, strict=True))
        }
        self.world = [GlobalFragment(value.clone(), OuterState.zeros(value.params.numel())) for value in start]
        self.merged_tokens = 0.0
        self.staleness: list[int] = []
        self.events: list[tuple[float, int, Any]] = []
        self.order = itertools.count()

    def at(self, time_s: float, action: Any, *arguments: Any) -> None:
        heapq.heappush(self.events, (time_s, next(self.order), (action, arguments)))

    def run(self) -> Result:
        for unit in self.units.values():
            self.at(unit.seconds, self.train, unit)
        while self.merged_tokens < self.options.tokens:
            now_s, _, (action, arguments) = heapq.heappop(self.events)
            action(now_s, *arguments)
        first = next(iter(self.units.values()))
        for f, fragment in enumerate(self.world):
            first.binding.replace(f, fragment.value)
        masses = [mass for fragment in self.world for mass in fragment.masses]
        return Result(
            loss=first.trainer.held_out_loss(),
            steps=[unit.steps for unit in self.units.values()],
            versions=sum(fragment.version for fragment in self.world),
            staleness=sum(self.staleness) / len(self.staleness),
            mass=sum(masses) / len(masses),
        )

    def train(self, now_s: float, unit: SimulatedUnit) -> None:
        progress = min(1.0, (self.merged_tokens + unit.unmerged_tokens()) / self.options.tokens)
        for pending in unit.step(lr_at(progress, self.program.train)):
            self.at(now_s + self.options.latency, self.arrive, Arrival(now_s + self.options.latency, unit.name, pending))
        self.at(now_s + unit.seconds, self.train, unit)

    def arrive(self, now_s: float, arrival: Arrival) -> None:
        self.world[arrival.pending.fragment].arrivals.append(arrival)
        self.merge(now_s, arrival.pending.fragment)
        self.at(now_s + self.settings.merge.merge_wait_s_max, self.merge, arrival.pending.fragment)

    def merge(self, now_s: float, f: int) -> None:
        """The window of a fragment: closes by mass, or by time."""
        fragment, merge = self.world[f], self.settings.merge
        if not fragment.arrivals:
            return
        candidates = [fragment.candidate(arrival) for arrival in fragment.arrivals]
        awaited = awaited_units(candidates, self.units, fragment.rounds)
        weighing = weigh(
            candidates, fragment_version=fragment.version, rounds=fragment.rounds, weights=fragment.weights, settings=merge, awaited=awaited
        )
        oldest_s = min(arrival.at_s for arrival in fragment.arrivals)
        if weighing.mass >= merge.merge_at_least or now_s >= oldest_s + merge.merge_wait_s_max - 1e-9:
            self.outer_step(now_s, f, weighing)

    def outer_step(self, now_s: float, f: int, weighing: Weighing) -> None:
        fragment = self.world[f]
        arrivals = {(arrival.unit, arrival.pending.seq): arrival.pending for arrival in fragment.arrivals}
        merging = FragmentMerge(self.layout.fragments[f])
        for candidate, coefficient in zip(weighing.candidates, weighing.coefficients, strict=True):
            merging.add_params(coefficient, decode_section(arrivals[candidate.id.unit, candidate.id.seq].section))
            self.units[candidate.id.unit].merged.add(candidate.id.seq)
            self.merged_tokens += candidate.tokens / len(self.world)
            self.staleness.append(candidate.staleness)

        def quantise(x_F: torch.Tensor) -> torch.Tensor:
            decoded = torch.empty_like(x_F)
            encode_section("params", self.settings.pull.codec, x_F, decoded=decoded)
            return decoded

        outer_step(fragment.value.params, fragment.outer, merging.gradient, self.settings.outer, quantise)
        fragment.version += 1
        fragment.masses.append(weighing.mass)
        fragment.weights = [*fragment.weights, *weighing.weights][-32:]
        fragment.rounds.update({c.id.unit: Round(tokens=c.tokens, fragment_version=fragment.version) for c in weighing.candidates})
        fragment.arrivals.clear()
        for unit in self.units.values():
            known = frozenset(unit.merged)
            self.at(now_s + self.options.latency, self.adopt, unit, f, fragment.version, fragment.value.clone(), known)

    def adopt(self, now_s: float, unit: SimulatedUnit, f: int, version: int, value: FragmentValue, merged: frozenset[int]) -> None:
        state = unit.states[f]
        if state.correcting is not None:  # the last correction waits for the end of an inner step
            self.at(now_s + unit.seconds, self.adopt, unit, f, version, value, merged)
        elif version > state.held.fragment_version:
            state.settle(lambda seq: "merged" if seq in merged else None, value, base(version))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_200_000)
    parser.add_argument("--speeds", default="0.16,0.18,0.22,0.31", help="seconds per inner step of each unit")
    parser.add_argument("--fragments", type=int, default=2)
    parser.add_argument("--latency", type=float, default=0.7, help="seconds up, and seconds down")
    parser.add_argument("--set", action="append", default=[], help="a run setting, section.name=value")
    parser.add_argument("--program", action="append", default=[], help="a setting of the training program")
    parser.add_argument("--baselines", action="store_true")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    values: dict[str, Any] = {"unit": {"sync_every": 20}}
    program_values: dict[str, Any] = {"train": {"threads": 1}}
    for assignments, into in ((options.set, values), (options.program, program_values)):
        for assignment in assignments:
            set_dotted(into, assignment)
    settings = parse_settings(RunSettings, values, source="--set")
    program = parse_settings(ProgramSettings, program_values, source="--program")
    corpus = load_corpus(program.data, context=program.model.context)

    begun = time.monotonic()
    result = Simulation(program, settings, corpus, options).run()
    print(
        f"{' '.join(options.set + options.program) or 'defaults'}: loss {result.loss:.3f}, steps {result.steps}, {result.versions} fragment versions, "
        f"mean staleness {result.staleness:.2f}, mean mass {result.mass:.2f} ({time.monotonic() - begun:.0f} s)",
        flush=True,
    )
    if options.baselines:
        ramp = settings.unit.sync_every
        mean = round(sum(result.steps) / len(result.steps))
        for steps in (max(result.steps), mean):
            print(f"alone, {steps} steps: {train_alone(program, 0, steps, join_warmup_steps=ramp, corpus=corpus):.3f}", flush=True)
        train = program.train.model_copy(update={"batch_size": program.train.batch_size * len(result.steps)})
        loss = train_alone(program.model_copy(update={"train": train}), 0, mean, join_warmup_steps=ramp, corpus=corpus)
        print(f"synchronous data-parallel, {mean} steps of {len(result.steps)}x the batch: {loss:.3f}", flush=True)


if __name__ == "__main__":
    main()
