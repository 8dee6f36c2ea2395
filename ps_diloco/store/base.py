"""The store contract (format §2): all that ps_diloco asks of a bucket.

A store is thread-safe, keeps no cache, retries nothing on its own beyond what its SDK does within one call, and raises only
:class:`~ps_diloco.errors.StoreError` subclasses (and :class:`LimitExceeded` from ``get``). Every call is bounded by a timeout of the adapter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a store keeps of the contract, as far as it knows itself; ``probe`` checks what safety needs."""

    create_if_absent: bool
    """Of concurrent creates of one key exactly one succeeds."""
    list_is_current: bool
    """A listing shows every object written before it."""
    versions: bool
    """Overwritten bodies stay readable by object version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectInfo:
    """One listed object. ``modified_s`` is the store's own time in seconds since 1970, None if unknown."""

    key: str
    size: int
    version: str | None = None
    modified_s: float | None = None


class Store(Protocol):
    """A bucket prefix. Keys are relative to it, of ``[A-Za-z0-9._/=-]``, without empty, ``.`` or ``..`` segments."""

    @property
    def url(self) -> str:
        """Where this store is, without secrets; what a user would type."""

    @property
    def capabilities(self) -> Capabilities: ...

    def get(
        self,
        key: str,
        *,
        max_bytes: int | None = None,
        byte_range: tuple[int, int] | None = None,
        version: str | None = None,
    ) -> bytes:
        """The object's bytes, or those of ``byte_range`` = (start, end), end exclusive, cut at the object's end.

        Raises :class:`NotFound`, :class:`Denied`, :class:`Unavailable`; :class:`LimitExceeded` if more than ``max_bytes`` would be returned
        (checked before they are read into memory).
        """

    def put(self, key: str, data: Buffer, *, overwrite: bool = False) -> str | None:
        """Write an object whole; return its object version if the store has versions.

        Without ``overwrite`` this is create-if-absent and raises :class:`AlreadyExists`. :class:`Unavailable` with
        ``maybe_applied=True`` when the write may have landed. Readers never see part of an object.
        """

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """All live objects below ``prefix`` with a key greater than ``start_after``, in key order. Pages lazily."""

    def list_prefixes(self, prefix: str) -> Iterator[str]:
        """The distinct next path segments below ``prefix`` (which ends in ``/``), each with its ``/``, whole keys, in order."""

    def list_versions(self, key: str) -> Iterator[ObjectInfo]:
        """All versions of exactly ``key``, newest first, without delete markers. Empty if the store has no versions."""

    def delete(self, key: str, *, version: str | None = None) -> None:
        """Delete an object, or one version of it for good. An absent object is no error."""

    def close(self) -> None:
        """Free connections. Further calls are errors."""
