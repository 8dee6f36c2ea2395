"""Every reason for which a contribution is refused, each from a real bad object, and what it does to the others: nothing (format §8)."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from aggregator.fragment_step import TRY_EVERY_S
from aggregator.outer_step import Aggregator
from ps_diloco import keys
from ps_diloco.codecs import CODECS
from ps_diloco.ids import ContributionId
from ps_diloco.records import COUNT_MAX, OUTCOME_CHAR, RECORD_BYTES_MAX, TAKE_BACK, Base, Contribution, Manifest, ShardRef, encode
from ps_diloco.run import OpenRun
from ps_diloco.shard import Section
from ps_diloco.store import MemoryStore
from ps_diloco.zstd import compress
from tests.aggregator.bench import FakeClock, Unreadable, announce, base_of, changed, fake_env, publish, seen_by, tiny_run, values, walk

LIE = ContributionId(0, "liar", 0, 0)
LIE_NEXT = ContributionId(0, "liar", 0, 1)
HONEST = [0.5, -0.25, 1.0, 0.0, 0.125, -2.0, 3.0]
Liar = Callable[[OpenRun], object]


def merged_beside(lie: Liar | None, **settings: Any) -> tuple[OpenRun, Manifest]:
    """One forced pass over the work of two honest units and a lie (None: the liar does not exist)."""
    run = tiny_run(MemoryStore(), **{"merge": {"round_tokens": 400}, **settings})
    units = ["a", "z"] if lie is None else ["a", "liar", "z"]
    for unit in units:
        announce(run, unit)
    aggregator = Aggregator(run)
    aggregator.take_pass()
    publish(run, "a", 0, HONEST, tokens=100, floats=[1.0, 2.0], ints=[7])
    publish(run, "z", 0, HONEST[::-1], tokens=200, codec="int4")
    if lie is not None:
        lie(run)
    return run, aggregator.take_pass(force="once").head.record


def ref_changed(**changes: Any) -> Callable[[Contribution], Contribution]:
    def edit(record: Contribution) -> Contribution:
        shard = record.shards[0].model_copy(update={"ref": record.shards[0].ref.model_copy(update=changes)})
        return record.model_copy(update={"shards": (shard,)})

    return edit


def with_body(body: bytes) -> Liar:
    return lambda run: run.store.put(keys.record(LIE), body)


def with_edit(edit: Callable[[Contribution], Contribution]) -> Liar:
    return lambda run: publish(run, "liar", 0, HONEST, edit=edit)


def with_shard(tamper: Callable[[bytes], bytes]) -> Liar:
    return lambda run: publish(run, "liar", 0, HONEST, tamper=tamper)


def with_raw(codec: str, raw: bytes) -> Liar:
    section = Section(name="params", codec=codec, elements=7, frames=(compress(raw),))
    return lambda run: publish(run, "liar", 0, HONEST, codec=codec, section=section)


def without(field: str) -> Liar:
    def lie(run: OpenRun) -> None:
        body = encode(publish(run, "liar", 0, HONEST)).replace(f'"{field}":'.encode(), f'"no_{field}":'.encode())
        run.store.put(keys.record(LIE), body, overwrite=True)

    return lie


def floats_of(*numbers: float) -> bytes:
    return torch.tensor(numbers, dtype=torch.float32).numpy().tobytes()


def int8_with_scale(scale: float) -> bytes:
    return torch.tensor([scale], dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes() + bytes([1] * 7)


NAN, INF = float("nan"), float("inf")
LIES: dict[str, tuple[str, str, Liar]] = {
    "no JSON": ("bad-record", "strict JSON", with_body(b"{'seq': 0}")),
    "an empty record": ("bad-record", "strict JSON", with_body(b"")),
    "a pickle": ("bad-record", "strict JSON", with_body(pickle.dumps({"seq": 0}))),
    "a record larger than the limit": ("bad-record", "larger", with_body(b"[" * (RECORD_BYTES_MAX + 1))),
    "a record far larger than the limit": ("bad-record", "larger", with_body(b"[" * (2 * RECORD_BYTES_MAX))),
    "a format number of the future": ("bad-record", "999", with_edit(changed(format=999))),
    "no format number": ("bad-record", "format number", without("format")),
    "an unknown field": ("bad-record", "Field required", without("loss")),
    "another run's record": ("bad-record", "another run", with_edit(changed(run_id="f" * 32))),
    "another seq under the key": ("bad-record", "says that it is", with_edit(changed(seq=3))),
    "another unit under the key": ("bad-record", "says that it is", with_edit(changed(unit="a"))),
    "another incarnation under the key": ("bad-record", "says that it is", with_edit(changed(incarnation=1))),
    "zero tokens": ("bad-record", "tokens", with_edit(changed(tokens=0))),
    "another layout": ("bad-record", "layout hash", with_edit(changed(layout_hash="e" * 64))),
    "a fragment that does not exist": ("bad-record", "fragment 1 of 1", with_edit(changed(fragment=1))),
    "an unknown codec": ("codec", "'zip9'", with_edit(changed(codec="zip9"))),
    "a codec whose name fills a record": ("codec", "'\\x01", with_edit(changed(codec="\x01" * 2000))),
    "half a character": ("bad-record", "Invalid JSON", with_edit(changed(codec="\ud800"))),
    "another base hash": ("bad-record", "base hash", with_edit(changed(base=Base(fragment_version=0, sha256="e" * 64)))),
    "too few sums of squares": ("bad-record", "sums of squares", with_edit(changed(sum_squares=(1.0,)))),
    "two shards": ("bad-record", "ranks", with_edit(lambda record: record.model_copy(update={"shards": record.shards * 2}))),
    "slices": (
        "bad-record",
        "ranks",
        with_edit(lambda r: r.model_copy(update={"shards": (ShardRef(ref=r.shards[0].ref, slices=((0, 0, 7),)),)})),
    ),
    "a shard of another unit": (
        "bad-record",
        "own name",
        with_edit(ref_changed(key=keys.shard(ContributionId(0, "a", 0, 0), "0" * 16))),
    ),
    "a shard of another contribution": ("bad-record", "own name", with_edit(ref_changed(key=keys.shard(LIE_NEXT, "0" * 16)))),
    "a shard outside units": ("bad-record", "own name", with_edit(ref_changed(key="run.json"))),
    "a shard whose name no file system takes": ("bad-record", "own name", with_edit(ref_changed(key="units/liar/" + "x" * 900))),
    "a stated size that is too small": ("corrupt", "larger", with_edit(ref_changed(size=40))),
    "a stated size that is too large": ("corrupt", "size", with_edit(ref_changed(size=100_000))),
    "a stated size beyond all need": ("corrupt", "larger", with_edit(ref_changed(size=COUNT_MAX))),
    "another hash": ("corrupt", "hash", with_edit(ref_changed(sha256="e" * 64))),
    "a shard cut at 40 bytes": ("corrupt", "header", with_shard(lambda data: data[:40])),
    "a shard without its last byte": ("corrupt", "add up", with_shard(lambda data: data[:-1])),
    "a shard with a byte more": ("corrupt", "add up", with_shard(lambda data: data + b"x")),
    "a flipped bit": ("corrupt", "checksum", with_shard(lambda data: data[:-9] + bytes([data[-9] ^ 4]) + data[-8:])),
    "a pickle as shard": ("corrupt", "not a shard", with_shard(lambda data: pickle.dumps([1.0]))),
    "a shard made for another seq": ("corrupt", "asked for", with_shard(lambda data: recounted(data))),
    "a chunk of another size": ("corrupt", "size and checksum", with_raw("none", floats_of(*HONEST, 1.0))),
    "a NaN": ("non-finite", "element=1", with_raw("none", floats_of(0.0, NAN, 0.0, 0.0, 0.0, 0.0, 0.0))),
    "an infinity": ("non-finite", "inf", with_raw("bf16", CODECS["bf16"].encode(torch.zeros(7))[:-2] + b"\x80\x7f")),
    "a NaN scale": ("non-finite", "nan", with_raw("int8", int8_with_scale(NAN))),
    "an infinite scale": ("non-finite", "inf", with_raw("int8", int8_with_scale(INF))),
    "a negative scale": ("corrupt", "negative", with_raw("int8", int8_with_scale(-1.0))),
    "sums of squares of other values": ("corrupt", "sum of squares", with_edit(changed(sum_squares=(1.328125, 13.0)))),
    "values of another sum": ("corrupt", "tensor=a", with_raw("none", floats_of(*[1e6 * x for x in HONEST]))),
}


def recounted(data: bytes) -> bytes:
    """The shard's header says another seq; its checksum is made right again."""
    import google_crc32c

    length = int.from_bytes(data[8:12], "little")
    text = data[16 : 16 + length].replace(str(LIE).encode(), str(LIE_NEXT).encode())
    return data[:12] + google_crc32c.value(text).to_bytes(4, "little") + text + data[16 + length :]


