"""What the demo shows: a live table while units train, and the summary at the end. Reads plain data, does no I/O but printing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ps_diloco.cli.context import bytes_text, count_text

PLAIN_EVERY_S = 10.0


@dataclass(kw_only=True)
class Ledger:
    """What units said about themselves, over all their incarnations: a killed process's last heartbeat counts too."""

    last: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)

    def note(self, unit: str, row: dict[str, Any]) -> None:
        report = row["report"]
        if "steps" in report:
            self.last[unit, report["incarnation"]] = report

    def total(self, unit: str, name: str) -> float:
        return sum(float(report[name]) for (owner, _), report in self.last.items() if owner == unit)


class View:
    """A live table on a terminal; elsewhere a line per unit now and then."""

    def __init__(self, console: Console, *, target_tokens: int, begun_s: float) -> None:
        self._console = console
        self._target = target_tokens
        self._begun_s = begun_s
        self._printed_s = begun_s
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None

    def __enter__(self) -> View:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def event(self, text: str, now_s: float) -> None:
        """Something worth a line of its own."""
        self._console.print(f"[{now_s - self._begun_s:5.1f} s] {text}", markup=False)

    def show(self, facts: dict[str, Any], now_s: float) -> None:
        if self._live is not None:
            self._live.update(self._table(facts, now_s))
        elif now_s - self._printed_s >= PLAIN_EVERY_S:
            self._printed_s = now_s
            self.event(f"version {facts['version']}, {facts['tokens'] / self._target:.0%} of {count_text(self._target)} tokens", now_s)
            for name, row in facts["units"].items():
                self._console.print(f"          {name}: {_line(row)}", markup=False)

    def _table(self, facts: dict[str, Any], now_s: float) -> Group:
        done = min(1.0, facts["tokens"] / self._target)
        head = Text(
            f"{now_s - self._begun_s:5.1f} s  version {facts['version']:4d}  {count_text(facts['tokens'])} tokens  {done:.0%} of the run"
        )
        table = Table(box=None, pad_edge=False)
        for title in ("unit", "share of the work", "steps", "loss", "version", "merged", "blocked", "state"):
            table.add_column(title, justify="left" if title in ("unit", "state", "share of the work") else "right")
        for name, row in facts["units"].items():
            report = row["report"]
            table.add_row(
                name,
                ProgressBar(total=1.0, completed=row["tokens_merged"] / self._target * 2, width=24),
                str(report.get("inner_steps", "-")),
                f"{report['loss']:.3f}" if report.get("loss") is not None else "-",
                str(report.get("version", "-")),
                str(row["merged"]),
                f"{report.get('blocked_s', 0.0):.2f} s",
                row["state"],
            )
        bar = Table.grid()
        bar.add_row(ProgressBar(total=1.0, completed=done, width=72))
        return Group(head, bar, table)


def _line(row: dict[str, Any]) -> str:
    report = row["report"]
    loss = f"loss {report['loss']:.3f}, " if report.get("loss") is not None else ""
    return f"{report.get('inner_steps', 0)} steps, {loss}holds version {report.get('version', 0)}, {row['merged']} merged, {row['state']}"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Everything the final table says."""

    facts: dict[str, Any]
    ledger: Ledger
    loss_before: float
    loss_after: float
    loss_alone: float
    steps_alone: int
    parameters: int
    seconds: float
    audited: int


def summarise(console: Console, summary: Summary) -> None:
    """Print the final tables."""
    table = Table(box=None, pad_edge=False, title="units", title_justify="left", title_style="bold")
    table.add_column("unit")
    for title in ("steps", "tokens merged", "contributions merged", "refused", "pushed", "pulled", "own state saved", "blocked by sync"):
        table.add_column(title, justify="right")
    ledger = summary.ledger
    for name, row in summary.facts["units"].items():
        blocked_s, elapsed_s = ledger.total(name, "blocked_s"), ledger.total(name, "elapsed_s")
        table.add_row(
            name,
            f"{ledger.total(name, 'steps'):.0f}",
            count_text(row["tokens_merged"]),
            str(row["merged"]),
            str(row["refused"]),
            bytes_text(ledger.total(name, "bytes_pushed")),
            bytes_text(ledger.total(name, "bytes_pulled")),
            bytes_text(ledger.total(name, "bytes_saved")),
            f"{blocked_s:.2f} s ({blocked_s / max(elapsed_s, 1e-9):.2%})",
        )
    console.print()
    console.print(table)
    units = len(summary.facts["units"])
    steps = sum(ledger.total(name, "steps") for name in summary.facts["units"])
    moved = sum(ledger.total(name, "bytes_pushed") + ledger.total(name, "bytes_pulled") for name in summary.facts["units"])
    data_parallel = 4.0 * summary.parameters * steps
    console.print()
    console.print(
        f"run: {summary.facts['version']} versions, {count_text(summary.facts['tokens'])} tokens in {summary.seconds:.0f} s by {units} units; "
        f"{summary.audited} manifests audited: every contribution was decided exactly once",
        markup=False,
    )
    console.print(
        f"traffic: {bytes_text(moved)} of contributions and versions through the bucket; data-parallel training would have moved "
        f"{bytes_text(data_parallel)} for these steps (computed: a bf16 gradient out and in per step), {data_parallel / max(moved, 1.0):.0f}x more",
        markup=False,
    )
    losses = Table(box=None, pad_edge=False, title="held-out loss, nats per byte", title_justify="left", title_style="bold")
    losses.add_column("model")
    losses.add_column("loss", justify="right")
    losses.add_row("global model before (version 0)", f"{summary.loss_before:.3f}")
    losses.add_row(f"one unit alone, {summary.steps_alone} own steps (as many as the fastest unit)", f"{summary.loss_alone:.3f}")
    losses.add_row(f"global model after (version {summary.facts['version']})", f"{summary.loss_after:.3f}")
    console.print()
    console.print(losses)
