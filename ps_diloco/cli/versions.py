"""``ps-diloco versions``: the history of a run."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.table import Table

from ps_diloco.cli.context import RunUrl, bytes_text, console, count_text, of
from ps_diloco.records import Manifest


def versions(
    context: typer.Context,
    run: RunUrl,
    last: Annotated[int, typer.Option("--last", "-l", min=1, help="How many, from the newest backwards.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """List versions, newest first: what each merged, and how far the run was."""
    opened = of(context).run(run)
    head = opened.log.find_head()
    manifest: Manifest | None = head.record
    rows: list[Manifest] = []
    while manifest is not None and len(rows) < last:
        rows.append(manifest)
        parent = manifest.parent
        found = opened.log.read(parent.timeline, parent.version) if parent is not None else None
        manifest = found.record if found is not None else None
    if as_json:
        for row in rows:
            typer.echo(json.dumps(summary(row), sort_keys=True))
        return
    table = Table(box=None, pad_edge=False)
    for title in ("version", "written", "tokens", "steps", "merged", "refused", "pushed", "published", "closed", "update norm"):
        table.add_column(title, justify="right" if title not in ("written", "closed", "steps") else "left")
    for row in rows:
        facts = summary(row)
        table.add_row(
            f"{row.timeline}:{row.version}" + (" final" if row.final else ""),
            row.created_at,
            count_text(row.tokens),
            " ".join(f"f{step.fragment}>{step.to}" for step in row.steps) or "-",
            str(facts["merged"]),
            str(facts["refused"]),
            bytes_text(facts["bytes_pushed"]),
            bytes_text(facts["bytes_published"]),
            ",".join(sorted({step.closed for step in row.steps})) or "-",
            " ".join(f"{step.update_norm:.3g}" for step in row.steps) or "-",
        )
    console().print(table)


def published_bytes(manifest: Manifest) -> int:
    """Bytes of the objects that this version's steps wrote: updates, and outer state and anchors where they were due."""
    total = 0
    for step in manifest.steps:
        entry = manifest.fragments[step.fragment]
        total += entry.deltas[-1].object.size
        total += entry.state.object.size if entry.state is not None and entry.state.fragment_version == step.to else 0
        total += sum(ref.size for ref in entry.anchor.objects) if entry.anchor.fragment_version == step.to else 0
    return total


def summary(manifest: Manifest) -> dict[str, Any]:
    """The facts of a version that scripts ask for."""
    return {
        "timeline": manifest.timeline,
        "version": manifest.version,
        "created_at": manifest.created_at,
        "tokens": manifest.tokens,
        "final": manifest.final,
        "config": manifest.config,
        "fragment_versions": [entry.fragment_version for entry in manifest.fragments],
        "merged": sum(len(step.merged) for step in manifest.steps),
        "refused": len(manifest.refused),
        "bytes_pushed": sum(merged.size for step in manifest.steps for merged in step.merged),
        "bytes_published": published_bytes(manifest),
        "steps": [
            {
                "fragment": step.fragment,
                "to": step.to,
                "closed": step.closed,
                "mass": step.mass,
                "contributions": [merged.contribution for merged in step.merged],
                "staleness": [merged.staleness for merged in step.merged],
                "update_norm": step.update_norm,
            }
            for step in manifest.steps
        ],
    }
