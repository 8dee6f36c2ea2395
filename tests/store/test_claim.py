"""The claim rule (format §2): never two winners, own success recognised, "uncertain" said when it is; and the probe."""

from __future__ import annotations

import itertools
import multiprocessing
import multiprocessing.synchronize
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ps_diloco.cli.gcs_server import LocalGcsServer
from ps_diloco.cli.s3_server import LocalS3Server
from ps_diloco.env import Env
from ps_diloco.errors import AlreadyExists, Denied, PsDilocoError, Unavailable, UnsupportedStore
from ps_diloco.store import MemoryStore, S3Settings, Store, claim_object, open_store, probe_store
from ps_diloco.store.base import Buffer
from ps_diloco.store.claim import TRIES_MAX
from ps_diloco.store.s3 import check_server, create_bucket
from tests.stores import Call, Fault, FaultyStore, IgnoringCreateStore, WrappedStore

KEY = "manifests/000000/00000000000000000001.json"


def test_won_and_lost(store: Store, env: Env) -> None:
    first = claim_object(store, env, KEY, b"one")
    assert (first.won, first.body, first.key) == (True, b"one", KEY)
    second = claim_object(store, env, KEY, b"two")
    assert (second.won, second.body) == (False, b"one")
    again = claim_object(store, env, KEY, b"one")  # the same bytes are the same attempt
    assert again.won


def test_own_success_is_recognised_when_its_answer_is_lost(store: Store, env: Env) -> None:
    faulty = FaultyStore(store, plan={0: Fault.LOST_ANSWER})
    claim = claim_object(faulty, env, KEY, b"one")
    assert claim.won
    assert [call.verb for call in faulty.calls] == ["put", "get"]


def test_own_success_after_a_lost_answer_and_failed_reads(env: Env) -> None:
    faulty = FaultyStore(MemoryStore(), plan={0: Fault.LOST_ANSWER, 1: Fault.FAILED, 3: Fault.FAILED})
    assert claim_object(faulty, env, KEY, b"one").won
    assert [call.verb for call in faulty.calls] == ["put", "get", "put", "get", "put", "get"]


def test_failure_before_it_was_applied_is_repeated(env: Env) -> None:
    faulty = FaultyStore(MemoryStore(), plan={0: Fault.FAILED, 2: Fault.FAILED})
    assert claim_object(faulty, env, KEY, b"one").won
    assert faulty.inner.get(KEY) == b"one"


def test_somebody_else_was_first_while_the_store_failed(env: Env) -> None:
    def rival(call: Call) -> None:
        if call.number == 1:
            faulty.inner.put(KEY, b"theirs")

    faulty = FaultyStore(MemoryStore(), plan={0: Fault.FAILED}, before=rival)
    claim = claim_object(faulty, env, KEY, b"ours")
    assert (claim.won, claim.body) == (False, b"theirs")


def test_uncertain_when_nothing_answers(env: Env) -> None:
    faulty = FaultyStore(MemoryStore())
    faulty.down = True
    with pytest.raises(Unavailable, match="no definite answer to a conditional write") as caught:
        claim_object(faulty, env, KEY, b"one")
    assert caught.value.maybe_applied
    assert [call.verb for call in faulty.calls] == ["put", "get"] * TRIES_MAX
    faulty.down = False
    assert claim_object(faulty, env, KEY, b"one").won


def test_uncertain_although_applied(env: Env) -> None:
    plan = dict.fromkeys(range(2 * TRIES_MAX), Fault.FAILED) | {0: Fault.LOST_ANSWER}
    faulty = FaultyStore(MemoryStore(), plan=plan)
    with pytest.raises(Unavailable) as caught:
        claim_object(faulty, env, KEY, b"one")
    assert caught.value.maybe_applied
    assert claim_object(faulty, env, KEY, b"one").won


def test_late_first_put_cannot_undo_a_lost_claim(env: Env) -> None:
    """The first put is delivered after the claim was decided: create-if-absent drops it."""
    store = MemoryStore()
    assert claim_object(store, env, KEY, b"theirs").won
    assert not claim_object(store, env, KEY, b"ours").won
    with pytest.raises(AlreadyExists):
        store.put(KEY, b"ours")
    assert store.get(KEY) == b"theirs"


def test_denied_passes_through(env: Env) -> None:
    class DenyingStore(WrappedStore):
        def put(self, key: str, data: Buffer, *, overwrite: bool = False) -> str | None:
            raise Denied("no", key=key)

    with pytest.raises(Denied):
        claim_object(DenyingStore(MemoryStore()), env, KEY, b"one")


@pytest.mark.parametrize("seed", range(40))
def test_never_two_winners_under_faults(seed: int, env: Env) -> None:
    """Three contenders take turns on one key after the other, each with its own faults; uncertain ones repeat the same bytes."""
    inner = MemoryStore()
    rates = {Fault.FAILED: 0.25, Fault.LOST_ANSWER: 0.25}
    contenders = [FaultyStore(inner, seed=seed * 10 + number, rates=rates) for number in range(3)]
    for turn in range(10):
        key = f"k/{turn}"
        bodies = [f"{turn} {number}".encode() for number in range(3)]
        won: list[bool | None] = [None] * 3
        order = list(range(seed % 3, 3)) + list(range(seed % 3))
        for number in itertools.chain.from_iterable(itertools.repeat(order, 20)):
            if won[number] is None:
                try:
                    won[number] = claim_object(contenders[number], env, key, bodies[number]).won
                except Unavailable:
                    continue
        assert won.count(True) == 1
        assert None not in won
        assert inner.get(key) == bodies[won.index(True)]
        assert len(list(inner.list_versions(key))) == 1


