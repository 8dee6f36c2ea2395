"""The log of versions: finding the head from anywhere, and the commit that only one can win (format §5.7, §5.8, §7.4)."""

from __future__ import annotations

import math
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_diloco import keys
from ps_diloco.env import Env, SeededEntropy
from ps_diloco.errors import FormatError, IntegrityError, InvariantViolation, LimitExceeded, NotFound, RunNotFound, Unavailable
from ps_diloco.log import Log
from ps_diloco.records import (
    MANIFEST_BYTES_MAX,
    Anchor,
    Fingerprint,
    FragmentEntry,
    Head,
    Manifest,
    Parent,
    Ref,
    Stored,
    Timeline,
    encode,
    sha256_of,
)
from ps_diloco.store.base import Buffer
from ps_diloco.store.counting import CountingStore
from ps_diloco.store.memory import MemoryStore

PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)

RUN_ID = "0123456789abcdef0123456789abcdef"
LENGTHS = st.one_of(st.integers(1, 12), st.integers(1, 400))


class _NoClock:
    """Time that passes without waiting."""

    def monotonic(self) -> float:
        return 0.0

    def wall_text(self) -> str:
        return "2025-01-01T00:00:00.000Z"

    def sleep(self, seconds: float) -> None:
        """Returns at once."""

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        return event.is_set()


def _manifest(version: int, *, timeline: int = 0, parent: Parent | None = None, attempt: str = "0" * 16, run_id: str = RUN_ID) -> Manifest:
    ref = Ref(key="anchors/a", size=1, sha256="a" * 64)
    fragment = FragmentEntry(
        fragment_version=0,
        sha256="b" * 64,
        anchor=Anchor(fragment_version=0, objects=(ref,)),
        deltas=(),
        state=None,
        tokens=0.0,
        rounds={},
        weights=(),
        masses=(),
    )
    return Manifest(
        run_id=run_id,
        timeline=timeline,
        version=version,
        attempt=attempt,
        created_at="",
        parent=parent,
        config=0,
        final=False,
        fingerprint=Fingerprint(software="", torch="", isa=""),
        tokens=0.0,
        fragments=(fragment,),
        steps=(),
        refused=(),
        units={},
    )


class Scene:
    """A run in memory that has a number of versions per timeline; counts the calls of its log."""

    def __init__(self, *lengths: int, forks: tuple[int, ...] = ()) -> None:
        self.memory = MemoryStore()
        self.store = CountingStore(self.memory)
        self.log = Log(store=self.store, env=Env(clock=_NoClock(), entropy=SeededEntropy(0)), run_id=RUN_ID)
        self.versions: list[list[Stored[Manifest]]] = []
        for timeline, length in enumerate(lengths):
            fork = self.versions[timeline - 1][forks[timeline - 1]] if timeline else None
            self.versions.append([])
            parent = Parent(timeline=fork.record.timeline, version=fork.record.version, sha256=fork.sha256) if fork else None
            first = fork.record.version + 1 if fork else 0
            self._write(
                keys.timeline(timeline),
                encode(
                    Timeline(
                        run_id=RUN_ID,
                        timeline=timeline,
                        attempt="0" * 16,
                        parent=parent,
                        first_version=first,
                        config=0,
                        reason="",
                        created_at="",
                    )
                ),
            )
            for version in range(first, first + length):
                body = encode(_manifest(version, timeline=timeline, parent=parent))
                self._write(keys.manifest(timeline, version), body)
                stored = Stored(_manifest(version, timeline=timeline, parent=parent), sha256_of(body))
                self.versions[-1].append(stored)
                parent = Parent(timeline=timeline, version=version, sha256=stored.sha256)

    def _write(self, key: str, body: bytes) -> None:
        self.memory.put(key, body)

    def hint(self, body: bytes) -> None:
        self.memory.put(keys.HEAD, body, overwrite=True)

    def gets(self) -> int:
        return self.store.snapshot().verbs["get"].calls


