"""A store that counts what passes through it: the "bytes pushed and pulled" of reports and benchmarks.

::

    store = CountingStore(open_store(url))
    ...
    traffic = store.snapshot()
    print(traffic.bytes_in, traffic.bytes_out, traffic.verbs["put"].calls)
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

from ps_diloco.errors import AlreadyExists, NotFound, StoreError
from ps_diloco.store.base import Buffer, Capabilities, ObjectInfo, Store

VERBS = ("get", "put", "list", "list_prefixes", "list_versions", "delete")


@dataclass(frozen=True, kw_only=True, slots=True)
class VerbTraffic:
    """Totals of one verb. ``errors`` counts failures; "not found" and "exists" are answers, not failures."""

    calls: int = 0
    bytes_in: int = 0
    """Object bytes pulled."""
    bytes_out: int = 0
    """Object bytes given to ``put``, whatever its answer."""
    errors: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Totals since the store was wrapped: object bytes, without protocol overhead and the SDK's own retries."""

    verbs: Mapping[str, VerbTraffic]

    @property
    def calls(self) -> int:
        return sum(verb.calls for verb in self.verbs.values())

    @property
    def bytes_in(self) -> int:
        return sum(verb.bytes_in for verb in self.verbs.values())

    @property
    def bytes_out(self) -> int:
        return sum(verb.bytes_out for verb in self.verbs.values())

    @property
    def errors(self) -> int:
        return sum(verb.errors for verb in self.verbs.values())


class CountingStore:
    """Passes every call to ``inner`` and counts it. Thread-safe. A listing is one call, however many pages it has."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self._lock = threading.Lock()
        self._verbs = {verb: VerbTraffic() for verb in VERBS}

    def snapshot(self) -> Traffic:
        """A consistent copy of the totals."""
        with self._lock:
            return Traffic(verbs=MappingProxyType(dict(self._verbs)))

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def get(
        self,
        key: str,
        *,
        max_bytes: int | None = None,
        byte_range: tuple[int, int] | None = None,
        version: str | None = None,
    ) -> bytes:
        with self._counted("get"):
            data = self.inner.get(key, max_bytes=max_bytes, byte_range=byte_range, version=version)
        self._add("get", bytes_in=len(data))
        return data

    def put(self, key: str, data: Buffer, *, overwrite: bool = False) -> str | None:
        self._add("put", bytes_out=memoryview(data).nbytes)
        with self._counted("put"):
            return self.inner.put(key, data, overwrite=overwrite)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        with self._counted("list"):
            yield from self.inner.list(prefix, start_after=start_after)

    def list_prefixes(self, prefix: str) -> Iterator[str]:
        with self._counted("list_prefixes"):
            yield from self.inner.list_prefixes(prefix)

    def list_versions(self, key: str) -> Iterator[ObjectInfo]:
        with self._counted("list_versions"):
            yield from self.inner.list_versions(key)

    def delete(self, key: str, *, version: str | None = None) -> None:
        with self._counted("delete"):
            self.inner.delete(key, version=version)

    def close(self) -> None:
        self.inner.close()

    @contextmanager
    def _counted(self, verb: str) -> Iterator[None]:
        self._add(verb, calls=1)
        try:
            yield
        except (NotFound, AlreadyExists):
            raise
        except StoreError:
            self._add(verb, errors=1)
            raise

    def _add(self, verb: str, *, calls: int = 0, bytes_in: int = 0, bytes_out: int = 0, errors: int = 0) -> None:
        with self._lock:
            old = self._verbs[verb]
            self._verbs[verb] = VerbTraffic(
                calls=old.calls + calls,
                bytes_in=old.bytes_in + bytes_in,
                bytes_out=old.bytes_out + bytes_out,
                errors=old.errors + errors,
            )
