"""A store in a Google Cloud Storage bucket. The only module that uses google-cloud-storage, which it imports on first use.

::

    store = GcsStore("bucket", "runs/a")  # the credentials of this machine
    store = GcsStore("bucket", "runs/a", GcsSettings(endpoint_url="http://127.0.0.1:4443", anonymous=True))

Create-if-absent is ``ifGenerationMatch=0``; object versions are generations. GCS takes about one write per second and object name; above
that it answers 429, which is :class:`Unavailable` here. So numbered objects cost nothing, and overwritten hints keep below that rate.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

import google_crc32c

from ps_diloco.errors import AlreadyExists, Denied, NotFound, PsDilocoError, StoreError, Unavailable, UrlError
from ps_diloco.store.base import Buffer, Capabilities, ObjectInfo
from ps_diloco.store.names import check_directory, check_key, check_limit, check_prefix, check_range, clip_range, is_key

EMULATOR = "STORAGE_EMULATOR_HOST"
CHUNK_BYTES = 32 * 2**20  # of a resumable upload; a multiple of 256 KiB
PAGE_OBJECTS = 1000
_RETRY_FIRST_S, _RETRY_MAX_S = 0.2, 2.0

_CREDENTIALS = "run gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS to a credentials file, or give this machine a service account"
_USER = "grant roles/storage.objectUser on the bucket"
_GRANTS = {
    "get": f"{_USER} (storage.objects.get; and storage.objects.list: without it GCS answers 403 instead of 404 for an object that does not exist)",
    "put": f"{_USER} (storage.objects.create; overwriting head.json and heartbeats needs storage.objects.delete too)",
    "list": f"{_USER} (storage.objects.list)",
    "delete": f"{_USER} (storage.objects.delete)",
    "get_versioning": "grant roles/storage.legacyBucketReader on the bucket (storage.buckets.get)",
    "list_buckets": "grant storage.buckets.list on the project",
    "create_bucket": "grant roles/storage.admin on the project (storage.buckets.create)",
}
_RATE_REASONS = ("rateLimitExceeded", "userRateLimitExceeded")  # of a 403
_SECRET = re.compile(r"upload_id=[^&\s'\")]+")  # who knows it may write


@dataclass(frozen=True, kw_only=True, slots=True)
class GcsSettings:
    """How to reach GCS. What is None follows Google's environment variables and files."""

    endpoint_url: str | None = None
    """For servers other than Google's. None: ``STORAGE_EMULATOR_HOST``, else Google's."""
    project: str | None = None
    """Only creating and listing buckets needs one."""
    anonymous: bool = False
    """Send no credentials and look for none: for emulators. Implied by ``STORAGE_EMULATOR_HOST``."""
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 20.0
    attempts: int = 3
    """Tries of one request within the SDK; of all requests together for one resumable upload."""


