"""Anchors, deltas, outer state, and reading a fragment from them (format §5.7, §5.9, §5.10, §7.6)."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ps_diloco.checkpoint
from ps_diloco.binding import ModelBinding
from ps_diloco.checkpoint import Place, check_chain, plan_read, read_anchor, read_fragment, read_state, write_anchor, write_state
from ps_diloco.env import Env
from ps_diloco.errors import FormatError, IntegrityError, NonFinite, NotFound
from ps_diloco.hashing import fragment_hash, tree_hash
from ps_diloco.outer import OuterState
from ps_diloco.records import Anchor, Delta, FragmentEntry, Ref, State
from ps_diloco.store import LocalStore, MemoryStore
from tests.shard.anchored import Chain, Model, make_run, same, some_value
from tests.stores import FaultyStore


def _place(version: int = 3) -> Place:
    return Place(timeline=0, fragment=0, fragment_version=version)


# hashes


def test_a_tree_hash_is_made_of_blocks_of_two_to_the_24_bytes() -> None:
    array = torch.arange((1 << 22) + 5, dtype=torch.float32)
    raw = array.numpy().tobytes()
    blocks = hashlib.sha256(raw[: 1 << 24]).digest() + hashlib.sha256(raw[1 << 24 :]).digest()
    assert tree_hash(array) == hashlib.sha256(blocks).digest()
    assert tree_hash(array[: 1 << 22]) == hashlib.sha256(hashlib.sha256(raw[: 1 << 24]).digest()).digest()


def test_an_empty_array_hashes_as_one_empty_block() -> None:
    empty = hashlib.sha256(hashlib.sha256(b"").digest()).digest()
    assert tree_hash(torch.empty(0)) == empty
    nothing = torch.empty(0)
    assert fragment_hash(nothing, nothing, nothing, nothing) == hashlib.sha256(empty * 4).hexdigest()


def test_the_four_arrays_of_a_fragment_hash_in_their_places() -> None:
    one, none = torch.ones(2), torch.empty(0)
    hashes = {fragment_hash(*arrays) for arrays in itertools.permutations((one, none, none, none))}
    assert len(hashes) == 4


# anchors


def test_an_anchor_comes_back_bit_for_bit(env: Env) -> None:
    run = make_run(MemoryStore(), env)
    size = run.layout.fragments[0]
    assert (size.elements, size.floats, size.ints, size.frozen) == (14, 4, 2, 6)
    value = some_value(run)
    value.params[0], value.params[1], value.floats[0] = -0.0, 1e-45, torch.nan  # bits, not numbers
    anchor = write_anchor(run, _place(), value)
    assert anchor.fragment_version == 3 and same(read_anchor(run, 0, anchor), value)


@pytest.mark.parametrize("n", [1, 7, 8, 9, 16, 17])
def test_an_anchor_comes_back_across_chunk_borders(n: int, env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ps_diloco.checkpoint, "CHUNK", 8)
    run = make_run(MemoryStore(), env, nn.Linear(n, 1, bias=False))
    value = some_value(run)
    anchor = write_anchor(run, _place(), value)
    assert sum("/params/c/" in ref.key for ref in anchor.objects) == -(-n // 8)
    assert same(read_anchor(run, 0, anchor), value)


def test_arrays_that_are_empty_are_left_out(env: Env) -> None:
    run = make_run(MemoryStore(), env, nn.Linear(2, 2))
    anchor = write_anchor(run, _place(), some_value(run))
    assert {ref.key.split("/")[4] for ref in anchor.objects} == {"params", "zarr.json"}


def test_an_array_of_zeros_is_written_whole(env: Env) -> None:
    """Zarr would leave out chunks that equal the fill value; the manifest has to name them all."""
    run = make_run(MemoryStore(), env)
    value = some_value(run)
    value.params.zero_()
    anchor = write_anchor(run, _place(), value)
    assert any(ref.key.endswith("/params/c/0") for ref in anchor.objects)
    assert same(read_anchor(run, 0, anchor), value)


def test_anyone_can_open_the_weights_with_zarr_alone(tmp_path: Path, env: Env) -> None:
    """A bucket, a path and zarr: attributes say where each tensor is."""
    model = Model()
    run = make_run(LocalStore(tmp_path / "bucket"), env, model)
    (path,) = (tmp_path / "bucket" / "anchors" / "000000" / "0000").iterdir()
    group: Any = zarr.open_group(path, mode="r")
    assert group.attrs["run_id"] == run.run_id
    assert (group.attrs["fragment"], group.attrs["fragment_version"]) == (0, 0)
    arrays = {"parameter": "params", "float_buffer": "floats", "int_buffer": "ints", "frozen": "frozen"}
    state = model.state_dict()
    seen = set()
    for entry in group.attrs["entries"]:
        flat = group[arrays[entry["role"]]][entry["offset"] : entry["offset"] + int(np.prod(entry["shape"]))]
        assert np.array_equal(flat.reshape(entry["shape"]), state[entry["name"]].numpy())
        seen.add(entry["name"])
    assert seen == set(state)
    array = group["params"]
    assert (str(array.dtype), array.chunks, array.metadata.zarr_format) == ("float32", (14,), 3)
    assert [type(codec).__name__ for codec in array.metadata.codecs] == ["BytesCodec", "ZstdCodec"]


def test_each_of_several_fragments_has_an_anchor_of_its_own(env: Env) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.BatchNorm1d(2))
    run = make_run(MemoryStore(), env, model, num_fragments=3)
    head = run.log.read(0, 0)
    assert head is not None
    binding = ModelBinding(model, run.layout)
    for fragment, entry in enumerate(head.record.fragments):
        assert same(read_fragment(run, entry, fragment), binding.snapshot(fragment))


# outer state


def test_an_outer_state_comes_back_and_none_means_zeros(env: Env) -> None:
    run = make_run(MemoryStore(), env)
    state = OuterState(momentum=torch.randn(14), error=torch.randn(14))
    back = read_state(run, 0, write_state(run, _place(), state))
    assert torch.equal(back.momentum, state.momentum) and torch.equal(back.error, state.error)
    begun = read_state(run, 0, None)
    assert not begun.momentum.any() and not begun.error.any() and begun.momentum.shape == (14,)


def test_an_outer_state_that_is_not_finite_is_not_written(env: Env) -> None:
    run = make_run(MemoryStore(), env)
    with pytest.raises(NonFinite):
        write_state(run, _place(), OuterState(momentum=torch.full((14,), torch.inf), error=torch.zeros(14)))


def test_an_outer_state_of_another_version_is_refused(env: Env) -> None:
    run = make_run(MemoryStore(), env)
    state = write_state(run, _place(3), OuterState.zeros(14))
    with pytest.raises(FormatError):
        read_state(run, 0, State(fragment_version=4, object=state.object))


# reading a fragment


@pytest.fixture
def chain(env: Env) -> Chain:
    run = make_run(FaultyStore(MemoryStore()), env)
    grown = Chain(run)
    grown.values.append(read_anchor(run, 0, grown.start.anchor))
    for codec in ("none", "int8", "none", "int4", "bf16", "none"):
        grown.grow(codec)
    return grown


def _shards_read(chain: Chain) -> list[int]:
    """Fragment versions whose deltas were read since the last call; -1 stands for anything of an anchor."""
    store = chain.run.store
    assert isinstance(store, FaultyStore)
    read = [call.key for call in store.calls if call.verb == "get" and call.key.startswith(("anchors/", "deltas/"))]
    kinds = [-1 if key.startswith("anchors/") else int(key.split("/")[3][:20]) for key in read]
    store.calls.clear()
    return sorted(set(kinds))


def test_a_fragment_is_its_anchor_and_the_deltas_after_it(chain: Chain) -> None:
    for version in range(7):
        assert same(read_fragment(chain.run, chain.entry(version, chain.start.anchor, 1), 0), chain.values[version])


def test_from_a_held_value_only_the_deltas_after_it_are_read(chain: Chain) -> None:
    entry = chain.entry(6, chain.start.anchor, 1)
    for held in range(7):
        before = chain.values[held].clone()
        _shards_read(chain)
        assert same(read_fragment(chain.run, entry, 0, held=(held, chain.values[held])), chain.values[6])
        assert _shards_read(chain) == list(range(held + 1, 7))
        assert same(chain.values[held], before)  # a held value is shared between threads


def test_a_held_value_is_carried_across_a_newer_anchor(chain: Chain) -> None:
    anchor = write_anchor(chain.run, _place(4), chain.values[4])
    entry = chain.entry(6, anchor, 3)
    _shards_read(chain)
    for held, read in ((2, [3, 4, 5, 6]), (3, [4, 5, 6]), (4, [5, 6]), (5, [6]), (6, [])):
        assert same(read_fragment(chain.run, entry, 0, held=(held, chain.values[held])), chain.values[6])
        assert _shards_read(chain) == read
    for held in (0, 1):  # too old for the chain
        assert same(read_fragment(chain.run, entry, 0, held=(held, chain.values[held])), chain.values[6])
        assert _shards_read(chain) == [-1, 5, 6]


def test_a_held_value_from_the_future_is_not_used(chain: Chain) -> None:
    entry = chain.entry(4, chain.start.anchor, 1)
    assert same(read_fragment(chain.run, entry, 0, held=(5, chain.values[5])), chain.values[4])


def test_a_held_value_that_is_wrong_is_noticed(chain: Chain) -> None:
    entry = chain.entry(6, chain.start.anchor, 1)
    with pytest.raises(IntegrityError, match="hash"):
        read_fragment(chain.run, entry, 0, held=(4, chain.values[3]))
    with pytest.raises(IntegrityError, match="hash"):
        read_fragment(chain.run, entry, 0, held=(6, chain.values[5]))


def test_an_entry_with_another_hash_is_noticed(chain: Chain) -> None:
    entry = chain.entry(6, chain.start.anchor, 1)
    lie = "0" * 64
    last = entry.deltas[-1].model_copy(update={"sha256": lie})
    with pytest.raises(IntegrityError, match="hash"):
        read_fragment(chain.run, entry.model_copy(update={"sha256": lie, "deltas": (*entry.deltas[:-1], last)}), 0)


def test_an_object_of_an_old_version_that_is_gone_is_not_found(chain: Chain) -> None:
    entry = chain.entry(6, chain.start.anchor, 1)
    chain.run.store.delete(entry.deltas[2].object.key)
    with pytest.raises(NotFound):
        read_fragment(chain.run, entry, 0)
    assert same(read_fragment(chain.run, entry, 0, held=(3, chain.values[3])), chain.values[6])
    chain.run.store.delete(chain.start.anchor.objects[0].key)
    with pytest.raises(NotFound):
        read_fragment(chain.run, chain.entry(0, chain.start.anchor, 1), 0)


def test_a_delta_under_the_name_of_another_version_is_refused(chain: Chain) -> None:
    """Honest name, size and hash in the manifest, but the shard says that it is another's."""
    store, wrong = chain.run.store, chain.deltas[1].object
    data = store.get(chain.deltas[0].object.key)
    store.put(wrong.key, data, overwrite=True)
    lie = Delta(
        fragment_version=2,
        sha256=chain.deltas[1].sha256,
        object=Ref(key=wrong.key, size=len(data), sha256=hashlib.sha256(data).hexdigest()),
    )
    entry = chain.entry(2, chain.start.anchor, 1)
    with pytest.raises(FormatError, match="not the one that was asked for"):
        read_fragment(chain.run, entry.model_copy(update={"deltas": (entry.deltas[0], lie)}), 0)


