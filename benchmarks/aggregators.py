"""One aggregator process against two at once, in a directory and on a real S3 server, where merging dominates.

    python -m benchmarks.aggregators                                            # 4 fragments of 10 M parameters, 8 units
    python -m benchmarks.aggregators --params 40_000 --units 2 --rounds 1       # in seconds

Every shard is uploaded beforehand. A round begins when the records that name them are written, all at once, and ends when every fragment has stepped. Each
aggregator is ``ps-diloco aggregate RUN --part I/N``. Server, aggregators and this process, which only polls, share the cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import psutil
import torch

from benchmarks.material import Encoded, Slab, announce, base_of, encoded, new_run, pseudo_gradient, put_shard, unit_names
from benchmarks.measure import ROOT, Cell, Report, file_system, parser
from ps_diloco import keys
from ps_diloco.cli.s3_server import LocalS3Server
from ps_diloco.records import Contribution, Stored, encode
from ps_diloco.records import Manifest as ManifestRecord
from ps_diloco.run import OpenRun
from ps_diloco.store import LocalStore, S3Store, Store

BUCKET = "benchmark"
WAIT_S = 600.0


class Bucket(Protocol):
    """Where the runs of this benchmark are."""

    pid: int
    """Of the process that serves it; this one's own for a directory."""

    def url(self, name: str) -> str: ...
    def store(self, name: str) -> Store: ...
    def env(self) -> Mapping[str, str]: ...
    def is_polled_by(self, process: psutil.Process) -> bool: ...


class ServedBucket:
    """On a local S3 server, which works on the same cores."""

    def __init__(self, server: LocalS3Server) -> None:
        assert server.pid is not None
        self._server, self.pid = server, server.pid
        server.create_bucket(BUCKET, versioned=False)

    def url(self, name: str) -> str:
        return f"s3://{BUCKET}/{name}"

    def store(self, name: str) -> Store:
        return S3Store(BUCKET, name, self._server.settings)

    def env(self) -> Mapping[str, str]:
        return self._server.env()

    def is_polled_by(self, process: psutil.Process) -> bool:
        port = int(self._server.endpoint_url.rpartition(":")[2])
        return any(connection.raddr and connection.raddr.port == port for connection in process.net_connections("tcp"))


class DirectoryBucket:
    """In a directory: nobody but the aggregators works."""

    pid = os.getpid()

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def url(self, name: str) -> str:
        return str(self._directory / name)

    def store(self, name: str) -> Store:
        return LocalStore(self._directory / name)

    def env(self) -> Mapping[str, str]:
        return {}

    def is_polled_by(self, process: psutil.Process) -> bool:
        return bool(process.cpu_times().user)  # the round that is not timed waits for the rest


class Prepared:
    """A run whose shards all stand in the bucket. ``rounds``: the records that are still to be written."""

    def __init__(
        self, bucket: Bucket, name: str, *, params: int, fragments: int, units: int, rounds: int, cuts: dict[int, Encoded]
    ) -> None:
        self.url = bucket.url(name)
        self.run: OpenRun = new_run(bucket.store(name), Slab(params), fragments=fragments, merge={"quorum": units, "merge_at_least": 1.0})
        names = unit_names(units)
        head = announce(self.run, names)
        for fragment in range(fragments):
            if fragment not in cuts or cuts[fragment].section.elements != self.run.layout.fragments[fragment].elements:
                raise ValueError("cuts of another layout")
        self.rounds: list[list[Contribution]] = [
            [
                put_shard(self.run, unit, turn * fragments + fragment, cuts[fragment], base_of(head, fragment))
                for fragment in range(fragments)
                for unit in names
            ]
            for turn in range(rounds)
        ]
        self.head: Stored[ManifestRecord] = self.run.log.find_head()

    def take_round(self, turn: int) -> float:
        """Publish the records of a round; seconds until every fragment has stepped."""
        begun_s = time.perf_counter()
        for record in self.rounds[turn]:
            self.run.store.put(keys.record(record.id), encode(record))
        wait_until(lambda: all(entry.fragment_version > turn for entry in self.newest().fragments), f"round {turn} to be merged")
        return time.perf_counter() - begun_s

    def newest(self) -> ManifestRecord:
        self.head = self.run.log.find_head(self.head)
        return self.head.record


