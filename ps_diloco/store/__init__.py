"""Buckets: the only way in which the processes of a run meet (format §2).

::

    store = open_store("s3://bucket/runs/a")        # endpoint and credentials from the AWS environment
    store = open_store("gs://bucket/runs/a")        # the same from Google's
    store = open_store("file:///srv/runs/a")        # or a plain path
    store = open_store("memory://a")                # shared by all who open it in this process
    store = open_store("fsspec+abfs://container/a") # any other file system of fsspec, as far as it keeps the contract

Reading order: ``base`` (the contract), ``claim`` (how numbered objects are written), then one adapter.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

from ps_diloco.errors import UrlError
from ps_diloco.store.base import Buffer, Capabilities, ObjectInfo, Store
from ps_diloco.store.claim import Claim, claim_object, probe_store
from ps_diloco.store.counting import CountingStore, Traffic, VerbTraffic
from ps_diloco.store.fsspec import FsspecStore
from ps_diloco.store.gcs import GcsSettings, GcsStore
from ps_diloco.store.local import LocalStore
from ps_diloco.store.memory import MemoryStore, named_store
from ps_diloco.store.names import is_key
from ps_diloco.store.s3 import S3Settings, S3Store

__all__ = [
    "Buffer",
    "Capabilities",
    "Claim",
    "CountingStore",
    "FsspecStore",
    "GcsSettings",
    "GcsStore",
    "LocalStore",
    "MemoryStore",
    "ObjectInfo",
    "S3Settings",
    "S3Store",
    "Store",
    "Traffic",
    "VerbTraffic",
    "claim_object",
    "open_store",
    "probe_store",
]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(//)?")
_S3_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", re.ASCII)
_GCS_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]", re.ASCII)
_EXAMPLES = "use s3://bucket/prefix, gs://bucket/prefix, file:///path, a plain path, memory://name or fsspec+protocol://path"


def open_store(url: str, *, s3: S3Settings | None = None, gcs: GcsSettings | None = None, trust_exclusive_create: bool = False) -> Store:
    """The store that ``url`` names; raises :class:`UrlError` if none. Does no I/O but to look whether a path is a directory.

    ``s3`` is for ``s3://`` only, ``gcs`` for ``gs://``, and ``trust_exclusive_create`` (see :class:`FsspecStore`) for ``fsspec+...://``; each is
    ignored for other URLs.
    """
    match = _SCHEME.match(url)
    if match is None:
        if re.match(r"(s3|gs|gcs|file|memory|fsspec\+[a-z0-9]+)/+", url):
            raise UrlError(
                "a URL has a colon after its scheme",
                url=repr(url),
                remedy=f"write {url.partition('/')[0]}://..., or ./{url} if it is a path",
            )
        if not url or "\0" in url:
            raise UrlError("not the URL of a store", url=repr(url), remedy=_EXAMPLES)
        return _open_path(url, url)
    scheme, rest = match[1].lower(), url[match.end() :]
    if scheme == "s3" and match[2]:
        rule = "write s3://bucket/prefix; a bucket has 3 to 63 characters of a-z, 0-9, '.' and '-'"
        return S3Store(*_bucket_and_prefix(url, rest, _S3_BUCKET, rule), s3)
    if scheme in ("gs", "gcs") and match[2]:
        rule = "write gs://bucket/prefix; a bucket has 3 to 63 characters (222 with dots) of a-z, 0-9, '.', '-' and '_'"
        return GcsStore(*_bucket_and_prefix(url, rest, _GCS_BUCKET, rule), gcs)
    if scheme == "file" and match[2]:
        if not rest.startswith("/") or "%00" in rest:
            remedy = "write file:///path, with three slashes"
            raise UrlError("a file URL names an absolute path on this machine", url=repr(url), remedy=remedy)
        return _open_path(url, unquote(rest))
    if scheme == "memory" and match[2]:
        if not is_key(rest):
            raise UrlError("not the name of a memory store", url=repr(url), remedy="write memory://name with a name of [A-Za-z0-9._/=-]")
        return named_store(rest)
    if scheme.startswith("fsspec+") and match[2]:
        return FsspecStore.from_url(url, trust_exclusive_create=trust_exclusive_create)
    raise UrlError("not the URL of a store", url=repr(url), remedy=f"{_EXAMPLES} (./{url} if it is a path)" if not match[2] else _EXAMPLES)


def _open_path(url: str, path: str) -> LocalStore:
    try:
        store = LocalStore(path)
    except RuntimeError as error:  # "~name" of somebody whom this machine does not know
        raise UrlError("the home directory in this path is not known", url=repr(url), remedy="write the whole path") from error
    if store.root.exists() and not store.root.is_dir():
        raise UrlError("this path is not a directory", url=repr(url), path=store.root, remedy="name a directory, which need not exist yet")
    if store.root == Path(store.root.anchor):
        raise UrlError("the root of the file system cannot be a store", url=repr(url), remedy="name a directory below it")
    return store


def _bucket_and_prefix(url: str, rest: str, buckets: re.Pattern[str], remedy: str) -> tuple[str, str]:
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.removesuffix("/")
    if not buckets.fullmatch(bucket):
        rule = "not the name of a bucket" if bucket else "this URL names no bucket"
        raise UrlError(rule, url=repr(url), bucket=repr(bucket), remedy=remedy)
    if prefix and not is_key(prefix):
        remedy = f"{remedy.partition(';')[0]}; a prefix has segments of [A-Za-z0-9._=-] joined by '/', none of them empty, '.' or '..'"
        raise UrlError("not a prefix of keys", url=repr(url), prefix=repr(prefix), remedy=remedy)
    return bucket, prefix
