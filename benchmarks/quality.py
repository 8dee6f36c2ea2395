"""Model quality under asynchrony: simulated time, real training, real merge.

Units of unequal speed train real models on real text; cuts, merge, outer step, staleness and corrections are the project's own pure functions; only time,
network and bucket are simulated (a latency up and down). Printed beside it, in the same run: one unit alone, and synchronous data-parallel training of
the same number of units for the same number of tokens.

    python benchmarks/quality.py --tokens 1200000 --set outer.momentum=0.9
"""

from __future__ import annotations

import argparse
import heapq
import time
from dataclasses import dataclass, field

import torch

from ps_diloco.binding import ModelBinding
from ps_diloco.config import RunSettings, parse_settings, set_dotted
from ps_diloco.fragment import FragmentValue
from ps_diloco.ids import ContributionId
from ps_diloco.layout import build_layout
from ps_diloco.merge import Candidate, FragmentMerge, lag_of, weigh
from ps_diloco.outer import OuterState, outer_step
from ps_diloco.progress import join_ramp
from ps_diloco.records import Base, Round
from ps_diloco.shard import decode_section, encode_section
from ps_diloco.unit.state import FragmentState, Pending
from workers.data import load_corpus
from workers.schedule import lr_at
from workers.settings import ProgramSettings
from workers.train import Trainer, train_alone


def base(version: int) -> Base:
    return Base(fragment_version=version, sha256="0" * 64)


