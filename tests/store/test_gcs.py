"""What only GCS does: its errors, requests, generations. Answers come from a scripted server, for what real ones seldom say."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import google_crc32c
import pytest

from ps_diloco.env import Env
from ps_diloco.errors import AlreadyExists, Denied, LimitExceeded, NotFound, StoreError, Unavailable, UrlError
from ps_diloco.store import GcsSettings, GcsStore, claim_object
from ps_diloco.store.gcs import EMULATOR, check_server, create_bucket
from tests.scripted import Answer, Script, serve

LARGE = 8 * 2**20 + 1  # the SDK sends more than 8 MiB in a resumable upload


def error(status: int, message: str = "says the script", reason: str = "") -> Answer:
    details = {"code": status, "message": message, "errors": [{"message": message, "reason": reason}]}
    return Answer(status, json.dumps({"error": details}).encode())


def resource(body: bytes, generation: int = 7, **fields: Any) -> Answer:
    """What GCS says of an object, for example when it was written."""
    values = {"name": "runs/k", "generation": str(generation), "size": str(len(body)), "crc32c": crc32c(body)}
    return Answer(200, json.dumps(values | fields).encode())


def listing(*names: str, **fields: Any) -> Answer:
    items = [{"name": f"runs/{name}", "size": "1", "generation": "7", "timeCreated": "2026-01-01T00:00:00Z"} for name in names]
    return Answer(200, json.dumps({"kind": "storage#objects", "items": items} | fields).encode())


def crc32c(body: bytes) -> str:
    return base64.b64encode(google_crc32c.value(body).to_bytes(4, "big")).decode()


@dataclass
class ScriptedServer(Script):
    """A script with stores that reach it."""

    stores: dict[str, GcsStore] = field(default_factory=dict)

    def new_store(self, **settings: Any) -> GcsStore:
        given: dict[str, Any] = {"endpoint_url": self.url, "anonymous": True, "attempts": 1}
        return GcsStore("bucket", "runs", GcsSettings(**(given | settings)))

    def store(self, **settings: Any) -> GcsStore:
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


CALLS: dict[str, Callable[[GcsStore], object]] = {
    "get": lambda store: store.get("k"),
    "get_version": lambda store: store.get("k", version="5"),
    "put": lambda store: store.put("k", b"x"),
    "put_large": lambda store: store.put("k", bytes(LARGE)),
    "list": lambda store: list(store.list("p/")),
    "list_prefixes": lambda store: list(store.list_prefixes("p/")),
    "list_versions": lambda store: list(store.list_versions("k")),
    "delete": lambda store: store.delete("k"),
}
WRITES = ("put", "put_large", "delete")


@pytest.mark.parametrize(
    ("call", "permission"),
    [
        ("get", "storage.objects.list: without it GCS answers 403 instead of 404"),
        ("get_version", "storage.objects.get"),
        ("put", "overwriting head.json and heartbeats needs storage.objects.delete too"),
        ("put_large", "storage.objects.create"),
        ("list", "storage.objects.list"),
        ("list_prefixes", "storage.objects.list"),
        ("list_versions", "storage.objects.list"),
        ("delete", "storage.objects.delete"),
    ],
)
def test_403_names_what_to_grant(scripted: ScriptedServer, call: str, permission: str) -> None:
    scripted.answers = [error(403, "caller does not have access", "forbidden")]
    with pytest.raises(Denied, match="caller does not have access") as caught:
        CALLS[call](scripted.store())
    assert "roles/storage.objectUser" in caught.value.remedy
    assert permission in caught.value.remedy
    assert "url=gs://bucket/runs" in str(caught.value)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("answer", [error(500), error(503), error(429, "rate limit"), error(403, "slow", "rateLimitExceeded"), Answer(0)])
def test_no_definite_answer(scripted: ScriptedServer, call: str, answer: Answer) -> None:
    scripted.answers = [answer]
    with pytest.raises(Unavailable) as caught:
        CALLS[call](scripted.store())
    assert caught.value.maybe_applied == (call in WRITES)
    assert len(scripted.requests) == 1


@pytest.mark.parametrize("call", CALLS)
def test_no_bucket(scripted: ScriptedServer, call: str) -> None:
    scripted.answers = [error(404, "The specified bucket does not exist.", "notFound")]
    with pytest.raises(UrlError, match="there is no such bucket: bucket=bucket"):
        CALLS[call](scripted.store())


@pytest.mark.parametrize(
    ("answer", "call", "expected", "text"),
    [
        (error(404, "No such object: bucket/runs/k"), "get", NotFound, "key=k"),
        (Answer(404, b"No such object: bucket/runs/k"), "get_version", NotFound, "version=5"),
        (error(400, "Invalid argument."), "get_version", NotFound, "version=5"),
        (error(400, "Invalid argument."), "get", StoreError, "GCS refused the request"),
        (error(412, "At least one of the pre-conditions you specified did not hold."), "put", AlreadyExists, "key=k"),
        (error(412, "At least one of the pre-conditions you specified did not hold."), "put_large", AlreadyExists, "key=k"),
        (
            error(401, "Anonymous caller does not have storage.objects.create access"),
            "put",
            Denied,
            "gcloud auth application-default login",
        ),
        (error(400, 'Provided CRC32C "AAAAAA==" doesn\'t match calculated CRC32C "x".'), "put", Unavailable, "damaged on its way"),
        (error(413), "put", StoreError, "status=413"),
        (error(501), "list", StoreError, "status=501"),
        (Answer(200, b"<html>a portal that wants a login</html>"), "list", Unavailable, "no complete answer from GCS"),
    ],
)
def test_definite_answers(scripted: ScriptedServer, answer: Answer, call: str, expected: type[Exception], text: str) -> None:
    scripted.answers = [answer]
    with pytest.raises(expected) as caught:
        CALLS[call](scripted.store())
    assert text in str(caught.value)
    assert not getattr(caught.value, "maybe_applied", False)


def test_absent_is_no_error_when_deleting(scripted: ScriptedServer) -> None:
    scripted.answers = [error(404, "No such object: bucket/runs/k")]
    scripted.store().delete("k")
    scripted.store().delete("k", version="no generation")
    with pytest.raises(NotFound):
        scripted.store().get("k", version="no generation")
    assert len(scripted.requests) == 1


def test_tries_are_counted(scripted: ScriptedServer) -> None:
    scripted.answers = [error(503), error(429), resource(b"x")]
    assert scripted.store(attempts=3).put("k", b"x") == "7"
    scripted.clear()
    scripted.answers = [error(503)]
    with pytest.raises(Unavailable):
        scripted.store(attempts=2).get("k")
    assert len(scripted.requests) == 2


def test_every_page_has_its_tries(scripted: ScriptedServer) -> None:
    pages = [listing(f"p/{number}", nextPageToken=str(number)) for number in range(3)]
    scripted.answers = [answer for page in pages for answer in (error(503), page)] + [listing("p/3")]
    assert [info.key for info in scripted.store(attempts=2).list("p/")] == ["p/0", "p/1", "p/2", "p/3"]


def test_generations_in_pages(scripted: ScriptedServer) -> None:
    def page(*generations: int, **fields: Any) -> Answer:
        common = {"name": "runs/k", "size": "1", "timeCreated": "2026-01-01T00:00:00Z"}
        return Answer(200, json.dumps({"items": [common | {"generation": str(one)} for one in generations]} | fields).encode())

    scripted.answers = [page(1, 2, nextPageToken="a"), page(3, nextPageToken="b"), page(10, 4)]
    assert [info.version for info in scripted.store().list_versions("k")] == ["10", "4", "3", "2", "1"]
    first, second = (path for _, path, _ in scripted.requests[:2])
    assert "versions=true" in first
    assert "endOffset=runs%2Fk%21" in first
    assert "pageToken=a" in second


def test_sdk_retry_of_an_applied_create_is_won_by_reading_back(scripted: ScriptedServer, env: Env) -> None:
    scripted.answers = [error(503), error(412)]
    with pytest.raises(AlreadyExists):
        scripted.store(attempts=2).put("k", b"x")
    for standing, won in ((b"x", True), (b"y", False)):
        scripted.answers = [error(503), error(412), Answer(200, standing, {"X-Goog-Hash": f"crc32c={crc32c(standing)}"})]
        assert claim_object(scripted.store(attempts=2), env, "k", b"x").won is won


def test_body_that_breaks_off(scripted: ScriptedServer) -> None:
    body = bytes(range(256)) * 64
    whole = {"X-Goog-Hash": f"crc32c={crc32c(body)}"}
    scripted.answers = [Answer(200, body, cut=4)]
    with pytest.raises(Unavailable) as caught:
        scripted.store().get("k")
    assert not caught.value.maybe_applied
    # the SDK asks for the rest of what it has, in pieces of 8 KiB; we check what it put together
    scripted.answers = [Answer(200, body, whole, cut=4), Answer(206, body[8192:], whole)]
    assert scripted.store(attempts=2).get("k") == body
    assert scripted.requests[-1][2]["range"] == "bytes=8192-"
    scripted.answers = [Answer(200, body, whole, cut=4), Answer(206, bytes(8192), whole)]
    with pytest.raises(Unavailable, match="does not have the object's checksum"):
        scripted.store(attempts=2).get("k")


def test_body_that_is_damaged(scripted: ScriptedServer) -> None:
    scripted.answers = [Answer(200, b"0123456789", {"X-Goog-Hash": "crc32c=AAAAAA==,md5=xxxx"})]
    with pytest.raises(Unavailable, match="does not have the object's checksum"):
        scripted.store().get("k")


def test_limit_before_the_body(scripted: ScriptedServer) -> None:
    scripted.answers = [Answer(200, bytes(2**16), {"Content-Length": str(2**40)}), resource(b"", size=str(2**40))]
    with pytest.raises(LimitExceeded, match="size=1099511627776 limit=10"):
        scripted.store().get("k", max_bytes=10)


def test_server_that_ignores_ranges(scripted: ScriptedServer) -> None:
    scripted.answers = [Answer(200, b"0123456789"), resource(b"0123456789")]
    with pytest.raises(StoreError, match="more than was asked for"):
        scripted.store().get("k", byte_range=(0, 4))


def test_server_that_stored_other_bytes(scripted: ScriptedServer) -> None:
    """Only servers that do not check: the generation that stands there is taken away again."""
    scripted.answers = [resource(b"y"), Answer(204)]
    with pytest.raises(Unavailable, match="stored other bytes") as caught:
        scripted.store().put("k", b"x")
    assert caught.value.maybe_applied
    method, path, _ = scripted.requests[-1]
    assert (method, "generation=7" in path) == ("DELETE", True)


def test_server_that_lists_out_of_order(scripted: ScriptedServer) -> None:
    scripted.answers = [listing("p/", "p/a", "p/b b", "p/b")]
    assert [info.key for info in scripted.store().list("p/")] == ["p/a", "p/b"]
    assert [info.key for info in scripted.store().list("p/", start_after="p/a")] == ["p/b"]
    assert "startOffset=runs%2Fp%2Fa" in scripted.requests[-1][1]
    scripted.answers = [listing("p/b", "p/a")]
    with pytest.raises(StoreError, match="does not list in key order"):
        list(scripted.store().list("p/"))


def test_requests(scripted: ScriptedServer) -> None:
    scripted.answers = [resource(b"x")]
    store = scripted.store()
    store.put("a/b", b"x")
    store.put("a/b", b"x", overwrite=True)
    store.delete("a/b", version="5")
    create, overwrite, delete = scripted.requests
    assert create[:2] == ("POST", "/upload/storage/v1/b/bucket/o?uploadType=multipart&ifGenerationMatch=0")
    assert f'"crc32c": "{crc32c(b"x")}"'.encode() in scripted.bodies[0]
    assert "ifGenerationMatch" not in overwrite[1]
    assert delete[0] == "DELETE"
    assert delete[1].startswith("/storage/v1/b/bucket/o/runs%2Fa%2Fb?generation=5")
    assert not any("authorization" in headers for _, _, headers in scripted.requests)
    scripted.answers = [Answer(200, b"45")]
    assert store.get("a/b", version="5", byte_range=(4, 6)) == b"45"
    method, path, headers = scripted.requests[-1]
    assert (method, path, headers["range"]) == ("GET", "/download/storage/v1/b/bucket/o/runs%2Fa%2Fb?alt=media&generation=5", "bytes=4-5")


def test_large_create_is_a_conditional_resumable_upload(scripted: ScriptedServer) -> None:
    data = bytes(LARGE)
    session = {"Location": f"{scripted.url}/upload/session?upload_id=secret"}
    scripted.answers = [Answer(200, headers=session), resource(data)]
    assert scripted.store().put("k", data) == "7"
    begin, send = scripted.requests
    assert begin[:2] == ("POST", "/upload/storage/v1/b/bucket/o?uploadType=resumable&ifGenerationMatch=0")
    assert f'"crc32c": "{crc32c(data)}"'.encode() in scripted.bodies[0]
    assert (send[0], send[2]["content-range"]) == ("PUT", f"bytes 0-{LARGE - 1}/{LARGE}")
    for answer, expected, maybe_applied in (
        (error(412), AlreadyExists, None),  # the condition is checked when the upload is complete
        (error(404), Unavailable, True),
        (error(410), Unavailable, True),
        (Answer(0), Unavailable, True),
    ):
        scripted.answers = [Answer(200, headers=session), answer]
        with pytest.raises(expected) as caught:
            scripted.store().put("k", data)
        assert getattr(caught.value, "maybe_applied", None) == maybe_applied
        assert "secret" not in str(caught.value)


def test_versions_are_asked_once(scripted: ScriptedServer) -> None:
    scripted.answers = [Answer(200, b'{"versioning": {"enabled": true}}')]
    store = scripted.new_store()
    assert store.capabilities.versions
    assert store.capabilities.versions
    assert len(scripted.requests) == 1
    store.close()
    for answer in (error(403), Answer(200, b"{}")):
        scripted.answers = [answer]
        store = scripted.new_store()
        assert not store.capabilities.versions
        store.close()
    scripted.answers = [error(503), Answer(200, b'{"versioning": {"enabled": true}}')]
    store = scripted.new_store()
    with pytest.raises(Unavailable):
        _ = store.capabilities
    assert store.capabilities.versions
    store.close()


def test_versions_of_a_bucket_without(scripted: ScriptedServer) -> None:
    scripted.answers = [listing("k"), Answer(200, b"{}")]
    store = scripted.new_store()
    assert list(store.list_versions("k")) == []
    scripted.answers = [listing("k", "k"), error(403)]  # may not ask, but sees them
    assert len(list(store.list_versions("k"))) == 2
    store.close()


def test_creating_a_bucket_that_is_there(scripted: ScriptedServer) -> None:
    settings = GcsSettings(endpoint_url=scripted.url, anonymous=True, attempts=1)
    scripted.answers = [error(409, "You already own this bucket."), Answer(200, b"{}")]
    create_bucket("bucket", settings, versioned=True)
    assert scripted.requests[-1][0] == "PATCH"
    assert b'"enabled": true' in scripted.bodies[-1]


def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        settings = GcsSettings(endpoint_url=f"http://127.0.0.1:{free.getsockname()[1]}", anonymous=True, attempts=1)
        with pytest.raises(Unavailable, match="no complete answer from GCS"):
            check_server(settings)


def test_silent_server_ends_in_a_timeout() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        store = GcsStore("bucket", "", GcsSettings(endpoint_url=url, anonymous=True, attempts=1, read_timeout_s=0.2))
        with pytest.raises(Unavailable, match="(?i)timed out") as caught:
            store.put("k", b"x")
        assert caught.value.maybe_applied
        store.close()


def test_closed(scripted: ScriptedServer) -> None:
    scripted.answers = [resource(b"x")]
    store = scripted.new_store()
    store.put("k", b"x")
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.get("k")


# ---- credentials ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_google(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without any Google configuration, that is not Google's."""
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_CLOUD_PROJECT", EMULATOR):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")


