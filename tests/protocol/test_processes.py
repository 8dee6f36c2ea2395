"""Real processes on a directory, real threads on an S3 server: what simulated races promise holds there too."""

from __future__ import annotations

import multiprocessing
import random
import signal
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from aggregator.outer_step import Aggregator
from aggregator.serve import serve
from ps_diloco.cli.s3_server import LocalS3Server
from ps_diloco.env import Env
from ps_diloco.run import OpenRun, open_run
from ps_diloco.store import LocalStore, S3Settings, S3Store, Store, open_store
from tests.aggregator.bench import ADDITIVE, announce, seen_by, tiny_run
from tests.conftest import BUCKET
from tests.protocol.additive import WORK, Work, once_each, pass_until_idle, put_out, scene
from tests.protocol.test_races import racer

UNITS = "abcd"
MANY: Work = [
    (UNITS[i % 4], i // 4, i // 4 % 2, [0.25 * (i % 5), -1.0, 0.5, 2.0 + i] if i // 4 % 2 == 0 else [1.0, 0.125 * i, -0.5])
    for i in range(40)
]
SPAWN = multiprocessing.get_context("forkserver")
SPAWN.set_forkserver_preload(["aggregator.serve"])


def aggregate(root: str) -> None:
    """An aggregator process: until the run is final."""
    torch.set_num_threads(1)
    serve(open_run(LocalStore(root), Env.system()), stop=threading.Event(), poll_s=0.01)


def started(root: Path) -> BaseProcess:
    process = SPAWN.Process(target=aggregate, args=(str(root),), daemon=True)
    process.start()
    return process


def newer_than(version: int, run: OpenRun) -> int:
    """Wait for a version above ``version``; return it."""
    for _ in range(6000):
        if (found := run.log.find_head().record.version) > version:
            return found
        time.sleep(0.01)
    raise AssertionError("the head does not move")


def run_of(store: Store, work: Work) -> OpenRun:
    """A run that is final once all of ``work`` is merged."""
    tokens = sum(100 * (4, 3)[fragment] / 7 for _, _, fragment, _ in work)
    run = tiny_run(store, env=Env.system(), fragments=2, target_tokens=int(tokens) - 10, **ADDITIVE)
    for unit in sorted({unit for unit, _, _, _ in work}):
        announce(run, unit)
    return run


def test_two_aggregator_processes_that_are_killed_again_and_again_merge_each_contribution_once(tmp_path: Path) -> None:
    run = run_of(LocalStore(tmp_path / "run"), MANY)
    draw = random.Random(0)
    living = [started(tmp_path / "run") for _ in range(2)]
    version = 0
    for number, one in enumerate(MANY):
        put_out(run, [one])
        if number % 7 == 6:
            version = newer_than(version, run)
            time.sleep(0.02 * draw.random())  # anywhere in a pass
            victim = living.pop(draw.randrange(2))
            victim.kill()
            victim.join()
            assert victim.exitcode == -signal.SIGKILL
            living.append(started(tmp_path / "run"))
    for process in living:
        process.join(60.0)
    assert [process.exitcode for process in living] == [0, 0]
    assert once_each(run, MANY)[-1].final


def test_two_aggregators_on_an_s3_server_merge_each_contribution_once(seaweed: LocalS3Server, seaweed_url: str) -> None:
    store = open_store(seaweed_url, s3=seaweed.settings)
    run = run_of(store, MANY[:8])
    stop = threading.Event()
    threads = []
    for _ in range(2):
        mine = OpenRun(store=open_store(seaweed_url, s3=seaweed.settings), env=Env.system(), record=run.record)
        threads.append(threading.Thread(target=serve, args=(mine,), kwargs={"stop": stop, "poll_s": 0.02}, daemon=True))
    for thread in threads:
        thread.start()
    for one in MANY[:8]:
        put_out(run, [one])
    for thread in threads:
        thread.join(60.0)
    assert not any(thread.is_alive() for thread in threads)
    assert once_each(run, MANY[:8])[-1].final
    store.close()


def test_two_aggregators_in_a_random_order_of_calls_merge_each_contribution_once_on_moto(moto_settings: S3Settings) -> None:
    run = scene(WORK[:3], store=S3Store(BUCKET, "races", moto_settings))
    draw = random.Random(3)
    racers = [racer(run, number) for number in (1, 2)]
    while not all(one.finished for one in racers):
        draw.choice(racers).turns(draw.choice([0, 1, 4]))
    for one in racers:
        one.finish()
    assert pass_until_idle(Aggregator(seen_by(run, seed=9))) == ["idle"]
    once_each(run, WORK[:3])