def _bound(distance: int) -> float:
    return 2 * math.log2(max(distance, 1)) + 3


@PROPERTY
@given(LENGTHS, st.data())
def test_the_head_is_found_from_any_known_version(length: int, data: st.DataObject) -> None:
    scene = Scene(length)
    known = data.draw(st.integers(0, length - 1))
    assert scene.log.find_head(scene.versions[0][known]) == scene.versions[0][-1]
    assert scene.gets() <= _bound(length - 1 - known)


def test_one_get_tells_that_the_known_version_is_the_head() -> None:
    scene = Scene(30)
    scene.log.find_head(scene.versions[0][-1])
    assert scene.gets() == 1


@pytest.mark.parametrize("distance", range(40))
def test_every_small_distance_is_climbed_within_the_bound(distance: int) -> None:
    scene = Scene(distance + 3)
    assert scene.log.find_head(scene.versions[0][2]) == scene.versions[0][-1]
    assert scene.gets() <= _bound(distance)


@PROPERTY
@given(LENGTHS, st.data())
def test_the_head_is_found_from_any_hint_however_stale(length: int, data: st.DataObject) -> None:
    scene = Scene(length)
    hinted = data.draw(st.integers(0, length - 1))
    scene.log.write_hint(scene.versions[0][hinted])
    assert scene.log.find_head() == scene.versions[0][-1]
    assert scene.gets() <= _bound(length - 1 - hinted) + 4  # the hint, what it names, two timelines


@PROPERTY
@given(LENGTHS)
def test_the_head_is_found_without_a_hint(length: int) -> None:
    for hint in (True, False):
        scene = Scene(length)
        assert scene.log.find_head(hint=hint) == scene.versions[0][-1]
        assert scene.gets() <= _bound(length - 1) + 4


def _hint(**changes: object) -> bytes:
    values = {"run_id": RUN_ID, "timeline": 0, "version": 3, "sha256": "0" * 64, "nonce": "0" * 16}
    return encode(Head.model_validate({**values, **changes}))


GARBAGE = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([b"", b"{}", b"null", b"[" * 70_000, b'{"format": 9}', b"x" * 100_000]),
    st.builds(
        lambda timeline, version, sha256: _hint(timeline=timeline, version=version, sha256=sha256),
        st.integers(0, 999_999),
        st.integers(0, 2**53),
        st.sampled_from(["0" * 64, "f" * 64]),
    ),
    st.just(_hint(run_id="f" * 32)),
    st.just(encode(_manifest(0))),
)


@PROPERTY
@given(st.integers(1, 40), GARBAGE)
def test_a_garbage_hint_changes_nothing(length: int, body: bytes) -> None:
    scene = Scene(length)
    scene.hint(body)
    assert scene.log.read_hint() is None
    assert scene.log.find_head() == scene.versions[0][-1]


def test_a_hint_with_the_right_number_and_another_hash_is_not_believed() -> None:
    scene = Scene(5)
    scene.hint(_hint(version=3, sha256=scene.versions[0][2].sha256))
    assert scene.log.read_hint() is None
    scene.hint(_hint(version=3, sha256=scene.versions[0][3].sha256))
    assert scene.log.read_hint() == scene.versions[0][3]


def test_a_hint_that_names_a_damaged_manifest_is_ignored() -> None:
    scene = Scene(5)
    scene.memory.put(keys.manifest(0, 3), b"{", overwrite=True)
    scene.hint(_hint(version=3, sha256=sha256_of(b"{")))
    assert scene.log.read_hint() is None


def test_a_hint_that_was_written_is_read_again_and_overwrites_the_one_before() -> None:
    scene = Scene(5)
    for version in (4, 1):
        scene.log.write_hint(scene.versions[0][version])
        assert scene.log.read_hint() == scene.versions[0][version]


