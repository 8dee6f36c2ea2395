"""``ps-diloco aggregate``: run the aggregator."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from ps_diloco.cli.context import RunUrl, console, count_text, of, stop_on_signal
from ps_diloco.errors import ConfigError

if TYPE_CHECKING:
    from aggregator.policy import Part
    from ps_diloco.records import Manifest


def aggregate(
    context: typer.Context,
    run: RunUrl,
    once: Annotated[bool, typer.Option("--once", help="Merge whatever is published now, commit, and exit.")] = False,
    poll: Annotated[float, typer.Option(min=0.02, help="Seconds between two looks for new contributions.")] = 0.5,
    part: Annotated[str, typer.Option(metavar="I/N", help="Of N processes this is number I: it steps every N-th fragment first.")] = "1/1",
    patience: Annotated[float, typer.Option(min=0.0, help="Seconds after which it steps what another process should have.")] = 10.0,
) -> None:
    """Merge what units publish and commit new versions, until the run ends.

    It keeps nothing of its own: stop it, kill it, start it elsewhere, run two of them; each contribution is merged once. SIGTERM ends it within seconds.
    Where merging is more work than one process can do, start N of them, --part 1/N to --part N/N; if one dies, the others take over its fragments.
    """
    from aggregator.outer_step import Outcome
    from aggregator.serve import aggregate_once, serve

    share = parse_part(part, patience)
    opened = of(context).run(run)
    out = console()

    def show(outcome: Outcome) -> None:
        if outcome.kind in ("committed", "final"):
            out.print(describe(outcome.head.record))

    if once:
        outcome = aggregate_once(opened, part=share)
        show(outcome)
        if outcome.kind == "idle":
            out.print(f"nothing to merge; head is version {outcome.head.record.version}")
        return
    with stop_on_signal() as stop:
        last = serve(opened, stop=stop, part=share, poll_s=poll, on_outcome=show)
    if last is not None and last.kind == "final":
        out.print(f"the run has ended at version {last.head.record.version} with {count_text(last.head.record.tokens)} tokens")
    else:
        out.print("stopped; everything is in the bucket")


def parse_part(text: str, patience_s: float) -> Part:
    """``2/3`` -> the second of three. Raises :class:`ConfigError`."""
    from aggregator.policy import Part

    match = re.fullmatch(r"([1-9][0-9]{0,3})/([1-9][0-9]{0,3})", text, re.ASCII)
    if match is None or int(match[1]) > int(match[2]):
        raise ConfigError("a part is I/N with I from 1 to N", part=repr(text), remedy="write --part 1/2 for the first of two processes")
    return Part(index=int(match[1]) - 1, of=int(match[2]), patience_s=patience_s)


def describe(manifest: Manifest) -> str:
    """One line about a version."""
    parts = [
        f"fragment {step.fragment} -> {step.to}: {len(step.merged)} merged, mass {step.mass:.2f}, {step.closed}" for step in manifest.steps
    ]
    parts.extend(f"refused {refused.contribution}: {refused.reason}" for refused in manifest.refused)
    if manifest.final:
        parts.append("final")
    return f"version {manifest.version} ({count_text(manifest.tokens)} tokens): " + ("; ".join(parts) or "units listed")
