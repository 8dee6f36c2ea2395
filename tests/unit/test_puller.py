"""Following the head (format §7.6): hints are guesses (I9), versions never go back, damage and absence only delay."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from ps_diloco import keys
from ps_diloco.errors import Fenced, NotFound, PsDilocoError, UnknownFormat
from ps_diloco.records import Head, Parent, Stored, Timeline, encode
from ps_diloco.run import open_run
from ps_diloco.store.base import Store
from ps_diloco.unit.link import Link
from ps_diloco.unit.puller import PROBE_EVERY, News, Puller, read_news
from tests.stores import FaultyStore
from tests.unit.scene import Scene, fast_env, wait_until


class Reader:
    """A puller on ``store`` that joined at the version which is newest now."""

    def __init__(self, scene: Scene, store: Store | None = None) -> None:
        env = fast_env()
        run = open_run(store or scene.store, env)
        self.first = read_news(run, run.log.find_head(), None)
        self.news: list[News] = []
        self.errors: list[BaseException] = []
        self.stop = threading.Event()
        self.link = Link(env, self.stop, url="memory://x")
        self.puller = Puller(run, self.first, self.link, self.stop, poll_s=0.2, on_news=self.news.append, on_error=self.errors.append)

    def polls_needed(self, at_most: int = PROBE_EVERY + 1) -> int:
        """Polls until the newer version that exists is found."""
        for count in range(1, at_most + 1):
            if self.puller.poll():
                return count
        raise AssertionError("not found")

    @property
    def versions(self) -> list[int]:
        return [news.head.record.version for news in self.news]


def _advance(scene: Scene, steps: int = 1) -> None:
    """New versions: a unit publishes one contribution, the aggregator merges it, and so on."""
    with scene.join("mover") as mover:
        for _ in range(steps):
            mover.train(2)
            scene.aggregate(until=lambda: len(scene.records("mover")) == scene.head.units["mover"].merged == mover.unit.steps // 2)
            mover.settle(scene.head.version)
    scene.run.log.write_hint(scene.run.log.find_head())


def _garbage(scene: Scene) -> dict[str, bytes]:
    head = Head(run_id=scene.run.run_id, timeline=0, version=10**9, sha256="0" * 64, nonce="0" * 16)
    newest = scene.run.log.find_head()
    return {
        "rubbish": b"\x80\x04rubbish",
        "empty": b"",
        "large": b" " * (1 << 20),
        "another run's": encode(head.model_copy(update={"run_id": "f" * 32})),
        "a version that is not there": encode(head),
        "a timeline that is not there": encode(head.model_copy(update={"timeline": 9, "version": 0})),
        "a wrong hash": encode(head.model_copy(update={"version": newest.record.version})),
        "stale": encode(head.model_copy(update={"version": 0})),
        "another format": encode(head).replace(b'"format":0', b'"format":7'),
        "another kind": encode(head).replace(b'"head"', b'"run"'),
    }


def test_a_hint_shows_a_newer_version_at_once() -> None:
    scene = Scene()
    reader = Reader(scene)
    _advance(scene)
    assert reader.polls_needed(1) == 1
    assert reader.versions == [scene.head.version] and not reader.puller.poll()
    assert reader.news[0].values[0].sha256() == scene.value().sha256()


@pytest.mark.parametrize(
    "name",
    [
        "rubbish",
        "empty",
        "large",
        "another run's",
        "a version that is not there",
        "a timeline that is not there",
        "a wrong hash",
        "stale",
        "another format",
        "another kind",
    ],
)
def test_a_bad_hint_only_delays(name: str) -> None:
    scene = Scene()
    reader = Reader(scene)
    reader.puller.poll()
    _advance(scene)
    scene.store.put(keys.HEAD, _garbage(scene)[name], overwrite=True)
    assert reader.polls_needed() <= PROBE_EVERY
    assert reader.versions == [scene.head.version]
    assert not any(reader.puller.poll() for _ in range(PROBE_EVERY + 1))


def test_an_absent_hint_only_delays() -> None:
    scene = Scene()
    scene.store.delete(keys.HEAD)
    reader = Reader(scene)
    reader.puller.poll()
    _advance(scene)
    scene.store.delete(keys.HEAD)
    assert reader.polls_needed() <= PROBE_EVERY


def test_a_hint_to_the_past_never_leads_back() -> None:
    scene = Scene()
    old = scene.run.log.find_head()
    _advance(scene)
    reader = Reader(scene)
    scene.run.log.write_hint(old)
    assert not any(reader.puller.poll() for _ in range(2 * PROBE_EVERY))


def test_an_idle_poll_is_one_get_and_every_tenth_one_more() -> None:
    scene = Scene()
    store = FaultyStore(scene.store)
    reader = Reader(scene, store)
    store.calls.clear()
    for _ in range(PROBE_EVERY):
        reader.puller.poll()
    assert [call.verb for call in store.calls] == ["get"] * (PROBE_EVERY + 1)


def test_fragments_that_did_not_step_are_not_read_again() -> None:
    scene = Scene(fragments=3, sync_every=3)
    store = FaultyStore(scene.store)
    reader = Reader(scene, store)
    with scene.join("mover") as mover:
        mover.train(1)  # with 3 fragments and a cut every 3 steps only the first fragment is due after one
        scene.aggregate(until=lambda: scene.head.fragments[0].fragment_version == 1)
        scene.run.log.write_hint(scene.run.log.find_head())
        store.calls.clear()
        reader.polls_needed()
    data = [call.key for call in store.calls if call.key.startswith(("anchors/", "deltas/"))]
    assert len(data) == 1 and data[0].startswith("deltas/000000/0000/")
    assert reader.news[0].values[1] is reader.first.values[1]


def test_versions_that_were_missed_are_caught_up_with_deltas_alone() -> None:
    scene = Scene()
    store = FaultyStore(scene.store)
    reader = Reader(scene, store)
    _advance(scene, 3)
    store.calls.clear()
    reader.polls_needed()
    assert sum(call.key.startswith("deltas/") for call in store.calls) == 3
    assert not any(call.key.startswith("anchors/") for call in store.calls)
    assert reader.news[0].values[0].sha256() == scene.value().sha256()


def _run_thread(reader: Reader, until: Callable[[], bool]) -> None:
    reader.puller.start()
    try:
        wait_until(until)
    finally:
        reader.stop.set()
        reader.puller.join(30.0)
    assert not reader.puller._thread.is_alive()


def test_a_bucket_that_is_away_for_a_while_is_waited_for() -> None:
    scene = Scene()
    store = FaultyStore(scene.store)
    reader = Reader(scene, store)
    _advance(scene)
    store.down = True
    reader.puller.start()
    wait_until(lambda: len(store.faults) > 3)
    assert reader.link.away_s > 0 and not reader.news
    store.down = False
    wait_until(lambda: bool(reader.news))
    wait_until(lambda: reader.link.away_s == 0)
    reader.stop.set()
    reader.puller.join(30.0)
    assert reader.versions == [scene.head.version] and not reader.errors


def test_a_version_whose_objects_are_gone_is_passed_over_for_a_newer_one(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    reader = Reader(scene)
    _advance(scene)
    broken = scene.head.fragments[0].deltas[-1].object
    data = scene.store.get(broken.key)
    scene.store.delete(broken.key)
    with pytest.raises(NotFound):
        reader.polls_needed()
    reader.puller.start()
    wait_until(lambda: "cannot use a version" in caplog.text)
    scene.store.put(broken.key, data)
    wait_until(lambda: bool(reader.news))
    reader.stop.set()
    reader.puller.join(30.0)
    assert not reader.errors


def test_a_damaged_delta_is_not_handed_over(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    reader = Reader(scene)
    _advance(scene)
    key = scene.head.fragments[0].deltas[-1].object.key
    data = scene.store.get(key)
    scene.store.put(key, data[:-1] + bytes([data[-1] ^ 1]), overwrite=True)
    _run_thread(reader, lambda: "cannot use a version" in caplog.text)
    assert not reader.news and not reader.errors


def test_a_manifest_of_another_format_ends_the_unit() -> None:
    scene = Scene()
    reader = Reader(scene)
    body = encode(scene.head.model_copy(update={"version": 1})).replace(b'"format":0', b'"format":1')
    scene.store.put(keys.manifest(0, 1), body)
    _run_thread(reader, lambda: bool(reader.errors))
    assert isinstance(reader.errors[0], UnknownFormat) and not reader.news


def test_a_newer_timeline_ends_the_unit() -> None:
    scene = Scene()
    reader = Reader(scene)
    old = scene.run.log.find_head()
    parent = Parent(timeline=0, version=old.record.version, sha256=old.sha256)
    line = Timeline(
        run_id=scene.run.run_id,
        timeline=1,
        attempt="0" * 16,
        parent=parent,
        first_version=old.record.version + 1,
        config=0,
        reason="resumed",
        created_at="",
    )
    scene.store.put(keys.timeline(1), encode(line))
    forked = old.record.model_copy(update={"timeline": 1, "version": old.record.version + 1, "parent": parent})
    committed = scene.run.log.commit(forked)
    assert isinstance(committed, Stored)
    scene.run.log.write_hint(committed)
    _run_thread(reader, lambda: bool(reader.errors))
    assert isinstance(reader.errors[0], Fenced) and isinstance(reader.errors[0], PsDilocoError)


def test_after_the_final_version_nothing_is_polled() -> None:
    scene = Scene(target_tokens=10)
    reader = Reader(scene)
    _advance(scene)
    scene.aggregate(until=lambda: scene.head.final)
    reader.puller.start()
    wait_until(lambda: not reader.puller._thread.is_alive())
    assert reader.news[-1].head.record.final and not reader.errors
