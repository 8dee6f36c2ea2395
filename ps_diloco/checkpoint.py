"""Anchors, deltas and outer state: the data objects of a version (format §5.9, §5.10).

A fragment at a version is its anchor plus the deltas after it. The chain also keeps the deltas since the previous anchor, so that whoever holds an older
value reads only the deltas it lacks, across an anchor too::

    value = read_fragment(run, manifest.fragments[3], 3)
    value = read_fragment(run, newer.fragments[3], 3, held=(7, value))
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import zarr
from zarr.abc.store import Store as ZarrStore
from zarr.codecs import BytesCodec, ZstdCodec
from zarr.core.buffer import Buffer, default_buffer_prototype
from zarr.core.chunk_key_encodings import DefaultChunkKeyEncoding
from zarr.storage import MemoryStore as ZarrMemory

from ps_diloco import keys
from ps_diloco.errors import FormatError, IntegrityError, NotFound
from ps_diloco.fragment import FragmentValue
from ps_diloco.layout import FragmentSize
from ps_diloco.outer import OuterState
from ps_diloco.records import Anchor, Delta, FragmentEntry, Ref, State
from ps_diloco.shard import (
    CHUNK,
    EXACT,
    FLOAT_CODECS,
    INTEGER,
    Expected,
    Kind,
    Section,
    ShardReader,
    encode_section,
    encode_shard,
    shard_bytes_max,
)
from ps_diloco.store.refs import fetch, put_data
from ps_diloco.zstd import FAST, LEVEL, declared_size

if TYPE_CHECKING:
    from ps_diloco.run import OpenRun

log = logging.getLogger(__name__)

ZARR_JSON_MAX = 4 << 20
REQUEST_BYTES = 1 << 20
"""What a request costs beside its bytes: some 30 ms at some 300 Mbit/s."""
CODECS = (BytesCodec(endian="little"), ZstdCodec(level=LEVEL, checksum=True))
"""Of every array of an anchor. A reader takes no others: their decoders have no bound."""
DTYPES = {"params": torch.float32, "floats": torch.float32, "ints": torch.int64, "frozen": torch.float32}


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Which object of a version: goes into its key and its header."""

    timeline: int
    fragment: int
    fragment_version: int


def update_sections(size: FragmentSize) -> Expected:
    """Sections of a contribution and of a delta: pseudo-gradient or update, then buffers (format §5.9)."""
    return {"params": (size.elements, FLOAT_CODECS), "floats": (size.floats, EXACT), "ints": (size.ints, INTEGER)}


def buffer_sections(floats_B: torch.Tensor, ints_I: torch.Tensor) -> list[Section]:
    return [encode_section("floats", "none", floats_B), encode_section("ints", "int64", ints_I)]


def write_anchor(run: OpenRun, place: Place, value: FragmentValue) -> Anchor:
    """Write a fragment's full value as a Zarr v3 group. Does I/O; what a crash leaves is an orphan under a unique name."""
    objects: dict[str, Buffer] = {}
    group = zarr.create_group(store=ZarrMemory(objects), zarr_format=3)
    entries = [entry.model_dump(mode="json") for entry in run.layout.entries if entry.fragment == place.fragment]
    group.update_attributes(
        {"run_id": run.run_id, "fragment": place.fragment, "fragment_version": place.fragment_version, "entries": entries}
    )
    for name in DTYPES:
        array = getattr(value, name)
        if array.numel():
            target = group.create_array(
                name,
                shape=(array.numel(),),
                dtype=array.numpy().dtype,
                chunks=(min(CHUNK, array.numel()),),
                serializer=CODECS[0],
                compressors=CODECS[1],
                filters=None,
                config={"write_empty_chunks": True},
            )
            target[:] = array.numpy()
    prefix = keys.anchor(place.timeline, place.fragment, place.fragment_version, run.env.entropy.attempt_id())
    refs = tuple(put_data(run.store, run.env, prefix + key, objects[key].to_bytes()) for key in sorted(objects))
    return Anchor(fragment_version=place.fragment_version, objects=refs)