class GcsStore:
    """Objects below ``prefix`` in ``bucket``. Thread-safe; one client for all threads, made on first use.

    Every request ends within about ``attempts`` x the timeouts. Besides the errors of the contract a call raises :class:`UrlError` if
    there is no such bucket or endpoint. ``put`` returns a generation even if the bucket keeps no old ones: it can be read until it is overwritten.
    """

    def __init__(self, bucket: str, prefix: str = "", settings: GcsSettings | None = None, *, page_objects: int = PAGE_OBJECTS) -> None:
        """Listings ask for ``page_objects`` at a time. Does no I/O."""
        check_prefix(prefix)
        self.bucket = bucket
        self.settings = settings or GcsSettings()
        self._root = prefix.rstrip("/") + "/" if prefix else ""
        self._page_objects = page_objects
        self._lock = threading.Lock()
        self._client: Any = None
        self._closed = False
        self._versions: bool | None = None

    @property
    def url(self) -> str:
        return f"gs://{self.bucket}/{self._root}".rstrip("/")

    @property
    def capabilities(self) -> Capabilities:
        """``versions`` is asked of the bucket once; false if this identity may not ask."""
        if self._versions is None:
            try:
                with self._errors("get_versioning") as client:
                    bucket = client.bucket(self.bucket)
                    bucket.reload(**self._bounds())
                    self._versions = bool(bucket.versioning_enabled)
            except Unavailable:
                raise
            except StoreError:
                self._versions = False
        return Capabilities(create_if_absent=True, list_is_current=True, versions=self._versions)

    def get(
        self,
        key: str,
        *,
        max_bytes: int | None = None,
        byte_range: tuple[int, int] | None = None,
        version: str | None = None,
    ) -> bytes:
        check_range(byte_range)
        with self._errors("get", key, version=version) as client:
            blob = self._blob(client, key, version)
            if byte_range is not None and byte_range[0] == byte_range[1]:
                blob.reload(**self._bounds())
                return b""
            body = _Body(max_bytes, byte_range)
            try:
                blob.download_to_file(body, checksum=None, **body.ends, **self._bounds())
            except _TooLong:
                return self._refuse_long(blob, key, max_bytes, byte_range)
            except Exception as error:
                if byte_range is not None and _status(error) == 416:
                    return b""  # the range starts at or after the end
                raise
        data = body.getvalue()
        # Not left to the SDK, which does not check what it had to fetch in two requests.
        if byte_range is None and blob.crc32c is not None and blob.crc32c != _crc32c(data):
            raise Unavailable("the body does not have the object's checksum", key=key, url=self.url, size=len(data), crc32c=blob.crc32c)
        return data

    def _refuse_long(self, blob: Any, key: str, max_bytes: int | None, byte_range: tuple[int, int] | None) -> bytes:
        blob.reload(**self._bounds())
        start, end = clip_range(byte_range, blob.size)
        check_limit(key, end - start, max_bytes)
        raise StoreError("the server sent more than was asked for", key=key, url=self.url, byte_range=byte_range, size=blob.size)

    def put(self, key: str, data: Buffer, *, overwrite: bool = False) -> str | None:
        """Up to 8 MiB go in one request, whose condition GCS checks as it stores the object; more in a resumable upload, whose condition it checks
        when the upload is complete."""
        check_key(key)
        body = bytes(data)
        crc32c = _crc32c(body)
        with self._errors("put", key, write=True) as client:
            blob = client.bucket(self.bucket).blob(self._root + key, chunk_size=CHUNK_BYTES)
            blob.crc32c = crc32c  # GCS refuses a body that has another one
            blob.upload_from_file(
                io.BytesIO(body),
                size=len(body),
                content_type="application/octet-stream",
                if_generation_match=None if overwrite else 0,
                checksum=None,
                **self._bounds(),
            )
            if blob.crc32c != crc32c:  # a server that does not check: what stands there now is not what was sent
                with suppress(PsDilocoError), self._errors("delete", key):
                    blob.delete(**self._bounds())  # this generation
                raise Unavailable("the server stored other bytes than were sent", maybe_applied=True, key=key, url=self.url)
            return str(blob.generation)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        last = ""
        options = {"start_offset": self._root + start_after} if start_after else {}
        for page in self._pages(prefix, fields="items(name,size,timeCreated),nextPageToken", **options):
            for found in page:
                key = found.name[len(self._root) :]
                if not is_key(key) or key <= start_after:  # not ours; the offset is inclusive
                    continue
                if key <= last:
                    raise StoreError("the server does not list in key order", key=key, after=last, url=self.url)
                last = key
                yield ObjectInfo(key=key, size=int(found.size), modified_s=found.time_created.timestamp())

    def list_prefixes(self, prefix: str) -> Iterator[str]:
        check_directory(prefix)
        for page in self._pages(prefix, fields="prefixes,nextPageToken", delimiter="/"):
            found = (name[len(self._root) :] for name in sorted(page.prefixes))
            yield from (inner for inner in found if is_key(inner[:-1]))

    def list_versions(self, key: str) -> Iterator[ObjectInfo]:
        """GCS lists the oldest first, so all of them are read before the first is given."""
        check_key(key)
        name = self._root + key
        # "!" is less than all characters of keys: this key only, not those that go on.
        pages = self._pages(key, fields="items(name,size,generation,timeCreated),nextPageToken", end_offset=name + "!", versions=True)
        found = [blob for page in pages for blob in page if blob.name == name]
        if len(found) == 1 and not self.capabilities.versions:
            return  # how GCS lists the one body of a bucket without versions
        for blob in sorted(found, key=lambda blob: int(blob.generation), reverse=True):
            yield ObjectInfo(key=key, size=int(blob.size), version=str(blob.generation), modified_s=blob.time_created.timestamp())

    def delete(self, key: str, *, version: str | None = None) -> None:
        with suppress(NotFound), self._errors("delete", key, version=version, write=True) as client:
            self._blob(client, key, version).delete(**self._bounds())

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._client is not None:
                self._client.close()
                self._client = None

    def _blob(self, client: Any, key: str, version: str | None) -> Any:
        check_key(key)
        if version is None:
            return client.bucket(self.bucket).blob(self._root + key)
        if not re.fullmatch(r"[0-9]{1,19}", version, re.ASCII):
            raise NotFound("not a generation of GCS", key=key, version=repr(version), url=self.url)
        return client.bucket(self.bucket).blob(self._root + key, generation=int(version))

    def _pages(self, prefix: str, **options: Any) -> Iterator[Any]:
        """The pages of a listing, each fetched when it is asked for, with tries of its own."""
        token = None
        while True:
            with self._errors("list", prefix) as client:
                listing = client.list_blobs(
                    self.bucket,
                    prefix=self._root + prefix,
                    page_token=token,
                    page_size=self._page_objects,
                    **options,
                    **self._bounds(),
                )
                if "versions" in options:  # the SDK writes "True", which fake-gcs-server takes for false
                    listing.extra_params["versions"] = "true"
                page = next(listing.pages)
                page.prefixes = listing.prefixes
            yield page
            if not listing.next_page_token:
                return
            if listing.next_page_token == token:  # fake-gcs-server 1.54, if a page has generations of one name only
                raise StoreError("the server's listing does not go on", key=prefix, url=self.url)
            token = listing.next_page_token

    def _bounds(self) -> dict[str, Any]:
        """Timeouts and tries of one call."""
        return _bounds(self.settings)

    @contextmanager
    def _errors(self, action: str, key: str = "", *, version: str | None = None, write: bool = False) -> Iterator[Any]:
        """Gives the client, and turns what the SDK raises into the errors of the contract."""
        facts = {"action": action, "key": key, "url": self.url} | ({"version": version} if version is not None else {})
        with translated_errors(action, self.bucket, facts, write=write):
            with self._lock:
                if self._closed:
                    raise StoreError("the store is closed", url=self.url)
                if self._client is None:
                    self._client = _client(self.settings)
                client = self._client
            yield client


