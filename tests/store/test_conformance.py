"""The store contract (``ps_diloco/store/base.py``), the same for every store."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from ps_diloco.env import Env
from ps_diloco.errors import AlreadyExists, InvariantViolation, LimitExceeded, NotFound
from ps_diloco.store import CountingStore, MemoryStore, S3Settings, S3Store, Store, probe_store
from tests.conftest import BUCKET, STORES
from tests.stores import FaultyStore

# In key order. A directory walk would give another order: "-" and "." are less than "/", digits and letters greater.
TRICKY = ["a", "b-a/x", "b-c", "b.c", "b.c.d/x", "b/-", "b/a", "b/a-b", "b/c/d/e"]
TRICKY += ["b0", "b=1/x", "bb", "c_d/x/y", "d/0-e/x", "d/0/x", "d/00"]


def keys_of(store: Store, prefix: str, **options: str) -> list[str]:
    return [info.key for info in store.list(prefix, **options)]


def test_create_once_then_read(store: Store) -> None:
    store.put("a/b.json", b"one")
    assert store.get("a/b.json") == b"one"
    with pytest.raises(AlreadyExists):
        store.put("a/b.json", b"two")
    assert store.get("a/b.json") == b"one"


def test_overwrite_replaces_and_creates(store: Store) -> None:
    store.put("head.json", b"first", overwrite=True)
    store.put("head.json", b"2", overwrite=True)
    assert store.get("head.json") == b"2"
    with pytest.raises(AlreadyExists):
        store.put("head.json", b"3")


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_is_copied(store: Store, kind: Callable[[bytes], bytes]) -> None:
    store.put("x", kind(b"abc"))
    assert store.get("x") == b"abc"
    assert type(store.get("x")) is bytes


def test_what_is_absent(store: Store) -> None:
    for key in ("a", "a/b"):
        with pytest.raises(NotFound, match=key):
            store.get(key)
        with pytest.raises(NotFound):
            store.get(key, byte_range=(0, 4))
        with pytest.raises(NotFound):
            store.get(key, byte_range=(0, 0))
        store.delete(key)
        assert list(store.list_versions(key)) == []
    assert list(store.list("")) == []
    assert list(store.list("a/")) == []
    assert list(store.list_prefixes("")) == []
    assert list(store.list_prefixes("a/")) == []
    store.put("a/b/c", b"")
    for key in ("a", "a/b", "a/b/c/d"):
        with pytest.raises(NotFound):
            store.get(key)


def test_ranges_end_at_the_end(store: Store) -> None:
    store.put("x", b"0123456789")
    assert store.get("x", byte_range=(0, 10)) == b"0123456789"
    assert store.get("x", byte_range=(2, 5)) == b"234"
    assert store.get("x", byte_range=(9, 10)) == b"9"
    assert store.get("x", byte_range=(7, 1000)) == b"789"
    assert store.get("x", byte_range=(3, 3)) == b""
    assert store.get("x", byte_range=(10, 12)) == b""
    assert store.get("x", byte_range=(100, 200)) == b""


def test_limit_is_checked_before_reading(store: Store) -> None:
    store.put("x", b"0123456789")
    assert store.get("x", max_bytes=10) == b"0123456789"
    with pytest.raises(LimitExceeded, match="size=10 limit=9"):
        store.get("x", max_bytes=9)
    assert store.get("x", byte_range=(0, 4), max_bytes=4) == b"0123"
    assert store.get("x", byte_range=(8, 99), max_bytes=4) == b"89"
    with pytest.raises(LimitExceeded):
        store.get("x", byte_range=(0, 5), max_bytes=4)


def test_empty_object(store: Store) -> None:
    store.put("empty", b"")
    assert store.get("empty") == b""
    assert store.get("empty", max_bytes=0) == b""
    assert store.get("empty", byte_range=(0, 5)) == b""
    assert [(info.key, info.size) for info in store.list("")] == [("empty", 0)]
    with pytest.raises(AlreadyExists):
        store.put("empty", b"")


def test_large_object(store: Store) -> None:
    data = bytes(range(256)) * 2**15  # 8 MiB
    store.put("large.shard", data)
    assert store.get("large.shard") == data
    assert store.get("large.shard", byte_range=(2**22 - 1, 2**22 + 2)) == b"\xff\x00\x01"
    assert next(iter(store.list("large"))).size == len(data)


def test_list_is_in_key_order(store: Store) -> None:
    assert sorted(TRICKY) == TRICKY
    for key in reversed(TRICKY):
        store.put(key, key.encode())
    assert [(info.key, info.size) for info in store.list("")] == [(key, len(key)) for key in TRICKY]
    for prefix in ("b", "b/", "b/a", "b-", "b.c", "b/c/", "b/c/d", "d/0", "d/0/", "z", "a"):
        assert keys_of(store, prefix) == [key for key in TRICKY if key.startswith(prefix)], prefix


def test_list_starts_after_a_key(store: Store) -> None:
    """As the format does it: within the directories of one unit or timeline, whose names all have one length."""
    names = [f"{n:020d}{end}" for n in (0, 1) for end in ("-ab.shard", ".json")]
    wanted = [f"units/{unit}/t000000/{k:06d}/{name}" for unit in ("us", "us-east") for k in (0, 1) for name in names]
    for key in wanted:
        store.put(key, b"")
    for prefix in ("units/us/", "units/us/t000000/", "units/us-east/t000000/000001/"):
        below = [key for key in wanted if key.startswith(prefix)]
        for start_after in (*below, below[0][:-5], prefix, "a", "v"):
            assert keys_of(store, prefix, start_after=start_after) == [key for key in below if key > start_after], (prefix, start_after)


@pytest.mark.parametrize("store", [kind for kind in STORES if kind != "seaweedfs"], indirect=True)  # see S3Store.list
def test_list_starts_after_any_text(store: Store) -> None:
    for key in TRICKY:
        store.put(key, b"")
    for prefix in ("", "b", "b/", "d/", "d/0"):
        for start_after in (*TRICKY, "b", "b/", "b/b", "b/c", "b/c/", "b/c/d", "d/0", "d/0-", "d/0/", "zzz", "-"):
            wanted = [key for key in TRICKY if key.startswith(prefix) and key > start_after]
            assert keys_of(store, prefix, start_after=start_after) == wanted, (prefix, start_after)


def test_list_has_times_of_the_store(store: Store) -> None:
    store.put("x", b"1")
    (info,) = store.list("")
    assert info.modified_s is None or info.modified_s > 1e9


def test_list_prefixes_gives_next_segments(store: Store) -> None:
    for key in TRICKY:
        store.put(key, b"")
    assert list(store.list_prefixes("")) == ["b-a/", "b.c.d/", "b/", "b=1/", "c_d/", "d/"]
    assert list(store.list_prefixes("b/")) == ["b/c/"]
    assert list(store.list_prefixes("b/c/d/")) == []
    assert list(store.list_prefixes("d/")) == ["d/0-e/", "d/0/"]


def test_delete(store: Store) -> None:
    store.put("a/b/c", b"1")
    store.put("a/d", b"2")
    store.delete("a/b/c")
    store.delete("a/b/c")
    with pytest.raises(NotFound):
        store.get("a/b/c")
    assert keys_of(store, "") == ["a/d"]
    store.put("a/b/c", b"3")  # a deleted name is absent, so it may be created
    assert store.get("a/b/c") == b"3"


@pytest.mark.parametrize("store", [kind for kind in STORES if kind != "moto"], indirect=True)  # moto 5.2.5 shows a prefix of delete markers
def test_no_prefix_without_objects(store: Store) -> None:
    store.put("a/b/c", b"1")
    store.put("a/d", b"2")
    store.delete("a/b/c")
    assert list(store.list_prefixes("a/")) == []
    assert list(store.list_prefixes("")) == ["a/"]


def test_versions(store: Store) -> None:
    versions = [store.put("head.json", body, overwrite=True) for body in (b"1", b"22", b"333")]
    store.put("head.json.other", b"x", overwrite=True)
    if not store.capabilities.versions:
        assert versions == [None, None, None]
        assert list(store.list_versions("head.json")) == []
        with pytest.raises(NotFound):
            store.get("head.json", version="1")
        return
    assert len(set(versions)) == 3
    assert None not in versions
    listed = list(store.list_versions("head.json"))
    assert [(info.key, info.version, info.size) for info in listed] == [("head.json", versions[n], n + 1) for n in (2, 1, 0)]
    assert store.get("head.json", version=versions[0]) == b"1"
    assert store.get("head.json", version=versions[1], byte_range=(1, 9), max_bytes=1) == b"2"
    store.delete("head.json")
    with pytest.raises(NotFound):
        store.get("head.json")
    assert [info.version for info in store.list_versions("head.json")] == [versions[n] for n in (2, 1, 0)]
    assert store.get("head.json", version=versions[2]) == b"333"
    assert store.put("head.json", b"4") not in versions


@pytest.mark.parametrize("store", ["memory", "moto", "seaweedfs"], indirect=True)  # fake-gcs-server 1.54 deletes the live one instead
def test_deleting_one_version(store: Store) -> None:
    versions = [store.put("head.json", body, overwrite=True) for body in (b"1", b"22", b"333")]
    store.delete("head.json", version=versions[1])
    store.delete("head.json", version=versions[1])
    with pytest.raises(NotFound):
        store.get("head.json", version=versions[1])
    assert store.get("head.json") == b"333"
    store.delete("head.json")
    assert [info.version for info in store.list_versions("head.json")] == [versions[2], versions[0]]
    assert store.get("head.json", version=versions[2]) == b"333"


def test_bad_names_are_our_own_bug(store: Store) -> None:
    for key in ("", "/a", "a/", "a//b", "..", "../a", "a/../b", "a/./b", "a b", "ä", "a\n", "a~", "x" * 1001):
        with pytest.raises(InvariantViolation):
            store.get(key)
        with pytest.raises(InvariantViolation):
            store.put(key, b"")
        with pytest.raises(InvariantViolation):
            store.delete(key)
        with pytest.raises(InvariantViolation):
            list(store.list_versions(key))
    for prefix in ("/", "a//", "../", "a b", "ä"):
        with pytest.raises(InvariantViolation):
            list(store.list(prefix))
    with pytest.raises(InvariantViolation):
        list(store.list_prefixes("a"))
    with pytest.raises(InvariantViolation):
        store.get("a", byte_range=(3, 2))


def test_probe_accepts(store: Store, env: Env) -> None:
    probe_store(store, env)
    assert list(store.list("")) == []
    assert store.capabilities.create_if_absent


def test_url_has_no_secret(store: Store) -> None:
    assert store.url.partition("://")[0] in ("memory", "file", "s3", "gs", "fsspec+memory")
    assert "testtest" not in store.url + repr(getattr(store, "settings", ""))


def test_more_than_a_page(moto_settings: S3Settings) -> None:
    store = S3Store(BUCKET, "pages", moto_settings)
    wanted = [f"n/{number:05d}/x" for number in range(1001)]
    for key in wanted:
        store.put(key, b"", overwrite=True)
    assert keys_of(store, "n/") == wanted
    assert keys_of(store, "n/", start_after=wanted[0]) == wanted[1:]
    assert list(store.list_prefixes("n/")) == [key[:-1] for key in wanted]


def test_memory_list_of_many() -> None:
    store = MemoryStore()
    wanted = [f"{number:05d}" for number in range(2500)]
    for key in wanted:
        store.put(key, b"")
    assert keys_of(store, "") == wanted


def test_threads_racing_on_one_store(store: Store) -> None:
    """Four threads of one process share one store object. For S3 servers few rounds: a contended create takes seconds there."""
    rounds, threads = (2 if store.url.startswith("s3") else 40), 4
    barrier = threading.Barrier(threads)
    winners: list[tuple[str, int]] = []

    def race(number: int) -> None:
        for turn in range(rounds):
            barrier.wait(60)
            try:
                store.put(f"race/{turn}", str(number).encode())
            except AlreadyExists:
                continue
            winners.append((f"race/{turn}", number))

    racers = [threading.Thread(target=race, args=(number,)) for number in range(threads)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert sorted(key for key, _ in winners) == keys_of(store, "race/")
    for key, number in winners:
        assert store.get(key) == str(number).encode()


def test_counting(store: Store) -> None:
    faulty = FaultyStore(store)
    counting = CountingStore(faulty)
    counting.put("a/x", b"12345")
    with pytest.raises(AlreadyExists):
        counting.put("a/x", memoryview(b"123"))
    assert counting.get("a/x", byte_range=(0, 2)) == b"12"
    with pytest.raises(NotFound):
        counting.get("a/y")
    assert [info.key for info in counting.list("a/")] == ["a/x"]
    assert list(counting.list_prefixes("")) == ["a/"]
    list(counting.list_versions("a/x"))
    faulty.down = True
    with pytest.raises(Exception, match="injected"):
        counting.delete("a/x")
    with pytest.raises(Exception, match="injected"):
        list(counting.list("a/"))
    traffic = counting.snapshot()
    assert (traffic.bytes_in, traffic.bytes_out, traffic.errors, traffic.calls) == (2, 8, 2, 9)
    assert (traffic.verbs["put"].calls, traffic.verbs["list"].calls, traffic.verbs["list"].errors) == (2, 2, 1)
    assert counting.url == store.url
    assert counting.capabilities == store.capabilities
