"""What synchronisation costs the training thread: a cut, an adoption, and the speed of training with it on against off.

    python -m benchmarks.blocked                                     # GPTs of 0.8 M, 5.6 M and 25 M parameters
    python -m benchmarks.blocked --sizes tiny --pairs 1 --steps 20   # in seconds

A cut and an adoption are timed as ``Unit.step`` does them, one at a time while nothing else runs. Speed is that of real training (H = 50, int4 up, int8 down)
in segments that alternate with plain ones of the same model, with the unit's background threads running. The aggregator belongs to another machine: it is a
process pinned to the last core, while the unit, its background threads included, has the first core alone (``--placement shared``: nothing is pinned).
Negative control: the same exchange done on the training thread (snapshot, encode, put, pull, add).
"""

from __future__ import annotations

import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

import ps_diloco
from aggregator.outer_step import Aggregator
from benchmarks.material import GPT_SIZES, new_run, program, publish
from benchmarks.material import Encoded as EncodedCut
from benchmarks.measure import ROOT, Cell, Report, Stages, file_system, fresh_bytes, median_s, parser
from ps_diloco.binding import ModelBinding
from ps_diloco.checkpoint import read_fragment
from ps_diloco.merge import sum_squares
from ps_diloco.records import Base
from ps_diloco.run import OpenRun
from ps_diloco.shard import encode_section
from ps_diloco.store import LocalStore, MemoryStore
from ps_diloco.unit.engine import Save
from ps_diloco.unit.unit import Unit
from workers.model import build_model
from workers.train import Trainer

T = TypeVar("T")
WAIT_S = 120.0
LR = 1e-3
KINDS = ("quiet", "staged", "busy")
"""Of the cuts that are timed, in turn."""
STAGES = {
    "ps_diloco.fragment.FragmentValue.zeros": "new memory (zeros)",
    "ps_diloco.binding.ModelBinding.snapshot": "copy, tensor by tensor",
    "ps_diloco.binding.ModelBinding.add": "add, tensor by tensor",
    "ps_diloco.binding.ModelBinding.adopt_buffers": "adopt buffers",
    "ps_diloco.unit.engine.Engine.post": "hand over to the engine",
    "ps_diloco.unit.engine.Engine.can_cut": "ask whether to cut",
    "ps_diloco.unit.engine.Engine.take_corrections": "take corrections",
}