class _TooLong(Exception):
    """More bytes arrive than may be held."""


class _Body(io.BytesIO):
    """Takes a body up to the first byte too many."""

    def __init__(self, max_bytes: int | None, byte_range: tuple[int, int] | None) -> None:
        super().__init__()
        self.ends = {} if byte_range is None else {"start": byte_range[0], "end": byte_range[1] - 1}
        limits = [max_bytes] if max_bytes is not None else []
        if byte_range is not None:
            limits.append(byte_range[1] - byte_range[0])
        self._limit = min(limits, default=None)

    def write(self, data: Any) -> int:
        if self._limit is not None and self.tell() + len(data) > self._limit:
            raise _TooLong
        return super().write(data)


def create_bucket(bucket: str, settings: GcsSettings, *, versioned: bool) -> None:
    """Create ``bucket`` (no error if it exists) and switch its versioning on if asked. Does I/O; for servers of this machine."""
    with translated_errors("create_bucket", bucket, {"endpoint_url": settings.endpoint_url}, write=True):
        client = _client(settings)
        try:
            wanted = client.bucket(bucket)
            wanted.versioning_enabled = versioned
            client.create_bucket(wanted, project=settings.project or "local", **_bounds(settings))
        except Exception as error:
            if _status(error) != 409:
                raise
            if versioned:
                wanted.patch(**_bounds(settings))
        finally:
            client.close()


def check_server(settings: GcsSettings) -> None:
    """Return if a GCS server answers; else raise what a store would raise."""
    with translated_errors("list_buckets", "", {"endpoint_url": settings.endpoint_url}):
        client = _client(settings)
        try:
            next(client.list_buckets(project=settings.project or "local", max_results=1, **_bounds(settings)).pages, None)
        finally:
            client.close()


def _client(settings: GcsSettings) -> Any:
    """A new client. Raises the SDK's errors."""
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import storage

    anonymous = settings.anonymous or (settings.endpoint_url is None and os.environ.get(EMULATOR))
    client = storage.Client(
        project=settings.project,  # None is taken as it is; the SDK's default would look for one, on the metadata server too
        credentials=AnonymousCredentials() if anonymous else None,  # type: ignore[no-untyped-call]
        client_options={"api_endpoint": settings.endpoint_url} if settings.endpoint_url is not None else None,
    )
    # For traces, also when nobody traces, 3.17 asks for the bucket's metadata in a thread of its own: that needs storage.buckets.get.
    client._bucket_metadata_cache = None
    return client


def _bounds(settings: GcsSettings) -> dict[str, Any]:
    from google.api_core.retry import Retry

    failures = itertools.count(1)

    def again(error: Exception) -> bool:
        return isinstance(_translated(error, "", "", {}, False), Unavailable) and next(failures) < settings.attempts

    return {
        "timeout": (settings.connect_timeout_s, settings.read_timeout_s),
        "retry": Retry(predicate=again, initial=_RETRY_FIRST_S, maximum=_RETRY_MAX_S, multiplier=2.0, timeout=None),
    }


