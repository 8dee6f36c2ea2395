"""A store in an S3 bucket, or on a server that speaks S3. The only module that uses boto3, which it imports on first use.

::

    store = S3Store("bucket", "runs/a", S3Settings(endpoint_url="http://127.0.0.1:8333"))
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from ps_diloco.errors import AlreadyExists, Denied, NotFound, PsDilocoError, StoreError, Unavailable, UrlError
from ps_diloco.store.base import Buffer, Capabilities, ObjectInfo
from ps_diloco.store.names import check_directory, check_key, check_limit, check_prefix, check_range, is_key

MULTIPART_BYTES = 64 * 2**20
PART_BYTES_MIN = 5 * 2**20  # of S3, for all parts but the last
PARTS_MAX = 10_000
_PART_THREADS = 4

_CREDENTIALS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give this machine a role"
_GRANTS = {
    "get": "grant s3:GetObject on the prefix, and s3:ListBucket on the bucket without a prefix condition: "
    "without it S3 answers 403 instead of 404 for an object that does not exist",
    "get_version": "grant s3:GetObjectVersion on the prefix, and s3:ListBucket and s3:ListBucketVersions on the bucket",
    "put": "grant s3:PutObject and s3:AbortMultipartUpload on the prefix",
    "list": "grant s3:ListBucket on the bucket",
    "list_versions": "grant s3:ListBucketVersions on the bucket",
    "delete": "grant s3:DeleteObject on the prefix",
    "delete_version": "grant s3:DeleteObjectVersion on the prefix",
    "get_versioning": "grant s3:GetBucketVersioning on the bucket",
    "list_buckets": "grant s3:ListAllMyBuckets",
    "create_bucket": "grant s3:CreateBucket and s3:PutBucketVersioning",
}
_OBJECT_ACTIONS = ("get", "get_version", "put", "delete", "delete_version")
_BAD_CREDENTIALS = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "TokenRefreshRequired")
_BAD_REGION = ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException")
_ABSENT = ("NoSuchKey", "NoSuchVersion", "404", "NotFound", "MethodNotAllowed")  # the last: that version is a delete marker
_BUSY = ("SlowDown", "Throttling", "ThrottlingException", "RequestTimeout", "RequestTimeoutException", "RequestLimitExceeded")


@dataclass(frozen=True, kw_only=True, slots=True)
class S3Settings:
    """How to reach S3. What is None follows the AWS environment variables and configuration files."""

    endpoint_url: str | None = None
    """For servers other than AWS. None: ``AWS_ENDPOINT_URL_S3``, ``AWS_ENDPOINT_URL``, else AWS."""
    region: str | None = None
    profile: str | None = None
    credentials: tuple[str, str] | None = field(default=None, repr=False)
    """Access key id and secret, for a server on this machine. None: the usual chain of environment, files and roles."""
    addressing: Literal["auto", "path", "virtual"] = "auto"
    checksum: Literal["when_supported", "when_required"] | None = None
    """``when_required`` for servers that refuse the checksums that AWS takes by default."""
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 20.0
    attempts: int = 3
    """Tries of one request within the SDK."""


class S3Store:
    """Objects below ``prefix`` in ``bucket``. Thread-safe; one client for all threads, made on first use.

    Every request ends within about ``attempts`` x the timeouts. Besides the errors of the contract a call raises :class:`UrlError` if
    there is no such bucket, region or endpoint.
    """

    def __init__(
        self, bucket: str, prefix: str = "", settings: S3Settings | None = None, *, multipart_bytes: int = MULTIPART_BYTES
    ) -> None:
        """Objects larger than ``multipart_bytes`` (at least 5 MiB) are sent in parts of about that size. Does no I/O."""
        check_prefix(prefix)
        self.bucket = bucket
        self.settings = settings or S3Settings()
        self._root = prefix.rstrip("/") + "/" if prefix else ""
        self._multipart_bytes = max(multipart_bytes, PART_BYTES_MIN)
        self._lock = threading.Lock()
        self._client: Any = None
        self._closed = False
        self._versions: bool | None = None

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self._root}".rstrip("/")

    @property
    def capabilities(self) -> Capabilities:
        """``versions`` is asked of the bucket once; false if this identity may not ask."""
        if self._versions is None:
            try:
                with self._errors("get_versioning") as client:
                    self._versions = client.get_bucket_versioning(Bucket=self.bucket).get("Status") == "Enabled"
            except Unavailable:
                raise
            except StoreError:  # not allowed to ask, or the server does not know the question
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
        request = self._request(key, version)
        if byte_range is not None:
            start, end = byte_range
            if start == end:
                with self._errors("get", key, version=version) as client:
                    client.head_object(**request)
                return b""
            request["Range"] = f"bytes={start}-{end - 1}"
        with self._errors("get", key, version=version) as client:
            try:
                answer = client.get_object(**request)
            except client.exceptions.ClientError as error:
                if byte_range is not None and error.response["ResponseMetadata"].get("HTTPStatusCode") == 416:
                    return b""  # the range starts at or after the end
                raise
            body, size = answer["Body"], int(answer["ContentLength"])
            try:
                if byte_range is not None and answer["ResponseMetadata"]["HTTPStatusCode"] != 206 and size:
                    raise StoreError("the server ignored a byte range", key=key, url=self.url)
                check_limit(key, size, max_bytes)
                data: bytes = body.read()
            finally:
                body.close()
        if len(data) != size:
            raise Unavailable("the answer broke off", key=key, url=self.url, expected=size, read=len(data))
        return data

    def put(self, key: str, data: Buffer, *, overwrite: bool = False) -> str | None:
        request = self._request(key)
        condition = {} if overwrite else {"IfNoneMatch": "*"}
        if memoryview(data).nbytes > self._multipart_bytes:
            return self._put_parts(key, request, memoryview(data).cast("B"), condition)
        with self._errors("put", key, write=True) as client:
            answer = client.put_object(**request, **condition, Body=bytes(data))
        return _version(answer)

    def _put_parts(self, key: str, request: dict[str, str], data: memoryview, condition: dict[str, str]) -> str | None:
        part_bytes = max(self._multipart_bytes, -(-len(data) // PARTS_MAX))
        with self._errors("put", key) as client:
            upload = request | {"UploadId": client.create_multipart_upload(**request)["UploadId"]}

        def send(number: int) -> dict[str, Any]:
            part = bytes(data[(number - 1) * part_bytes : number * part_bytes])
            answer = client.upload_part(**upload, PartNumber=number, Body=part)
            checksums = {name: value for name, value in answer.items() if name.startswith("Checksum") and name != "ChecksumType"}
            return {"PartNumber": number, "ETag": answer["ETag"], **checksums}

        try:
            with self._errors("put", key), ThreadPoolExecutor(_PART_THREADS, "ps-diloco-put") as threads:
                parts = _first_error_cancels(threads, send, -(-len(data) // part_bytes))
            with self._errors("put", key, write=True):
                answer = client.complete_multipart_upload(**upload, **condition, MultipartUpload={"Parts": parts})
        except BaseException:
            # Best effort: parts that nobody completes cost money until the bucket's lifecycle rule removes them.
            with suppress(PsDilocoError), self._errors("put", key):
                client.abort_multipart_upload(**upload)
            raise
        return _version(answer)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """SeaweedFS 4.48 lists by directories. That is key order unless names in a directory are like ``us/`` and ``us-east/`` (the
        second goes on with a character less than ``/``): then pages are out of order, which raises :class:`StoreError` here, and
        ``start_after`` may leave out objects. So list below one unit, not across units.
        """
        check_prefix(prefix)
        last = ""
        options = {"StartAfter": self._root + start_after} if start_after else {}
        for page in self._pages("list", "list_objects_v2", prefix, options):
            for found in page.get("Contents", ()):
                key = found["Key"][len(self._root) :]
                if not is_key(key) or key <= start_after:  # the marker of a directory, or not ours; or the server is lax
                    continue
                if key <= last:
                    remedy = "list narrower prefixes"
                    raise StoreError("the server does not list in key order", key=key, after=last, url=self.url, remedy=remedy)
                last = key
                yield ObjectInfo(key=key, size=int(found["Size"]), modified_s=found["LastModified"].timestamp())

    def list_prefixes(self, prefix: str) -> Iterator[str]:
        check_directory(prefix)
        pages = self._pages("list", "list_objects_v2", prefix, {"Delimiter": "/"})
        found = (common["Prefix"][len(self._root) :] for page in pages for common in page.get("CommonPrefixes", ()))
        yield from sorted(inner for inner in found if is_key(inner[:-1]))  # SeaweedFS 4.48 has "a/" before "a-b/"

    def list_versions(self, key: str) -> Iterator[ObjectInfo]:
        check_key(key)
        for page in self._pages("list_versions", "list_object_versions", key, {}):
            for found in page.get("Versions", ()):
                if found["Key"] != self._root + key:
                    return  # key order: this key's versions come first
                version = found["VersionId"]
                if version == "null" and not self.capabilities.versions:
                    return  # how S3 lists the one body of a bucket without versions
                yield ObjectInfo(key=key, size=int(found["Size"]), version=version, modified_s=found["LastModified"].timestamp())

    def delete(self, key: str, *, version: str | None = None) -> None:
        request = self._request(key, version)
        with suppress(NotFound), self._errors("delete", key, version=version, write=True) as client:
            client.delete_object(**request)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._client is not None:
                self._client.close()
                self._client = None

    def _request(self, key: str, version: str | None = None) -> dict[str, str]:
        check_key(key)
        request = {"Bucket": self.bucket, "Key": self._root + key}
        return request if version is None else request | {"VersionId": version}

    def _pages(self, action: str, operation: str, prefix: str, options: Mapping[str, str]) -> Iterator[Mapping[str, Any]]:
        with self._errors(action, prefix) as client:
            pages = iter(client.get_paginator(operation).paginate(Bucket=self.bucket, Prefix=self._root + prefix, **options))
        while True:
            with self._errors(action, prefix):
                page = next(pages, None)
            if page is None:
                return
            if "IsTruncated" not in page:  # boto3 takes any XML, a portal's login page too, for an empty listing
                raise StoreError("the answer is no listing of S3", key=prefix, url=self.url, remedy="check AWS_ENDPOINT_URL_S3")
            yield page

    @contextmanager
    def _errors(self, action: str, key: str = "", *, version: str | None = None, write: bool = False) -> Iterator[Any]:
        """Gives the client, and turns what boto3 raises into the errors of the contract."""
        if version is not None:
            action += "_version"
        facts = {"action": action, "key": key, "url": self.url} | ({"version": version} if version is not None else {})
        with translated_errors(action, self.bucket, facts, write=write):
            with self._lock:
                if self._closed:
                    raise StoreError("the store is closed", url=self.url)
                if self._client is None:
                    self._client = _client(self.settings)
                client = self._client
            yield client


def create_bucket(bucket: str, settings: S3Settings, *, versioned: bool) -> None:
    """Create ``bucket`` (no error if this account has it) and switch its versioning on if asked. Does I/O; for servers of this machine."""
    with translated_errors("create_bucket", bucket, {"endpoint_url": settings.endpoint_url}, write=True):
        client = _client(settings)
        with suppress(client.exceptions.BucketAlreadyOwnedByYou):
            client.create_bucket(Bucket=bucket)
        if versioned:
            client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
        client.close()


def check_server(settings: S3Settings) -> None:
    """Return if an S3 server answers; else raise what a store would raise."""
    with translated_errors("list_buckets", "", {"endpoint_url": settings.endpoint_url}):
        client = _client(settings)
        client.list_buckets()
        client.close()


_client_lock = threading.Lock()


def _client(settings: S3Settings) -> Any:
    """A new client. Not thread-safe in boto3, hence the lock. Raises botocore's errors."""
    import boto3
    from botocore.config import Config

    checksum: dict[str, Any] = {}
    if settings.checksum is not None:
        checksum = {"request_checksum_calculation": settings.checksum, "response_checksum_validation": settings.checksum}
    config = Config(
        connect_timeout=settings.connect_timeout_s,
        read_timeout=settings.read_timeout_s,
        retries={"mode": "standard", "total_max_attempts": settings.attempts},
        max_pool_connections=32,
        s3={"addressing_style": settings.addressing},
        tcp_keepalive=True,
        **checksum,
    )
    access_key, secret_key = settings.credentials or (None, None)
    with _client_lock:
        session = boto3.Session(
            aws_access_key_id=access_key, aws_secret_access_key=secret_key, region_name=settings.region, profile_name=settings.profile
        )
        return session.client("s3", endpoint_url=settings.endpoint_url, config=config)