@PROPERTY
@given(st.integers(1, 12), st.integers(0, 6), st.data())
def test_a_hint_is_followed_only_to_what_is_newer(old: int, new: int, data: st.DataObject) -> None:
    scene = Scene(old, new, forks=(data.draw(st.integers(0, old - 1)),))
    versions = [*scene.versions[0], *scene.versions[1]]
    known, hinted = data.draw(st.sampled_from(versions)), data.draw(st.sampled_from(versions))
    scene.log.write_hint(hinted)
    newer = versions.index(hinted) > versions.index(known)
    assert scene.log.read_hint_after(known) == (True, hinted if newer else None)
    assert scene.gets() == (2 if newer else 1)


# Timelines


@PROPERTY
@given(st.integers(1, 20), st.integers(0, 20), st.data())
def test_the_head_is_that_of_the_newest_timeline_whatever_the_hint_says(old: int, new: int, data: st.DataObject) -> None:
    fork = data.draw(st.integers(0, old - 1))
    expected = None
    for hinted in (None, 0, old - 1):
        scene = Scene(old, new, forks=(fork,))
        expected = scene.versions[1][-1] if new else scene.versions[0][fork]
        if hinted is not None:
            scene.log.write_hint(scene.versions[0][hinted])
        assert scene.log.find_head() == expected
        assert scene.log.find_head(hint=False) == expected
    if new:
        scene.log.write_hint(scene.versions[1][0])
        assert scene.log.find_head() == expected


def test_the_newest_of_several_timelines_is_followed() -> None:
    scene = Scene(4, 4, 2, forks=(1, 2))
    assert scene.log.newest_timeline().timeline == 2
    assert scene.log.newest_timeline(2).timeline == 2
    head = scene.log.find_head()
    assert (head.record.timeline, head.record.version) == (2, 6)


def test_a_known_version_is_followed_in_its_own_timeline() -> None:
    scene = Scene(6, 2, forks=(2,))
    assert scene.log.find_head(scene.versions[0][0]) == scene.versions[0][-1]


def test_a_timeline_whose_parent_is_another_manifest_than_it_names_is_refused() -> None:
    scene = Scene(3, 0, forks=(1,))
    scene.memory.put(keys.manifest(0, 1), encode(_manifest(1, attempt="f" * 16)), overwrite=True)
    with pytest.raises(IntegrityError, match="parent"):
        scene.log.find_head()


def test_a_run_whose_creation_was_not_finished_is_not_found() -> None:
    with pytest.raises(RunNotFound):
        Scene().log.find_head()
    with pytest.raises(RunNotFound, match="run the same init again"):
        Scene(0).log.find_head()


# Reading


def test_an_absent_version_and_an_absent_timeline_are_none() -> None:
    scene = Scene(2)
    assert scene.log.read(0, 2) is None
    assert scene.log.read(1, 0) is None
    assert scene.log.timeline(1) is None


def test_a_manifest_is_read_with_the_hash_of_the_bytes_that_stand_there() -> None:
    scene = Scene(1)
    spaced = encode(_manifest(1)).replace(b",", b", ")
    scene.memory.put(keys.manifest(0, 1), spaced)
    read = scene.log.read(0, 1)
    assert read == Stored(_manifest(1), sha256_of(spaced))


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (encode(_manifest(8)), IntegrityError),
        (encode(_manifest(7, timeline=1)), IntegrityError),
        (encode(_manifest(7, run_id="f" * 32)), IntegrityError),
        (encode(_manifest(7))[:-1], FormatError),
        (b"", FormatError),
        (_hint(), FormatError),
        (b" " * (MANIFEST_BYTES_MAX + 1), LimitExceeded),
    ],
    ids=["other version", "other timeline", "other run", "cut", "empty", "other kind", "too large"],
)
def test_what_is_not_the_manifest_of_this_number_is_refused(body: bytes, error: type[Exception]) -> None:
    scene = Scene(1)
    scene.memory.put(keys.manifest(0, 7), body)
    with pytest.raises(error):
        scene.log.read(0, 7)


