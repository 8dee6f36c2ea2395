"""The processes of the demo: started, watched, killed. They are the same commands that a user types."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from ps_diloco.env import Env
from ps_diloco.errors import PsDilocoError


@dataclass(kw_only=True)
class Member:
    """One command, and the process that runs it now."""

    name: str
    command: list[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    killed: bool = False


@dataclass(kw_only=True)
class Fleet:
    """All processes of a demo. Leaving the context ends them."""

    directory: Path
    environment: dict[str, str]
    env: Env
    members: dict[str, Member] = field(default_factory=dict)

    def start(self, name: str, command: list[str]) -> None:
        """Run ``ps-diloco`` with these arguments; its output goes to ``<name>.log``."""
        member = Member(name=name, command=[sys.executable, "-m", "ps_diloco.cli.main", *command], log=self.directory / f"{name}.log")
        self.members[name] = member
        self.restart(name)

    def restart(self, name: str) -> None:
        member = self.members[name]
        with member.log.open("ab") as log:
            environment = {**os.environ, **self.environment, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
            member.process = subprocess.Popen(member.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        member.killed = False

    def kill(self, name: str) -> None:
        """SIGKILL: no goodbye."""
        member = self.members[name]
        assert member.process is not None
        member.process.send_signal(signal.SIGKILL)
        member.process.wait()
        member.killed = True

    def running(self) -> list[str]:
        return [name for name, member in self.members.items() if member.process is not None and member.process.poll() is None]

    def check(self) -> None:
        """Raise :class:`PsDilocoError` with the end of its log if a process ended in an error that nobody asked for."""
        for member in self.members.values():
            code = member.process.poll() if member.process is not None else None
            if code not in (None, 0) and not member.killed:
                tail = member.log.read_text(errors="replace").strip().splitlines()[-8:]
                raise PsDilocoError("a process of the demo failed", name=member.name, exit=code, log=member.log, end="\n" + "\n".join(tail))

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        """Ask politely, then insist."""
        for name in self.running():
            process = self.members[name].process
            assert process is not None
            process.terminate()
        deadline_s = self.env.clock.monotonic() + 10.0
        while self.running() and self.env.clock.monotonic() < deadline_s:
            self.env.clock.sleep(0.1)
        for name in self.running():
            self.kill(name)