@contextmanager
def translated_errors(action: str, bucket: str, facts: Mapping[str, Any], *, write: bool = False) -> Iterator[None]:
    """Raise the errors of the contract instead of boto3's. ``write``: a failure may have been applied."""
    from botocore import exceptions as aws

    try:
        yield
    except aws.ClientError as error:
        raise _from_answer(error.response, action, bucket, facts, write) from error
    except (
        aws.NoCredentialsError,
        aws.PartialCredentialsError,
        aws.CredentialRetrievalError,
        aws.ProfileNotFound,
        aws.ConfigParseError,
        aws.TokenRetrievalError,
        aws.SSOError,
        aws.LoginError,
    ) as error:
        raise Denied("no usable AWS credentials", cause=_text(error), remedy=_CREDENTIALS, **facts) from error
    except (aws.InvalidRegionError, aws.NoRegionError, aws.EndpointProviderError, aws.ParamValidationError) as error:
        remedy = "check the bucket's name, AWS_REGION and AWS_ENDPOINT_URL_S3"
        raise UrlError("S3 cannot be asked at this address", cause=_text(error), remedy=remedy, **facts) from error
    except aws.BotoCoreError as error:  # connections, timeouts, answers that broke off, damaged bodies, answers that are not S3
        raise Unavailable("no complete answer from S3", maybe_applied=write, cause=_text(error), **facts) from error
    except ValueError as error:
        if isinstance(error, PsDilocoError) or "endpoint" not in str(error).lower():
            raise
        remedy = "check AWS_ENDPOINT_URL_S3 and AWS_ENDPOINT_URL"
        raise UrlError("not an endpoint of S3", cause=_text(error), remedy=remedy, **facts) from error


