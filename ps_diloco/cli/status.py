"""``ps-diloco status``: a run at a glance, from the bucket alone."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.table import Table

from ps_diloco import keys
from ps_diloco.cli.context import RunUrl, bytes_text, console, count_text, of
from ps_diloco.env import SystemClock
from ps_diloco.records import Manifest
from ps_diloco.run import OpenRun
from ps_diloco.unit.heart import read_heartbeat

SILENT_BEATS = 4


def status(
    context: typer.Context,
    run: RunUrl,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show head, progress and units: what was merged and refused, and what each unit last reported about itself."""
    opened = of(context).run(run)
    head = opened.log.find_head().record
    settings = opened.config(head.config)
    facts = gather(opened, head)
    if as_json:
        typer.echo(json.dumps({**facts, "target_tokens": settings.target_tokens}, sort_keys=True))
        return
    out = console()
    target = f" of {count_text(settings.target_tokens)} ({head.tokens / settings.target_tokens:.1%})" if settings.target_tokens else ""
    out.print(f"run {opened.record.name!r} at {opened.store.url}")
    out.print(
        f"version {head.timeline}:{head.version}{' (final)' if head.final else ''} of {head.created_at}, {count_text(head.tokens)} tokens{target}"
    )
    fragments = " ".join(str(entry.fragment_version) for entry in head.fragments)
    out.print(f"{count_text(opened.layout.elements)} parameters in {len(head.fragments)} fragment(s) at version(s) {fragments}")
    if not facts["units"]:
        joins = f"ps-diloco unit {run} --name NAME" if opened.record.program else "ps_diloco.join, from the program that created it"
        out.print(f"no units yet; start one with: {joins}")
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("unit")
    for title in ("incarnation", "steps", "tokens", "loss", "version", "merged", "refused", "lost", "pushed", "pulled", "blocked"):
        table.add_column(title, justify="right")
    table.add_column("state")
    for name, row in facts["units"].items():
        report = row["report"]
        table.add_row(
            name,
            str(row["incarnation"]),
            str(report.get("inner_steps", "-")),
            count_text(report["tokens"]) if "tokens" in report else "-",
            f"{report['loss']:.3f}" if report.get("loss") is not None else "-",
            str(report.get("version", "-")),
            str(row["merged"]),
            str(row["refused"]),
            count_text(row["lost_tokens"]),
            bytes_text(report["bytes_pushed"]) if "bytes_pushed" in report else "-",
            bytes_text(report["bytes_pulled"]) if "bytes_pulled" in report else "-",
            f"{report['blocked_s']:.1f} s" if "blocked_s" in report else "-",
            row["state"],
        )
    out.print(table)


def _heard_s(run: OpenRun, unit: str) -> float | None:
    """Age of a unit's heartbeat, by the store's time against this machine's clock; None if the store does not say."""
    found = next(run.store.list(keys.heartbeat(unit)), None)
    return None if found is None or found.modified_s is None else SystemClock().wall_s() - found.modified_s


def gather(run: OpenRun, head: Manifest) -> dict[str, Any]:
    """Head and units as plain data. Heartbeats are hints: what they say is shown, never relied on. Does I/O: one GET per unit."""
    units: dict[str, Any] = {}
    for name, entry in sorted(head.units.items()):
        beat = read_heartbeat(run, name)
        heard_s = _heard_s(run, name)
        if beat is None:
            state = "no heartbeat"
        elif beat.ended is not None:
            state = f"ended: {beat.ended}"
        elif beat.report.get("away_s"):
            state = f"bucket away for {beat.report['away_s']:.0f} s"
        elif heard_s is not None and heard_s > SILENT_BEATS * beat.interval_s:
            state = f"silent for {heard_s:.0f} s"
        else:
            state = "training"
        units[name] = {
            "incarnation": entry.incarnation,
            "region": entry.region,
            "tokens_merged": entry.tokens / len(head.fragments),
            "merged": entry.merged,
            "refused": entry.refused,
            "lost_tokens": entry.lost,
            "state": state,
            "report": beat.report if beat is not None else {},
        }
    return {
        "name": run.record.name,
        "run_id": run.run_id,
        "timeline": head.timeline,
        "version": head.version,
        "final": head.final,
        "tokens": head.tokens,
        "fragment_versions": [entry.fragment_version for entry in head.fragments],
        "units": units,
    }