def wait_until(holds: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + WAIT_S
    while not holds():
        if time.monotonic() > until_s:
            raise TimeoutError(f"waited in vain for {what}")
        time.sleep(0.03)


@contextmanager
def aggregators(bucket: Bucket, url: str, count: int) -> Iterator[list[psutil.Process]]:
    """``count`` processes that have begun to poll."""
    environment = (
        os.environ | bucket.env() | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    )
    command = [sys.executable, "-m", "ps_diloco.cli.main", "aggregate", url, "--poll", "0.05"]
    started = []
    try:
        for index in range(count):
            part = ["--part", f"{index + 1}/{count}"] if count > 1 else []
            started.append(subprocess.Popen([*command, *part], stdout=subprocess.DEVNULL, env=environment))
        processes = [psutil.Process(process.pid) for process in started]
        wait_until(lambda: all(bucket.is_polled_by(process) for process in processes), "the aggregators to be there")
        yield processes
    finally:
        for process in started:
            process.kill()
            process.wait()


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def measure(prepared: Prepared, bucket: Bucket, count: int) -> tuple[list[float], list[float], float]:
    """Seconds of each round but the first, which warms up; CPU seconds per such round of each aggregator, and of the server."""
    serving = psutil.Process(bucket.pid)
    with aggregators(bucket, prepared.url, count) as processes:
        prepared.take_round(0)
        before, server_s = [cpu_s(process) for process in processes], cpu_s(serving)
        seconds = [prepared.take_round(turn) for turn in range(1, len(prepared.rounds))]
        rounds = len(seconds)
        used = [(cpu_s(process) - start) / rounds for process, start in zip(processes, before, strict=True)]
        return seconds, used, (cpu_s(serving) - server_s) / rounds


def compare(report: Report, options: argparse.Namespace, bucket: Bucket, where: str) -> None:
    """One aggregator, then several, over equal runs."""
    found = {}
    shape = new_run(bucket.store("shape"), Slab(options.params), fragments=options.fragments)
    cuts = {
        f: encoded(shape, f, pseudo_gradient(size.elements, size=options.size, steps=options.train_steps))
        for f, size in enumerate(shape.layout.fragments)
    }
    many = options.processes
    for count in (1, many):
        prepared = Prepared(
            bucket,
            f"run-{count}",
            params=options.params,
            fragments=options.fragments,
            units=options.units,
            rounds=options.rounds + 1,
            cuts=cuts,
        )
        found[count] = (*measure(prepared, bucket, count), prepared.newest().version)
    one_s, many_s = (statistics.median(found[count][0]) for count in (1, many))
    report.figure(
        f"a round of {options.units} contributions to each of {options.fragments} fragments with {many} aggregators, {where}",
        many_s,
        "s",
        floor=one_s / many,
        floor_is=f"one aggregator's {one_s:.3g} s / {many}",
        target=1 / 0.8,
    )
    report.figure(f"speed of {many} aggregators against one, {where}", one_s / many_s, "times")
    rows: list[tuple[Cell, ...]] = [
        (count, statistics.median(seconds), min(seconds), max(seconds), " + ".join(f"{s:.3g}" for s in used), served_s, version)
        for count, (seconds, used, served_s, version) in found.items()
    ]
    columns = (
        "aggregators",
        "s per round, median",
        "lowest",
        "highest",
        "CPU s of each",
        "CPU s of the server, or of this process",
        "versions",
    )
    report.table(f"Rounds over {options.params / 1e6:g} M parameters, {where}", columns, rows)


def main(argv: Sequence[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--params", type=int, default=40_000_000, help="of the whole model")
    made.add_argument("--fragments", type=int, default=4)
    made.add_argument("--units", type=int, default=8)
    made.add_argument("--rounds", type=int, default=3, help="that are timed; one more warms up")
    made.add_argument("--processes", type=int, default=2)
    made.add_argument("--store", choices=("both", "s3", "directory"), default="both")
    made.add_argument("--directory", type=Path, help="where the data is kept; default: for temporary files")
    made.add_argument("--size", default="0.8M", help="GPT that gives the pseudo-gradients")
    made.add_argument("--train-steps", type=int, default=40, help="its inner steps")
    options = made.parse_args(argv)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    report = Report.begin("aggregators", options, argv)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        if options.store != "s3":
            compare(report, options, DirectoryBucket(Path(directory) / "runs"), "in a directory")
        if options.store != "directory":
            with LocalS3Server(Path(directory) / "s3") as server:
                compare(report, options, ServedBucket(server), "on an S3 server")
        report.note(f"data on {file_system(Path(directory))}; the S3 server's own work shares the cores with the aggregators")
    torch.set_num_threads(threads)
    report.end()


if __name__ == "__main__":
    main()