def _from_answer(answer: Mapping[str, Any], action: str, bucket: str, facts: Mapping[str, Any], write: bool) -> PsDilocoError:
    status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    retried = int(answer.get("ResponseMetadata", {}).get("RetryAttempts", 0)) > 0
    code, message = str(answer.get("Error", {}).get("Code", "")), str(answer.get("Error", {}).get("Message", ""))
    facts = dict(facts) | {"status": status, "code": code, "message": repr(message[:200])}
    if code == "NoSuchBucket" or (status == 404 and action not in _OBJECT_ACTIONS):
        remedy = "create it first, or check the name, AWS_REGION and AWS_ENDPOINT_URL_S3"
        return UrlError("there is no such bucket", bucket=bucket, remedy=remedy, **facts)
    if code in _BAD_REGION or status == 301:
        return UrlError("the bucket is in another region", remedy="set AWS_REGION to the bucket's region", **facts)
    if code in _BAD_CREDENTIALS:
        return Denied("S3 does not accept the credentials", remedy=_CREDENTIALS, **facts)
    if code == "RequestTimeTooSkewed":
        return Denied("the clock of this machine is wrong", remedy="synchronise it (NTP)", **facts)
    if status in (401, 403):
        return Denied("S3 denies access", remedy=_GRANTS.get(action, ""), **facts)
    if status == 412:
        return AlreadyExists("object exists", **facts)
    if status == 409:  # a concurrent conditional write; this one was not applied, unless an earlier try of the SDK was
        return Unavailable("a concurrent write to this key is under way", maybe_applied=write and retried, **facts)
    if code in _BUSY or status == 429 or status >= 500 and status != 501:
        return Unavailable("S3 is busy or failing", maybe_applied=write, **facts)
    if code == "NoSuchUpload":  # of a completion: an earlier try of the SDK may have completed it
        return Unavailable("the upload was ended by somebody else or by an earlier try", maybe_applied=write, **facts)
    if code in _ABSENT or (action == "get_version" and code == "InvalidArgument"):
        return NotFound("no such object", **facts)
    return StoreError("S3 refused the request", **facts)


def _first_error_cancels(threads: ThreadPoolExecutor, send: Any, parts: int) -> list[dict[str, Any]]:
    """The results of ``send(1)`` to ``send(parts)``; after an error no further part is started."""
    futures = [threads.submit(send, number) for number in range(1, parts + 1)]
    try:
        return [future.result() for future in futures]
    except BaseException:
        for future in futures:
            future.cancel()
        raise


def _version(answer: Mapping[str, Any]) -> str | None:
    version = answer.get("VersionId")
    return None if version is None else str(version)


def _text(error: Exception) -> str:
    return repr(str(error)[:300])
