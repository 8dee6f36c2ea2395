"""``ps-diloco init``: create a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from ps_diloco.cli.context import RunUrl, console, count_text, of, progress
from ps_diloco.config import CreateSettings, RunSettings, parse_settings, read_toml, set_dotted
from ps_diloco.env import Env
from ps_diloco.errors import UrlError
from ps_diloco.run import create_run


def init(
    context: typer.Context,
    run: RunUrl = "",
    config: Annotated[Path | None, typer.Option("--config", "-c", help="TOML file with settings; see --example.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", "-s", metavar="SECTION.NAME=VALUE", help="Set one setting; may be repeated.")
    ] = None,
    example: Annotated[bool, typer.Option("--example", help="Print every setting with its default and meaning as TOML, and exit.")] = False,
) -> None:
    """Create a run: probe the bucket, write the settings and version 0 of the model.

    A bucket that does not honour create-if-absent is refused before anything is written.
    """
    from workers.model import build_model
    from workers.settings import ProgramSettings

    class InitSettings(RunSettings):
        run: CreateSettings = CreateSettings()
        program: ProgramSettings = ProgramSettings()

    if example:
        typer.echo(_example(InitSettings))
        return
    if not run:
        raise typer.BadParameter("name the run, for example s3://bucket/runs/first", param_hint="RUN")
    if run.startswith(("memory:", "fsspec+memory:")):
        raise UrlError("a memory store lives in one process and is gone with it", url=run, remedy="use a directory or a bucket")
    values = read_toml(config) if config else {}
    for assignment in set_ or []:
        set_dotted(values, assignment)
    settings = parse_settings(InitSettings, values, source=str(config) if config else "--set")
    store = of(context).store(run)
    model = build_model(settings.program.model, settings.run.seed)
    with progress(1, f"creating {store.url}") as bar:
        created = create_run(
            store,
            Env.system(),
            model,
            create=settings.run,
            settings=RunSettings(**{name: getattr(settings, name) for name in RunSettings.model_fields}),
            program=settings.program.model_dump(mode="json"),
        )
        bar.advance(bar.task_ids[0])
    out = console()
    layout = created.layout
    out.print(f"created run {created.record.name!r} at {store.url}")
    out.print(f"  {count_text(layout.elements)} parameters in {len(layout.fragments)} fragment(s), seed {created.record.seed}")
    if settings.target_tokens is None:
        out.print("  no target_tokens: the run goes on until you stop it, with a constant learning rate")
    out.print(
        f"next: ps-diloco aggregate {run}\n      ps-diloco unit {run} --name us-east-1a     (on every machine that trains, each with its own name)"
    )


def _example(settings: type[BaseModel]) -> str:
    """All settings with defaults as TOML, from their models, so that it is never out of date."""
    lines: list[str] = []
    _section(lines, settings, "")
    return "\n".join(lines).strip()


def _section(lines: list[str], model: type[BaseModel], path: str) -> None:
    nested: list[tuple[str, type[BaseModel]]] = []
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            nested.append((f"{path}.{name}".lstrip("."), type(default)))
        elif not (isinstance(default, tuple) and default and isinstance(default[0], BaseModel)):
            about = f"  # {field.description}" if field.description else ""
            empty = default is None or default is PydanticUndefined
            lines.append(f"{'# ' if empty else ''}{name} = {'...' if empty else _toml(default)}{about}")
    for inner, kind in nested:
        lines.extend(("", f"[{inner}]"))
        _section(lines, kind, inner)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return repr(value)
