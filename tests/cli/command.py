"""Runs ``ps-diloco`` as a user does: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

TINY = [
    *(
        "--set",
        "program.model.width=16",
        "--set",
        "program.model.heads=2",
        "--set",
        "program.model.layers=1",
        "--set",
        "program.model.context=16",
    ),
    *(
        "--set",
        "program.train.batch_size=2",
        "--set",
        "program.train.threads=1",
        "--set",
        "unit.sync_every=5",
        "--set",
        "run.num_fragments=2",
    ),
]
PREFIX = [sys.executable, "-m", "ps_diloco.cli.main"]


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return {**plain, "AWS_EC2_METADATA_DISABLED": "true", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(extra or {})}


def run(*arguments: str, extra: dict[str, str] | None = None, timeout_s: float = 100.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PREFIX, *arguments], capture_output=True, text=True, env=environment(extra), timeout=timeout_s)


class Processes:
    """Commands that run beside the test; whatever is left is killed with it."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str, extra: dict[str, str] | None = None) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*PREFIX, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(extra)
        )
        self._started.append(process)
        return process

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()
