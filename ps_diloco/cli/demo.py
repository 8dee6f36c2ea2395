"""``ps-diloco demo``: the main job on this machine, with the processes and the bucket protocol of production."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ps_diloco.cli.context import console, count_text, progress
from ps_diloco.cli.demo_fleet import Fleet
from ps_diloco.cli.demo_view import Ledger, Summary, View, summarise
from ps_diloco.cli.status import gather
from ps_diloco.config import CreateSettings, RunSettings, parse_settings
from ps_diloco.env import Env
from ps_diloco.errors import PsDilocoError, StoreError
from ps_diloco.records import Manifest, Stored
from ps_diloco.run import OpenRun, create_run
from ps_diloco.store import Store, open_store
from ps_diloco.transition import check_transition
from ps_diloco.weights import read_weights

log = logging.getLogger(__name__)

UNITS = {"us-east": 0.0, "eu-north": 0.01, "us-west": 0.03, "ap-south": 0.08}
"""Unit -> seconds added to each of its inner steps."""
VICTIM = "eu-north"
KILL_AT = 0.35
DEAD_S = 8.0
LOOK_EVERY_S = 0.5
TIMEOUT_S = 900.0


def demo(
    chaos: Annotated[bool, typer.Option("--chaos", help="Kill a unit and the aggregator with SIGKILL in the middle.")] = False,
    store: Annotated[
        Literal["local", "s3", "gcs"],
        typer.Option(
            help="Bucket: a local directory, a real S3 server on this machine, or one of the GCS protocol, which keeps all in memory."
        ),
    ] = "local",
    directory: Annotated[Path | None, typer.Option("--dir", help="Where to keep run and logs; default: a new temporary directory.")] = None,
    tokens: Annotated[int, typer.Option(min=10_000, help="Tokens to train on, by all units together.")] = 2_400_000,
) -> None:
    """Train a small language model on real text with four unequal units and one aggregator, through a bucket on this machine.

    Everything is what production uses: five processes that share nothing but the bucket.
    """
    env = Env.system()
    out = console()
    begun_s = env.clock.monotonic()
    where = _directory(directory)
    with ExitStack() as stack:
        url, environment, bucket = _bucket(store, where, stack)
        run = _create(bucket, env, tokens)
        out.print(f"run:   {url}\nlogs:  {where}/*.log", markup=False)
        elements = count_text(run.layout.elements)
        out.print(
            f"model: {elements} parameters, byte-level GPT, in {len(run.layout.fragments)} fragments; text: the Python standard library",
            markup=False,
        )
        fleet = stack.enter_context(Fleet(directory=where, environment=environment, env=env))
        fleet.start("aggregator", ["aggregate", url, "--poll", "0.2"])
        for name, delay_s in UNITS.items():
            fleet.start(name, ["unit", url, "--name", name, "--step-delay", str(delay_s), "--poll", "0.5", "--heartbeat", "1"])
        with View(out, target_tokens=tokens, begun_s=begun_s) as view:
            watch = Watch(run=run, env=env, fleet=fleet, view=view, target_tokens=tokens, chaos=Chaos() if chaos else None)
            facts = watch.until_end()
        seconds = env.clock.monotonic() - begun_s
        summary = _evaluate(run, facts, watch.ledger, seconds)
    summarise(out, summary)
    _what_next(store, url, where)


def _directory(wanted: Path | None) -> Path:
    if wanted is None:
        return Path(tempfile.mkdtemp(prefix="ps-diloco-demo-"))
    wanted.mkdir(parents=True, exist_ok=True)
    return wanted.resolve()


def _bucket(kind: str, where: Path, stack: ExitStack) -> tuple[str, dict[str, str], Store]:
    """URL, environment variables for the processes, and the opened store."""
    if kind == "local":
        url = str(where / "bucket")
        return url, {}, open_store(url)
    from ps_diloco.cli.gcs_server import LocalGcsServer
    from ps_diloco.cli.s3_server import LocalS3Server

    server = LocalS3Server(where / "s3") if kind == "s3" else LocalGcsServer(where / "gcs")
    with progress(1, f"starting {'an S3' if kind == 's3' else 'a GCS'} server"):
        stack.enter_context(server)
        server.create_bucket("demo")
    stack.callback(shutil.rmtree, where / kind, ignore_errors=True)
    if isinstance(server, LocalS3Server):
        return "s3://demo/run", server.env(), open_store("s3://demo/run", s3=server.settings)
    return "gs://demo/run", server.env(), open_store("gs://demo/run", gcs=server.settings)


def _create(bucket: Store, env: Env, tokens: int) -> OpenRun:
    from workers.model import build_model
    from workers.settings import ProgramSettings

    program = parse_settings(ProgramSettings, {"train": {"threads": 1}}, source="demo")
    settings = parse_settings(
        RunSettings,
        {"target_tokens": tokens, "unit": {"sync_every": 20, "state_every_cuts": 5}, "merge": {"merge_wait_s_max": 5.0}},
        source="demo",
    )
    create = CreateSettings(name="demo", num_fragments=2)
    return create_run(
        bucket, env, build_model(program.model, create.seed), create=create, settings=settings, program=program.model_dump(mode="json")
    )


@dataclass(kw_only=True)
class Chaos:
    """One unit and the aggregator die at the same moment, and come back later."""

    killed_at_s: float | None = None
    restarted: bool = False
    steps_then: dict[str, int] = field(default_factory=dict)
    version_then: int = 0
    rejoined: bool = False
    committed: bool = False


@dataclass(kw_only=True)
class Watch:
    """Looks at the bucket until the run has ended; what it sees is what anybody with the bucket's URL sees."""

    run: OpenRun
    env: Env
    fleet: Fleet
    view: View
    target_tokens: int
    chaos: Chaos | None
    ledger: Ledger = field(default_factory=Ledger)
    head: Stored[Manifest] | None = None

    def until_end(self) -> dict[str, Any]:
        deadline_s = self.env.clock.monotonic() + TIMEOUT_S
        while True:
            self.fleet.check()
            now_s = self.env.clock.monotonic()
            running = self.fleet.running()
            try:
                facts = self._look()
                self.view.show(facts, now_s)
                if self.chaos is not None:
                    self._play(self.chaos, facts, now_s)
                if facts["final"] and not running:
                    return facts
            except StoreError as error:
                log.info("cannot look at the bucket now: %s", error)
            if now_s > deadline_s:
                raise PsDilocoError("the demo did not end in time", limit_s=TIMEOUT_S, running=running, logs=self.fleet.directory)
            self.env.clock.sleep(LOOK_EVERY_S)

    def _look(self) -> dict[str, Any]:
        self.head = self.run.log.find_head(self.head)
        facts = gather(self.run, self.head.record)
        for name, row in facts["units"].items():
            self.ledger.note(name, row)
        return facts

    def _play(self, chaos: Chaos, facts: dict[str, Any], now_s: float) -> None:
        steps = {name: int(row["report"].get("inner_steps", 0)) for name, row in facts["units"].items()}
        if chaos.killed_at_s is None:
            if facts["tokens"] >= KILL_AT * self.target_tokens:
                self.fleet.kill(VICTIM)
                self.fleet.kill("aggregator")
                chaos.killed_at_s, chaos.steps_then, chaos.version_then = now_s, steps, facts["version"]
                self.view.event(
                    f"SIGKILL to unit {VICTIM} at its step {steps.get(VICTIM)} and to the aggregator at version {facts['version']}", now_s
                )
        elif not chaos.restarted:
            if now_s - chaos.killed_at_s >= DEAD_S:
                others = ", ".join(f"{name} +{steps[name] - chaos.steps_then[name]}" for name in steps if name != VICTIM)
                self.view.event(f"{now_s - chaos.killed_at_s:.0f} s without an aggregator; training went on, in steps: {others}", now_s)
                self.fleet.restart("aggregator")
                self.fleet.restart(VICTIM)
                chaos.restarted = True
                self.view.event("started both again with the same commands, nothing else", now_s)
        else:
            row = facts["units"].get(VICTIM, {})
            if not chaos.committed and facts["version"] > chaos.version_then:
                chaos.committed = True
                self.view.event(f"the new aggregator committed version {facts['version']}", now_s)
            if not chaos.rejoined and row.get("incarnation") == 1 and row["report"].get("incarnation") == 1:
                chaos.rejoined = True
                self.view.event(
                    f"{VICTIM} rejoined as incarnation 1 and goes on at its step {steps[VICTIM]}, from the state it had saved", now_s
                )


