"""What the commands share: opening a run from its URL, ending on a signal, and how things are shown."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ps_diloco.env import Env
from ps_diloco.run import OpenRun, open_run
from ps_diloco.store import S3Settings, Store, open_store

PLAIN_WIDTH = 160

RunUrl = Annotated[
    str, typer.Argument(metavar="RUN", help="URL of the run: s3://bucket/prefix, gs://bucket/prefix, file:///path, or a plain path.")
]


@dataclass(frozen=True, kw_only=True)
class Context:
    """Options that stand before the command."""

    s3: S3Settings
    trust_exclusive_create: bool = False

    def store(self, url: str) -> Store:
        return open_store(url, s3=self.s3, trust_exclusive_create=self.trust_exclusive_create)

    def run(self, url: str) -> OpenRun:
        return open_run(self.store(url), Env.system())


def of(context: typer.Context) -> Context:
    found = context.find_object(Context)
    assert found is not None
    return found


def console(*, err: bool = False) -> Console:
    """Colours and bars on a terminal, plain text elsewhere."""
    terminal = (sys.stderr if err else sys.stdout).isatty()
    return Console(stderr=err, highlight=False, width=None if terminal else PLAIN_WIDTH)


@contextmanager
def progress(total: int, what: str) -> Iterator[Progress]:
    """A bar on stderr for something with ``total`` parts; one plain line when it is no terminal. Advance task 0."""
    shown = console(err=True)
    if not shown.is_terminal:
        shown.print(f"{what} ...")
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=shown,
        transient=True,
        disable=not shown.is_terminal,
    )
    with bar:
        bar.add_task(what, total=total)
        yield bar


@contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set; a second SIGINT interrupts at once."""
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def bytes_text(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def count_text(count: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f}"
