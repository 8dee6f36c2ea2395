"""A store on any other file system of fsspec, as far as that keeps the contract. With ``workers/data.py`` the only module that uses fsspec.

::

    store = open_store("fsspec+abfs://container/runs/a")               # account and key from fsspec's configuration or environment
    store = FsspecStore(fsspec.filesystem("memory"), "/runs/a")

What fsspec does not promise, and so neither does this store:

- **Create-if-absent.** Most file systems of fsspec look whether the name is free and then write; racing processes overwrite each other. So the
  capability is true only for the protocols in ``EXCLUSIVE``, or if the user says so (``trust_exclusive_create``); without it ``put`` creates nothing.
- **Timeouts.** They are options of each file system, under its own names.
- **Object versions**, checksums, and listings in pages: a listing reads one directory at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from ps_diloco.errors import AlreadyExists, Denied, NotFound, PsDilocoError, StoreError, Unavailable, UnsupportedStore, UrlError
from ps_diloco.store.base import Buffer, Capabilities, ObjectInfo
from ps_diloco.store.names import check_directory, check_key, check_limit, check_prefix, check_range, clip_range, is_segment
from ps_diloco.store.tree import walk

SCHEME = "fsspec+"
_AZURE = "Azure checks If-None-Match as it stores a blob or commits its blocks, and adlfs sends it"
EXCLUSIVE = {
    "memory": "its objects are those of one process, where this module lets one create at a time through",
    "abfs": _AZURE,
    "abfss": _AZURE,
    "az": _AZURE,
}
"""protocol -> why of concurrent creates exactly one succeeds, and readers see the whole object or nothing."""
OWN_ADAPTERS = {
    "s3": "s3://bucket/prefix",
    "s3a": "s3://bucket/prefix",
    "gs": "gs://bucket/prefix",
    "gcs": "gs://bucket/prefix",
    "file": "file:///path",
    "local": "file:///path",
}
"""protocol -> the URL that leads to an adapter which promises more."""

_memory_create = threading.Lock()


class FsspecStore:
    """Objects are files below ``root`` of ``filesystem``. As thread-safe as that is; has no versions.

    ``trust_exclusive_create`` is a statement of the user's: of concurrent ``pipe_file(path, data, mode="create")`` exactly one succeeds, the others raise
    ``FileExistsError``, and readers see the whole file or none. Two processes that break it can undo each other's work.
    """

    def __init__(self, filesystem: Any, root: str, *, trust_exclusive_create: bool = False) -> None:
        """Does no I/O."""
        self._setup(type(filesystem), lambda: filesystem, root, trust_exclusive_create)

    @classmethod
    def from_url(cls, url: str, *, trust_exclusive_create: bool = False) -> FsspecStore:
        """The store at ``fsspec+<protocol>://...``; raises :class:`UrlError` for a protocol that is unknown or has an adapter of its own.

        The file system is made on first use, with the options that its URL holds and those of fsspec's configuration.
        """
        from fsspec import get_filesystem_class

        inner = url[len(SCHEME) :]
        protocol = inner.partition("://")[0].lower()
        if protocol in OWN_ADAPTERS:
            raise UrlError("this store has an adapter of its own", url=repr(url), remedy=f"write {OWN_ADAPTERS[protocol]}")
        if ":" in inner.partition("://")[2].partition("/")[0].rpartition("@")[0]:
            remedy = f"put it into fsspec's configuration or into FSSPEC_{protocol.upper()}_PASSWORD"
            raise UrlError("a URL holds no password", protocol=protocol, remedy=remedy)
        try:
            kind = get_filesystem_class(protocol)
        except ImportError as error:
            raise UrlError("the package for this protocol is not installed", url=repr(url), cause=_text(error)) from error
        except ValueError as error:
            raise UrlError("fsspec knows no such protocol", url=repr(url), protocol=protocol, cause=_text(error)) from error
        root = str(kind._strip_protocol(inner))
        if not root.strip("/"):
            raise UrlError("this URL names no directory", url=repr(url), remedy=f"write {SCHEME}{protocol}://.../path")
        store = cls.__new__(cls)
        options = kind._get_kwargs_from_urls(inner)
        store._setup(kind, lambda: kind(**options), root, trust_exclusive_create)
        store._url = url.rstrip("/")
        return store

    def _setup(self, kind: Any, make: Callable[[], Any], root: str, trusted: bool) -> None:
        self._make = make
        self._filesystem: Any = None
        self._closed = False
        self._lock = threading.Lock()
        self._root = root.rstrip("/") + "/"
        protocols = (kind.protocol,) if isinstance(kind.protocol, str) else tuple(kind.protocol)
        self._url = f"{SCHEME}{protocols[0]}://{self._root.strip('/')}"
        self._known = any(protocol in EXCLUSIVE for protocol in protocols)
        self._doubt = "" if self._known else _doubt(kind, trusted)
        self._creating: Any = _memory_create if "memory" in protocols else nullcontext()

    @property
    def url(self) -> str:
        return self._url

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(create_if_absent=not self._doubt, list_is_current=self._known, versions=False)

    def get(
        self,
        key: str,
        *,
        max_bytes: int | None = None,
        byte_range: tuple[int, int] | None = None,
        version: str | None = None,
    ) -> bytes:
        """Asks for the size first, so it is two requests on most file systems."""
        check_range(byte_range)
        path = self._path(key)
        if version is not None:
            raise NotFound("an fsspec file system has no object versions here", key=key, version=version, url=self.url)
        with self._errors("read", key) as filesystem:
            size = self._size(filesystem, path, key)
            start, end = clip_range(byte_range, size)
            check_limit(key, end - start, max_bytes)
            more = 1 if end == size else 0  # one that was replaced by a longer one must not pass for whole
            data = bytes(filesystem.cat_file(path, start=start, end=end + more)) if end > start else b""
        if len(data) != end - start:  # replaced in between, or the answer broke off
            raise Unavailable("a file had another size than was listed", key=key, url=self.url, expected=end - start, read=len(data))
        return data

    def put(self, key: str, data: Buffer, *, overwrite: bool = False) -> str | None:
        path, body = self._path(key), bytes(data)
        if overwrite:
            with self._errors("write", key, write=True) as filesystem:
                self._write(filesystem, path, body, {})
            return None
        if self._doubt:
            raise UnsupportedStore("this store cannot create without the risk of overwriting", key=key, url=self.url, remedy=self._doubt)
        with self._errors("write", key, write=True) as filesystem, self._creating:
            try:
                self._write(filesystem, path, body, {"mode": "create"})
            except FileExistsError as error:
                if filesystem.isfile(path):
                    raise AlreadyExists("object exists", key=key, url=self.url) from None
                raise _clash(key, self.url) from error
        return None

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        for key, (size, modified_s) in walk(self._entries, prefix, start_after):
            yield ObjectInfo(key=key, size=size, modified_s=modified_s)

    def list_prefixes(self, prefix: str) -> Iterator[str]:
        check_directory(prefix)
        for name, _ in sorted(self._entries(prefix)):
            # Some file systems keep empty directories, which a bucket does not.
            if name.endswith("/") and next(walk(self._entries, prefix + name, ""), None) is not None:
                yield prefix + name

    def list_versions(self, key: str) -> Iterator[ObjectInfo]:
        check_key(key)
        return iter(())

    def delete(self, key: str, *, version: str | None = None) -> None:
        path = self._path(key)
        if version is not None:
            return
        with suppress(NotFound), self._errors("delete", key, write=True) as filesystem:
            filesystem.rm_file(path)

    def close(self) -> None:
        """The file system itself is fsspec's, which has no way to end one."""
        with self._lock:
            self._closed = True
            self._filesystem = None

    def _path(self, key: str) -> str:
        check_key(key)
        return self._root + key

    def _size(self, filesystem: Any, path: str, key: str) -> int:
        filesystem.invalidate_cache()
        found = filesystem.info(path)
        if found["type"] != "file":
            raise NotFound("no such object", key=key, url=self.url)
        if found["size"] is None:
            raise StoreError("the file system does not know the size of a file", key=key, url=self.url)
        return int(found["size"])

    def _write(self, filesystem: Any, path: str, body: bytes, mode: dict[str, str]) -> None:
        try:
            filesystem.pipe_file(path, body, **mode)
        except FileNotFoundError:  # this one wants its directories made
            filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
            filesystem.pipe_file(path, body, **mode)

    def _entries(self, directory: str) -> Sequence[tuple[str, tuple[int, float | None]]]:
        """(name, (size, time)) of what is in a directory. Empty if it does not exist."""
        path = (self._root + directory).rstrip("/")
        try:
            with self._errors("list", directory) as filesystem:
                filesystem.invalidate_cache()  # others write here too
                found = filesystem.ls(path, detail=True)
        except NotFound:
            return []
        if not all(isinstance(entry, dict) and {"name", "type"} <= entry.keys() for entry in found):
            raise StoreError("the file system does not say what is in a directory", key=directory, url=self.url)
        named = [(str(entry["name"]).rstrip("/").rpartition("/")[2], entry) for entry in found]
        return [
            (name + "/" if entry["type"] == "directory" else name, (int(entry.get("size") or 0), _modified_s(entry)))
            for name, entry in named
            if is_segment(name)
        ]

    @contextmanager
    def _errors(self, action: str, key: str, *, write: bool = False) -> Iterator[Any]:
        """Gives the file system, and turns what it raises into the errors of the contract."""
        facts = {"action": action, "key": key, "url": self.url}
        try:
            with self._lock:
                if self._closed:
                    raise StoreError("the store is closed", url=self.url)
                if self._filesystem is None:
                    self._filesystem = self._make()
                filesystem = self._filesystem
            yield filesystem
        except PsDilocoError:
            raise
        except FileExistsError as error:
            raise _clash(key, self.url) from error
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            if action == "write":
                raise StoreError("the file system takes no file here", cause=_text(error), **facts) from error
            raise NotFound("no such object", key=key, url=self.url) from None
        except PermissionError as error:
            remedy = "grant this identity reading, writing, listing and deleting below the URL"
            raise Denied("the file system denies access", cause=_text(error), remedy=remedy, **facts) from error
        except (NotImplementedError, TypeError) as error:
            raise UnsupportedStore("the file system cannot do this", cause=_text(error), **facts) from error
        except Exception as error:  # of a network library that fsspec hides: which one, only the user knows
            raise Unavailable("the file system failed", maybe_applied=write, cause=_text(error), **facts) from error


