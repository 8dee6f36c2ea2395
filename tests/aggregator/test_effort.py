"""However many threads work and however far ahead shards are fetched: the same versions, and the same decisions about what cannot be used."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ps_diloco.outer
import ps_diloco.shard
from aggregator.fragment_step import MODEST, Effort, _ahead
from aggregator.outer_step import Aggregator
from ps_diloco import CreateSettings, RunSettings, create_run
from ps_diloco.records import Manifest
from ps_diloco.run import OpenRun
from ps_diloco.store import MemoryStore
from ps_diloco.threads import SystemThreads
from tests.aggregator.bench import Unreadable, announce, fake_env, publish, seen_by, walk

EFFORTS = [Effort(threads=2), Effort(fetch_ahead=1), Effort(threads=3, fetch_ahead=2), Effort(threads=8, fetch_ahead=9)]
ELEMENTS = 5_000


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fragment of five chunks without five times 2^22 numbers."""
    for module in (ps_diloco.shard, ps_diloco.outer):
        monkeypatch.setattr(module, "CHUNK", 1024)


def decided(effort: Effort) -> tuple[OpenRun, list[Manifest]]:
    """Four units over three rounds; the shard of one cannot be read for a while, another one lies about its values."""
    model = nn.Linear(ELEMENTS, 1, bias=False)
    nn.init.zeros_(model.weight)
    run = create_run(MemoryStore(), fake_env(), model, create=CreateSettings(), settings=RunSettings())
    for unit in "abcd":
        announce(run, unit)
    store = Unreadable(run.store)
    aggregator = Aggregator(seen_by(run, store=store), effort=effort)
    aggregator.take_pass()
    draw = torch.Generator().manual_seed(0)
    for seq in range(3):
        for unit in "abcd":
            lie = (
                (lambda record: record.model_copy(update={"sum_squares": (1e-9,)})) if (unit, seq) == ("c", 1) else (lambda record: record)
            )
            record = publish(
                run, unit, seq, torch.randn(ELEMENTS, generator=draw).tolist(), codec="int4", floats=[], ints=[], edit=lie, tokens=100 + seq
            )
            if (unit, seq) == ("b", 1):
                store.key = record.shards[0].ref.key
        aggregator.take_pass()
        store.broken = False
    aggregator.take_pass()
    return run, walk(run)


@pytest.mark.parametrize("effort", EFFORTS, ids=str)
def test_versions_do_not_depend_on_how_much_one_process_does_at_once(effort: Effort, small_chunks: None) -> None:
    _, expected = decided(MODEST)
    run, history = decided(effort)
    assert [entry.sha256 for manifest in history for entry in manifest.fragments] == [e.sha256 for m in expected for e in m.fragments]
    assert [manifest.steps for manifest in history] == [
        tuple(
            step.model_copy(
                update={"merged": tuple(m.model_copy(update={"record": o.record}) for m, o in zip(step.merged, ours.merged, strict=True))}
            )
            for step, ours in zip(manifest.steps, mine.steps, strict=True)
        )
        for manifest, mine in zip(expected, history, strict=True)
    ]
    assert [refused.reason for manifest in history for refused in manifest.refused] == ["corrupt"]
    assert history[-1].units["b"].outcomes == "mmm"
    assert len(run.layout.fragments) == 1


@pytest.mark.parametrize("count", [0, 1, 2, 5, 9])
def test_what_is_fetched_ahead_comes_in_order_and_so_do_errors(count: int) -> None:
    def half(number: int) -> float:
        if number == 3:
            raise KeyError(number)
        return number / 2

    got: list[float | str] = []
    for result in _ahead(half, range(6), count, SystemThreads()):
        try:
            got.append(result())
        except KeyError:
            got.append("gone")
    assert got == [0.0, 0.5, 1.0, "gone", 2.0, 2.5]
    assert list(_ahead(half, [], count, SystemThreads())) == []


def test_no_more_is_begun_than_asked_for() -> None:
    begun: list[int] = []
    results = _ahead(begun.append, range(10), 2, SystemThreads())
    next(results)()
    assert len(begun) <= 3
    results.close()
    assert len(begun) <= 3
