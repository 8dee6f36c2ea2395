"""Anchors made by an enemy (format §5.10, §10): every object has the size and hash that the manifest names, the content is not what is due."""

from __future__ import annotations

import json
import tracemalloc
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_diloco.checkpoint import Place, read_anchor, write_anchor
from ps_diloco.env import Env, SeededEntropy, SystemClock
from ps_diloco.errors import FormatError, IntegrityError, LimitExceeded, NotFound
from ps_diloco.fragment import FragmentValue
from ps_diloco.records import Anchor
from ps_diloco.run import OpenRun
from ps_diloco.store import MemoryStore
from ps_diloco.zstd import compress
from tests.shard.anchored import body, make_run, replaced, same, some_value


class Victim:
    """A run, an anchor of its fragment 0 and what it holds."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.run: OpenRun = make_run(self.store, Env(clock=SystemClock(), entropy=SeededEntropy(1)))
        self.value: FragmentValue = some_value(self.run)
        self.anchor: Anchor = write_anchor(self.run, Place(timeline=0, fragment=0, fragment_version=3), self.value)

    def read_with(self, name: str, data: bytes | None) -> None:
        assert same(read_anchor(self.run, 0, self.anchor), self.value)
        read_anchor(self.run, 0, replaced(self.store, self.anchor, name, data))


@pytest.fixture
def victim() -> Victim:
    return Victim()


def test_a_damaged_chunk_is_an_integrity_error(victim: Victim) -> None:
    ref = next(ref for ref in victim.anchor.objects if ref.key.endswith("params/c/0"))
    data = victim.store.get(ref.key)
    for position in range(len(data)):
        victim.store.put(ref.key, data[:position] + bytes([data[position] ^ 0x10]) + data[position + 1 :], overwrite=True)
        with pytest.raises(IntegrityError):
            read_anchor(victim.run, 0, victim.anchor)
    for other in (b"", data[:-1], data + b"\0"):
        victim.store.put(ref.key, other, overwrite=True)
        with pytest.raises(FormatError):
            read_anchor(victim.run, 0, victim.anchor)


@pytest.mark.parametrize("name", ["params/c/0", "ints/c/0", "params/zarr.json", "zarr.json"])
def test_an_object_that_is_gone_is_not_found(victim: Victim, name: str) -> None:
    victim.store.delete(next(ref.key for ref in victim.anchor.objects if ref.key.split("/", 4)[4] == name))
    with pytest.raises(NotFound):
        read_anchor(victim.run, 0, victim.anchor)


@pytest.mark.parametrize(
    "name", ["params/c/0", "floats/c/0", "ints/c/0", "frozen/c/0", "frozen/zarr.json", "params/zarr.json", "zarr.json"]
)
def test_an_object_that_is_not_named_is_a_format_error(victim: Victim, name: str) -> None:
    """Zarr itself would read an absent chunk as zeros."""
    with pytest.raises(FormatError):
        victim.read_with(name, None)


ARRAYS: dict[str, dict[str, Any]] = {
    "longer": {"shape": [15]},
    "shorter": {"shape": [13]},
    "huge": {"shape": [2**60]},
    "huge in one chunk": {"shape": [2**60], "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2**60]}}},
    "negative": {"shape": [-14]},
    "of two dimensions": {"shape": [2, 7], "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 7]}}},
    "of no dimension": {"shape": [], "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": []}}},
    "in smaller chunks": {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [7]}}},
    "in larger chunks": {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2**40]}}},
    "in chunks of nothing": {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0]}}},
    "of float64": {"data_type": "float64"},
    "of int32": {"data_type": "int32"},
    "of complex64": {"data_type": "complex64", "fill_value": [0, 0]},
    "of objects": {"data_type": "object", "fill_value": None},
    "of text": {"data_type": "string", "fill_value": ""},
    "big-endian": {"codecs": [{"name": "bytes", "configuration": {"endian": "big"}}, {"name": "zstd", "configuration": {"level": 1, "checksum": True}}]},
    "not compressed": {"codecs": [{"name": "bytes", "configuration": {"endian": "little"}}]},
    "of unknown codecs": {"codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "pickle"}]},
    "with another name for a chunk": {"chunk_key_encoding": {"name": "v2", "configuration": {"separator": "/"}}},
    "with an unknown field": {"colour": "red"},
    "a group": {"node_type": "group"},
    "of zarr 2": {"zarr_format": 2},
    "of zarr 9": {"zarr_format": 9},
}  # fmt: skip


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_that_is_described_otherwise_is_a_format_error(victim: Victim, name: str) -> None:
    described = json.loads(body(victim.store, victim.anchor, "params/zarr.json"))
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            victim.read_with("params/zarr.json", json.dumps(described | ARRAYS[name]).encode())
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["params/zarr.json", "zarr.json"])
@pytest.mark.parametrize(
    "data", [b"", b"null", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"zarr_format":3}', b'{"zarr_format":3,"node_type":"array"}']
)
def test_metadata_that_is_rubbish_is_a_format_error(victim: Victim, name: str, data: bytes) -> None:
    with pytest.raises(FormatError):
        victim.read_with(name, data)


@pytest.mark.parametrize("change", [{"run_id": "0" * 32}, {"fragment": 1}, {"fragment_version": 4}, {"fragment_version": "3"}, {}])
def test_an_anchor_that_says_it_is_another_is_refused(victim: Victim, change: dict[str, Any]) -> None:
    described = json.loads(body(victim.store, victim.anchor, "zarr.json"))
    described["attributes"] = described["attributes"] | change if change else {}
    with pytest.raises(IntegrityError, match="not the one that was asked for"):
        victim.read_with("zarr.json", json.dumps(described).encode())


def test_metadata_beyond_its_limit_is_not_fetched(victim: Victim) -> None:
    with pytest.raises(LimitExceeded):
        victim.read_with("params/zarr.json", b" " * (5 << 20))


@pytest.mark.parametrize(
    "frame",
    [compress(bytes(50_000_000)), compress(bytes(4 * 13)), compress(bytes(4 * 15)), b"", bytes(56), compress(bytes(28)) * 2],
    ids=["bomb", "short", "long", "nothing", "raw", "two frames"],
)
def test_a_chunk_of_another_size_is_refused_in_little_memory(victim: Victim, frame: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            victim.read_with("params/c/0", frame)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_chunk_that_lies_about_its_size_is_refused_in_little_memory(victim: Victim) -> None:
    bomb = bytearray(compress(bytes(50_000_000)))
    bomb[6:10] = (56).to_bytes(4, "little")
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            victim.read_with("params/c/0", bytes(bomb))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("inner", ["gzip", "zstd"])
def test_a_bomb_behind_a_second_codec_is_refused_in_little_memory(victim: Victim, inner: str) -> None:
    """The outer frame holds as many bytes as are due, and they are a stream that inflates to 50 million."""
    if inner == "gzip":
        packer = zlib.compressobj(9, zlib.DEFLATED, 31)
        raw = packer.compress(bytes(50_000_000)) + packer.flush()
        configuration: dict[str, Any] = {"level": 1}
    else:
        raw, configuration = compress(bytes(50_000_000)), {"level": 1, "checksum": True}
    outer = {"name": "zstd", "configuration": {"level": 1, "checksum": True}}
    described = json.loads(body(victim.store, victim.anchor, "params/zarr.json"))
    described["codecs"] = [described["codecs"][0], {"name": inner, "configuration": configuration}, outer]
    victim.anchor = replaced(victim.store, victim.anchor, "params/zarr.json", json.dumps(described).encode())
    for frame in (compress(raw), compress(raw[:56])):
        tracemalloc.start()
        try:
            with pytest.raises(FormatError):
                read_anchor(victim.run, 0, replaced(victim.store, victim.anchor, "params/c/0", frame))
            assert tracemalloc.get_traced_memory()[1] < 8 << 20
        finally:
            tracemalloc.stop()


def test_objects_of_another_anchor_are_refused(victim: Victim) -> None:
    other = write_anchor(victim.run, Place(timeline=0, fragment=0, fragment_version=3), victim.value)
    mixed = Anchor(fragment_version=3, objects=(*victim.anchor.objects[:-1], other.objects[-1]))
    with pytest.raises(FormatError, match="different prefixes"):
        read_anchor(victim.run, 0, mixed)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "configuration", "x"]), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ("shape", "data_type", "chunk_grid", "chunk_key_encoding", "fill_value", "codecs", "attributes", "zarr_format", "node_type")


@given(field=st.sampled_from([*FIELDS, "storage_transformers", "dimension_names", "consolidated_metadata"]), value=JSON, root=st.booleans())
@settings(max_examples=80, deadline=None, derandomize=True)
def test_metadata_with_anything_in_it_is_read_rightly_or_a_format_error(field: str, value: object, root: bool) -> None:
    victim = Victim()
    name = "zarr.json" if root else "params/zarr.json"
    described = json.loads(body(victim.store, victim.anchor, name)) | {field: value}
    try:
        found = read_anchor(victim.run, 0, replaced(victim.store, victim.anchor, name, json.dumps(described).encode()))
    except FormatError:
        return
    assert same(found, victim.value)
