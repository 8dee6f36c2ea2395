"""The shard container (format §5.9): layout on the wire, chunks, and that no damage of any kind goes unseen."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ps_diloco.shard
from ps_diloco.codecs import CODECS
from ps_diloco.errors import FormatError, NonFinite
from ps_diloco.shard import (
    EXACT,
    FLOAT_CODECS,
    INTEGER,
    Expected,
    Section,
    ShardReader,
    decode_section,
    encode_section,
    encode_shard,
    shard_bytes_max,
)
from ps_diloco.zstd import decompress

RUN_ID = "0123456789abcdef" * 2
OF = "t000000/u/000000/00000000000000000007"


def _crc32c(data: bytes) -> int:
    """Castagnoli, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def _encode(sections: list[Section]) -> bytes:
    return encode_shard(sections, kind="contribution", run_id=RUN_ID, of=OF, fragment=3)


def _reader(data: bytes, expected: Expected) -> ShardReader:
    return ShardReader(data, kind="contribution", run_id=RUN_ID, of=OF, fragment=3, expected=expected)


def _small() -> tuple[bytes, Expected]:
    """A shard of about 600 bytes with three sections, one of them empty."""
    generator = torch.Generator().manual_seed(1)
    params, ints = torch.randn(301, generator=generator), torch.arange(3)
    data = _encode(
        [encode_section("params", "int4", params), encode_section("floats", "none", torch.empty(0)), encode_section("ints", "int64", ints)]
    )
    return data, {"params": (301, FLOAT_CODECS), "floats": (0, EXACT), "ints": (3, INTEGER)}


def _read_all(data: bytes, expected: Expected) -> dict[str, torch.Tensor]:
    reader = _reader(data, expected)
    return {name: reader.read(name) for name in expected}


# layout on the wire


def test_the_bytes_are_laid_out_as_the_format_says() -> None:
    """Taken apart with struct and json alone."""
    assert _crc32c(b"123456789") == 0xE3069283
    data, _ = _small()
    magic, length, crc = struct.unpack_from("<8sII", data)
    text = data[16 : 16 + length]
    header = json.loads(text)
    assert magic == b"PSDSHRD0" and crc == _crc32c(text)
    assert {name: header[name] for name in ("format", "kind", "run_id", "of", "fragment", "slices")} == {
        "format": 0,
        "kind": "contribution",
        "run_id": RUN_ID,
        "of": OF,
        "fragment": 3,
        "slices": None,
    }
    assert [(s["name"], s["codec"], s["elements"], len(s["chunks"])) for s in header["sections"]] == [
        ("params", "int4", 301, 1),
        ("floats", "none", 0, 0),
        ("ints", "int64", 3, 1),
    ]
    position = 16 + length
    for section in header["sections"]:
        for size, stated in section["chunks"]:
            assert _crc32c(data[position : position + size]) == stated
            position += size
    assert position == len(data)
    ints = bytes(decompress(data[-header["sections"][2]["chunks"][0][0] :], 24, of="t"))
    assert struct.unpack("<3q", ints) == (0, 1, 2)


def test_equal_values_give_equal_bytes() -> None:
    assert _small()[0] == _small()[0]


# round trips and chunk borders


