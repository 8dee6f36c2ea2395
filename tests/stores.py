"""Stores that misbehave on purpose, for tests of everything that uses a store.

::

    store = FaultyStore(MemoryStore(), plan={3: Fault.LOST_ANSWER})    # the fourth call is applied, its answer is lost
    store = FaultyStore(inner, seed=7, rates={Fault.FAILED: 0.2, Fault.LOST_ANSWER: 0.1})
    store.down = True                                                  # every call fails until it is False again
    store = FaultyStore(inner, before=lambda call: ...)                # a kill point before each call

Several of them may wrap one inner store, e.g. one for each unit.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from ps_diloco.errors import Unavailable
from ps_diloco.store.base import Buffer, Capabilities, ObjectInfo, Store


class Fault(Enum):
    FAILED = "failed before it was applied"
    LOST_ANSWER = "applied, but the answer was lost"


@dataclass(frozen=True)
class Call:
    """One call, before it is passed on. ``number`` counts the calls of this wrapper from 0."""

    number: int
    verb: str
    key: str


class WrappedStore:
    """Passes everything on to ``inner``; a base for doubles that change one thing."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

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
        return self.inner.get(key, max_bytes=max_bytes, byte_range=byte_range, version=version)

    def put(self, key: str, data: Buffer, *, overwrite: bool = False) -> str | None:
        return self.inner.put(key, data, overwrite=overwrite)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        return self.inner.list(prefix, start_after=start_after)

    def list_prefixes(self, prefix: str) -> Iterator[str]:
        return self.inner.list_prefixes(prefix)

    def list_versions(self, key: str) -> Iterator[ObjectInfo]:
        return self.inner.list_versions(key)

    def delete(self, key: str, *, version: str | None = None) -> None:
        self.inner.delete(key, version=version)

    def close(self) -> None:
        self.inner.close()


class IgnoringCreateStore(WrappedStore):
    """A server that ignores ``If-None-Match`` and answers success, as some do. Nothing may be written to it."""

    def put(self, key: str, data: Buffer, *, overwrite: bool = False) -> str | None:
        return self.inner.put(key, data, overwrite=True)


class FaultyStore(WrappedStore):
    """Fails as told. Thread-safe; with one thread the faults of a seed are the same each time.

    ``plan`` maps numbers of calls to faults; ``rates`` gives every other call a chance of each fault, drawn from ``seed``. A failed read is
    ``Unavailable``, whichever fault it was; a write carries ``maybe_applied=True`` in both cases, as a store cannot know. ``before`` is
    called with each :class:`Call` and may raise (a kill point). A key is left out of the first ``list_lag`` listings that would show it.
    """

    def __init__(
        self,
        inner: Store,
        *,
        plan: Mapping[int, Fault] | None = None,
        seed: int = 0,
        rates: Mapping[Fault, float] | None = None,
        list_lag: int = 0,
        before: Callable[[Call], None] | None = None,
    ) -> None:
        super().__init__(inner)
        self.down = False
        self.before = before
        self.calls: list[Call] = []
        self.faults: list[tuple[Call, Fault]] = []
        self._plan = dict(plan or {})
        self._rates = dict(rates or {})
        self._random = random.Random(seed)
        self._list_lag = list_lag
        self._listed: dict[str, int] = {}  # key -> how many listings could have shown it
        self._frozen: list[ObjectInfo] | None = None
        self._lock = threading.Lock()

    def freeze_lists(self) -> None:
        """From now on listings show what is there now: neither later objects nor later deletions."""
        self._frozen = list(self.inner.list(""))

    def thaw_lists(self) -> None:
        self._frozen = None

    def get(
        self,
        key: str,
        *,
        max_bytes: int | None = None,
        byte_range: tuple[int, int] | None = None,
        version: str | None = None,
    ) -> bytes:
        fault = self._call("get", key)
        self._fail("get", key, fault)
        return self.inner.get(key, max_bytes=max_bytes, byte_range=byte_range, version=version)

    def put(self, key: str, data: Buffer, *, overwrite: bool = False) -> str | None:
        fault = self._call("put", key)
        if fault is Fault.FAILED:
            self._fail("put", key, fault)
        version = self.inner.put(key, data, overwrite=overwrite)
        self._fail("put", key, fault)
        return version

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        fault = self._call("list", prefix)
        self._fail("list", prefix, fault)
        return iter(self._visible(prefix, start_after))

    def list_prefixes(self, prefix: str) -> Iterator[str]:
        fault = self._call("list_prefixes", prefix)
        self._fail("list_prefixes", prefix, fault)
        keys = [info.key for info in self._visible(prefix, "")]
        return iter(sorted({key[: key.index("/", len(prefix)) + 1] for key in keys if "/" in key[len(prefix) :]}))

    def list_versions(self, key: str) -> Iterator[ObjectInfo]:
        fault = self._call("list_versions", key)
        self._fail("list_versions", key, fault)
        return self.inner.list_versions(key)

    def delete(self, key: str, *, version: str | None = None) -> None:
        fault = self._call("delete", key)
        if fault is Fault.FAILED:
            self._fail("delete", key, fault)
        self.inner.delete(key, version=version)
        self._fail("delete", key, fault)

    def _call(self, verb: str, key: str) -> Fault | None:
        with self._lock:
            call = Call(len(self.calls), verb, key)
            self.calls.append(call)
            drawn = self._draw()
            fault = Fault.FAILED if self.down else self._plan.get(call.number, drawn)
            if fault is not None:
                self.faults.append((call, fault))
        if self.before is not None:
            self.before(call)
        return fault

    def _draw(self) -> Fault | None:
        if not self._rates:
            return None
        at = self._random.random()
        for fault, rate in self._rates.items():
            if at < rate:
                return fault
            at -= rate
        return None

    def _fail(self, verb: str, key: str, fault: Fault | None) -> None:
        if fault is not None:
            write = verb in ("put", "delete")
            raise Unavailable("injected fault", maybe_applied=write, fault=fault.name, verb=verb, key=key)

    def _visible(self, prefix: str, start_after: str) -> Sequence[ObjectInfo]:
        if self._frozen is not None:
            return [info for info in self._frozen if info.key.startswith(prefix) and info.key > start_after]
        found = list(self.inner.list(prefix, start_after=start_after))
        if not self._list_lag:
            return found
        with self._lock:
            for info in found:
                self._listed[info.key] = self._listed.get(info.key, 0) + 1
            return [info for info in found if self._listed[info.key] > self._list_lag]