@pytest.fixture(scope="module")
def without_liar() -> tuple[str, float]:
    """Hash and tokens of the version that the honest units make alone."""
    run, manifest = merged_beside(None)
    return values(run, manifest)[0].sha256(), manifest.tokens


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_refused_with_its_reason_and_changes_no_bit_of_what_the_others_make(name: str, without_liar: tuple[str, float]) -> None:
    reason, detail, lie = LIES[name]
    run, manifest = merged_beside(lie)
    (refused,) = manifest.refused
    assert (refused.contribution, refused.reason) == (str(LIE), reason)
    assert detail in refused.detail
    entry = manifest.units["liar"]
    assert (entry.outcomes, entry.outcome(0)) == (OUTCOME_CHAR[reason], reason)
    assert (entry.merged, entry.refused, entry.tokens, entry.lost) == (0, 1, 0, 0 if reason in TAKE_BACK else refused.tokens)
    assert [merged.contribution[8] for merged in manifest.steps[0].merged] == ["a", "z"]
    assert (manifest.fragments[0].sha256, manifest.tokens) == without_liar
    assert len(walk(run)) == 3


def test_a_refusal_that_is_found_while_merging_gives_the_others_the_weights_they_have_without_it() -> None:
    _, alone = merged_beside(None, merge={})
    _, beside = merged_beside(with_edit(changed(sum_squares=(1.0, 1.0))), merge={})
    assert [m.contribution[8] for m in beside.steps[0].merged] == ["a", "z"]
    assert [m.weight for m in beside.steps[0].merged] == [m.weight for m in alone.steps[0].merged]
    # the liar is listed, so until it is merged once the others' step is scaled as that of two units of three
    assert beside.steps[0].mass == pytest.approx(2 / 3)
    shares = [1000.0 / 5000.0, 4000.0 / 5000.0]
    assert [m.coefficient for m in beside.steps[0].merged] == pytest.approx([2 / 3 * share for share in shares], rel=1e-6)