# chains


def _entry(version: int, anchor: int, deltas: list[int], *, state: int | None = None, fragment: int = 0) -> FragmentEntry:
    def ref(kind: str, n: int, tail: str) -> Ref:
        return Ref(key=f"{kind}/000000/{fragment:04d}/{n:020d}-{'0' * 16}{tail}", size=1, sha256="0" * 64)

    return FragmentEntry(
        fragment_version=version,
        sha256="0" * 64,
        anchor=Anchor(fragment_version=anchor, objects=(ref("anchors", anchor, "/zarr.json"),)),
        deltas=tuple(Delta(fragment_version=n, sha256="0" * 64, object=ref("deltas", n, ".shard")) for n in deltas),
        state=None if state is None else State(fragment_version=state, object=ref("state", state, ".shard")),
        tokens=0.0,
        rounds={},
        weights=(),
        masses=(),
    )


@given(version=st.integers(0, 6), anchor=st.integers(0, 7), deltas=st.lists(st.integers(1, 7), max_size=7))
@settings(max_examples=400, deadline=None, derandomize=True)
def test_a_chain_is_good_just_if_every_step_to_its_version_has_an_object(version: int, anchor: int, deltas: list[int]) -> None:
    contiguous = deltas == list(range(version + 1 - len(deltas), version + 1))
    good = contiguous and version - len(deltas) <= anchor <= version
    if good:
        check_chain(_entry(version, anchor, deltas), 0)
    else:
        with pytest.raises(FormatError):
            check_chain(_entry(version, anchor, deltas), 0)


