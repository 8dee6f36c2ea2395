"""Publishing (format §7.3): one record in flight, numbers never used twice, whatever the answers of the bucket are."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from ps_diloco import keys
from ps_diloco.errors import Denied, Fenced
from ps_diloco.fragment import FragmentValue
from ps_diloco.ids import ContributionId
from ps_diloco.records import Base, decode
from ps_diloco.records import Contribution as Record
from ps_diloco.run import open_run
from ps_diloco.shard import encode_section
from ps_diloco.store.base import Store
from ps_diloco.unit.link import Link
from ps_diloco.unit.outbox import Identity, Outbox
from ps_diloco.unit.state import Pending
from tests.stores import Call, Fault, FaultyStore, WrappedStore
from tests.unit.scene import Scene, fast_env, wait_until

WHO = Identity(timeline=0, unit="a", incarnation=0)


class Post:
    """An outbox on ``store``, with its thread."""

    def __init__(self, scene: Scene, store: Store, *, listed: bool = True) -> None:
        self.scene = scene
        self.stop = threading.Event()
        self.errors: list[BaseException] = []
        env = fast_env()
        link = Link(env, self.stop, url="memory://x")
        self.outbox = Outbox(open_run(store, env), WHO, link, self.stop, on_error=self.errors.append)
        if listed:
            self.outbox.listed.set()
        self.put_count = 0

    def put(self, number: float) -> Pending:
        """Queue a cut whose every value is ``number``."""
        value = FragmentValue.zeros(self.scene.run.layout.fragments[0])
        x = torch.full_like(value.params, number)
        head = self.scene.head.fragments[0]
        pending = Pending(
            fragment=0,
            section=encode_section("params", "none", x),
            floats_B=value.floats,
            ints_I=value.ints,
            displacement=x,
            payload_total=0.0,
            tokens=1 + int(number),
            steps=1,
            inner_steps=1,
            base=Base(fragment_version=0, sha256=head.sha256),
            sum_squares=tuple(number * number * entry.size for entry in self.scene.run.layout.of(0)),
            loss=None,
            resent=False,
        )
        assert self.outbox.put(pending) == self.put_count
        self.put_count += 1
        return pending


@contextmanager
def _posting(scene: Scene, store: Store, *, listed: bool = True) -> Iterator[Post]:
    post = Post(scene, store, listed=listed)
    post.outbox.start()
    try:
        yield post
    finally:
        post.stop.set()
        post.outbox.join(30.0)


def test_cuts_are_published_in_order_and_can_be_merged() -> None:
    scene = Scene()
    with scene.join("a"):
        scene.pass_once()  # lists incarnation 0
    with _posting(scene, scene.store) as post:
        pendings = [post.put(float(n)) for n in range(5)]
        assert post.outbox.wait_published(5, 30.0)
        assert post.outbox.published == 5 and post.outbox.accepted == 5
    assert [pending.seq for pending in pendings] == list(range(5))
    assert [record.tokens for record in scene.records("a")] == [1, 2, 3, 4, 5]
    scene.pass_once()
    assert scene.head.units["a"].outcomes == "mmmmm"


def test_nothing_is_published_before_the_incarnation_is_listed() -> None:
    scene = Scene()
    store = FaultyStore(scene.store)
    with _posting(scene, store, listed=False) as post:
        pending = post.put(1.0)
        assert not post.outbox.wait_published(1, 0.3)
        assert pending.seq is None and not any(call.verb == "put" for call in store.calls)
        post.outbox.listed.set()
        assert post.outbox.wait_published(1, 30.0)


def test_a_number_is_given_before_anything_is_written_under_it() -> None:
    """A decision about it may be read as soon as the record stands, so the number must be known by then."""
    scene = Scene()
    seen: list[tuple[str, int | None]] = []
    pending: list[Pending] = []

    def look(call: Call) -> None:
        if call.verb == "put":
            seen.append((call.key, pending[0].seq))

    with _posting(scene, FaultyStore(scene.store, before=look), listed=False) as post:
        pending.append(post.put(1.0))
        post.outbox.listed.set()
        assert post.outbox.wait_published(1, 30.0)
    (shard, first), (record, second) = seen
    assert shard.endswith("-r00000.shard") and record == keys.record(ContributionId(0, "a", 0, 0))
    assert first == second == 0


@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize("call", range(8))
def test_a_lost_answer_at_any_call_gives_neither_two_records_nor_a_gap(call: int, fault: Fault) -> None:
    scene = Scene()
    store = FaultyStore(scene.store)
    with _posting(scene, store) as post:
        store.calls.clear()
        store._plan = {call: fault, call + 1: fault}
        for n in range(3):
            post.put(float(n))
        assert post.outbox.wait_published(3, 30.0)
        assert not post.errors
    records = scene.records("a")
    assert [record.tokens for record in records] == [1, 2, 3]
    for record in records:
        assert scene.store.get(record.shards[0].ref.key)


@pytest.mark.parametrize("seed", range(4))
def test_among_many_faults_every_cut_is_published_once_and_in_order(seed: int) -> None:
    scene = Scene()
    store = FaultyStore(scene.store, seed=seed)
    with _posting(scene, store) as post:
        store._rates = {Fault.FAILED: 0.3, Fault.LOST_ANSWER: 0.3}
        for n in range(8):
            post.put(float(n))
        assert post.outbox.wait_published(8, 60.0)
        assert not post.errors and len(store.faults) > 8
    assert [record.tokens for record in scene.records("a")] == list(range(1, 9))


def test_while_a_records_fate_is_unknown_only_the_same_bytes_are_tried() -> None:
    """The bucket goes away in the middle of the record's put; then it says for a long while that nothing is there."""
    scene = Scene()
    bodies: list[bytes] = []
    key = keys.record(ContributionId(0, "a", 0, 0))

    class Watched(WrappedStore):
        def put(self, name: str, data: bytes | bytearray | memoryview, *, overwrite: bool = False) -> str | None:
            if name == key:
                bodies.append(bytes(data))
            return super().put(name, data, overwrite=overwrite)

    store = FaultyStore(Watched(scene.store))

    def drop(call: Call) -> None:
        if call.verb == "put" and call.key == key:
            store.down = len(bodies) < 20 and call.number % 2 == 0 or len(bodies) < 3

    store.before = drop
    with _posting(scene, store) as post:
        post.put(0.0)
        post.put(1.0)
        store.down = True
        wait_until(lambda: len(store.faults) > 20)
        store.before = None
        store.down = False
        assert post.outbox.wait_published(2, 60.0)
    assert len(set(bodies)) == 1
    assert [record.tokens for record in scene.records("a")] == [1, 2]