def test_a_float_buffer_with_a_nan_takes_the_whole_contribution_down() -> None:
    data = floats_of(1.5, 2.5)
    poisoned = floats_of(1.5, NAN)

    def tamper(shard: bytes) -> bytes:
        return reframed(shard, compress(data), compress(poisoned))

    run, manifest = merged_beside(lambda run: publish(run, "liar", 0, HONEST, floats=[1.5, 2.5], tamper=tamper))
    assert [(r.reason, r.contribution) for r in manifest.refused] == [("non-finite", str(LIE))]
    assert torch.isfinite(values(run, manifest)[0].floats).all()


def reframed(shard: bytes, old: bytes, new: bytes) -> bytes:
    """The shard with another frame in a chunk of the same size, all checksums right."""
    import google_crc32c

    assert len(old) == len(new)
    length = int.from_bytes(shard[8:12], "little")
    text = shard[16 : 16 + length].replace(str(google_crc32c.value(old)).encode(), str(google_crc32c.value(new)).encode())
    header = len(text).to_bytes(4, "little") + google_crc32c.value(text).to_bytes(4, "little") + text
    return shard[:8] + header + shard[16 + length :].replace(old, new)


def test_a_contribution_beyond_the_staleness_limit_is_refused_and_one_at_it_is_merged() -> None:
    run = tiny_run(MemoryStore(), staleness_limit=2)
    announce(run, "a")
    announce(run, "liar")
    aggregator = Aggregator(run)
    zero = base_of(aggregator.take_pass().head.record, 0)
    for seq in range(2):
        publish(run, "a", seq, HONEST)
        aggregator.take_pass(force="once")
    publish(run, "liar", 0, HONEST, base=zero)
    at_limit = aggregator.take_pass(force="once").head.record
    assert [(m.contribution, m.staleness) for m in at_limit.steps[0].merged] == [(str(LIE), 2)]
    publish(run, "liar", 1, HONEST, base=zero, tokens=77)
    beyond = aggregator.take_pass().head.record
    assert [(r.reason, r.tokens) for r in beyond.refused] == [("stale", 77)]
    assert (beyond.units["liar"].outcomes, beyond.units["liar"].lost) == ("ma", 77)
    assert beyond.steps == ()