@pytest.mark.parametrize("version", range(4))
def test_all_good_chains_are_taken(version: int) -> None:
    for anchor in range(version + 1):
        for first in range(1, anchor + 2):
            check_chain(_entry(version, anchor, list(range(first, version + 1))), 0)


def test_a_chain_of_another_fragment_or_version_is_refused() -> None:
    good = _entry(3, 1, [2, 3], state=3)
    check_chain(good, 0)
    with pytest.raises(FormatError, match="another fragment's"):
        check_chain(good, 1)
    moved = good.deltas[0].model_copy(update={"object": good.deltas[1].object})
    with pytest.raises(FormatError, match="another fragment's"):
        check_chain(good.model_copy(update={"deltas": (moved, good.deltas[1])}), 0)
    with pytest.raises(FormatError, match="newer than its fragment"):
        check_chain(_entry(3, 1, [2, 3], state=4), 0)
    with pytest.raises(FormatError, match="different hashes"):
        check_chain(good.model_copy(update={"sha256": "1" * 64}), 0)
    foreign = good.deltas[0].object.model_copy(update={"key": "units/u/x.shard"})
    with pytest.raises(FormatError, match="another fragment's"):
        check_chain(good.model_copy(update={"deltas": (good.deltas[0].model_copy(update={"object": foreign}), good.deltas[1])}), 0)