@contextmanager
def translated_errors(action: str, bucket: str, facts: Mapping[str, Any], *, write: bool = False) -> Iterator[None]:
    """Raise the errors of the contract instead of the SDK's. ``write``: a failure may have been applied."""
    try:
        yield
    except PsDilocoError:
        raise
    except Exception as error:
        translated = _translated(error, action, bucket, facts, write)
        if translated is None and isinstance(error, (AttributeError, KeyError, TypeError, ValueError)):
            translated = StoreError("the answer is not one of GCS", cause=_text(error), remedy="check STORAGE_EMULATOR_HOST", **facts)
        if translated is None:
            raise
        raise translated from error


def _translated(error: Exception, action: str, bucket: str, facts: Mapping[str, Any], write: bool) -> PsDilocoError | None:
    """The error of the contract for one that the SDK, its HTTP client or its credentials raise; None for any other."""
    import requests
    import urllib3
    from google.auth import exceptions as auth

    if (status := _status(error)) is not None:
        return _from_answer(status, error, action, bucket, facts, write)
    if isinstance(error, auth.GoogleAuthError):
        if isinstance(error, auth.TransportError) or error.retryable:
            return Unavailable("Google's token server does not answer", maybe_applied=write, cause=_text(error), **facts)
        return Denied("no usable Google credentials", cause=_text(error), remedy=_CREDENTIALS, **facts)
    if isinstance(error, (requests.exceptions.InvalidSchema, requests.exceptions.MissingSchema, requests.exceptions.InvalidURL)):
        remedy = f"write {EMULATOR} or the endpoint like http://127.0.0.1:4443"
        return UrlError("GCS cannot be asked at this address", cause=_text(error), remedy=remedy, **facts)
    # Connections, timeouts, answers that broke off, answers that are not GCS's.
    broken_off = (
        requests.RequestException,
        urllib3.exceptions.HTTPError,
        HTTPException,
        ConnectionError,
        TimeoutError,
        json.JSONDecodeError,
    )
    if isinstance(error, broken_off):
        return Unavailable("no complete answer from GCS", maybe_applied=write, cause=_text(error), **facts)
    return None


def _from_answer(status: int, error: Exception, action: str, bucket: str, facts: Mapping[str, Any], write: bool) -> PsDilocoError:
    message, reason = _said(error)
    facts = dict(facts) | {"status": status, "message": repr(message[:200])}
    if status == 401:
        return Denied("GCS does not accept the credentials", remedy=f"{_CREDENTIALS}; {_GRANTS.get(action, '')}", **facts)
    if status == 403 and reason not in _RATE_REASONS:
        return Denied("GCS denies access", remedy=_GRANTS.get(action, ""), **facts)
    if status == 410 or (status == 404 and _is_of_session(error)):
        return Unavailable("the upload was ended by somebody else or by an earlier try", maybe_applied=write, **facts)
    if status == 404:
        if action in ("get", "delete") and not re.search(r"bucket.* does not exist", message):
            return NotFound("no such object", **facts)
        return UrlError("there is no such bucket", bucket=bucket, remedy=f"create it first, or check the name and {EMULATOR}", **facts)
    if status == 412:
        return AlreadyExists("object exists", **facts)
    if status in (403, 408, 409, 429) or (status >= 500 and status != 501):
        return Unavailable("GCS is busy or failing", maybe_applied=write, **facts)
    if status == 400 and "crc32c" in message.lower():
        return Unavailable("the body was damaged on its way", **facts)
    if status == 400 and "version" in facts:
        return NotFound("no such object", **facts)
    return StoreError("GCS refused the request", **facts)


def _status(error: Exception) -> int | None:
    """The HTTP status that an error of the SDK stands for."""
    from google.api_core.exceptions import GoogleAPICallError
    from google.cloud.storage.exceptions import InvalidResponse

    if isinstance(error, GoogleAPICallError) and error.code is not None:
        return int(error.code)
    if isinstance(error, InvalidResponse):
        return int(error.response.status_code)
    return None


def _said(error: Any) -> tuple[str, str]:
    """Message and reason of an answer. The SDK's own text has the URL in it, and with it what may be secret."""
    try:
        details = error.response.json()["error"]
        return str(details["message"]), str((details.get("errors") or [{}])[0].get("reason", ""))
    except (AttributeError, ValueError, KeyError, TypeError, LookupError):
        return str(getattr(error.response, "text", "")), ""


def _is_of_session(error: Any) -> bool:
    request = getattr(getattr(error, "response", None), "request", None)
    return "upload_id=" in str(getattr(request, "url", ""))


def _crc32c(data: bytes) -> str:
    return base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()


def _text(error: Exception) -> str:
    return repr(_SECRET.sub("upload_id=...", str(error))[:300])
