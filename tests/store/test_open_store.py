"""What a user may type as a store, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ps_diloco.errors import UrlError
from ps_diloco.store import GcsSettings, GcsStore, LocalStore, MemoryStore, S3Settings, S3Store, open_store


def test_s3() -> None:
    settings = S3Settings(region="eu-west-1")
    store = open_store("s3://bucket.name-1/runs/a/", s3=settings)
    assert isinstance(store, S3Store)
    assert store.settings is settings
    assert store.url == "s3://bucket.name-1/runs/a"
    assert open_store("S3://bucket").url == "s3://bucket"
    assert open_store("s3://bucket/").url == "s3://bucket"


def test_gcs() -> None:
    settings = GcsSettings(project="p")
    store = open_store("gs://bucket_name-1.org/runs/a/", gcs=settings)
    assert isinstance(store, GcsStore)
    assert store.settings is settings
    assert store.url == "gs://bucket_name-1.org/runs/a"
    assert open_store("gcs://bucket").url == "gs://bucket"


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for url, root in {
        "runs/a": tmp_path / "runs/a",
        "./s3:odd": tmp_path / "s3:odd",
        "~/run": tmp_path / "home/run",
        f"{tmp_path}/x y": tmp_path / "x y",
        f"file://{tmp_path}/x%20y/": tmp_path / "x y",
    }.items():
        store = open_store(url)
        assert isinstance(store, LocalStore)
        assert store.root == root
        assert not root.exists()


def test_memory_is_shared_by_name() -> None:
    store = open_store("memory://test-open/a")
    assert isinstance(store, MemoryStore)
    assert open_store("memory://test-open/a") is store
    assert open_store("memory://test-open/b") is not store
    assert store.url == "memory://test-open/a"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "not the URL of a store"),
        ("gopher://bucket/x", "not the URL of a store: url='gopher://bucket/x'; use s3://bucket/prefix, gs://bucket/prefix, file:///path"),
        ("https://bucket.s3.amazonaws.com/x", "use s3://bucket/prefix"),
        ("s3:/bucket/x", "./s3:/bucket/x if it is a path"),
        ("s3://", "names no bucket"),
        ("s3:///prefix", "names no bucket"),
        ("s3://ab", "3 to 63 characters"),
        ("s3://Bucket/x", "not the name of a bucket: url='s3://Bucket/x' bucket='Bucket'"),
        ("s3://my_bucket/x", "not the name of a bucket"),
        ("s3://key:secret@bucket/x", "not the name of a bucket"),
        ("s3://bucket//x", "not a prefix of keys"),
        ("s3://bucket/a/../b", "prefix='a/../b'"),
        ("s3://bucket/a b", "not a prefix of keys"),
        ("s3://bucket/a?region=x", "not a prefix of keys"),
        ("gs://", "names no bucket"),
        ("gs://Bucket/x", "write gs://bucket/prefix; a bucket has 3 to 63 characters"),
        ("gs://bucket//x", "write gs://bucket/prefix; a prefix has segments of"),
        ("gs/bucket/x", "a URL has a colon after its scheme: url='gs/bucket/x'; write gs://..., or ./gs/bucket/x if it is a path"),
        ("file://host/path", "three slashes"),
        ("file:/path", "if it is a path"),
        ("file:///a%00b", "absolute path"),
        ("a\0b", "not the URL"),
        ("memory://", "memory://name"),
        ("memory://a b", "memory://name"),
        ("/", "root of the file system"),
        ("~nobody-has-this-name/x", "home directory"),
    ],
)
def test_refused(url: str, message: str) -> None:
    with pytest.raises(UrlError) as caught:
        open_store(url)
    assert message in str(caught.value)


def test_a_file_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(UrlError, match="not a directory"):
        open_store(str(tmp_path / "run"))


def test_sdks_are_imported_on_first_use_only() -> None:
    code = (
        "import sys; from ps_diloco.store import open_store; open_store('gs://bucket/x'); open_store('s3://bucket/x');"
        "sys.exit(any(name in sys.modules for name in ('google.cloud.storage', 'google.auth', 'botocore')))"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=root, env=os.environ | {"PYTHONPATH": str(root)})
