"""One object up and down through our S3 store, against plain boto3 and against a plain socket, on a local S3 server (SeaweedFS).

    python -m benchmarks.transfer                        # 1 GB
    python -m benchmarks.transfer --size 30_000_000      # in seconds

``put`` and ``get`` are the store alone; ``put_data`` and ``fetch`` are what the system calls: the same with the object's hash. Client, server and, for the
socket, the peer share the machine's cores. The server writes to a directory for temporary files.
"""

from __future__ import annotations

import hashlib
import io
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import boto3
import google_crc32c
import numpy as np
import psutil
from botocore.config import Config

from benchmarks.measure import Cell, Report, Stages, file_system, median_s, parser, ratio_text, with_unit
from ps_diloco.cli.s3_server import LocalS3Server
from ps_diloco.env import Env
from ps_diloco.store import S3Store
from ps_diloco.store.refs import fetch, put_data

BUCKET = "benchmark"
PIECE = 1 << 20
STAGES = {
    "ps_diloco.store.refs.put_data": "put: hash apart, waiting and everything else",
    "ps_diloco.store.refs.fetch": "get: hash apart, waiting and everything else",
    "hashlib.sha256": "sha256 of the object",
    "botocore.auth.SigV4Auth.payload": "signing: sha256 of the request's body",
    "botocore.httpchecksum.resolve_request_checksum_algorithm": "checksum of the SDK",
    "botocore.httpchecksum.apply_request_checksum": "checksum of the SDK",
    "botocore.httpsession.URLLib3Session.send": "HTTP: send the body, wait for the answer's head",
    "botocore.response.StreamingBody.read": "HTTP: read the body",
    "botocore.httpchecksum.StreamingChecksumBody.read": "HTTP: read the body, checksum of the SDK",
    "ps_diloco.store.s3.S3Store.put": "store: copies, threads, waiting",
    "ps_diloco.store.s3.S3Store.get": "store: copies, threads, waiting",
}
PEER = """
import socket, sys
port, size, way = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
piece = bytearray(1 << 20)
with socket.create_connection(("127.0.0.1", port)) as peer:
    left = size
    while left:
        left -= peer.recv_into(piece, min(left, len(piece))) if way == "up" else peer.send(memoryview(piece)[: min(left, len(piece))])
    peer.sendall(b".")
"""


