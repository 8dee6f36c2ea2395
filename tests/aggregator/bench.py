"""A run of seven numbers, and units that publish by the letter of the format: what tests of the aggregator work on.

::

    run = tiny_run(MemoryStore(), fragments=2, merge={"quorum": 2})
    announce(run, "a")
    publish(run, "a", 0, [1.0, 0.0, 0.0, 0.0], fragment=0)
    Aggregator(run).take_pass(force="once")
    history = walk(run)                     # every manifest, every invariant checked
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from aggregator.outer_step import Aggregator
from ps_diloco import CreateSettings, RunSettings, create_run, keys
from ps_diloco.checkpoint import buffer_sections, read_fragment
from ps_diloco.env import Env, SeededEntropy
from ps_diloco.errors import Unavailable
from ps_diloco.fragment import FragmentValue
from ps_diloco.ids import ContributionId
from ps_diloco.merge import sum_squares
from ps_diloco.records import Base, Contribution, Incarnation, Manifest, ShardRef, Stored, encode
from ps_diloco.run import OpenRun
from ps_diloco.shard import Section, encode_section, encode_shard
from ps_diloco.store import MemoryStore, Store
from ps_diloco.store.refs import put_data
from ps_diloco.transition import check_transition
from tests.stores import WrappedStore

START = {"a": [1.0, 2.0, 3.0, 4.0], "b": [-1.0, 0.5, 0.25]}
"""Version 0. With two fragments ``a`` and the integer buffer are fragment 0, ``b`` and the float buffer fragment 1."""
EXACT_PULL = {"codec": "none"}
ADDITIVE: dict[str, Any] = {
    "outer": {"lr": 0.5, "momentum": 0.0},
    "merge": {"round_tokens": 10_000, "staleness_power": 0.0, "merge_at_least": 0.0},
    "pull": EXACT_PULL,
}
"""Settings under which contributions of equal tokens per step add up, in whatever order and steps they are merged (format §6.2)."""


class FakeClock:
    """Time passes only where somebody sleeps, or where a test moves it."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def wall_text(self) -> str:
        return "2025-01-01T00:00:00.000Z"

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        self.now_s += 0.0 if event.is_set() else timeout_s
        return event.is_set()


class Unreadable(WrappedStore):
    """Has no answer for one key while ``broken``."""

    key = ""
    broken = True

    def get(self, key: str, **options: Any) -> bytes:
        if self.broken and key == self.key:
            raise Unavailable("injected", key=key)
        return super().get(key, **options)