def test_never_two_winners_among_threads(env: Env) -> None:
    inner, rounds, threads = MemoryStore(), 40, 8
    system = Env.system()
    barrier = threading.Barrier(threads)
    won: list[tuple[str, bytes]] = []

    def contend(number: int) -> None:
        faulty = FaultyStore(inner, seed=number, rates={Fault.LOST_ANSWER: 0.2})
        for turn in range(rounds):
            barrier.wait(60)
            body = f"{turn} {number} {system.entropy.attempt_id()}".encode()
            if claim_object(faulty, env, f"k/{turn:02d}", body).won:
                won.append((f"k/{turn:02d}", body))

    contenders = [threading.Thread(target=contend, args=(number,)) for number in range(threads)]
    for thread in contenders:
        thread.start()
    for thread in contenders:
        thread.join()
    assert sorted(won) == [(f"k/{turn:02d}", inner.get(f"k/{turn:02d}")) for turn in range(rounds)]


@pytest.mark.parametrize("faults", [{0: Fault.LOST_ANSWER}, {2: Fault.FAILED}, {0: Fault.FAILED, 2: Fault.LOST_ANSWER}])
def test_probe_refuses_a_store_that_ignores_create_if_absent(faults: dict[int, Fault], env: Env) -> None:
    ignoring = IgnoringCreateStore(MemoryStore())
    with pytest.raises(UnsupportedStore, match="a second create of one key succeeded"):
        probe_store(ignoring, env)
    try:
        probe_store(FaultyStore(ignoring, plan=faults), env)
    except (UnsupportedStore, Unavailable):
        return
    pytest.fail("the probe accepted it")


def test_probe_refuses_a_store_that_does_not_list(env: Env) -> None:
    with pytest.raises(UnsupportedStore, match="not listed"):
        probe_store(FaultyStore(MemoryStore(), list_lag=1), env)


def test_faulty_lists() -> None:
    inner = MemoryStore()
    lagging, frozen = FaultyStore(inner, list_lag=2), FaultyStore(inner)
    inner.put("a/x", b"")
    frozen.freeze_lists()
    inner.put("b/y", b"")
    inner.delete("a/x")
    assert [info.key for info in frozen.list("")] == ["a/x"]
    assert list(frozen.list_prefixes("")) == ["a/"]
    frozen.thaw_lists()
    assert [info.key for info in frozen.list("")] == ["b/y"]
    assert [[info.key for info in lagging.list("")] for _ in range(3)] == [[], [], ["b/y"]]


# ---- two real processes ------------------------------------------------------------------------------------------------


def race_in_process(
    url: str,
    settings: dict[str, Any],
    name: str,
    rounds: int,
    barrier: multiprocessing.synchronize.Barrier,
    results: multiprocessing.Queue[tuple[str, list[int] | str]],
) -> None:
    """Claim ``rounds`` keys against the other process; report which were won."""
    env = Env.system()
    store = open_store(url, **settings)
    try:
        list(store.list(""))  # connect before the race
        won = []
        for turn in range(rounds):
            body = f"{name} {turn} {env.entropy.attempt_id()}".encode()
            barrier.wait(60)
            if claim_object(store, env, f"race/{turn:03d}", body).won:
                won.append(turn)
        results.put((name, won))
    except (PsDilocoError, threading.BrokenBarrierError) as error:
        barrier.abort()
        results.put((name, repr(error)))


def race(url: str, rounds: int, **settings: Any) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    processes = [context.Process(target=race_in_process, args=(url, settings, name, rounds, barrier, results)) for name in ("p", "q")]
    for process in processes:
        process.start()
    try:
        outcome = dict(results.get(timeout=90) for _ in processes)
        for process in processes:
            process.join(30)
    finally:
        for process in processes:
            process.kill()
    assert sorted(outcome["p"] + outcome["q"]) == list(range(rounds)), outcome
    store = open_store(url, **settings)
    for name, turns in outcome.items():
        for turn in turns:
            assert store.get(f"race/{turn:03d}").startswith(f"{name} {turn} ".encode())


def test_two_processes_on_a_directory(tmp_path: Path) -> None:
    race(f"file://{tmp_path}", 200)


def test_two_processes_on_seaweedfs(seaweed: LocalS3Server, seaweed_url: str) -> None:
    race(seaweed_url, 5, s3=seaweed.settings)


def test_two_processes_on_fake_gcs(fake_gcs: LocalGcsServer, gcs_url: str) -> None:
    race(gcs_url, 100, gcs=fake_gcs.settings)


@pytest.fixture
def moto_server(env: Env) -> Iterator[S3Settings]:
    """moto in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    quiet = subprocess.DEVNULL
    url = f"http://127.0.0.1:{port}"
    settings = S3Settings(endpoint_url=url, region="us-east-1", credentials=("test", "testtest"), connect_timeout_s=5, read_timeout_s=30)
    with subprocess.Popen(command, stdout=quiet, stderr=quiet, env=dict(os.environ)) as process:
        try:
            for _ in range(100):
                try:
                    check_server(settings)
                    break
                except Unavailable:
                    assert process.poll() is None
            create_bucket("races", settings, versioned=True)
            yield settings
        finally:
            process.kill()


def test_two_processes_on_moto_server(moto_server: S3Settings) -> None:
    race("s3://races/run", 50, s3=moto_server)