def test_no_credentials(no_google: None, monkeypatch: pytest.MonkeyPatch, scripted: ScriptedServer, tmp_path: Path) -> None:
    for content in (None, "{}", "no json"):
        if content is not None:
            (tmp_path / "key.json").write_text(content)
            monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
        with pytest.raises(Denied, match="no usable Google credentials.*gcloud auth application-default login"):
            scripted.new_store(anonymous=False).get("k")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "absent.json"))
    with pytest.raises(Denied, match=r"absent\.json"):
        scripted.new_store(anonymous=False).get("k")
    assert scripted.requests == []


@pytest.mark.parametrize(
    ("answer", "expected", "text"),
    [
        (
            Answer(400, b'{"error": "invalid_grant", "error_description": "Token has been expired or revoked."}'),
            Denied,
            "expired or revoked",
        ),
        (Answer(503, b"{}"), Unavailable, "token server does not answer"),
    ],
)
def test_credentials_that_give_no_token(
    no_google: None,
    monkeypatch: pytest.MonkeyPatch,
    scripted: ScriptedServer,
    tmp_path: Path,
    answer: Answer,
    expected: type[Exception],
    text: str,
) -> None:
    from google.oauth2 import credentials

    monkeypatch.setattr(credentials, "_GOOGLE_OAUTH2_TOKEN_ENDPOINT", scripted.url)
    monkeypatch.setattr("google.auth._exponential_backoff.time.sleep", lambda seconds: None)
    secret = {"type": "authorized_user", "client_id": "id", "client_secret": "secret", "refresh_token": "refresh"}
    (tmp_path / "user.json").write_text(json.dumps(secret))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "user.json"))
    scripted.answers = [answer]
    store = scripted.new_store(anonymous=False)
    with pytest.raises(expected, match=text) as caught:
        store.put("k", b"x")
    assert "secret" not in str(caught.value)
    assert all("upload" not in path for _, path, _ in scripted.requests)
    store.close()


def test_environment_is_followed(no_google: None, monkeypatch: pytest.MonkeyPatch, scripted: ScriptedServer) -> None:
    scripted.answers = [Answer(200, b"hello")]
    monkeypatch.setenv(EMULATOR, scripted.url)
    store = GcsStore("bucket")
    assert store.get("k") == b"hello"
    assert scripted.requests[0][1] == "/download/storage/v1/b/bucket/o/k?alt=media"
    store.close()
    monkeypatch.setenv(EMULATOR, "localhost:4443")
    with pytest.raises(UrlError, match="write STORAGE_EMULATOR_HOST or the endpoint like http://"):
        GcsStore("bucket").get("k")
