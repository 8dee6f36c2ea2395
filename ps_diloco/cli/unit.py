"""``ps-diloco unit``: run the ready training program as one unit."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from ps_diloco.cli.context import RunUrl, console, count_text, of, stop_on_signal
from ps_diloco.env import Env

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
        reason = train(
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
    ends = {
        ExitReason.RUN_ENDED: "the run has reached its target; the final version is in the bucket",
        ExitReason.STOPPED: "stopped; work published, state saved. The same command goes on from here",
        ExitReason.STEPS_DONE: "all steps done; work published, state saved",
    }
    out.print(ends[reason])
