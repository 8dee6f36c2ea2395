"""What only S3 does: its errors, requests, parts. Answers come from a scripted server, for what real ones seldom say."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ps_diloco.errors import AlreadyExists, Denied, LimitExceeded, NotFound, StoreError, Unavailable, UrlError
from ps_diloco.store import S3Settings, S3Store, Store
from ps_diloco.store.s3 import PART_BYTES_MIN, check_server
from tests.conftest import BUCKET
from tests.scripted import Answer, Script, serve


def error(status: int, code: str) -> Answer:
    return Answer(status, f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>says the script</Message></Error>".encode())


@dataclass
class ScriptedServer(Script):
    """A script with stores that reach it."""

    stores: dict[str, S3Store] = field(default_factory=dict)

    def new_store(self, **settings: Any) -> S3Store:
        given: dict[str, Any] = {"endpoint_url": self.url, "region": "us-east-1", "credentials": ("id", "secret"), "attempts": 1}
        return S3Store("bucket", "runs", S3Settings(**(given | settings)))

    def store(self, **settings: Any) -> S3Store:
        """The same one for the same settings: a new client takes 0.1 s."""
        return self.stores.setdefault(repr(settings), self.new_store(**settings))


@pytest.fixture
def scripted(scripted_server: ScriptedServer) -> ScriptedServer:
    scripted_server.clear()
    return scripted_server


@pytest.fixture(scope="module")
def scripted_server() -> Iterator[ScriptedServer]:
    script = ScriptedServer()
    with serve(script):
        yield script
        for store in script.stores.values():
            store.close()


CALLS: dict[str, Callable[[S3Store], object]] = {
    "get": lambda store: store.get("k"),
    "get_version": lambda store: store.get("k", version="v"),
    "put": lambda store: store.put("k", b"x"),
    "list": lambda store: list(store.list("p/")),
    "list_prefixes": lambda store: list(store.list_prefixes("p/")),
    "list_versions": lambda store: list(store.list_versions("k")),
    "delete": lambda store: store.delete("k"),
}


@pytest.mark.parametrize(
    ("call", "grant"),
    [
        ("get", "s3:ListBucket on the bucket without a prefix condition: without it S3 answers 403 instead of 404"),
        ("get_version", "s3:GetObjectVersion"),
        ("put", "s3:PutObject"),
        ("list", "s3:ListBucket"),
        ("list_prefixes", "s3:ListBucket"),
        ("list_versions", "s3:ListBucketVersions"),
        ("delete", "s3:DeleteObject"),
    ],
)
def test_403_names_what_to_grant(scripted: ScriptedServer, call: str, grant: str) -> None:
    scripted.answers = [error(403, "AccessDenied")]
    with pytest.raises(Denied) as caught:
        CALLS[call](scripted.store())
    assert grant in caught.value.remedy
    assert "url=s3://bucket/runs" in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("answer", [error(500, "InternalError"), error(503, "SlowDown"), error(429, "TooManyRequests"), Answer(0)])
def test_no_definite_answer(scripted: ScriptedServer, call: str, answer: Answer) -> None:
    scripted.answers = [answer]
    with pytest.raises(Unavailable) as caught:
        CALLS[call](scripted.store())
    assert caught.value.maybe_applied == (call in ("put", "delete"))
    assert len(scripted.requests) == 1


@pytest.mark.parametrize("call", CALLS)
def test_no_bucket(scripted: ScriptedServer, call: str) -> None:
    scripted.answers = [error(404, "NoSuchBucket")]
    with pytest.raises(UrlError, match="there is no such bucket: bucket=bucket"):
        CALLS[call](scripted.store())


@pytest.mark.parametrize(
    ("answer", "call", "expected", "text"),
    [
        (error(404, "NoSuchKey"), "get", NotFound, "key=k"),
        (error(404, "NoSuchVersion"), "get_version", NotFound, "version=v"),
        (error(400, "InvalidArgument"), "get_version", NotFound, "version=v"),
        (error(405, "MethodNotAllowed"), "get_version", NotFound, "version=v"),
        (error(400, "InvalidArgument"), "get", StoreError, "S3 refused the request"),
        (error(412, "PreconditionFailed"), "put", AlreadyExists, "key=k"),
        (error(409, "ConditionalRequestConflict"), "put", Unavailable, "concurrent write"),
        (error(400, "ExpiredToken"), "put", Denied, "AWS_ACCESS_KEY_ID"),
        (error(403, "SignatureDoesNotMatch"), "get", Denied, "does not accept the credentials"),
        (error(403, "RequestTimeTooSkewed"), "get", Denied, "clock of this machine"),
        (error(400, "AuthorizationHeaderMalformed"), "get", UrlError, "set AWS_REGION"),
        (error(400, "EntityTooLarge"), "put", StoreError, "EntityTooLarge"),
        (Answer(200, b"<html>a portal that wants a login</html>"), "list", StoreError, "no listing of S3"),
    ],
)
def test_definite_answers(scripted: ScriptedServer, answer: Answer, call: str, expected: type[Exception], text: str) -> None:
    scripted.answers = [answer]
    with pytest.raises(expected) as caught:
        CALLS[call](scripted.store())
    assert text in str(caught.value)


def test_conflict_is_not_applied_unless_tried_before(scripted: ScriptedServer) -> None:
    scripted.answers = [error(409, "ConditionalRequestConflict")]
    with pytest.raises(Unavailable) as caught:
        scripted.store().put("k", b"x")
    assert not caught.value.maybe_applied
    scripted.answers = [error(500, "InternalError"), error(409, "ConditionalRequestConflict")]
    with pytest.raises(Unavailable) as caught:
        scripted.store(attempts=2).put("k", b"x")
    assert caught.value.maybe_applied


def test_sdk_retry_of_an_applied_create_reads_as_exists(scripted: ScriptedServer) -> None:
    """The claim rule reads back then, and finds its own bytes."""
    scripted.answers = [error(500, "InternalError"), error(412, "PreconditionFailed")]
    with pytest.raises(AlreadyExists):
        scripted.store(attempts=2).put("k", b"x")


def test_body_that_breaks_off(scripted: ScriptedServer) -> None:
    scripted.answers = [Answer(200, b"0123456789", cut=4)]
    with pytest.raises(Unavailable) as caught:
        scripted.store().get("k")
    assert not caught.value.maybe_applied


def test_body_that_is_damaged(scripted: ScriptedServer) -> None:
    scripted.answers = [Answer(200, b"0123456789", {"x-amz-checksum-crc32": "AAAAAA=="})]
    with pytest.raises(Unavailable, match="(?i)checksum"):
        scripted.store().get("k")


def test_limit_before_the_body(scripted: ScriptedServer) -> None:
    scripted.answers = [Answer(200, b"x" * 10, {"Content-Length": str(2**40)})]
    with pytest.raises(LimitExceeded, match="size=1099511627776 limit=10"):
        scripted.store().get("k", max_bytes=10)


def test_server_that_ignores_ranges(scripted: ScriptedServer) -> None:
    scripted.answers = [Answer(200, b"0123456789")]
    with pytest.raises(StoreError, match="ignored a byte range"):
        scripted.store().get("k", byte_range=(0, 4))


def test_server_that_lists_out_of_order(scripted: ScriptedServer) -> None:
    def listing(*keys: str) -> Answer:
        rest = "<Size>1</Size><LastModified>2026-01-01T00:00:00Z</LastModified>"
        entries = "".join(f"<Contents><Key>runs/{key}</Key>{rest}</Contents>" for key in keys)
        return Answer(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>".encode())

    scripted.answers = [listing("p/", "p/a", "p/b b", "p/b")]
    assert [info.key for info in scripted.store().list("p/")] == ["p/a", "p/b"]
    assert [info.key for info in scripted.store().list("p/", start_after="p/a")] == ["p/b"]
    scripted.answers = [listing("p/b", "p/a")]
    with pytest.raises(StoreError, match="does not list in key order"):
        list(scripted.store().list("p/"))


def test_requests(scripted: ScriptedServer) -> None:
    scripted.answers = [Answer(200)]
    store = scripted.store()
    store.put("a/b", b"x")
    store.put("a/b", b"x", overwrite=True)
    store.delete("a/b")
    (create, overwrite, delete) = scripted.requests
    assert (create[0], create[1], create[2]["if-none-match"]) == ("PUT", "/bucket/runs/a/b", "*")
    assert "if-none-match" not in overwrite[2]
    assert (delete[0], delete[1].partition("?")[0]) == ("DELETE", "/bucket/runs/a/b")
    assert any(name.startswith("x-amz-checksum-") for name in create[2])
    scripted.store(checksum="when_required").put("a/b", b"x")
    assert not any(name.startswith("x-amz-checksum-") for name in scripted.requests[-1][2])


ENABLED = Answer(200, b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>")


def test_versions_are_asked_once(scripted: ScriptedServer) -> None:
    scripted.answers = [ENABLED]
    store = scripted.new_store()
    assert store.capabilities.versions
    assert store.capabilities.versions
    assert len(scripted.requests) == 1
    for answer in (error(403, "AccessDenied"), error(501, "NotImplemented"), Answer(200, b"<VersioningConfiguration/>")):
        scripted.answers = [answer]
        assert not scripted.new_store().capabilities.versions
    scripted.answers = [error(503, "SlowDown"), ENABLED]
    store = scripted.new_store()
    with pytest.raises(Unavailable):
        _ = store.capabilities
    assert store.capabilities.versions


def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        settings = S3Settings(endpoint_url=url, region="us-east-1", credentials=("id", "secret"), attempts=1)
        with pytest.raises(Unavailable, match="no complete answer from S3"):
            check_server(settings)


def test_silent_server_ends_in_a_timeout() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        settings = S3Settings(endpoint_url=url, region="us-east-1", credentials=("id", "secret"), attempts=1, read_timeout_s=0.2)
        with pytest.raises(Unavailable, match="(?i)timeout") as caught:
            S3Store("bucket", "", settings).put("k", b"x")
        assert caught.value.maybe_applied


@pytest.fixture
def no_aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without any AWS configuration."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def test_no_credentials(no_aws: None, monkeypatch: pytest.MonkeyPatch, scripted: ScriptedServer) -> None:
    with pytest.raises(Denied, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"):
        scripted.store(credentials=None).get("k")
    with pytest.raises(Denied, match=r"config profile \(absent\).*AWS_PROFILE"):
        scripted.store(credentials=None, profile="absent").get("k")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    with pytest.raises(Denied, match="AWS_SECRET_ACCESS_KEY"):
        scripted.store(credentials=None).get("k")
    assert scripted.requests == []


def test_environment_is_followed(no_aws: None, monkeypatch: pytest.MonkeyPatch, scripted: ScriptedServer) -> None:
    scripted.answers = [Answer(200, b"hello")]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", scripted.url)
    assert S3Store("bucket").get("k") == b"hello"
    assert scripted.requests[0][1] == "/bucket/k"


@pytest.mark.parametrize("settings", [{"endpoint_url": "not a url"}, {"region": "no region!"}, {"endpoint_url": "http://"}])
def test_bad_address(scripted: ScriptedServer, settings: dict[str, str]) -> None:
    with pytest.raises(UrlError, match="AWS_ENDPOINT_URL"):
        scripted.store(**settings).get("k")


def test_closed(moto_settings: S3Settings) -> None:
    store = S3Store(BUCKET, "x", moto_settings)
    store.put("a", b"1")
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.get("a")


def test_one_client_for_all_threads(moto_settings: S3Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    from ps_diloco.store import s3

    made = []
    make = s3._client

    def counted(settings: S3Settings) -> object:
        made.append(settings)
        return make(settings)

    monkeypatch.setattr(s3, "_client", counted)
    store = S3Store(BUCKET, "x", moto_settings)
    threads = [threading.Thread(target=store.put, args=(f"k/{number}", b"1")) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(store.list("k/"))) == 8
    assert len(made) == 1


# ---- objects in parts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["moto", "seaweedfs"], indirect=True)
def test_parts(store: Store) -> None:
    assert isinstance(store, S3Store)
    parted = S3Store(store.bucket, store.url.partition(store.bucket + "/")[2], store.settings, multipart_bytes=PART_BYTES_MIN)
    data = bytes(range(256)) * 2**13 * 5 + b"end"  # 10 MiB and 3 bytes: three parts
    version = parted.put("large", memoryview(data))
    assert version is not None
    assert parted.get("large") == data
    assert parted.get("large", byte_range=(PART_BYTES_MIN - 1, PART_BYTES_MIN + 1)) == b"\xff\x00"
    with pytest.raises(AlreadyExists):
        parted.put("large", data[::-1])
    assert parted.get("large") == data
    parted.put("large", data[::-1], overwrite=True)
    assert parted.get("large") == data[::-1]
    assert parted.get("large", version=version) == data
    with parted._errors("list") as client:
        uploads = client.list_multipart_uploads(Bucket=parted.bucket, Prefix=f"{parted._root}large")
    assert uploads.get("Uploads", []) == []


STARTED = Answer(200, b"<InitiateMultipartUploadResult><UploadId>u1</UploadId></InitiateMultipartUploadResult>")
SENT = Answer(200, headers={"ETag": '"e"'})


@pytest.mark.parametrize(
    ("answers", "expected", "maybe_applied"),
    [
        ([STARTED, SENT, error(500, "InternalError"), Answer(204)], Unavailable, False),
        ([STARTED, SENT, SENT, error(500, "InternalError"), Answer(204)], Unavailable, True),
        ([STARTED, SENT, SENT, error(404, "NoSuchUpload"), Answer(204)], Unavailable, True),
        ([STARTED, SENT, SENT, error(412, "PreconditionFailed"), Answer(204)], AlreadyExists, None),
        ([STARTED, SENT, SENT, error(412, "PreconditionFailed"), error(404, "NoSuchUpload")], AlreadyExists, None),
    ],
)
def test_failed_parts_are_abandoned(
    scripted: ScriptedServer, answers: list[Answer], expected: type[Exception], maybe_applied: bool | None
) -> None:
    scripted.answers = list(answers)
    store = S3Store("bucket", "runs", scripted.store().settings, multipart_bytes=PART_BYTES_MIN)
    with pytest.raises(expected) as caught:
        store.put("large", bytes(PART_BYTES_MIN + 1))
    assert getattr(caught.value, "maybe_applied", None) == maybe_applied
    assert scripted.requests[-1][0] == "DELETE"
    assert "uploadId=u1" in scripted.requests[-1][1]
    completions = [headers for method, path, headers in scripted.requests if method == "POST" and "uploadId" in path]
    assert all(headers["if-none-match"] == "*" for headers in completions)
