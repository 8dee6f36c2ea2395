"""The local S3 server: several at once, data kept, nothing left behind, clear errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from ps_diloco.cli import local_server
from ps_diloco.cli.s3_server import LocalS3Server
from ps_diloco.env import Env
from ps_diloco.errors import ConfigError, Denied, StoreError
from ps_diloco.store import S3Settings, open_store

ROOT = Path(__file__).parents[2]


def is_alive(pid: int) -> bool:
    """Whether the process runs (not merely waits to be reaped)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_child_process_follows_the_environment(seaweed: LocalS3Server, seaweed_url: str) -> None:
    code = f"from ps_diloco.store import open_store; open_store({seaweed_url!r}).put('from/child', b'hello')"
    env = os.environ | {"AWS_SESSION_TOKEN": "from another login", "PYTHONPATH": str(ROOT)} | seaweed.env()
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=env, cwd=ROOT)
    store = open_store(seaweed_url, s3=seaweed.settings)
    assert store.get("from/child") == b"hello"
    assert store.capabilities.versions


def test_it_checks_credentials(seaweed: LocalS3Server, seaweed_url: str) -> None:
    for credentials in (("test", "wrong"), ("wrong", "testtest")):
        settings = S3Settings(endpoint_url=seaweed.endpoint_url, region="us-east-1", credentials=credentials)
        with pytest.raises(Denied, match="AWS_ACCESS_KEY_ID"):
            open_store(seaweed_url, s3=settings).get("x")


def test_second_server_beside_the_first_keeps_its_directory(seaweed: LocalS3Server, tmp_path: Path) -> None:
    with LocalS3Server(tmp_path) as other:
        assert other.endpoint_url != seaweed.endpoint_url
        other.create_bucket("plain", versioned=False)
        other.create_bucket("plain", versioned=False)
        store = open_store("s3://plain/x", s3=other.settings)
        assert not store.capabilities.versions
        assert store.put("a", b"1") is None
        assert list(store.list_versions("a")) == []
        pid = other.pid
        assert pid is not None
    assert not is_alive(pid)
    assert other.pid is None
    assert json.loads((tmp_path / "s3.json").read_text())["identities"]
    other.stop()


def test_server_dies_with_its_owner() -> None:
    code = (
        "import os, signal, time\n"
        "from ps_diloco.cli.s3_server import LocalS3Server\n"
        "server = LocalS3Server().start()\n"
        "print(server.pid, flush=True)\n"
        "print(server._directory, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=90, env=env, cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    pid, directory = done.stdout.decode().split()
    clock = Env.system().clock
    deadline = clock.monotonic() + 20
    while (is_alive(int(pid)) or Path(directory).exists()) and clock.monotonic() < deadline:
        clock.sleep(0.05)
    assert not is_alive(int(pid))
    assert not Path(directory).exists()


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(local_server, "distribution", none)
    with pytest.raises(ConfigError, match=r"pip install 'ps-diloco\[demo\]'"):
        LocalS3Server().start()


def test_server_that_does_not_come_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "weed"
    program.write_text("#!/bin/sh\necho the disk is gone\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(LocalS3Server, "_program", lambda server: program)
    with pytest.raises(StoreError, match="(?s)did not come up.*the disk is gone"):
        LocalS3Server().start()


def test_lost_port_is_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "weed"
    program.write_text(f"#!/bin/sh\necho x >> {tmp_path}/starts\necho bind: address already in use\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(LocalS3Server, "_program", lambda server: program)
    with pytest.raises(StoreError, match="address already in use"):
        LocalS3Server().start()
    assert (tmp_path / "starts").read_text() == "x\n" * 3
