"""What fsspec promises and what it does not: the last is declared, and refused."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from ps_diloco.cli.context import Context
from ps_diloco.env import Env
from ps_diloco.errors import AlreadyExists, Denied, NotFound, StoreError, Unavailable, UnsupportedStore, UrlError
from ps_diloco.store import FsspecStore, S3Settings, claim_object, open_store, probe_store


def memory() -> MemoryFileSystem:
    return fsspec.filesystem("memory", global_store=False, skip_instance_cache=True)


class Unproven(MemoryFileSystem):  # type: ignore[misc]
    """Has a create of its own, of which nobody knows whether it is atomic."""

    protocol = "unproven"
    cachable = False


class IgnoresCreate(Unproven):
    """Takes ``mode="create"`` and overwrites."""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        super().pipe_file(path, value, **options)


@pytest.fixture
def eager_switching() -> Iterator[None]:
    """Threads hand over so often that a gap between looking and writing is seen."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def test_url_is_shared_within_the_process() -> None:
    store = open_store("fsspec+memory://test-fsspec/a/")
    assert isinstance(store, FsspecStore)
    assert store.url == "fsspec+memory://test-fsspec/a"
    store.put("x/y", b"1")
    assert open_store("fsspec+memory://test-fsspec/a").get("x/y") == b"1"
    assert open_store("fsspec+memory://test-fsspec").get("a/x/y") == b"1"
    assert fsspec.filesystem("memory").cat_file("/test-fsspec/a/x/y") == b"1"
    assert [info.key for info in open_store("fsspec+memory://test-fsspec/b").list("")] == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("fsspec+s3://bucket/x", "write s3://bucket/prefix"),
        ("fsspec+gs://bucket/x", "write gs://bucket/prefix"),
        ("fsspec+file:///path", "write file:///path"),
        ("fsspec+nonsense://x", "fsspec knows no such protocol"),
        ("fsspec+memory://", "names no directory"),
        ("fsspec+memory:///", "names no directory"),
        ("fsspec+sftp://me:secret@host/path", "FSSPEC_SFTP_PASSWORD"),
        ("fsspec+memory:x", "not the URL of a store"),
        ("fsspec+memory//x", "a URL has a colon after its scheme"),
    ],
)
def test_refused_urls(url: str, message: str) -> None:
    with pytest.raises(UrlError) as caught:
        open_store(url)
    assert message in str(caught.value)
    assert "secret" not in str(caught.value)


def test_protocol_whose_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(protocol: str) -> None:
        raise ImportError("Install adlfs to access Azure Datalake Gen2 and Azure Blob Storage")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(UrlError, match="package for this protocol is not installed.*Install adlfs"):
        open_store("fsspec+abfs://container/x")


def test_memory_lets_one_create_through(eager_switching: None, env: Env) -> None:
    """fsspec's own create let more than one of eight threads win in 42 of 300 such rounds."""
    filesystem, rounds, threads = memory(), 60, 8
    system = Env.system()
    barrier = threading.Barrier(threads)
    won: list[tuple[str, bytes]] = []

    def contend(number: int) -> None:
        store = FsspecStore(filesystem, "/races")
        for turn in range(rounds):
            barrier.wait(60)
            body = f"{turn} {number} {system.entropy.attempt_id()}".encode()
            if claim_object(store, env, f"k/{turn:02d}", body).won:
                won.append((f"k/{turn:02d}", body))

    contenders = [threading.Thread(target=contend, args=(number,)) for number in range(threads)]
    for contender in contenders:
        contender.start()
    for contender in contenders:
        contender.join()
    store = FsspecStore(filesystem, "/races")
    assert sorted(won) == [(f"k/{turn:02d}", store.get(f"k/{turn:02d}")) for turn in range(rounds)]


@pytest.mark.parametrize("trust", [False, True])
def test_local_files_of_fsspec_are_refused(tmp_path: Path, env: Env, trust: bool) -> None:
    """They look and then write, whatever the user says: 152 of 300 rounds of eight threads had not exactly one winner."""
    store = FsspecStore(fsspec.filesystem("file"), str(tmp_path), trust_exclusive_create=trust)
    assert not store.capabilities.create_if_absent
    with pytest.raises(UnsupportedStore, match="LocalFileSystem looks whether a name is free and then writes"):
        store.put("a/x", b"1")
    with pytest.raises(UnsupportedStore, match="does not promise create-if-absent"):
        probe_store(store, env)
    assert list(tmp_path.iterdir()) == []
    store.put("a/x", b"1", overwrite=True)  # and yet it can be read, and hints written
    assert [(info.key, info.size) for info in store.list("")] == [("a/x", 1)]
    assert store.get("a/x") == b"1"