def _doubt(kind: Any, trusted: bool) -> str:
    """What keeps this kind of file system from create-if-absent, as a remedy; empty if nothing does."""
    from fsspec import AbstractFileSystem
    from fsspec.asyn import AsyncFileSystem

    use = "use s3://, gs:// or a local directory"
    asynchronous = issubclass(kind, AsyncFileSystem)
    own, inherited = (kind._pipe_file, AsyncFileSystem._pipe_file) if asynchronous else (kind.pipe_file, AbstractFileSystem.pipe_file)
    if own is inherited:
        return f"{kind.__name__} looks whether a name is free and then writes, which races, or cannot create at all; {use}"
    if not trusted:
        return (
            f"nobody has shown that one only of concurrent creates succeeds in {kind.__name__}; {use}, or state that it is so: "
            "--trust-exclusive-create, or trust_exclusive_create=True (docs/providers.md)"
        )
    return ""


def _clash(key: str, url: str) -> StoreError:
    return StoreError("a file system cannot hold both an object and objects below its name", key=key, url=url)


def _modified_s(entry: dict[str, Any]) -> float | None:
    """The time of an entry, which every file system calls otherwise."""
    for name in ("mtime", "LastModified", "last_modified", "updated", "created"):
        found: Any = entry.get(name)
        if hasattr(found, "timestamp"):
            return float(found.timestamp())
        if isinstance(found, (int, float)):
            return float(found)
    return None


def _text(error: Exception) -> str:
    return repr(f"{type(error).__name__}: {error}"[:300])
