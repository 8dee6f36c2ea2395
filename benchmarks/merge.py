"""The merge of a fragment: seconds per core, bytes, peak memory, with the aggregator's own pass over shards in a directory.

    python -m benchmarks.merge                                         # 8 contributions of 500 M parameters; memory with 8 and 64 of 100 M
    python -m benchmarks.merge --params 1000000 --memory-params 500000 # in seconds

One process creates the run, trains a small GPT for real pseudo-gradients, encodes one with the unit's codec and publishes it for every unit; another one,
whose peak memory is its own, takes passes with one thread: the first from the bucket alone, the last as an aggregator that goes on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from aggregator.fragment_step import Effort
from aggregator.outer_step import Aggregator
from benchmarks.material import Slab, announce, base_of, encoded, new_run, pseudo_gradient, publish, unit_names
from benchmarks.measure import ROOT, Cell, Report, Stages, file_system, parser, peak_rss_bytes, ratio_text
from ps_diloco.checkpoint import Place, write_anchor, write_state
from ps_diloco.config import RunSettings
from ps_diloco.env import Env
from ps_diloco.run import open_run
from ps_diloco.store import CountingStore, LocalStore

EXTRAPOLATED_PARAMS = 12_000_000_000
ROUNDS = 3
EACH, STEP, STATE = "contribution: ", "step: ", "write state: "
STAGES = {
    "ps_diloco.store.local.LocalStore.get": "read",
    "ps_diloco.store.local.LocalStore.put": "write",
    "google_crc32c.value": "crc32c",
    "hashlib.sha256": "sha256",
    "ps_diloco.zstd.compress": "zstd",
    "ps_diloco.zstd.decompress": "zstd",
    "ps_diloco.arrays.check_finite": "check that values are finite",
    "ps_diloco.codecs.BlockInt.encode": "encode",
    "ps_diloco.codecs.NoCodec.encode": "encode",
    "ps_diloco.shard.encode_section": "gather chunks",
    "ps_diloco.shard.encode_shard": "join to one object",
    "ps_diloco.merge.SumSquares.add": "sums of squares",
    "aggregator.admit.fetch_shard": EACH + "everything else of the fetch",
    "aggregator.admit.read_shard": EACH + "decode",
    "ps_diloco.merge.FragmentMerge.add_params": EACH + "accumulate",
    "ps_diloco.merge.FragmentMerge": STEP + "accumulator",
    "aggregator.fragment_step.Stepper._copy": STEP + "copies of Theta, m, e",
    "ps_diloco.outer.publish_outer_step": STEP + "momentum, update, error",
    "ps_diloco.checkpoint.read_fragment": "read the fragment: everything else",
    "ps_diloco.checkpoint.read_state": "read the outer state: everything else",
    "ps_diloco.fragment.FragmentValue.sha256": "hash of the value: everything else",
    "ps_diloco.checkpoint.write_delta": "write delta: everything else",
    "ps_diloco.checkpoint.write_state": STATE + "everything else",
    "ps_diloco.checkpoint.write_anchor": "write anchor: everything else",
    "aggregator.outer_step.Aggregator._commit": "commit: everything else",
}


def prepare(options: argparse.Namespace) -> None:
    """Create a run and publish a few rounds of contributions."""
    torch.set_num_threads(1)
    run = new_run(LocalStore(options.directory), Slab(options.params), merge={"quorum": options.units, "merge_at_least": 1.0})
    units = unit_names(options.units)
    head = announce(run, units)
    cut = encoded(run, 0, pseudo_gradient(options.params, size=options.size, steps=options.train_steps))
    for seq in range(ROUNDS):
        for unit in units:
            publish(run, unit, seq, cut, base_of(head, 0))
            if seq:  # held back: a later pass merges it
                _hide(options.directory, unit, seq).rename(_hidden(options.directory, unit, seq))


def _hide(directory: Path, unit: str, seq: int) -> Path:
    return directory / f"units/{unit}/t000000/000000/{seq:020d}.json"


def _hidden(directory: Path, unit: str, seq: int) -> Path:
    return directory / f"units/{unit}/t000000/000000/{seq:020d}.json.later"


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Passes over what :func:`prepare` left; what each took."""
    torch.set_num_threads(1)
    store = CountingStore(LocalStore(options.directory))
    run = open_run(store, Env.system())
    aggregator = Aggregator(run, effort=Effort(threads=options.threads))
    found: dict[str, Any] = {"passes": [], "before_bytes": peak_rss_bytes()}
    for turn in range(ROUNDS if not options.memory_only else 1):
        if turn:
            for unit in unit_names(options.units):
                _hidden(options.directory, unit, turn).rename(_hide(options.directory, unit, turn))
        before = store.snapshot()
        begun_s, cpu_s = time.perf_counter(), time.process_time()
        with Stages({} if options.memory_only else STAGES) as stages:
            outcome = aggregator.take_pass()
        taken_s, used_s = time.perf_counter() - begun_s, time.process_time() - cpu_s
        merged = sum(len(step.merged) for step in outcome.head.record.steps)
        assert (outcome.kind, merged) == ("committed", options.units), (outcome.kind, merged)
        after = store.snapshot()
        found["passes"].append(
            {
                "wall_s": taken_s,
                "cpu_s": used_s,
                "bytes_in": after.bytes_in - before.bytes_in,
                "bytes_out": after.bytes_out - before.bytes_out,
                "stages": stages.rows(taken_s, rest="head, inbox, plan and the rest"),
                "missing": stages.missing,
            }
        )
    found["peak_bytes"] = peak_rss_bytes()
    if not options.memory_only:
        found |= _seldom(run, aggregator) | _floor(options)
    return found


