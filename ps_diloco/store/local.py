"""A store in a local directory (or a shared one that has hard links).

An object is written whole to a temporary file in ``<root>/.tmp~/`` and then linked to its name, which fails if the name is taken,
or moved over it. So readers see all of an object or nothing. A crash can leave temporary files; they may be deleted while nobody writes.
A file system cannot hold both ``a`` and ``a/b``, which format §4 never asks for.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ps_diloco.errors import AlreadyExists, Denied, NotFound, StoreError, Unavailable, UnsupportedStore
from ps_diloco.store.base import Buffer, Capabilities, ObjectInfo
from ps_diloco.store.names import check_directory, check_key, check_limit, check_prefix, check_range, clip_range, is_segment
from ps_diloco.store.tree import walk

TEMPORARY = ".tmp~"  # "~" is in no key
_TRIES_MAX = 100
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
_temporary_numbers = itertools.count()


class LocalStore:
    """Objects are files below ``root``, which the first ``put`` makes. Thread-safe; safe between processes. Has no versions.

    Once seen, ``root`` must stay the same directory: when it is gone (a file system that is not mounted, say) every call raises :class:`Unavailable`
    until it is back, and nothing is written into a new one in its place.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root).expanduser().absolute()
        self._identity: tuple[int, int] | None = None

    @property
    def url(self) -> str:
        return f"file://{self.root}"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(create_if_absent=True, list_is_current=True, versions=False)

    def get(
        self,
        key: str,
        *,
        max_bytes: int | None = None,
        byte_range: tuple[int, int] | None = None,
        version: str | None = None,
    ) -> bytes:
        check_range(byte_range)
        path = self._path(key)
        if version is not None:
            raise NotFound("a local directory has no object versions", key=key, version=version, url=self.url)
        with self._errors("read", key), open(path, "rb") as file:
            start, end = clip_range(byte_range, os.fstat(file.fileno()).st_size)
            check_limit(key, end - start, max_bytes)
            file.seek(start)
            data = file.read(end - start)
        if len(data) != end - start:
            raise Unavailable("file ended early", key=key, url=self.url, expected=end - start, read=len(data))
        return data

    def put(self, key: str, data: Buffer, *, overwrite: bool = False) -> str | None:
        path = self._path(key)
        with self._errors("write", key):
            temporary = self._write_temporary(data)
        try:
            with self._errors("write", key, maybe_applied=True):
                self._publish(temporary, path, key, overwrite)
        finally:
            with suppress(OSError):  # a left-over is harmless, and a moved file is no longer there
                temporary.unlink()
        return None

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        return self._list(prefix, start_after)

    def list_prefixes(self, prefix: str) -> Iterator[str]:
        check_directory(prefix)
        for name, _ in sorted(self._entries(prefix)):
            # An empty directory is what a delete or a crash left: in a bucket it would not exist.
            if name.endswith("/") and next(self._list(prefix + name, ""), None) is not None:
                yield prefix + name

    def list_versions(self, key: str) -> Iterator[ObjectInfo]:
        check_key(key)
        return iter(())

    def delete(self, key: str, *, version: str | None = None) -> None:
        path = self._path(key)
        if version is not None:
            return
        with suppress(NotFound), self._errors("delete", key, maybe_applied=True):
            path.unlink()
        with suppress(OSError):  # not empty, gone already, or not ours: an empty directory does no harm
            for directory in path.parents:
                if directory == self.root:
                    break
                directory.rmdir()

    def close(self) -> None:
        """Nothing to free."""

    def _path(self, key: str) -> Path:
        check_key(key)
        return self.root / key

    def _write_temporary(self, data: Buffer) -> Path:
        directory = self.root / TEMPORARY
        _make_directories(directory)
        for _ in range(_TRIES_MAX):
            path = directory / f"{os.getpid()}-{next(_temporary_numbers)}"
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            except FileExistsError:  # another machine's process, or the left-over of an earlier one
                continue
            try:
                with open(descriptor, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
            except BaseException:
                with suppress(OSError):
                    path.unlink()
                raise
            return path
        raise Unavailable("no free temporary name", directory=directory, remedy="delete old files there")

    def _publish(self, temporary: Path, path: Path, key: str, overwrite: bool) -> None:
        for attempt in range(_TRIES_MAX):
            try:
                _make_directories(path.parent)
                if overwrite:
                    os.replace(temporary, path)
                else:
                    self._link(temporary, path, key)
            except FileNotFoundError:  # a delete has just removed the directory
                if attempt + 1 < _TRIES_MAX:
                    continue
                raise
            _sync_directory(path.parent)
            return

    def _link(self, temporary: Path, path: Path, key: str) -> None:
        try:
            os.link(temporary, path)
        except FileExistsError as error:
            if path.is_dir():
                raise _clash(key, self.url) from error
            raise AlreadyExists("object exists", key=key, url=self.url) from None
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            raise UnsupportedStore(
                "the file system has no hard links, so create-if-absent cannot be kept",
                url=self.url,
                cause=error.strerror,
                remedy="use a directory on another file system, or an s3:// URL",
            ) from error

    def _entries(self, directory: str) -> Sequence[tuple[str, None]]:
        """Names in a directory, those of directories with their ``/``. Empty if it does not exist."""
        try:
            with self._errors("list", directory), os.scandir(self.root / directory) as entries:
                return [(entry.name + "/" if entry.is_dir() else entry.name, None) for entry in entries if is_segment(entry.name)]
        except NotFound:
            return []

    def _list(self, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
        for key, _ in walk(self._entries, prefix, start_after):
            try:
                with self._errors("list", key):
                    status = os.stat(self.root / key)
            except NotFound:  # deleted since the directory was read
                continue
            yield ObjectInfo(key=key, size=status.st_size, modified_s=status.st_mtime)

    def _check_root(self) -> None:
        found = self._root_identity()
        if self._identity is None:
            self._identity = found
        elif found != self._identity and self._root_identity() != self._identity:  # asked again: another thread may just have made it
            raise Unavailable(
                "the directory of the store is gone or is another one", url=self.url, remedy="mount it again, or bring it back"
            )

    def _root_identity(self) -> tuple[int, int] | None:
        try:
            status = os.stat(self.root)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_dev, status.st_ino

    @contextmanager
    def _errors(self, action: str, key: str, *, maybe_applied: bool = False) -> Iterator[None]:
        """Turn ``OSError`` into the errors of the contract."""
        try:
            self._check_root()
            yield
        except OSError as error:
            facts = {"action": action, "key": key, "url": self.url, "cause": error.strerror or type(error).__name__}
            if action == "write" and error.errno in (errno.ENOTDIR, errno.EISDIR, errno.EEXIST):
                raise _clash(key, self.url) from error
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
                raise NotFound("no such object", key=key, url=self.url) from None
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                remedy = f"give this user read and write permission below {self.root}"
                raise Denied("the file system denies access", remedy=remedy, **facts) from error
            if error.errno == errno.ENAMETOOLONG:
                raise StoreError("key is too long for this file system", **facts) from error
            raise Unavailable("the file system failed", maybe_applied=maybe_applied, **facts) from error


def _clash(key: str, url: str) -> StoreError:
    return StoreError("a file system cannot hold both an object and objects below its name", key=key, url=url)


def _make_directories(directory: Path) -> None:
    """Make ``directory`` and its parents, durably."""
    missing = []
    while not directory.is_dir():
        missing.append(directory)
        directory = directory.parent
    for path in reversed(missing):
        with suppress(FileExistsError):
            path.mkdir()
        _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    """Make the names in ``directory`` durable."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except (FileNotFoundError, PermissionError):  # removed by a delete; or one may write names but not read them
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # some network file systems cannot, and need not
            raise
    finally:
        os.close(descriptor)
