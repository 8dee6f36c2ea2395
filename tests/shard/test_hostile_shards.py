"""Shards made by an enemy (format §5.9, §10): every checksum fits, the content does not. Each is refused with the right error, in little memory."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import google_crc32c
import pytest
import torch
from numcodecs.zstd import Zstd

import ps_diloco.shard
from ps_diloco.codecs import CODECS
from ps_diloco.errors import FormatError, IntegrityError, LimitExceeded, NonFinite, UnknownFormat
from ps_diloco.shard import EXACT, FLOAT_CODECS, HEADER_BYTES_MAX, INTEGER, SLACK, Expected, ShardReader, header_bytes_max
from ps_diloco.zstd import compress

RUN_ID = "0123456789abcdef" * 2
OF = "t000000/u/000000/00000000000000000007"
PARAMS = bytes(CODECS["int4"].encode(torch.linspace(-1.0, 1.0, 301)))
INTS = struct.pack("<3q", 1, 2, 3)
EXPECTED: Expected = {"params": (301, FLOAT_CODECS), "floats": (0, EXACT), "ints": (3, INTEGER)}
PEAK_BYTES_MAX = 8 << 20
Change = Callable[[dict[str, Any]], object]


def _section(name: str, codec: str, elements: int, frames: list[bytes]) -> dict[str, Any]:
    return {"name": name, "codec": codec, "elements": elements, "chunks": [[len(f), google_crc32c.value(f)] for f in frames]}


def _header(params: list[bytes], ints: list[bytes], codec: str = "int4") -> dict[str, Any]:
    return {
        "format": 0,
        "kind": "contribution",
        "run_id": RUN_ID,
        "of": OF,
        "fragment": 3,
        "slices": None,
        "sections": [_section("params", codec, 301, params), _section("floats", "none", 0, []), _section("ints", "int64", 3, ints)],
    }


def _pack(text: bytes, frames: list[bytes]) -> bytes:
    return struct.pack("<8sII", b"PSDSHRD0", len(text), google_crc32c.value(text)) + text + b"".join(frames)


def _forged(change: Change = lambda header: None, *, params: bytes | None = None, codec: str = "int4") -> bytes:
    """A shard whose checksums fit. ``params``: the stored frame of the first section."""
    frames = [compress(PARAMS) if params is None else params, compress(INTS)]
    header = _header(frames[:1], frames[1:], codec)
    change(header)
    return _pack(json.dumps(header).encode(), frames)


def _read(data: bytes, expected: Expected = EXPECTED) -> None:
    shard = ShardReader(data, kind="contribution", run_id=RUN_ID, of=OF, fragment=3, expected=expected)
    for name in expected:
        shard.read(name)


@contextmanager
def _flat_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < PEAK_BYTES_MAX
    finally:
        tracemalloc.stop()


def _set(**values: Any) -> Change:
    return lambda header: header.update(values)


def _set_params(**values: Any) -> Change:
    return lambda header: header["sections"][0].update(values)


def _set_chunk(size: int | None = None, crc: int | None = None) -> Change:
    def change(header: dict[str, Any]) -> None:
        chunk = header["sections"][0]["chunks"][0]
        chunk[0] = chunk[0] if size is None else size
        chunk[1] = chunk[1] if crc is None else crc

    return change


def test_the_forger_forges_well() -> None:
    _read(_forged())


HEADERS: dict[str, tuple[Change, type[FormatError]]] = {
    "format of the future": (_set(format=1), UnknownFormat),
    "format as text": (_set(format="0"), UnknownFormat),
    "format as a truth value": (_set(format=False), FormatError),
    "no format": (lambda header: header.pop("format"), UnknownFormat),
    "another kind": (_set(kind="delta"), FormatError),
    "an unknown kind": (_set(kind="pickle"), FormatError),
    "another run": (_set(run_id="f" * 32), FormatError),
    "no run": (_set(run_id=""), FormatError),
    "another contribution": (_set(of=OF[:-1] + "8"), FormatError),
    "another fragment": (_set(fragment=2), FormatError),
    "fragment as a fraction": (_set(fragment=3.0), FormatError),
    "slices": (_set(slices=[[0, 0, 301]]), FormatError),
    "an unknown field": (_set(colour="red"), FormatError),
    "a missing field": (lambda header: header.pop("slices"), FormatError),
    "a section too few": (lambda header: header["sections"].pop(1), FormatError),
    "a section too many": (lambda header: header["sections"].append(_section("more", "none", 0, [])), FormatError),
    "many sections": (lambda header: header["sections"].extend([_section("x", "none", 0, [])] * 100), FormatError),
    "sections in another order": (lambda header: header["sections"].reverse(), FormatError),
    "a section twice": (lambda header: header["sections"].__setitem__(1, header["sections"][0]), FormatError),
    "another section name": (_set_params(name="parameters"), FormatError),
    "more elements": (_set_params(elements=302), FormatError),
    "fewer elements": (_set_params(elements=300), FormatError),
    "no elements": (_set_params(elements=0, chunks=[]), FormatError),
    "a great many elements": (_set_params(elements=2**53), FormatError),
    "too many elements for a count": (_set_params(elements=2**63), FormatError),
    "minus one element": (_set_params(elements=-1), FormatError),
    "an unknown codec": (_set_params(codec="int2"), FormatError),
    "a codec that is not allowed here": (_set_params(codec="int64"), FormatError),
    "another float codec": (_set_params(codec="none"), IntegrityError),
    "no chunk": (_set_params(chunks=[]), FormatError),
    "a chunk too many": (lambda header: header["sections"][0]["chunks"].append([0, 0]), FormatError),
    "1,000 chunks": (lambda header: header["sections"][0]["chunks"].extend([[0, 0]] * 1000), FormatError),
    "50,000 chunks": (lambda header: header["sections"][0]["chunks"].extend([[0, 0]] * 50_000), LimitExceeded),
    "50,000 unknown fields": (lambda header: header.update({f"x{n}": 0 for n in range(50_000)}), LimitExceeded),
    "a chunk of three numbers": (_set_params(chunks=[[1, 2, 3]]), FormatError),
    "a huge chunk": (_set_chunk(size=2**53), LimitExceeded),
    "a chunk of negative size": (_set_chunk(size=-1), FormatError),
    "a chunk just beyond the limit": (_set_chunk(size=len(PARAMS) * 101 // 100 + SLACK + 1), LimitExceeded),
    "a chunk that is a byte too long": (_set_chunk(size=len(compress(PARAMS)) + 1), IntegrityError),
    "another checksum": (_set_chunk(crc=0), IntegrityError),
    "a checksum of 40 bits": (_set_chunk(crc=2**40), IntegrityError),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_says_something_else_is_refused(name: str) -> None:
    change, kind = HEADERS[name]
    data = _forged(change)
    with _flat_memory(), pytest.raises(FormatError) as caught:
        _read(data)
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (b"", FormatError),
        (b"null", UnknownFormat),
        (b"[]", UnknownFormat),
        (b"{}", UnknownFormat),
        (b'{"format":0}', FormatError),
        (b"\xff\xfe{\0", FormatError),
        (b"[" * 10_000, FormatError),
        (b'{"format":0,"x":' * 1000, FormatError),
        (b"[" * 100_000, LimitExceeded),
        (b'{"format":' + b"9" * 5000 + b"}", FormatError),
        (b'{"format":0,"fragment":1e999}', FormatError),
        (b"\x80\x04\x95\x10\0\0\0\0\0\0\0}\x94.", FormatError),  # a pickle
    ],
)
def test_a_header_that_is_no_header_is_refused(text: bytes, kind: type[FormatError]) -> None:
    with _flat_memory(), pytest.raises(FormatError) as caught:
        _read(_pack(text, []))
    assert type(caught.value) is kind


def test_a_header_with_a_key_twice_is_refused() -> None:
    """Two readers could take two meanings from it (format §3)."""
    frames = [compress(PARAMS), compress(INTS)]
    text = json.dumps(_header(frames[:1], frames[1:])).encode()
    for double in (b'"fragment": 2, "fragment": 3', b'"fragment": 3, "fragment": 3'):
        with pytest.raises(FormatError):
            _read(_pack(text.replace(b'"fragment": 3', double), frames))


def test_a_header_in_utf_16_is_refused() -> None:
    frames = [compress(PARAMS), compress(INTS)]
    with pytest.raises(FormatError):
        _read(_pack(json.dumps(_header(frames[:1], frames[1:])).encode("utf-16"), frames))


def test_a_header_length_beyond_the_limit_is_refused_before_it_is_read() -> None:
    for length in (header_bytes_max(2) + 1, HEADER_BYTES_MAX + 1, 2**31, 2**32 - 1):
        with _flat_memory(), pytest.raises(LimitExceeded):
            _read(struct.pack("<8sII", b"PSDSHRD0", length, 0) + bytes(100))
    with pytest.raises(IntegrityError):
        _read(struct.pack("<8sII", b"PSDSHRD0", header_bytes_max(2), 0) + bytes(100))


def test_a_header_as_long_as_allowed_costs_bounded_memory() -> None:
    """Each of its errors is an object of ours, so a header may be only as long as its content needs."""
    text = b'{"format":0,"sections":[' + b"[]," * ((header_bytes_max(2) - 100) // 3) + b"[]]}"
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="does not follow"):
            _read(_pack(text, []))
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_the_longest_honest_header_is_within_the_limit() -> None:
    """A fragment of 2^36 elements has 2^14 chunks."""
    chunks = [[4 << 22, 2**32 - 1]] * (1 << 14)
    header = _header([], [])
    header["of"] = "x" * 2000
    header["sections"][0]["chunks"] = chunks
    assert len(json.dumps(header)) <= header_bytes_max(len(chunks)) <= HEADER_BYTES_MAX
    assert len(json.dumps(header | {"sections": []})) < header_bytes_max(0) // 4


def test_an_object_larger_than_its_content_can_need_is_refused_at_once() -> None:
    data = _forged() + bytes(3 << 20)
    with pytest.raises(LimitExceeded, match="larger than its content can need"):
        _read(data)


@pytest.mark.parametrize("data", [b"", b"PSDSHRD0", b"PSDSHRD1" + bytes(100), b"PK\x03\x04" + bytes(100), b"\x80\x02" + bytes(200)])
def test_other_files_under_a_shards_name_are_no_shards(data: bytes) -> None:
    with pytest.raises(FormatError, match="not a shard"):
        _read(data)


# frames


def _without_size(raw: bytes) -> bytes:
    """A frame of one raw block that states no content size."""
    return b"\x28\xb5\x2f\xfd\x04\x50" + (len(raw) << 3 | 1).to_bytes(3, "little") + raw + bytes(4)


def _lying_bomb() -> bytes:
    """Says that it holds as many bytes as are due, and inflates to 50 million."""
    frame = bytearray(compress(bytes(50_000_000)))
    frame[6:10] = len(PARAMS).to_bytes(4, "little")
    return bytes(frame)


FRAMES: dict[str, bytes] = {
    "nothing": b"",
    "raw bytes": PARAMS,
    "no checksum": bytes(Zstd(level=1, checksum=False).encode(PARAMS)),
    "no content size": _without_size(PARAMS),
    "a byte too few": compress(PARAMS[:-1]),
    "a byte too many": compress(PARAMS + b"\0"),
    "two frames": compress(PARAMS[:100]) + compress(PARAMS[100:]),
    "the frame twice": compress(PARAMS) * 2,
    "rubbish after the frame": compress(PARAMS) + b"rubbish",
    "a bomb that says so": compress(bytes(50_000_000)),
    "a bomb that lies": _lying_bomb(),
    "a size of 2^63": b"\x28\xb5\x2f\xfd\xe4" + (2**63).to_bytes(8, "little") + bytes(20),
    "a dictionary": b"\x28\xb5\x2f\xfd\x25\x01" + compress(PARAMS)[5:],
}


@pytest.mark.parametrize("name", FRAMES)
def test_a_frame_that_is_not_the_one_due_is_refused_in_little_memory(name: str) -> None:
    data = _forged(params=FRAMES[name])
    with _flat_memory(), pytest.raises(FormatError) as caught:
        _read(data)
    assert type(caught.value) is IntegrityError


# values


def _changed(raw: bytes, position: int, value: bytes) -> bytes:
    return raw[:position] + value + raw[position + len(value) :]


VALUES: dict[str, tuple[str, bytes, type[FormatError]]] = {
    "a NaN scale": ("int4", _changed(PARAMS, 0, b"\xc0\x7f"), NonFinite),
    "an infinite scale": ("int4", _changed(PARAMS, 2, b"\x80\x7f"), NonFinite),
    "a negative infinite scale": ("int4", _changed(PARAMS, 2, b"\x80\xff"), NonFinite),
    "a scale whose products overflow": ("int4", _changed(PARAMS, 0, b"\x7f\x7f"), NonFinite),
    "a negative scale": ("int4", _changed(PARAMS, 0, b"\x80\xbf"), FormatError),
    "a low nibble 0": ("int4", _changed(PARAMS, 10, b"\x80"), FormatError),
    "a high nibble 0": ("int4", _changed(PARAMS, 10, b"\x08"), FormatError),
    "a filler that is not zero": ("int4", PARAMS[:-1] + bytes([PARAMS[-1] & 0x0F | 0x90]), FormatError),
    "an int8 of -128": ("int8", b"\x80\x3f\x80\x3f" + b"\0" * 300 + b"\x80", FormatError),
    "a bf16 infinity": ("bf16", b"\0\0" * 300 + b"\x80\x7f", NonFinite),
    "a float32 NaN": ("none", b"\0" * 1200 + struct.pack("<f", float("nan")), NonFinite),
    "float32 infinities that cancel": ("none", struct.pack("<2f", float("inf"), float("-inf")) + b"\0" * 1196, NonFinite),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_that_no_encoder_writes_are_refused(name: str) -> None:
    codec, raw, kind = VALUES[name]
    with pytest.raises(FormatError) as caught:
        _read(_forged(params=compress(raw), codec=codec))
    assert type(caught.value) is kind


def test_a_bad_value_in_the_last_chunk_is_found_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ps_diloco.shard, "CHUNK", 256)
    frames = [compress(CODECS["none"].encode(torch.ones(256))), compress(struct.pack("<45f", *[0.0] * 44, float("nan")))]
    header = _header(frames, [compress(INTS)], "none")
    data = _pack(json.dumps(header).encode(), [*frames, compress(INTS)])
    with pytest.raises(NonFinite):
        _read(data)