def socket_s(data: bytes, way: str) -> float:
    """Seconds to send ``data`` to another process through the loopback, or to receive as much into new memory."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        peer = subprocess.Popen([sys.executable, "-c", PEER, port, str(len(data)), way])
        connection, _ = server.accept()
        with connection:
            begun_s = time.perf_counter()
            if way == "up":
                connection.sendall(data)
            else:
                received, position = memoryview(bytearray(len(data))), 0
                while position < len(data):
                    position += connection.recv_into(received[position : position + PIECE])
            connection.recv(1)
            taken_s = time.perf_counter() - begun_s
        peer.wait()
    return taken_s


class Ways:
    """Each way to write and to read ``data``; a fresh key every time."""

    def __init__(self, server: LocalS3Server, data: bytes) -> None:
        self.data = data
        self.env = Env.system()
        self.store = S3Store(BUCKET, "ours", server.settings)
        access_key, secret_key = server.settings.credentials or ("", "")
        self.client: Any = boto3.client(
            "s3",
            endpoint_url=server.endpoint_url,
            region_name=server.settings.region,
            aws_access_key_id=access_key,
            aws_secret_access_key=secret_key,
            config=Config(read_timeout=300, s3={"addressing_style": "path"}),
        )
        self.ref = put_data(self.store, self.env, "standing", data)
        self.count = 0

    def key(self) -> str:
        self.count += 1
        return f"object-{self.count}"

    def up(self) -> dict[str, Callable[[], object]]:
        def upload_fileobj() -> None:
            self.client.upload_fileobj(io.BytesIO(self.data), BUCKET, self.key())

        return {
            "ours: put_data (with hash)": lambda: put_data(self.store, self.env, self.key(), self.data),
            "ours: store.put": lambda: self.store.put(self.key(), self.data),
            "boto3 upload_fileobj": upload_fileobj,
            "boto3 put_object": lambda: self.client.put_object(Bucket=BUCKET, Key=self.key(), Body=self.data),
        }

    def down(self) -> dict[str, Callable[[], object]]:
        where = {"Bucket": BUCKET, "Key": "ours/standing"}

        def download_fileobj() -> None:
            self.client.download_fileobj(BUCKET, where["Key"], io.BytesIO())

        return {
            "ours: fetch (with hash)": lambda: fetch(self.store, self.ref),
            "ours: store.get": lambda: self.store.get("standing"),
            "boto3 download_fileobj": download_fileobj,
            "boto3 get_object, read": lambda: self.client.get_object(**where)["Body"].read(),
        }

    def clear(self) -> None:
        """Delete what was written, so that the server's disk does not fill."""
        for number in range(1, self.count + 1):
            for prefix in ("", "ours/"):
                self.client.delete_object(Bucket=BUCKET, Key=f"{prefix}object-{number}")


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def compare(report: Report, server: LocalS3Server, data: bytes, repeats: int) -> None:
    ways, serving, own = Ways(server, data), psutil.Process(server.pid), psutil.Process()
    for way, calls in (("up", ways.up()), ("down", ways.down())):
        floor_s = statistics.median(socket_s(data, way) for _ in range(repeats + 1))
        rows: list[tuple[Cell, ...]] = [(f"plain socket, {way}", floor_s, with_unit(len(data) / floor_s, "B/s"), "1.00x", None, None)]
        for name, call in calls.items():
            seconds, own_s, server_s = [], 0.0, 0.0
            for turn in range(repeats + 1):
                before = cpu_s(own), cpu_s(serving)
                begun_s = time.perf_counter()
                call()
                if turn:
                    seconds.append(time.perf_counter() - begun_s)
                    own_s, server_s = own_s + cpu_s(own) - before[0], server_s + cpu_s(serving) - before[1]
            ways.clear()
            taken_s = statistics.median(seconds)
            rows.append(
                (name, taken_s, with_unit(len(data) / taken_s, "B/s"), ratio_text(taken_s / floor_s), own_s / repeats, server_s / repeats)
            )
            report.figure(f"{way}: {name}", taken_s, "s", floor=floor_s, floor_is="as many bytes through a plain socket")
        report.table(f"{len(data) / 1e6:g} MB {way}", ("way", "s", "speed", "x socket", "own CPU s", "server CPU s"), rows)
        first, call = next(iter(calls.items()))
        begun_s = time.perf_counter()
        with Stages(STAGES) as stages:
            call()
        whole_s = time.perf_counter() - begun_s
        report.table(
            f"Stages of {first}: seconds of all its threads together, in a call of {whole_s:.3g} s",
            ("stage", "thread s"),
            [(stage, seconds) for stage, seconds, _ in stages.rows(sum(stages.seconds.values()), rest="smaller ones")],
        )


def pieces(report: Report, data: bytes) -> None:
    """What single passes over the bytes cost, on one thread."""
    rows = [
        ("sha256", median_s(lambda: hashlib.sha256(data).digest(), 3)),
        ("crc32c", median_s(lambda: google_crc32c.value(data), 3)),
        ("copy into fresh memory", median_s(lambda: bytearray(data), 3)),
    ]
    rows.append(("crc32 (zlib, what boto3 sends by default)", median_s(lambda: zlib.crc32(data), 3)))
    report.table(
        "Single passes over the bytes, one thread", ("pass", "s", "speed"), [(n, s, with_unit(len(data) / s, "B/s")) for n, s in rows]
    )


def main(argv: Sequence[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--size", type=int, default=1_000_000_000, help="bytes of the object")
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--directory", type=Path, help="where the server keeps its data; default: for temporary files")
    options = made.parse_args(argv)
    report = Report.begin("transfer", options, argv)
    data = np.random.default_rng(0).bytes(options.size)
    pieces(report, data)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory, LocalS3Server(Path(directory) / "s3") as server:
        server.create_bucket(BUCKET, versioned=False)
        compare(report, server, data, options.repeats)
        report.note(f"server data on {file_system(Path(directory))}; random bytes, which nothing compresses")
    report.end()


if __name__ == "__main__":
    main()