def wait_until(holds: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + WAIT_S
    while not holds():
        if time.monotonic() > until_s:
            raise TimeoutError(f"waited in vain for {what}")
        time.sleep(0.001)


@dataclass(kw_only=True)
class Moments:
    """Seconds of single cuts and adoptions of a unit with one fragment, and what bounds them."""

    elements: int
    cut_s: float
    busy_cut_s: float
    adopt_s: float
    plain_step_s: float
    copy_s: float
    hot_copy_s: float
    fresh_copy_s: float
    add_s: float
    naive_s: float
    naive_rows: list[tuple[Cell, ...]]
    stage_rows: list[tuple[Cell, ...]]
    fresh: int


def moments(size: str, repeats: int) -> Moments:
    """Each cut is merged and its correction adopted before the next one is timed. The engine is idle, or (``busy``) just taking in an adoption."""
    torch.set_num_threads(1)
    model = build_model(GPT_SIZES[size], seed=0)
    store = MemoryStore()
    run = new_run(store, model, unit={"sync_every": 2, "state_every_cuts": 0, "join_warmup_steps": 0})
    aggregator = Aggregator(run)
    elements = run.layout.elements
    stages, fresh, staged_s = Stages(STAGES), 0, 0.0
    cuts: list[float] = []
    busy: list[float] = []
    adoptions: list[float] = []
    plain: list[float] = []
    with ps_diloco.join("memory://none", model, unit="a", store=store, poll_s=0.02, heartbeat_s=60.0) as unit:
        wait_until(lambda: aggregator.take_pass(force="once").kind == "idle" and unit._parts.outbox.listed.is_set(), "being listed")
        for turn in range(3 * repeats + 3):
            kind = KINDS[turn % 3]
            train_a_little(model)
            plain.append(timed(lambda: unit.step(tokens=1000)))
            if kind != "busy":
                idle(unit)
            train_a_little(model)
            if turn < 3:
                fresh = fresh_bytes(lambda: unit.step(tokens=1000))
            elif kind == "staged":
                with stages:
                    staged_s += timed(lambda: unit.step(tokens=1000))
            else:
                (busy if kind == "busy" else cuts).append(timed(lambda: unit.step(tokens=1000)))
            wait_until(lambda t=turn: unit._parts.outbox.published == t + 1, "the cut to be published")  # type: ignore[misc]
            aggregator.take_pass(force="once")
            wait_until(lambda: bool(unit._parts.engine._corrections), "a correction")
            time.sleep(0.01)
            adoptions.append(timed(unit._adopt))
    flat, correction, copy = torch.randn(elements), torch.randn(elements), torch.empty(elements)
    naive_s, naive_rows = naive(run, model, repeats)
    return Moments(
        elements=elements,
        cut_s=statistics.median(cuts),
        busy_cut_s=statistics.median(busy),
        adopt_s=statistics.median(adoptions[1:]),
        plain_step_s=statistics.median(plain),
        copy_s=median_cold_s(lambda: flat.add_(1e-3), lambda: copy.copy_(flat), 2 * repeats),
        hot_copy_s=median_s(lambda: copy.copy_(flat), 2 * repeats),
        fresh_copy_s=median_s(lambda: copy_into_fresh(flat), 2 * repeats),
        add_s=median_cold_s(lambda: None, lambda: flat.add_(correction), 2 * repeats),
        naive_s=naive_s,
        naive_rows=naive_rows,
        stage_rows=[(stage, seconds / repeats, share) for stage, seconds, share in stages.rows(staged_s, rest="spans, checks, clock")],
        fresh=fresh,
    )


@torch.no_grad()
def train_a_little(model: torch.nn.Module) -> None:
    """Moves every parameter; leaves the model's memory warm, as an optimizer step does."""
    for parameter in model.parameters():
        parameter.add_(torch.randn(()), alpha=1e-3)


def median_cold_s(warm: Callable[[], object], call: Callable[[], object], repeats: int) -> float:
    """Median of ``call`` with the caches as they are at a cut: everything was thrown out by other work, then ``warm`` touched what training touches."""
    other = torch.zeros(1 << 25)
    found = []
    for _ in range(repeats):
        other.add_(1.0)
        warm()
        found.append(timed(call))
    return statistics.median(found)


def copy_into_fresh(flat: torch.Tensor) -> None:
    """Copy into pages that the operating system has just mapped; an allocator may give back memory that is warm."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.frombuffer(mmap.mmap(-1, 4 * flat.numel()), dtype=torch.float32).copy_(flat)


def idle(unit: Unit) -> None:
    """Wait until the engine has handled all that was posted."""
    reached = threading.Event()
    unit._parts.engine.post(Save(then=lambda residuals, cuts: reached.set()))
    if not reached.wait(WAIT_S):
        raise TimeoutError("the engine does not answer")


def timed(call: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    call()
    return time.perf_counter() - begun_s


def naive(run: OpenRun, model: torch.nn.Module, repeats: int) -> tuple[float, list[tuple[Cell, ...]]]:
    """The exchange on the training thread: snapshot, encode, put shard and record, pull the newest version, add the difference. Merging is not counted."""
    binding = ModelBinding(model, run.layout)
    aggregator = Aggregator(run)
    head = run.log.find_head().record
    held = (head.fragments[0].fragment_version, read_fragment(run, head.fragments[0], 0))
    seq = head.units["a"].first_undecided
    stages: dict[str, list[float]] = {}

    def stage(name: str, call: Callable[..., T], *arguments: Any, **options: Any) -> T:
        begun_s = time.perf_counter()
        result = call(*arguments, **options)
        stages.setdefault(name, []).append(time.perf_counter() - begun_s)
        return result

    binding.replace(0, held[1])
    for turn in range(repeats):
        train_a_little(model)
        entry = run.log.find_head().record.fragments[0]
        snapshot = stage("snapshot", binding.snapshot, 0)
        delta_F = stage("difference", torch.sub, held[1].params, snapshot.params)
        decoded = torch.empty_like(delta_F)
        section = stage("encode", encode_section, "params", "int4", delta_F, decoded=decoded)
        sums = stage("sums of squares", sum_squares, decoded, run.layout.of(0))
        cut = EncodedCut(fragment=0, section=section, sum_squares=sums)
        base = Base(fragment_version=entry.fragment_version, sha256=entry.sha256)
        stage("put", publish, run, "a", seq + turn, cut, base)
        aggregator.take_pass(force="once")
        newest = stage("find the head", run.log.find_head).record.fragments[0]
        value = stage("pull", read_fragment, run, newest, 0, held=held)
        correction = stage("difference to the new version", torch.sub, value.params, held[1].params)
        stage("add", binding.add, 0, correction)
        held = (newest.fragment_version, value)
    whole_s = [sum(parts) for parts in zip(*stages.values(), strict=True)]
    rows: list[tuple[Cell, ...]] = [(name, statistics.median(seconds), "") for name, seconds in stages.items()]
    return statistics.median(whole_s), rows


@dataclass(kw_only=True)
class Speed:
    """What one size's alternating segments found. Per step: seconds of training thread and CPU."""

    steps: int
    cuts: int
    off_s: list[float]
    on_s: list[float]
    blocked_s: float
    background_s: float
    """CPU seconds of all threads but the training thread, during the segments with synchronisation."""
    versions: int

    @property
    def ratios(self) -> list[float]:
        return [off / on for off, on in zip(self.off_s, self.on_s, strict=True)]


def speed(size: str, *, every: int, steps: int, pairs: int, batch_size: int, fragments: int, placement: str, directory: Path) -> Speed:
    """Alternate ``pairs`` of segments of ``steps`` steps, the order turning each time. Cuts fall within the segments, not at their ends."""
    trainer = Trainer.build(program(size, batch_size=batch_size), seed=0, unit="a")
    settings: dict[str, Any] = {"unit": {"sync_every": every, "join_warmup_steps": 0}}
    run = new_run(LocalStore(directory), trainer.model, fragments=fragments, **settings)
    found = Speed(steps=steps, cuts=0, off_s=[], on_s=[], blocked_s=0.0, background_s=0.0, versions=0)
    with placed(placement, directory), ps_diloco.join(str(directory), trainer.model, trainer.optimizer, unit="a") as unit:
        wait_until(unit._parts.outbox.listed.is_set, "being listed")

        def segment(count: int, *, on: bool) -> float:
            begun_s, cpu_s, own_s, blocked_s = time.perf_counter(), time.process_time(), time.thread_time(), unit.blocked_s
            for _ in range(count):
                loss = trainer.step(LR)
                if on:
                    unit.step(tokens=trainer.tokens_per_step, loss=loss)
            taken_s = time.perf_counter() - begun_s
            if on and count == steps:
                found.blocked_s += unit.blocked_s - blocked_s
                found.background_s += time.process_time() - cpu_s - (time.thread_time() - own_s)
            return taken_s

        segment(every // (2 * fragments), on=True)  # from now on a segment of a multiple of H steps begins and ends between two cuts
        version = unit.version
        for pair in range(pairs):
            for on in (True, False) if pair % 2 else (False, True):
                settle(unit, run)
                (found.on_s if on else found.off_s).append(segment(steps, on=on))
        found.cuts = pairs * steps // every * fragments
        found.versions = unit.version - version
    return found


def settle(unit: Unit, run: OpenRun) -> None:
    """Let the background threads finish what the last segment left, so that no segment pays for another one."""
    wait_until(lambda: unit._parts.outbox.published == unit._parts.outbox.accepted and unit._parts.saver.free, "all cuts to be published")
    until_s = time.monotonic() + WAIT_S
    while unit._parts.engine.undecided() and time.monotonic() < until_s:
        time.sleep(0.01)
    unit._adopt()


@contextmanager
def placed(placement: str, directory: Path) -> Iterator[None]:
    """An aggregator process beside this one; with ``apart`` on the last core, and this process, as it goes on, on the first."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    command = [sys.executable, "-m", "ps_diloco.cli.main", "aggregate", str(directory), "--poll", "0.2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    pinned = placement == "apart" and len(cores) > 1
    try:
        if pinned:
            os.sched_setaffinity(process.pid, {cores[-1]})
            os.sched_setaffinity(0, {cores[0]})
        yield
    finally:
        if pinned:
            os.sched_setaffinity(0, set(cores))
        process.kill()
        process.wait()


def report_moments(report: Report, size: str, found: Moments) -> None:
    where = f"{size} ({found.elements:,} parameters)"
    warm = "copying the fragment once into memory that is there"
    report.figure(f"cut, {where}", found.cut_s, "s", floor=found.copy_s, floor_is=warm, target=1.5)
    report.figure(f"adoption, {where}", found.adopt_s, "s", floor=found.add_s, floor_is="one add_ of the fragment", target=1.5)
    report.figure(f"naive exchange on the training thread, {where}", found.naive_s, "s", floor=found.copy_s, floor_is=warm)
    report.table(
        f"Around a cut, {where}",
        ("what", "s", "x warm copy"),
        [
            (name, seconds, f"{seconds / found.copy_s:.2f}x")
            for name, seconds in (
                ("the cut, as the training thread sees it", found.cut_s),
                ("a cut while the engine still takes in an adoption", found.busy_cut_s),
                ("copy into memory that is there (the floor)", found.copy_s),
                ("the same, again and again: small models are in the caches", found.hot_copy_s),
                ("copy into fresh memory", found.fresh_copy_s),
                ("a step of the unit without cut or adoption", found.plain_step_s),
            )
        ],
    )
    report.note(f"a cut of {size} maps {found.fresh / 1e6:.1f} MB of fresh memory for {4 * found.elements / 1e6:.1f} MB of parameters")
    report.table(f"Stages of a cut, {where}", ("stage", "s", "share"), found.stage_rows)
    report.table(f"Stages of the naive exchange, {where}", ("stage", "s", ""), found.naive_rows)


def report_speed(report: Report, size: str, found: Speed) -> None:
    ratio = statistics.median(found.ratios)
    on_s, steps = sum(found.on_s), found.steps * len(found.on_s)
    report.figure(
        f"inner step with synchronisation, {size}",
        statistics.median(found.off_s) / found.steps / ratio,
        "s",
        floor=statistics.median(found.off_s) / found.steps,
        floor_is="the plain loop's step",
        target=1 / 0.97,
    )
    report.table(
        f"Training with synchronisation on against off, {size}",
        ("what", "value"),
        [
            ("speed on / off, median of pairs", ratio),
            ("speed on / off, lowest and highest pair", f"{min(found.ratios):.4f} to {max(found.ratios):.4f}"),
            ("plain step, ms", 1e3 * statistics.median(found.off_s) / found.steps),
            ("training thread blocked, share of time", f"{found.blocked_s / on_s:.3%}"),
            ("background threads, CPU seconds as share of time", f"{found.background_s / on_s:.3%}"),
            ("speed that these two allow on one core", 1 - (found.blocked_s + found.background_s) / on_s),
            ("steps, cuts, versions adopted", f"{steps}, {found.cuts}, {found.versions}"),
        ],
    )


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--sizes", default="0.8M,5.6M", help=f"of {', '.join(GPT_SIZES)}, with commas between")
    options.add_argument("--repeats", type=int, default=15, help="cuts and adoptions that are timed")
    options.add_argument("--every", type=int, default=50, help="H")
    options.add_argument("--steps", type=int, default=50, help="inner steps of a segment: a multiple of H")
    options.add_argument("--pairs", type=int, default=5, help="pairs of segments; 0 leaves the speed out")
    options.add_argument(
        "--batch-size", type=int, default=2, help="sequences of 128 tokens; small, so that a step is short beside the model's size"
    )
    options.add_argument("--fragments", type=int, default=2)
    options.add_argument("--placement", choices=("apart", "shared"), default="apart")
    options.add_argument("--directory", type=Path, help="where the bucket's directory is made; default: for temporary files")
    chosen = options.parse_args(argv)
    report = Report.begin("blocked", chosen, argv)
    threads = torch.get_num_threads()
    for size in chosen.sizes.split(","):
        report_moments(report, size, moments(size, chosen.repeats))
    for size in chosen.sizes.split(",") if chosen.pairs else []:
        with tempfile.TemporaryDirectory(dir=chosen.directory) as directory:
            found = speed(
                size,
                every=chosen.every,
                steps=max(1, chosen.steps // chosen.every) * chosen.every,
                pairs=chosen.pairs,
                batch_size=chosen.batch_size,
                fragments=chosen.fragments,
                placement=chosen.placement,
                directory=Path(directory) / "run",
            )
            report.note(f"{size}: bucket in a directory on {file_system(Path(directory))}, batch of {chosen.batch_size}, one torch thread")
        report_speed(report, size, found)
    torch.set_num_threads(threads)
    if not chosen.pairs:
        report.end()
        return
    shares = "the unit with its background threads has one core, the aggregator process another one"
    report.note(shares if chosen.placement == "apart" else "unit, background threads and aggregator process share all cores")
    report.end()


if __name__ == "__main__":
    main()