def test_an_update_that_overflows_costs_the_largest_contribution_and_nobody_else() -> None:
    huge = [3e38] * 7
    settings: dict[str, Any] = {"outer": {"lr": 10.0, "momentum": 0.9}, "merge": {"round_tokens": 400}}
    run, manifest = merged_beside(lambda run: publish(run, "liar", 0, huge), **settings)
    assert [(r.contribution, r.reason) for r in manifest.refused] == [(str(LIE), "norm")]
    assert manifest.fragments[0].sha256 == merged_beside(None, **settings)[1].fragments[0].sha256
    walk(run)


def test_parameters_that_would_overflow_cost_the_contribution_that_drives_them_there() -> None:
    settings: dict[str, Any] = {"outer": {"lr": 1.0, "momentum": 0.0}, "pull": {"codec": "none"}}
    run = tiny_run(MemoryStore(), **settings)
    announce(run, "liar")
    aggregator = Aggregator(run)
    aggregator.take_pass()
    for seq in range(2):
        publish(run, "liar", seq, [-3e38] * 7)
        manifest = aggregator.take_pass().head.record
    assert (manifest.units["liar"].outcomes, manifest.fragments[0].fragment_version) == ("mo", 1)
    walk(run)


def test_a_window_of_nothing_but_lies_is_refused_without_a_step() -> None:
    run = tiny_run(MemoryStore())
    announce(run, "liar")
    aggregator = Aggregator(run)
    aggregator.take_pass()
    publish(run, "liar", 0, HONEST, edit=changed(sum_squares=(1.0, 1.0)))
    publish(run, "liar", 1, HONEST, edit=changed(codec="zip9"))
    manifest = aggregator.take_pass(force="once").head.record
    assert (manifest.steps, manifest.units["liar"].outcomes) == ((), "ck")
    assert manifest.fragments[0].fragment_version == 0
    assert aggregator.take_pass().kind == "idle"


def test_a_unit_cannot_stop_the_run_by_claiming_more_tokens_than_a_number_holds() -> None:
    run = tiny_run(MemoryStore())
    announce(run, "liar")
    aggregator = Aggregator(run)
    aggregator.take_pass()
    for seq in range(3):
        publish(run, "liar", seq, HONEST, tokens=COUNT_MAX, steps=1)
        aggregator.take_pass(force="once")
    publish(run, "liar", 3, HONEST, tokens=COUNT_MAX, edit=changed(codec="zip9"))
    publish(run, "liar", 4, HONEST, tokens=COUNT_MAX, edit=changed(codec="zip9"))
    aggregator.take_pass(force="once")
    manifest = walk(run)[-1]
    assert manifest.units["liar"].outcomes == "mmmkk"
    assert (manifest.units["liar"].tokens, manifest.units["liar"].lost) == (COUNT_MAX, COUNT_MAX)


@dataclass
class Absent:
    """A run with a contribution whose shard is not there, after the pass that first noticed."""

    run: OpenRun
    clock: FakeClock
    aggregator: Aggregator
    shard: bytes
    key: str


def absent() -> Absent:
    clock = FakeClock()
    run = tiny_run(MemoryStore(), env=fake_env(clock=clock), fragments=2)
    announce(run, "a")
    announce(run, "liar")
    aggregator = Aggregator(run)
    aggregator.take_pass()
    publish(run, "a", 0, [1.0] * 4)
    key = publish(run, "liar", 0, [1.0] * 4).shards[0].ref.key
    shard = run.store.get(key)
    run.store.delete(key)
    publish(run, "liar", 1, [2.0] * 4)
    publish(run, "liar", 2, [3.0] * 3, fragment=1)
    manifest = aggregator.take_pass(force="once").head.record
    assert [m.contribution for step in manifest.steps for m in step.merged] == [str(ContributionId(0, "a", 0, 0)), str(LIE)[:-1] + "2"]
    assert (manifest.units["liar"].outcomes, manifest.units["liar"].tries) == ("..m", {"0": 1})
    return Absent(run, clock, aggregator, shard, key)