def _seldom(run: Any, aggregator: Aggregator) -> dict[str, float]:
    """What is not written in every step, by itself."""
    head = run.log.find_head().record
    held = aggregator._stepper._held[0]
    place = Place(timeline=0, fragment=0, fragment_version=head.fragments[0].fragment_version)
    found = {}
    for name, call in (
        ("anchor_s", lambda: write_anchor(run, place, held.value)),
        ("state_s", lambda: write_state(run, place, held.state)),
    ):
        begun_s = time.perf_counter()
        call()
        found[name] = time.perf_counter() - begun_s
    return found


def _floor(options: argparse.Namespace) -> dict[str, float]:
    """As many ``add_`` of decoded values as there are contributions; and, what one would write instead, the mean of bfloat16 files."""
    elements = options.params
    total, values = torch.zeros(elements), torch.full((elements,), 1e-3)
    total.add_(values, alpha=0.125)
    begun_s = time.perf_counter()
    for _ in range(options.units):
        total.add_(values, alpha=0.125)
    add_s = time.perf_counter() - begun_s
    path = options.directory / "values.pt"
    torch.save(values.to(torch.bfloat16), path)
    del values
    total.zero_()
    begun_s = time.perf_counter()
    for _ in range(options.units):
        total.add_(torch.load(path, weights_only=True), alpha=1 / options.units)
    mean_s = time.perf_counter() - begun_s
    path.unlink()
    return {"add_s": add_s, "mean_s": mean_s}


def words_of(task: str, directory: Path, options: dict[str, object]) -> list[str]:
    """The command line of a process that does :func:`prepare` or :func:`measure`."""
    return ["--task", task, "--directory", str(directory), *(f"--{name.replace('_', '-')}={value}" for name, value in options.items())]