@pytest.mark.parametrize("codec", sorted(FLOAT_CODECS))
@pytest.mark.parametrize("n", [0, 1, 511, 512, 513, 1024, 1025, 1536])
def test_values_come_back_across_chunk_borders(codec: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ps_diloco.shard, "CHUNK", 512)
    values, decoded = torch.linspace(-1.0, 2.0, n), torch.full((n,), torch.nan)
    section = encode_section("params", codec, values, decoded=decoded)
    assert len(section.frames) == -(-n // 512) and section.size == sum(map(len, section.frames))
    reader = _reader(_encode([section]), {"params": (n, FLOAT_CODECS)})
    assert reader.codec("params") == codec
    assert torch.equal(reader.read("params"), decoded) and torch.equal(decode_section(section), decoded)
    pieces = list(reader.chunks("params"))
    assert [start for start, _ in pieces] == list(range(0, n, 512))
    assert torch.equal(torch.cat([torch.empty(0), *(values for _, values in pieces)]), decoded)
    for start, piece in pieces:  # each chunk is encoded alone
        alone = values[start : start + 512]
        assert torch.equal(piece, CODECS[codec].decode(CODECS[codec].encode(alone), alone.numel()))


def test_a_vector_longer_than_a_chunk_of_the_format_has_two() -> None:
    n = (1 << 22) + 3
    values = torch.arange(n, dtype=torch.float32).remainder_(251.0)
    reader = _reader(_encode([encode_section("params", "bf16", values)]), {"params": (n, FLOAT_CODECS)})
    assert [(start, piece.numel()) for start, piece in reader.chunks("params")] == [(0, 1 << 22), (1 << 22, 3)]
    assert torch.equal(reader.read("params"), values)


@given(sizes=st.lists(st.integers(0, 700), min_size=1, max_size=5), data=st.data())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_any_sections_come_back_in_their_places(sizes: list[int], data: st.DataObject) -> None:
    names = [f"s{index}" for index in range(len(sizes))]
    sections, expected, wanted = [], {}, {}
    for name, n in zip(names, sizes, strict=True):
        codec = data.draw(st.sampled_from(sorted(CODECS)))
        dtype = CODECS[codec].dtype
        values = torch.randint(-50, 50, (n,), generator=torch.Generator().manual_seed(n)).to(dtype)
        wanted[name] = torch.empty(n, dtype=dtype)
        sections.append(encode_section(name, codec, values, decoded=wanted[name]))
        expected[name] = (n, frozenset({codec}))
    found = _read_all(_encode(sections), expected)
    assert all(torch.equal(found[name], wanted[name]) for name in names)


def test_a_value_that_is_not_finite_is_refused_in_any_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ps_diloco.shard, "CHUNK", 256)
    values = torch.ones(600)
    values[599] = torch.inf
    with pytest.raises(NonFinite):
        encode_section("params", "int8", values)


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_no_honest_shard_is_larger_than_a_reader_fetches(codec: str) -> None:
    n = 100_000
    noise = torch.from_numpy(np.random.default_rng(0).integers(-(2**62), 2**62, n))
    values = noise if codec == "int64" else torch.randn(n, generator=torch.Generator().manual_seed(0))
    data = _encode([encode_section("params", codec, values)])
    assert len(data) <= shard_bytes_max({"params": (n, frozenset({codec}))})


# damage


def test_every_flipped_bit_is_noticed() -> None:
    data, expected = _small()
    assert 500 < len(data) < 900
    _read_all(data, expected)
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError):
            _read_all(bytes(flipped), expected)


def test_every_truncation_is_noticed() -> None:
    data, expected = _small()
    for length in range(len(data)):
        with pytest.raises(FormatError):
            _read_all(data[:length], expected)


def test_bytes_put_in_or_taken_out_anywhere_are_noticed() -> None:
    data, expected = _small()
    for position in range(len(data) + 1):
        with pytest.raises(FormatError):
            _read_all(data[:position] + b"\0" + data[position:], expected)
        with pytest.raises(FormatError):
            _read_all(data[:position] + data[:40] + data[position:], expected)
        if position < len(data):
            with pytest.raises(FormatError):
                _read_all(data[:position] + data[position + 1 :], expected)


def test_exchanged_chunks_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal sizes, so that only the checksum of each place tells."""
    monkeypatch.setattr(ps_diloco.shard, "CHUNK", 256)
    section = encode_section("params", "none", torch.cat([torch.full((256,), 1.0), torch.full((256,), 2.0)]))
    assert len(section.frames[0]) == len(section.frames[1])
    data = _encode([section])
    first, second = section.frames
    swapped = data.replace(first + second, second + first)
    assert swapped != data
    with pytest.raises(FormatError, match="checksum"):
        _read_all(swapped, {"params": (512, FLOAT_CODECS)})


def test_damage_in_one_chunk_leaves_the_chunks_before_it_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ps_diloco.shard, "CHUNK", 256)
    data = bytearray(_encode([encode_section("params", "none", torch.arange(512.0))]))
    data[-1] ^= 1
    chunks = _reader(bytes(data), {"params": (512, FLOAT_CODECS)}).chunks("params")
    assert torch.equal(next(chunks)[1], torch.arange(256.0))
    with pytest.raises(FormatError):
        next(chunks)