# the cheaper way


def _sized(anchor: int, anchor_size: int, first: int, to: int, delta_size: int) -> FragmentEntry:
    digest = "0" * 64
    return FragmentEntry(
        fragment_version=to,
        sha256=digest,
        anchor=Anchor(fragment_version=anchor, objects=(Ref(key="a", size=anchor_size, sha256=digest),)),
        deltas=tuple(
            Delta(fragment_version=version, sha256=digest, object=Ref(key="d", size=delta_size, sha256=digest))
            for version in range(first, to + 1)
        ),
        state=None,
        tokens=0.0,
        rounds={},
        weights=(),
        masses=(),
    )


@pytest.mark.parametrize(
    ("held", "from_held", "read", "size"),
    [
        (None, False, [41, 42], 400 + 2 * 100),  # whoever has nothing begins with the anchor
        (42, True, [], 0),
        (40, True, [41, 42], 2 * 100),
        (37, True, [38, 39, 40, 41, 42], 5 * 100),
        (35, False, [41, 42], 400 + 2 * 100),  # seven deltas would be more
        (19, False, [41, 42], 400 + 2 * 100),  # before the chain
        (43, False, [41, 42], 400 + 2 * 100),  # from the future
    ],
)
def test_a_fragment_is_read_by_deltas_or_from_the_anchor_whichever_is_less(
    held: int | None, from_held: bool, read: list[int], size: int
) -> None:
    mega = 10 << 20
    plan, *_ = plan_read(_sized(40, 400 * mega, 21, 42, 100 * mega), held)
    assert (plan.from_held, [delta.fragment_version for delta in plan.deltas], plan.size) == (from_held, read, size * mega)


def test_requests_count_too() -> None:
    """Twelve tiny deltas are twelve round trips; a tiny anchor and what follows it are fewer."""
    assert plan_read(_sized(40, 100, 21, 42, 10), 38)[0].from_held is False
    assert plan_read(_sized(40, 100, 21, 42, 10), 39)[0].from_held is True


def test_every_way_leads_to_the_same_bits(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ps_diloco.checkpoint, "REQUEST_BYTES", 0)
    for _ in range(20):
        chain.grow("int8")
    entry = chain.entry(26, write_anchor(chain.run, _place(26), chain.values[26]), 1)
    assert {plan_read(entry, held)[0].from_held for held in range(27)} == {False, True}
    for held in range(27):
        _shards_read(chain)
        assert same(read_fragment(chain.run, entry, 0, held=(held, chain.values[held])), chain.values[26])
        assert (_shards_read(chain) == [-1]) == (not plan_read(entry, held)[0].from_held)


def test_where_an_object_of_the_cheaper_way_is_gone_the_other_way_is_taken(chain: Chain) -> None:
    anchor = write_anchor(chain.run, _place(4), chain.values[4])
    entry = chain.entry(6, anchor, 1)
    chain.run.store.delete(chain.deltas[2].object.key)
    assert plan_read(entry, 1)[0].from_held
    assert same(read_fragment(chain.run, entry, 0, held=(1, chain.values[1])), chain.values[6])
    chain.run.store.delete(anchor.objects[0].key)
    assert same(read_fragment(chain.run, entry, 0, held=(3, chain.values[3])), chain.values[6])
    with pytest.raises(NotFound):
        read_fragment(chain.run, entry, 0, held=(1, chain.values[1]))