def test_a_missing_shard_is_refused_at_the_third_committed_try_and_what_waited_behind_it_is_merged() -> None:
    scene = absent()
    assert scene.aggregator.take_pass(force="once").kind == "idle"  # not again so soon
    scene.clock.now_s += TRY_EVERY_S
    second = scene.aggregator.take_pass(force="once").head.record
    assert (second.units["liar"].outcomes, second.units["liar"].tries) == ("..m", {"0": 2})
    scene.clock.now_s += TRY_EVERY_S
    third = scene.aggregator.take_pass(force="once").head.record
    assert [(r.reason, scene.key in r.detail) for r in third.refused] == [("missing", True)]
    assert (third.units["liar"].outcomes, third.units["liar"].tries) == ("xmm", {})
    walk(scene.run)


def test_another_aggregator_goes_on_counting_the_tries() -> None:
    scene = absent()
    for seed in (1, 2):
        Aggregator(seen_by(scene.run, seed=seed)).take_pass(force="once")
    assert walk(scene.run)[-1].units["liar"].outcomes == "xmm"


def test_a_shard_that_comes_late_is_merged_before_what_waited_behind_it() -> None:
    scene = absent()
    scene.run.store.put(scene.key, scene.shard)
    scene.clock.now_s += TRY_EVERY_S
    manifest = scene.aggregator.take_pass(force="once").head.record
    assert [m.contribution for m in manifest.steps[0].merged] == [str(LIE), str(LIE)[:-1] + "1"]
    assert (manifest.units["liar"].outcomes, manifest.units["liar"].tries) == ("mmm", {})


def test_a_shard_that_cannot_be_read_now_is_no_decision_and_later_ones_of_its_line_wait_behind_it() -> None:
    store = Unreadable(MemoryStore())
    run = tiny_run(store, fragments=2)
    announce(run, "a")
    announce(run, "b")
    aggregator = Aggregator(run)
    aggregator.take_pass()
    store.key = publish(run, "b", 0, [1.0] * 4).shards[0].ref.key
    publish(run, "b", 1, [2.0] * 4)
    publish(run, "b", 2, [1.0] * 4, edit=changed(codec="zip9"))
    publish(run, "b", 3, [3.0] * 3, fragment=1)
    publish(run, "a", 0, [1.0] * 4)
    manifest = aggregator.take_pass(force="once").head.record
    assert (manifest.units["a"].outcomes, manifest.units["b"].outcomes) == ("m", "...m")
    assert (manifest.refused, manifest.units["b"].tries) == ((), {})
    store.broken = False
    assert aggregator.take_pass(force="once").head.record.units["b"].outcomes == "mmkm"
    walk(run)


def test_a_bad_record_waits_for_the_undecided_work_before_it_in_its_fragment_and_an_unreadable_one_for_all() -> None:
    run = tiny_run(MemoryStore(), fragments=2, merge={"quorum": 2})
    for unit in ("a", "b"):
        announce(run, unit)
    aggregator = Aggregator(run)
    aggregator.take_pass()
    publish(run, "a", 0, [1.0] * 4)
    publish(run, "a", 1, [1.0] * 3, fragment=1, edit=changed(layout_hash="e" * 64))
    publish(run, "a", 2, [1.0] * 4, edit=changed(layout_hash="e" * 64))
    run.store.put(keys.record(ContributionId(0, "a", 0, 3)), b"junk")
    first = aggregator.take_pass().head.record
    assert [r.contribution[-1] for r in first.refused] == ["1"]
    publish(run, "b", 0, [1.0] * 4)
    second = aggregator.take_pass().head.record
    assert (second.units["a"].outcomes, [r.fragment for r in second.refused]) == ("mbbb", [0, None])
    walk(run)