def read_anchor(run: OpenRun, fragment: int, anchor: Anchor) -> FragmentValue:
    """Read an anchor back, each object checked by size and hash, each array by shape, dtype and chunks before it is decoded."""
    size = run.layout.fragments[fragment]
    value = FragmentValue.zeros(size)
    objects: dict[str, Buffer] = {}
    prefix = anchor.objects[0].key.split("/")[:4]
    for ref in anchor.objects:
        parts = ref.key.split("/")
        if parts[:4] != prefix or keys.parse_fragment_object(ref.key) is None:
            raise FormatError("objects of an anchor stand under different prefixes", key=ref.key)
        name = "/".join(parts[4:])
        limit = ZARR_JSON_MAX + 512 * len(run.layout.entries) if name.endswith("zarr.json") else 9 * CHUNK
        objects[name] = default_buffer_prototype().buffer.from_bytes(fetch(run.store, ref, max_bytes=limit))
    where = "/".join(prefix)
    store: ZarrStore = ZarrMemory(objects, read_only=True)
    try:
        group = zarr.open_group(store=store, mode="r", zarr_format=3)
        stated = {name: group.attrs.get(name) for name in ("run_id", "fragment", "fragment_version")}
        if stated != {"run_id": run.run_id, "fragment": fragment, "fragment_version": anchor.fragment_version}:
            raise IntegrityError("anchor is not the one that was asked for", key=where, stated=str(stated)[:200])
        for name, dtype in DTYPES.items():
            target = getattr(value, name)
            if target.numel():
                _read_array(group[name], target, objects, f"{where}/{name}", dtype)
    except (KeyError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise FormatError("anchor is not the Zarr group that the format asks for", key=where, cause=str(error)[:200]) from None
    return value


def _read_array(array: Any, target: torch.Tensor, objects: dict[str, Buffer], where: str, dtype: torch.dtype) -> None:
    chunk = min(CHUNK, target.numel())
    if array.shape != (target.numel(),) or array.chunks != (chunk,) or array.dtype != target.numpy().dtype:
        raise FormatError(
            "array of an anchor has another shape, dtype or chunk size",
            key=where,
            shape=array.shape,
            dtype=array.dtype,
            chunks=array.chunks,
        )
    if array.metadata.codecs != CODECS or array.metadata.chunk_key_encoding != DefaultChunkKeyEncoding(separator="/"):
        raise FormatError(
            "array of an anchor is encoded otherwise than the format says", key=where, codecs=str(array.metadata.codecs)[:200]
        )
    for index in range(-(-target.numel() // chunk)):
        frame = objects.get(f"{array.basename}/c/{index}")
        if frame is None or declared_size(frame.to_bytes()) != chunk * dtype.itemsize:
            raise FormatError("chunk of an anchor is absent or does not state its size", key=where, chunk=index)
    target.copy_(torch.from_numpy(array[:]))


def write_delta(run: OpenRun, place: Place, *, params: Section, floats_B: torch.Tensor, ints_I: torch.Tensor) -> Ref:
    """Write the update that leads to ``place.fragment_version``. Does I/O."""
    return _write_shard(run, "delta", place, [params, *buffer_sections(floats_B, ints_I)])


def write_state(run: OpenRun, place: Place, state: OuterState, *, threads: int = 1) -> State:
    """Write momentum and error as they are after the step to ``place.fragment_version``. Does I/O."""
    arrays = {"momentum": state.momentum, "error": state.error}
    sections = [encode_section(name, "none", array, threads=threads, level=FAST) for name, array in arrays.items()]
    return State(fragment_version=place.fragment_version, object=_write_shard(run, "state", place, sections))


def read_state(run: OpenRun, fragment: int, state: State | None) -> OuterState:
    """Outer state of a fragment; zeros for None (fragment version 0)."""
    elements = run.layout.fragments[fragment].elements
    if state is None:
        return OuterState.zeros(elements)
    expected: Expected = {"momentum": (elements, EXACT), "error": (elements, EXACT)}
    shard = _read_shard(run, "state", fragment, state.fragment_version, state.object, expected)
    return OuterState(momentum=shard.read("momentum"), error=shard.read("error"))


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadPlan:
    """How to get to a fragment version: from the value that is held or from the anchor, and then by ``deltas`` in order."""

    from_held: bool
    deltas: tuple[Delta, ...]
    size: int
    """Bytes to read."""


def plan_read(entry: FragmentEntry, held: int | None) -> tuple[ReadPlan, ...]:
    """The ways to a fragment's version for who holds fragment version ``held`` (None: nothing), the cheapest first, requests counted as bytes. Pure."""
    after_anchor = tuple(delta for delta in entry.deltas if delta.fragment_version > entry.anchor.fragment_version)
    objects = [*entry.anchor.objects, *(delta.object for delta in after_anchor)]
    from_anchor = ReadPlan(from_held=False, deltas=after_anchor, size=sum(ref.size for ref in objects))
    first = entry.deltas[0].fragment_version if entry.deltas else entry.fragment_version + 1
    if held is None or not first <= held + 1 <= entry.fragment_version + 1:
        return (from_anchor,)
    after_held = tuple(delta for delta in entry.deltas if delta.fragment_version > held)
    from_held = ReadPlan(from_held=True, deltas=after_held, size=sum(delta.object.size for delta in after_held))
    cheaper = from_held.size + REQUEST_BYTES * len(after_held) <= from_anchor.size + REQUEST_BYTES * len(objects)
    return (from_held, from_anchor) if cheaper else (from_anchor, from_held)


def read_fragment(run: OpenRun, entry: FragmentEntry, fragment: int, *, held: tuple[int, FragmentValue] | None = None) -> FragmentValue:
    """The fragment's value in a version, as new arrays, checked against its hash.

    ``held`` = (fragment version, value) is the starting point where the chain still reaches it and that is less to read (:func:`plan_read`). Raises
    :class:`NotFound` when an object of an old version is gone, :class:`FormatError` when something is not what the manifest says. Does I/O.
    """
    check_chain(entry, fragment)
    cheapest, *others = plan_read(entry, None if held is None else held[0])
    try:
        value = _by(cheapest, run, fragment, entry, held)
    except (NotFound, FormatError) as error:
        if not others:
            raise
        log.warning("fragment %d is read in another way, since an object of the cheapest one cannot be used: %s", fragment, error)
        value = _by(others[0], run, fragment, entry, held)
    if value.sha256() != entry.sha256:
        raise IntegrityError(
            "fragment does not have the hash that the manifest states", fragment=fragment, fragment_version=entry.fragment_version
        )
    return value


def read_update(run: OpenRun, fragment: int, delta: Delta) -> torch.Tensor:
    """u of a delta, float32 [F]. Does I/O."""
    expected = update_sections(run.layout.fragments[fragment])
    return _read_shard(run, "delta", fragment, delta.fragment_version, delta.object, expected).read("params")


def _by(plan: ReadPlan, run: OpenRun, fragment: int, entry: FragmentEntry, held: tuple[int, FragmentValue] | None) -> FragmentValue:
    value = held[1].clone() if held is not None and plan.from_held else read_anchor(run, fragment, entry.anchor)
    for delta in plan.deltas:
        apply_delta(run, fragment, delta, value)
    return value


def apply_delta(run: OpenRun, fragment: int, delta: Delta, value: FragmentValue) -> None:
    """Theta <- Theta - u, buffers <- new buffers, in place. Does I/O."""
    shard = _read_shard(run, "delta", fragment, delta.fragment_version, delta.object, update_sections(run.layout.fragments[fragment]))
    shard.visit("params", lambda start, update_P: value.params[start : start + update_P.numel()].sub_(update_P))
    value.floats.copy_(shard.read("floats"))
    value.ints.copy_(shard.read("ints"))


def check_chain(entry: FragmentEntry, fragment: int) -> None:
    """Raise :class:`FormatError` unless anchor and deltas are lead to the fragment version without a gap, under fitting names."""
    steps = [delta.fragment_version for delta in entry.deltas]
    first = steps[0] if steps else entry.fragment_version + 1
    if (
        steps != list(range(first, entry.fragment_version + 1))
        or not first <= entry.anchor.fragment_version + 1 <= entry.fragment_version + 1
    ):
        raise FormatError(
            "chain of a fragment has a gap",
            fragment=fragment,
            anchor=entry.anchor.fragment_version,
            deltas=steps[:40],
            to=entry.fragment_version,
        )
    if entry.deltas and entry.deltas[-1].sha256 != entry.sha256:
        raise FormatError("last delta and fragment state different hashes", fragment=fragment, fragment_version=entry.fragment_version)
    if (entry.state.fragment_version if entry.state else 0) > entry.fragment_version:
        raise FormatError("outer state is newer than its fragment", fragment=fragment, fragment_version=entry.fragment_version)
    for ref, version in _named(entry):
        place = keys.parse_fragment_object(ref.key)
        if place is None or place[1:] != (fragment, version):
            raise FormatError(
                "object of a fragment stands under another fragment's or version's name",
                key=ref.key,
                fragment=fragment,
                fragment_version=version,
            )


def _named(entry: FragmentEntry) -> Iterator[tuple[Ref, int]]:
    for ref in entry.anchor.objects:
        yield ref, entry.anchor.fragment_version
    for delta in entry.deltas:
        yield delta.object, delta.fragment_version
    if entry.state is not None:
        yield entry.state.object, entry.state.fragment_version


def _write_shard(run: OpenRun, kind: Kind, place: Place, sections: Sequence[Section]) -> Ref:
    name = keys.fragment_object_name(place.timeline, place.fragment, place.fragment_version)
    data = encode_shard(sections, kind=kind, run_id=run.run_id, of=name, fragment=place.fragment)
    build = keys.delta if kind == "delta" else keys.state
    return put_data(run.store, run.env, build(place.timeline, place.fragment, place.fragment_version, run.env.entropy.attempt_id()), data)


def _read_shard(run: OpenRun, kind: Kind, fragment: int, fragment_version: int, ref: Ref, expected: Expected) -> ShardReader:
    place = keys.parse_fragment_object(ref.key)
    if place is None:
        raise FormatError("not the key of a fragment's object", key=ref.key)
    data = fetch(run.store, ref, max_bytes=shard_bytes_max(expected))
    name = keys.fragment_object_name(place[0], fragment, fragment_version)
    return ShardReader(data, kind=kind, run_id=run.run_id, of=name, fragment=fragment, expected=expected)
