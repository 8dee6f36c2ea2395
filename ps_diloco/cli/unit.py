"""``ps-diloco unit``: run the ready training program as one unit."""

from __future__ import annotations

import logging
from typing import Annotated

import typer
from rich.console import Console

from ps_diloco.cli.context import RunUrl, console, count_text, of, stop_on_signal
from ps_diloco.env import Env
from ps_diloco.errors import StoreError
from ps_diloco.unit.leave import Ending

EVERY_S = 10.0

log = logging.getLogger(__name__)


def unit(
    context: typer.Context,
    run: RunUrl,
    name: Annotated[str, typer.Option("--name", "-n", help="This unit's name; every running unit has its own.")],
    region: Annotated[str | None, typer.Option(help="The run's region that this unit is in; default: home.")] = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Join without looking whether another process lives under this name.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, ...; default: as the run says.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of this unit.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="End after this many inner steps; default: when the run ends.")] = None,
    step_delay: Annotated[float, typer.Option(min=0, help="Seconds added to every inner step, to try units of unequal speed.")] = 0.0,
    poll: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks for a new version.")] = 1.0,
    heartbeat: Annotated[float, typer.Option(min=0.2, help="Seconds between two heartbeats.")] = 5.0,
) -> None:
    """Train as one unit of a run until it ends. SIGTERM publishes what is done, saves the unit's own state and ends.

    Restart it with the same command: it goes on from its own state and the newest global version.
    """
    from workers.train import ExitReason, StepReport, train

    env = Env.system()
    out = console()
    shown_s = env.clock.monotonic()

    def show(report: StepReport) -> None:
        nonlocal shown_s
        now_s = env.clock.monotonic()
        if report.step > 1 and now_s - shown_s < EVERY_S:
            return
        shown_s = now_s
        done = f"{report.progress:6.1%} of the run, " if report.progress else ""
        out.print(
            f"step {report.step}: {done}version {report.version}, loss {report.loss:.3f}, lr {report.lr:.2e}, "
            f"{count_text(report.step * report.tokens)} tokens, blocked {report.blocked_s:.1f} s"
        )

    with stop_on_signal() as stop:
        ended = train(
            run,
            name,
            stop=stop,
            store=of(context).store(run),
            env=env,
            region=region,
            take_over=take_over,
            device=device,
            threads=threads,
            step_delay_s=step_delay,
            steps_max=steps,
            poll_s=poll,
            heartbeat_s=heartbeat,
            on_report=show,
        )
    if ended.reason is ExitReason.RUN_ENDED:
        out.print("the run has reached its target; the final version is in the bucket")
    else:
        _tell(out, "stopped" if ended.reason is ExitReason.STOPPED else "all steps done", ended.ending, run)


def _tell(out: Console, what: str, ending: Ending, run: str) -> None:
    """Say what became of the work; exit with the store's code if some of it is lost."""
    if not ending.listed:
        out.print(f"no aggregator has listed this unit, so nothing could be published; is one running? (ps-diloco aggregate {run})")
    unsent = f", {ending.unsent} not" if ending.unsent else ""
    if ending.uncut:
        unsent += f", nor the last steps of {ending.uncut} fragment(s), which wait for earlier ones to be merged"
    if ending.saved:
        kept = " (they are in the saved state)" if unsent else ""
        out.print(f"{what}; {ending.published} contribution(s) published{unsent}{kept}; state saved. The same command goes on from here")
        return
    out.print(f"{what}; {ending.published} contribution(s) published{unsent}; the unit's own state could NOT be saved")
    if unsent:
        raise typer.Exit(StoreError.exit_code)