@dataclass
class Global:
    """One fragment's global side."""

    value: FragmentValue
    outer: OuterState
    version: int = 0
    masses: list[float] = field(default_factory=list)
    rounds: dict[str, Round] = field(default_factory=dict)
    weights: list[float] = field(default_factory=list)
    pending: list[tuple[float, str, Pending]] = field(default_factory=list)
    history: dict[int, FragmentValue] = field(default_factory=dict)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=1_200_000)
    parser.add_argument("--speeds", default="0.16,0.18,0.22,0.31", help="seconds per inner step of each unit")
    parser.add_argument("--fragments", type=int, default=2)
    parser.add_argument("--latency", type=float, default=0.7, help="seconds up, and seconds down")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--program", action="append", default=[])
    parser.add_argument("--baselines", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    values: dict = {"unit": {"sync_every": 20}}
    for item in arguments.set:
        set_dotted(values, item)
    settings = parse_settings(RunSettings, values, source="--set")
    program_values: dict = {"train": {"threads": 1}}
    for item in arguments.program:
        set_dotted(program_values, item)
    program = parse_settings(ProgramSettings, program_values, source="--program")
    corpus = load_corpus(program.data, context=program.model.context)
    speeds = [float(s) for s in arguments.speeds.split(",")]
    begun = time.time()
    loss, steps, staleness, mean_mass, versions = simulate(program, settings, corpus, speeds, arguments)
    print(
        f"{' '.join(arguments.set + arguments.program) or 'defaults'}: loss {loss:.3f}  steps {steps}  versions {versions}  "
        f"mean staleness {staleness:.2f}  mean mass {mean_mass:.2f}  ({time.time() - begun:.0f} s)",
        flush=True,
    )
    if arguments.baselines:
        for count in (max(steps), round(sum(steps) / len(steps))):
            print(
                f"alone, {count} steps: {train_alone(program, 0, count, join_warmup_steps=settings.unit.sync_every, corpus=corpus):.3f}",
                flush=True,
            )
        wide = program.model_copy(update={"train": program.train.model_copy(update={"batch_size": program.train.batch_size * len(speeds)})})
        count = round(sum(steps) / len(steps))
        loss = train_alone(wide, 0, count, join_warmup_steps=settings.unit.sync_every, corpus=corpus)
        print(f"synchronous data-parallel, {count} steps of {len(speeds)}x the batch: {loss:.3f}", flush=True)


def simulate(program, settings, corpus, speeds, arguments):
    trainers = [Trainer.build(program, seed=0, unit=f"u{i}", corpus=corpus) for i in range(len(speeds))]
    layout = build_layout(trainers[0].model, arguments.fragments)
    bindings = [ModelBinding(t.model, layout) for t in trainers]
    fragments = range(arguments.fragments)
    start = [bindings[0].snapshot(f) for f in fragments]
    world = [Global(value=start[f].clone(), outer=OuterState.zeros(layout.fragments[f].elements)) for f in fragments]
    states = [
        [
            FragmentState.begin(f, layout.of(f), start[f], base(0), codec=settings.push.codec, decay=settings.push.error_feedback_decay)
            for f in fragments
        ]
        for _ in speeds
    ]
    outcomes: list[dict[int, str]] = [{} for _ in speeds]
    seqs = [0] * len(speeds)
    steps = [0] * len(speeds)
    tokens_per_step = trainers[0].tokens_per_step
    due = [[max(1, round(settings.unit.sync_every * (f + 1) / len(fragments))) for f in fragments] for _ in speeds]
    last_cut = [[0] * len(fragments) for _ in speeds]
    merged_tokens = 0.0
    stale: list[int] = []
    masses: list[float] = []
    events: list[tuple[float, int, str, tuple]] = []
    count = 0

    def at(t: float, kind: str, *args: object) -> None:
        nonlocal count
        count += 1
        heapq.heappush(events, (t, count, kind, args))

    for i, speed in enumerate(speeds):
        at(speed, "step", i)
    while events and merged_tokens < arguments.tokens:
        now, _, kind, args = heapq.heappop(events)
        if kind == "step":
            (i,) = args
            unmerged = sum(s.unmerged_tokens + (steps[i] - last_cut[i][s.fragment]) * tokens_per_step for s in states[i]) / len(fragments)
            progress = min(1.0, (merged_tokens + unmerged) / arguments.tokens)
            trainers[i].step(lr_at(progress, program.train) * join_ramp(steps[i] + 1, settings.unit.sync_every))
            steps[i] += 1
            for f in fragments:
                state = states[i][f]
                if state.correcting is not None and state.correcting.add_F is not None:
                    bindings[i].add(f, state.correcting.add_F)
                    state.adopted()
                if steps[i] >= due[i][f] and len(state.undecided) < 2:
                    n = steps[i] - last_cut[i][f]
                    pending = state.cut(bindings[i].snapshot(f), tokens=n * tokens_per_step, steps=n, inner_steps=steps[i], loss=None)
                    pending.seq = seqs[i]
                    seqs[i] += 1
                    last_cut[i][f] = steps[i]
                    due[i][f] += settings.unit.sync_every
                    at(now + arguments.latency, "arrive", i, f, pending)
            at(now + speeds[i], "step", i)
        elif kind == "arrive":
            i, f, pending = args
            world[f].pending.append((now, f"u{i}", pending))
            at(now, "plan", f)
            at(now + settings.merge.merge_wait_s_max, "plan", f)
        elif kind == "plan":
            (f,) = args
            g = world[f]
            if not g.pending:
                continue
            candidates = [
                Candidate(id=ContributionId(0, u, 0, p.seq), tokens=p.tokens, steps=p.steps, **stale_args(g, p)) for _, u, p in g.pending
            ]
            awaited = len(speeds) - len(set(g.rounds) | {u for _, u, _ in g.pending})
            weighing = weigh(
                candidates, fragment_version=g.version, rounds=g.rounds, weights=g.weights, settings=settings.merge, awaited=awaited
            )
            if (
                weighing.mass < settings.merge.merge_at_least
                and now < min(t for t, _, _ in g.pending) + settings.merge.merge_wait_s_max - 1e-9
            ):
                continue
            by_id = {(u, p.seq): p for _, u, p in g.pending}
            merging = FragmentMerge(layout.fragments[f])
            for c, coefficient in zip(weighing.candidates, weighing.coefficients, strict=True):
                merging.add_params(coefficient, decode_section(by_id[c.id.unit, c.id.seq].section))
                outcomes[int(c.id.unit[1:])][c.id.seq] = "merged"
                merged_tokens += c.tokens / len(fragments)
                stale.append(g.version - by_id[c.id.unit, c.id.seq].base.fragment_version)
            masses.append(weighing.mass)

            def quantise(x: torch.Tensor) -> torch.Tensor:
                out = torch.empty_like(x)
                encode_section("params", settings.pull.codec, x, decoded=out)
                return out

            outer_step(g.value.params, g.outer, merging.gradient, settings.outer, quantise)
            g.version += 1
            g.masses.append(weighing.mass)
            after_merge(g, weighing)
            g.pending.clear()
            at(now + arguments.latency, "news", f, g.version, g.value.clone(), [dict(o) for o in outcomes])
        elif kind == "news":
            f, version, value, known = args
            for i in range(len(speeds)):
                state = states[i][f]
                if state.correcting is None:
                    state.settle(known[i].get, value, base(version))
                else:
                    at(now + speeds[i], "late", i, f, version, value, known)
        elif kind == "late":
            i, f, version, value, known = args
            state = states[i][f]
            if state.correcting is not None:
                at(now + speeds[i], "late", *args)
            elif version > state.held.fragment_version:
                state.settle(known[i].get, value, base(version))
    for f in fragments:
        bindings[0].replace(f, world[f].value)
    loss = trainers[0].held_out_loss()
    return loss, steps, sum(stale) / len(stale), sum(masses) / len(masses), world[0].version


def stale_args(g: Global, p: Pending) -> dict[str, object]:
    staleness = g.version - p.base.fragment_version
    return {"staleness": staleness, "lag": lag_of(staleness, g.masses)}


def after_merge(g: Global, weighing) -> None:
    g.weights = [*g.weights, *weighing.weights][-32:]
    for c in weighing.candidates:
        g.rounds[c.id.unit] = Round(tokens=c.tokens, fragment_version=g.version)


if __name__ == "__main__":
    main()
