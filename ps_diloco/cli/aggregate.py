"""``ps-diloco aggregate``: run the aggregator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ps_diloco.cli.context import RunUrl, bytes_text, console, count_text, of, stop_on_signal
from ps_diloco.env import Env
from ps_diloco.run import open_run
from ps_diloco.store import CountingStore

if TYPE_CHECKING:
    from ps_diloco.records import Manifest

FETCH_AHEAD = 3
"""Of a cloud's bucket one connection gives less than a core decodes."""


def aggregate(
    context: typer.Context,
    run: RunUrl,
    once: Annotated[bool, typer.Option("--once", help="Merge whatever is published now, commit, and exit.")] = False,
    poll: Annotated[float, typer.Option(min=0.02, help="Seconds between two looks for new contributions.")] = 0.5,
    part: Annotated[str, typer.Option(metavar="I/N", help="Of N processes this is number I: it steps every N-th fragment first.")] = "1/1",
    threads: Annotated[int, typer.Option(min=1, help="Threads for the arithmetic; several processes with --part give more.")] = 1,
    patience: Annotated[float, typer.Option(min=0.0, help="Seconds after which it steps what another process should have.")] = 10.0,
) -> None:
    """Merge what units publish and commit new versions, until the run ends.

    It keeps nothing of its own: stop it, kill it, start it elsewhere, run two of them; each contribution is merged once. SIGTERM ends it within seconds.
    Where merging is more work than one process can do, start N of them, --part 1/N to --part N/N; if one dies, the others take over its fragments.
    """
    import torch

    from aggregator.fragment_step import Effort
    from aggregator.outer_step import Outcome
    from aggregator.policy import Part
    from aggregator.serve import aggregate_once, serve

    share = Part.parse(part, patience_s=patience)
    effort = Effort(threads=threads, fetch_ahead=FETCH_AHEAD)
    torch.set_num_threads(1)  # threads take chunks, and each chunk is worked on by one
    store = CountingStore(of(context).store(run))
    opened = open_run(store, Env.system())
    out = console()

    def show(outcome: Outcome) -> None:
        if outcome.kind in ("committed", "final"):
            out.print(describe(outcome.head.record))

    if once:
        outcome = aggregate_once(opened, part=share, effort=effort)
        show(outcome)
        if outcome.kind == "idle":
            out.print(f"nothing to merge; head is version {outcome.head.record.version}")
        return
    with stop_on_signal() as stop:
        last = serve(opened, stop=stop, part=share, effort=effort, poll_s=poll, on_outcome=show)
    if last is not None and last.kind == "final":
        out.print(f"the run has ended at version {last.head.record.version} with {count_text(last.head.record.tokens)} tokens")
    else:
        out.print("stopped; everything is in the bucket")
    traffic = store.snapshot()
    out.print(f"read {bytes_text(traffic.bytes_in)}, wrote {bytes_text(traffic.bytes_out)} in {traffic.calls} requests")


def describe(manifest: Manifest) -> str:
    """One line about a version."""
    parts = [
        f"fragment {step.fragment} -> {step.to}: {len(step.merged)} merged, mass {step.mass:.2f}, {step.closed}, "
        f"{bytes_text(sum(merged.size for merged in step.merged))} in, "
        f"{bytes_text(manifest.fragments[step.fragment].deltas[-1].object.size)} out"
        for step in manifest.steps
    ]
    parts.extend(f"refused {refused.contribution}: {refused.reason}" for refused in manifest.refused)
    if manifest.final:
        parts.append("final")
    return f"version {manifest.version} ({count_text(manifest.tokens)} tokens): " + (
        "; ".join(parts) or "nothing stepped; units were listed (they publish from now on) or outer state was saved"
    )
