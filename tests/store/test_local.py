"""What only a directory does: files, hard links, other processes' view, broken disks."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from ps_diloco.errors import AlreadyExists, Denied, NotFound, StoreError, Unavailable, UnsupportedStore
from ps_diloco.store import LocalStore, open_store
from ps_diloco.store.local import TEMPORARY


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "deep" / "root")


def failing(number: int) -> Any:
    def call(*arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


def test_missing_root_is_an_empty_store(store: LocalStore) -> None:
    assert list(store.list("")) == []
    assert list(store.list_prefixes("a/")) == []
    with pytest.raises(NotFound):
        store.get("a")
    store.delete("a")
    assert not store.root.exists()
    store.put("a", b"1")
    assert (store.root / "a").read_bytes() == b"1"


def test_home_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert LocalStore("~/run").root == tmp_path / "run"


def test_no_temporary_file_stays_or_is_listed(store: LocalStore) -> None:
    store.put("a", b"1")
    store.put("a", b"2", overwrite=True)
    with pytest.raises(AlreadyExists):
        store.put("a", b"3")
    assert list((store.root / TEMPORARY).iterdir()) == []
    (store.root / TEMPORARY / "left-over").write_bytes(b"half")
    (store.root / "not a key").write_bytes(b"")
    assert [info.key for info in store.list("")] == ["a"]
    assert list(store.list_prefixes("")) == []


def test_files_of_others_are_readable_by_the_umask(store: LocalStore) -> None:
    store.put("a", b"1")
    mask = os.umask(0)
    os.umask(mask)
    assert (store.root / "a").stat().st_mode & 0o777 == 0o666 & ~mask


def test_delete_removes_empty_directories(store: LocalStore) -> None:
    store.put("a/b/c", b"1")
    store.put("a/d", b"2")
    store.delete("a/b/c")
    assert not (store.root / "a" / "b").exists()
    store.delete("a/d")
    assert store.root.is_dir()
    assert not (store.root / "a").exists()


def test_empty_directories_are_no_prefixes(store: LocalStore) -> None:
    store.put("x/y", b"1")
    (store.root / "a" / "b").mkdir(parents=True)
    assert list(store.list_prefixes("")) == ["x/"]
    assert [info.key for info in store.list("")] == ["x/y"]


def test_a_name_cannot_be_file_and_directory(store: LocalStore) -> None:
    store.put("a/b", b"1")
    store.put("c", b"2")
    for key in ("a", "c/d", "c/d/e"):
        for overwrite in (False, True):
            with pytest.raises(StoreError, match="both an object and objects below its name"):
                store.put(key, b"3", overwrite=overwrite)
    assert [info.key for info in store.list("")] == ["a/b", "c"]


def test_denied(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("a", b"1")
    for number in (errno.EACCES, errno.EROFS):
        with monkeypatch.context() as patch, pytest.raises(Denied, match=r"key=b .*; give this user read and write permission below"):
            patch.setattr(os, "open", failing(number))
            store.put("b", b"1")
    with monkeypatch.context() as patch, pytest.raises(Denied):
        patch.setattr(os, "scandir", failing(errno.EACCES))
        list(store.list(""))


def test_full_disk_before_and_after_the_object_has_its_name(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(Unavailable, match="No space left") as caught:
        patch.setattr(os, "fsync", failing(errno.ENOSPC))
        store.put("b", b"1")
    assert not caught.value.maybe_applied
    assert isinstance(caught.value.__cause__, OSError)
    with monkeypatch.context() as patch, pytest.raises(Unavailable, match="Input/output") as caught:
        patch.setattr(os, "link", failing(errno.EIO))
        store.put("b", b"1")
    assert caught.value.maybe_applied
    assert list((store.root / TEMPORARY).iterdir()) == []
    assert list(store.list("")) == []


def test_file_system_without_hard_links(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", failing(errno.EPERM))
    with pytest.raises(UnsupportedStore, match="no hard links"):
        store.put("a", b"1")
    store.put("a", b"2", overwrite=True)


def test_name_too_long_for_the_file_system(store: LocalStore) -> None:
    with pytest.raises(StoreError, match="too long"):
        store.put("x" * 300, b"1")


def test_left_over_with_the_next_temporary_name(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps_diloco.store.local._temporary_numbers", iter([5, 6]))
    (store.root / TEMPORARY).mkdir(parents=True)
    (store.root / TEMPORARY / f"{os.getpid()}-5").write_bytes(b"old")
    store.put("a", b"1")
    assert store.get("a") == b"1"


def test_readers_see_whole_objects(store: LocalStore) -> None:
    bodies = [bytes([value]) * 2_000_000 for value in (1, 2)]
    store.put("head", bodies[0])
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for body in bodies:
                store.put("head", body, overwrite=True)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(100):
            assert store.get("head") in bodies
    finally:
        stop.set()
        writer.join()


def test_creates_beside_deletes_of_the_last_neighbour(store: LocalStore) -> None:
    """The directory may vanish between its making and the link."""
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            store.put("d/e/x", b"", overwrite=True)
            store.delete("d/e/x")

    other = threading.Thread(target=churn)
    other.start()
    try:
        for turn in range(100):
            store.put(f"d/e/{turn}", b"1")
            assert store.get(f"d/e/{turn}") == b"1"
            store.delete(f"d/e/{turn}")
    finally:
        stop.set()
        other.join()


def test_listing_while_objects_vanish(store: LocalStore) -> None:
    for key in ("a", "b/x", "c"):
        store.put(key, b"")
    listing = store.list("")
    assert next(listing).key == "a"
    store.delete("b/x")
    store.delete("c")
    assert list(listing) == []


def test_two_stores_on_one_directory(tmp_path: Path) -> None:
    first, second = LocalStore(tmp_path), open_store(f"file://{tmp_path}")
    first.put("a", b"1")
    with pytest.raises(AlreadyExists):
        second.put("a", b"2")


def test_a_directory_that_is_gone_is_unavailable_and_is_not_made_anew(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    store.put("a", b"1")
    assert store.get("a") == b"1"
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    for call in (lambda: store.get("a"), lambda: store.put("b", b"2"), lambda: list(store.list("")), lambda: store.delete("a")):
        with pytest.raises(Unavailable, match="gone"):
            call()
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    with pytest.raises(Unavailable, match="another one"):
        store.put("b", b"2")
    (tmp_path / "run").rmdir()
    (tmp_path / "elsewhere").rename(tmp_path / "run")
    store.put("b", b"2")
    assert [info.key for info in store.list("")] == ["a", "b"]
