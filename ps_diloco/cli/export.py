"""``ps-diloco export``: a version's weights as a file."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

import safetensors.torch
import torch
import typer

from ps_diloco.cli.context import RunUrl, console, of, progress
from ps_diloco.errors import ConfigError, NotFound
from ps_diloco.weights import read_weights

SUFFIXES = (".safetensors", ".pt", ".pth")


def export(
    context: typer.Context,
    run: RunUrl,
    out: Annotated[Path, typer.Argument(help="File to write: .safetensors, or .pt for a plain PyTorch state dict.")],
    version: Annotated[str | None, typer.Option("--version", help="Which version, as 12 or 0:12; default: the newest.")] = None,
    float32: Annotated[
        bool, typer.Option("--float32", help="Parameters of a bfloat16 or float16 model as the run keeps them, not rounded to its dtype.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write the weights of a version to a file that fits the model's load_state_dict. Every hash is checked on the way."""
    if out.suffix not in SUFFIXES:
        raise ConfigError("the file's ending says its format", file=out, known=" ".join(SUFFIXES))
    if out.exists() and not force:
        raise ConfigError("the file exists", file=out, remedy="choose another name, or add --force")
    if not out.parent.is_dir():
        raise ConfigError("the directory does not exist", directory=out.parent)
    opened = of(context).run(run)
    head = opened.log.find_head()
    chosen = head if version is None else opened.log.read(*_parse(version, head.record.timeline))
    if chosen is None:
        raise NotFound("the run has no such version", version=version, newest=head.record.version)
    with progress(len(chosen.record.fragments), f"reading version {chosen.record.version}") as bar:
        weights = read_weights(opened, chosen.record, float32=float32, on_fragment=lambda: bar.advance(bar.task_ids[0]))
    partial = out.with_name(out.name + ".partial")
    if out.suffix == ".safetensors":
        about = {"run_id": opened.run_id, "version": f"{chosen.record.timeline}:{chosen.record.version}", "manifest": chosen.sha256}
        safetensors.torch.save_file(weights, partial, metadata=about)
    else:
        torch.save(weights, partial)
    os.replace(partial, out)
    console().print(f"wrote version {chosen.record.timeline}:{chosen.record.version}, {len(weights)} tensors, to {out}")


def _parse(text: str, timeline: int) -> tuple[int, int]:
    """``12`` or ``0:12`` as (timeline, version)."""
    match = re.fullmatch(r"(?:(\d{1,6}):)?(\d{1,15})", text, re.ASCII)
    if match is None:
        raise ConfigError("a version is a number, or timeline:number", version=repr(text))
    return int(match[1] or timeline), int(match[2])