def _evaluate(run: OpenRun, facts: dict[str, Any], ledger: Ledger, seconds: float) -> Summary:
    """Audit the history, evaluate the global model before and after, and train the baseline: one unit alone."""
    from workers.train import Trainer, program_of, train_alone

    program = program_of(run.record.program, source="demo")
    trainer = Trainer.build(program, seed=run.record.seed, unit="alone")
    head = run.log.read(facts["timeline"], facts["version"])
    first = run.log.read(0, 0)
    assert head is not None and first is not None
    audited = audit(run, first)
    losses = []
    for manifest in (first.record, head.record):
        trainer.model.load_state_dict(read_weights(run, manifest))
        losses.append(trainer.held_out_loss())
    steps = int(max(ledger.total(name, "steps") for name in facts["units"]))
    with progress(steps, f"baseline: one unit alone, {steps} steps") as bar:
        alone = train_alone(program, run.record.seed, steps, corpus=trainer.corpus, on_report=lambda _: bar.advance(bar.task_ids[0]))
    return Summary(
        facts=facts,
        ledger=ledger,
        loss_before=losses[0],
        loss_after=losses[1],
        loss_alone=alone,
        steps_alone=steps,
        parameters=run.layout.elements,
        seconds=seconds,
        audited=audited,
    )


def audit(run: OpenRun, first: Stored[Manifest]) -> int:
    """Check every step of the history from ``first`` on; return the number of manifests. Raises :class:`InvariantViolation`."""
    count, head = 1, first
    while (following := run.log.read(head.record.timeline, head.record.version + 1)) is not None:
        check_transition(head, following.record, run.layout)
        head, count = following, count + 1
    return count


def _what_next(store: str, url: str, where: Path) -> None:
    out = console()
    call = "ps-diloco"
    if shutil.which(call) is None:  # installed in an environment that is not active
        call = os.path.relpath(Path(sys.executable).parent / call)
    commands = [f"status {url}", f"versions {url}", f"export {url} model.safetensors"] if store == "local" else []
    commands += ["demo --chaos", "init --example > run.toml", "init s3://YOUR-BUCKET/first --config run.toml"]
    out.print("\nwhat next:")
    for command in commands:
        out.print(f"  {call} {command}", markup=False)
    out.print(f"remove this demo with: rm -r {where}", markup=False)
