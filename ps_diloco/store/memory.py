"""A store in the memory of this process: for tests, simulation and ``memory://`` URLs.

::

    store = MemoryStore()            # private
    store = named_store("demo")      # the one that open_store("memory://demo") gives
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass

from ps_diloco.env import Clock
from ps_diloco.errors import AlreadyExists, NotFound
from ps_diloco.store.base import Buffer, Capabilities, ObjectInfo
from ps_diloco.store.names import check_directory, check_key, check_limit, check_prefix, check_range, clip_range

_AFTER_ALL = "\x7f"  # greater than every character of a key


@dataclass(frozen=True, slots=True)
class _Version:
    id: str
    body: bytes | None  # None: a delete marker
    modified_s: float | None


class MemoryStore:
    """Keeps every version, as a versioned bucket does. Thread-safe. ``clock`` gives ``modified_s``; without one it is unknown."""

    def __init__(self, name: str = "unnamed", *, clock: Clock | None = None) -> None:
        self._name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._versions: dict[str, list[_Version]] = {}  # oldest first
        self._live: list[str] = []  # sorted keys of the objects that are not deleted
        self._writes = 0

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(create_if_absent=True, list_is_current=True, versions=True)

    def get(
        self,
        key: str,
        *,
        max_bytes: int | None = None,
        byte_range: tuple[int, int] | None = None,
        version: str | None = None,
    ) -> bytes:
        check_key(key)
        check_range(byte_range)
        with self._lock:
            body = self._body(key, version)
        if body is None:
            facts = {} if version is None else {"version": version}
            raise NotFound("no such object", key=key, url=self.url, **facts)
        start, end = clip_range(byte_range, len(body))
        check_limit(key, end - start, max_bytes)
        return body[start:end]

    def put(self, key: str, data: Buffer, *, overwrite: bool = False) -> str | None:
        check_key(key)
        body = bytes(data)
        with self._lock:
            if not overwrite and self._body(key, None) is not None:
                raise AlreadyExists("object exists", key=key, url=self.url)
            return self._append(key, body)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        with self._lock:
            first = max(bisect_left(self._live, prefix), bisect_right(self._live, start_after))
            found = [self._info(key, self._versions[key][-1]) for key in self._live[first : bisect_left(self._live, prefix + _AFTER_ALL)]]
        return iter(found)

    def list_prefixes(self, prefix: str) -> Iterator[str]:
        check_directory(prefix)
        with self._lock:
            keys = self._live[bisect_left(self._live, prefix) : bisect_left(self._live, prefix + _AFTER_ALL)]
        found = {key[: key.index("/", len(prefix)) + 1] for key in keys if "/" in key[len(prefix) :]}
        return iter(sorted(found))

    def list_versions(self, key: str) -> Iterator[ObjectInfo]:
        check_key(key)
        with self._lock:
            found = [self._info(key, version) for version in reversed(self._versions.get(key, [])) if version.body is not None]
        return iter(found)

    def delete(self, key: str, *, version: str | None = None) -> None:
        check_key(key)
        with self._lock:
            if version is None:
                if self._body(key, None) is not None:
                    self._append(key, None)
                return
            kept = [old for old in self._versions.get(key, []) if old.id != version]
            if kept:
                self._versions[key] = kept
            else:
                self._versions.pop(key, None)
            self._note_live(key)

    def close(self) -> None:
        """Nothing to free. Named stores keep their objects."""

    def _body(self, key: str, version: str | None) -> bytes | None:
        versions = self._versions.get(key, [])
        if version is None:
            return versions[-1].body if versions else None
        return next((old.body for old in versions if old.id == version), None)

    def _append(self, key: str, body: bytes | None) -> str:
        self._writes += 1
        modified_s = self._clock.monotonic() if self._clock is not None else None
        entry = _Version(f"{self._writes:016d}", body, modified_s)
        self._versions.setdefault(key, []).append(entry)
        self._note_live(key)
        return entry.id

    def _note_live(self, key: str) -> None:
        at = bisect_left(self._live, key)
        listed = at < len(self._live) and self._live[at] == key
        live = self._body(key, None) is not None
        if live and not listed:
            insort(self._live, key)
        elif listed and not live:
            del self._live[at]

    @staticmethod
    def _info(key: str, version: _Version) -> ObjectInfo:
        return ObjectInfo(key=key, size=len(version.body or b""), version=version.id, modified_s=version.modified_s)


_named: dict[str, MemoryStore] = {}
_named_lock = threading.Lock()


def named_store(name: str) -> MemoryStore:
    """The store of this name in this process, made on first use. Thread-safe."""
    with _named_lock:
        return _named.setdefault(name, MemoryStore(name))