def child(words: Sequence[str]) -> str:
    """Run this program in a process of its own; return what it prints."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.merge", *words], stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT
    ).stdout


def in_directory(options: argparse.Namespace, params: int, units: int, *, memory_only: bool) -> tuple[dict[str, Any], str]:
    with tempfile.TemporaryDirectory(dir=options.directory) as temporary:
        directory = Path(temporary) / "run"
        shared: dict[str, object] = {"params": params, "units": units}
        child(words_of("prepare", directory, shared | {"size": options.size, "train_steps": options.train_steps}))
        found = json.loads(child(words_of("measure", directory, shared | {"threads": options.threads, "memory_only": int(memory_only)})))
        return found, file_system(Path(temporary))


def per_step_s(settings: RunSettings, warm: dict[str, Any], found: dict[str, Any]) -> float:
    """Seconds of a step of a looping aggregator, with what is written seldom in proportion."""
    written = sum(seconds for stage, seconds, _ in warm["stages"] if stage.startswith(STATE))
    state_s = 0.0 if written else found["state_s"] / settings.pull.state_every
    return float(warm["wall_s"] + state_s + found["anchor_s"] / settings.pull.anchor_every)


def report_merge(report: Report, options: argparse.Namespace) -> None:
    found, kind = in_directory(options, options.params, options.units, memory_only=False)
    settings, cold, warm = RunSettings(), found["passes"][0], found["passes"][-1]
    step_s, share = per_step_s(settings, warm, found), f"{options.units} contributions of {options.params / 1e6:g} M parameters"
    report.figure(
        f"one outer step, {share}",
        step_s,
        "s",
        floor=found["add_s"],
        floor_is="as many add_ of decoded float32 values",
    )
    report.figure(f"the same, first pass of a new process, {share}", cold["wall_s"], "s", floor=found["add_s"], floor_is="the same")
    report.figure("CPU seconds of the step's pass", warm["cpu_s"], "s")
    report.figure(
        f"mean of {options.units} bfloat16 files with torch.load, unchecked",
        found["mean_s"],
        "s",
        floor=found["add_s"],
        floor_is="the same",
    )
    report.figure("bytes read", warm["bytes_in"], "B")
    report.figure("bytes written", warm["bytes_out"], "B")
    report.figure("peak memory", found["peak_bytes"], "B", floor=5 * 4 * options.params, floor_is="Theta, m, e, accumulator, staging")
    for name, taken in (("looping", warm), ("first pass of a process", cold)):
        rows: list[tuple[Cell, ...]] = [(stage, s, part, ratio_text(s / found["add_s"])) for stage, s, part in taken["stages"]]
        report.table(f"Stages of an outer step, {name}, {share}", ("stage", "s", "share", "x floor"), rows)
    report.table(
        "Written seldom",
        ("what", "s", "every so many steps"),
        [("anchor", found["anchor_s"], settings.pull.anchor_every), ("outer state", found["state_s"], settings.pull.state_every)],
    )
    each_s = sum(s for stage, s, _ in warm["stages"] if stage.startswith(EACH)) / options.units
    fixed_s = step_s - each_s * options.units
    scale = EXTRAPOLATED_PARAMS / options.params
    report.table(
        f"Extrapolated, linear in parameters and contributions, to {EXTRAPOLATED_PARAMS / 1e9:g} B parameters on one core",
        ("contributions", "s per outer step of the whole model", "of it per contribution", "of it per step"),
        [(k, scale * (fixed_s + k * each_s), scale * each_s, scale * fixed_s) for k in (8, 64)],
    )
    if warm["missing"]:
        report.note("not timed apart (no such function): " + ", ".join(warm["missing"]))
    report.note(f"run in a directory on {kind}; {options.threads} thread{'s' if options.threads > 1 else ''}")


def report_memory(report: Report, options: argparse.Namespace) -> None:
    params, rows, peaks = options.memory_params, [], {}
    for units in options.memory_units:
        found, _ = in_directory(options, params, units, memory_only=True)
        peaks[units] = found["peak_bytes"]
        rows.append((units, found["peak_bytes"] / 1e6, found["before_bytes"] / 1e6, (found["peak_bytes"] - found["before_bytes"]) / params))
    first, last = options.memory_units[0], options.memory_units[-1]
    report.figure(
        f"peak memory with {last} contributions of {params / 1e6:g} M",
        peaks[last],
        "B",
        floor=peaks[first],
        floor_is=f"that with {first} contributions",
        target=1.1,
    )
    columns = ("contributions", "peak MB", "of it before the pass", "bytes per parameter in the pass")
    report.table(f"Peak memory of the aggregator, {params / 1e6:g} M parameters", columns, rows)


def main(argv: Sequence[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--params", type=int, default=500_000_000)
    made.add_argument("--units", type=int, default=8)
    made.add_argument("--threads", type=int, default=1, help="threads of the aggregator")
    made.add_argument("--memory-params", type=int, default=100_000_000)
    made.add_argument("--memory-units", type=lambda text: [int(part) for part in text.split(",")], default=[8, 64])
    made.add_argument("--directory", type=Path, help="where the bucket's directory is made; default: for temporary files")
    made.add_argument("--size", default="0.8M", help="GPT that gives the pseudo-gradients")
    made.add_argument("--train-steps", type=int, default=40, help="its inner steps")
    made.add_argument("--memory-only", type=int, default=0, help=argparse.SUPPRESS)
    made.add_argument("--task", choices=("all", "prepare", "measure"), default="all", help=argparse.SUPPRESS)
    options = made.parse_args(argv)
    if options.task == "prepare":
        prepare(options)
    elif options.task == "measure":
        print(json.dumps(measure(options)))
    else:
        report = Report.begin("merge", options, argv)
        report_merge(report, options)
        report_memory(report, options)
        report.end()


if __name__ == "__main__":
    main()
