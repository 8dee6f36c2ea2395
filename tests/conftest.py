"""Fixtures for every test: stores of each kind, real servers among them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from hypothesis import HealthCheck, settings
from moto import mock_aws

from ps_diloco.cli.gcs_server import LocalGcsServer
from ps_diloco.cli.s3_server import LocalS3Server
from ps_diloco.env import Env, SeededEntropy, SystemClock
from ps_diloco.store import FsspecStore, GcsStore, LocalStore, MemoryStore, S3Settings, S3Store, Store
from ps_diloco.store.s3 import create_bucket

BUCKET = "ps-diloco-test"
STORES = ("memory", "local", "moto", "seaweedfs", "fake-gcs", "fsspec-memory")
_prefixes = itertools.count()

# a busy machine is no reason to fail
settings.register_profile("ps_diloco", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ps_diloco")
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def seaweed() -> Iterator[LocalS3Server]:
    """A real S3 server with the bucket ``BUCKET``, one for the whole session (for each worker of pytest-xdist), started on first use."""
    with LocalS3Server() as server:
        server.create_bucket(BUCKET)
        yield server


@pytest.fixture
def seaweed_url(seaweed: LocalS3Server) -> str:
    """An ``s3://`` URL below which nothing is yet; open it with ``s3=seaweed.settings``."""
    return f"s3://{BUCKET}/test-{next(_prefixes)}"


@pytest.fixture(scope="session")
def fake_gcs() -> Iterator[LocalGcsServer]:
    """A real GCS server with the versioned bucket ``BUCKET``, likewise."""
    with LocalGcsServer() as server:
        server.create_bucket(BUCKET)
        yield server


@pytest.fixture
def gcs_url(fake_gcs: LocalGcsServer) -> str:
    """A ``gs://`` URL below which nothing is yet; open it with ``gcs=fake_gcs.settings``."""
    return f"gs://{BUCKET}/test-{next(_prefixes)}"


@pytest.fixture
def moto_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Settings]:
    """S3 within this process and this test: for boto3 only, and not for races. Has the versioned bucket ``BUCKET``."""
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    settings = S3Settings(region="us-east-1", credentials=("test", "testtest"))
    with mock_aws():
        create_bucket(BUCKET, settings, versioned=True)
        yield settings


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """An empty store of each kind."""
    opened: Store
    if request.param == "memory":
        opened = MemoryStore()
    elif request.param == "local":
        opened = LocalStore(tmp_path / "store")
    elif request.param == "moto":
        opened = S3Store(BUCKET, "test", request.getfixturevalue("moto_settings"))
    elif request.param == "seaweedfs":
        opened = S3Store(BUCKET, f"test-{next(_prefixes)}", request.getfixturevalue("seaweed").settings)
    elif request.param == "fake-gcs":
        opened = GcsStore(BUCKET, f"test-{next(_prefixes)}", request.getfixturevalue("fake_gcs").settings)
    else:
        opened = FsspecStore(fsspec.filesystem("memory", global_store=False, skip_instance_cache=True), "/test")
    yield opened
    opened.close()


class SkippingClock(SystemClock):
    """Does not wait: sleeping moves ``monotonic`` on."""

    def __init__(self) -> None:
        self._skipped_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self._skipped_s

    def sleep(self, seconds: float) -> None:
        self._skipped_s += seconds


@pytest.fixture
def env() -> Env:
    """Repeatable names, and no waiting."""
    return Env(clock=SkippingClock(), entropy=SeededEntropy(0))