def test_unproven_file_system_needs_a_statement(env: Env) -> None:
    filesystem = Unproven(global_store=False)
    store = FsspecStore(filesystem, "/a")
    assert not store.capabilities.create_if_absent
    assert not store.capabilities.list_is_current
    with pytest.raises(UnsupportedStore, match="--trust-exclusive-create, or trust_exclusive_create=True"):
        store.put("x", b"1")
    with pytest.raises(UnsupportedStore):
        probe_store(store, env)
    assert filesystem.find("/") == []
    trusted = FsspecStore(filesystem, "/a", trust_exclusive_create=True)
    probe_store(trusted, env)
    trusted.put("x", b"1")
    with pytest.raises(AlreadyExists):
        trusted.put("x", b"2")


def test_statement_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsspec, "get_filesystem_class", lambda protocol: Unproven)
    assert not Context(s3=S3Settings()).store("fsspec+unproven://x").capabilities.create_if_absent
    assert Context(s3=S3Settings(), trust_exclusive_create=True).store("fsspec+unproven://x").capabilities.create_if_absent


def test_probe_finds_a_wrong_statement(env: Env) -> None:
    store = FsspecStore(IgnoresCreate(global_store=False), "/a", trust_exclusive_create=True)
    with pytest.raises(UnsupportedStore, match="a second create of one key succeeded"):
        probe_store(store, env)


def test_asynchronous_file_system_that_cannot_write(env: Env) -> None:
    class ReadOnly(AsyncFileSystem):  # type: ignore[misc]
        protocol = "readonly"
        cachable = False

    with pytest.raises(UnsupportedStore, match="cannot create at all"):
        FsspecStore(ReadOnly(), "/a", trust_exclusive_create=True).put("x", b"1")


def test_clash_of_an_object_and_a_directory() -> None:
    store = FsspecStore(memory(), "/a")
    store.put("x", b"1")
    with pytest.raises(StoreError, match="cannot hold both an object and objects below its name"):
        store.put("x/y", b"2")
    with pytest.raises(StoreError, match="cannot hold both"):
        store.put("x/y", b"2", overwrite=True)
    assert store.get("x") == b"1"


def test_listing_cache_is_passed_by() -> None:
    asked: list[object] = []

    class Caching(MemoryFileSystem):  # type: ignore[misc]
        cachable = False

        def invalidate_cache(self, path: str | None = None) -> None:
            asked.append(path)

    store = FsspecStore(Caching(global_store=False), "/a")
    store.put("x", b"1")
    list(store.list(""))
    store.get("x")
    assert asked == [None, None]


@pytest.mark.parametrize(
    ("raised", "expected", "maybe_applied"),
    [
        (PermissionError("no"), Denied, None),
        (ConnectionResetError("gone"), Unavailable, True),
        (RuntimeError("some network library"), Unavailable, True),
        (NotImplementedError(), UnsupportedStore, None),
    ],
)
def test_errors(monkeypatch: pytest.MonkeyPatch, raised: Exception, expected: type[Exception], maybe_applied: bool | None) -> None:
    filesystem = memory()
    store = FsspecStore(filesystem, "/a")
    store.put("x", b"1")

    def fail(*arguments: object, **options: object) -> None:
        raise raised

    for name in ("pipe_file", "cat_file", "ls", "rm_file"):
        monkeypatch.setattr(filesystem, name, fail)
    for write, call in (
        (True, lambda: store.put("y", b"2")),
        (True, lambda: store.delete("x")),
        (False, lambda: store.get("x")),
        (False, lambda: list(store.list(""))),
    ):
        with pytest.raises(expected) as caught:
            call()
        assert getattr(caught.value, "maybe_applied", None) == (maybe_applied and write)


def test_file_that_is_replaced_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    filesystem = memory()
    store = FsspecStore(filesystem, "/a")
    store.put("x", b"12345")
    monkeypatch.setattr(filesystem, "cat_file", lambda path, start, end: b"1")
    with pytest.raises(Unavailable, match="another size"):
        store.get("x")


def test_closed() -> None:
    store = FsspecStore(memory(), "/a")
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.put("x", b"1")
    with pytest.raises(NotFound):
        FsspecStore(memory(), "/a").get("x", version="1")
