"""What every benchmark shares: options, medians, where the time goes, and the report that is printed and written as JSON.

::

    options = parser(__doc__).parse_args(argv)
    report = Report.begin("codec", options, argv)
    report.figure("encode int4", seconds, "s", floor=read_s, floor_is="reading the values once", target=20)
    report.table("Stages", ("stage", "s"), rows)
    report.end()
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table as RichTable

ROOT = Path(__file__).resolve().parent.parent
PATCHED_PACKAGES = ("ps_diloco", "aggregator", "workers", "benchmarks", "botocore")
Cell = str | float | int | None


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured number beside what it cannot fall below. ``target`` is the largest ratio to the floor that is good enough."""

    what: str
    value: float
    unit: str
    floor: float | None = None
    floor_is: str = ""
    target: float | None = None

    @property
    def ratio(self) -> float | None:
        return self.value / self.floor if self.floor else None


@dataclass(frozen=True, kw_only=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(kw_only=True)
class Report:
    """All that one run of a benchmark found."""

    benchmark: str
    command: str
    machine: dict[str, Cell]
    options: argparse.Namespace
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @staticmethod
    def begin(benchmark: str, options: argparse.Namespace, argv: Sequence[str] | None) -> Report:
        words = list(sys.argv[1:] if argv is None else argv)
        while "--json" in words:
            at = words.index("--json")
            del words[at : at + 2]
        words = [word for word in words if word != "--provisional"]
        return Report(
            benchmark=benchmark, command=" ".join(["python -m", f"benchmarks.{benchmark}", *words]), machine=machine(), options=options
        )

    def figure(
        self, what: str, value: float, unit: str, *, floor: float | None = None, floor_is: str = "", target: float | None = None
    ) -> None:
        self.figures.append(Figure(what=what, value=value, unit=unit, floor=floor, floor_is=floor_is, target=target))

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        self.tables.append(Table(title=title, columns=tuple(columns), rows=tuple(tuple(row) for row in rows)))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def figures_table(self) -> Table:
        rows = [
            (figure.what, with_unit(figure.value, figure.unit))
            + ((with_unit(figure.floor, figure.unit), figure.floor_is) if figure.floor is not None else ("", ""))
            + (ratio_text(figure.ratio), ratio_text(figure.target))
            for figure in self.figures
        ]
        return Table(title="Figures", columns=("figure", "measured", "floor", "the floor is", "ratio", "target"), rows=tuple(rows))

    def show(self) -> None:
        console = Console(highlight=False, width=None if sys.stdout.isatty() else 180)
        for table in (self.figures_table(), *self.tables):
            shown = RichTable(title=f"{self.benchmark}: {table.title}", title_justify="left")
            for index, column in enumerate(table.columns):
                shown.add_column(column, justify="left" if index == 0 else "right")
            for row in table.rows:
                shown.add_row(*(cell_text(cell) for cell in row))
            console.print(shown)
        for text in self.notes:
            console.print(f"- {text}")
        console.print(", ".join(f"{name} {value}" for name, value in self.machine.items()))
        console.print(self.command)

    def end(self) -> None:
        """Print, and write what ``--json`` asks for."""
        self.show()
        if self.options.json is not None:
            values = {
                "benchmark": self.benchmark,
                "command": self.command,
                "provisional": self.options.provisional,
                "machine": self.machine,
                "figures": [asdict(figure) | {"ratio": figure.ratio} for figure in self.figures],
                "tables": [asdict(table) for table in (self.figures_table(), *self.tables)],
                "notes": self.notes,
            }
            self.options.json.write_text(json.dumps(values, indent=1) + "\n")


def parser(description: str | None) -> argparse.ArgumentParser:
    """With the options that every benchmark has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, metavar="FILE", help="also write everything to this file")
    made.add_argument("--provisional", action="store_true", help="say in the file that the machine was not quiet")
    return made


def counts(text: str) -> list[int]:
    """``25_000_000,500_000_000`` as numbers: the type of an option."""
    return [int(part) for part in text.split(",")]


def machine() -> dict[str, Cell]:
    """What the figures depend on. ``load`` is that of the last minute before: near 0 on a quiet machine."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "ram_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "isa": torch.backends.cpu.get_cpu_capability(),
        "load": round(os.getloadavg()[0], 2),
        "revision": _revision(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%MZ"),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor() or "unknown")


def _revision() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def file_system(directory: Path) -> str:
    """Kind of the file system that ``directory`` is on: tmpfs is memory."""
    mounts = [p for p in psutil.disk_partitions(all=True) if directory.resolve().is_relative_to(p.mountpoint)]
    return max(mounts, key=lambda p: len(p.mountpoint)).fstype if mounts else "unknown"


def medians(calls: Mapping[str, Callable[[], object]], repeats: int, *, warm: int = 1) -> dict[str, float]:
    """Seconds of each call, medians. Every round runs each call once, so that drift of the machine hits all of them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(warm + repeats):
        gc.collect()
        for name, call in calls.items():
            begun_s = time.perf_counter()
            call()
            if turn >= warm:
                seconds[name].append(time.perf_counter() - begun_s)
    return {name: statistics.median(found) for name, found in seconds.items()}


def median_s(call: Callable[[], object], repeats: int, *, warm: int = 1, before: Callable[[], object] = lambda: None) -> float:
    """Seconds of ``call``, median; ``before`` runs before each, untimed."""
    seconds = []
    for turn in range(warm + repeats):
        before()
        begun_s = time.perf_counter()
        call()
        if turn >= warm:
            seconds.append(time.perf_counter() - begun_s)
    return statistics.median(seconds)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Stages:
    """Seconds by stage while the real code runs: named functions are wrapped, and each one's time is its own, without that of wrapped ones inside.

    ::

        with Stages({"ps_diloco.zstd.compress": "zstd", "hashlib.sha256": "sha256"}) as stages:
            ...
        stages.seconds["zstd"]

    A stage named without ``: `` takes the group of the stage that it runs in: ``sha256`` within ``contribution: load`` is ``contribution: sha256``.
    A function that does not exist (any more) is left out and named in ``missing``: its time counts where it is called from. Several threads add up.
    """

    def __init__(self, functions: Mapping[str, str]) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self.missing: list[str] = []
        self._functions = functions
        self._undo: list[tuple[Any, str, Any]] = []
        self._lock = threading.Lock()
        self._inside = threading.local()

    def __enter__(self) -> Stages:
        for path, stage in self._functions.items():
            owner_path, _, name = path.rpartition(".")
            owner = _resolve(owner_path)
            original = None if owner is None else vars(owner).get(name)
            if original is None:
                self.missing.append(path)
                continue
            timed = self._timed(original, stage)
            holders = [owner]
            if not isinstance(owner, type):  # whoever wrote ``from module import name`` holds it too
                holders += [m for key, m in list(sys.modules.items()) if m is not owner and key.split(".")[0] in PATCHED_PACKAGES]
            for holder in holders:
                for held, value in list(vars(holder).items()):
                    if value is original:
                        self._undo.append((holder, held, value))
                        setattr(holder, held, timed)
        return self

    def __exit__(self, *_: object) -> None:
        for holder, name, original in reversed(self._undo):
            setattr(holder, name, original)
        self._undo.clear()

    def add(self, stage: str, seconds: float) -> None:
        with self._lock:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
            self.calls[stage] = self.calls.get(stage, 0) + 1

    def rows(self, whole_s: float, *, rest: str = "everything else", smallest: float = 0.003) -> list[tuple[str, float, str]]:
        """(stage, seconds, share) with the largest first; ``rest`` is what of ``whole_s`` no stage accounts for, and stages with a smaller share."""
        found = {stage: seconds for stage, seconds in self.seconds.items() if seconds >= smallest * whole_s}
        found[rest] = whole_s - sum(found.values())
        return [(stage, seconds, f"{seconds / whole_s:.1%}") for stage, seconds in sorted(found.items(), key=lambda pair: -pair[1])]

    def _timed(self, original: Any, stage: str) -> Any:
        function = original.__func__ if isinstance(original, staticmethod) else original

        @functools.wraps(function, updated=())
        def timed(*arguments: Any, **options: Any) -> Any:
            outer_s, group = getattr(self._inside, "spent_s", 0.0), getattr(self._inside, "group", "")
            self._inside.spent_s = 0.0
            if ": " in stage:
                self._inside.group = stage.partition(": ")[0] + ": "
            begun_s = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                spent_s = time.perf_counter() - begun_s
                self.add(stage if ": " in stage else group + stage, spent_s - self._inside.spent_s)
                self._inside.spent_s, self._inside.group = outer_s + spent_s, group

        return staticmethod(timed) if isinstance(original, staticmethod) else timed


def _resolve(path: str) -> Any:
    """The module or class of a dotted path; None if there is none."""
    try:
        return importlib.import_module(path)
    except ImportError:
        module, _, name = path.rpartition(".")
        return getattr(_resolve(module), name, None) if module else None


def fresh_bytes(call: Callable[[], object]) -> int:
    """Memory that the operating system had to map for ``call`` in this thread: page faults, each as dear as copying its page several times."""
    who = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)
    before = resource.getrusage(who).ru_minflt
    call()
    return (resource.getrusage(who).ru_minflt - before) * resource.getpagesize()


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def cell_text(cell: Cell) -> str:
    if isinstance(cell, float):
        return f"{cell:.3g}" if abs(cell) < 1000 else f"{cell:,.0f}"
    return "" if cell is None else f"{cell:,}" if isinstance(cell, int) else cell


def ratio_text(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x" if ratio < 100 else f"{ratio:.0f}x"


def with_unit(value: float, unit: str) -> str:
    """``0.0123 s`` as ``12.3 ms``, bytes in MB, and so on."""
    if unit == "s":
        for name, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
            if abs(value) >= size or name == "us":
                return f"{value / size:.3g} {name}"
    if unit == "B":
        for name, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0)):
            if abs(value) >= size or name == "B":
                return f"{value / size:.3g} {name}"
    if unit == "B/s":
        return with_unit(value, "B") + "/s"
    return f"{cell_text(value)} {unit}".rstrip()