def test_bytes_of_another_process_under_the_key_end_the_unit() -> None:
    scene = Scene()
    with _posting(scene, scene.store) as post:
        post.put(0.0)
        assert post.outbox.wait_published(1, 30.0)
        key = keys.record(ContributionId(0, "a", 0, 1))
        scene.store.put(key, b"somebody else's")
        post.put(1.0)
        wait_until(lambda: bool(post.errors))
    assert isinstance(post.errors[0], Fenced)
    assert post.errors[0].facts["key"] == key and "its own name" in post.errors[0].remedy
    assert scene.store.get(key) == b"somebody else's"
    assert post.outbox.published == 1


def test_a_refused_write_is_tried_until_it_is_allowed(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    refusals: list[str] = []

    class Refusing(WrappedStore):
        def put(self, name: str, data: bytes | bytearray | memoryview, *, overwrite: bool = False) -> str | None:
            if len(refusals) < 3:
                refusals.append(name)
                raise Denied("no permission to write", key=name)
            return super().put(name, data, overwrite=overwrite)

    with _posting(scene, Refusing(scene.store)) as post:
        post.put(0.0)
        assert post.outbox.wait_published(1, 30.0)
    assert len(set(refusals)) == 1 and "no permission to write" in caplog.text
    assert len(scene.records("a")) == 1


def test_a_stop_while_the_bucket_is_away_ends_the_thread() -> None:
    scene = Scene()
    store = FaultyStore(scene.store)
    with _posting(scene, store) as post:
        store.down = True
        post.put(0.0)
        wait_until(lambda: len(store.faults) > 3)
        post.stop.set()
        post.outbox.join(30.0)
        assert not post.outbox._thread.is_alive() and not post.errors
    assert scene.records("a") == []


def test_a_record_says_all_that_the_format_asks_for() -> None:
    scene = Scene()
    with _posting(scene, scene.store) as post:
        pending = post.put(2.0)
        assert post.outbox.wait_published(1, 30.0)
    key = keys.record(ContributionId(0, "a", 0, 0))
    record = decode(Record, scene.store.get(key), key=key, run_id=scene.run.run_id)
    assert record.id == ContributionId(0, "a", 0, 0)
    assert (record.layout_hash, record.codec, record.fragment) == (scene.run.record.layout_hash, "none", 0)
    assert (record.base, record.sum_squares, record.steps) == (pending.base, pending.sum_squares, 1)
    assert record.attempt in record.shards[0].ref.key and record.shards[0].slices is None