def test_a_timeline_under_another_number_is_refused() -> None:
    scene = Scene(1)
    scene.memory.put(keys.timeline(1), scene.memory.get(keys.timeline(0)))
    with pytest.raises(IntegrityError, match="another number"):
        scene.log.timeline(1)


# Committing


@pytest.mark.parametrize("racers", [2, 8])
def test_of_racing_commits_of_one_number_exactly_one_wins(racers: int) -> None:
    for version in range(1, 20):
        scene = Scene(1)
        outcomes: list[Stored[Manifest] | None] = [None] * racers
        start = threading.Barrier(racers)

        def commit(
            racer: int,
            scene: Scene = scene,
            outcomes: list[Stored[Manifest] | None] = outcomes,
            start: threading.Barrier = start,
            version: int = version,
        ) -> None:
            start.wait()
            outcomes[racer] = scene.log.commit(_manifest(version, attempt=f"{racer:016x}"))

        threads = [threading.Thread(target=commit, args=(racer,)) for racer in range(racers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (winner,) = [outcome for outcome in outcomes if outcome is not None]
        assert scene.log.read(0, version) == winner


def test_a_lost_commit_leaves_the_winner() -> None:
    scene = Scene(1)
    won = scene.log.commit(_manifest(1, attempt="a" * 16))
    assert won is not None
    assert scene.log.commit(_manifest(1, attempt="b" * 16)) is None
    assert scene.log.find_head() == won


def test_committing_the_same_bytes_twice_is_the_same_commit() -> None:
    scene = Scene(1)
    assert scene.log.commit(_manifest(1)) == scene.log.commit(_manifest(1))


class LossyStore(MemoryStore):
    """Loses the answers of the first puts: after applying them, or instead of it."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__()
        self.faults = faults

    def put(self, key: str, data: Buffer, *, overwrite: bool = False) -> str | None:
        fault = self.faults.pop(0) if self.faults else "none"
        if fault == "drop":
            raise Unavailable("no answer", maybe_applied=True)
        version = super().put(key, data, overwrite=overwrite)
        if fault == "lose":
            raise Unavailable("no answer", maybe_applied=True)
        return version


@PROPERTY
@given(st.lists(st.sampled_from(["drop", "lose", "none"]), max_size=7), st.booleans())
def test_a_lost_answer_is_told_from_a_lost_race(faults: list[str], rival: bool) -> None:
    store = LossyStore(list(faults))
    log = Log(store=store, env=Env(clock=_NoClock(), entropy=SeededEntropy(0)), run_id=RUN_ID)
    if rival:
        MemoryStore.put(store, keys.manifest(0, 1), encode(_manifest(1, attempt="f" * 16)))
    outcome = log.commit(_manifest(1))
    assert (outcome is None) == rival
    standing = log.read(0, 1)
    assert standing is not None
    assert standing.record.attempt == ("f" if rival else "0") * 16


def test_a_commit_without_any_answer_says_that_it_may_still_appear() -> None:
    store = LossyStore(["drop"] * 100)
    log = Log(store=store, env=Env(clock=_NoClock(), entropy=SeededEntropy(0)), run_id=RUN_ID)
    with pytest.raises(Unavailable) as caught:
        log.commit(_manifest(1))
    assert caught.value.maybe_applied
    assert len(store.faults) > 80, "tries are bounded"
    with pytest.raises(NotFound):
        store.get(keys.manifest(0, 1))


def test_a_manifest_that_readers_would_refuse_is_not_written() -> None:
    scene = Scene(1)
    large = _manifest(1)
    entry = large.fragments[0].model_copy(
        update={"anchor": Anchor(fragment_version=0, objects=large.fragments[0].anchor.objects * 100_000)}
    )
    large = large.model_copy(update={"fragments": (entry,) * 4})
    with pytest.raises(InvariantViolation, match="larger than the format allows"):
        scene.log.commit(large)
    assert scene.log.read(0, 1) is None