class Tiny(nn.Module):
    """Two parameters, a float buffer and an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(START["a"]))
        self.b = nn.Parameter(torch.tensor(START["b"]))
        self.register_buffer("mean", torch.tensor([10.0, 20.0]))
        self.register_buffer("count", torch.tensor([5], dtype=torch.int64))


def fake_env(seed: int = 0, clock: FakeClock | None = None) -> Env:
    return Env(clock=clock or FakeClock(), entropy=SeededEntropy(seed))


def tiny_run(store: Store, *, env: Env | None = None, fragments: int = 1, staleness_limit: int = 64, **settings: Any) -> OpenRun:
    """A new run. ``settings`` are sections of :class:`RunSettings`."""
    create = CreateSettings(num_fragments=fragments, staleness_limit=staleness_limit)
    return create_run(store, env or fake_env(), Tiny(), create=create, settings=RunSettings.model_validate(settings))


def seen_by(run: OpenRun, *, store: Store | None = None, seed: int = 1, clock: FakeClock | None = None) -> OpenRun:
    """The same run as another process sees it: a store and names of its own. Does no I/O."""
    return OpenRun(store=store or run.store, env=fake_env(seed, clock), record=run.record)


def copy_of(store: Store) -> MemoryStore:
    """An independent store with the same objects."""
    copy = MemoryStore()
    for info in store.list(""):
        copy.put(info.key, store.get(info.key))
    return copy


def listed(*units: str, fragments: int = 1, clock: FakeClock | None = None, **settings: Any) -> tuple[OpenRun, Aggregator]:
    """A run whose units are listed, and an aggregator that listed them."""
    run = tiny_run(MemoryStore(), env=fake_env(clock=clock), fragments=fragments, **settings)
    for unit in units:
        announce(run, unit)
    aggregator = Aggregator(run)
    assert aggregator.take_pass().kind == "committed"
    return run, aggregator


def announce(run: OpenRun, unit: str, incarnation: int = 0, **changes: Any) -> Incarnation:
    """Claim an incarnation; an aggregator lists it when it next looks for new ones."""
    record = Incarnation(
        run_id=run.run_id,
        unit=unit,
        incarnation=incarnation,
        attempt=run.env.entropy.attempt_id(),
        region="home",
        software="test",
        created_at="",
        restored=None,
    ).model_copy(update=changes)
    run.store.put(keys.incarnation(unit, incarnation), encode(record))
    return record


def base_of(manifest: Manifest, fragment: int) -> Base:
    entry = manifest.fragments[fragment]
    return Base(fragment_version=entry.fragment_version, sha256=entry.sha256)


def publish(
    run: OpenRun,
    unit: str,
    seq: int,
    delta: Sequence[float],
    *,
    fragment: int = 0,
    incarnation: int = 0,
    tokens: int = 100,
    steps: int = 10,
    base: Base | None = None,
    codec: str = "none",
    floats: Sequence[float] | None = None,
    ints: Sequence[int] | None = None,
    section: Section | None = None,
    tamper: Callable[[bytes], bytes] = lambda data: data,
    edit: Callable[[Contribution], Contribution] = lambda record: record,
) -> Contribution:
    """Write a contribution: shard, then record. ``base`` is by default the head's.

    For lies: ``section`` instead of the honest encoding of ``delta``, ``tamper`` with the shard before it is named, ``edit`` the record before it is
    written (see :func:`changed`).
    """
    contribution = ContributionId(0, unit, incarnation, seq)
    delta_F = torch.tensor(delta, dtype=torch.float32)
    size = run.layout.fragments[fragment]
    floats_B = torch.tensor([10.0, 20.0][: size.floats] if floats is None else floats, dtype=torch.float32)
    ints_I = torch.tensor([5][: size.ints] if ints is None else ints, dtype=torch.int64)
    decoded = torch.empty_like(delta_F)
    honest = encode_section("params", codec, delta_F, decoded=decoded)
    sections = [section or honest, *buffer_sections(floats_B, ints_I)]
    data = tamper(encode_shard(sections, kind="contribution", run_id=run.run_id, of=str(contribution), fragment=fragment))
    attempt = run.env.entropy.attempt_id()
    record = Contribution(
        run_id=run.run_id,
        timeline=0,
        unit=unit,
        incarnation=incarnation,
        seq=seq,
        attempt=attempt,
        layout_hash=run.record.layout_hash,
        fragment=fragment,
        base=base or base_of(run.log.find_head().record, fragment),
        tokens=tokens,
        steps=steps,
        inner_steps=steps,
        codec=codec,
        shards=(ShardRef(ref=put_data(run.store, run.env, keys.shard(contribution, attempt), data)),),
        sum_squares=sum_squares(decoded, run.layout.of(fragment)),
        loss=None,
        resent=False,
        created_at="",
    )
    record = edit(record)
    run.store.put(keys.record(contribution), encode(record))
    return record


def changed(**changes: Any) -> Callable[[Contribution], Contribution]:
    """An edit of a record that nobody checks."""
    return lambda record: record.model_copy(update=changes)


def values(run: OpenRun, manifest: Manifest | None = None) -> list[FragmentValue]:
    """Every fragment of a version (by default the head), read as anybody would, hashes checked."""
    manifest = manifest or run.log.find_head().record
    return [read_fragment(run, entry, fragment) for fragment, entry in enumerate(manifest.fragments)]


def params(run: OpenRun, fragment: int = 0) -> list[float]:
    """Parameters of a fragment at the head."""
    result: list[float] = read_fragment(run, run.log.find_head().record.fragments[fragment], fragment).params.tolist()
    return result


def merged_in(history: Sequence[Manifest]) -> Counter[str]:
    return Counter(merged.contribution for manifest in history for step in manifest.steps for merged in step.merged)


def walk(run: OpenRun, *, objects: bool = True) -> list[Manifest]:
    """Every manifest of timeline 0, checked from one to the next (I1, I2, I4, I5, I6), and that what each names exists and matches (I3)."""
    stored = run.log.read(0, 0)
    assert stored is not None
    history: list[Manifest] = []
    before: Stored[Manifest] | None = None
    while stored is not None:
        if before is not None:
            check_transition(before, stored.record, run.layout)
        history.append(stored.record)
        if objects:
            values(run, stored.record)
        before, stored = stored, run.log.read(0, stored.record.version + 1)
    numbers = [int(info.key[-25:-5]) for info in run.store.list(keys.manifests(0))]
    assert numbers == list(range(len(history))), "versions are contiguous (I1)"
    assert all(count == 1 for count in merged_in(history).values()), "a contribution was merged twice (I2)"
    check_order(history)
    return history


def check_order(history: Sequence[Manifest]) -> None:
    """Within a (unit, fragment) contributions are decided in the order of their numbers (I5)."""
    newest: dict[tuple[str, int, int], int] = {}
    for manifest in history:
        decided = [(m.contribution, step.fragment) for step in manifest.steps for m in step.merged]
        decided += [(refused.contribution, refused.fragment) for refused in manifest.refused if refused.fragment is not None]
        for name, fragment in sorted(decided):
            contribution = ContributionId.parse(name)
            line = (contribution.unit, contribution.incarnation, fragment)
            assert contribution.seq > newest.get(line, -1), f"{name} is decided out of order (I5)"
            newest[line] = contribution.seq
